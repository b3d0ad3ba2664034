"""Receiving pauses when the disk is full or the log is as large as it may be, and goes on by itself."""

from __future__ import annotations

import errno
import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import update
from tests.support.faulty_storage import FaultyStorage, WriteFault
from tests.unit.receiver.conftest import MakeSetting, MakeStream, Setting
from tests.unit.receiver.waiting import LIMIT_SECONDS, eventually

from headrace.batch.allocation import allocate
from headrace.batch.checkpoint import write_checkpoint
from headrace.batch.cleanup import clean_up
from headrace.clock import ManualClock
from headrace.ledger import EventKind, ReceiverState
from headrace.ledger.errors import LeaseHeldError, LedgerUnavailableError
from headrace.ledger.receiving.tables import receivers
from headrace.receiver import block_store, kafka_source, pausing, supervisor
from headrace.receiver.block_store import STORE_TRIES
from headrace.receiver.pausing import DiskReserve, LogBudget, room_for, space_of
from headrace.receiver.supervisor import ReceiverSupervisor
from headrace.stream import Limits, Stream
from headrace.stream.settings import MIB
from headrace.stream_context import StreamContext
from headrace.testing.fake_kafka import FakeEntry
from headrace.wal.storage import open_storage


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_store, "FIRST_CHECK_SECONDS", 0.05)
    monkeypatch.setattr(block_store, "LONGEST_CHECK_SECONDS", 0.2)


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


def test_a_full_disk_pauses_the_receiver_until_there_is_room(setting: Setting) -> None:
    setting.kafka.produce("flights", 0, *[b"%d" % n for n in range(10)])
    disk = Disk(setting.storage)
    with setting.running(storage=disk) as running:
        eventually(lambda: "disk is full" in setting.paused_for())
        assert setting.stream.folder_url in setting.paused_for()
        assert "bytes are free" in setting.paused_for()
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


def test_a_pause_ends_with_a_write_although_its_block_is_refused(setting: Setting) -> None:
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


def test_what_was_stored_before_the_disk_was_full_is_there_once(setting: Setting) -> None:
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
    monkeypatch.setattr(supervisor, "DRAIN_SECONDS", 0.5)
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
    monkeypatch.setattr(kafka_source, "FIRST_RECORDS", 1)
    monkeypatch.setattr(kafka_source, "MAX_RECORDS", 1)
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


