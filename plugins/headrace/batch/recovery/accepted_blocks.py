"""Which blocks of the log the lost ledger had accepted, and in which order.

Frames are intents, and each tells how far its writer's had been accepted, so of each writer and epoch only the last is
undecided (rule 10 of the design). It counts if a manifest lists it, or if one of its partitions went on behind it (a
later block begins there, whether that one counts or not) and no other block covers its offsets. Else it is dropped,
and Kafka is read again from where it began.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

from headrace.batch.recovery.evidence import Evidence, handles_in
from headrace.blocks import BlockHandle, BlockInfo, OffsetRange, TopicPartition
from headrace.errors import HeadraceError

Place = tuple[str, TopicPartition]
"""An input's id and a partition that it reads."""


class ContradictionError(HeadraceError):
    """What was found contradicts itself: more than a crash can do was done to it."""


@dataclass(frozen=True)
class AcceptedBlocks:
    """The blocks that count, ascending along each partition; those of which nobody knows, which were dropped, and those
    that the ledger had refused."""

    blocks: Sequence[BlockInfo]
    undecided: Sequence[BlockInfo]
    refused: int


def accepted_blocks(evidence: Evidence) -> AcceptedBlocks:
    """Decide which frames count.

    Raises:
        ContradictionError: two blocks that count cover the same offsets.
    """
    listed = {handle for found in evidence.manifests.values() for handle in handles_in(found)}
    kept = evidence.kept
    known = {} if kept is None else {(r.receiver_id, r.epoch): r.last_accepted_sequence for r in kept.receivers}
    accepted: list[BlockInfo] = []
    undecided: list[BlockInfo] = []
    refused = 0
    for frame in evidence.frames:
        info = frame.info
        last = known.get((info.receiver, info.epoch), -1)
        if frame.accepted or info.handle in listed or (frame.accepted is None and info.sequence <= last):
            accepted.append(info)
        elif frame.accepted is None:
            undecided.append(info)
        else:
            refused += 1
    decision = _Decision(evidence, accepted)
    decided = decision.of(undecided)
    left = [info for info in undecided if info not in decided]
    # Another block has their offsets: they were not accepted, and were read again.
    dropped = [info for info in left if not decision.is_replaced(info)]
    blocks = in_order([*accepted, *decided])
    _check(blocks)
    return AcceptedBlocks(blocks, dropped, refused + len(left) - len(dropped))


class _Decision:
    """Which of the undecided blocks count: those behind which their partitions went on, with no other block there.

    Positions went on to where blocks begin, those too of which it is undecided whether they count: their writers had
    begun from the ledger's positions.
    """

    def __init__(self, evidence: Evidence, accepted: Iterable[BlockInfo]) -> None:
        kept = evidence.kept
        self._at_checkpoint = {
            (row.input_id, row.partition): row.next_offset for row in (() if kept is None else kept.positions)
        }
        self._reached: dict[Place, set[int]] = defaultdict(set)
        self._covered: dict[Place, list[OffsetRange]] = defaultdict(list)
        for place, offsets in evidence.positions.items():
            self._reached[place].update(offsets)
        for frame in evidence.frames:
            for place, r in places(frame.info):
                self._reached[place].add(r.from_offset)
        for info in accepted:
            self._take(info)
        # Also of blocks whose segments cleanup has deleted.
        for place, r in listed_ranges(evidence):
            self._covered[place].append(r)
        for gap in () if kept is None else kept.gaps:
            if gap.batch_time_ms is None:
                lost = OffsetRange(gap.partition, gap.from_offset, gap.until_offset, 0)
                self._covered[gap.input_id, gap.partition].append(lost)

    def of(self, undecided: Iterable[BlockInfo]) -> list[BlockInfo]:
        """Those that count. Of two that cover the same offsets the one that fits better what came behind does; else
        the later one: the earlier had been dropped before it was written."""
        decided = []
        fitting = {info: self._fit(info) for info in undecided}
        for info in sorted(fitting, key=lambda info: (fitting[info], info.cut_time_ms, info.epoch), reverse=True):
            if not self.is_replaced(info) and not self._is_split(info) and self._went_on(info):
                self._take(info)
                decided.append(info)
        return decided

    def is_replaced(self, info: BlockInfo) -> bool:
        """Whether other blocks that count, or gaps, cover offsets of it."""
        return any(_overlap(r, other) for place, r in places(info) for other in self._covered[place])

    def _take(self, info: BlockInfo) -> None:
        for place, r in places(info):
            self._covered[place].append(r)
            self._reached[place].update((r.from_offset, r.until_offset))

    def _fit(self, info: BlockInfo) -> int:
        """2: every partition went on from where the block ends, if it did; 1: or from behind; 0: one was within the
        block. After a rebuild that set positions back the block may have been accepted all the same."""
        fit = 2
        for place, r in places(info):
            reached = self._reached[place]
            if any(r.from_offset < offset < r.until_offset for offset in reached):
                return 0
            if r.until_offset not in reached and max(reached) > r.until_offset:
                fit = 1
        return fit

    def _is_split(self, info: BlockInfo) -> bool:
        """Whether the checkpoint knows some of it, and some not. A block moves all its partitions at once: one that
        went on by itself had nothing to store."""
        known = {
            self._at_checkpoint.get(place, -1) >= r.until_offset
            for place, r in places(info)
            if self._at_checkpoint.get(place, -1) > r.from_offset
        }
        ahead = any(self._at_checkpoint.get(place, -1) <= r.from_offset for place, r in places(info))
        return False in known or (True in known and ahead)

    def _went_on(self, info: BlockInfo) -> bool:
        return any(
            max(self._at_checkpoint.get(place, -1), *self._reached[place]) >= r.until_offset
            for place, r in places(info)
        )


