"""A whole receiver of a stream by timestamp: log, ledger and threads are real, Kafka is in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.unit.receiver.conftest import refuse_topic_ids
from tests.unit.receiver.waiting import eventually

from headrace.ledger.receiving.tables import StoredBlock
from headrace.receiver import block_store, heartbeat, kafka_errors
from headrace.receiver.rates import RateLimiter
from headrace.stream import Stream
from headrace.testing.fake_kafka import FakeEntry
from headrace.wal.reader import read_block

SECOND = 1_000


class Timed:
    """A setting whose times are told in seconds after ``zero``, a full second an hour ago."""

    def __init__(self, setting: Any, partitions: int) -> None:
        self._setting = setting
        setting.topic(partitions)
        setting.assign(*[0] * partitions)
        self.zero = setting.ledger.now_ms() // SECOND * SECOND - 3600 * SECOND

    def __getattr__(self, name: str) -> Any:
        return getattr(self._setting, name)

    def at(self, seconds: float) -> int:
        return self.zero + int(seconds * SECOND)

    def produce(self, partition: int, *seconds: float) -> None:
        entries = [FakeEntry(b"%g" % second, timestamp_ms=self.at(second)) for second in seconds]
        self.kafka.produce("flights", partition, *entries)

    def blocks(self) -> list[StoredBlock]:
        unclaimed = self.ledger.blocks.unclaimed("air")
        return [block for row in unclaimed for block in self.ledger.allocations.blocks_of("air", row.batch_time_ms)]

    def batches(self) -> dict[float, list[tuple[int, float]]]:
        """By batch time: partition and timestamp of its records in order."""
        batches: dict[float, list[tuple[int, float]]] = {}
        for block in self.blocks():
            header, batch = read_block(self.storage.below("log"), block.info.handle)
            assert header.event_time_ms == block.info.event_time_ms
            rows = [(row["partition"], float(row["value"])) for row in batch.to_pylist()]
            batches.setdefault((block.batch_time_ms - self.zero) / SECOND, []).extend(rows)
        return {batch: sorted(rows) for batch, rows in batches.items()}

    def drained(self) -> list[int]:
        rows = {row.partition: row.drained_ms for row in self.ledger.positions.all("air")}
        return [rows[partition] for partition in self.partitions]


@pytest.fixture
def make_timed(make_stream: Callable[..., Stream], make_setting: Callable[[Stream], Any]) -> Callable[[int], Timed]:
    return lambda partitions: Timed(make_setting(make_stream(receivers=2, batch_by="timestamp")), partitions)


@pytest.fixture
def setting(make_timed: Callable[[int], Timed]) -> Timed:
    return make_timed(2)


def test_each_record_is_in_the_latest_timestamps_batch(setting: Timed) -> None:
    """The timestamp is the latest of its partition so far."""
    setting.produce(0, 0.1, 0.9, 0.5, 1.2, 0.8, 7.5)
    setting.produce(1, 1.0, 1.999, 2.0)
    with setting.running():
        eventually(lambda: setting.positions() == [6, 3])
    assert setting.batches() == {
        1: [(0, 0.1), (0, 0.5), (0, 0.9)],
        2: [(0, 0.8), (0, 1.2), (1, 1.0), (1, 1.999)],
        3: [(1, 2.0)],
        8: [(0, 7.5)],
    }


def test_the_latest_timestamp_outlives_a_restart(setting: Timed) -> None:
    setting.produce(0, 5.5)
    with setting.running():
        eventually(lambda: setting.positions() == [1, 0])
    setting.produce(0, 3.0, 5.9, 6.0)
    with setting.running():
        eventually(lambda: setting.positions() == [4, 0])
    assert setting.batches() == {6: [(0, 3.0), (0, 5.5), (0, 5.9)], 7: [(0, 6.0)]}
    assert [block.info.event_time_ms for block in setting.blocks()] == [setting.at(5), setting.at(5), setting.at(6)]


def test_the_latest_timestamp_goes_over_with_its_partition(setting: Timed) -> None:
    setting.produce(1, 5.5)
    with setting.running(0), setting.running(1):
        eventually(lambda: setting.positions() == [0, 1])
        setting.assign(0, 1)
        eventually(lambda: [row.receiver_index for row in setting.ledger.positions.all("air")] == [0, 1])
        setting.produce(1, 3.0)
        eventually(lambda: setting.positions() == [0, 2])
    assert setting.batches() == {6: [(1, 3.0), (1, 5.5)]}


def test_late_records_join_the_next_open_batch_and_are_counted(setting: Timed) -> None:
    with setting.running():
        setting.produce(0, 1.5)
        eventually(lambda: setting.positions() == [1, 0])
        setting.ledger.allocations.seal("air", setting.at(4))
        setting.produce(0, 1.6, 1.7)
        setting.produce(1, 2.5, 6.5)
        eventually(lambda: setting.positions() == [3, 2])
        eventually(lambda: setting.ledger.receivers.all("air")[0].stats.get("late_records") == 3)
    assert setting.batches() == {2: [(0, 1.5)], 5: [(0, 1.6), (0, 1.7), (1, 2.5)], 7: [(1, 6.5)]}


def test_a_future_timestamp_carries_its_partition_only_to_now(setting: Timed) -> None:
    with setting.running():
        setting.produce(0, 1_000_000)
        eventually(lambda: setting.positions() == [1, 0])
        (first,) = setting.blocks()
        # What is "now" is read before the block is added, which may take its time.
        assert setting.zero < first.batch_time_ms <= first.added_at_ms + SECOND
        eventually(lambda: setting.ledger.now_ms() > first.batch_time_ms)
        setting.produce(0, (setting.ledger.now_ms() - setting.zero) / SECOND)
        eventually(lambda: setting.positions() == [2, 0])
    assert setting.blocks()[1].batch_time_ms > first.batch_time_ms


def test_idle_partitions_are_drained_once_the_lateness_is_over(setting: Timed) -> None:
    setting.produce(0, 1.5)
    with setting.running():
        eventually(lambda: min(setting.drained()) > 0)
        behind_ms = []
        for _ in range(3):
            batch_time_ms = setting.ledger.now_ms() // SECOND * SECOND
            eventually(lambda at=batch_time_ms: setting.ledger.positions.unpassed("air", at) == [])
            behind_ms.append(setting.ledger.now_ms() - batch_time_ms - setting.stream.allowed_lateness_ms)
    # A tick to ask, a tick to hear, and what a busy machine adds; waiting for the next beat would add a second.
    assert 0 <= min(behind_ms) < 900


def test_nothing_is_claimed_while_kafka_is_silent(setting: Timed) -> None:
    """Nothing after that time is claimed either."""
    with setting.running():
        eventually(lambda: min(setting.drained()) > 0)
        setting.ends.silent = True
        silent_since = setting.ledger.now_ms()
        eventually(lambda: setting.ledger.receivers.all("air")[0].heartbeat_ms > silent_since + 2_500)
        assert max(setting.drained()) <= silent_since + 1_100
        setting.ends.silent = False
        eventually(lambda: min(setting.drained()) > silent_since + 2_500)


def test_what_cannot_be_stored_is_not_drained(setting: Timed, monkeypatch: pytest.MonkeyPatch) -> None:
    with setting.running():
        eventually(lambda: min(setting.drained()) > 0)
        monkeypatch.setattr(RateLimiter, "grant", lambda *_: 0)
        setting.produce(0, 1.5)
        held_since = setting.ledger.now_ms()
        eventually(lambda: setting.drained()[1] > held_since + 1_500)
        assert setting.drained()[0] <= held_since + 1_100
        monkeypatch.undo()
        eventually(lambda: setting.drained()[0] > held_since + 1_500)


def test_the_heartbeat_goes_on_between_the_batches_of_one_cut(
    make_timed: Callable[[int], Timed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an old, quiet topic each record may have a batch of its own: thousands of blocks in a cut."""
    monkeypatch.setattr(heartbeat, "HEARTBEAT_SECONDS", 0.0)
    monkeypatch.setattr(block_store, "_MAX_BLOCKS", 20)
    made = make_timed(1)
    made.produce(0, *range(200))
    beats: set[int] = set()

    def stored() -> bool:
        position = made.positions()[0]
        if 0 < position < 200:
            beats.update(row.heartbeat_ms for row in made.ledger.receivers.all("air"))
        return bool(position == 200)

    with made.running():
        eventually(stored)
    assert len(made.batches()) == 200
    # One would be that of the time before.
    assert len(beats) >= 3


def test_records_read_again_keep_the_batches_of_their_timestamps(
    make_timed: Callable[[int], Timed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were read and not stored, because their topic might not be described for a while."""
    # A heartbeat comes before it, as with the 10 s of every receiver.
    monkeypatch.setattr(kafka_errors, "READ_AGAIN_SECONDS", 2.0)
    setting = make_timed(1)
    refuse_topic_ids(monkeypatch, setting.ends)
    with setting.running():
        setting.produce(0, 1.5)
        eventually(lambda: setting.positions() == [1])
        setting.ends.refused.add("flights")
        setting.produce(0, 0.5, 2.5, 3.5, 4.5)
        eventually(lambda: setting.ledger.receivers.all("air")[0].stats.get("dropped", 0) >= 4)
        setting.ends.refused.clear()
        eventually(lambda: setting.positions() == [5])
    # And none goes before what was stored.
    assert setting.batches() == {2: [(0, 0.5), (0, 1.5)], 3: [(0, 2.5)], 4: [(0, 3.5)], 5: [(0, 4.5)]}
    assert [block.info.event_time_ms for block in setting.blocks()][:2] == [setting.at(1)] * 2
