"""A process with the imports of a batch, from which the processes of a stream's batches are forked.

The imports of a batch take more than a second: SQLAlchemy, pydantic, and pyspark's client with pandas and gRPC. So the
receiver job keeps a server process that has them, and a batch's command runs in a fork of it (`run_in_server`). This
module needs few imports, because the caller runs it before them.

The receiver job starts the server and ends it. It has no connections, and no threads but one of jemalloc, which is
prepared for forks. A batch's process gets from its caller what a new process would inherit: the standard streams, the
environment with its time zone, the folder, the path, umask, soft limits, locale. A caller of other groups, another
priority, other processors or other hard limits is refused, and runs its batch itself. Only the control group stays the
receiver job's.

A batch's process ends if the server ends: the application in which the batch runs is then gone too. So nothing that
goes wrong with one caller may end the server.

The folder of the sockets is this user's own, so no other user can answer, or get the request: it has the secrets of
the caller's environment.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import locale
import logging
import os
import resource
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from headrace import __version__
from headrace.processes import freeze_imports
from headrace.spark.sessions import is_own_folder, own_folder
from headrace.spark.termination import (
    EXIT_FAILED,
    EXIT_TERMINATED,
    ProcessWatch,
    Terminated,
    parent_gone,
    raise_on_sigterm,
    run_and_leave,
    under_spark_submit,
)

logger = logging.getLogger(__name__)

# How long a caller may take for its request, and how often to look whether the receiver job is gone.
_SECONDS = 2.0
# How long a batch whose caller is gone may take to end after SIGTERM: it cancels its Spark jobs first.
_TERMINATION_SECONDS = 15.0
# Some systems delete what is older than some days from the folder of temporary files.
_TOUCH_SECONDS = 3600.0
# Until a forked process has the handlers of a batch, these wait. Those of the server are for its own end.
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def start_batch_server(ledger: str, stream_name: str) -> subprocess.Popen[bytes] | None:
    """Start the server of a stream's receiver job. Returns None where the system cannot wait for a forked process."""
    if not hasattr(os, "pidfd_open"):
        return None
    # Spark's own variables would make a forked batch one under spark-submit.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYSPARK_", "SPARK_"))}
    # A fork has no threads for linear algebra. A process's title must leave /proc/<pid>/environ as it is.
    environment |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "SPT_NOENV": "1"}
    command = [sys.executable, "-m", __name__, str(os.getpid()), ledger, stream_name]
    return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)


def link_batch_server(ledger: str, stream_name: str, application: str) -> None:
    """Let callers of the stream find the server of a shared job's application (`Stream.application`)."""
    path = socket_path(ledger, stream_name)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    new = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
    new.symlink_to(socket_path(ledger, application).name)
    new.replace(path)


