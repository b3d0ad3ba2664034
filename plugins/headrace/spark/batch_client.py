"""Runs a batch's command in a process that has its imports already, if the receiver job keeps one (``batch_server``).

The imports of a batch take more than a second: SQLAlchemy, pydantic, and pyspark's client with pandas and gRPC. This
module needs few, because it runs before them.

The folder of the sockets is this user's own, so no other user can answer, or get the request: it has the secrets of
this process's environment.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import locale
import os
import resource
import signal
import socket
import stat
import struct
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace import __version__
from headrace.spark.process_watch import under_spark_submit
from headrace.spark.termination import EXIT_FAILED

STATUS = struct.Struct("!i")
"""The answer: the exit code, or the negative number of the signal that killed the process; `NOT_FORKED`."""
NOT_FORKED = -(2**31)
"""The answer if the system refused the process. The caller then runs the batch itself."""
LENGTH = struct.Struct("!I")
"""What precedes the request, with the descriptors of standard input, output and error; then its bytes, JSON."""

_LIMITS = sorted(name for name in dir(resource) if name.startswith("RLIMIT_"))
# Signals that end a batch's process.
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def socket_path(ledger: str, stream: str) -> Path:
    """Where a stream's batch server listens, for callers with the same ledger URL, Python environment and headrace."""
    digest = hashlib.sha256("\n".join((ledger, stream, sys.prefix, sys.version, __version__)).encode()).hexdigest()
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
        "encodings": [(each.encoding, each.errors) for each in (sys.stdin, sys.stdout, sys.stderr) if each],
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

    handlers = {each: signal.signal(each, pass_on) for each in _PASSED_ON}
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
    for each, handler in handlers.items():
        signal.signal(each, handler)
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


def own_folder() -> Path:
    """The folder of this user alone below the temporary folder; see `is_own_folder`."""
    return Path(tempfile.gettempdir()) / f"headrace-{os.geteuid()}"


def is_own_folder(path: Path) -> bool:
    """Whether it is a folder that belongs to this user, and only this user can enter it."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
