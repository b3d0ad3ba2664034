"""Messages become Arrow with exactly the ranges that lie between two positions."""

from __future__ import annotations

from typing import Any

import pytest
from confluent_kafka import Message
from hypothesis import given
from hypothesis import strategies as st

from headrace.blocks import OffsetRange, TopicPartition
from headrace.kafka import records
from headrace.kafka.records import Cursor, RecordChunk, chunks_of, columns_of, combine, convert, without
from headrace.wal.frame import RECORD_SCHEMA, decode, encode

A0 = TopicPartition("a", "id-a", 0)
A1 = TopicPartition("a", "id-a", 1)
B0 = TopicPartition("b", "id-b", 0, incarnation=3)
ALL = {("a", 0): Cursor(A0, 0), ("a", 1): Cursor(A1, 0), ("b", 0): Cursor(B0, 0)}


def message(topic: str, partition: int, offset: int, value: bytes | None = b"v", **fields: Any) -> Message:
    fields.setdefault("timestamp", (1, 1_700_000_000_000 + offset))
    return Message(topic=topic, partition=partition, offset=offset, value=value, **fields)


def test_every_field_arrives() -> None:
    messages = [
        message("a", 0, 0, b"\x00\xff", key=b"k", headers=[("h", b"1"), ("h", None), ("text", "é")]),
        message("a", 0, 1, None, key=b"tombstone", timestamp=(2, 5)),
        message("b", 0, 0, b"", timestamp=(0, -1)),
    ]
    converted = convert(columns_of(messages), ALL)
    assert converted.batch.schema == RECORD_SCHEMA
    rows = converted.batch.to_pylist()
    assert [row["value"] for row in rows] == [b"\x00\xff", None, b""]
    assert [row["key"] for row in rows] == [b"k", b"tombstone", None]
    assert [row["topic"] for row in rows] == ["a", "a", "b"]
    assert [row["offset"] for row in rows] == [0, 1, 0]
    assert [row["timestampType"] for row in rows] == [0, 1, -1]
    assert [row["timestamp"].timestamp() for row in rows] == [1_700_000_000.0, 0.005, -0.001]
    assert [row["incarnation"] for row in rows] == [1, 1, 3]
    assert rows[0]["headers"] == [
        {"key": "h", "value": b"1"},
        {"key": "h", "value": None},
        {"key": "text", "value": "é".encode()},
    ]
    assert rows[1]["headers"] is None
    assert decode(encode(converted.batch)).equals(converted.batch)


def test_foreign_and_earlier_records_are_left_out_and_counted() -> None:
    cursors = {("a", 0): Cursor(A0, 5)}
    converted = convert(
        columns_of([message("a", 0, 4), message("a", 0, 5), message("a", 1, 0), message("a", 0, 6)]), cursors
    )
    assert converted.batch.column("offset").to_pylist() == [5, 6]
    assert (converted.below_position, converted.not_owned) == (1, 1)
    assert converted.positions == {A0: 7}
    assert convert(columns_of([message("a", 1, 0)]), cursors).batch is None


def test_a_repeated_offset_counts_once() -> None:
    converted = convert(columns_of([message("a", 0, offset) for offset in (0, 1, 1, 0, 2)]), ALL)
    assert converted.batch.column("offset").to_pylist() == [0, 1, 2]
    assert converted.below_position == 2


def test_the_range_reaches_to_the_position_past_the_last_record() -> None:
    converted = convert(columns_of([message("a", 0, 9)]), {("a", 0): Cursor(A0, 7)})
    (chunk,) = chunks_of(converted, {A0: 7}, {A0: 22}, 1 << 20)
    assert chunk.ranges == (OffsetRange(A0, 7, 22, 1),)


def test_positions_without_records_are_a_chunk_without_a_batch() -> None:
    assert chunks_of(convert(None, {}), {A0: 7, A1: 3}, {A0: 9, A1: 3}, 100) == [
        RecordChunk(None, (OffsetRange(A0, 7, 9, 0),), 0)
    ]
    assert chunks_of(convert(None, {}), {A0: 7}, {A0: 7}, 100) == []


def test_combine_refuses_a_missing_chunk() -> None:
    chunks = [RecordChunk(None, (OffsetRange(A0, 0, 2, 0),), 0), RecordChunk(None, (OffsetRange(A0, 3, 4, 0),), 0)]
    with pytest.raises(ValueError, match="continues at 3 after 2"):
        combine(chunks)


def test_a_partition_can_be_taken_out_of_a_block() -> None:
    converted = convert(columns_of([message("a", 0, 0), message("b", 0, 0), message("a", 1, 0)]), ALL)
    ranges = [OffsetRange(partition, 0, 1, 1) for partition in (A0, A1, B0)]
    batch, left = without(converted.batch, ranges, [B0])
    assert batch is not None
    assert batch.column("topic").to_pylist() == ["a", "a"]
    assert left == (OffsetRange(A0, 0, 1, 1), OffsetRange(A1, 0, 1, 1))
    assert without(converted.batch, ranges, [A0, A1, B0]) == (None, ())


@given(
    st.lists(st.tuples(st.sampled_from([("a", 0), ("a", 1), ("b", 0)]), st.integers(1, 3), st.integers(0, 60))),
    st.integers(20, 400),
    st.integers(0, 5),
)
def test_chunks_cover_the_gaps_and_hold_every_record_once(
    arrivals: list[tuple[tuple[str, int], int, int]], limit: int, beyond: int
) -> None:
    """However the records are split, the ranges meet and end where the position is."""
    offsets = dict.fromkeys(ALL, 0)
    messages = []
    for key, step, size in arrivals:
        offsets[key] += step
        messages.append(message(*key, offsets[key] - 1, b"x" * size))
    converted = convert(columns_of(messages), ALL)
    positions = {partition: position + beyond for partition, position in converted.positions.items()}
    standing = {cursor.partition: cursor.next_offset for cursor in ALL.values()}
    chunks = chunks_of(converted, standing, positions, limit)
    assert sum(chunk.records for chunk in chunks) == len(messages)
    for chunk in chunks:
        assert sum(block_range.records for block_range in chunk.ranges) == chunk.records
    batch, ranges = combine(chunks)
    assert {block_range.partition: (block_range.from_offset, block_range.until_offset) for block_range in ranges} == {
        partition: (0, position) for partition, position in positions.items()
    }
    if messages:
        assert batch is not None
        assert batch.column("offset").to_pylist() == [each.offset() for each in messages]


class _Poisoned(Message):  # type: ignore[misc]
    """A message as the client makes it of a header whose name is no UTF-8: a second look at its headers ends the
    process."""

    looks = 0

    def headers(self) -> Any:
        self.looks += 1
        raise SystemError("returned a result with an exception set")


def test_unreadable_headers_are_left_out_and_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "_HEADERS", lambda message: message.headers())
    partition = TopicPartition("a", "id", 0)
    poisoned = [_Poisoned(topic="a", partition=0, offset=n, value=b"v", timestamp=(1, 5)) for n in (1, 3)]
    good = [
        Message(topic="a", partition=0, offset=n, value=b"v", headers=[("k", b"x")], timestamp=(1, 5))
        for n in (0, 2, 4)
    ]
    messages = sorted([*poisoned, *good], key=lambda each: each.offset())
    converted = convert(columns_of(messages), {("a", 0): Cursor(partition, 0)})
    assert converted.batch is not None
    readable = [{"key": "k", "value": b"x"}]
    assert converted.batch.column("headers").to_pylist() == [readable, None, readable, None, readable]
    assert converted.unreadable_headers == 2
    assert [each.looks for each in poisoned] == [1, 1]
