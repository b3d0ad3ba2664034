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

from headrace.batch.found_files import FolderContents, Span, spans_of
from headrace.blocks import BlockHandle, BlockInfo, InputPartition
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
    removed = {key: row.removed_until_offset or 0 for key, row in contents.saved.positions.items()}
    accepted: list[BlockInfo] = []
    undecided: list[BlockInfo] = []
    for frame in contents.frames:
        info = frame.info
        is_known = info.sequence <= known.get((info.receiver, info.epoch), -1)
        if info.handle in contents.listed:
            accepted.append(info)
        elif any(until <= removed.get(key, 0) for key, (_, until) in spans_of(info)):
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
        self._at_checkpoint = {key: row.next_offset for key, row in contents.saved.positions.items()}
        self._lost = [part for part in contents.lost if not part.is_vague_tail]
        self._reached: dict[InputPartition, set[int]] = defaultdict(set)
        self._covered: dict[InputPartition, list[Span]] = defaultdict(list)
        for key, offsets in contents.positions.items():
            self._reached[key].update(offsets)
        for frame in contents.frames:
            for key, (start, _) in spans_of(frame.info):
                self._reached[key].add(start)
        for info in accepted:
            self._take(info)
        # This includes blocks whose segments cleanup has deleted.
        for key, spans in contents.accounted.items():
            self._covered[key] += spans

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
            max(self._at_checkpoint.get(key, -1), *self._reached[key]) >= until for key, (_, until) in spans_of(info)
        )

    def follows_damage_of_kafka(self, info: BlockInfo) -> bool:
        """Whether damage may have taken the offsets before it, and its source is Kafka, which can be read again."""
        for key, (start, _) in spans_of(info):
            # A custom receiver's topic has this id.
            if key[1].topic_id == f"receiver:{key[0]}":
                continue
            reached = max((until for _, until in self._covered[key] if until <= start), default=0)
            if any(part.may_hold(key, (reached, start)) for part in self._lost):
                return True
        return False

    def _is_replaced(self, info: BlockInfo) -> bool:
        """Whether other blocks that count, or gaps, cover any of its offsets: then they were read again."""
        return any(
            start < covered_until and covered_start < until
            for key, (start, until) in spans_of(info)
            for covered_start, covered_until in self._covered[key]
        )

    def _take(self, info: BlockInfo) -> None:
        for key, span in spans_of(info):
            self._covered[key].append(span)
            self._reached[key].update(span)

    def _fit(self, info: BlockInfo) -> int:
        """How well the positions reached later fit the block's end.

        2: every partition that continued did so from the block's end. 1: a partition continued from a later offset.
        0: a position was within the block. Even then the block may have been accepted, if a rebuild set positions back.
        """
        fit = 2
        for key, (start, until) in spans_of(info):
            reached = self._reached[key]
            if any(start < offset < until for offset in reached):
                return 0
            if until not in reached and max(reached) > until:
                fit = 1
        return fit

    def _is_split(self, info: BlockInfo) -> bool:
        """Whether the checkpoint's positions include only a part of the block. An accepted block moves all its
        partitions at once; a position that moved alone had nothing to store."""
        known = [(self._at_checkpoint.get(key, -1), span) for key, span in spans_of(info)]
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
        for key, (start, _) in spans_of(info):
            rows[key].append((start, index))
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
    ends: dict[InputPartition, tuple[int, BlockInfo]] = {}
    for info in ordered:
        for key, (start, until) in spans_of(info):
            end, before = ends.get(key, (0, info))
            if start < end:
                raise ContradictionError(
                    f"Two blocks hold offsets [{start}, {end}) of {key[1].topic}-{key[1].partition}: "
                    f"{before.handle} and {info.handle}.",
                    remedy="Keep the folder as it is, and report it: nothing was written.",
                )
            ends[key] = (until, info)
