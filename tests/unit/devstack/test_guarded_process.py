"""Guards with children that cost nothing to start: a shell, a sleep."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from headrace.devstack.errors import LocalStackError, ServerDiedError, ServerNotReadyError
from headrace.devstack.guarded_process import GuardedProcess, ProcessSpec, child_environment, tail

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="guards adopt orphans on Linux alone")


class _Guards:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[GuardedProcess] = []

    def run(self, script: str, *, keep_descendants: bool = False, grace_seconds: float = 5.0) -> GuardedProcess:
        spec = ProcessSpec(
            name="a shell",
            argv=["/bin/sh", "-c", script],
            log=self.folder / "log",
            env=child_environment(),
            keep_descendants=keep_descendants,
            grace_seconds=grace_seconds,
        )
        process = GuardedProcess(spec)
        self.started.append(process)
        return process

    def until_logged(self, word: str) -> list[int]:
        """Wait for a line of the log that starts with ``word``; the numbers in it."""
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            for line in (self.folder / "log").read_text().splitlines():
                if line.startswith(word):
                    return [int(part) for part in line.split() if part.isdigit()]
            time.sleep(0.01)
        raise AssertionError(f"no {word!r} in the log")


@pytest.fixture
def guards(tmp_path: Path) -> Iterator[_Guards]:
    guards = _Guards(tmp_path)
    yield guards
    for process in guards.started:
        process.stop()


def _gone(pid: int, seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.01)
    return False


def _reaches(pid: int, status: str) -> bool:
    deadline = time.monotonic() + 10
    while psutil.Process(pid).status() != status:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def test_a_process_runs_and_stops(guards: _Guards) -> None:
    process = guards.run("exec sleep 100")
    assert process.alive
    process.stop()
    assert not process.alive
    assert process.exit_code == -signal.SIGTERM
    assert not psutil.pid_exists(process.guard_pid)
    process.stop()


def test_a_process_that_ignores_sigterm_is_killed(guards: _Guards) -> None:
    process = guards.run("trap '' TERM; echo ready; while :; do sleep 0.05; done", grace_seconds=0.2)
    guards.until_logged("ready")
    process.stop()
    assert process.exit_code == -signal.SIGKILL


def test_what_it_detached_goes_with_it(guards: _Guards) -> None:
    process = guards.run("setsid sh -c 'sleep 100 & echo detached $!; wait' & echo main; exec sleep 100")
    (detached,) = guards.until_logged("detached")
    process.stop()
    assert _gone(detached)


# Each process forks the next one and ends, so a list of the processes often has none of them.
_CHAIN = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("begun", flush=True)
end = time.monotonic() + 2
while time.monotonic() < end:
    if os.fork():
        os._exit(0)
print("last", os.getpid(), flush=True)
time.sleep(100)
"""


def test_what_moves_from_process_to_process_goes_with_it(guards: _Guards) -> None:
    (guards.folder / "chain.py").write_text(_CHAIN)
    process = guards.run(f"setsid {sys.executable} -IS {guards.folder}/chain.py & exec sleep 100")
    guards.until_logged("begun")
    process.stop()
    (last,) = guards.until_logged("last")
    assert not psutil.pid_exists(last)


def test_what_a_crashed_one_leaves_is_ended(guards: _Guards) -> None:
    process = guards.run("setsid sh -c 'sleep 100 & echo detached $!; wait' & exec sleep 100")
    (detached,) = guards.until_logged("detached")
    process.kill()
    assert process.exit_code == -signal.SIGKILL
    assert _gone(detached)


def test_what_a_crashed_one_leaves_can_be_kept_until_stop(guards: _Guards) -> None:
    process = guards.run("setsid sh -c 'sleep 100 & echo detached $!; wait' & exec sleep 100", keep_descendants=True)
    (detached,) = guards.until_logged("detached")
    process.kill()
    assert not process.alive
    assert psutil.pid_exists(detached)
    process.stop()
    assert _gone(detached)


def test_a_killed_guard_takes_its_server_along(guards: _Guards) -> None:
    process = guards.run("exec sleep 100")
    os.kill(process.guard_pid, signal.SIGKILL)
    assert _gone(process.pid)
    assert process.wait(10)


_OWNER = """
import sys, time
from pathlib import Path
from headrace.devstack.guarded_process import GuardedProcess, ProcessSpec, child_environment
spec = ProcessSpec(name="x", argv=["/bin/sleep", "100"], log=Path(sys.argv[1]), env=child_environment())
process = GuardedProcess(spec)
print(process.pid, process.guard_pid, flush=True)
time.sleep(100)
"""


def test_a_killed_owner_takes_all_along(tmp_path: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", _OWNER, str(tmp_path / "log")],
        stdout=subprocess.PIPE,
        text=True,
        env=child_environment(),
    )
    assert owner.stdout is not None
    with owner.stdout:
        pids = [int(pid) for pid in owner.stdout.readline().split()]
        owner.kill()
        owner.wait()
    assert len(pids) == 2
    assert all(_gone(pid) for pid in pids)


def test_death_before_the_answer_shows_this_runs_log(guards: _Guards) -> None:
    (guards.folder / "log").write_text("of an earlier run\n")
    process = guards.run("echo 'cannot bind'; exit 3")

    def probe() -> None:
        raise OSError("refused")

    with pytest.raises(ServerDiedError, match=r"a shell ended with exit code 3.*\n.*cannot bind") as raised:
        process.wait_until_ready(probe, timeout=10)
    assert "earlier" not in str(raised.value)


def test_no_answer_in_time_shows_the_last_try_and_the_log(guards: _Guards) -> None:
    process = guards.run("echo 'still loading'; exec sleep 100")
    guards.until_logged("still")

    def probe() -> None:
        raise OSError("refused")

    with pytest.raises(ServerNotReadyError, match=r"OSError: refused[^$]*still loading"):
        process.wait_until_ready(probe, timeout=0.2)


def test_a_program_that_is_not_there_is_said_to_be_so(tmp_path: Path) -> None:
    with pytest.raises(LocalStackError, match=r"could not be started.*No such file"):
        GuardedProcess(ProcessSpec(name="x", argv=["/nowhere/x"], log=tmp_path / "log"))


def test_a_suspended_one_lives_and_does_nothing(guards: _Guards) -> None:
    process = guards.run("exec sleep 100")
    process.suspend()
    assert _reaches(process.pid, psutil.STATUS_STOPPED)
    assert process.alive
    process.resume()
    assert _reaches(process.pid, psutil.STATUS_SLEEPING)


def test_a_suspended_one_stops_in_order(guards: _Guards) -> None:
    process = guards.run("exec sleep 100")
    process.suspend()
    process.stop()
    assert process.exit_code == -signal.SIGTERM


def test_children_compile_their_imports_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    assert "PYTHONDONTWRITEBYTECODE" not in child_environment()


def test_a_tail_keeps_the_error_that_has_scrolled_away(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("ERROR the cause\n\tat a.b.C(C.java:1)\n" + "".join(f"shutting down {n}\n" for n in range(100)))
    lines = tail(log).splitlines()
    assert lines[0] == "ERROR the cause"
    assert lines[-1] == "shutting down 99"
    assert len(lines) < 40


def test_a_log_is_for_its_owner_alone(guards: _Guards) -> None:
    guards.run("exit 0").wait(10)
    assert (guards.folder / "log").stat().st_mode & 0o777 == 0o600
