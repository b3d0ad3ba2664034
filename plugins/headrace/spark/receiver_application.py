"""The receiver job's Spark application: its settings, its start and warm-up, its Spark Connect server.

In a graceful stop, after the receivers have ended, `BatchDrain` waits for the batches that still need the application.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.errors import HeadraceError
from headrace.ledger import BatchState
from headrace.ledger.errors import LedgerUnavailableError
from headrace.receiver.placement import least_executors
from headrace.spark.executors import task_slots
from headrace.spark.packaging import connections_conf, executors_path, send_code, send_connections
from headrace.spark.sessions import (
    CONNECT_PLUGIN,
    REPLACED_BY,
    current_versions,
    default_conf,
    given_conf,
    is_local_master,
    prepare_environment,
    remote_session,
)
from headrace.spark.termination import under_spark_submit
from headrace.stream.secrets import HIDDEN_NAMES

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from headrace.ledger.tables import JobLease, JobRow
    from headrace.stream import Stream
    from headrace.stream_context import StreamContext


logger = logging.getLogger(__name__)

TOKEN_VARIABLE = "SPARK_CONNECT_AUTHENTICATE_TOKEN"  # noqa: S105 - the variable's name, not a token

# As in Spark Streaming's dummy job, which ensures that executors are up before receivers are placed.
_WARM_UP_TASKS = 50
_STANDALONE = "spark://"
_MASTER_SECONDS = 10.0
SLOTS_SECONDS = 60.0
"""How long to wait for enough executors of a cluster, after the first one has registered."""
# Spark's own pattern, extended with more names of secrets.
# Spark's own list, and that of definitions.
_REDACTION = f"(?i)token|{HIDDEN_NAMES}"


class TaskSlotsError(HeadraceError):
    """The application cannot run the receivers and a batch at the same time."""


class MasterUnreachableError(HeadraceError):
    """No master of the standalone cluster accepts a connection."""


class NoClusterError(HeadraceError):
    """The stream allocates executors, and its master has none: driver and tasks are one process."""


class ExecutorVersionError(HeadraceError):
    """An executor has other versions than the driver, or lacks a library that headrace needs."""


class PythonUnknownError(HeadraceError):
    """The JVM was started without a setting for its workers' Python."""


@dataclass(frozen=True, slots=True)
class ReceiverApplication:
    """A started application.

    ``connect_url`` is None if batches run in their own applications. ``batch_slots``: the task slots left for batches.
    """

    spark: SparkSession
    application_id: str
    master: str
    ui_url: str | None
    connect_url: str | None
    task_slots: int
    batch_slots: int

    def attributes(self) -> dict[str, Any]:
        """The application's attributes for the job's lease."""
        return {
            "application_id": self.application_id,
            "master": self.master,
            "ui_url": self.ui_url,
            "connect_url": self.connect_url,
            "connect_host": socket.gethostname(),
            "task_slots": self.task_slots,
            "batch_slots": self.batch_slots,
        }


def start_application(stream: Stream, *, token: str | None) -> ReceiverApplication:
    """Start Spark for the stream's receivers, with a Spark Connect server that requires ``token`` unless that is None.

    Raises MasterUnreachableError and NoClusterError before it starts an application; TaskSlotsError,
    ExecutorVersionError and PythonUnknownError after it has stopped the application.
    """
    from pyspark.sql import SparkSession

    receivers = stream.receivers
    declared = stream.spark.task_slots()
    if declared is not None and not under_spark_submit():
        check_task_slots(declared, receivers)
    given = given_conf()
    master = given.get("spark.master") or stream.spark.master_url(receivers)
    if stream.spark.executors is not None and is_local_master(master):
        raise NoClusterError(
            f"The stream's spark.executors requests executors of a cluster, and the master is {master}.",
            remedy="Name a cluster's master, or leave out spark.executors.",
        )
    check_master(master)
    prepare_environment(master)
    builder = SparkSession.builder
    for key, value in receiver_conf(stream, master, token, given=given).items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    try:
        return _prepared(spark, stream, connect=token is not None)
    except BaseException:
        spark.stop()
        raise


