"""The faults of a host: a full disk, slow syncs, another clock. Each is shown with its part and its remedy."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.hammer import fault_injector
from tests.hammer.false_clock import FalseClock
from tests.hammer.fault_injector import FaultInjector
from tests.hammer.journal import Journal
from tests.hammer.kinds import Action, Target
from tests.hammer.onlooker import Shown
from tests.hammer.services import Services
from tests.hammer.slow_syncs import SlowSyncs
from tests.unit.hammer.conftest import Found, Pages, fault, wait_until

SYNC = """
import sys
from headrace.wal.storage import LocalStorage

storage = LocalStorage(sys.argv[1])
file = storage.create_segment("0.wal")
file.append([b"a"])
file.append([b"b"])
"""


class Disk:
    """A small disk that only notes what is done."""

    free = 1 << 20

    def __init__(self, done: list[str]) -> None:
        self._done = done

    @contextlib.contextmanager
    def full(self) -> Iterator[None]:
        self._done.append("full")
        yield
        self._done.append("free")


class Clock:
    """Sets no clock; the third process that is looked at has the wrong one."""

    def __init__(self, done: list[str]) -> None:
        self._done = done
        self.asked = 0

    @contextlib.contextmanager
    def wrong(self, action: Action) -> Iterator[None]:
        self._done.append(str(action))
        yield
        self._done.append("right")

    def is_of(self, _process: psutil.Process) -> bool:
        self.asked += 1
        return self.asked >= 3


@pytest.fixture
def done() -> list[str]:
    """In this order."""
    return []


@pytest.fixture
def syncs(tmp_path: Path) -> SlowSyncs:
    """Of the log."""
    return SlowSyncs(tmp_path / "syncs", tmp_path / "log")


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hammer."""
    monkeypatch.setattr(fault_injector, "LOOK_SECONDS", 0.01)


@pytest.fixture
def injector(targets: Found, journal: Journal, pages: Pages, done: list[str], syncs: SlowSyncs) -> FaultInjector:
    """With all that a host has."""
    disk: Any = Disk(done)
    clock: Any = Clock(done)
    return FaultInjector(
        targets=targets,
        services=Services({}, journal),
        disks={Target.DISK: disk, Target.LEDGER_DISK: disk},
        delete_ledger=lambda: None,
        shrink_ledger=lambda: done.append("shrunk"),
        journal=journal,
        look=pages.look,
        syncs=syncs,
        clock=clock,
    )


FULL_LOG = "Receiver hammer/records/0 is paused: OSError: [Errno 28] No space left on device"
FULL_LEDGER = "The ledger cannot be written: The disk of the ledger /x/ledger.db is full"


@pytest.mark.parametrize(
    ("kind", "reason", "remedy", "seen"),
    [
        ("disk full", FULL_LOG, "If its disk is full, make room in the stream's storage", True),
        ("disk full", FULL_LOG, "Start it.", False),
        ("disk full", FULL_LEDGER, "Make room on that disk.", False),
        ("ledger-disk full", FULL_LEDGER, "Make room on that disk.", True),
        ("ledger-disk full", FULL_LEDGER, "Check that it runs.", False),
        ("clock a year ahead", "The clock of a is 365 d ahead of the ledger's clock.", "Correct the clock", True),
        ("clock a year ahead", "Batch 12:00 is late by 2 min.", "See its page.", False),
    ],
)
def test_a_hosts_fault_has_to_be_shown_with_part_and_remedy(
    *,
    kind: str,
    reason: str,
    remedy: str,
    seen: bool,
    injector: FaultInjector,
    targets: Found,
    pages: Pages,
    process: psutil.Process,
) -> None:
    targets.groups = [[process]]
    # A job that is killed is there again at once.
    targets.find = lambda target: []  # type: ignore[method-assign]
    injector._find = lambda target, deadline: None  # type: ignore[method-assign]
    pages.shown = Shown("failing", reason, remedy)
    injection = injector.inject(fault(kind, hold=0.2))
    assert injection.hit
    assert (injection.unnamed is None) is seen
    assert injector.inject(fault(kind, hold=0.05)).unnamed is None, "too short to be seen"


