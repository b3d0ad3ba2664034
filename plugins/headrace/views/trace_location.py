"""Finds the record that a person asks for, and how far it has come, by the ledger and the batch's manifest.

A record is asked for by its coordinates, or by a document's id.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from headrace.batch.manifest import Manifest, ManifestError
from headrace.blocks import OffsetRange
from headrace.clock import time_text
from headrace.ledger.batches.tables import BatchRow
from headrace.ledger.receiving.tables import PositionRow, StoredBlock, TopicRow
from headrace.ledger.tables import GapRow
from headrace.stream.outputs import ColumnIds, RecordIds
from headrace.stream_context import StreamContext
from headrace.views.traced import RecordPosition, RecordState, TracedBlock, UnknownRecordError

# Waiting batch times whose blocks are read at once. A stream that fell behind has thousands of them.
_TIMES_AT_ONCE = 20
_TIMES_OF_A_PAGE = 1_000
# What only the row of a block has, which the ledger deletes with the segment.
_UNKNOWN: dict[str, Any] = dict.fromkeys(("receiver", "epoch", "sequence", "cut_time_ms", "added_at_ms"))


@dataclass(frozen=True, slots=True)
class Location:
    """How far an offset has come. ``problem``: why the block of a batch's record is not known."""

    state: RecordState
    text: str
    batch: BatchRow | None = None
    block: TracedBlock | None = None
    problem: str | None = None


def locate(context: StreamContext, position: RecordPosition, row: PositionRow) -> Location:
    """Find the offset. ``row`` is its partition's position, read before."""
    location = _in_batch(context, position) or _not_in_batch(context, position, row)
    # A batch may have been allocated between the two queries, and has taken the waiting block.
    return location or _in_batch(context, position) or _passed_over(position, row)


def _in_batch(context: StreamContext, position: RecordPosition) -> Location | None:
    held = context.ledger.batches.containing(context.name, position.input_id, position.partition, position.offset)
    if held is None:
        return None
    batch = context.ledger.batches.find(context.name, held.batch_time_ms)
    if batch is None:
        # It was removed just now.
        return None
    text = f"It is in batch {time_text(batch.batch_time_ms)}, which is {batch.state.value}."
    if batch.built:
        text += " The batch was built from Kafka by timestamps, so no block of the log holds the record."
        return Location(RecordState.IN_BATCH, text, batch)
    try:
        block = _block_of(context, position, batch)
    except ManifestError as error:
        return Location(RecordState.IN_BATCH, text, batch, problem=str(error))
    if block is not None:
        return Location(RecordState.IN_BATCH, text, batch, block)
    return _between_blocks(context, position, batch)


def _between_blocks(context: StreamContext, position: RecordPosition, batch: BatchRow) -> Location:
    """The offset is in the batch's range, which has only its ends, and in none of its blocks."""
    gap = _gap_at(context, position)
    # The gap of an abandoned batch covers its whole range: it does not tell which offsets have no block.
    if gap is not None and gap.batch_time_ms is None:
        return Location(RecordState.GAP, _in_gap(gap), batch)
    return Location(
        RecordState.NO_RECORD,
        f"The offset is in the range of batch {time_text(batch.batch_time_ms)}, but in none of its blocks: Kafka has "
        "no record there (a transaction marker, or an aborted or compacted record).",
        batch,
    )


def _block_of(context: StreamContext, position: RecordPosition, batch: BatchRow) -> TracedBlock | None:
    """The block of the batch that has the offset, from the ledger or, once its row is deleted, from the manifest.

    Raises:
        ManifestError: the manifest is missing or damaged.
    """
    stored = _holding(context.ledger.blocks.of_times(context.name, [batch.batch_time_ms, *batch.absorbed]), position)
    if stored is not None:
        return _traced(context, *stored)
    manifest = Manifest.load(batch.manifest_uri, sha256=batch.manifest_sha256)
    for block in manifest.inputs.get(position.input_id, ()):
        taken = _range_of(block.ranges, position)
        if taken is not None:
            handle = block.handle
            return TracedBlock(
                segment=handle.segment,
                offset=handle.offset,
                length=handle.length,
                from_offset=taken.from_offset,
                until_offset=taken.until_offset,
                records=block.records,
                in_log=_is_in_log(context, handle.segment),
                batch_time_ms=batch.batch_time_ms,
                **_UNKNOWN,
            )
    return None