def check_master(master: str) -> None:
    """Raise MasterUnreachableError if no master of a standalone cluster accepts a connection.

    Spark itself tries for a minute. Its error is then that of the next call: "stopped SparkContext", without the cause.
    """
    if not master.startswith(_STANDALONE):
        return
    refused = []
    for address in master.removeprefix(_STANDALONE).split(","):
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), _MASTER_SECONDS).close()
        except (OSError, ValueError) as error:
            refused.append(f"{address}: {error}")
        else:
            return
    raise MasterUnreachableError(
        f"Spark's master {master} cannot be reached ({'; '.join(refused)}).",
        remedy="Start it, or correct spark.master or the host and port of spark.connection.",
    )


def receiver_conf(
    stream: Stream,
    master: str,
    token: str | None,
    *,
    given: Mapping[str, str],
    environment: Mapping[str, str] = os.environ,
) -> dict[str, str]:
    """The settings of the receiver job's application.

    ``given`` (spark-submit's settings) overrides the stream's ``conf``. What a receiver job needs overrides both.
    """
    local = is_local_master(master)
    conf = {
        "spark.master": master,
        **default_conf(master),
        **stream.spark.conf,
        **given,
    }
    conf.update(
        {
            "spark.app.name": f"headrace receiver {stream.application}",
            # A receiver holds its slot for weeks. A speculative copy would be a second reader, and an executor with a
            # receiver is never idle, so it would not be released.
            "spark.speculation": "false",
            "spark.dynamicAllocation.enabled": "false",
            # Receivers have their own pool, so their tasks never delay those of batches.
            "spark.scheduler.mode": "FAIR",
            "spark.redaction.regex": _REDACTION,
        }
    )
    if stream.spark.executors is not None:
        slots = int(conf.get("spark.executor.cores", "1")) // int(conf.get("spark.task.cpus", "1"))
        # The first executors, where the cluster manager uses this setting; a standalone one starts all that fit.
        least = least_executors(stream.spark.executors, stream.receivers, slots)
        conf.setdefault("spark.executor.instances", str(least))
    if local:
        if stream.spark.job is not None:
            # Most slots are for receivers. By default Spark would split the data of each batch for all of them.
            conf.setdefault("spark.default.parallelism", str(os.cpu_count() or 1))
        conf.update({"spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1"})
        if environment.get("SPARK_LOCAL_IP") != "127.0.0.1":
            # The JVM is already running, and its user interface would listen on every network interface.
            conf.setdefault("spark.ui.enabled", "false")
    else:
        conf.update(connections_conf(master, environment))
        if archives := executors_path(stream):
            given_path = conf.get("spark.executorEnv.PYTHONPATH")
            path = [*([given_path] if given_path else []), *archives]
            conf["spark.executorEnv.PYTHONPATH"] = os.pathsep.join(path)
    if token is not None:
        conf.update(
            {
                "spark.plugins": CONNECT_PLUGIN,
                "spark.connect.grpc.binding.address": "127.0.0.1",
                "spark.connect.grpc.binding.port": "0",
            }
        )
        if under_spark_submit():
            conf["spark.connect.authenticate.token"] = token
        else:
            # pyspark would put the setting on the command line of the JVM that it starts.
            os.environ[TOKEN_VARIABLE] = token
    return conf


def check_task_slots(slots: int, receivers: int) -> None:
    """Raise TaskSlotsError if the receivers would take every slot: batches would hang without an error."""
    if slots < receivers + 1:
        raise TaskSlotsError(
            f"The Spark application has {slots} task slot(s), and each of its {receivers} receiver(s) occupies one as "
            "long as it runs: no batch would ever start.",
            remedy=f"Use at least {receivers + 1} slots (local[{receivers + 1}], or more cores), or fewer receivers. "
            "If several streams share the application, their receivers count together: name another spark.job.",
        )