def listed_ranges(evidence: Evidence) -> Iterable[tuple[Place, OffsetRange]]:
    """What manifests list of each partition, block by block: all of it was accepted."""
    for found in chain.from_iterable(evidence.manifests.values()):
        for input_id, blocks in found.manifest.inputs.items():
            for r in chain.from_iterable(block.ranges for block in blocks):
                yield (input_id, r.partition), r


def places(info: BlockInfo) -> Iterable[tuple[Place, OffsetRange]]:
    """The block's ranges that hold offsets, each with its partition's place."""
    for r in info.ranges:
        if r.until_offset > r.from_offset:
            yield (info.receiver.input_id, r.partition), r


def _overlap(one: OffsetRange, other: OffsetRange) -> bool:
    return one.from_offset < other.until_offset and other.from_offset < one.until_offset


def in_order(infos: Sequence[BlockInfo], runs: Iterable[Sequence[BlockHandle]] = ()) -> list[BlockInfo]:
    """By the time they were cut, as far as partitions' offsets, writers' sequences, and runs of blocks that were added
    one after the other allow.

    Raises:
        ContradictionError: they contradict each other.
    """
    rows: dict[object, list[tuple[int, int]]] = defaultdict(list)
    indexes = {info.handle: index for index, info in enumerate(infos)}
    for number, run in enumerate(runs):
        rows[number] = [(place, indexes[handle]) for place, handle in enumerate(run)]
    for index, info in enumerate(infos):
        rows[info.receiver, info.epoch].append((info.sequence, index))
        for place, r in places(info):
            rows[place].append((r.from_offset, index))
    behind: Mapping[int, list[int]] = defaultdict(list)
    waits = [0] * len(infos)
    for row in rows.values():
        row.sort()
        for (_, earlier), (_, later) in pairwise(row):
            behind[earlier].append(later)
            waits[later] += 1
    ready = [(info.cut_time_ms, index) for index, info in enumerate(infos) if not waits[index]]
    heapq.heapify(ready)
    ordered = []
    while ready:
        _, index = heapq.heappop(ready)
        ordered.append(infos[index])
        for later in behind[index]:
            waits[later] -= 1
            if not waits[later]:
                heapq.heappush(ready, (infos[later].cut_time_ms, later))
    if len(ordered) < len(infos):
        raise ContradictionError(
            "The log's blocks are in no order: offsets of a partition go back where its writer's sequence goes on.",
            remedy="This log is not one stream's: is the folder the right one?",
        )
    return ordered


def _check(ordered: Sequence[BlockInfo]) -> None:
    ends: dict[Place, tuple[int, BlockInfo]] = {}
    for info in ordered:
        for place, r in places(info):
            end, before = ends.get(place, (0, info))
            if r.from_offset < end:
                raise ContradictionError(
                    f"Two blocks hold offsets [{r.from_offset}, {end}) of {place[1].topic}-{place[1].partition}: "
                    f"{before.handle} and {info.handle}.",
                    remedy="Keep the folder as it is, and report it: nothing was written.",
                )
            ends[place] = (r.until_offset, info)
