"""The headers of the log's frames, as JSON, so that ``strings`` can read a log when everything else is lost.

Offset ranges are grouped by topic, since a block may span thousands of partitions:
``[["flights", "<topic id>", 1, [[partition, from, until, records, leader epoch if known], …]], …]``.

A field that was added later is omitted when it has no value, and read as None when it is missing. Readers ignore
unknown fields. So a new field needs a new format version only if older readers must not ignore it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from headrace.blocks import OffsetRange, ReceiverId, TopicPartition


class PreviousState(StrEnum):
    """How a writer left the previous segment."""

    CLOSED = "closed"
    """Ended by an end frame; ``length`` is the whole file."""
    POISONED = "poisoned"
    """A write or sync failed after ``length`` good bytes; what follows them was never acknowledged."""
    INHERITED = "inherited"
    """An earlier epoch's last segment; the new epoch's writer found ``length`` bytes that belong to the log."""


@dataclass(frozen=True, slots=True)
class PreviousSegment:
    """A segment before this one. ``length`` is the number of its bytes that belong to the log (0: it may not exist)."""

    segment: str
    length: int
    state: PreviousState


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """The header of a block's frame.

    ``last_accepted_sequence`` is the sequence of the newest frame of this epoch that the ledger had accepted when
    this one was written, None if there was none. ``raw_bytes`` is the block's size in memory, before compression.
    ``event_time_ms`` is that of `BlockInfo`: a rebuild of a lost ledger needs it to find the batch of a block of a
    stream by timestamp. ``source_position`` is that of `BlockInfo`.
    """

    receiver: ReceiverId
    epoch: int
    sequence: int
    last_accepted_sequence: int | None
    cut_time_ms: int
    ranges: tuple[OffsetRange, ...]
    records: int
    raw_bytes: int
    event_time_ms: int | None = None
    source_position: str | None = None

    def to_json(self) -> bytes:
        return _dump(
            {
                **_dump_writer(self.receiver, self.epoch),
                "sequence": self.sequence,
                "accepted": self.last_accepted_sequence,
                "cut_ms": self.cut_time_ms,
                **({} if self.event_time_ms is None else {"event_ms": self.event_time_ms}),
                **({} if self.source_position is None else {"source_position": self.source_position}),
                "records": self.records,
                "raw_bytes": self.raw_bytes,
                "ranges": _dump_ranges(self.ranges),
            }
        )

    @classmethod
    def from_json(cls, data: bytes) -> FrameHeader:
        fields = json.loads(data)
        return cls(
            receiver=_load_receiver(fields),
            epoch=fields["epoch"],
            sequence=fields["sequence"],
            last_accepted_sequence=fields["accepted"],
            cut_time_ms=fields["cut_ms"],
            ranges=_load_ranges(fields["ranges"]),
            records=fields["records"],
            raw_bytes=fields["raw_bytes"],
            event_time_ms=fields.get("event_ms"),
            source_position=fields.get("source_position"),
        )


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """The header of a segment's first frame: its writer, the writer's positions and the segments before it.

    ``positions`` are the next offsets of the writer's partitions when it opened the segment. ``previous`` are all
    segments since the last one that has a readable header, oldest first.
    """

    receiver: ReceiverId
    epoch: int
    number: int
    opened_ms: int
    next_sequence: int
    last_accepted_sequence: int | None
    positions: Mapping[TopicPartition, int]
    previous: tuple[PreviousSegment, ...]

    def to_json(self) -> bytes:
        return _dump(
            {
                **_dump_writer(self.receiver, self.epoch),
                "number": self.number,
                "opened_ms": self.opened_ms,
                "next_sequence": self.next_sequence,
                "accepted": self.last_accepted_sequence,
                "positions": [[*_dump_partition(tp), offset] for tp, offset in sorted(self.positions.items())],
                "previous": [[p.segment, p.length, p.state.value] for p in self.previous],
            }
        )

    @classmethod
    def from_json(cls, data: bytes) -> SegmentHeader:
        fields = json.loads(data)
        return cls(
            receiver=_load_receiver(fields),
            epoch=fields["epoch"],
            number=fields["number"],
            opened_ms=fields["opened_ms"],
            next_sequence=fields["next_sequence"],
            last_accepted_sequence=fields["accepted"],
            positions={_load_partition(tp): offset for *tp, offset in fields["positions"]},
            previous=tuple(PreviousSegment(s, length, PreviousState(state)) for s, length, state in fields["previous"]),
        )


@dataclass(frozen=True, slots=True)
class SegmentEnd:
    """The header of a segment's last frame: the writer closed the segment after ``blocks`` blocks; no byte follows.

    ``last_accepted_sequence`` is None also when the writer could not know it: the end frame was written together with
    the last block.
    """

    receiver: ReceiverId
    epoch: int
    blocks: int
    next_sequence: int
    last_accepted_sequence: int | None
    closed_ms: int

    def to_json(self) -> bytes:
        return _dump(
            {
                **_dump_writer(self.receiver, self.epoch),
                "blocks": self.blocks,
                "next_sequence": self.next_sequence,
                "accepted": self.last_accepted_sequence,
                "closed_ms": self.closed_ms,
            }
        )

    @classmethod
    def from_json(cls, data: bytes) -> SegmentEnd:
        fields = json.loads(data)
        return cls(
            receiver=_load_receiver(fields),
            epoch=fields["epoch"],
            blocks=fields["blocks"],
            next_sequence=fields["next_sequence"],
            last_accepted_sequence=fields["accepted"],
            closed_ms=fields["closed_ms"],
        )


AnyHeader = FrameHeader | SegmentHeader | SegmentEnd


def _dump(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()


def _dump_writer(receiver: ReceiverId, epoch: int) -> dict[str, Any]:
    return {"stream": receiver.stream, "input": receiver.input_id, "receiver": receiver.index, "epoch": epoch}


def _load_receiver(fields: dict[str, Any]) -> ReceiverId:
    return ReceiverId(fields["stream"], fields["input"], fields["receiver"])


def _dump_partition(partition: TopicPartition) -> list[Any]:
    return [partition.topic, partition.topic_id, partition.incarnation, partition.partition]


def _load_partition(fields: list[Any]) -> TopicPartition:
    topic, topic_id, incarnation, partition = fields
    return TopicPartition(topic, topic_id, partition, incarnation)


def _dump_ranges(ranges: tuple[OffsetRange, ...]) -> list[Any]:
    topics: dict[tuple[str, str, int], list[list[int]]] = {}
    for r in ranges:
        tp = r.partition
        topics.setdefault((tp.topic, tp.topic_id, tp.incarnation), []).append(
            [
                tp.partition,
                r.from_offset,
                r.until_offset,
                r.records,
                *([] if r.leader_epoch is None else [r.leader_epoch]),
            ]
        )
    return [[*topic, partitions] for topic, partitions in topics.items()]


def _load_ranges(topics: list[Any]) -> tuple[OffsetRange, ...]:
    return tuple(
        OffsetRange(TopicPartition(topic, topic_id, partition, incarnation), *numbers)
        for topic, topic_id, incarnation, partitions in topics
        for partition, *numbers in partitions
    )