def _not_in_batch(context: StreamContext, position: RecordPosition, row: PositionRow) -> Location | None:
    if position.offset >= row.next_offset:
        return Location(RecordState.NOT_RECEIVED, _not_received(row))
    gap = _gap_at(context, position)
    if gap is not None:
        return Location(RecordState.GAP, _in_gap(gap))
    waiting = _waiting(context, position)
    if waiting is not None:
        time_ms = waiting[0].batch_time_ms
        return Location(
            RecordState.WAITING,
            f"It is in the log, for batch {time_text(time_ms)}, which is not allocated yet.",
            block=_traced(context, *waiting),
        )
    return None


def _gap_at(context: StreamContext, position: RecordPosition) -> GapRow | None:
    return context.ledger.gaps.containing(context.name, position.input_id, position.partition, position.offset)


def _in_gap(gap: GapRow) -> str:
    return (
        f"The offset is in a gap, [{gap.from_offset}, {gap.until_offset}), since {time_text(gap.at_ms)}: {gap.reason}."
    )


def _not_received(row: PositionRow) -> str:
    text = f"It has not been received: the next offset of the partition is {row.next_offset}."
    if row.error:
        return f"{text} The partition is {row.state.value}: {row.error}"
    return f"{text} The partition is {row.state.value}." if row.state.value != "active" else text


def _passed_over(position: RecordPosition, row: PositionRow) -> Location:
    offset, removed = position.offset, row.removed_until_offset
    if offset < row.starting_offset:
        return Location(
            RecordState.BEFORE_START,
            f"The stream began to read the partition at offset {row.starting_offset}, after it.",
        )
    if removed is not None and offset < removed:
        return Location(
            RecordState.REMOVED,
            f"Its batch was removed from the ledger, as all batches with offsets below {removed}: the stream keeps its "
            "batches for limits.history.",
        )
    return Location(
        RecordState.NO_RECORD,
        "The receiver passed the offset and there is no record: Kafka has a transaction marker there, or an aborted or "
        "compacted record.",
    )


def pages_of_waiting_times(context: StreamContext) -> Iterator[list[int]]:
    """All batch times (ms) that have blocks and no batch yet, oldest first, in pages."""
    after_ms = 0
    while page := context.ledger.blocks.unclaimed(context.name, _TIMES_OF_A_PAGE, after_ms=after_ms):
        after_ms = page[-1].batch_time_ms
        yield [waiting.batch_time_ms for waiting in page]


def _waiting(context: StreamContext, position: RecordPosition) -> tuple[StoredBlock, OffsetRange] | None:
    for times in pages_of_waiting_times(context):
        for first in range(0, len(times), _TIMES_AT_ONCE):
            blocks = context.ledger.blocks.of_times(context.name, times[first : first + _TIMES_AT_ONCE])
            holding = _holding(blocks, position)
            if holding is not None:
                return holding
    return None


def _holding(blocks: Iterable[StoredBlock], position: RecordPosition) -> tuple[StoredBlock, OffsetRange] | None:
    for block in blocks:
        taken = _range_of(block.info.ranges, position) if block.info.receiver.input_id == position.input_id else None
        if taken is not None:
            return block, taken
    return None


def _range_of(ranges: Iterable[OffsetRange], position: RecordPosition) -> OffsetRange | None:
    return next(
        (r for r in ranges if r.partition == position.partition and r.from_offset <= position.offset < r.until_offset),
        None,
    )


def _traced(context: StreamContext, block: StoredBlock, taken: OffsetRange) -> TracedBlock:
    """The block, with the range of the record's partition in it."""
    info = block.info
    return TracedBlock(
        segment=info.handle.segment,
        offset=info.handle.offset,
        length=info.handle.length,
        from_offset=taken.from_offset,
        until_offset=taken.until_offset,
        records=info.records,
        in_log=_is_in_log(context, info.handle.segment),
        batch_time_ms=block.batch_time_ms,
        receiver=str(info.receiver),
        epoch=info.epoch,
        sequence=info.sequence,
        cut_time_ms=info.cut_time_ms,
        added_at_ms=block.added_at_ms,
    )


def _is_in_log(context: StreamContext, segment: str) -> bool:
    row = context.ledger.segments.get(context.name, segment)
    return row is not None and row.removed_at_ms is None


