"""A receiver whose disk is full: it lives, says so, and goes on by itself."""

from __future__ import annotations

import errno
import os
from collections import deque
from contextlib import suppress
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import update
from tests.support.faulty_storage import FaultyStorage, WriteFault
from tests.unit.receiver.conftest import MakeSetting, MakeStream, Setting
from tests.unit.receiver.waiting import eventually

from headrace.ledger import EventKind, ReceiverState
from headrace.ledger.errors import LeaseHeldError
from headrace.ledger.receiving_tables import receivers
from headrace.receiver import block_store, kafka_source, supervisor
from headrace.receiver.block_store import STORE_TRIES
from headrace.receiver.supervisor import ReceiverSupervisor
from headrace.stream import Limits


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_store, "_FIRST_CHECK_SECONDS", 0.05)
    monkeypatch.setattr(block_store, "_LONGEST_CHECK_SECONDS", 0.2)


@pytest.fixture
def setting(make_stream: MakeStream, make_setting: MakeSetting) -> Setting:
    made = make_setting(make_stream())
    made.topic(1)
    made.assign(0)
    return made


def take_partitions(setting: Setting) -> None:
    """Take them as the tracker does from a receiver whose lease has run out, although this one renews it."""
    while True:
        with setting.ledger._database.write_stream("air") as (connection, _):
            connection.execute(update(receivers).values(lease_until_ms=0))
        with suppress(LeaseHeldError):
            setting.ledger.positions.force_release(setting.job, "records", setting.partitions)
            return


class Disk(FaultyStorage):
    """Takes 100 bytes of each write while it is full. (The faulty storage sees to it that no poisoned file is written
    to again.)"""

    def __init__(self, storage: Any) -> None:
        super().__init__(storage, _Faults())

    @property
    def full(self) -> bool:
        return self.write_faults.full  # type: ignore[attr-defined,no-any-return]

    @full.setter
    def full(self, full: bool) -> None:
        self.write_faults.full = full  # type: ignore[attr-defined]

    @property
    def refused(self) -> int:
        return self.write_faults.refused  # type: ignore[attr-defined,no-any-return]


class _Faults(deque[WriteFault | None]):
    full = True
    refused = 0

    def __init__(self) -> None:
        super().__init__()
        self.found_full = Event()
        self.found_full.set()

    def __bool__(self) -> bool:
        return self.full

    def popleft(self) -> WriteFault:
        self.refused += 1
        self.found_full.wait(60)
        return WriteFault(100, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))


def test_a_full_disk_pauses_the_receiver_and_it_goes_on_when_there_is_room(setting: Setting) -> None:
    setting.kafka.produce("flights", 0, *[b"%d" % n for n in range(10)])
    disk = Disk(setting.storage)
    with setting.running(storage=disk) as running:
        eventually(lambda: "disk is full" in setting.paused_for())
        assert "No space left on device" in setting.paused_for()
        # Longer than it would have tried for, and every heartbeat keeps the lease.
        eventually(lambda: disk.refused > STORE_TRIES)
        first = setting.receiver()
        eventually(lambda: setting.receiver().lease_until_ms > first.lease_until_ms + 1_000)
        assert setting.receiver().state is ReceiverState.RUNNING
        assert setting.receiver().alive(setting.ledger.now_ms())
        (reported,) = setting.events(EventKind.RECEIVING_PAUSED)
        assert (reported["receiver"], reported["cause"]) == ("air/records/0", "disk_full")
        assert (setting.positions(), setting.kafka.committed) == ([0], {})
        disk.full = False
        eventually(lambda: setting.positions() == [10])
        eventually(lambda: setting.receiver().paused_reason is None)
        assert running.report is None, "it is the same receiver"
        eventually(lambda: len(setting.events(EventKind.RECEIVING_RESUMED)) == 1)
        setting.kafka.produce("flights", 0, b"more")
        eventually(lambda: setting.positions() == [11])
    assert len(setting.events(EventKind.RECEIVING_PAUSED)) == 1
    assert setting.receiver().epoch == 1
    assert [offset for _, offset, _ in setting.stored()] == list(range(11))


def test_a_pause_ends_with_a_write_that_finds_room_although_the_ledger_refuses_its_block(setting: Setting) -> None:
    """No other block follows: a paused receiver reads nothing, and only a write shows that there is room."""
    setting.kafka.produce("flights", 0, *[b"%d" % n for n in range(10)])
    disk = Disk(setting.storage)
    with setting.running(storage=disk):
        eventually(lambda: "disk is full" in setting.paused_for())
        take_partitions(setting)
        disk.full = False
        eventually(lambda: len(setting.events(EventKind.RECEIVING_RESUMED)) == 1)
        assert setting.positions() == [0]
        setting.assign(0)
        eventually(lambda: setting.positions() == [10])
    assert [offset for _, offset, _ in setting.stored()] == list(range(10))


def test_what_was_stored_before_the_disk_was_full_is_there_and_not_twice(setting: Setting) -> None:
    disk = Disk(setting.storage)
    disk.full = False
    with setting.running(storage=disk):
        for _ in range(3):
            stored = setting.positions()[0]
            setting.kafka.produce("flights", 0, b"a", b"b")
            eventually(lambda stored=stored: setting.positions() == [stored + 2])  # type: ignore[misc]
            disk.full = True
            setting.kafka.produce("flights", 0, b"c")
            eventually(lambda: "disk is full" in setting.paused_for())
            disk.full = False
            eventually(lambda stored=stored: setting.positions() == [stored + 3])  # type: ignore[misc]
            eventually(lambda: not setting.paused_for())
    assert [offset for _, offset, _ in setting.stored()] == list(range(9))


