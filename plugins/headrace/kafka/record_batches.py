"""Converts the columns of Kafka's messages to Arrow record batches, and splits and combines these into blocks.

Everything here is a call into Arrow or numpy, never a Python step per record. The conversion runs in the consuming
thread, while the storing thread compresses, writes and syncs without the GIL.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.blocks import OffsetRange, TopicPartition
from headrace.kafka.message_columns import IntArray, MessageColumns
from headrace.wal.payload import RECORD_SCHEMA

# Kafka's client uses 0 for not available, 1 for create time, 2 for log append time; Spark's source uses -1, 0 and 1.
_TIMESTAMP_TYPE_SHIFT = 1
_TOPIC_TYPE = RECORD_SCHEMA.field("topic").type
_TIMESTAMP_TYPE = RECORD_SCHEMA.field("timestamp").type


@dataclass(frozen=True, slots=True)
class Cursor:
    """A receiver's position in one partition that it owns."""

    partition: TopicPartition
    next_offset: int


@dataclass(frozen=True, slots=True)
class EpochRecords:
    """Consecutive records in the offsets [first_offset, until_offset) that were written in one leader epoch."""

    first_offset: int
    until_offset: int
    leader_epoch: int


@dataclass(frozen=True, slots=True)
class RecordChunk:
    """Records in arrival order with the ranges they cover, one range per partition.

    ``batch`` is None when a position advances without a record (control records, for example).
    ``event_time_ms`` is as in `BlockInfo`; chunks with different ones go into different blocks. ``source_position`` is
    where the source stands after the chunk, as JSON; None if it does not say so.
    """

    batch: pa.RecordBatch | None
    ranges: tuple[OffsetRange, ...]
    nbytes: int
    event_time_ms: int | None = None
    source_position: str | None = None

    @property
    def records(self) -> int:
        return 0 if self.batch is None else int(self.batch.num_rows)


@dataclass(slots=True)
class Converted:
    """The result of converting a list of messages.

    ``counts`` is the number of records, and ``positions`` the last offset + 1, of each partition that had a record.
    ``below_position`` and ``not_owned`` count the records that were left out."""

    batch: pa.RecordBatch | None
    counts: dict[TopicPartition, int] = field(default_factory=dict)
    positions: dict[TopicPartition, int] = field(default_factory=dict)
    below_position: int = 0
    not_owned: int = 0
    epochs: dict[TopicPartition, list[EpochRecords]] = field(default_factory=dict)
    """The leader epochs that wrote the records, if the brokers report them."""
    unreadable_headers: int = 0
    """The number of records whose headers the client could not read; ``batch`` has null for them."""


def convert(columns: MessageColumns | None, cursors: Mapping[tuple[str, int], Cursor]) -> Converted:
    """Convert the messages in ``columns``; None if there are none.

    Records of partitions not in ``cursors``, and records below their partition's position (or repeated), are
    left out and counted.
    """
    result = Converted(None)
    if columns is None or not len(columns):
        return result
    result.unreadable_headers = columns.unreadable_headers
    keep, incarnations = _check(columns, cursors, result)
    if keep is not None:
        columns, incarnations = columns.where(keep), incarnations[keep]
    if len(columns):
        result.batch = _batch(columns, incarnations)
    return result