# A topic's name contains neither "+" nor "~".
_RECORD_ID = re.compile(r"([a-zA-Z0-9._-]{1,249})\+([0-9]{1,10})\+([0-9]{1,19})(?:\+([0-9]{1,9}))?(?:~.*)?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class KnownPosition:
    """The position that was asked for, its row in the ledger, and others with the same topic, partition and offset.

    ``is_of_earlier_incarnation``: the topic was created again since, and only this incarnation has the offset.
    """

    position: RecordPosition
    row: PositionRow
    is_of_earlier_incarnation: bool
    elsewhere: tuple[RecordPosition, ...] = ()


@dataclass(frozen=True, slots=True)
class Coordinates:
    """Topic, partition and offset as a person names them. ``incarnation`` None: the topic's current one."""

    topic: str
    partition: int
    offset: int
    incarnation: int | None = None


def find_position(context: StreamContext, asked: Coordinates, *, input_id: str | None = None) -> KnownPosition:
    """Find the partition in the ledger. Several inputs may have a topic of this name: the first is taken, by id.

    Raises:
        UnknownRecordError: the stream has not seen the topic, the partition, or this incarnation.
    """
    topics = [
        row
        for row in context.ledger.topics.all(context.name, input_id)
        if row.topic == asked.topic and asked.incarnation in (None, row.incarnation)
    ]
    if not topics:
        raise UnknownRecordError(_unknown_topic(context, asked, input_id))
    of_topic = {(row.input_id, row.topic_id): row for row in topics}
    candidates = [
        (of_topic[row.input_id, row.partition.topic_id], row)
        for row in context.ledger.positions.all(context.name, input_id)
        if (row.input_id, row.partition.topic_id) in of_topic and row.partition.partition == asked.partition
        if row.partition.topic == asked.topic
    ]
    if not candidates:
        raise UnknownRecordError(
            f"Stream {context.name!r} does not read partition {asked.partition} of topic {asked.topic!r}, which had "
            f"{max(row.partitions for row in topics)} partition(s) when it was last seen."
        )
    candidates.sort(key=_order)
    # The current incarnation may not have reached the offset that an earlier one has received.
    chosen = next((pair for pair in candidates if asked.offset < pair[1].next_offset), candidates[0])
    others = tuple(
        RecordPosition(row.input_id, row.partition, asked.offset)
        for _, row in candidates
        if row is not chosen[1] and asked.offset < row.next_offset
    )
    topic, row = chosen
    return KnownPosition(RecordPosition(row.input_id, row.partition, asked.offset), row, not topic.current, others)


def coordinates_of(context: StreamContext, document_id: str) -> Coordinates | None:
    """The coordinates in a document id of the default form; None if the id is of another form.

    Raises:
        UnknownRecordError: no output of the stream has ids that name a record.
    """
    outputs = context.stream.elasticsearch_outputs
    if not outputs:
        raise UnknownRecordError(
            f"Stream {context.name!r} has no Elasticsearch output, so it writes no documents with ids.",
            remedy="Give the record's topic, partition and offset.",
        )
    if any(isinstance(output.document_ids, RecordIds) for output in outputs):
        matched = _RECORD_ID.fullmatch(document_id)
        if matched:
            topic, partition, offset, incarnation = matched.groups()
            return Coordinates(topic, int(partition), int(offset), int(incarnation or 1))
        if all(isinstance(output.document_ids, RecordIds) for output in outputs):
            raise UnknownRecordError(
                f"{document_id!r} is not an id of stream {context.name!r}: its ids are topic+partition+offset, such as "
                "orders+0+17."
            )
    if all(isinstance(output.document_ids, ColumnIds) for output in outputs):
        raise UnknownRecordError(
            f"The document ids of stream {context.name!r} are made of columns: a document does not name its record.",
            remedy="Give the record's topic, partition and offset, or its key with --key.",
        )
    return None


def _order(pair: tuple[TopicRow, PositionRow]) -> tuple[bool, int, str]:
    topic, _ = pair
    return (not topic.current, -topic.incarnation, topic.input_id)


def _unknown_topic(context: StreamContext, asked: Coordinates, input_id: str | None) -> str:
    seen = context.ledger.topics.all(context.name, input_id)
    incarnations = sorted({row.incarnation for row in seen if row.topic == asked.topic})
    if incarnations:
        listed = ", ".join(map(str, incarnations))
        return (
            f"Stream {context.name!r} has not seen incarnation {asked.incarnation} of topic {asked.topic!r}, "
            f"only {listed}."
        )
    named = ", ".join(sorted({row.topic for row in seen})) or "none yet"
    where = "" if input_id is None else f" in input {input_id!r}"
    return f"Stream {context.name!r} has not seen a topic {asked.topic!r}{where}. The topics that it has seen: {named}."