def test_a_stop_waits_for_no_full_disk_though_a_record_does(
    blocked: Setting, waits: Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record waits for room."""
    monkeypatch.setattr(supervisor, "DRAIN_SECONDS", 0.5)
    disk = SlowDisk(blocked.storage)
    running = blocked.start(storage=disk)
    assert waits.wait(30)
    disk.found_full.set()
    eventually(lambda: "disk is full" in blocked.paused_for())
    blocked.ledger.jobs.request_stop("air", "a person")
    report = running.join()
    assert "could not be stored in time" in (report.error or "")
    assert (blocked.positions(), blocked.stored()) == ([0], [])


def test_the_lag_grows_while_a_record_waits_for_room(blocked: Setting, waits: Event) -> None:
    """Receiving goes on meanwhile."""
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


def test_a_receiver_replaced_during_a_full_disk_stores_no_more(setting: Setting) -> None:
    setting.kafka.produce("flights", 0, b"a")
    disk = Disk(setting.storage)
    zombie = setting.start(storage=disk)
    eventually(lambda: "disk is full" in setting.paused_for())
    with setting.running():
        eventually(lambda: setting.positions() == [1])
        disk.full = False
        assert zombie.join().state is ReceiverState.LOST
    assert setting.stored() == [(0, 0, b"a")]


TOTAL = 1_000_000 * MIB
RESERVE = 256


def records_of_this_moment() -> list[FakeEntry]:
    return [FakeEntry(b"x", timestamp_ms=int(time.time() * 1000)) for _ in range(20)]


def test_a_waiting_batch_gets_its_records_out_of_the_reserve(
    make_stream: Callable[..., Stream], make_setting: Callable[[Stream], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Down to the hard reserve: below it the receiver pauses whatever waits, and goes on by itself above it."""
    space = SimpleNamespace(free=TOTAL)
    monkeypatch.setattr(pausing, "space_of", lambda _: (space.free, TOTAL))
    # So late that partitions pass a batch's time by their records only, however slow the machine.
    lateness = {"allowed_lateness": timedelta(minutes=10)}
    setting = make_setting(make_stream(batch_by="timestamp").model_copy(update=lateness))
    setting.topic(2)
    setting.assign(0, 0)
    setting.kafka.produce("flights", 0, *records_of_this_moment())

    def paused_for() -> str:
        return setting.ledger.receivers.all("air")[0].paused_reason or ""

    with setting.running():
        eventually(lambda: setting.positions() == [20, 0])
        space.free = RESERVE * MIB // 5
        eventually(lambda: "nearly full" in paused_for())
        first_ms = setting.ledger.batches.next_unclaimed("air")
        eventually(lambda: time.time() * 1000 > first_ms)
        for partition in (0, 1):
            setting.kafka.produce("flights", partition, *records_of_this_moment())
        assert len(setting.ledger.positions.unpassed("air", first_ms)) == 2
        space.free = RESERVE * MIB // 2
        eventually(lambda: setting.positions() == [40, 20])
        assert not setting.ledger.positions.unpassed("air", first_ms)
        # It has all that it can get: what makes room is that somebody runs it.
        eventually(lambda: "nearly full" in paused_for())


@pytest.mark.parametrize(
    ("free", "only_receiving_helps", "pauses"),
    [
        (RESERVE + 1, False, False),
        (RESERVE - 1, False, True),
        (RESERVE - 1, True, False),
        (RESERVE / 4 + 1, True, False),
        (RESERVE / 4 - 1, True, True),
    ],
)
@pytest.mark.parametrize("has_paused", [False, True])
def test_a_quarter_of_the_reserve_is_kept_whatever_waits(
    free: float, only_receiving_helps: bool, pauses: bool, has_paused: bool
) -> None:
    space, clock = SimpleNamespace(free=0 if has_paused else TOTAL), ManualClock(1_000)
    disk_reserve = DiskReserve(lambda: (space.free, TOTAL), clock)
    assert (disk_reserve.poll() is not None) is has_paused
    clock.advance(1_000)
    space.free = int(free * MIB)
    # Once paused it goes on with half as much again, or where nothing else helps.
    expected = pauses or (has_paused and not only_receiving_helps)
    assert (disk_reserve.poll(lambda: only_receiving_helps) is not None) is expected


@pytest.mark.parametrize(
    ("batch_by", "away", "pauses"), [("timestamp", False, False), ("timestamp", True, True), ("arrival", False, True)]
)
def test_what_waits_is_asked_of_the_ledger(
    make_stream: Callable[..., Stream], monkeypatch: pytest.MonkeyPatch, batch_by: str, away: bool, pauses: bool
) -> None:
    def next_unclaimed(_: str) -> int:
        if away:
            raise LedgerUnavailableError("it does not answer")
        return 1_000

    ledger: Any = SimpleNamespace(
        batches=SimpleNamespace(page=lambda *_: [], next_unclaimed=next_unclaimed),
        positions=SimpleNamespace(unpassed=lambda *_: ["a partition"]),
    )
    lease: Any = SimpleNamespace(receiver_id=SimpleNamespace(stream="air"))
    monkeypatch.setattr(pausing, "space_of", lambda _: (RESERVE * MIB // 2, TOTAL))
    made = pausing.Pausing(StreamContext(make_stream(batch_by=batch_by), ledger, clock=ManualClock(1_000)), lease)
    made.poll()
    assert (made.reason is not None) is pauses


def test_some_of_a_disk_is_left_to_others() -> None:
    """Of a small disk a part, of a large one a fixed size; and it takes some more to go on than to pause."""
    clock = ManualClock(1_000)
    for total, reserve in ((1_000 * MIB, 50), (1_000_000 * MIB, 256)):
        space = SimpleNamespace(free=0)
        disk_reserve = DiskReserve(lambda space=space, total=total: (space.free, total), clock)  # type: ignore[misc]
        for free, pauses in ((reserve + 1, False), (reserve - 1, True), (1.4 * reserve, True), (1.6 * reserve, False)):
            space.free = int(free * MIB)
            clock.advance(1_000)
            reason = disk_reserve.poll()
            assert (reason is not None) is pauses, (total, free)
            assert reason is None or f"{reserve:.1f} MiB are reserved" in reason


def test_an_object_store_has_no_reserve_and_a_folder_its_parents(tmp_path: Path) -> None:
    """A folder that is not there yet has the reserve of its parents."""
    assert space_of("s3://bucket/air") is None
    assert DiskReserve(lambda: None, ManualClock(1_000)).poll() is None
    space = space_of((tmp_path / "not" / "yet").as_uri())
    assert space is not None
    assert 0 < space[0] < space[1]
    assert room_for((tmp_path / "not" / "yet").as_uri(), 1_000)
    assert list(tmp_path.iterdir()) == []


RECORDS = 3_000
BUDGET = 150_000


def backlogged(make_stream: MakeStream, make_setting: MakeSetting) -> Setting:
    """A stream whose log is at its budget after less than half of what Kafka has."""
    # What is queued is small beside the budget, so that it may be exceeded by little on however slow a machine.
    limits = Limits(
        max_log_bytes=BUDGET,
        segment_bytes=20_000,
        segment_interval="1 s",
        max_rate=1_500,
        max_queued_blocks=2,
        max_block_bytes=16_384,
    )
    setting = make_setting(make_stream(limits=limits))
    setting.topic(1)
    setting.assign(0)
    setting.kafka.produce("flights", 0, *[os.urandom(150) for _ in range(RECORDS)])
    return setting


class BatchRuns:
    """The stream's batch DAG, in the hands of a test."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.storage = open_storage(setting.stream.storage.url)

    def records(self) -> int:
        """The records of all batches so far."""
        return sum(batch.records for batch in self.setting.ledger.batches.page("air", 1_000))

    def run(self) -> None:
        """Run the oldest batch that is due, if there is one, and clean up."""
        ledger, stream = self.setting.ledger, self.setting.stream
        time_ms = ledger.batches.next_unclaimed("air")
        if time_ms is not None and time_ms <= ledger.now_ms():
            allocate(StreamContext(stream, ledger), time_ms)
            attempt = ledger.attempts.begin("air", time_ms, holder="test", way="connect", lease_ms=60_000)
            for output in attempt.outputs:
                ledger.attempts.record_output(attempt, output, {})
            ledger.attempts.complete(attempt)
            write_checkpoint(StreamContext(stream, ledger), time_ms)
        clean_up(StreamContext(stream, ledger))


def test_a_backlog_pauses_receiving_at_the_budget(make_stream: MakeStream, make_setting: MakeSetting) -> None:
    """Nothing that is needed is deleted."""
    setting = backlogged(make_stream, make_setting)
    runs = BatchRuns(setting)
    with setting.running() as running:
        eventually(lambda: "max_log_bytes" in setting.paused_for())
        assert 0 < setting.positions()[0] < RECORDS
        eventually(lambda: setting.receiver().stats.get("queued_blocks") == 0)
        held = setting.stored()
        # Batches far behind: cleanup runs, and finds nothing that it may delete.
        beat = setting.receiver().heartbeat_ms
        eventually(lambda: setting.receiver().heartbeat_ms > beat + 1_500)
        clean_up(StreamContext(setting.stream, setting.ledger))
        assert setting.stored() == held
        assert [offset for _, offset, _ in held] == list(range(setting.positions()[0]))
        stored = setting.ledger.segments.stored_bytes("air")
        # By what was queued and read before the pause was noticed, which takes longer on a slow machine.
        assert BUDGET <= stored < 3 * BUDGET
        assert setting.receiver().stats["total_lag"] == RECORDS - setting.positions()[0]
        assert setting.receiver().alive(setting.ledger.now_ms())
        assert not setting.ledger.receivers.unsealed("air", setting.receiver().heartbeat_ms - 1_000), "batches go on"
        # Then all is caught up.
        until = time.monotonic() + LIMIT_SECONDS
        while runs.records() < RECORDS or setting.paused_for():
            assert time.monotonic() < until, setting.positions()
            runs.run()
            time.sleep(0.05)
        assert running.report is None
    paused, resumed = (setting.events(kind) for kind in (EventKind.RECEIVING_PAUSED, EventKind.RECEIVING_RESUMED))
    assert {event["cause"] for event in paused} == {"log_budget"}
    assert len(resumed) == len(paused) >= 1
    assert runs.records() == RECORDS
    assert setting.ledger.gaps.page("air") == []


class Segments:
    def __init__(self) -> None:
        self.bytes = 0
        self.asked = 0
        self.away = False

    def stored_bytes(self, _: str) -> int:
        self.asked += 1
        if self.away:
            raise LedgerUnavailableError("it does not answer")
        return self.bytes


def budget(stream: Stream) -> tuple[LogBudget, Segments, ManualClock]:
    segments, clock = Segments(), ManualClock(1_000)
    ledger: Any = SimpleNamespace(segments=segments)
    return LogBudget(StreamContext(stream, ledger, clock=clock), 1_000), segments, clock


def test_receiving_goes_on_well_below_the_budget_not_just_below(make_stream: MakeStream) -> None:
    log_budget, segments, clock = budget(make_stream())
    for size, pauses in ((999, False), (1_000, True), (950, True), (901, True), (899, False), (950, False)):
        segments.bytes = size
        clock.advance(1_000)
        assert (log_budget.poll() is not None) is pauses, size


def test_a_receivers_own_blocks_count_before_the_ledger_is_asked(make_stream: MakeStream) -> None:
    log_budget, segments, _ = budget(make_stream())
    segments.bytes = 400
    assert log_budget.poll() is None
    segments.bytes = 900
    log_budget.stored(500)
    assert log_budget.poll() is None
    assert segments.asked == 1
    segments.bytes = 1_000
    log_budget.stored(100)
    assert log_budget.poll() is not None
    assert segments.asked == 2


def test_a_ledger_that_does_not_answer_changes_nothing(make_stream: MakeStream) -> None:
    log_budget, segments, clock = budget(make_stream())
    segments.bytes = 1_000
    assert log_budget.poll() is not None
    segments.away = True
    clock.advance(5_000)
    assert log_budget.poll() is not None
    log_budget.stored(5_000)
    assert log_budget.poll() is not None


@pytest.mark.parametrize(
    ("batch_by", "held", "pauses"),
    [
        ("timestamp", ([], None, []), False),
        ("timestamp", ([], 1_000, ["a partition"]), False),
        ("timestamp", ([], 1_000, []), True),
        ("timestamp", (["a batch"], 1_000, ["a partition"]), True),
        ("arrival", ([], 1_000, ["a partition"]), True),
    ],
)
def test_receiving_goes_on_only_where_nothing_else_can_make_room(
    make_stream: MakeStream, batch_by: str, held: tuple[list[str], int | None, list[str]], pauses: bool
) -> None:
    """``held``: batches to be finished, the time that waits to be claimed, what has not passed it."""
    segments = Segments()
    segments.bytes = 2_000
    ledger: Any = SimpleNamespace(
        segments=segments,
        batches=SimpleNamespace(page=lambda *_: held[0], next_unclaimed=lambda _: held[1]),
        positions=SimpleNamespace(unpassed=lambda *_: held[2]),
    )
    log_budget = LogBudget(StreamContext(make_stream(batch_by=batch_by), ledger, clock=ManualClock(1_000)), 1_000)
    assert (log_budget.poll() is not None) is pauses


def test_by_timestamp_a_waiting_batch_gets_its_records(make_stream: MakeStream, make_setting: MakeSetting) -> None:
    """No batch could ever complete, and so nothing be deleted, if receivers paused for the one that waits for them."""
    setting = make_setting(make_stream(batch_by="timestamp", limits=Limits(max_log_bytes=1_000)))
    setting.topic(1)
    setting.assign(0)
    setting.kafka.produce("flights", 0, *[os.urandom(100) for _ in range(200)])
    with setting.running() as running:
        eventually(lambda: setting.positions() == [200])
        assert setting.ledger.segments.stored_bytes("air") > 1_000
        first_ms = setting.ledger.batches.next_unclaimed("air")
        eventually(lambda: not setting.ledger.positions.unpassed("air", first_ms))
        # It has all that it can get, and nobody runs it: that is a backlog as any other.
        eventually(lambda: "max_log_bytes" in setting.paused_for())
        assert running.report is None
