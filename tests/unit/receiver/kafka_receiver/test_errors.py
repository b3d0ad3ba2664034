"""Errors of a partition, a topic and the client; offsets that Kafka no longer has; a log that was truncated."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, Message
from tests.unit.receiver.kafka_receiver.setting import CONTROL, DAMAGED, GONE, Setting, reported

from headrace.blocks import OffsetRange
from headrace.kafka.records import RecordChunk
from headrace.ledger.receiving.tables import EpochEnd
from headrace.receiver.receiver import KafkaClientError
from headrace.receiver.record_source import FetchState, Gap
from headrace.testing.fake_kafka import FakeConsumer, FakeEntry


def test_damage_is_fetched_again_with_backoff_while_others_go_on() -> None:
    setting = Setting()
    setting.kafka.produce("a", 0, b"0", b"1", DAMAGED, b"3")
    setting.receiver.assign(setting.p0, 0)
    setting.receiver.assign(setting.p1, 0)
    assert setting.ranges() == [OffsetRange(setting.p0, 0, 2, 2)]
    assert setting.state(setting.p0) is FetchState.BACKING_OFF
    setting.kafka.produce("a", 1, b"0")
    assert setting.ranges() == [OffsetRange(setting.p1, 0, 1, 1)]
    setting.kafka.logs["a", 0].entries[2] = FakeEntry(b"2")
    assert setting.ranges() == []
    setting.clock.advance(1_000)
    assert setting.ranges() == [OffsetRange(setting.p0, 2, 4, 2)]


def test_what_fails_for_a_day_is_fetched_again_each_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    """A day has over a thousand tries: two to that power is no float."""
    setting = Setting("reset")
    setting.kafka.produce("a", 0, b"0")
    setting.receiver.assign(setting.p0, 7)

    def unknown(*_: Any, **__: Any) -> tuple[int, int]:
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT, "no answer"))

    with monkeypatch.context() as patch:
        patch.setattr(FakeConsumer, "get_watermark_offsets", unknown)
        for _ in range(1_200):
            setting.receiver.fetch(0)
            setting.clock.advance(60_000)
    setting.kafka.produce("a", 0, *[b"1"] * 8)
    assert setting.ranges() == [OffsetRange(setting.p0, 7, 9, 2)]


@pytest.mark.parametrize("policy", ["fail", "reset"])
def test_lasting_damage_fails_the_partition_and_says_what_helps(policy: str, caplog: pytest.LogCaptureFixture) -> None:
    """The error says where the damage is, too."""
    setting = Setting(policy)
    batch = FakeEntry(None, kind="damaged", base_offset=1)
    setting.kafka.produce("a", 0, b"0", *[batch] * 3, b"4")
    setting.receiver.assign(setting.p0, 0)
    events: list[RecordChunk | Gap] = []
    for _ in range(6):
        events += setting.receiver.fetch(0)
        assert setting.state(setting.p0) is FetchState.BACKING_OFF
        setting.clock.advance(60_000)
    for _ in range(3):
        events += setting.receiver.fetch(0)
        setting.clock.advance(60_000)
    assert reported(events) == [("records", 0, 1)], "no offset is skipped"
    assert re.findall(r"fetched again in (\d+) s", caplog.text) == ["1", "2", "4", "8", "16", "32", "60"]
    (status,) = setting.receiver.status()
    assert status.state is FetchState.FAILED
    assert "the record batch at offset 1 cannot be read" in (status.error or "")
    assert "kafka-delete-records" in (status.error or "")


def test_a_damaged_batch_of_deleted_records_is_a_gap_under_reset() -> None:
    setting = Setting("reset")
    setting.kafka.produce("a", 0, b"0", DAMAGED, DAMAGED, b"3")
    setting.receiver.assign(setting.p0, 0)
    for _ in range(10):
        setting.fetch()
        setting.clock.advance(60_000)
    assert setting.state(setting.p0) is FetchState.FAILED
    setting.kafka.expire("a", 0, 3)
    # As the next receiver job does.
    setting.receiver.assign(setting.p0, 1)
    assert reported(setting.fetch()) == [("gap", 1, 3), ("records", 3, 4)]


def test_a_fatal_error_of_the_client_ends_it() -> None:
    setting = Setting()
    setting.receiver.assign(setting.p0, 0)
    setting.consumers[0].events = [Message(error=KafkaError(KafkaError._FATAL, "fenced", True))]
    with pytest.raises(KafkaClientError, match="fenced"):
        setting.receiver.fetch(0)


def test_an_error_of_a_topic_is_its_partitions_until_it_goes_on() -> None:
    setting = Setting()
    setting.kafka.produce("a", 0, b"0")
    setting.receiver.assign(setting.p0, 0)
    setting.fetch()
    error = KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED, "not yours")
    for _ in range(2):
        setting.consumers[0].events = [Message(topic="a", partition=0, offset=-1001, error=error)]
        setting.receiver.fetch(0)
        assert "not yours" in (setting.receiver.status()[0].error or "")
        assert setting.state(setting.p0) is FetchState.BACKING_OFF
        setting.clock.advance(4_000)
        assert setting.ranges() == []
        setting.clock.advance(1_000)
    # Without a new record too.
    assert setting.ranges() == []
    assert (setting.state(setting.p0), setting.receiver.status()[0].error) == (FetchState.AT_END, None)
    setting.kafka.produce("a", 0, b"x")
    assert setting.ranges() == [OffsetRange(setting.p0, 1, 2, 1)]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_an_offset_out_of_range_beside_damage_is_a_confusion(order: tuple[int, int]) -> None:
    """librdkafka goes on at an offset that is none after a damaged batch, if other partitions came with it."""
    setting = Setting("reset")
    setting.kafka.produce("a", 0, *[b"x"] * 10)
    setting.receiver.assign(setting.p0, 4)
    errors = [
        KafkaError(KafkaError._BAD_MSG, "failed CRC32C check"),
        KafkaError(KafkaError._AUTO_OFFSET_RESET, "requested offset not available"),
    ]
    setting.consumers[0].events = [Message(topic="a", partition=0, offset=4, error=errors[name]) for name in order]
    setting.receiver.fetch(0)
    assert setting.state(setting.p0) is FetchState.BACKING_OFF
    setting.clock.advance(1_000)
    assert setting.ranges() == [OffsetRange(setting.p0, 4, 10, 6)]


def test_a_partition_without_a_leader_says_so_until_it_has_one() -> None:
    setting = Setting()
    setting.receiver.assign(setting.p0, 0)
    setting.receiver.assign(setting.p1, 0)
    setting.fetch()

    def leaders(*leaders: int) -> None:
        known = {str(number): {"leader": leader} for number, leader in enumerate(leaders)}
        setting.config["stats_cb"](json.dumps({"brokers": {}, "topics": {"a": {"partitions": known}}}))

    leaders(-1, 1)
    assert (setting.state(setting.p0), setting.state(setting.p1)) == (FetchState.LEADERLESS, FetchState.AT_END)
    assert "no leader" in (setting.receiver.status()[0].error or "")
    leaders(1, 1)
    assert setting.state(setting.p0) is FetchState.FETCHING
    assert setting.receiver.status()[0].error is None


def test_a_pause_keeps_a_failed_partition_and_ends_a_backoff() -> None:
    """The partition that backs off is read again once its time has come."""
    setting = Setting()
    setting.kafka.produce("a", 0, *[b"x"] * 10)
    setting.kafka.expire("a", 0, 6)
    setting.kafka.produce("a", 1, DAMAGED, b"x")
    setting.receiver.assign(setting.p0, 2)
    setting.receiver.assign(setting.p1, 0)
    setting.fetch()
    assert setting.state(setting.p1) is FetchState.BACKING_OFF
    setting.kafka.logs["a", 1].entries[0] = FakeEntry(b"mended")
    setting.receiver.serve_paused()
    setting.clock.advance(60_000)
    setting.receiver.serve_paused()
    assert setting.ranges() == [OffsetRange(setting.p1, 0, 2, 2)]
    assert setting.state(setting.p0) is FetchState.FAILED


def test_lost_offsets_fail_their_partition_and_no_other() -> None:
    setting = Setting()
    for partition in (0, 1):
        setting.kafka.produce("a", partition, *[b"x"] * 10)
    setting.kafka.expire("a", 0, 6)
    setting.receiver.assign(setting.p0, 2)
    setting.receiver.assign(setting.p1, 0)
    assert setting.ranges() == [OffsetRange(setting.p1, 0, 10, 10)]
    (status,) = [status for status in setting.receiver.status() if status.state is FetchState.FAILED]
    assert status.partition == setting.p0
    assert "[2, 6) are gone" in (status.error or "")


def test_lost_offsets_are_a_gap_under_reset() -> None:
    setting = Setting("reset")
    setting.kafka.produce("a", 0, *[b"x"] * 10)
    setting.kafka.expire("a", 0, 6)
    setting.receiver.assign(setting.p0, 2)
    gap, chunk = setting.fetch()
    assert isinstance(gap, Gap)
    assert (gap.from_offset, gap.until_offset) == (2, 6)
    assert isinstance(chunk, RecordChunk)
    assert chunk.ranges == (OffsetRange(setting.p0, 6, 10, 4),)


@pytest.mark.parametrize("policy", ["fail", "reset"])
@pytest.mark.parametrize("rest", [[b"3", b"4"], []])
def test_a_jump_without_a_reason_is_a_gap_in_its_place(policy: str, rest: list[bytes]) -> None:
    setting = Setting(policy)
    setting.kafka.produce("a", 0, b"0", GONE, GONE, *rest)
    setting.kafka.produce("a", 1, b"0", b"1")
    setting.receiver.assign(setting.p0, 0)
    setting.receiver.assign(setting.p1, 0)
    events = setting.fetch()
    of_p0 = [("records", 0, 1), ("gap", 1, 3), *([("records", 3, 5)] if rest else [])]
    assert sorted(reported(events)) == sorted([*of_p0, ("records", 0, 2)])
    assert setting.receiver.partitions == {setting.p0: 3 + len(rest), setting.p1: 2}
    assert setting.receiver.lost_offsets == 2
    assert sum(event.records for event in events if isinstance(event, RecordChunk)) == 3 + len(rest)
    assert setting.state(setting.p0) is FetchState.AT_END


def test_each_hole_that_nothing_explains_is_a_gap_of_its_own() -> None:
    setting = Setting()
    setting.kafka.produce("a", 0, GONE, b"1", GONE, GONE, b"4", GONE)
    setting.receiver.assign(setting.p0, 0)
    expected = [("gap", 0, 1), ("records", 1, 2), ("gap", 2, 4), ("records", 4, 5), ("gap", 5, 6)]
    assert reported(setting.fetch()) == expected


def test_only_the_partition_of_an_unexplained_hole_waits() -> None:
    """It waits while Kafka does not explain the hole."""
    setting = Setting()
    setting.evidence.silent = True
    setting.kafka.produce("a", 0, b"0", GONE, b"2")
    setting.kafka.produce("a", 1, b"0")
    setting.receiver.assign(setting.p0, 0)
    setting.receiver.assign(setting.p1, 0)
    assert sorted(reported(setting.fetch())) == [("records", 0, 1), ("records", 0, 1)]
    assert setting.state(setting.p0) is FetchState.BACKING_OFF
    setting.kafka.produce("a", 1, b"1")
    assert reported(setting.fetch()) == [("records", 1, 2)]
    setting.evidence.silent = False
    setting.clock.advance(1_000)
    assert reported(setting.fetch()) == [("gap", 1, 2), ("records", 2, 3)]


def test_a_log_that_ends_before_the_position_fails() -> None:
    """The error says what was taken back."""
    setting = Setting()
    setting.kafka.produce("a", 0, *[b"x"] * 3)
    setting.receiver.assign(setting.p0, 7)
    (gap,) = setting.fetch()
    assert isinstance(gap, Gap)
    assert (gap.from_offset, gap.until_offset, gap.taken_back) == (3, 7, True)
    assert setting.receiver.lost_offsets == 4
    assert setting.state(setting.p0) is FetchState.FAILED
    assert "[3, 7)" in (setting.receiver.status()[0].error or "")


def test_a_shorter_log_is_read_on_once_it_is_there_under_reset() -> None:
    """The log ends before the position until it has reached it."""
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
def test_a_truncated_log_is_reported_though_it_has_the_offset(policy: str) -> None:
    """The offset is there again when it is looked at."""
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


def test_a_truncated_log_with_an_unknown_cut_fails_its_partition() -> None:
    """It is not known what was cut off."""
    setting = Setting("reset")
    setting.kafka.produce("a", 0, *[b"new"] * 10)
    setting.receiver.assign(setting.p0, 6)
    error = KafkaError(KafkaError._AUTO_OFFSET_RESET, "Partition log truncation detected at offset 6")
    setting.consumers[0].events = [Message(topic="a", partition=0, offset=6, error=error)]
    assert reported(setting.fetch()) == [("gap", 6, 6)], "to be told of, with no offsets to name"
    assert setting.state(setting.p0) is FetchState.FAILED


@pytest.mark.parametrize("policy", ["fail", "reset"])
def test_a_log_cut_and_regrown_while_nobody_read_is_reported(policy: str) -> None:
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
    assert [ends.end_at(setting.p0, epoch) for epoch in (8, 10, 11)] == [
        EpochEnd(2, 8),
        EpochEnd(2, 8),
        EpochEnd(3, 11),
    ]
    setting.kafka.elect("a", 0)
    setting.receiver.serve_paused()
    assert setting.fetch() == []
    assert setting.state(setting.p0) is FetchState.AT_END


def test_a_log_cut_off_while_receiving_pauses_is_reported() -> None:
    setting = Setting()
    setting.kafka.produce("a", 0, *[b"old"] * 6)
    setting.receiver.assign(setting.p0, 0)
    assert setting.ranges() == [OffsetRange(setting.p0, 0, 6, 6)]
    setting.receiver.serve_paused()
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


def test_what_lies_far_behind_the_position_is_not_read_again() -> None:
    setting = Setting()
    setting.kafka.produce("a", 0, *[b"1"] * 10_006)
    setting.receiver.assign(setting.p0, 10_004, EpochEnd(0, 3))
    assert setting.ranges() == [OffsetRange(setting.p0, 10_004, 10_006, 2)]
    assert setting.receiver.below_position == 0


def test_nothing_behind_a_gap_is_compared_with_what_was_before() -> None:
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