def test_the_lag_grows_before_ones_eyes_while_nothing_is_fetched(setting: Setting) -> None:
    disk = Disk(setting.storage)
    setting.kafka.produce("flights", 0, b"first")
    with setting.running(storage=disk):
        eventually(lambda: "disk is full" in setting.paused_for())
        setting.kafka.produce("flights", 0, *[b"x"] * 40)
        eventually(lambda: (setting.receiver().stats.get("total_lag") or 0) >= 40)
        disk.full = False
        eventually(lambda: setting.positions() == [41])
        eventually(lambda: setting.receiver().stats.get("total_lag") == 0)


def test_no_write_is_tried_before_there_is_room(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []
    room = SimpleNamespace(there=False)

    def room_for(url: str, nbytes: int) -> bool:
        asked.append((url, nbytes))
        return bool(room.there)

    monkeypatch.setattr(block_store, "room_for", room_for)
    disk = Disk(setting.storage)
    setting.kafka.produce("flights", 0, b"a")
    with setting.running(storage=disk):
        eventually(lambda: len(asked) >= 3)
        assert disk.refused == 1
        assert "disk is full" in setting.paused_for()
        disk.full, room.there = False, True
        eventually(lambda: setting.positions() == [1])
    assert {url for url, _ in asked} == {setting.storage.url}
    assert min(nbytes for _, nbytes in asked) >= 1 << 20, "more than what waits, or it would be full again at once"


def test_a_stop_does_not_wait_for_a_full_disk(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_DRAIN_TIMEOUT_SECONDS", 0.5)
    setting.kafka.produce("flights", 0, b"a")
    running = setting.start(storage=Disk(setting.storage))
    eventually(lambda: "disk is full" in setting.paused_for())
    setting.ledger.jobs.request_stop("air", "a person")
    report = running.join()
    assert report.state is ReceiverState.FAILED
    assert "could not be stored in time" in (report.error or "")
    assert setting.receiver().paused_reason is None
    assert (setting.positions(), setting.stored()) == ([0], [])


class SlowDisk(Disk):
    """Its first write lasts until the test says that the disk is full."""

    def __init__(self, storage: Any) -> None:
        super().__init__(storage)
        self.found_full = self.write_faults.found_full  # type: ignore[attr-defined]
        self.found_full.clear()


@pytest.fixture
def blocked(make_stream: MakeStream, make_setting: MakeSetting, monkeypatch: pytest.MonkeyPatch) -> Setting:
    """Records that come one by one, of which a block holds one and the queue a block."""
    monkeypatch.setattr(kafka_source, "_FIRST_RECORDS", 1)
    monkeypatch.setattr(kafka_source, "_MOST_RECORDS", 1)
    made = make_setting(make_stream(limits=Limits(max_block_bytes=1 << 20, max_queued_blocks=1)))
    made.topic(1)
    made.assign(0)
    made.kafka.produce("flights", 0, *[b"x" * 600_000] * 6)
    return made


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Event:
    """Set when a record that was read waits for room."""
    waiting = Event()
    whole = ReceiverSupervisor._while_full

    def while_full(supervisor: ReceiverSupervisor) -> None:
        whole(supervisor)
        waiting.set()

    monkeypatch.setattr(ReceiverSupervisor, "_while_full", while_full)
    return waiting


def test_a_stop_does_not_wait_for_a_full_disk_though_a_record_waits_for_room(
    blocked: Setting, waits: Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_DRAIN_TIMEOUT_SECONDS", 0.5)
    disk = SlowDisk(blocked.storage)
    running = blocked.start(storage=disk)
    assert waits.wait(30)
    disk.found_full.set()
    eventually(lambda: "disk is full" in blocked.paused_for())
    blocked.ledger.jobs.request_stop("air", "a person")
    report = running.join()
    assert "could not be stored in time" in (report.error or "")
    assert (blocked.positions(), blocked.stored()) == ([0], [])


def test_the_lag_grows_and_receiving_goes_on_though_a_record_waits_for_room(blocked: Setting, waits: Event) -> None:
    disk = SlowDisk(blocked.storage)
    with blocked.running(storage=disk):
        assert waits.wait(30)
        disk.found_full.set()
        eventually(lambda: "disk is full" in blocked.paused_for())
        blocked.kafka.produce("flights", 0, *[b"x"] * 40)
        eventually(lambda: (blocked.receiver().stats.get("total_lag") or 0) >= 46)
        disk.full = False
        eventually(lambda: blocked.positions() == [46])
    assert [offset for _, offset, _ in blocked.stored()] == list(range(46))


def test_a_receiver_that_is_replaced_while_its_disk_is_full_stores_nothing_more(setting: Setting) -> None:
    setting.kafka.produce("flights", 0, b"a")
    disk = Disk(setting.storage)
    zombie = setting.start(storage=disk)
    eventually(lambda: "disk is full" in setting.paused_for())
    with setting.running():
        eventually(lambda: setting.positions() == [1])
        disk.full = False
        assert zombie.join().state is ReceiverState.LOST
    assert setting.stored() == [(0, 0, b"a")]
