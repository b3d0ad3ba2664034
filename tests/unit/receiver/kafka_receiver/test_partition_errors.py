"""Errors of a partition, of a topic and of the client: what is fetched again, and what fails."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, Message
from tests.unit.receiver.kafka_receiver.setting import DAMAGED, Setting, reported

from headrace.blocks import OffsetRange
from headrace.kafka.records import RecordChunk
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
def test_lasting_damage_fails_the_partition_and_says_where_and_what_helps(
    policy: str, caplog: pytest.LogCaptureFixture
) -> None:
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


def test_a_damaged_batch_whose_records_were_deleted_is_a_gap_under_reset() -> None:
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
def test_an_offset_out_of_range_beside_damage_is_the_clients_confusion(order: tuple[int, int]) -> None:
    """librdkafka goes on at an offset that is none after a damaged batch, if other partitions came with it."""
    setting = Setting("reset")
    setting.kafka.produce("a", 0, *[b"x"] * 10)
    setting.receiver.assign(setting.p0, 4)
    errors = [
        KafkaError(KafkaError._BAD_MSG, "failed CRC32C check"),
        KafkaError(KafkaError._AUTO_OFFSET_RESET, "requested offset not available"),
    ]
    setting.consumers[0].events = [Message(topic="a", partition=0, offset=4, error=errors[each]) for each in order]
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


def test_a_partition_that_failed_stays_so_through_a_pause_and_one_that_backs_off_is_read_again() -> None:
    setting = Setting()
    setting.kafka.produce("a", 0, *[b"x"] * 10)
    setting.kafka.expire("a", 0, 6)
    setting.kafka.produce("a", 1, DAMAGED, b"x")
    setting.receiver.assign(setting.p0, 2)
    setting.receiver.assign(setting.p1, 0)
    setting.fetch()
    assert setting.state(setting.p1) is FetchState.BACKING_OFF
    setting.kafka.logs["a", 1].entries[0] = FakeEntry(b"mended")
    setting.receiver.listen()
    setting.clock.advance(60_000)
    setting.receiver.listen()
    assert setting.ranges() == [OffsetRange(setting.p1, 0, 2, 2)]
    assert setting.state(setting.p0) is FetchState.FAILED
