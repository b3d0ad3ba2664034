"""What a consumer reads, and which offsets it commits."""

from __future__ import annotations

import time

import pytest
from confluent_kafka import KafkaError
from tests.unit.receiver.kafka_receiver.setting import CONTROL, Setting

from headrace.blocks import OffsetRange, TopicPartition
from headrace.kafka.records import RecordChunk
from headrace.receiver.kafka_source import KafkaReceiver
from headrace.receiver.record_source import FetchState


def test_reads_from_the_position_to_the_end() -> None:
    setting = Setting()
    setting.kafka.produce("a", 0, *[b"%d" % n for n in range(10)])
    setting.receiver.assign(setting.p0, 4)
    assert setting.ranges() == [OffsetRange(setting.p0, 4, 10, 6)]
    assert setting.state(setting.p0) is FetchState.AT_END


def test_the_position_passes_control_records() -> None:
    setting = Setting()
    setting.evidence.transactions = True
    setting.kafka.produce("a", 0, b"1", CONTROL, b"2", CONTROL, CONTROL)
    setting.receiver.assign(setting.p0, 0)
    assert setting.ranges() == [OffsetRange(setting.p0, 0, 5, 2)]
    setting.kafka.produce("a", 0, CONTROL)
    assert setting.ranges() == [OffsetRange(setting.p0, 5, 6, 0)]
    assert setting.receiver.offsets_without_record == 4


def test_unassigned_partitions_are_not_read_and_the_others_go_on() -> None:
    setting = Setting()
    setting.receiver.assign(setting.p0, 0)
    setting.receiver.assign(setting.p1, 0)
    setting.receiver.unassign(setting.p0)
    for partition in (0, 1):
        setting.kafka.produce("a", partition, b"x")
    assert setting.ranges() == [OffsetRange(setting.p1, 0, 1, 1)]


def test_a_failed_commit_is_counted_and_repeated() -> None:
    setting = Setting()
    setting.receiver.assign(setting.p0, 0)
    setting.kafka.fail_commits = KafkaError(KafkaError.UNKNOWN_MEMBER_ID, "another member")
    setting.receiver.commits.note([OffsetRange(setting.p0, 0, 5, 5)])
    setting.fetch()
    assert setting.receiver.commits.failures == 1
    assert "another member" in (setting.receiver.commits.last_error or "")
    setting.kafka.fail_commits = None
    setting.receiver.commits.note([OffsetRange(setting.p1, 0, 3, 3)])
    setting.fetch()
    assert setting.kafka.committed == {("a", 0): 5, ("a", 1): 3}
    assert setting.receiver.commits.open == 0


def test_nothing_is_committed_past_the_lease() -> None:
    setting = Setting()
    setting.receiver.assign(setting.p0, 0)
    setting.receiver.commits.allow_until(setting.clock.monotonic() + 10)
    setting.receiver.commits.note([OffsetRange(setting.p0, 0, 5, 5)])
    setting.clock.advance(11_000)
    setting.fetch()
    assert setting.kafka.committed == {}


def test_what_is_stored_is_committed_within_the_lease() -> None:
    setting = Setting()
    setting.receiver.assign(setting.p0, 0)
    setting.receiver.commits.allow_until(setting.clock.monotonic() + 10)
    setting.receiver.commits.note([OffsetRange(setting.p0, 0, 5, 5)])
    setting.clock.advance(9_000)
    setting.fetch()
    assert setting.kafka.committed == {("a", 0): 5}


def test_large_records_are_fetched_a_few_at_a_time() -> None:
    setting = Setting()
    setting.kafka.produce("a", 0, *[b"x" * 1_000_000] * 40)
    setting.receiver.assign(setting.p0, 0)
    chunks = [event for event in setting.fetch() if isinstance(event, RecordChunk)]
    assert sum(chunk.records for chunk in chunks) == 40
    assert max(chunk.nbytes for chunk in chunks) <= 16 * 1024 * 1024


def test_each_partition_keeps_to_its_rate() -> None:
    setting = Setting(max_rate_per_partition=100)
    setting.kafka.produce("a", 0, *[b"x"] * 5_000)
    setting.kafka.produce("a", 1, *[b"x"] * 30)
    setting.receiver.assign(setting.p0, 0)
    setting.receiver.assign(setting.p1, 0)
    setting.fetch()
    for _ in range(20):
        setting.clock.advance(500)
        setting.fetch()
    positions = setting.receiver.partitions
    assert positions[setting.p0] == pytest.approx(1_000, abs=100)
    assert positions[setting.p1] == 30, "the other one is not held up"
    assert setting.state(setting.p0) is FetchState.LIMITED
    setting.receiver.serve_paused()
    before = setting.receiver.partitions
    assert setting.ranges() == []
    setting.clock.advance(60_000)
    (after,) = setting.ranges()
    assert after == OffsetRange(setting.p0, before[setting.p0], before[setting.p0] + 100, 100), "no more after a pause"


def test_a_partition_that_waits_for_its_rate_can_be_taken_away() -> None:
    setting = Setting(max_rate_per_partition=10)
    setting.kafka.produce("a", 0, *[b"x"] * 50)
    setting.receiver.assign(setting.p0, 0)
    assert setting.ranges() == [OffsetRange(setting.p0, 0, 10, 10)]
    setting.receiver.unassign(setting.p0)
    setting.clock.advance(60_000)
    assert setting.ranges() == []
    setting.receiver.assign(setting.p0, 10)
    assert setting.ranges() == [OffsetRange(setting.p0, 10, 20, 10)]


def test_listening_takes_no_record_and_reading_goes_on_after_it() -> None:
    setting = Setting()
    setting.kafka.produce("a", 0, *[b"x"] * 4)
    setting.receiver.assign(setting.p0, 0)
    assert setting.ranges() == [OffsetRange(setting.p0, 0, 4, 4)]
    setting.receiver.serve_paused()
    setting.kafka.produce("a", 0, *[b"x"] * 3)
    setting.kafka.produce("a", 1, *[b"x"] * 2)
    setting.receiver.assign(setting.p1, 1)
    for _ in range(3):
        setting.receiver.serve_paused()
    assert setting.receiver.partitions == {setting.p0: 4, setting.p1: 1}
    assert set(setting.ranges()) == {OffsetRange(setting.p0, 4, 7, 3), OffsetRange(setting.p1, 1, 2, 1)}


def test_the_client_is_heard_while_nothing_is_read() -> None:
    """Its statistics would pile up in it, over a gigabyte a day with a hundred partitions."""
    receiver = KafkaReceiver(
        {
            "bootstrap.servers": "127.0.0.1:1",
            "group.id": "g",
            "statistics.interval.ms": 10,
            "log_level": 0,
            "enable.auto.commit": False,
        }
    )
    receiver.assign(TopicPartition("t", "id", 0), 0)
    until = time.monotonic() + 30
    while receiver.connected is None or receiver.client_error is None:
        receiver.serve_paused()
        time.sleep(0.01)
        assert time.monotonic() < until
    receiver.close(0)
