"""A partition's log that was truncated behind the position, by an unclean election."""

from __future__ import annotations

from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, Message
from tests.unit.receiver.kafka_receiver.setting import CONTROL, Setting, reported

from headrace.blocks import OffsetRange
from headrace.ledger.receiving_tables import EpochEnd
from headrace.receiver import kafka_errors
from headrace.receiver.record_source import FetchState, Gap
from headrace.testing.fake_kafka import FakeConsumer


def test_a_log_that_ends_before_the_position_fails_and_says_what_was_taken_back() -> None:
    setting = Setting()
    setting.kafka.produce("a", 0, *[b"x"] * 3)
    setting.receiver.assign(setting.p0, 7)
    (gap,) = setting.fetch()
    assert isinstance(gap, Gap)
    assert (gap.from_offset, gap.until_offset, gap.taken_back) == (3, 7, True)
    assert setting.receiver.lost_offsets == 4
    assert setting.state(setting.p0) is FetchState.FAILED
    assert "[3, 7)" in (setting.receiver.status()[0].error or "")


def test_a_log_that_ends_before_the_position_is_read_on_once_it_has_reached_it_under_reset() -> None:
    setting = Setting("reset")
    setting.kafka.produce("a", 0, *[b"x"] * 5)
    setting.receiver.assign(setting.p0, 7)
    events = setting.fetch()
    setting.clock.advance(1_000)
    events += setting.fetch()
    # Told once, and what is taken back besides by itself.
    assert reported(events) == [("gap", 5, 7)]
    del setting.kafka.logs["a", 0].entries[2:]
    setting.clock.advance(60_000)
    assert reported(setting.fetch()) == [("gap", 2, 5)]
    assert setting.state(setting.p0) is FetchState.BACKING_OFF
    assert setting.receiver.lost_offsets == 5
    setting.kafka.produce("a", 0, *[b"y"] * 9)
    setting.clock.advance(60_000)
    assert reported(setting.fetch()) == [("records", 7, 11)]


@pytest.mark.parametrize("policy", ["fail", "reset"])
def test_a_truncated_log_is_reported_although_the_offset_is_there_again(policy: str) -> None:
    setting = Setting(policy)
    setting.kafka.produce("a", 0, *[b"new"] * 10)
    setting.receiver.assign(setting.p0, 6)
    text = "Partition log truncation detected at offset 6: broker end offset is 4 (offset leader epoch 2)"
    error = KafkaError(KafkaError._AUTO_OFFSET_RESET, text)
    setting.consumers[0].events = [Message(topic="a", partition=0, offset=6, error=error)]
    assert reported(setting.receiver.fetch(0)) == [("gap", 4, 6)]
    assert "[4, 6)" in (setting.receiver.status()[0].error or "")
    setting.clock.advance(1_000)
    assert reported(setting.fetch()) == ([] if policy == "fail" else [("records", 6, 10)])
    assert setting.state(setting.p0) is (FetchState.FAILED if policy == "fail" else FetchState.AT_END)


def test_a_truncated_log_fails_its_partition_where_it_is_not_known_what_was_cut_off() -> None:
    setting = Setting("reset")
    setting.kafka.produce("a", 0, *[b"new"] * 10)
    setting.receiver.assign(setting.p0, 6)
    error = KafkaError(KafkaError._AUTO_OFFSET_RESET, "Partition log truncation detected at offset 6")
    setting.consumers[0].events = [Message(topic="a", partition=0, offset=6, error=error)]
    assert reported(setting.fetch()) == [("gap", 6, 6)], "to be told of, with no offsets to name"
    assert setting.state(setting.p0) is FetchState.FAILED


@pytest.mark.parametrize("policy", ["fail", "reset"])
def test_a_log_that_was_cut_off_and_grew_again_while_nobody_read_is_reported(policy: str) -> None:
    setting = Setting(policy)
    setting.kafka.produce("a", 0, *[b"old"] * 6)
    setting.kafka.elect("a", 0, high=4)
    setting.kafka.produce("a", 0, *[b"new"] * 6)
    setting.receiver.assign(setting.p0, 6, EpochEnd(0, 6))
    assert reported(setting.fetch()) == [("gap", 4, 6)]
    setting.clock.advance(1_000)
    assert reported(setting.fetch()) == ([] if policy == "fail" else [("records", 6, 10)])
    # Told once: who sets it going again goes on at the position.
    setting.receiver.assign(setting.p0, setting.receiver.partitions[setting.p0], EpochEnd(0, 6))
    assert reported(setting.fetch()) == ([("records", 6, 10)] if policy == "fail" else [])
    assert setting.state(setting.p0) is FetchState.AT_END