def test_the_ledger_is_shrunk_before_its_disk_is_full(
    injector: FaultInjector, targets: Found, process: psutil.Process, done: list[str]
) -> None:
    targets.groups = [[process]]
    assert injector.inject(fault("ledger-disk full")).hit
    assert injector.inject(fault("disk full")).hit
    assert done == ["shrunk", "full", "free", "full", "free"]


def test_a_disk_is_full_only_while_somebody_writes_to_the_log(
    injector: FaultInjector, done: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fault_injector, "TIMEOUT_SECONDS", 0.1)
    assert "nobody wrote to the log" in str(injector.inject(fault("ledger-disk full")).missed)
    assert not done


def test_a_job_starts_with_a_wrong_clock_and_ends_with_it(
    injector: FaultInjector, targets: Found, process: psutil.Process, done: list[str]
) -> None:
    targets.groups = [[process]]
    killed: list[int] = []
    injector._kill_jobs = lambda: killed.append(len(done))  # type: ignore[method-assign]
    injection = injector.inject(fault("clock an hour behind"))
    assert injection.hit
    assert injection.pids == (process.pid,)
    assert done == ["an hour behind", "right"]
    clock: Any = injector._clock
    assert clock.asked == 3, "a process of before is not one that was hit"
    assert killed == [1, 2], "once with the clock set, and once it is right again"


def test_syncs_of_the_log_are_slow_and_others_are_not(tmp_path: Path, syncs: SlowSyncs) -> None:
    log, other = tmp_path / "log", tmp_path / "other"
    environment = {**os.environ, "PYTHONPATH": syncs.python_path}

    def sync(folder: Path) -> int:
        folder.mkdir()
        subprocess.run([sys.executable, "-c", SYNC, str(folder)], env=environment, check=True)
        return syncs.delayed

    assert sync(log) == 0
    with syncs.slow(0.001):
        assert sync(other) == 0
        log.rename(tmp_path / "before")
        assert sync(log) >= 2, "of the file's first bytes, and of the others"


def test_slow_syncs_hit_once_one_was_slow(
    injector: FaultInjector, syncs: SlowSyncs, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    hit: list[bool] = []

    def delayed(_: SlowSyncs) -> int:
        hit.append(journal.injections[0].hit)
        return len(hit) // 3

    monkeypatch.setattr(SlowSyncs, "delayed", property(delayed))
    assert injector.inject(fault("syncs slow")).hit
    assert hit[:3] == [False, False, False]
    assert not Path(syncs.python_path, "delay").exists()


def test_what_is_started_with_a_wrong_clock_keeps_it(tmp_path: Path) -> None:
    clock = FalseClock(tmp_path / "home", Path(sys.executable))
    command = [str(tmp_path / "home" / "bin" / "java"), "-c"]
    code = "import sys, time; print(time.time(), time.monotonic(), flush=True); sys.stdin.read()"

    def ahead(action: Action | None) -> float:
        wrong = contextlib.nullcontext() if action is None else clock.wrong(action)
        with wrong, subprocess.Popen([*command, code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as started:
            assert started.stdout is not None
            now, monotonic = map(float, started.stdout.readline().split())
            assert clock.is_of(psutil.Process(started.pid)) is (action is not None)
            assert abs(monotonic - time.monotonic()) < 60
            assert started.stdin is not None
            started.stdin.close()
            wait_until(lambda: started.poll() is not None)
        return now - time.time()

    assert abs(ahead(Action.HOUR_AHEAD) - 3_600) < 60
    assert abs(ahead(Action.YEAR_BEHIND) + 365 * 86_400) < 60
    assert abs(ahead(None)) < 60
