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

import hashlib
import hmac
import os
import socket
import stat
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast
from urllib.parse import urlsplit

from headrace import __version__
from headrace.errors import HeadraceError
from headrace.spark.termination import under_spark_submit

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession
    from pyspark.sql.connect.client import DefaultChannelBuilder
    from pyspark.sql.datasource import DataSource

    from headrace.ledger.tables import JobRow


CONNECT_PLUGIN = "org.apache.spark.sql.connect.SparkConnectPlugin"
USER_ID = "headrace"
_LOOPBACK_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})
_DEFAULT_PORT = 15002
_SESSIONS = uuid.UUID("6f1c3d0a-7e0f-5d0b-9a55-0f6f9d6f2c11")
# 0.2 s doubled eight times gives 50 s of retries with a server that is busy. pyspark's default is ten minutes, but the
# lease shows much earlier that a receiver job has died.
_RETRIES: dict[str, Any] = {"max_retries": 8, "initial_backoff": 200, "backoff_multiplier": 2.0, "max_backoff": 30_000}


# The local properties that Spark takes a job's description and group from.
_DESCRIPTION = "spark.job.description"
_GROUP = "spark.jobGroup.id"
_SCHEDULER_POOL = "spark.scheduler.pool"


class AttemptName(Protocol):
    """The part of an attempt's row or claim that names its sessions and jobs."""

    @property
    def stream(self) -> str: ...
    @property
    def batch_time_ms(self) -> int: ...
    @property
    def number(self) -> int: ...
    @property
    def target(self) -> str: ...


class ConnectUrlError(HeadraceError):
    """The URL is not a Spark Connect URL, contains a token, or would send the token unencrypted."""


class ConnectRefusedError(HeadraceError):
    """The Spark Connect server did not accept the session: it is not reachable, or has another token."""


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


def connect_session(url: str, token: str, *, session_id: str | None = None) -> SparkSession:
    """Open a session with the Spark Connect server at ``url`` (``sc://host:port``) and check it with one call.

    From then on this process uses Spark Connect: ``pyspark.sql.functions`` builds Connect expressions.
    Raises ConnectUrlError, and ConnectRefusedError if the server is not reachable or refuses the token.
    """
    os.environ["SPARK_CONNECT_MODE_ENABLED"] = "1"
    return remote_session(url, token, session_id=session_id)


def remote_session(url: str, token: str, *, session_id: str | None = None) -> SparkSession:
    """Like `connect_session`, for a process that keeps its classic session. Use only the session's own methods."""
    from pyspark.errors import PySparkException
    from pyspark.sql.connect.client.retries import DefaultPolicy
    from pyspark.sql.connect.session import SparkSession as RemoteSession

    class UntilGone(DefaultPolicy):
        """Retries no call to a server whose process has ended: each call of a range would be retried for 50 s."""

        def can_retry(self, error: BaseException) -> bool:
            return super().can_retry(error) and not is_gone(url)

    session = RemoteSession.builder.channelBuilder(_channel(url, token, session_id)).create()
    session.client.set_retry_policies([UntilGone(**_RETRIES)])
    try:
        _ = session.version
    except PySparkException as error:
        session.client.close()
        raise ConnectRefusedError(
            f"The Spark Connect server at {url} refused the session: {first_line(str(error)) or type(error).__name__}.",
            remedy="Check that the receiver job is alive and that both sides have the same HEADRACE_SECRET_KEY.",
        ) from error
    return cast("SparkSession", session)


def is_gone(url: str) -> bool:
    """Whether the Connect server at this URL was on this machine and has ended: nothing listens at its port.

    No other server comes to that port, since Spark chooses one when it starts. A busy server's port takes connections.
    """
    parts = urlsplit(url)
    if parts.hostname not in _LOOPBACK_HOSTS:
        return False
    address = "127.0.0.1" if parts.hostname == "localhost" else parts.hostname
    try:
        socket.create_connection((address, parts.port or _DEFAULT_PORT), timeout=1).close()
    except OSError as error:
        return isinstance(error, ConnectionRefusedError)
    return False


