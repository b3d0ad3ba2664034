"""Determines which blocks of the log the lost ledger had accepted, and in which order.

Frames are intents. Each frame carries its writer's last accepted sequence, so for each writer and epoch only the last
frame is undecided (rule 10 of the design). An undecided block counts if no other block covers its offsets: its source
may have been told that it is stored, and a queue does not give a message twice. One that was not accepted counts too:
its records are in the log, and are not read from Kafka again.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from headrace.batch.recovery.folder_contents import FolderContents
from headrace.batch.recovery.found_manifests import Place, listed_spans
from headrace.blocks import BlockHandle, BlockInfo, OffsetRange
from headrace.errors import HeadraceError


class ContradictionError(HeadraceError):
    """The files contradict each other in a way that a crash cannot cause."""


@dataclass(frozen=True)
class AcceptedBlocks:
    """The result: ``blocks`` count, in ascending order along each partition; of the ``undecided`` ones among them,
    nothing shows that the ledger had accepted them; ``refused`` is the number of blocks that do not count."""

    blocks: Sequence[BlockInfo]
    undecided: Sequence[BlockInfo]
    refused: int


def accepted_blocks(contents: FolderContents) -> AcceptedBlocks:
    """Decide which blocks count.

    Raises:
        ContradictionError: two blocks that count cover the same offsets, or the orders of blocks contradict each other.
    """
    listed = {handle for of_time in contents.manifests.values() for found in of_time for handle in found.in_log}
    saved = contents.saved
    known = {} if saved is None else {(r.receiver_id, r.epoch): r.last_accepted_sequence for r in saved.receivers}
    accepted: list[BlockInfo] = []
    undecided: list[BlockInfo] = []
    for frame in contents.frames:
        info = frame.info
        last = known.get((info.receiver, info.epoch), -1)
        if frame.accepted or info.handle in listed or (frame.accepted is None and info.sequence <= last):
            accepted.append(info)
        elif frame.accepted is None:
            undecided.append(info)
    decision = _Decision(contents, accepted)
    unconfirmed = {info for info in undecided if not decision.went_on(info)}
    # Kafka is read again from the damage on. If the block counted, what the damage took would be a gap for ever.
    undecided = [info for info in undecided if info not in unconfirmed or not decision.follows_damage_of_kafka(info)]
    decided = decision.of(undecided)
    blocks = in_order([*accepted, *decided])
    _check(blocks)
    return AcceptedBlocks(blocks, [info for info in decided if info in unconfirmed], len(contents.frames) - len(blocks))


class _Decision:
    """Decides which undecided blocks count: those that no other block covers, and the checkpoint not in parts.

    A position had reached every offset at which a block begins, also an undecided block: its writer had started from
    the ledger's positions.
    """

    def __init__(self, contents: FolderContents, accepted: Iterable[BlockInfo]) -> None:
        saved = contents.saved
        self._at_checkpoint = {
            (row.input_id, row.partition): row.next_offset for row in (() if saved is None else saved.positions)
        }
        self._lost = [part for part in contents.lost if not part.is_vague_tail]
        self._reached: dict[Place, set[int]] = defaultdict(set)
        self._covered: dict[Place, list[OffsetRange]] = defaultdict(list)
        for place, offsets in contents.positions.items():
            self._reached[place].update(offsets)
        for frame in contents.frames:
            for place, r in places(frame.info):
                self._reached[place].add(r.from_offset)
        for info in accepted:
            self._take(info)
        # This includes blocks whose segments cleanup has deleted.
        for place, spans in listed_spans(contents.manifests).items():
            self._covered[place] += [OffsetRange(place[1], start, until, 0) for start, until in spans]
        for gap in () if saved is None else saved.gaps:
            if gap.batch_time_ms is None:
                lost = OffsetRange(gap.partition, gap.from_offset, gap.until_offset, 0)
                self._covered[gap.input_id, gap.partition].append(lost)

    def of(self, undecided: Iterable[BlockInfo]) -> list[BlockInfo]:
        """The undecided blocks that count. If two cover the same offsets, the one with the better `_fit` counts; if
        these are equal, the later one, because the earlier had been dropped before the later was written."""
        decided = []
        fitting = {info: self._fit(info) for info in undecided}
        for info in sorted(fitting, key=lambda info: (fitting[info], info.cut_time_ms, info.epoch), reverse=True):
            if not self._is_replaced(info) and not self._is_split(info):
                self._take(info)
                decided.append(info)
        return decided

    def went_on(self, info: BlockInfo) -> bool:
        """Whether one of its partitions continued after it: a later block begins there, or a position was there."""
        return any(
            max(self._at_checkpoint.get(place, -1), *self._reached[place]) >= r.until_offset
            for place, r in places(info)
        )

    def follows_damage_of_kafka(self, info: BlockInfo) -> bool:
        """Whether damage may have taken the offsets before it, and its source is Kafka, which can be read again."""
        for place, r in places(info):
            # A custom receiver's topic has this id.
            if place[1].topic_id == f"receiver:{place[0]}":
                continue
            known = self._covered[place]
            reached = max((each.until_offset for each in known if each.until_offset <= r.from_offset), default=0)
            if reached < r.from_offset and any(part.may_hold(place, (reached, r.from_offset)) for part in self._lost):
                return True
        return False

    def _is_replaced(self, info: BlockInfo) -> bool:
        """Whether other blocks that count, or gaps, cover any of its offsets: then they were read again."""
        return any(_overlap(r, other) for place, r in places(info) for other in self._covered[place])

    def _take(self, info: BlockInfo) -> None:
        for place, r in places(info):
            self._covered[place].append(r)
            self._reached[place].update((r.from_offset, r.until_offset))

    def _fit(self, info: BlockInfo) -> int:
        """How well the positions reached later fit the block's end.

        2: every partition that continued did so from the block's end. 1: a partition continued from a later offset.
        0: a position was within the block. Even then the block may have been accepted, if a rebuild set positions back.
        """
        fit = 2
        for place, r in places(info):
            reached = self._reached[place]
            if any(r.from_offset < offset < r.until_offset for offset in reached):
                return 0
            if r.until_offset not in reached and max(reached) > r.until_offset:
                fit = 1
        return fit

    def _is_split(self, info: BlockInfo) -> bool:
        """Whether the checkpoint's positions include only a part of the block. An accepted block moves all its
        partitions at once; a position that moved alone had nothing to store."""
        known = {
            self._at_checkpoint.get(place, -1) >= r.until_offset
            for place, r in places(info)
            if self._at_checkpoint.get(place, -1) > r.from_offset
        }
        ahead = any(self._at_checkpoint.get(place, -1) <= r.from_offset for place, r in places(info))
        return False in known or (True in known and ahead)


def places(info: BlockInfo) -> Iterable[tuple[Place, OffsetRange]]:
    """The block's non-empty ranges, each with its input's id and partition."""
    for r in info.ranges:
        if r.until_offset > r.from_offset:
            yield (info.receiver.input_id, r.partition), r


def _overlap(one: OffsetRange, other: OffsetRange) -> bool:
    return one.from_offset < other.until_offset and other.from_offset < one.until_offset


def in_order(infos: Sequence[BlockInfo], runs: Iterable[Sequence[BlockHandle]] = ()) -> list[BlockInfo]:
    """Sort the blocks by cut time, while keeping the order of offsets in a partition, of a writer's sequences, and of
    each of ``runs``, blocks that were added one after the other.

    Raises:
        ContradictionError: these orders contradict each other.
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
