"""A receiver's life with a real log and a real ledger, over a Kafka in memory; storing that fails; torn logs."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from tests.support.faulty_storage import FaultyStorage
from tests.unit.receiver.conftest import MakeSetting, MakeStream, Setting, refuse_topic_ids
from tests.unit.receiver.waiting import eventually

from headrace.ledger import EventKind, Ledger, PartitionState, ReceiverState
from headrace.ledger.errors import LedgerUnavailableError
from headrace.receiver import kafka_errors, lag_watch, supervisor
from headrace.receiver.kafka_source import KafkaReceiver
from headrace.receiver.rates import RateLimiter
from headrace.stream import Limits
from headrace.stream.settings import Backpressure
from headrace.testing.fake_kafka import FakeKafka
from headrace.testing.stream_on_clock import GatedStorage, LogGate
from headrace.wal import recovery
from headrace.wal.log_storage import LogStorage
from headrace.wal.reader import read_block
from headrace.wal.recovery import scan_log


def test_receiver_life_cycle(setting: Setting) -> None:
    setting.assign(0, 0)
    with setting.running() as running:
        setting.kafka.produce("flights", 0, b"a", b"b")
        setting.kafka.produce("flights", 1, b"c")
        eventually(lambda: setting.positions() == [2, 1])
        assert setting.stored() == [(0, 0, b"a"), (0, 1, b"b"), (1, 0, b"c")]
        eventually(lambda: setting.ledger.receivers.all("air")[0].stats.get("records") == 3)
        (row,) = setting.ledger.receivers.all("air")
        assert row.state is ReceiverState.RUNNING
        assert row.stats["lag"] == {"flights": {"0": [0, 0], "1": [0, 0]}}
        eventually(lambda: setting.kafka.committed == {("flights", 0): 2, ("flights", 1): 1})
        report = running.end()
    assert (report.state, report.records, report.error) == (ReceiverState.STOPPED, 3, None)
    assert setting.ledger.receivers.all("air")[0].state is ReceiverState.STOPPED


def test_a_stop_ordered_by_the_ledger_drains_what_was_read(setting: Setting) -> None:
    setting.assign(0, 0)
    running = setting.start()
    setting.kafka.produce("flights", 0, *[b"x"] * 5_000)
    eventually(lambda: setting.positions()[0] > 0)
    setting.ledger.jobs.request_stop("air", "a person")
    report = running.join()
    assert report.state is ReceiverState.STOPPED
    assert len(setting.stored()) == report.records == setting.positions()[0]


def test_a_stop_stores_what_was_read_and_not_cut(make_stream: MakeStream, make_setting: MakeSetting) -> None:
    # No block interval and no batch time is to end while this runs.
    long = dict.fromkeys(("batch_interval", "block_interval"), timedelta(hours=12))
    setting = make_setting(make_stream().model_copy(update=long))
    setting.topic(1)
    setting.assign(0)
    setting.kafka.produce("flights", 0, *[b"x"] * 5)
    running = setting.start()
    eventually(lambda: [row.stats.get("queued_blocks") for row in setting.ledger.receivers.all("air")] == [1])
    assert setting.positions() == [0]
    setting.ledger.jobs.request_stop("air", "a person")
    report = running.join()
    assert (report.state, report.records) == (ReceiverState.STOPPED, 5)
    assert setting.positions() == [5]
    assert len(setting.stored()) == 5
    # The block was stored after the last heartbeat: its release has written what was counted since.
    (row,) = setting.ledger.receivers.all("air")
    assert sum(number for name, number in row.stats["totals"].items() if name.startswith("log_write_le_")) == 1


def test_a_restarted_receiver_goes_on_at_the_ledgers_position(setting: Setting) -> None:
    setting.assign(0, 0)
    setting.kafka.produce("flights", 0, b"a")
    with setting.running():
        eventually(lambda: setting.positions() == [1, 0])
    setting.kafka.produce("flights", 0, b"b")
    with setting.running():
        eventually(lambda: setting.positions() == [2, 0])
    assert setting.stored() == [(0, 0, b"a"), (0, 1, b"b")]


def test_a_revoked_partition_is_drained_and_goes_over(setting: Setting) -> None:
    setting.assign(0, 0)
    with setting.running(0) as first, setting.running(1):
        setting.kafka.produce("flights", 0, b"a")
        setting.kafka.produce("flights", 1, b"b")
        eventually(lambda: setting.positions() == [1, 1])
        setting.assign(0, 1)
        eventually(lambda: [row.receiver_index for row in setting.ledger.positions.all("air")] == [0, 1])
        setting.kafka.produce("flights", 0, b"c")
        setting.kafka.produce("flights", 1, b"d")
        eventually(lambda: setting.positions() == [2, 2])
        assert first.report is None
    assert setting.stored() == [(0, 0, b"a"), (0, 1, b"c"), (1, 0, b"b"), (1, 1, b"d")]


def test_a_fenced_receiver_stores_nothing_more(setting: Setting) -> None:
    setting.assign(0, 0)
    zombie = setting.start()
    setting.kafka.produce("flights", 0, b"a")
    eventually(lambda: setting.positions() == [1, 0])
    with setting.running():
        setting.kafka.produce("flights", 0, b"b")
        report = zombie.join()
        eventually(lambda: setting.positions() == [2, 0])
    assert report.state is ReceiverState.LOST
    assert setting.stored() == [(0, 0, b"a"), (0, 1, b"b")]


def test_a_receiver_that_cannot_be_opened_reports_why_and_ends(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It releases its lease and closes its client."""
    closed: list[float] = []
    monkeypatch.setattr(KafkaReceiver, "close", lambda _, seconds: closed.append(seconds))
    storage = FaultyStorage(setting.storage)
    monkeypatch.setattr(storage, "below", lambda _: (_ for _ in ()).throw(OSError("the folder is gone")))
    report = setting.start(storage=storage).join()
    assert report.state is ReceiverState.FAILED
    assert report.error == "OSError: the folder is gone"
    (row,) = setting.ledger.receivers.all("air")
    assert (row.state, row.last_error) == (ReceiverState.FAILED, report.error)
    assert closed == [0.0]


