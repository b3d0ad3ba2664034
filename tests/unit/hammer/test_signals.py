"""Signals to real processes: a signal without effect is a miss."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest
from tests.hammer import signals
from tests.hammer.errors import TargetMissedError

SLEEPS = [sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"]


@pytest.fixture
def child() -> Iterator[psutil.Process]:
    """A process that does nothing for long."""
    with subprocess.Popen(SLEEPS, stdout=subprocess.PIPE) as started:
        assert started.stdout is not None
        started.stdout.readline()
        try:
            yield psutil.Process(started.pid)
        finally:
            started.kill()


def test_kill_9_ends_it(child: psutil.Process) -> None:
    signals.kill([child])
    assert child.status() == psutil.STATUS_ZOMBIE


def test_what_has_ended_before_is_missed(child: psutil.Process) -> None:
    child.kill()
    child.wait()
    with pytest.raises(TargetMissedError, match="had ended before the fault"):
        signals.kill([child])
    with pytest.raises(TargetMissedError, match="had ended before the fault"):
        signals.terminate([child])
    with pytest.raises(TargetMissedError, match="did not stop"):
        signals.Hanging().stop([child])


def test_what_waits_to_be_reaped_is_missed(child: psutil.Process) -> None:
    child.kill()
    deadline = time.monotonic() + 30
    while child.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
    with pytest.raises(TargetMissedError, match="had ended before the fault"):
        signals.kill([child])


def test_a_hung_process_stands_still_until_it_goes_on(child: psutil.Process) -> None:
    hanging = signals.Hanging()
    hanging.stop([child])
    assert child.status() == psutil.STATUS_STOPPED
    assert hanging.go_on([child])
    assert child.status() != psutil.STATUS_STOPPED


def test_a_hung_process_that_others_have_ended_is_reported(child: psutil.Process) -> None:
    hanging = signals.Hanging()
    hanging.stop([child])
    child.kill()
    child.wait()
    assert not hanging.go_on([child])


def test_release_lets_everything_go_on(child: psutil.Process) -> None:
    hanging = signals.Hanging()
    hanging.stop([child])
    hanging.release()
    assert child.status() != psutil.STATUS_STOPPED


def test_terminate_asks(child: psutil.Process) -> None:
    signals.terminate([child])
    assert child.wait(30) == -signal.SIGTERM