def _prepared(spark: SparkSession, stream: Stream, *, connect: bool) -> ReceiverApplication:
    spark_context, receivers = spark.sparkContext, stream.receivers
    if connect:
        _check_python(spark)
    send_code(spark_context, stream)
    send_connections(spark_context)
    _warm_up(spark)
    slots = _await_task_slots(spark, receivers + 1)
    check_task_slots(slots, receivers)
    return ReceiverApplication(
        spark=spark,
        application_id=str(spark_context.applicationId),
        master=str(spark_context.master),
        ui_url=spark_context.uiWebUrl,
        connect_url=_connect_url(spark) if connect else None,
        task_slots=slots,
        batch_slots=slots - receivers,
    )


def _warm_up(spark: SparkSession) -> None:
    """Run a small job on every executor and check the versions installed there; raises ExecutorVersionError."""
    spark_context = spark.sparkContext
    tasks = 2 * spark_context.defaultParallelism if is_local_master(str(spark_context.master)) else _WARM_UP_TASKS
    ours = current_versions()
    for host, theirs, problem in (
        spark_context.parallelize(range(tasks), tasks).map(_executor_versions).distinct().collect()
    ):
        if problem or dict(theirs) != ours:
            raise ExecutorVersionError(
                f"The executor on {host} does not fit the driver: {problem or dict(theirs)} there, {ours} here.",
                remedy="Install the same Python, pyspark and headrace's requirements there, and set PYSPARK_PYTHON.",
            )


def _check_python(spark: SparkSession) -> None:
    """Raise PythonUnknownError if PYSPARK_PYTHON is unset: the Connect server reads its workers' Python only there."""
    jvm: Any = spark._jvm
    if not jvm.System.getenv("PYSPARK_PYTHON"):
        raise PythonUnknownError(
            "spark-submit was started without PYSPARK_PYTHON, so batches would run on the first python3 of the path.",
            remedy="Set PYSPARK_PYTHON in its environment to the Python that has headrace.",
        )


def _executor_versions(_: int) -> tuple[str, tuple[tuple[str, str], ...], str]:
    host = socket.gethostname()
    try:
        import confluent_kafka  # noqa: F401 - is it there?
        import pyarrow  # noqa: F401 - is it there?
        import sqlalchemy  # noqa: F401 - is it there?
    except ImportError as error:
        return host, (), str(error)
    return host, tuple(sorted(current_versions().items())), ""


def _await_task_slots(spark: SparkSession, wanted: int) -> int:
    """The number of task slots, after waiting up to ``SLOTS_SECONDS`` while there are fewer than ``wanted``.

    On a cluster the first executor can finish the whole warm-up before the others have registered.
    """
    until = time.monotonic() + (0.0 if is_local_master(str(spark.sparkContext.master)) else SLOTS_SECONDS)
    while (slots := task_slots(spark.sparkContext)) < wanted and time.monotonic() < until:
        logger.info("waiting for executors: there are %d of %d task slots", slots, wanted)
        time.sleep(2.0)
    return slots


def warm_up_connect(url: str, token: str, slots: int, stream: Stream) -> threading.Thread:
    """Run what a batch runs over Spark Connect, in the background: the first such query takes 7 s, later ones 0.4 s.

    Afterwards the classes are loaded, and the workers have imported what they need. A failure is only logged.
    """
    transforms = any(stream.transform_of(output) for output in stream.outputs)

    def warm_up() -> None:
        try:
            spark = remote_session(url, token)
            try:
                numbers = spark.range(0, slots, 1, slots)
                numbers.mapInArrow(_import_for_batches, "id LONG").toArrow()
                if transforms:
                    _make_documents(numbers)
            finally:
                spark.stop()
        except Exception as error:
            logger.info("the Spark Connect server was not warmed up: %s", error)

    thread = threading.Thread(target=warm_up, name="headrace-warm-up", daemon=True)
    thread.start()
    return thread


def _make_documents(numbers: DataFrame) -> None:
    """Decode JSON values, filter them and make documents of them, as a batch with a transform does."""
    decoded = numbers.mapInArrow(_decoded_values, "value STRUCT<a: STRING, b: BIGINT, c: DOUBLE>")
    documents = decoded.where("value.b > 0").selectExpr("to_json(struct(value.*)) AS document")
    documents.mapInArrow(_as_they_are, "document STRING").toArrow()


