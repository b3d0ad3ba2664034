from __future__ import annotations

import os
import signal
import sys
import time

import pytest

from headrace.runs.detached import DetachedProcess, spawn, tail


def until(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("did not happen in time")


@pytest.fixture
def sleeper(tmp_path):
    process = spawn(
        [sys.executable, "-c", "import os, time; print('up', os.getsid(0), flush=True); time.sleep(60)"],
        environment=dict(os.environ),
        log=tmp_path / "logs" / "job.log",
    )
    yield process
    if process.alive():
        os.killpg(process.pid, signal.SIGKILL)
    until(lambda: not process.alive())


def test_a_detached_process_has_its_own_session_and_log(sleeper):
    until(lambda: "up" in tail(sleeper.log))
    assert tail(sleeper.log).split()[1] == str(sleeper.pid)
    assert os.getsid(0) != sleeper.pid
    assert sleeper.alive()


def test_the_log_of_a_detached_process_is_private(sleeper):
    assert sleeper.log.stat().st_mode & 0o007 == 0


def test_a_later_process_with_the_same_id_is_not_the_detached_one(sleeper):
    assert not DetachedProcess(sleeper.pid, sleeper.created - 100, sleeper.log).alive()


def test_the_end_is_seen_with_its_code_and_last_lines(tmp_path):
    code = "import sys; [print('line', n) for n in range(100)]; sys.exit(3)"
    process = spawn([sys.executable, "-c", code], environment=dict(os.environ), log=tmp_path / "job.log")
    until(lambda: not process.alive())
    assert process.exit_code() == 3
    assert tail(process.log, lines=2).splitlines() == ["line 98", "line 99"]


def test_a_log_on_another_host_has_no_tail(tmp_path):
    assert tail(tmp_path / "nowhere.log") == ""