@pytest.fixture
def hanging(make_stream: MakeStream, make_setting: MakeSetting) -> Iterator[tuple[Setting, LogGate, GatedStorage]]:
    """A receiver gives up after a second of a write that does not return; the log hangs while the gate is closed."""
    setting = make_setting(make_stream(limits=Limits(store_timeout="1 s")))
    setting.topic(1)
    setting.assign(0)
    gate = LogGate()
    yield setting, gate, GatedStorage(setting.storage, gate)
    gate.opened.set()


@pytest.mark.parametrize("moment", ["receiving", "stopping"])
def test_a_receiver_whose_disk_hangs_says_so_and_ends(
    hanging: tuple[Setting, LogGate, GatedStorage], moment: str
) -> None:
    """The next receiver loses and doubles nothing."""
    setting, gate, storage = hanging
    running = setting.start(storage=storage)
    setting.kafka.produce("flights", 0, b"a")
    eventually(lambda: setting.positions() == [1])
    gate.opened.clear()
    setting.kafka.produce("flights", 0, b"b")
    eventually(lambda: gate.waits)
    # So much is read meanwhile that the queue of blocks is full.
    setting.kafka.produce("flights", 0, *[b"x"] * 5_000)
    report = running.end() if moment == "stopping" else running.join()
    assert report.state is ReceiverState.FAILED
    assert report.error is not None
    assert re.search(r"A write to the log in .* has not returned for \d+ s\.", report.error)
    assert setting.stream.folder_url in report.error
    (row,) = setting.ledger.receivers.all("air")
    assert (row.state, row.last_error) == (ReceiverState.FAILED, report.error)
    with setting.running():
        eventually(lambda: setting.positions() == [5_002])
        # The write of the first one returns late: its block is not the ledger's.
        gate.opened.set()
        eventually(lambda: not gate.waits)
    assert [offset for _, offset, _ in setting.stored()] == list(range(5_002))


