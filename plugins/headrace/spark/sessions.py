"""Opens and ends Spark sessions: classic ones, and Spark Connect sessions in a receiver job's application.

`local_session` is one in this process alone, for commands and tests that run a transform and write nothing.

A Connect server runs any code it is sent, so each application has its own token. The token is not stored: the driver
and the batches derive it from a secret in their environment. So it is neither on a command line nor in the ledger, and
each epoch of the job has a new token. The streams of a shared job have one application, so they have one token.

The token leaves this machine only over TLS. pyspark allows a token without TLS only for the host ``localhost``, where
gRPC's local credentials check that the peer is on this machine. So 127.0.0.1 is replaced by ``localhost``.

Functions are sent to the server with cloudpickle, which works only between equal Python versions. So both ends compare
their versions first.
"""

from __future__ import annotations

import os
import stat
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from headrace.spark.termination import under_spark_submit

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession
    from pyspark.sql.datasource import DataSource


# The local properties that Spark takes a job's description and group from.
_DESCRIPTION = "spark.job.description"


_GROUP = "spark.jobGroup.id"


_SCHEDULER_POOL = "spark.scheduler.pool"


def parallelism(spark: SparkSession) -> int:
    """The number of tasks that the session's application runs at once. Over Spark Connect it is a guess: the number of
    this machine's cores.
    """
    return (os.cpu_count() or 1) if is_connect(spark) else spark.sparkContext.defaultParallelism


def classic_session(name: str, *, master: str | None = None, conf: Mapping[str, str] | None = None) -> SparkSession:
    """This process's own Spark session.

    Under spark-submit the master and the settings given there override ``master`` and ``conf``. The session's time zone
    is UTC unless ``conf`` sets another, so that a batch gives the same documents on every machine.
    """
    from pyspark.sql import SparkSession

    prepare_environment(master)
    given = given_conf()
    settings = {"spark.app.name": name, **default_conf(given.get("spark.master") or master)}
    if master is not None:
        settings["spark.master"] = master
    settings.update(conf or {})
    builder = SparkSession.builder
    for key, value in settings.items():
        if key not in given or key == "spark.app.name":
            builder = builder.config(key, value)
    return builder.getOrCreate()


def default_conf(master: str | None) -> dict[str, str]:
    """The settings that headrace gives every application, unless the stream or spark-submit sets them.

    With a local master Spark makes the secret of ``spark.authenticate`` by itself, another for each application.
    Without it, the driver's port hands the bytes of any local user to Java's deserialisation. Spark's folders of
    blocks, which other users could read, are in a folder of this user alone.
    """
    conf = {
        "spark.sql.session.timeZone": "UTC",
        "spark.ui.showConsoleProgress": "false",
        # Spark's pages accept such a request from any page that is open in the browser.
        "spark.ui.killEnabled": "false",
        # They list the classes of all objects in memory, and the stacks of all threads, to who reaches the pages.
        "spark.ui.heapHistogramEnabled": "false",
        "spark.ui.threadDumpsEnabled": "false",
        # Spark's simplified tracebacks lose the causes of an error, which decide whether to try again (failures.py).
        "spark.sql.execution.pyspark.udf.simplifiedTraceback.enabled": "false",
    }
    if master is None or not is_local_master(master):
        return conf
    # Batches are small: with Spark's default of 200 partitions most tasks would be empty and take 10 ms each.
    conf |= {"spark.sql.shuffle.partitions": "8", "spark.local.dir": _private_folder()}
    # Spark makes no secret for "local-cluster", which starts executors as processes.
    return conf | ({} if master.startswith("local-cluster") else {"spark.authenticate": "true"})


def _private_folder() -> str:
    folder = own_folder()
    folder.mkdir(mode=0o700, exist_ok=True)
    # Somebody else may have made it, to keep this user from it.
    return str(folder) if is_own_folder(folder) else tempfile.mkdtemp(prefix="headrace-")


def given_conf() -> dict[str, str]:
    """The settings given to spark-submit; empty if this process starts its own JVM."""
    from pyspark import SparkConf, SparkContext

    if under_spark_submit():
        # Without this SparkConf has no JVM and would be empty.
        SparkContext._ensure_initialized()
    return dict(SparkConf().getAll())


def is_local_master(master: str) -> bool:
    """Whether driver and executors run on this machine."""
    return master.startswith("local")


def prepare_environment(master: str | None) -> None:
    """Set the environment that a JVM and Python workers inherit from this process.

    Workers run this Python; by default they would run the first ``python3`` of the path, without pyarrow. They may
    store compiled modules; otherwise pyspark would be compiled again in every worker. With a local master all of them
    listen on loopback only.
    """
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # Under spark-submit the JVM is already running, with its own environment.
    if master is not None and is_local_master(master) and not under_spark_submit():
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")