def unlink_batch_server(ledger: str, stream_name: str) -> None:
    """Undo `link_batch_server`."""
    path = socket_path(ledger, stream_name)
    if path.is_symlink():
        path.unlink(missing_ok=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve until the process that started this one ends, or SIGTERM. The arguments: its number, ledger, stream."""
    parent, ledger, stream = sys.argv[1:] if arguments is None else arguments
    raise_on_sigterm()
    # A terminal sends it to all processes of the receiver job, which ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gone = parent_gone(int(parent))
    try:
        # A kernel or a container may refuse it although Python has it.
        os.close(os.pidfd_open(os.getpid()))
        _import_for_batches()
        with _Server(socket_path(ledger, stream)) as server:
            while not gone():
                server.serve(_SECONDS)
    except OSError as error:
        logger.warning("the batch server has ended, so each batch's process imports for itself: %s", error)
        sys.exit(EXIT_FAILED)
    except Terminated:
        sys.exit(EXIT_TERMINATED)


def _import_for_batches() -> None:
    import psycopg  # noqa: F401
    import sqlalchemy.dialects.postgresql
    import sqlalchemy.dialects.sqlite  # noqa: F401

    import headrace.spark.attempts.batch_command
    import headrace.spark.outputs.documents
    import headrace.spark.outputs.elasticsearch
    import headrace.spark.outputs.elasticsearch_sink
    import headrace.spark.records.batch_frames
    import headrace.spark.records.wal_source
    import headrace.wal.storage  # noqa: F401

    # The garbage collector of a forked process would write to, and so copy, the memory that it shares with this one.
    freeze_imports()


class _Server:
    """Listens at ``path``. Its loop waits for callers, their signals, and the ends of the processes."""

    def __init__(self, path: Path) -> None:
        """Raises OSError if it cannot listen there, or if other users could."""
        path.parent.mkdir(mode=0o700, exist_ok=True)
        if not is_own_folder(path.parent):
            raise PermissionError(f"{path.parent} is not a folder of this user alone")
        self._path = path
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX)
        # An earlier server may still be there, or its socket.
        new = path.with_suffix(f".{os.getpid()}")
        self._listener.bind(str(new))
        self._listener.listen()
        new.replace(path)
        self._number = path.stat().st_ino
        self._terminated: list[_Batch] = []
        self._touch_at = time.monotonic() + _TOUCH_SECONDS
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def __enter__(self) -> _Server:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        with contextlib.suppress(OSError):
            if self._path.stat().st_ino == self._number:
                self._path.unlink()

    def serve(self, seconds: float) -> None:
        """Handle what comes within this time."""
        now = time.monotonic()
        for key, _ in self._selector.select(min([seconds, *(batch.kill_at - now for batch in self._terminated)])):
            # An earlier one of these may have closed its descriptor, whose number may be another one's now.
            if self._selector.get_map().get(key.fd) is key:
                key.data()
        self._kill_overdue()
        if time.monotonic() > self._touch_at:
            self._touch_at = time.monotonic() + _TOUCH_SECONDS
            with contextlib.suppress(OSError):
                os.utime(self._path)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        connection.settimeout(_SECONDS)
        try:
            batch = _forked(connection)
        except (OSError, ValueError, LookupError, TypeError) as error:
            logger.warning("a batch's process was not forked: %s", error)
            with connection, contextlib.suppress(OSError):
                connection.sendall(STATUS.pack(NOT_FORKED))
            return
        self._selector.register(connection, selectors.EVENT_READ, partial(self._pass_on, batch))
        self._selector.register(batch.process, selectors.EVENT_READ, partial(self._answer, batch))

    def _pass_on(self, batch: _Batch) -> None:
        """Send the caller's signals to the process. If the caller is gone, the process has to end."""
        try:
            signals = batch.connection.recv(16)
        except OSError:
            signals = b""
        if not signals:
            self._selector.unregister(batch.connection)
            self._end(batch)
        for number in signals:
            batch.has_sigterm |= number == signal.SIGTERM
            _send(number, batch)

    def _end(self, batch: _Batch) -> None:
        """Send SIGTERM, and SIGKILL later; SIGKILL at once if it has had SIGTERM from its caller."""
        if batch.has_sigterm:
            _send(signal.SIGKILL, batch)
            return
        _send(signal.SIGTERM, batch)
        batch.kill_at = time.monotonic() + _TERMINATION_SECONDS
        self._terminated.append(batch)

    def _kill_overdue(self) -> None:
        now = time.monotonic()
        for batch in [terminated for terminated in self._terminated if now >= terminated.kill_at]:
            logger.warning("process %d of a batch did not end after SIGTERM, and is killed", batch.pid)
            self._terminated.remove(batch)
            _send(signal.SIGKILL, batch)

    def _answer(self, batch: _Batch) -> None:
        """Report to the caller how the process ended."""
        status = os.waitstatus_to_exitcode(os.waitpid(batch.pid, 0)[1])
        self._selector.unregister(batch.process)
        os.close(batch.process)
        if batch in self._terminated:
            self._terminated.remove(batch)
        with contextlib.suppress(KeyError):
            self._selector.unregister(batch.connection)
        with batch.connection, contextlib.suppress(OSError):
            batch.connection.sendall(STATUS.pack(status))


@dataclass(slots=True, eq=False)
class _Batch:
    """A forked process, with its descriptor, and the connection to its caller.

    ``has_sigterm``: its caller has passed SIGTERM on. ``kill_at``: when it gets SIGKILL, once its caller is gone.
    """

    connection: socket.socket
    pid: int
    process: int
    has_sigterm: bool = False
    kill_at: float = 0.0


def _send(number: int, batch: _Batch) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(batch.process, number)


def _forked(connection: socket.socket) -> _Batch:
    """Read a caller's request and fork its process. Raises OSError, ValueError, LookupError, TypeError."""
    length, streams, _, _ = socket.recv_fds(connection, LENGTH.size, 3)
    try:
        request = _request(connection, length)
        _check_identity(request["identity"])
        if len(streams) != 3:
            raise ValueError(f"{len(streams)} standard streams")
        server = os.getpid()
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            pid = os.fork()
            if not pid:
                run_and_leave(partial(_run_as_caller, request, streams, server))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    finally:
        # The end of a caller's output is seen when nobody has it open.
        for descriptor in streams:
            os.close(descriptor)
    try:
        return _Batch(connection, pid, os.pidfd_open(pid))
    except OSError:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise


def _request(connection: socket.socket, length: bytes) -> dict[str, Any]:
    (wanted,) = LENGTH.unpack(length.ljust(LENGTH.size, b"\0"))
    payload = b""
    while len(payload) < wanted and (part := connection.recv(wanted - len(payload))):
        payload += part
    if len(payload) < wanted:
        raise ValueError(f"{len(payload)} bytes of {wanted}")
    return json.loads(payload)  # type: ignore[no-any-return]


def _check_identity(wanted: dict[str, Any]) -> None:
    """Raise PermissionError if a forked process could not become what a new process of the caller would be."""
    # As JSON gives it back.
    own = json.loads(json.dumps(identity()))
    if differing := [f"{name} {wanted[name]}, not {own[name]}" for name in own if wanted[name] != own[name]]:
        raise PermissionError(f"its caller has {'; '.join(differing)}; let both run with the same")


def _run_as_caller(request: dict[str, Any], streams: Sequence[int], server: int) -> int:
    """Make this forked process what a new process of the caller would be, and run the batch's command in it."""
    # First, so that the caller gets the text of an error.
    for target, source in enumerate(streams):
        os.dup2(source, target)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)

    import numpy as np
    from setproctitle import setproctitle

    from headrace.spark.attempts.batch_command import main as run

    setproctitle(request["title"])
    os.environ.clear()
    os.environ.update(request["environment"])
    time.tzset()
    os.chdir(request["folder"])
    sys.argv[:] = request["arguments"]
    sys.path[:] = request["path"]
    tempfile.tempdir = None
    _set(request["settings"])
    np.random.seed()
    ProcessWatch(parent_gone(server)).start()
    return run(sys.argv[1:])