def protected_url(url: str) -> str:
    """``url`` in pyspark's form; raises ConnectUrlError unless it is loopback or has ``use_ssl=true``."""
    parts = urlsplit(url)
    host = parts.hostname
    if parts.scheme != "sc" or not host or parts.path.split(";")[0] not in ("", "/"):
        raise ConnectUrlError(f"{url!r} is not a Spark Connect URL.", remedy="Write sc://host:port.")
    parameters = parts.path.split(";")[1:]
    if any(parameter.startswith("token=") for parameter in parameters):
        raise ConnectUrlError(
            "A Spark Connect URL must not contain a token.", remedy="Remove it: headrace derives the token."
        )
    if host in _LOOPBACK_HOSTS:
        return f"sc://localhost:{parts.port or _DEFAULT_PORT}/" + "".join(f";{parameter}" for parameter in parameters)
    if "use_ssl=true" not in parameters:
        raise ConnectUrlError(
            f"The Spark Connect server at {host} is not on this machine, and its URL does not ask for TLS.",
            remedy="Put a TLS endpoint before it and add ;use_ssl=true to its URL, or run batches with way 'submit'.",
        )
    return url


def attempt_session_id(attempt: AttemptName) -> str:
    """The session id of an attempt, derived from its name, so that a later attempt can end an earlier one's session."""
    return str(uuid.uuid5(_SESSIONS, "\n".join(_parts(attempt))))


def attempt_tag(attempt: AttemptName) -> str:
    """The tag (and job group) of one attempt's Spark jobs."""
    # Spark joins tags with commas, so a tag must not contain one. Stream names have none; this is only a safeguard.
    return "/".join(["headrace", *_parts(attempt)]).replace(",", "_")


def _parts(attempt: AttemptName) -> list[str]:
    """The parts that identify an attempt: stream, batch time, a replay's target, and number."""
    replay = [attempt.target] if attempt.target else []
    return [attempt.stream, str(attempt.batch_time_ms), *replay, str(attempt.number)]


def end_session(url: str, token: str, session_id: str, tag: str, *, release: bool = True) -> list[str]:
    """Interrupt the operations with ``tag`` of another session and release it. Returns the operations' ids.

    ``release``: False if others may use the session, whose operations a release would interrupt.

    Returns an empty list if the server does not know the session (any more) or does not answer.
    """
    from pyspark.errors import PySparkException
    from pyspark.sql.connect.client import SparkConnectClient

    channel = _channel(url, token, session_id)
    client = SparkConnectClient(connection=channel, retry_policy={**_RETRIES, "max_retries": 2})
    try:
        interrupted = client.interrupt_tag(tag)
        if release:
            client.release_session()
        return list(interrupted or ())
    except PySparkException:
        return []
    finally:
        client.close()


def _channel(url: str, token: str, session_id: str | None) -> DefaultChannelBuilder:
    from pyspark.sql.connect.client import DefaultChannelBuilder

    builder = DefaultChannelBuilder(protected_url(url))
    # Set here rather than in the URL: pyspark repeats URLs in its errors.
    builder.set("token", token)
    builder.set("user_id", USER_ID)
    if session_id is not None:
        builder.set("session_id", session_id)
    return builder


def fail_fast(spark: SparkSession) -> None:
    """Make further calls of a Connect session fail soon if the server does not answer: the session is being closed."""
    from pyspark.sql.connect.client.retries import DefaultPolicy

    cast("Any", spark).client.set_retry_policies([DefaultPolicy(**{**_RETRIES, "max_retries": 1})])


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


def is_connect(spark: SparkSession) -> bool:
    """Whether the session is a Spark Connect session."""
    return type(spark).__module__.startswith("pyspark.sql.connect")


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


SECRET_VARIABLE = "HEADRACE_SECRET_KEY"  # noqa: S105 - the variable's name, not a secret

FINGERPRINT = "secret_fingerprint"
"""The attribute of a receiver job with the fingerprint of its secret."""


APPLICATION = "application"
"""The attribute of a receiver job in a shared job's application: that application's name and epoch."""


class SecretKeyMissingError(HeadraceError):
    """The process was started without the secret from which the tokens are derived."""