def test_lost_offsets_fail_one_partition_until_a_person_acts(setting: Setting) -> None:
    """They fail it in the ledger."""
    setting.assign(0, 0)
    setting.kafka.produce("flights", 0, b"a", b"b")
    log = setting.kafka.logs["flights", 0]
    log.low, log.entries = 1, log.entries[1:]
    with setting.running():
        setting.kafka.produce("flights", 1, b"c")
        eventually(lambda: setting.ledger.positions.all("air")[0].state is PartitionState.FAILED)
        eventually(lambda: setting.positions() == [0, 1])
        error = setting.ledger.positions.all("air")[0].error or ""
        assert "[0, 1) are gone" in error
        assert "start the receiver job again" in error
        log.low, log.entries = 0, [log.entries[0], *log.entries]
        setting.ledger.positions.set_state(setting.job, "records", setting.partitions[:1], PartitionState.ACTIVE)
        eventually(lambda: setting.positions() == [2, 1])


def test_lost_offsets_are_a_gap_in_the_ledger_under_reset(
    make_stream: MakeStream, make_setting: MakeSetting, fake_kafka: FakeKafka
) -> None:
    stream = make_stream(on_lost_offsets="reset")
    setting = make_setting(stream)
    setting.topic(1)
    setting.assign(0)
    fake_kafka.produce("flights", 0, *[b"%d" % n for n in range(10)])
    fake_kafka.expire("flights", 0, 7)
    with setting.running():
        eventually(lambda: setting.positions() == [10])
    assert [(gap.from_offset, gap.until_offset) for gap in setting.ledger.gaps.page("air")] == [(0, 7)]
    assert [offset for _, offset, _ in setting.stored()] == [7, 8, 9]


def test_records_of_a_topic_created_again_are_not_the_old_ones(setting: Setting) -> None:
    """Even where the new topic has reached the old position before anyone looked."""
    setting.assign(0, 0)
    with setting.running():
        setting.kafka.produce("flights", 0, b"old")
        eventually(lambda: setting.positions() == [1, 0])
        old = setting.partitions
        with setting.kafka.lock:
            setting.kafka.create("flights", 2)
            setting.kafka.produce("flights", 0, b"new 0", b"new 1")
        eventually(lambda: any(row.stats.get("dropped") for row in setting.ledger.receivers.all("air")))
        setting.partitions = old
        assert setting.positions() == [1, 0]
    assert setting.stored() == [(0, 0, b"old")]


def test_idle_positions_move_on_without_a_block(setting: Setting) -> None:
    from headrace.testing.fake_kafka import FakeEntry

    setting.assign(0, 0)
    with setting.running():
        setting.kafka.produce("flights", 0, FakeEntry(None, kind="control"))
        eventually(lambda: setting.positions() == [1, 0])
    assert setting.stored() == []


def test_sealed_through_follows_the_ledgers_clock(setting: Setting) -> None:
    setting.assign(0, 0)
    with setting.running():
        begun = setting.ledger.now_ms()
        eventually(lambda: any(row.sealed_through_ms > begun + 500 for row in setting.ledger.receivers.all("air")))
        assert setting.ledger.receivers.all("air")[0].sealed_through_ms <= setting.ledger.now_ms() + 50


@pytest.mark.parametrize("limits", [Limits(max_rate=500), Limits(backpressure=Backpressure(initial_rate=500))])
def test_a_receiver_keeps_to_its_rate(
    make_stream: MakeStream, make_setting: MakeSetting, monkeypatch: pytest.MonkeyPatch, limits: Limits
) -> None:
    granted: list[int] = []
    fetched: list[int | None] = []
    spent: list[int] = []

    class Noted(RateLimiter):
        def grant(self, wanted: int) -> int:
            granted.append(super().grant(wanted))
            return granted[-1]

        def spend(self, records: int) -> None:
            spent.append(records)
            super().spend(records)

    plain = KafkaReceiver.fetch

    def fetch(self: KafkaReceiver, timeout: float, max_records: int | None = None) -> Any:
        fetched.append(max_records)
        return plain(self, timeout, max_records)

    monkeypatch.setattr(supervisor, "RateLimiter", Noted)
    monkeypatch.setattr(KafkaReceiver, "fetch", fetch)
    setting = make_setting(make_stream(limits=limits))
    setting.topic(1)
    setting.assign(0)
    setting.kafka.produce("flights", 0, *[b"x"] * 1_000)
    begun = time.monotonic()
    with setting.running():
        eventually(lambda: setting.positions() == [1_000])
    # 1,000 records at 500 a second, less the burst of a fifth of a second.
    assert time.monotonic() - begun > 1.5
    # On a slow machine that is true of any receiver.
    assert fetched == [number for number in granted if number]
    assert max(granted) <= 100
    assert sum(spent) == 1_000