def _check(
    columns: MessageColumns, cursors: Mapping[tuple[str, int], Cursor], result: Converted
) -> tuple[IntArray | None, IntArray]:
    """Determine which rows to keep (None: all), and each row's incarnation. Fills in the counts of ``result``."""
    key = (columns.codes.astype(np.int64) << 32) | columns.partitions
    order = np.argsort(key, kind="stable")
    sorted_key = key[order]
    starts = np.flatnonzero(np.concatenate(([True], sorted_key[1:] != sorted_key[:-1])))
    ends = np.append(starts[1:], len(order))
    incarnations = np.ones(len(order), dtype=np.int32)
    keep: IntArray | None = None
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        group = order[start:end]
        cursor = cursors.get((columns.names[int(columns.codes[group[0]])], int(columns.partitions[group[0]])))
        mine = columns.offsets[group]
        if cursor is None:
            good = np.zeros(len(group), dtype=bool)
            result.not_owned += len(group)
        else:
            # A record is kept only if its offset is above all before it: not repeats, not those below the position.
            before = np.maximum.accumulate(np.concatenate(([cursor.next_offset - 1], mine[:-1])))
            good = mine > before
            taken = int(good.sum())
            result.below_position += len(group) - taken
            if taken:
                result.counts[cursor.partition] = taken
                result.positions[cursor.partition] = int(mine.max()) + 1
                result.epochs[cursor.partition] = _epochs_of(mine[good], columns.leader_epochs[group[good]])
            if cursor.partition.incarnation != 1:
                incarnations[group] = cursor.partition.incarnation
        if not good.all():
            keep = np.ones(len(order), dtype=bool) if keep is None else keep
            keep[group] = good
    return keep, incarnations


def _epochs_of(offsets: IntArray, leader_epochs: IntArray) -> list[EpochRecords]:
    """The leader epochs of one partition's records, in order; without those that are unknown."""
    firsts = np.concatenate(([0], np.flatnonzero(np.diff(leader_epochs)) + 1))
    lasts = np.append(firsts[1:], len(offsets)) - 1
    return [
        EpochRecords(int(offsets[first]), int(offsets[last]) + 1, int(leader_epochs[first]))
        for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True)
        if leader_epochs[first] >= 0
    ]


def _batch(rows: MessageColumns, incarnations: IntArray) -> pa.RecordBatch:
    columns = {
        "key": rows.keys,
        "value": rows.values,
        "topic": _topic_column(rows.names, rows.codes),
        "partition": pa.array(rows.partitions),
        "offset": pa.array(rows.offsets),
        "timestamp": pa.array(rows.timestamps_ms).view(_TIMESTAMP_TYPE),
        "timestampType": pa.array(rows.timestamp_types - np.int8(_TIMESTAMP_TYPE_SHIFT)),
        "headers": rows.headers,
        "incarnation": pa.array(incarnations),
    }
    arrays = []
    for wanted in RECORD_SCHEMA:
        column = columns[wanted.name]
        arrays.append(column if column.type == wanted.type else column.cast(wanted.type))
    return pa.RecordBatch.from_arrays(arrays, schema=RECORD_SCHEMA)


def _topic_column(names: Sequence[str], codes: IntArray) -> pa.Array:
    coded = pa.DictionaryArray.from_arrays(pa.array(codes), pa.array(names, pa.string()))
    if pa.types.is_dictionary(_TOPIC_TYPE):
        return coded if coded.type == _TOPIC_TYPE else coded.cast(_TOPIC_TYPE)
    return coded.dictionary_decode()


def chunks_of(
    converted: Converted, cursors: Mapping[TopicPartition, int], positions: Mapping[TopicPartition, int], limit: int
) -> list[RecordChunk]:
    """Split the converted records into chunks of at most about ``limit`` bytes each (a larger record is a chunk alone).

    ``cursors`` holds each partition's position before the records, ``positions`` the one after them, which may lie
    beyond the last record. Together the chunks cover exactly the offsets between the two.
    """
    if converted.batch is None:
        moved = tuple(
            OffsetRange(partition, cursors[partition], position, 0)
            for partition, position in sorted(positions.items())
            if position > cursors[partition]
        )
        return [RecordChunk(None, moved, 0)] if moved else []
    if converted.batch.nbytes <= limit:
        ranges = tuple(
            OffsetRange(partition, cursors[partition], position, converted.counts.get(partition, 0))
            for partition, position in sorted(positions.items())
            if position > cursors[partition]
        )
        return [RecordChunk(converted.batch, ranges, converted.batch.nbytes)]
    return _split(converted, cursors, positions, limit)