def _set(settings: dict[str, Any]) -> None:
    os.umask(settings["umask"])
    for name, soft in settings["soft_limits"].items():
        number = getattr(resource, name)
        resource.setrlimit(number, (soft, resource.getrlimit(number)[1]))
    signal.signal(signal.SIGHUP, signal.SIG_IGN if settings["ignores_hangup"] else signal.SIG_DFL)
    locale.setlocale(locale.LC_CTYPE, settings["locale"])
    # New ones, since those of the server may have been of files. Buffered by line, as with PYTHONUNBUFFERED, so that
    # lines are in the task's log as soon as they are printed.
    sys.stdin, sys.stdout, sys.stderr = (
        os.fdopen(number, mode, buffering=1, encoding=encoding, errors=errors, closefd=False)
        for number, (mode, (encoding, errors)) in enumerate(zip("rww", settings["encodings"], strict=True))
    )


STATUS = struct.Struct("!i")
"""The answer: the exit code, or the negative number of the signal that killed the process; `NOT_FORKED`."""
NOT_FORKED = -(2**31)
"""The answer if the system refused the process. The caller then runs the batch itself."""
LENGTH = struct.Struct("!I")
"""What precedes the request, with the descriptors of standard input, output and error; then its bytes, JSON."""

_LIMITS = sorted(name for name in dir(resource) if name.startswith("RLIMIT_"))
# Signals that end a batch's process.
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def socket_path(ledger: str, stream_name: str) -> Path:
    """Where a stream's batch server listens, for callers with the same ledger URL, Python environment and headrace."""
    digest = hashlib.sha256("\n".join((ledger, stream_name, sys.prefix, sys.version, __version__)).encode()).hexdigest()
    # Short, because the path of a socket may have 107 characters.
    return own_folder() / digest[:16]


