"""Decides which blocks of the log a lost ledger had accepted, and in which order.

Frames are intents. Each frame carries its writer's last accepted sequence, so for each writer and epoch only the last
frame is undecided (rule 10 of the design). An undecided block counts if no other block covers its offsets: its source
may know that it is stored, and a queue does not give a message twice. One that was not accepted counts too:
its records are in the log, and are not read from Kafka again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from heapq import heappop, heappush
from itertools import pairwise

from headrace.batch.found_files import FolderContents, Place, Span, places
from headrace.blocks import BlockHandle, BlockInfo
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
    known = {(r.receiver_id, r.epoch): r.last_accepted_sequence for r in contents.saved.receivers}
    removed = {place: row.removed_until_offset or 0 for place, row in contents.saved.positions.items()}
    accepted: list[BlockInfo] = []
    undecided: list[BlockInfo] = []
    for frame in contents.frames:
        info = frame.info
        is_known = info.sequence <= known.get((info.receiver, info.epoch), -1)
        if info.handle in contents.listed:
            accepted.append(info)
        elif any(until <= removed.get(place, 0) for place, (_, until) in places(info)):
            # Its batch was removed, after its segment: somebody copied that back.
            continue
        elif frame.accepted or (frame.accepted is None and is_known):
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
        self._at_checkpoint = {place: row.next_offset for place, row in contents.saved.positions.items()}
        self._lost = [part for part in contents.lost if not part.is_vague_tail]
        self._reached: dict[Place, set[int]] = defaultdict(set)
        self._covered: dict[Place, list[Span]] = defaultdict(list)
        for place, offsets in contents.positions.items():
            self._reached[place].update(offsets)
        for frame in contents.frames:
            for place, (start, _) in places(frame.info):
                self._reached[place].add(start)
        for info in accepted:
            self._take(info)
        # This includes blocks whose segments cleanup has deleted.
        for place, spans in contents.accounted.items():
            self._covered[place] += spans

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
            max(self._at_checkpoint.get(place, -1), *self._reached[place]) >= until
            for place, (_, until) in places(info)
        )

    def follows_damage_of_kafka(self, info: BlockInfo) -> bool:
        """Whether damage may have taken the offsets before it, and its source is Kafka, which can be read again."""
        for place, (start, _) in places(info):
            # A custom receiver's topic has this id.
            if place[1].topic_id == f"receiver:{place[0]}":
                continue
            reached = max((until for _, until in self._covered[place] if until <= start), default=0)
            if any(part.may_hold(place, (reached, start)) for part in self._lost):
                return True
        return False

    def _is_replaced(self, info: BlockInfo) -> bool:
        """Whether other blocks that count, or gaps, cover any of its offsets: then they were read again."""
        return any(
            start < covered_until and covered_start < until
            for place, (start, until) in places(info)
            for covered_start, covered_until in self._covered[place]
        )

    def _take(self, info: BlockInfo) -> None:
        for place, span in places(info):
            self._covered[place].append(span)
            self._reached[place].update(span)

    def _fit(self, info: BlockInfo) -> int:
        """How well the positions reached later fit the block's end.

        2: every partition that continued did so from the block's end. 1: a partition continued from a later offset.
        0: a position was within the block. Even then the block may have been accepted, if a rebuild set positions back.
        """
        fit = 2
        for place, (start, until) in places(info):
            reached = self._reached[place]
            if any(start < offset < until for offset in reached):
                return 0
            if until not in reached and max(reached) > until:
                fit = 1
        return fit

    def _is_split(self, info: BlockInfo) -> bool:
        """Whether the checkpoint's positions include only a part of the block. An accepted block moves all its
        partitions at once; a position that moved alone had nothing to store."""
        known = [(self._at_checkpoint.get(place, -1), span) for place, span in places(info)]
        is_before, is_after = all(at >= until for at, (_, until) in known), all(at <= start for at, (start, _) in known)
        return not (is_before or is_after)


def in_order(infos: Sequence[BlockInfo], runs: Iterable[Sequence[BlockHandle]] = ()) -> list[BlockInfo]:
    """Sort the blocks by cut time, while keeping the order of offsets in a partition, of a writer's sequences, and of
    each of ``runs``, blocks that were added one after the other.

    Raises:
        ContradictionError: these orders contradict each other.
    """
    rows: dict[object, list[tuple[int, int]]] = defaultdict(list)
    indexes = {info.handle: index for index, info in enumerate(infos)}
    for number, run in enumerate(runs):
        rows[number] = [(at, indexes[handle]) for at, handle in enumerate(run)]
    for index, info in enumerate(infos):
        rows[info.receiver, info.epoch].append((info.sequence, index))
        for place, (start, _) in places(info):
            rows[place].append((start, index))
    sorter = TopologicalSorter[int]({index: () for index in range(len(infos))})
    for row in rows.values():
        row.sort()
        for (_, earlier), (_, later) in pairwise(row):
            sorter.add(later, earlier)
    try:
        sorter.prepare()
    except CycleError:
        raise ContradictionError(
            "The log's blocks are in no order: offsets of a partition go back where its writer's sequence goes on.",
            remedy="This log is not one stream's: is the folder the right one?",
        ) from None
    ready: list[tuple[int, int]] = []
    ordered = []
    while sorter.is_active():
        for index in sorter.get_ready():
            heappush(ready, (infos[index].cut_time_ms, index))
        _, index = heappop(ready)
        ordered.append(infos[index])
        sorter.done(index)
    return ordered


def _check(ordered: Sequence[BlockInfo]) -> None:
    ends: dict[Place, tuple[int, BlockInfo]] = {}
    for info in ordered:
        for place, (start, until) in places(info):
            end, before = ends.get(place, (0, info))
            if start < end:
                raise ContradictionError(
                    f"Two blocks hold offsets [{start}, {end}) of {place[1].topic}-{place[1].partition}: "
                    f"{before.handle} and {info.handle}.",
                    remedy="Keep the folder as it is, and report it: nothing was written.",
                )
            ends[place] = (until, info)
