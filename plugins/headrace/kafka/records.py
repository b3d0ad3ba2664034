"""Takes messages from a consumer in small chunks, and makes Arrow record batches and blocks of their fields.

Each Python step per record costs 25 to 60 ns, and more when the message is no longer in the processor's cache. So each
chunk is converted to columns and released before the next one is taken. Measured with records of 190 bytes: 0.8
microseconds a record including ``consume()``, against 1.1 when 18,000 messages are taken at once and converted
afterwards. All else is a call into Arrow or numpy, never a Python step per record. The conversion runs in the consuming
thread, while the storing thread compresses, writes and syncs without the GIL.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from confluent_kafka import KafkaError, Message

from headrace.blocks import OffsetRange, TopicPartition
from headrace.wal.frame import RECORD_SCHEMA

logger = logging.getLogger(__name__)

IntArray = np.ndarray[Any, Any]

MAX_RECORDS = 20_000
"""The most messages of one `consume`: more gain nothing."""
FIRST_RECORDS = 500
"""The limit before the size of messages is known: a small process can still hold 500 of 1 MB."""
OUT_OF_RANGE = frozenset({KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE})
"""The codes of a message's error if Kafka does not have the offset to be read."""
# More than 2,000 messages, with their keys and values, leave the cache of a core; fewer than 500 cost more calls.
_CHUNK = 1_000
# A test replaces it by one that fails as the client does.
_HEADERS: Callable[[Any], Any] = Message.headers
_HEADERS_TYPE = RECORD_SCHEMA.field("headers").type
_UNKNOWN_EPOCH = -1


@dataclass(frozen=True, slots=True)
class MessageColumns:
    """The fields of messages without errors, in the order of their arrival.

    ``codes`` are indexes into ``names``, the names of the topics. ``leader_epochs`` are -1 where the broker reports
    none. ``unreadable_headers`` counts the messages whose headers the client cannot read; their ``headers`` are null.
    """

    names: Sequence[str]
    codes: IntArray
    partitions: IntArray
    offsets: IntArray
    leader_epochs: IntArray
    timestamp_types: IntArray
    timestamps_ms: IntArray
    keys: pa.Array
    values: pa.Array
    headers: pa.Array
    unreadable_headers: int = 0

    def __len__(self) -> int:
        return len(self.offsets)

    def where(self, keep: IntArray) -> MessageColumns:
        """The rows for which ``keep`` (one boolean a row) is true."""
        mask = pa.array(keep)
        return MessageColumns(
            self.names,
            self.codes[keep],
            self.partitions[keep],
            self.offsets[keep],
            self.leader_epochs[keep],
            self.timestamp_types[keep],
            self.timestamps_ms[keep],
            self.keys.filter(mask),
            self.values.filter(mask),
            self.headers.filter(mask),
            self.unreadable_headers,
        )

    def before(self, holes: Mapping[tuple[str, int], tuple[int, int]]) -> MessageColumns:
        """The rows whose offset is below the hole ``[from, until)`` of their topic and partition, if it has one."""
        keep = np.ones(len(self), dtype=bool)
        for (topic, partition), (begin, _) in holes.items():
            code = self.names.index(topic) if topic in self.names else -1
            keep &= (self.codes != code) | (self.partitions != partition) | (self.offsets < begin)
        return self.where(keep)


def columns_of(messages: Sequence[Any], topic: str | None = None) -> MessageColumns:
    """The columns of ``messages``, which have no errors. ``topic``: the one that all of them are of, if that is known.

    A message's headers are read once only, see `_headers_of`.
    """
    count = len(messages)
    names, codes = _topics_of(messages) if topic is None else ([topic], np.zeros(count, dtype=np.int32))
    times = np.fromiter(chain.from_iterable(map(Message.timestamp, messages)), np.int64, 2 * count)
    headers, unreadable = _headers_of(messages)
    return MessageColumns(
        names,
        codes,
        np.fromiter(map(Message.partition, messages), np.int32, count),
        np.fromiter(map(Message.offset, messages), np.int64, count),
        _leader_epochs_of(messages),
        times[::2].astype(np.int8),
        times[1::2],
        pa.array(list(map(Message.key, messages)), pa.binary()),
        pa.array(list(map(Message.value, messages)), pa.binary()),
        headers,
        unreadable,
    )


def _topics_of(messages: Sequence[Any]) -> tuple[list[str], IntArray]:
    """The names of the topics, and of each message the index of its topic."""
    topics: list[str] = list(map(Message.topic, messages))  # type: ignore[arg-type]  # None is for events of no topic
    names = list(dict.fromkeys(topics))
    if len(names) == 1:
        return names, np.zeros(len(topics), dtype=np.int32)
    code_of = {name: code for code, name in enumerate(names)}
    return names, np.fromiter(map(code_of.__getitem__, topics), np.int32, len(topics))


