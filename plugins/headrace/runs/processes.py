"""The processes that Airflow's tasks start for a stream: a batch's, and the receiver job's, which outlives its task.

They get the connections of their stream, with what these need, and none of Airflow's other settings: the code of a
transform must not be able to read the metadata database's password. Secrets are passed in the environment, never on a
command line, where every user of the machine could read them.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from airflow.configuration import conf
from airflow.sdk.exceptions import AirflowException, AirflowRuntimeError

from headrace.connections import ALLOWLIST_VARIABLE, variable_name
from headrace.errors import HeadraceError
from headrace.secrets import without_secrets

if TYPE_CHECKING:
    from headrace.stream import Stream


# How long a terminated batch process may take to cancel its Spark jobs, in seconds.
_TERMINATION_GRACE = 15.0
_TAIL_LINES = 40
# Marks a warning in the output of the batch's process (headrace.spark.outputs.writer).
_WARNING = ": warning: "


class BatchProcess:
    """A started process of a batch."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            text=True,
            errors="replace",
        )

    def log_until_end(self, log: Callable[..., None]) -> str | None:
        """Log the process's output, by a logger's method ``log``, until it ends. Returns None if its exit code is 0,
        else how it ended, with its last lines.

        If it is interrupted, by the task's execution timeout for instance, the process goes on: see `terminate`."""
        last: deque[str] = deque(maxlen=_TAIL_LINES)
        # Not `with self._process`, which would wait for the process after an interruption too.
        with self._process.stdout or nullcontext(()) as output:
            for line in output:
                level = logging.WARNING if line.startswith("headrace: ") and _WARNING in line else logging.INFO
                # Spark's own log quotes options and the errors of libraries.
                shown = without_secrets(line.rstrip())
                log(level, "%s", shown)
                last.append(shown)
        code = self._process.wait()
        if not code:
            return None
        lines = "\n".join(last)
        return f"The batch's process {_ending(code)}. The last lines of its output:\n{lines}"

    @property
    def was_killed(self) -> bool:
        """Whether the process has ended by a signal, or because the process that it depends on had gone."""
        from headrace.spark.termination import EXIT_CODE, EXIT_TERMINATED

        code = self._process.poll()
        return code is not None and (code < 0 or code in (EXIT_CODE, EXIT_TERMINATED, 128 + signal.SIGKILL))

    def terminate(self) -> None:
        """Ask the process to end, which cancels the attempt's Spark jobs. Kill it if it does not end in time."""
        if self._process.poll() is not None:
            return
        self._process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + _TERMINATION_GRACE
        while self._process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        if self._process.poll() is None:
            self._process.kill()


def _ending(code: int) -> str:
    """An exit code of ``headrace.spark.attempts.batch_command`` in words."""
    # Not above: parsing a DAG file imports this module, and must not import the Spark layer.
    from headrace.spark.termination import EXIT_NOT_OURS, EXIT_TERMINATED

    if code == EXIT_NOT_OURS:
        return "ended because a newer attempt at the batch began"
    if code in (-signal.SIGTERM, EXIT_TERMINATED):
        return "was ended by SIGTERM"
    return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"


# Enough for a Python traceback with a JVM's, small enough for a task log.
_TAIL_BYTES = 32_768


@dataclass(frozen=True, slots=True)
class DetachedProcess:
    """A started process. ``created`` (seconds since the epoch) distinguishes it from a later one with the same id."""

    pid: int
    created: float
    log: Path

    def alive(self) -> bool:
        """Whether it still runs on this machine; a zombie does not."""
        try:
            process = psutil.Process(self.pid)
            return process.create_time() == self.created and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False

    def exit_code(self) -> int | None:
        """The exit code (negative: the signal that ended it). None while it runs, or if this is not its parent."""
        try:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
        except ChildProcessError:
            return None
        return os.waitstatus_to_exitcode(status) if pid else None


def spawn(command: Sequence[str], *, environment: Mapping[str, str], log: Path) -> DetachedProcess:
    """Start ``command`` in a new session, its output appended to ``log``, readable by this user only."""
    log.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640)
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=descriptor,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            # Outside the task's session: Airflow ends a task by ending its process group.
            start_new_session=True,
            close_fds=True,
        )
    finally:
        os.close(descriptor)
    # Suppresses Popen's warning when it is garbage-collected with a living child: this one is meant to live on.
    child.returncode = 0
    try:
        created = psutil.Process(child.pid).create_time()
    except psutil.Error:
        created = 0.0
    return DetachedProcess(child.pid, created, log)


def tail(log: Path | str, lines: int = 40) -> str:
    """The last lines of a log file; empty if the file is not on this machine."""
    try:
        with Path(log).open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.rstrip().splitlines()[-lines:])


