"""Lists, requests and releases a Spark application's executors, finds the executor of a job, and places a job's task.

It uses the JVM, because pyspark offers none of this. An error here affects a receiver's placement, not its start.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from headrace.receiver.placement import Executor, Location

if TYPE_CHECKING:
    from pyspark import RDD, SparkContext


logger = logging.getLogger(__name__)

# More than any ``spark.task.maxFailures``, which is 4 by default.
_MAX_TRIES = 1_000
DRIVER = "driver"
"""The executor's id of tasks that run in the driver, in local mode."""


def executors_of(spark_context: SparkContext) -> list[Executor]:
    """The live executors; none in local mode, where the driver runs the tasks."""
    spark: Any = spark_context._jsc.sc()
    blocks = spark.env().blockManager().master().getMemoryStatus().keysIterator()
    executors = []
    while blocks.hasNext():
        manager = blocks.next()
        if manager.executorId() != DRIVER:
            executors.append(Executor(str(manager.host()), str(manager.executorId())))
    return executors


def task_slots(spark_context: SparkContext) -> int:
    """How many tasks the live executors can run at once, including those that are running."""
    spark: Any = spark_context._jsc.sc()
    return int(spark.maxNumConcurrentTasks(spark.resourceProfileManager().defaultResourceProfile()))


def live_executor_ids(spark_context: SparkContext) -> list[str]:
    """The ids of the executors that take tasks. Those that are being killed or decommissioned are left out."""
    spark: Any = spark_context._jsc.sc()
    backend, ids = spark.schedulerBackend(), spark.getExecutorIds().iterator()
    live = []
    while ids.hasNext():
        executor_id = str(ids.next())
        if backend.isExecutorActive(executor_id):
            live.append(executor_id)
    return live


def request_total_executors(spark_context: SparkContext, total: int) -> bool:
    """Request that the application has ``total`` executors, including those it has. None is killed if it has more.

    Returns whether the cluster manager accepted it. Waits for its answer, up to ``spark.network.timeout``.
    """
    jvm: Any = spark_context._jvm
    no_hosts = jvm.PythonUtils.toScalaMap({})
    return bool(spark_context._jsc.sc().requestTotalExecutors(total, 0, no_hosts))


def release_executor(spark_context: SparkContext, executor_id: str) -> bool:
    """Kill an executor, and request one less. Its tasks run again elsewhere, and do not count as failed.

    With ``spark.decommission.enabled`` it is decommissioned instead: it takes no more tasks and ends after its last.
    Returns whether it was accepted. Waits for the cluster manager's answer as `request_total_executors` does.
    """
    spark: Any = spark_context._jsc.sc()
    if str(spark_context.getConf().get("spark.decommission.enabled")).lower() != "true":
        return bool(spark.killExecutor(executor_id))
    jvm: Any = spark_context._jvm
    no_host = getattr(getattr(jvm, "scala.None$"), "MODULE$")
    reason = jvm.org.apache.spark.scheduler.ExecutorDecommissionInfo("headrace releases it", no_host)
    return bool(spark.schedulerBackend().decommissionExecutor(executor_id, reason, True, False))


def executor_of_group(spark_context: SparkContext, group: str) -> Executor | None:
    """The executor that runs the single task of the group's job; None before it runs."""
    store: Any = spark_context._jsc.sc().statusStore()
    tracker = spark_context.statusTracker()
    for job_id in tracker.getJobIdsForGroup(group):
        job = tracker.getJobInfo(job_id)
        for stage_id in job.stageIds if job is not None else ():
            tasks = store.taskList(int(stage_id), 0, 10).iterator()
            while tasks.hasNext():
                task = tasks.next()
                if task.status() == "RUNNING":
                    return Executor(str(task.host()), str(task.executorId()))
    return None


def first_failure_of_group(spark_context: SparkContext, group: str) -> str | None:
    """The text with which Spark reports the first failure of the group's single task; None if it has not failed.

    Spark repeats a failed task. The job's own error is that of the last try.
    """
    store: Any = spark_context._jsc.sc().statusStore()
    tracker = spark_context.statusTracker()
    failures: dict[int, str] = {}
    for job_id in tracker.getJobIdsForGroup(group):
        job = tracker.getJobInfo(job_id)
        for stage_id in job.stageIds if job is not None else ():
            # Each try is a task of its own. A list of fewer has the last ones.
            tasks = store.taskList(int(stage_id), 0, _MAX_TRIES).iterator()
            while tasks.hasNext():
                task = tasks.next()
                if task.errorMessage().isDefined():
                    failures[int(task.taskId())] = str(task.errorMessage().get())
    return failures[min(failures)] if failures else None


def placed(spark_context: SparkContext, item: Any, locations: Sequence[Location]) -> RDD[Any]:
    """An RDD of one partition with ``item``, to be computed at one of ``locations``.

    It is computed anywhere if there are no locations, or if no slot there is free within ``spark.locality.wait``.
    """
    from pyspark import RDD
    from pyspark.serializers import CPickleSerializer

    if not locations:
        return spark_context.parallelize([item], 1)
    jvm: Any = spark_context._jvm
    serializer = CPickleSerializer()
    preferred = jvm.PythonUtils.toSeq([_location(location) for location in locations])
    pair = getattr(jvm, "scala.Tuple2")(bytearray(serializer.dumps(item)), preferred)  # type: ignore[no-untyped-call]
    any_class = getattr(getattr(jvm, "scala.reflect.ClassTag$"), "MODULE$").Any()
    rdd = spark_context._jsc.sc().makeRDD(jvm.PythonUtils.toSeq([pair]), any_class)
    return RDD(rdd.toJavaRDD(), spark_context, serializer)


def _location(location: Location) -> str:
    if isinstance(location, str):
        return location
    # Spark splits such a name at its underscores, so a host with one is given without the executor's id.
    if "_" in location.host:
        return location.host
    return f"executor_{location.host}_{location.executor_id}"