def test_elections_that_took_nothing_back_are_no_trouble() -> None:
    setting = Setting()
    for _ in range(3):
        setting.kafka.produce("a", 0, b"1", b"2", CONTROL)
        setting.kafka.elect("a", 0)
    setting.evidence.transactions = True
    # The last record is of the last but one epoch, and control records follow it, of that and of the next one.
    setting.kafka.produce("a", 0, CONTROL)
    setting.receiver.assign(setting.p0, 10, EpochEnd(2, 8))
    assert setting.ranges() == []
    assert setting.state(setting.p0) is FetchState.AT_END
    setting.kafka.produce("a", 0, b"3")
    assert setting.ranges() == [OffsetRange(setting.p0, 10, 11, 1)]
    assert setting.receiver.below_position == 0
    ends = setting.receiver.leader_epochs
    assert [ends.end_at(setting.p0, each) for each in (8, 10, 11)] == [EpochEnd(2, 8), EpochEnd(2, 8), EpochEnd(3, 11)]
    setting.kafka.elect("a", 0)
    setting.receiver.listen()
    assert setting.fetch() == []
    assert setting.state(setting.p0) is FetchState.AT_END


def test_a_log_that_is_cut_off_while_receiving_pauses_is_reported() -> None:
    setting = Setting()
    setting.kafka.produce("a", 0, *[b"old"] * 6)
    setting.receiver.assign(setting.p0, 0)
    assert setting.ranges() == [OffsetRange(setting.p0, 0, 6, 6)]
    setting.receiver.listen()
    setting.kafka.elect("a", 0, high=3)
    setting.kafka.produce("a", 0, *[b"new"] * 6)
    assert reported(setting.fetch()) == [("gap", 3, 6)]


@pytest.mark.parametrize("end", [EpochEnd(0, 2), EpochEnd(0, 3), EpochEnd(0, 12)])
def test_what_an_epoch_is_known_by_may_be_gone_or_lie_beyond(end: EpochEnd) -> None:
    """What lay between it and the position had no record, and retention took it; or positions were set back."""
    setting = Setting()
    setting.kafka.produce("a", 0, *[b"1"] * 3, CONTROL, CONTROL, *[b"2"] * 5)
    setting.kafka.expire("a", 0, 4)
    setting.receiver.assign(setting.p0, 5, end)
    setting.fetch()
    setting.clock.advance(1_000)
    setting.fetch()
    assert setting.receiver.partitions == {setting.p0: 10}
    assert setting.state(setting.p0) is FetchState.AT_END
    assert setting.receiver.lost_offsets == 0


def test_what_lies_far_behind_the_position_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka_errors, "_MOST_PASSED_AGAIN", 2)
    setting = Setting()
    setting.kafka.produce("a", 0, *[b"1"] * 8)
    setting.receiver.assign(setting.p0, 6, EpochEnd(0, 3))
    assert setting.ranges() == [OffsetRange(setting.p0, 6, 8, 2)]
    assert setting.receiver.below_position == 0


def test_behind_a_gap_nothing_is_compared_with_what_was_before_it() -> None:
    setting = Setting("reset")
    setting.kafka.produce("a", 0, *[b"1"] * 8)
    setting.kafka.expire("a", 0, 6)
    setting.receiver.assign(setting.p0, 3, EpochEnd(0, 3))
    assert reported(setting.fetch()) == [("gap", 3, 6), ("records", 6, 8)]


def test_a_client_that_cannot_compare_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting()
    setting.kafka.produce("a", 0, *[b"1"] * 8)

    def seek(self: FakeConsumer, partition: Any) -> None:
        raise KafkaException(KafkaError(KafkaError._STATE, "not now"))

    with monkeypatch.context() as broken:
        broken.setattr(FakeConsumer, "seek", seek)
        setting.receiver.assign(setting.p0, 6, EpochEnd(0, 6))
    assert setting.fetch() == []
    assert "not now" in (setting.receiver.status()[0].error or "")
    setting.clock.advance(1_000)
    assert setting.ranges() == [OffsetRange(setting.p0, 6, 8, 2)]
