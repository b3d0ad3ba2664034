"""The guard: a small process that runs one server, and ends with its owner; the server ends with it.

It is run by file name with the standard library alone (`python -I -S guard.py`), so that it starts in about 30 ms.

* Standard input: one line of JSON (`Spec` below), then nothing. End of file means that the owner has ended, in whatever
  way (also by kill -9), so the server has to end too.
* Standard output: `started <pid>` and later `exited <code>` (the negative signal number if a signal killed it).
* SIGTERM and SIGINT ask for an orderly stop.

On Linux the guard is a subreaper: orphaned descendants of the server (Airflow's LocalExecutor leaves workers, tasks
start detached receivers) become the guard's children, and end with it. With `keep_descendants` a server that ends by
itself leaves them running, as a crash would; the guard then keeps running as their parent.
If the guard itself is killed, the kernel kills its server (PR_SET_PDEATHSIG).

Spec: argv, env, cwd, log (path, appended to), user (uid, gid) or null, stop_signal, grace_seconds, keep_descendants.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_LINUX = sys.platform.startswith("linux")
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_SWEEP_SECONDS = 5.0
"""How long remaining processes have to end after SIGTERM before they are killed."""


class Guard:
    """Runs one server: start it, wait for its end or the owner's, stop it, end its descendants."""

    def __init__(self, spec: dict[str, Any], prctl: Callable[[int, int], None]) -> None:
        self._spec = spec
        self._prctl = prctl
        self._stopping_since: float | None = None
        self._exited = False
        self._wake_reader, wake_writer = os.pipe()
        os.set_blocking(self._wake_reader, False)
        os.set_blocking(wake_writer, False)
        signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._request_stop)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._child = self._start()

    def run(self) -> None:
        """Run until the server has ended and, unless they are kept, all its descendants."""
        say(f"started {self._child.pid}")
        owner_alive = True
        while not self._done():
            watched = [self._wake_reader, *([0] if owner_alive else [])]
            ready, _, _ = select.select(watched, [], [], 0.1 if self._stopping_since is not None else 30)
            if self._wake_reader in ready:
                os.read(self._wake_reader, 512)
            if 0 in ready and not os.read(0, 512):
                owner_alive = False
                self._request_stop()
            self._reap()
            self._pursue()
        self._sweep()

    def _start(self) -> subprocess.Popen[bytes]:
        spec = self._spec
        user = spec["user"] or (None, None)
        # Readable by its owner alone: logs hold what tasks print, SQL and addresses.
        with os.fdopen(os.open(spec["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as log:
            return subprocess.Popen(
                spec["argv"],
                env=spec["env"],
                cwd=spec["cwd"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
                user=user[0],
                group=user[1],
                extra_groups=[] if spec["user"] else None,
                # This runs after the change of user, which would clear the setting. The guard has only one thread.
                preexec_fn=lambda: self._prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),  # noqa: PLW1509
            )

    def _request_stop(self, *_: object) -> None:
        if self._stopping_since is not None:
            return
        self._stopping_since = time.monotonic()
        if not self._exited:
            signal_process(self._child.pid, self._spec["stop_signal"])

    def _pursue(self) -> None:
        since = self._stopping_since
        if since is not None and not self._exited and time.monotonic() - since > self._spec["grace_seconds"]:
            signal_process(self._child.pid, signal.SIGKILL)

    def _reap(self) -> None:
        for pid, code in reap()[0]:
            if pid == self._child.pid:
                self._exited = True
                self._child.returncode = code
                say(f"exited {code}")

    def _done(self) -> bool:
        if not self._exited:
            return False
        return self._stopping_since is not None or not (self._spec["keep_descendants"] and reap()[1])

    def _sweep(self) -> None:
        """End the remaining processes, by SIGTERM first: Spark, for example, then removes its temporary files.

        The kernel says when none is left: a guard that has descendants has children, since it adopts the orphans. A
        list of the processes does not: it may miss one whose parent ends, or that is forked, while the list is made.
        """
        deadline = time.monotonic() + _SWEEP_SECONDS
        asked: set[int] = set()
        while reap()[1]:
            for pid in descendants():
                if time.monotonic() > deadline:
                    signal_process(pid, signal.SIGKILL)
                elif pid not in asked:
                    signal_process(pid, signal.SIGTERM)
                    asked.add(pid)
            time.sleep(0.05)
        if not _LINUX:
            # No orphans are adopted. On Linux there is nobody left, and another group may have the number by now.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._child.pid, signal.SIGKILL)


def reap() -> tuple[list[tuple[int, int]], bool]:
    """(pid, exit code) of the children that have ended, and whether there are others."""
    ended: list[tuple[int, int]] = []
    try:
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return ended, True
            ended.append((pid, os.waitstatus_to_exitcode(status)))
    except ChildProcessError:
        return ended, False


def descendants() -> list[int]:
    """The process ids of the guard's living descendants, perhaps not all; on systems other than Linux always empty."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # `pid (name) state ppid ...`; the name may contain anything, so split at the last parenthesis.
            state, parent = stat.read_text(errors="replace").rpartition(")")[2].split()[:2]
        except (OSError, ValueError):
            continue
        if state != "Z":
            parents[int(stat.parent.name)] = int(parent)
    family = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return sorted(family - {os.getpid()})


def signal_process(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def say(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(1, f"{text}\n".encode())


def prctl_of_this_system() -> Callable[[int, int], None]:
    """Linux's prctl; elsewhere a function that does nothing, and the server's end depends on the pipe alone."""
    if not _LINUX:
        return lambda _option, _value: None
    libc = ctypes.CDLL(None, use_errno=True)

    def prctl(option: int, value: int) -> None:
        libc.prctl(option, value, 0, 0, 0)

    return prctl


def main() -> None:
    line = b""
    while not line.endswith(b"\n"):
        chunk = os.read(0, 65536)
        if not chunk:
            return
        line += chunk
    prctl = prctl_of_this_system()
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        guard = Guard(json.loads(line), prctl)
    except (OSError, subprocess.SubprocessError) as error:
        say(f"failed {error}")
        return
    guard.run()


if __name__ == "__main__":
    main()