def name_jobs(spark: SparkSession, description: str, *, group: str, pool: str, tags: Iterable[str]) -> None:
    """Name the Spark jobs that this thread starts from now on in the session, for Spark's user interface, and tag them.
    They run in this pool of Spark's scheduler.

    A Connect server runs each operation in a thread of its own, and describes its jobs by the operation's text. It also
    sets the session's settings as local properties of each query's jobs, and Spark takes a job's description from a
    local property. So the session's setting replaces that text.
    """
    if is_connect(spark):
        # As in the thread that opens a session: a user's function may ask for the active one.
        cast("Any", type(spark))._set_default_and_active_session(spark)
        spark.clearTags()
        for tag in tags:
            spark.addTag(tag)
        spark.conf.set(_DESCRIPTION, description)
        spark.conf.set(_GROUP, group)
        spark.conf.set(_SCHEDULER_POOL, pool)
        return
    # A writer looks up its data source in its thread's active session, and a new thread has none.
    jvm: Any = spark._jvm
    spark._get_j_spark_session_class(jvm).setActiveSession(spark._jsparkSession)
    context = spark.sparkContext
    context.clearJobTags()
    for tag in tags:
        context.addJobTag(tag)
    context.setJobGroup(group, description, interruptOnCancel=True)
    context.setLocalProperty(_SCHEDULER_POOL, pool)


def cancel_tag(spark: SparkSession, tag: str) -> None:
    """Cancel the jobs with this tag in the session, or in its application."""
    if is_connect(spark):
        spark.interruptTag(tag)
    else:
        spark.sparkContext.cancelJobsWithTag(tag)


_registering = threading.Lock()


def register_source(spark: SparkSession, source: type[DataSource]) -> None:
    """Register a data source in the session, which other threads may use.

    If two threads register the first one of a name at the same time, Spark takes that of the one for a source of the
    JVM, and refuses that of the other (DATA_SOURCE_ALREADY_EXISTS).
    """
    with _registering:
        spark.dataSource.register(source)


def collect(frame: DataFrame) -> list[Row]:
    """Return the rows as Spark Connect does. A classic session's own ``collect`` fails for the first day of the year 1,
    the time that some programs write for none."""
    if is_connect(frame.sparkSession):
        return frame.collect()
    from pyspark.sql.conversion import ArrowTableToRowsConversion

    return ArrowTableToRowsConversion.convert(frame.toArrow(), frame.schema)


def first_line(text: str) -> str:
    """The first line of an error's text that says something: of a gRPC error its details, since its first lines name a
    class and a number. "" if there is none."""
    lines = [stripped for line in text.splitlines() if (stripped := line.strip())]
    is_grpc = bool(lines) and lines[0].startswith("<_")
    details = (line for line in lines if is_grpc and line.startswith("details = "))
    of_grpc = next(details, "").removeprefix("details = ").strip('"')
    return of_grpc or next(iter(lines), "")


def own_folder() -> Path:
    """The folder of this user alone below the temporary folder; see `is_own_folder`."""
    return Path(tempfile.gettempdir()) / f"headrace-{os.geteuid()}"


def is_own_folder(path: Path) -> bool:
    """Whether it is a folder that belongs to this user, and only this user can enter it."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077


REPLACED_BY = "replaced_by"
"""The attribute with the newer version for which a receiver job was asked to stop."""


LOCAL_MASTER = "local[2]"


@contextmanager
def local_session(name: str = "headrace", conf: Mapping[str, str] | None = None) -> Iterator[SparkSession]:
    """Open a session with two task slots and without Spark's user interface, and stop it at the end.

    If this process has a session, that one is used, and is not stopped. Python workers find modules in the current
    folder, as this process does.

    Args:
        conf: Spark settings, such as ``stream.spark.conf``.
    """
    from pyspark.sql import SparkSession

    active = SparkSession.getActiveSession()
    if active is not None:
        yield active
        return
    paths = [str(Path.cwd()), *filter(None, [os.environ.get("PYTHONPATH")])]
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    try:
        session = classic_session(name, master=LOCAL_MASTER, conf={**(conf or {}), "spark.ui.enabled": "false"})
    finally:
        # The JVM has inherited it, and its Python workers do.
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    session.sparkContext.setLogLevel("ERROR")
    try:
        yield session
    finally:
        session.stop()


def is_connect(spark: SparkSession) -> bool:
    """Whether the session is a Spark Connect session."""
    return type(spark).__module__.startswith("pyspark.sql.connect")
