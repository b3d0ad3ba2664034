"""The Spark application of a receiver job's process: its settings, its start and warm-up, its Spark Connect server."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.errors import HeadraceError
from headrace.receiver.placement import least_executors
from headrace.secrets import HIDDEN_NAMES
from headrace.spark.attempts.warm_up import warm_up
from headrace.spark.connect_sessions import CONNECT_PLUGIN
from headrace.spark.packaging import connections_conf, executors_path, send_code, send_connections
from headrace.spark.receiving.executors import task_slots
from headrace.spark.sessions import default_conf, given_conf, is_local_master, prepare_environment
from headrace.spark.termination import under_spark_submit

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from headrace.stream import Stream

logger = logging.getLogger(__name__)

TOKEN_VARIABLE = "SPARK_CONNECT_AUTHENTICATE_TOKEN"  # noqa: S105 - the variable's name, not a token

_STANDALONE = "spark://"
_MASTER_SECONDS = 10.0
SLOTS_SECONDS = 60.0
"""How long to wait for enough executors of a cluster, after the first one has registered."""
# Spark's own list, and that of definitions.
_REDACTION = f"(?i:token)|{HIDDEN_NAMES}"


class TaskSlotsError(HeadraceError):
    """The application cannot run the receivers and a batch at the same time."""


class MasterUnreachableError(HeadraceError):
    """No master of the standalone cluster accepts a connection."""


class NoClusterError(HeadraceError):
    """The stream allocates executors, and its master has none: driver and tasks are one process."""


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
    warm_up(spark)
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


def _check_python(spark: SparkSession) -> None:
    """Raise PythonUnknownError if PYSPARK_PYTHON is unset: the Connect server reads its workers' Python only there."""
    jvm: Any = spark._jvm
    if not jvm.System.getenv("PYSPARK_PYTHON"):
        raise PythonUnknownError(
            "spark-submit was started without PYSPARK_PYTHON, so batches would run on the first python3 of the path.",
            remedy="Set PYSPARK_PYTHON in its environment to the Python that has headrace.",
        )


def _await_task_slots(spark: SparkSession, wanted: int) -> int:
    """The number of task slots, after waiting up to ``SLOTS_SECONDS`` while there are fewer than ``wanted``.

    On a cluster the first executor can finish the whole warm-up before the others have registered.
    """
    until = time.monotonic() + (0.0 if is_local_master(str(spark.sparkContext.master)) else SLOTS_SECONDS)
    while (slots := task_slots(spark.sparkContext)) < wanted and time.monotonic() < until:
        logger.info("waiting for executors: there are %d of %d task slots", slots, wanted)
        time.sleep(2.0)
    return slots


def _connect_url(spark: SparkSession) -> str:
    jvm: Any = spark._jvm
    service = getattr(getattr(jvm, "org.apache.spark.sql.connect.service.SparkConnectService$"), "MODULE$")
    return f"sc://localhost:{int(service.localPort())}"