def _split(
    converted: Converted, cursors: Mapping[TopicPartition, int], positions: Mapping[TopicPartition, int], limit: int
) -> list[RecordChunk]:
    batch: pa.RecordBatch = converted.batch
    names = {(partition.topic, partition.partition): partition for partition in positions}
    standing = {partition: cursors[partition] for partition in positions}
    slices = [batch.slice(start, length) for start, length in _slices(batch, limit)]
    chunks = []
    for number, piece in enumerate(slices):
        counts: dict[TopicPartition, int] = {}
        until: dict[TopicPartition, int] = {}
        topics = piece.column("topic").to_pylist()
        for topic, partition, offset in zip(
            topics, piece.column("partition").to_pylist(), piece.column("offset").to_pylist(), strict=True
        ):
            owned = names[topic, partition]
            counts[owned] = counts.get(owned, 0) + 1
            until[owned] = offset + 1
        if number == len(slices) - 1:
            until = {**until, **positions}
        ranges = []
        for owned, position in sorted(until.items()):
            if position > standing[owned]:
                ranges.append(OffsetRange(owned, standing[owned], position, counts.get(owned, 0)))
                standing[owned] = position
        chunks.append(RecordChunk(piece, tuple(ranges), piece.nbytes))
    return chunks


def _slices(batch: pa.RecordBatch, limit: int) -> list[tuple[int, int]]:
    """(start, length) of consecutive groups of rows, each of at most about ``limit`` bytes and at least one row."""
    sizes = pc.fill_null(pc.binary_length(batch.column("value")), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    sizes = sizes + pc.fill_null(pc.binary_length(batch.column("key")), 0).to_numpy(zero_copy_only=False)
    # Add a row's share of everything else: the fixed-width columns, offsets and validity.
    sizes = sizes + max(0, (batch.nbytes - int(sizes.sum())) // batch.num_rows)
    ends = np.cumsum(sizes)
    slices = []
    start, done = 0, 0
    while start < batch.num_rows:
        end = max(start + 1, int(np.searchsorted(ends, done + limit, side="right")))
        slices.append((start, end - start))
        start, done = end, int(ends[end - 1])
    return slices


def combine(chunks: Sequence[RecordChunk]) -> tuple[pa.RecordBatch | None, tuple[OffsetRange, ...]]:
    """Combine consecutive chunks into one record batch (None: no records) and one range per partition.

    Raises ValueError when two ranges of a partition are not adjacent: a chunk is missing or was added twice.
    """
    joined: dict[TopicPartition, OffsetRange] = {}
    for chunk in chunks:
        for each in chunk.ranges:
            before = joined.get(each.partition)
            if before is None:
                joined[each.partition] = each
            elif before.until_offset != each.from_offset:
                raise ValueError(
                    f"{each.partition} continues at {each.from_offset} after {before.until_offset} within one block"
                )
            else:
                joined[each.partition] = OffsetRange(
                    each.partition, before.from_offset, each.until_offset, before.records + each.records
                )
    batches = [chunk.batch for chunk in chunks if chunk.batch is not None]
    if not batches:
        return None, tuple(joined.values())
    batch = batches[0] if len(batches) == 1 else pa.concat_batches(_unified(batches))
    return batch, tuple(joined.values())


def without(
    batch: pa.RecordBatch, ranges: Sequence[OffsetRange], dropped: Collection[TopicPartition]
) -> tuple[pa.RecordBatch | None, tuple[OffsetRange, ...]]:
    """The block without the records and ranges of ``dropped``; the batch is None if no record is left."""
    names = {(partition.topic, partition.partition) for partition in dropped}
    topics, partitions = batch.column("topic").to_pylist(), batch.column("partition").to_pylist()
    keep = pa.array([each not in names for each in zip(topics, partitions, strict=True)], pa.bool_())
    kept = batch.filter(keep)
    left = tuple(each for each in ranges if each.partition not in dropped)
    return (kept if kept.num_rows else None), left


def _unified(batches: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
    """The batches with one dictionary for the topic column, which concatenation requires."""
    if not pa.types.is_dictionary(_TOPIC_TYPE):
        return batches
    first = batches[0].column("topic").dictionary
    if all(batch.column("topic").dictionary.equals(first) for batch in batches[1:]):
        return batches
    return pa.Table.from_batches(batches).unify_dictionaries().to_batches()  # type: ignore[no-any-return]
