"""Runs a server process under a guard: starts it, probes it until it answers, stops it, or kills it like a crash."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from headrace.devstack.errors import LocalStackError, ServerDiedError, ServerNotReadyError

_GUARD = Path(__file__).with_name("guard.py")
_TAIL_BYTES = 1 << 16
_TAIL_LINES = 20
_ERROR_LINES = 10
_FRAME = re.compile(r"\s+(at .+\)|\.\.\. \d+ more)$")
_ERROR = re.compile(r"\b(ERROR|FATAL|CRITICAL|Caused by|Traceback|\w*(Exception|Error))\b")


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """What to run, and how to stop it.

    ``user`` is the (uid, gid) to run as. ``grace_seconds`` is how long it may take to stop before it is killed.
    ``keep_descendants`` leaves its descendants running if it ends by itself (never if it is stopped).
    """

    name: str
    argv: Sequence[str]
    log: Path
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: Path | None = None
    user: tuple[int, int] | None = None
    stop_signal: int = signal.SIGTERM
    grace_seconds: float = 20.0
    keep_descendants: bool = False


class GuardedProcess:
    """A started ``ProcessSpec``. It ends when this process does, however this process ends."""

    def __init__(self, spec: ProcessSpec) -> None:
        self.spec = spec
        self.exit_code: int | None = None
        self._suspended = False
        self._exited = threading.Event()
        self._log_start = spec.log.stat().st_size if spec.log.exists() else 0
        spec.log.parent.mkdir(parents=True, exist_ok=True)
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_GUARD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches only this process, which stops the servers in order.
            env=child_environment(),
        )
        self.pid = self._launch()
        threading.Thread(target=self._watch, name=f"watch-{spec.name}", daemon=True).start()

    @property
    def guard_pid(self) -> int:
        """The guard's process id; its descendants are the server's processes."""
        return self._guard.pid

    @property
    def alive(self) -> bool:
        """Whether the server itself runs."""
        return not self._exited.is_set()

    def wait_until_ready(self, probe: Callable[[], None], *, timeout: float) -> None:
        """Call ``probe`` until it no longer raises.

        Raises ServerDiedError if the server ends first, and ServerNotReadyError after ``timeout`` seconds.
        """
        deadline = time.monotonic() + timeout
        last = ""
        while True:
            self.check()
            try:
                probe()
                return
            except Exception as error:  # a probe fails in as many ways as clients do
                last = f"{type(error).__name__}: {error}"
            if time.monotonic() > deadline:
                raise ServerNotReadyError(self.spec.name, timeout, last, self.spec.log, self.log_tail())
            self._exited.wait(0.1)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the server itself to end, ``timeout`` seconds at most. Returns whether it has ended."""
        return self._exited.wait(timeout)

    def check(self) -> None:
        """Raise ServerDiedError if the server has ended."""
        if self._exited.is_set():
            code = self.exit_code
            text = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"
            raise ServerDiedError(self.spec.name, text, self.spec.log, self.log_tail())

    def log_tail(self) -> str:
        """The last lines that this run (not an earlier one) wrote to its log."""
        return tail(self.spec.log, self._log_start)

    def request_stop(self) -> None:
        """Ask for an orderly stop, without waiting for it."""
        if self._suspended:
            self.resume()
        if self._guard.stdin is not None and not self._guard.stdin.closed:
            with contextlib.suppress(OSError):
                self._guard.stdin.close()

    def stop(self) -> None:
        """Stop the server and all its descendants, in order and then by force; returns when they have ended."""
        self.request_stop()
        try:
            # Long enough for a busy machine: until its guard has ended, no process can escape.
            self._guard.wait(self.spec.grace_seconds + 60)
        except subprocess.TimeoutExpired:
            for process in self._descendants():
                with contextlib.suppress(psutil.Error):
                    process.kill()
            self._guard.kill()
            self._guard.wait()
        # The thread that reads from the guard sets it, perhaps a moment after the guard's end.
        self._exited.wait(30)

    def kill(self) -> None:
        """Kill -9 the server and its descendants, like a crash; with ``keep_descendants`` only the main process."""
        if not self.spec.keep_descendants:
            for process in self._descendants():
                if process.pid != self.pid:
                    with contextlib.suppress(psutil.Error):
                        process.kill()
        self._signal(signal.SIGKILL)
        self._exited.wait(30)
        if not self.spec.keep_descendants:
            self._guard.wait(30)

    def suspend(self) -> None:
        """SIGSTOP the server: it keeps its sockets open and does not answer, until `resume`."""
        self._suspended = True
        self._to_descendants(psutil.Process.suspend)

    def resume(self) -> None:
        """Undo `suspend`."""
        self._suspended = False
        self._to_descendants(psutil.Process.resume)

    def _to_descendants(self, call: Callable[[psutil.Process], None]) -> None:
        for process in self._descendants():
            # A process that has ended meanwhile must not keep the others from the signal.
            with contextlib.suppress(psutil.NoSuchProcess):
                call(process)

    def _signal(self, number: int) -> None:
        # While `alive`, the id is the server's: the guard reports the exit when it reaps the server.
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def _descendants(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self._guard.pid).children(recursive=True)
        except psutil.Error:
            return []

    def _launch(self) -> int:
        spec = self.spec
        line = json.dumps(
            {
                "argv": list(spec.argv),
                "env": dict(spec.env),
                "cwd": str(spec.cwd) if spec.cwd else None,
                "log": str(spec.log),
                "user": list(spec.user) if spec.user else None,
                "stop_signal": int(spec.stop_signal),
                "grace_seconds": spec.grace_seconds,
                "keep_descendants": spec.keep_descendants,
            }
        )
        if self._guard.stdin is None or self._guard.stdout is None:
            raise LocalStackError(f"{spec.name}: its guard has no pipes.")
        with contextlib.suppress(BrokenPipeError):  # detected below, by the missing answer
            self._guard.stdin.write(line.encode() + b"\n")
            self._guard.stdin.flush()
        word, _, rest = self._guard.stdout.readline().decode().strip().partition(" ")
        if word != "started":
            self.request_stop()
            self._guard.wait(30)
            raise LocalStackError(f"{spec.name} could not be started: {rest or 'its guard ended at once'}.")
        return int(rest)

    def _watch(self) -> None:
        stdout = self._guard.stdout
        if stdout is None:
            return
        with stdout:
            for line in stdout:
                word, _, rest = line.decode().strip().partition(" ")
                if word == "exited":
                    self.exit_code = int(rest)
                    self._exited.set()
        # The guard has ended, and by its rules so has the server.
        self._exited.set()
        with contextlib.suppress(Exception):
            self._guard.wait()


def child_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment for a server, plus ``extra``.

    Without PYTHONDONTWRITEBYTECODE: with it every start compiles its imports again (3 s instead of 1 s for pyspark).
    Without pytest's own variables, so that the children get the environment that a user's would.
    """
    dropped = {"PYTHONDONTWRITEBYTECODE", "PYTEST_CURRENT_TEST", "PYTEST_ADDOPTS"}
    env = {name: value for name, value in os.environ.items() if name not in dropped}
    # Otherwise setproctitle overwrites /proc/PID/environ, which is used to find a stack's processes.
    env["SPT_NOENV"] = "1"
    return env | dict(extra or {})


def tail(log: Path, start: int = 0) -> str:
    """The last lines of ``log`` from byte ``start`` on, preceded by the last error lines before them.

    Stack frames are left out: the messages say what happened, and the file has the rest.
    """
    try:
        with log.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(start if start <= end else 0, end - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    lines = [line for line in text.strip().splitlines() if line.strip() and not _FRAME.match(line)]
    errors = [line for line in lines[:-_TAIL_LINES] if _ERROR.search(line)]
    return "\n".join([*errors[-_ERROR_LINES:], *lines[-_TAIL_LINES:]])
