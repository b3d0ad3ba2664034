"""Decides which blocks of the log a lost ledger had accepted, and in which order.

Frames are intents. Each frame carries its writer's last accepted sequence, so for each writer and epoch only the blocks
of the last write are undecided (rule 10 of the design). The ledger accepts all blocks of a write in one transaction, so
they are decided together. An undecided write counts if no other block covers its offsets: its source may know that it
is stored, and a queue does not give a message twice. One that was not accepted counts too: its records are in the log,
and are not read from Kafka again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from heapq import heappop, heappush
from itertools import pairwise

from headrace.batch.found_files import FolderContents, FoundFrame, Span, spans_of
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


_Write = tuple[BlockInfo, ...]
"""The blocks of one write, in the order of their sequences."""


def accepted_blocks(contents: FolderContents) -> AcceptedBlocks:
    """Decide which blocks count.

    Raises:
        ContradictionError: two blocks that count cover the same offsets, or the orders of blocks contradict each other.
    """
    known = {(r.receiver_id, r.epoch): r.last_accepted_sequence for r in contents.saved.receivers}
    removed = {key: row.removed_until_offset or 0 for key, row in contents.saved.positions.items()}
    accepted: list[BlockInfo] = []
    undecided: list[_Write] = []
    for frames in _writes(contents.frames):
        is_listed = any(frame.info.handle in contents.listed for frame in frames)
        left = [
            frame
            for frame in frames
            # Otherwise its batch was removed, after its segment: somebody copied that back.
            if frame.info.handle in contents.listed
            or all(until > removed.get(key, 0) for key, (_, until) in spans_of(frame.info))
        ]
        is_open = all(frame.accepted is None for frame in frames)
        is_known = any(frame.info.sequence <= known.get(frame.write[:2], -1) for frame in frames)
        if is_open and not is_listed and not is_known:
            undecided += [tuple(frame.info for frame in left)] if left else []
        else:
            accepted += [
                frame.info for frame in left if is_open or frame.accepted or frame.info.handle in contents.listed
            ]
    decision = _Decision(contents, accepted)
    unconfirmed = {write for write in undecided if not decision.went_on(write)}
    # Kafka is read again from the damage on. If the block counted, what the damage took would be a gap for ever.
    undecided = [
        write for write in undecided if write not in unconfirmed or not decision.follows_damage_of_kafka(write)
    ]
    decided = decision.of(undecided)
    blocks = in_order([*accepted, *(info for write in decided for info in write)])
    _check(blocks)
    unproven = [info for write in decided if write in unconfirmed for info in write]
    return AcceptedBlocks(blocks, unproven, len(contents.frames) - len(blocks))


def _writes(frames: Iterable[FoundFrame]) -> Iterator[list[FoundFrame]]:
    """The frames of each write."""
    writes: dict[object, list[FoundFrame]] = defaultdict(list)
    for frame in frames:
        writes[frame.write].append(frame)
    for of_write in writes.values():
        yield sorted(of_write, key=lambda frame: frame.info.sequence)


def _spans(write: Iterable[BlockInfo]) -> list[tuple[InputPartition, Span]]:
    """As `spans_of`, of all blocks of a write: in a partition they follow each other."""
    spans: dict[InputPartition, Span] = {}
    for info in write:
        for key, (start, until) in spans_of(info):
            first, last = spans.get(key, (start, until))
            spans[key] = (min(first, start), max(last, until))
    return list(spans.items())


class _Decision:
    """Decides which undecided writes count: those that no other block covers, and the checkpoint not in parts.

    A position had reached every offset at which a write begins, also an undecided one: its writer had started from the
    ledger's positions.
    """

    def __init__(self, contents: FolderContents, accepted: Iterable[BlockInfo]) -> None:
        self._at_checkpoint = {key: row.next_offset for key, row in contents.saved.positions.items()}
        self._lost = [part for part in contents.lost if not part.is_vague_tail]
        self._reached: dict[InputPartition, set[int]] = defaultdict(set)
        self._covered: dict[InputPartition, list[Span]] = defaultdict(list)
        for key, offsets in contents.positions.items():
            self._reached[key].update(offsets)
        for frames in _writes(contents.frames):
            # Where the first block of a write is lost, it is not known where the write begins.
            if frames[0].info.sequence == frames[0].write[2]:
                for key, (start, _) in _spans(frame.info for frame in frames):
                    self._reached[key].add(start)
        for info in accepted:
            self._take([info])
        # This includes blocks whose segments cleanup has deleted.
        for key, spans in contents.accounted.items():
            self._covered[key] += spans

    def of(self, undecided: Iterable[_Write]) -> list[_Write]:
        """The undecided writes that count. If two cover the same offsets, the one with the better `_fit` counts; if
        these are equal, the later one, because the earlier had been dropped before the later was written."""
        decided = []
        fitting = {write: self._fit(write) for write in undecided}
        for write in sorted(
            fitting, key=lambda write: (fitting[write], write[0].cut_time_ms, write[0].epoch), reverse=True
        ):
            if not self._is_replaced(write) and not self._is_split(write):
                self._take(write)
                decided.append(write)
        return decided

    def went_on(self, write: _Write) -> bool:
        """Whether one of its partitions continued after it: a later write begins there, or a position was there."""
        return any(
            max(self._at_checkpoint.get(key, -1), -1, *self._reached[key]) >= until for key, (_, until) in _spans(write)
        )

    def follows_damage_of_kafka(self, write: _Write) -> bool:
        """Whether damage may have taken the offsets before or between its blocks, and its source is Kafka, which can be
        read again."""
        ends: dict[InputPartition, int] = {}
        for key, (start, until) in (span for info in write for span in spans_of(info)):
            # A custom receiver's topic has this id.
            if key[1].topic_id == f"receiver:{key[0]}":
                continue
            reached = max((end for _, end in self._covered[key] if end <= start), default=0)
            reached = max(reached, ends.get(key, 0))
            if any(part.may_hold(key, (reached, start)) for part in self._lost):
                return True
            ends[key] = until
        return False

    def _is_replaced(self, write: _Write) -> bool:
        """Whether other blocks that count, or gaps, cover any of its offsets: then they were read again."""
        return any(
            start < covered_until and covered_start < until
            for info in write
            for key, (start, until) in spans_of(info)
            for covered_start, covered_until in self._covered[key]
        )

    def _take(self, write: Iterable[BlockInfo]) -> None:
        for key, span in (span for info in write for span in spans_of(info)):
            self._covered[key].append(span)
            self._reached[key].update(span)

    def _fit(self, write: _Write) -> int:
        """How well the positions reached later fit the write's end.

        2: every partition that continued did so from the write's end. 1: a partition continued from a later offset.
        0: a position was within the write. Even then it may have been accepted, if a rebuild set positions back.
        """
        fit = 2
        for key, (start, until) in _spans(write):
            reached = self._reached[key]
            if any(start < offset < until for offset in reached):
                return 0
            if until not in reached and max(reached, default=-1) > until:
                fit = 1
        return fit

    def _is_split(self, write: _Write) -> bool:
        """Whether the checkpoint's positions include only a part of the write. An accepted write moves all its
        partitions at once; a position that moved alone had nothing to store."""
        known = [(self._at_checkpoint.get(key, -1), span) for key, span in _spans(write)]
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
