"""Offset ranges to be read again from Kafka: joins adjacent ones, and distributes them to tasks."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from headrace.blocks import TopicPartition
from headrace.kafka.errors import OverlappingRangesError

# A task needs about 0.2 s to create a consumer and find its brokers; it reads this many records in that time.
MIN_TASK_RECORDS = 50_000


@dataclass(frozen=True, slots=True)
class RecordedRange:
    """Offsets ``[from_offset, until_offset)``; ``records`` of them hold a record (None: not counted).

    ``leader_epoch`` is that of `OffsetRange`.
    """

    partition: TopicPartition
    from_offset: int
    until_offset: int
    records: int | None
    leader_epoch: int | None = None

    @property
    def weight(self) -> int:
        """The number of its records, or the most it can be if they were not counted."""
        return self.until_offset - self.from_offset if self.records is None else self.records

    def __str__(self) -> str:
        return f"{self.partition.topic}-{self.partition.partition} [{self.from_offset}, {self.until_offset})"


@dataclass(frozen=True, slots=True)
class RangeRun:
    """Adjacent ranges of one partition: they are read in one pass, but each one's records are counted.

    The i-th range ends before ``untils[i]``, where the next one begins, and holds ``counts[i]`` records, the last of
    which is of the leader epoch ``leader_epochs[i]``.
    """

    partition: TopicPartition
    from_offset: int
    untils: tuple[int, ...]
    counts: tuple[int | None, ...]
    leader_epochs: tuple[int | None, ...]

    @classmethod
    def of(cls, ranges: Sequence[RecordedRange]) -> Self:
        """Join adjacent ranges of one partition, of which there is at least one."""
        return cls(
            ranges[0].partition,
            ranges[0].from_offset,
            untils=tuple(recorded.until_offset for recorded in ranges),
            counts=tuple(recorded.records for recorded in ranges),
            leader_epochs=tuple(recorded.leader_epoch for recorded in ranges),
        )

    @property
    def until_offset(self) -> int:
        """The end of the last range."""
        return self.untils[-1]

    @property
    def key(self) -> tuple[str, int]:
        """Topic and partition, as Kafka's client names them."""
        return self.partition.topic, self.partition.partition

    def ranges(self) -> list[RecordedRange]:
        """The ranges that it was joined from."""
        begins = (self.from_offset, *self.untils[:-1])
        return [
            RecordedRange(self.partition, begin, until, count, epoch)
            for begin, until, count, epoch in zip(begins, self.untils, self.counts, self.leader_epochs, strict=True)
        ]

    def __str__(self) -> str:
        return f"{self.partition.topic}-{self.partition.partition} [{self.from_offset}, {self.until_offset})"


def in_order(ranges: Iterable[RecordedRange]) -> list[RecordedRange]:
    """Sort the ranges by partition and offset, without empty ones.

    Raises:
        OverlappingRangesError: an offset is in two of them, so a record would be read twice.
    """
    ordered = sorted(
        (recorded for recorded in ranges if recorded.from_offset < recorded.until_offset),
        key=lambda recorded: (recorded.partition, recorded.from_offset),
    )
    for before, after in itertools.pairwise(ordered):
        if before.partition == after.partition and after.from_offset < before.until_offset:
            raise OverlappingRangesError(
                f"{before} and {after} overlap: the records in both would be read twice.",
                remedy="Give each batch's manifest once.",
            )
    return ordered


def deal(
    ranges: Iterable[RecordedRange], tasks: int, *, min_task_records: int = MIN_TASK_RECORDS
) -> list[tuple[RangeRun, ...]]:
    """Distribute the ranges to at most ``tasks`` tasks with about equal numbers of records.

    A counted range is never split, since its records could not be compared with the count then; an uncounted one is.
    Fewer tasks are used rather than tasks much below ``min_task_records``. Raises OverlappingRangesError.
    """
    if tasks < 1:
        raise ValueError(f"ranges need at least one task, got {tasks}")
    ordered = in_order(ranges)
    total = sum(recorded.weight for recorded in ordered)
    wanted = max(1, min(tasks, total // max(1, min_task_records)))
    pieces = [piece for recorded in ordered for piece in _split(recorded, max(1, -(-total // wanted)))]
    result: list[tuple[RangeRun, ...]] = []
    current: list[RecordedRange] = []
    dealt = 0
    for piece in pieces:
        current.append(piece)
        dealt += piece.weight
        if len(result) + 1 < wanted and dealt * wanted >= total * (len(result) + 1):
            result.append(joined(current))
            current = []
    result.append(joined(current))
    return [task for task in result if task]


def joined(ordered: Sequence[RecordedRange]) -> tuple[RangeRun, ...]:
    """Join ordered ranges into runs of adjacent ones. A run neither begins nor ends with a range without records."""
    runs: list[list[RecordedRange]] = []
    for recorded in ordered:
        last = runs[-1][-1] if runs else None
        if last is not None and last.partition == recorded.partition and last.until_offset == recorded.from_offset:
            runs[-1].append(recorded)
        else:
            runs.append([recorded])
    return tuple(RangeRun.of(filled) for run in runs if (filled := _without_empty_ends(run)))


def _without_empty_ends(ranges: Sequence[RecordedRange]) -> Sequence[RecordedRange]:
    filled = [place for place, recorded in enumerate(ranges) if recorded.weight]
    return ranges[filled[0] : filled[-1] + 1] if filled else ()


def _split(recorded: RecordedRange, most: int) -> list[RecordedRange]:
    if recorded.records is not None:
        return [recorded]
    return [
        RecordedRange(recorded.partition, begin, min(begin + most, recorded.until_offset), None)
        for begin in range(recorded.from_offset, recorded.until_offset, most)
    ]