def _leader_epochs_of(messages: Sequence[Any]) -> IntArray:
    epochs = list(map(Message.leader_epoch, messages))
    known = [_UNKNOWN_EPOCH if epoch is None else epoch for epoch in dict.fromkeys(epochs)]
    if len(known) == 1:
        return np.full(len(epochs), known[0], dtype=np.int32)
    return np.array([_UNKNOWN_EPOCH if epoch is None else epoch for epoch in epochs], dtype=np.int32)


def _headers_of(messages: Sequence[Any]) -> tuple[pa.Array, int]:
    """The headers of each message, and the number of messages whose headers the client cannot read.

    Kafka accepts any bytes as a header's name, the client only UTF-8: it fails with a SystemError. One such record must
    not stop all later ones from being received. ``headers()`` is not called twice on such a message: the second call
    returns a list with unset items, and reading them ends the process."""
    headers: list[list[tuple[str, bytes | str | None]] | None] = []
    unreadable = 0
    rest = iter(messages)
    while len(headers) < len(messages):
        try:
            headers.extend(map(_HEADERS, rest))
        except (SystemError, UnicodeDecodeError) as error:
            message = messages[len(headers)]
            headers.append(None)
            unreadable += 1
            where = (message.topic(), message.partition(), message.offset())
            logger.error("%s-%d, offset %d: its headers cannot be read and are left out: %s", *where, error)
    if not any(headers):
        return pa.nulls(len(headers), _HEADERS_TYPE), unreadable
    # A null where a message has none. Arrow encodes texts, which a message made by a program may have, as UTF-8.
    return pa.array(headers, _HEADERS_TYPE), unreadable


def concat(chunks: Sequence[MessageColumns]) -> MessageColumns:
    """The rows of all ``chunks`` (at least one), in their order."""
    if len(chunks) == 1:
        return chunks[0]
    names = list(dict.fromkeys(chain.from_iterable(chunk.names for chunk in chunks)))
    codes = [chunk.codes for chunk in chunks]
    if len(names) > 1:
        codes = [np.array([names.index(name) for name in chunk.names], dtype=np.int32)[chunk.codes] for chunk in chunks]
    return MessageColumns(
        names,
        np.concatenate(codes),
        np.concatenate([chunk.partitions for chunk in chunks]),
        np.concatenate([chunk.offsets for chunk in chunks]),
        np.concatenate([chunk.leader_epochs for chunk in chunks]),
        np.concatenate([chunk.timestamp_types for chunk in chunks]),
        np.concatenate([chunk.timestamps_ms for chunk in chunks]),
        pa.concat_arrays([chunk.keys for chunk in chunks]),
        pa.concat_arrays([chunk.values for chunk in chunks]),
        pa.concat_arrays([chunk.headers for chunk in chunks]),
        sum(chunk.unreadable_headers for chunk in chunks),
    )


def consume(
    consumer: Any,
    most: int,
    timeout: float,
    *,
    separate_errors: Callable[[Sequence[Any]], Sequence[Any]],
    topic: str | None = None,
) -> MessageColumns | None:
    """Take up to ``most`` messages, and wait up to ``timeout`` seconds for them, as ``consumer.consume()`` does.

    From the first message with an error on, each chunk is given to ``separate_errors``, which handles the errors and
    returns the messages to keep. None if there is none. ``topic`` as in `columns_of`. Raises what the consumer raises.
    """
    chunks: list[MessageColumns] = []
    until = time.monotonic() + timeout
    taken, had_error = 0, False
    while taken < most:
        wanted = min(_CHUNK, most - taken)
        messages = consumer.consume(wanted, max(0.0, until - time.monotonic()) if taken else timeout)
        count = len(messages)
        taken += count
        had_error = had_error or any(map(Message.error, messages))
        if messages and had_error:
            messages = separate_errors(messages)
        if messages:
            chunks.append(columns_of(messages, topic))
        if count < wanted:
            break
    return concat(chunks) if chunks else None


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
        for offset_range in chunk.ranges:
            before = joined.get(offset_range.partition)
            if before is None:
                joined[offset_range.partition] = offset_range
            elif before.until_offset != offset_range.from_offset:
                raise ValueError(
                    f"{offset_range.partition} continues at {offset_range.from_offset} after {before.until_offset} "
                    "within one block"
                )
            else:
                joined[offset_range.partition] = OffsetRange(
                    offset_range.partition,
                    before.from_offset,
                    offset_range.until_offset,
                    before.records + offset_range.records,
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
    keep = pa.array([key not in names for key in zip(topics, partitions, strict=True)], pa.bool_())
    kept = batch.filter(keep)
    left = tuple(offset_range for offset_range in ranges if offset_range.partition not in dropped)
    return (kept if kept.num_rows else None), left


def _unified(batches: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
    """The batches with one dictionary for the topic column, which concatenation requires."""
    if not pa.types.is_dictionary(_TOPIC_TYPE):
        return batches
    first = batches[0].column("topic").dictionary
    if all(batch.column("topic").dictionary.equals(first) for batch in batches[1:]):
        return batches
    return pa.Table.from_batches(batches).unify_dictionaries().to_batches()  # type: ignore[no-any-return]