def _import_for_batches(rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    import headrace.spark.decoding
    import headrace.spark.elasticsearch_sink
    import headrace.spark.json_objects
    import headrace.spark.wal_source  # noqa: F401 - a worker keeps what it has imported

    yield from rows
    # So that no worker is free to take a second task before each slot has one.
    time.sleep(0.5)


def _decoded_values(rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    from headrace.spark.json_objects import JsonObjects

    objects = JsonObjects(pa.struct([("a", pa.string()), ("b", pa.int64()), ("c", pa.float64())]))
    for batch in rows:
        values, _ = objects.decode(pa.array([b'{"a": "x", "b": 1, "c": 0.5}'] * batch.num_rows, pa.binary()))
        yield pa.record_batch([values], ["value"])


def _as_they_are(rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield from rows


def _connect_url(spark: SparkSession) -> str:
    jvm: Any = spark._jvm
    service = getattr(getattr(jvm, "org.apache.spark.sql.connect.service.SparkConnectService$"), "MODULE$")
    return f"sc://localhost:{int(service.localPort())}"


# Spark Streaming's bound for a graceful stop: ten batch intervals.
_MOST_INTERVALS = 10
# How long after an interval's end a batch task may take to be scheduled and to allocate its blocks.
_SCHEDULING_SECONDS = 15.0
_PERIOD_SECONDS = 1.0

Pending = tuple[int, ...]


class BatchDrain:
    """Keeps the application (and its lease) until the batches of all received blocks are done.

    It waits for at most ten batch intervals. It stops waiting after one interval and 15 s without any change: failed
    batches need a person, and if no batches are run there is nothing to wait for. A job that is replaced by one of a
    newer version does not wait for batches that have not started; they run in the new job. Time in which the ledger
    does not answer does not count as time without change.
    """

    def __init__(self, context: StreamContext, lease: JobLease) -> None:
        self._name = context.name
        self._ledger = context.ledger
        self._lease = lease
        self._clock = context.clock
        self._interval = context.stream.batch_interval_ms / 1000

    def wait(self) -> Pending:
        """Wait. Returns the batch times that are still not done, as far as known. Raises LeaseLostError."""
        started = changed = self._clock.monotonic()
        pending: Pending | None = None
        while True:
            latest = self._look()
            now = self._clock.monotonic()
            if latest is None or latest != pending:
                pending, changed = pending if latest is None else latest, now
            if pending == () or now - started > _MOST_INTERVALS * self._interval:
                return pending or ()
            if now - changed > self._interval + _SCHEDULING_SECONDS:
                return pending or ()
            self._clock.wait(threading.Event(), _PERIOD_SECONDS)

    def _look(self) -> Pending | None:
        """Renew the lease and return the pending batch times; None if the ledger does not answer."""
        try:
            self._ledger.jobs.renew(self._lease)
            return self.pending()
        except LedgerUnavailableError as error:
            logger.warning("the ledger does not answer, so the pending batches are not known: %s", error)
            return None

    def pending(self) -> Pending:
        """The batch times that run now; also those that wait to run, if batches are run at all."""
        name = self._name
        running = {row.batch_time_ms for row in self._ledger.batches.page(name, states=[BatchState.RUNNING])}
        # A running batch whose process is gone is not worth waiting for.
        now_ms = self._ledger.now_ms()
        alive = {
            batch_time_ms
            for batch_time_ms in running
            if any(attempt.alive(now_ms) for attempt in self._ledger.attempts.of_batch(name, batch_time_ms))
        }
        job = self._ledger.jobs.current(name)
        if not self._somebody_runs_batches(job) or (job is not None and REPLACED_BY in job.attributes):
            return tuple(sorted(alive))
        allocated = {row.batch_time_ms for row in self._ledger.batches.page(name, states=[BatchState.ALLOCATED])}
        unclaimed = {row.batch_time_ms for row in self._ledger.blocks.unclaimed(name)}
        return tuple(sorted(alive | allocated | unclaimed))

    def _somebody_runs_batches(self, job: JobRow | None) -> bool:
        since_ms = 0 if job is None else job.acquired_at_ms
        return any(
            row.started_at_ms is not None and row.started_at_ms >= since_ms
            for row in self._ledger.batches.page(self._name, 20)
        )
