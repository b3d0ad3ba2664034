"""A sample of `python -m tests.hammer.host`, and what it can find."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.hammer import host_life
from tests.hammer.host import NO_DISK, command_of
from tests.hammer.host_life import HostLife
from tests.hammer.kinds import WORDS, Target, Words
from tests.hammer.life import WrongOutcomeError, without_real_waits

FAULTS = ("fill_ledgers_disk", "slow_the_syncs", "set_clock")


@pytest.mark.slow
def test_hosts_that_fail_lose_nothing_and_the_part_is_named() -> None:
    """The ledger's disk is really full: a process of its own has it."""
    command = [sys.executable, *command_of(0).split()[1:]]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    if done.returncode == NO_DISK:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(fault in done.stdout for fault in FAULTS), done.stdout


def test_a_part_that_is_not_named_fails_the_drill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = Words(("the weather",), "Wait for another day")
    monkeypatch.setattr(host_life, "WORDS", {**WORDS, Target.CLOCK: unknown})
    (tmp_path / "disk").mkdir()
    disk: Any = SimpleNamespace(folder=tmp_path / "disk", is_full=False)
    life = HostLife(tmp_path, 0, disk)
    with without_real_waits():
        life._start_job()
        with pytest.raises(WrongOutcomeError, match="A fault of clock is not shown with its part"):
            life.set_clock()
        life._end_job()
