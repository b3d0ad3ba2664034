"""Offsets that Kafka no longer has: deleted before they were read, or never explained."""

from __future__ import annotations

import pytest
from tests.unit.receiver.kafka_receiver.setting import GONE, Setting, reported

from headrace.blocks import OffsetRange
from headrace.kafka.records import RecordChunk
from headrace.receiver.record_source import FetchState, Gap


def test_lost_offsets_fail_their_partition_and_no_other() -> None:
    setting = Setting()
    for partition in (0, 1):
        setting.kafka.produce("a", partition, *[b"x"] * 10)
    setting.kafka.expire("a", 0, 6)
    setting.receiver.assign(setting.p0, 2)
    setting.receiver.assign(setting.p1, 0)
    assert setting.ranges() == [OffsetRange(setting.p1, 0, 10, 10)]
    (status,) = [each for each in setting.receiver.status() if each.state is FetchState.FAILED]
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


def test_while_kafka_does_not_explain_a_hole_only_its_partition_waits() -> None:
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