def run_in_server(arguments: Sequence[str]) -> int | None:
    """Run ``batch_command.main(arguments)`` there and return its exit code; None if no server could run it.

    This process's standard streams, environment, folder, path and `settings` are the other one's. A signal that ends
    this process goes to the other one first. If the other one is killed by a signal, so is this process.
    """
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    for name in ("--ledger", "--stream", "--batch-time"):
        parser.add_argument(name, default="")
    parser.add_argument("--way", default="connect")
    try:
        options, _ = parser.parse_known_args(arguments)
    except argparse.ArgumentError:
        return None
    # Under spark-submit this process has a JVM of its own.
    if options.way != "connect" or under_spark_submit():
        return None
    connection = _connected(socket_path(options.ledger, options.stream))
    if connection is None:
        return None
    request = {
        "title": f"headrace batch {options.stream} {options.batch_time}",
        "arguments": sys.argv,
        "environment": dict(os.environ),
        "folder": str(Path.cwd()),
        "path": sys.path,
        "settings": settings(),
        "identity": identity(),
    }
    with connection:
        code = _answer(connection, json.dumps(request).encode())
    if code is not None and code < 0:
        # SIGKILL has no handler that could be reset.
        with contextlib.suppress(OSError):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


def settings() -> dict[str, Any]:
    """What a new process would inherit from this one, and a process forked elsewhere has to set."""
    umask = os.umask(0o077)
    os.umask(umask)
    return {
        "umask": umask,
        "soft_limits": {name: resource.getrlimit(getattr(resource, name))[0] for name in _LIMITS},
        "locale": locale.setlocale(locale.LC_CTYPE),
        "encodings": [(stream.encoding, stream.errors) for stream in (sys.stdin, sys.stdout, sys.stderr) if stream],
        "ignores_hangup": signal.getsignal(signal.SIGHUP) is signal.SIG_IGN,
    }


def identity() -> dict[str, Any]:
    """What a new process would inherit from this one, and no process can set for itself without privileges."""
    return {
        "users": os.getresuid(),
        "groups": [*os.getresgid(), sorted(os.getgroups())],
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "cpus": sorted(os.sched_getaffinity(0)),
        "hard_limits": {name: resource.getrlimit(getattr(resource, name))[1] for name in _LIMITS},
        "file_names": sys.getfilesystemencoding(),
    }


def _answer(connection: socket.socket, payload: bytes) -> int | None:
    """Send the request, and pass signals on until the answer. None: the process has not been forked."""
    try:
        socket.send_fds(connection, [LENGTH.pack(len(payload))], [0, 1, 2])
        connection.sendall(payload)
    except OSError:
        return None
    passed_on: list[int] = []

    def pass_on(number: int, _: object) -> None:
        passed_on.append(number)
        # The batch may have ended.
        with contextlib.suppress(OSError):
            connection.send(bytes([number]))

    handlers = {number: signal.signal(number, pass_on) for number in _PASSED_ON}
    try:
        status = connection.recv(STATUS.size)
    except OSError:
        # A server that ends with an unread signal resets the connection.
        status = b""
    if len(status) < STATUS.size:
        print("headrace: the receiver job that the batch ran in has ended", file=sys.stderr)
        return EXIT_FAILED
    (code,) = STATUS.unpack(status)
    if code != NOT_FORKED:
        return int(code)
    for signal_number, handler in handlers.items():
        signal.signal(signal_number, handler)
    for number in passed_on:
        os.kill(os.getpid(), number)
    return None


def _connected(path: Path) -> socket.socket | None:
    if not is_own_folder(path.parent):
        return None
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(str(path))
    except OSError:
        connection.close()
        return None
    return connection


if __name__ == "__main__":
    main()
