"""Assigns records to batch intervals by timestamp, using the latest timestamp so far in the partition.

With this running maximum, instead of each record's own timestamp, the batches of a partition never go back. So a batch
has one offset range of each partition, and a record that is slightly older than its neighbour stays with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from headrace.blocks import OffsetRange, TopicPartition
from headrace.kafka.records import RecordChunk

_NO_TIMESTAMP = -1

_Rows = np.ndarray[Any, Any] | slice


class EventTimes:
    """Splits chunks at the ends of batch intervals. Used by the consuming thread.

    A timestamp ahead of ``now_ms()`` (the ledger's clock) counts as now: otherwise one record from the year 2100 would
    move its partition there. A record without a timestamp counts as the maximum so far, or as now if there is none.

    The maximum is kept as the start of its interval: nothing else is needed, and the ledger stores no more.
    """

    def __init__(self, batch_interval_ms: int, now_ms: Callable[[], int]) -> None:
        self._interval_ms = batch_interval_ms
        self._now_ms = now_ms
        self._watermarks: dict[TopicPartition, int] = {}

    def begin(self, partition: TopicPartition, watermark_ms: int | None) -> None:
        """Begin to track ``partition``. ``watermark_ms`` is the maximum of its earlier records; None or 0 without any.

        A partition that is tracked already keeps the later watermark.
        """
        if watermark_ms:
            start_ms = watermark_ms - watermark_ms % self._interval_ms
            self._watermarks[partition] = max(start_ms, self._watermarks.get(partition, start_ms))

    def forget(self, partition: TopicPartition) -> None:
        """Forget a partition that another receiver reads, or that is read again from an earlier offset."""
        self._watermarks.pop(partition, None)

    def split(self, chunk: RecordChunk) -> list[RecordChunk]:
        """Split the chunk into one per interval, earliest first, with ``event_time_ms`` set to the interval's start.

        Offsets without a record go with the offsets before them; with None if their partition had no record yet.
        """
        moved = [each for each in chunk.ranges if not each.records]
        parts = [
            RecordChunk(
                None, tuple(each for each in moved if self._watermarks.get(each.partition) == start_ms), 0, start_ms
            )
            for start_ms in dict.fromkeys(self._watermarks.get(each.partition) for each in moved)
        ]
        if chunk.batch is not None:
            ranges = chunk.ranges if not moved else tuple(each for each in chunk.ranges if each.records)
            parts += self._split(chunk.batch, ranges, chunk.nbytes)
        return sorted(parts, key=lambda part: _order(part.event_time_ms))

    def _split(self, batch: pa.RecordBatch, ranges: tuple[OffsetRange, ...], nbytes: int) -> list[RecordChunk]:
        now_ms = self._now_ms()
        times = np.minimum(batch.column("timestamp").view(pa.int64()).to_numpy(), now_ms)
        missing = (batch.column("timestampType").to_numpy() < 0) | (times < 0)
        if missing.any():
            times = np.where(missing, _NO_TIMESTAMP, times)
        # The usual case: all records are in one interval, and no partition is past it.
        first_ms, last_ms = int(times.min()), int(times.max())
        start_ms = first_ms - first_ms % self._interval_ms
        latest_ms = max(self._watermarks.get(each.partition, 0) for each in ranges)
        if first_ms >= 0 and last_ms < start_ms + self._interval_ms and latest_ms <= start_ms:
            self._watermarks.update((each.partition, start_ms) for each in ranges)
            return [RecordChunk(batch, ranges, nbytes, start_ms)]
        return self._sort_out(batch, ranges, times, now_ms)

    def _sort_out(
        self, batch: pa.RecordBatch, ranges: Sequence[OffsetRange], times: np.ndarray[Any, Any], now_ms: int
    ) -> list[RecordChunk]:
        starts = np.empty(len(times), dtype=np.int64)
        offsets = batch.column("offset").to_numpy()
        parts: dict[int, list[OffsetRange]] = {}
        for whole, rows in _by_partition(batch, ranges):
            mine = self._starts(whole.partition, times[rows], now_ms)
            starts[rows] = mine
            self._watermarks[whole.partition] = int(mine[-1])
            bounds = [0, *(np.flatnonzero(mine[1:] != mine[:-1]) + 1).tolist(), len(mine)]
            begins = [whole.from_offset, *offsets[rows][bounds[1:-1]].tolist(), whole.until_offset]
            for number, start_ms in enumerate(mine[bounds[:-1]].tolist()):
                records = bounds[number + 1] - bounds[number]
                part = OffsetRange(whole.partition, begins[number], begins[number + 1], records)
                parts.setdefault(start_ms, []).append(part)
        if (starts[1:] < starts[:-1]).any():
            order = np.argsort(starts, kind="stable")
            batch = batch.take(pa.array(order))
        chunks, at = [], 0
        for start_ms in sorted(parts):
            records = sum(each.records for each in parts[start_ms])
            piece = batch.slice(at, records)
            chunks.append(RecordChunk(piece, tuple(parts[start_ms]), piece.nbytes, start_ms))
            at += records
        return chunks

    def _starts(self, partition: TopicPartition, times: np.ndarray[Any, Any], now_ms: int) -> np.ndarray[Any, Any]:
        """Return the start of the interval of each record's running maximum. ``times``: one partition's, in order."""
        reached = self._watermarks.get(partition)
        if reached is None and times[0] == _NO_TIMESTAMP:
            reached = now_ms
        running: np.ndarray[Any, Any] = np.maximum.accumulate(times if reached is None else np.maximum(times, reached))
        starts: np.ndarray[Any, Any] = running - running % self._interval_ms
        return starts


def by_event_time(chunks: Sequence[RecordChunk]) -> list[list[RecordChunk]]:
    """Group chunks by event time, earliest first; each group keeps the order in which its chunks were read.

    Event times never go back within a partition, so its offsets stay in order.
    """
    groups: dict[int | None, list[RecordChunk]] = {}
    for chunk in chunks:
        groups.setdefault(chunk.event_time_ms, []).append(chunk)
    return [groups[event_time_ms] for event_time_ms in sorted(groups, key=_order)]


def _order(event_time_ms: int | None) -> int:
    return -1 if event_time_ms is None else event_time_ms


def _by_partition(batch: pa.RecordBatch, ranges: Sequence[OffsetRange]) -> Iterator[tuple[OffsetRange, _Rows]]:
    """Yield each range with its rows, in the order of offsets."""
    if len(ranges) == 1:
        yield ranges[0], slice(None)
        return
    keys = batch.column("partition").to_numpy().astype(np.int64)
    names = [ranges[0].partition.topic]
    if any(each.partition.topic != names[0] for each in ranges):
        coded = batch.column("topic").dictionary_encode()
        names = coded.dictionary.to_pylist()
        keys |= coded.indices.to_numpy().astype(np.int64) << 32
    order = np.argsort(keys, kind="stable")
    sorted_keys = keys[order]
    code_of = {name: code for code, name in enumerate(names)}
    for each in ranges:
        key = code_of[each.partition.topic] << 32 | each.partition.partition
        begin, end = np.searchsorted(sorted_keys, [key, key + 1])
        yield each, order[begin:end]