SECRET_KEY_VARIABLE = "HEADRACE_SECRET_KEY"  # noqa: S105 - the variable's name, not a secret

# Separates this use of the key from others: Airflow encrypts with the same key.
_PURPOSE = b"headrace: what receiver jobs and their batches share"

# Airflow's own settings, other DAGs' connections and variables, and the task's channel to its supervisor.
_WITHHELD_PREFIXES = ("AIRFLOW__", "AIRFLOW_CONN_", "AIRFLOW_VAR_", "AIRFLOW_CTX_", "_AIRFLOW", "__AIRFLOW")
# With this variable pyspark's modules were compiled again at every import, two seconds each time.
_WITHHELD = {"PYTHONDONTWRITEBYTECODE"}


class SecretKeyUndefinedError(HeadraceError):
    """Airflow is configured with neither ``[headrace] secret_key`` nor ``[core] fernet_key``."""


def child_environment(stream: Stream, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """The whole environment for a process of ``stream``: ``base`` (by default this process's) without Airflow's
    variables, plus those that the process needs.

    Raises AirflowNotFoundException if a connection is not defined, and SecretKeyUndefinedError.
    """
    base = os.environ if base is None else base
    environment = {
        name: value for name, value in base.items() if name not in _WITHHELD and not name.startswith(_WITHHELD_PREFIXES)
    }
    environment |= connection_variables(stream.connection_ids)
    environment[SECRET_KEY_VARIABLE] = secret_key(stream.application)
    # Executors and the driver run the Python that runs Airflow; by default they pick another one, without pyarrow.
    environment.setdefault("PYSPARK_PYTHON", sys.executable)
    environment.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    # A task's PATH may lack the Python environment's own scripts, such as spark-submit.
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", os.defpath)])
    if stream.spark.is_local:
        # Spark's user interface and its other ports have no password, so they listen on this machine only.
        environment.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    # So that lines appear in the log as soon as they are printed.
    environment["PYTHONUNBUFFERED"] = "1"
    return environment


@contextmanager
def connections_in_environment(stream: Stream) -> Iterator[None]:
    """Set the connections of the stream's inputs in this process's environment for the length of a ``with`` block. Code
    that queries Kafka within a task reads them there.

    Raises AirflowNotFoundException if a connection is not defined.
    """
    variables = connection_variables([source.connection for source in stream.kafka_inputs if source.connection])
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def connection_variables(conn_ids: Iterable[str]) -> dict[str, str]:
    """The connections as environment variables; with them the functions that a Kafka connection may name for its
    tokens, and the key for Google's Kafka, where Airflow has them.

    Raises AirflowNotFoundException if a connection is not defined.
    """
    variables = {variable_name(conn_id): connection_json(conn_id) for conn_id in conn_ids}
    if any(_GOOGLE in text for text in variables.values()):
        # Imported here: most tasks need no Kafka client.
        from headrace.kafka.tokens import GOOGLE_CONNECTION

        # Without it, Google's library takes the credentials of the host.
        with suppress(AirflowException, AirflowRuntimeError, PermissionError):
            variables[variable_name(GOOGLE_CONNECTION)] = connection_json(GOOGLE_CONNECTION)
    allowed = conf.get("apache_kafka", "callback_allowlist", fallback="") or ""
    return {**variables, ALLOWLIST_VARIABLE: allowed} if allowed.strip() else variables


# In the names of Google's brokers.
_GOOGLE = ".managedkafka."


def connection_json(conn_id: str) -> str:
    """The connection in Airflow's JSON form, as an ``AIRFLOW_CONN_…`` variable holds it."""
    from airflow.sdk.bases.hook import BaseHook

    return BaseHook.get_connection(conn_id).as_json()


def secret_key(name: str) -> str:
    """The secret that an application (`Stream.application`) and its batches share: 64 hexadecimal digits, different for
    each name.

    It is derived from ``[headrace] secret_key``, else from ``[core] fernet_key``, and does not reveal them: with the
    fernet key itself, the code of a transform could read all of Airflow's connections.

    Raises:
        SecretKeyUndefinedError: neither key is set.
    """
    key = conf.get("headrace", "secret_key", fallback="") or conf.get("core", "fernet_key", fallback="")
    if not key:
        raise SecretKeyUndefinedError(
            "Neither [headrace] secret_key nor [core] fernet_key is set, so the receiver job's Spark Connect server "
            "would have no token.",
            remedy="Set AIRFLOW__HEADRACE__SECRET_KEY to a long random string, the same on every worker.",
        )
    return hmac.new(key.encode(), b"%b\n%b" % (_PURPOSE, name.encode()), hashlib.sha256).hexdigest()