def test_what_may_not_be_described_is_read_again_not_stored(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lag of 0 is not shown for it."""
    monkeypatch.setattr(kafka_errors, "READ_AGAIN_SECONDS", 0.2)
    monkeypatch.setattr(lag_watch, "ASK_SECONDS", 0.1)
    setting.assign(0, 0)
    refuse_topic_ids(monkeypatch, setting.ends)

    def stats() -> dict[str, Any]:
        (row,) = setting.ledger.receivers.all("air")
        return row.stats

    with setting.running():
        setting.kafka.produce("flights", 0, b"a")
        eventually(lambda: setting.positions() == [1, 0])
        setting.ends.refused.add("flights")
        setting.kafka.produce("flights", 0, b"b", b"c")
        eventually(lambda: stats().get("dropped", 0) >= 2)
        eventually(lambda: stats()["lag"]["flights"]["0"][0] is None)
        eventually(lambda: [entry["topic"] for entry in stats()["unasked"]] == ["flights"])
        assert setting.positions() == [1, 0]
        setting.ends.refused.clear()
        eventually(lambda: setting.positions() == [3, 0])
        eventually(lambda: stats()["lag"]["flights"]["0"] == [0, 0])
    assert [value for _, _, value in setting.stored()] == [b"a", b"b", b"c"]
    assert len(setting.ledger.events.page("air", kinds=[EventKind.RECEIVER_STARTED])) == 1, "it did not fail for it"


def test_a_set_up_that_takes_longer_than_the_lease_keeps_it(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    setting.assign(0, 0)
    with setting.running():
        for number in range(1, 9):
            setting.kafka.produce("flights", 0, b"x")
            eventually(lambda number=number: setting.positions() == [number, 0])  # type: ignore[misc]
    monkeypatch.setattr(supervisor, "HEARTBEAT_SECONDS", 0.05)
    looked: list[bool] = []

    class Slow:
        def __init__(self, scan: Any) -> None:
            self.scan = scan

        def __getattr__(self, name: str) -> Any:
            return getattr(self.scan, name)

        def __iter__(self) -> Any:
            for frame in self.scan:
                time.sleep(0.45)
                (row,) = setting.ledger.receivers.all("air")
                looked.append(row.alive(setting.ledger.now_ms()))
                yield frame

    scan_segment = recovery.scan_segment
    monkeypatch.setattr(recovery, "scan_segment", lambda *given, **options: Slow(scan_segment(*given, **options)))
    with setting.running(lease_ms=3_000):
        setting.kafka.produce("flights", 0, b"x")
        eventually(lambda: setting.positions() == [9, 0])
    assert len(looked) >= 8
    assert all(looked)


class BrokenDisk:
    """Fails the next ``failures`` writes."""

    def __init__(self, storage: Any, failures: list[int]) -> None:
        self._storage, self._failures = storage, failures

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    def below(self, path: str) -> BrokenDisk:
        return BrokenDisk(self._storage.below(path), self._failures)

    def create_segment(self, path: str) -> Any:
        if self._failures[0]:
            self._failures[0] -= 1
            raise OSError("no space left on device")
        return self._storage.create_segment(path)


def test_three_failures_to_store_are_survived(setting: Setting) -> None:
    setting.assign(0, 0)
    setting.kafka.produce("flights", 0, b"a")
    with setting.running(storage=BrokenDisk(setting.storage, [3])) as running:
        eventually(lambda: setting.positions() == [1, 0])
        assert running.end().state is ReceiverState.STOPPED
    assert setting.stored() == [(0, 0, b"a")]


def test_the_fourth_failure_ends_the_receiver_with_its_error(setting: Setting) -> None:
    """Nothing is lost."""
    setting.assign(0, 0)
    setting.kafka.produce("flights", 0, b"a")
    report = setting.start(storage=BrokenDisk(setting.storage, [99])).join()
    assert report.state is ReceiverState.FAILED
    assert "no space left on device" in (report.error or "")
    (row,) = setting.ledger.receivers.all("air")
    assert (row.state, "no space left" in (row.last_error or "")) == (ReceiverState.FAILED, True)
    assert setting.kafka.committed == {}
    with setting.running():
        eventually(lambda: setting.positions() == [1, 0])
    assert setting.stored() == [(0, 0, b"a")]


class ForgetfulBlocks:
    """A ledger whose answers get lost: the first add happens, and is said to have failed."""

    def __init__(self, blocks: Any) -> None:
        self._blocks, self.lost = blocks, 0

    def add_all(self, lease: Any, infos: Any, epoch_ends: Any) -> Any:
        added = self._blocks.add_all(lease, infos, epoch_ends)
        if not self.lost:
            self.lost += 1
            raise LedgerUnavailableError("the connection broke")
        return added


def test_a_block_whose_answer_was_lost_is_not_stored_twice(setting: Setting) -> None:
    setting.assign(0, 0)
    setting.kafka.produce("flights", 0, b"a")
    ledger = Ledger.open(setting.stream.ledger)
    ledger.blocks = ForgetfulBlocks(ledger.blocks)  # type: ignore[assignment]
    with setting.running(ledger=ledger) as running:
        eventually(lambda: setting.positions() == [1, 0])
        setting.kafka.produce("flights", 0, b"b")
        eventually(lambda: setting.positions() == [2, 0])
        assert running.end().state is ReceiverState.STOPPED
    ledger.close()
    assert setting.stored() == [(0, 0, b"a"), (0, 1, b"b")]


def test_a_block_without_an_answer_is_not_said_to_be_refused(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ledger may have taken it: rebuilt from a log that denies it, it would lose it."""
    monkeypatch.setattr("headrace.receiver.block_store.LEDGER_TIMEOUT_SECONDS", 0.0)
    plain = type(setting.ledger.blocks).add_all

    def add(self: Any, *args: Any) -> Any:
        added = plain(self, *args)
        if setting.positions() == [2, 0]:
            raise LedgerUnavailableError("The connection broke before the answer came.")
        return added

    monkeypatch.setattr(type(setting.ledger.blocks), "add_all", add)
    setting.assign(0, 0)
    setting.kafka.produce("flights", 0, b"a")
    running = setting.start(0)
    eventually(lambda: setting.positions() == [1, 0])
    setting.kafka.produce("flights", 0, b"b")
    report = running.join()
    assert report.error is not None
    assert "did not answer" in report.error
    assert setting.positions() == [2, 0]
    assert [settled.accepted for settled in scan_log(setting.storage.below("log")).settled()] == [True, None]


def test_a_block_keeps_the_leader_epoch_of_each_range(setting: Setting) -> None:
    """The epoch is in the log and in the ledger."""
    setting.assign(0, 0)
    setting.kafka.produce("flights", 0, b"a")
    setting.kafka.elect("flights", 0)
    with setting.running():
        setting.kafka.produce("flights", 0, b"b")
        eventually(lambda: setting.positions() == [2, 0])
        setting.kafka.elect("flights", 0)
        setting.kafka.produce("flights", 0, b"c")
        eventually(lambda: setting.positions() == [3, 0])
    ends = {}
    for unclaimed in setting.ledger.blocks.unclaimed("air"):
        for block in setting.ledger.allocations.blocks_of("air", unclaimed.batch_time_ms):
            header, _ = read_block(setting.storage.below("log"), block.info.handle)
            assert header.ranges == block.info.ranges
            ends |= {(of.partition.partition, of.until_offset): of.leader_epoch for of in block.info.ranges}
    assert ends[0, 2] == 1
    assert ends[0, 3] == 2


def torn_log(setting: Setting) -> tuple[LogStorage, str, bytes]:
    """A receiver's log of one block, whose last 7 bytes a crash took: the log, the segment, and what it was."""
    setting.assign(0, 0)
    setting.kafka.produce("flights", 0, b"a")
    log = setting.storage.below("log")
    with setting.running():
        eventually(lambda: setting.positions() == [1, 0])
        (segment,) = log.paths()
    whole = log.read(segment)
    log.write_atomically(segment, whole[:-7])
    return log, segment, whole


def test_the_tail_of_a_crash_is_cut_off_kept_and_reported(setting: Setting) -> None:
    log, segment, whole = torn_log(setting)
    with setting.running():
        eventually(lambda: setting.ledger.receivers.all("air")[0].stats.get("torn_tail_bytes", 0) > 0)
    with setting.running():
        pass
    (event,) = setting.events(EventKind.LOG_REPAIRED)
    assert (event["segment"], event["offset"] + event["bytes"]) == (segment, len(whole) - 7)
    assert log.read(event["kept"]) == whole[event["offset"] : -7]
    assert log.size(segment) == event["offset"]
    assert setting.events(EventKind.LOG_DAMAGED) == []
    setting.kafka.produce("flights", 0, b"b")
    with setting.running():
        eventually(lambda: setting.positions() == [2, 0])
    assert setting.stored() == [(0, 0, b"a"), (0, 1, b"b")]


@pytest.mark.parametrize("how", ["the ledger is away", "killed before it told", "killed when it had told"])
def test_a_tail_cut_unreported_is_reported_by_the_next_receiver(
    setting: Setting, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    log, segment, whole = torn_log(setting)
    events = type(setting.ledger.events)
    with monkeypatch.context() as patch:
        plain = events.append

        def append(self: Any, stream: str, kind: EventKind, *args: Any) -> None:
            if kind is EventKind.LOG_REPAIRED:
                if how == "killed when it had told":
                    plain(self, stream, kind, *args)
                elif how == "the ledger is away":
                    raise LedgerUnavailableError("A failover.")
                raise KeyError("killed")
            plain(self, stream, kind, *args)

        patch.setattr(events, "append", append)
        assert setting.start(0).join().state is ReceiverState.FAILED
    cut = log.size(segment)
    assert cut < len(whole) - 7
    for _ in range(2):
        with setting.running():
            eventually(lambda: setting.ledger.receivers.all("air")[0].state is ReceiverState.RUNNING)
    (event,) = setting.events(EventKind.LOG_REPAIRED)
    assert (event["segment"], event["offset"], event["bytes"]) == (segment, cut, len(whole) - 7 - cut)
    assert log.read(event["kept"]) == whole[cut:-7]
    assert log.paths("torn-unreported") == []


def test_a_tail_the_ledger_relies_on_is_damage_and_reported_once(setting: Setting) -> None:
    setting.assign(0, 0)
    setting.kafka.produce("flights", 0, b"a")
    log = setting.storage.below("log")
    with setting.running():
        eventually(lambda: setting.positions() == [1, 0])
        (segment,) = log.paths()
    (block,) = setting.ledger.blocks.of_segment("air", segment)
    torn = log.read(segment)[: block.info.handle.offset + 50]
    log.write_atomically(segment, torn)
    for _ in range(2):  # Neither life writes a block, so both find it.
        with setting.running():
            eventually(lambda: setting.ledger.receivers.all("air")[0].stats.get("log_damages", 0) > 0)
    (event,) = setting.events(EventKind.LOG_DAMAGED)
    assert (event["segment"], event["offset"], event["lost"]) == (segment, block.info.handle.offset, "flights-0[0, 1)")
    assert log.read(segment) == torn