def derive_token(secret: str, name: str, epoch: int) -> str:
    """The token of one epoch of an application (`Stream.application`): 64 hexadecimal digits."""
    return hmac.new(secret.encode(), f"{name}:{epoch}".encode(), hashlib.sha256).hexdigest()


def secret_fingerprint(secret: str, name: str) -> str:
    """A fingerprint that distinguishes secrets and reveals nothing about them (16 hexadecimal digits).

    It is in the job's lease, so a batch can check before it connects whether the job was started with the same secret.
    """
    return hmac.new(secret.encode(), f"fingerprint of {name}".encode(), hashlib.sha256).hexdigest()[:16]


def token_from_environment(name: str, epoch: int) -> str:
    """The token derived from the secret in the environment.

    Raises SecretKeyMissingError if the variable is unset or empty: a guessable token is worse than none.
    """
    secret = os.environ.get(SECRET_VARIABLE, "")
    if not secret:
        raise SecretKeyMissingError(
            f"The environment variable {SECRET_VARIABLE} is not set, so the Spark Connect token of {name!r} cannot be "
            "derived.",
            remedy=f"Set {SECRET_VARIABLE} to the same value for the receiver job and for its batches; "
            "Airflow's tasks set it themselves.",
        )
    return derive_token(secret, name, epoch)


def token_of_job(job: JobRow) -> str:
    """The token of the application in which a receiver job runs. Raises SecretKeyMissingError."""
    name, epoch = job.attributes.get(APPLICATION) or (job.stream, job.epoch)
    return token_from_environment(name, epoch)


REPLACED_BY = "replaced_by"
"""The attribute with the newer version for which a receiver job was asked to stop."""


class VersionMismatchError(HeadraceError):
    """The receiver job runs with other versions than the batch that needs its application."""


def current_versions() -> dict[str, str]:
    """The versions of this process, as a lease records them: Python (major.minor), pyspark, headrace."""
    return {
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "pyspark": _pyspark_version(),
        "headrace": __version__,
    }


def _pyspark_version() -> str:
    # Importing pyspark in an Airflow task would take half a second or more.
    installed = None if "pyspark" in sys.modules else _installed_version("pyspark")
    if installed is not None:
        return installed
    from pyspark.version import __version__ as version

    return str(version)


def version_differences(theirs: Mapping[str, str], ours: Mapping[str, str]) -> list[str]:
    """The differences as texts such as ``headrace 0.1.0 there, 0.2.0 here``."""
    return [
        f"{name} {theirs.get(name, 'unknown')} there, {version} here"
        for name, version in ours.items()
        if theirs.get(name) != version
    ]


def check_versions(theirs: Mapping[str, str]) -> None:
    """Raise VersionMismatchError, with each difference, if a receiver job's versions differ from ours."""
    different = version_differences(theirs, current_versions())
    if different:
        raise VersionMismatchError(
            f"The receiver job runs with other versions: {'; '.join(different)}.",
            remedy="Restart the receiver job with this environment, or run the batches with way 'submit'.",
        )


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


_SPARK_PACKAGES = ("pyspark", "pyspark-client")


class MixedSparkError(HeadraceError):
    """pyspark and pyspark-client, which Airflow's Spark provider requires, are installed in different versions.

    Both install into the folder ``pyspark/``: the one that is installed last overwrites files of the other. What then
    fails, and where, is chance. So whatever starts Spark, or checks a stream, checks this first.
    """


def check_spark_packages() -> None:
    """Raise MixedSparkError if both packages are installed, in different versions. Does not import pyspark."""
    spark, client = map(_installed_version, _SPARK_PACKAGES)
    if spark is None or client is None or spark == client:
        return
    # Not every version of pyspark has a pyspark-client; each version of this one has a pyspark.
    raise MixedSparkError(
        f"pyspark {spark} and pyspark-client {client} are mixed: both install into the folder pyspark/, and overwrite "
        "each other's files.",
        remedy="In this environment, run `pip install --force-reinstall --no-deps "
        f"pyspark=={client} pyspark-client=={client}`.",
    )


def _installed_version(package: str) -> str | None:
    # Not at the top: Spark's Python workers and the caller of a batch server, which is to start at once, need it not.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        # With SPARK_HOME, pyspark is only a folder on the path.
        return None
