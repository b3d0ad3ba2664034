"""Derives a stream's state in its lost ledger from the contents of its folder, in three steps.

`accepted_blocks`: which blocks of the log the lost ledger had accepted, and in which order. Frames are intents. Each
frame carries its writer's last accepted sequence, so for each writer and epoch only the last frame is undecided (rule
10 of the design). An undecided block counts if no other block covers its offsets: its source may have been told that it
is stored, and a queue does not give a message twice. One that was not accepted counts too: its records are in the log,
and are not read from Kafka again.

`rebuild_batches` (`headrace.batch.rebuilt_batches`): the batches, from their manifests and results.

`check_positions`: offsets that no block, manifest or known gap accounts for, from each partition's start to its
position. At the end of a partition they are read from Kafka again: the position is set before them. Between accounted
ones they are not read again: they are recorded as gaps, with the reason.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from headrace.batch.found_files import FolderContents, LostPart, Place, Span, listed_spans
from headrace.batch.rebuilt_batches import RebuiltBatches, first_batch_time, rebuild_batches
from headrace.blocks import BlockHandle, BlockInfo, OffsetRange, ReceiverId
from headrace.errors import HeadraceError
from headrace.ledger.rebuild import FoundStream
from headrace.ledger.receiving_tables import MovedBlock, PositionRow, SegmentRow, StoredBlock, TopicRow
from headrace.ledger.states import BatchState, PartitionState
from headrace.ledger.streams import new_stream
from headrace.ledger.tables import Declared, GapRow, StreamRevision, StreamRow
from headrace.stream import Stream

EPOCH_JUMP = 1_000
"""Added to the known epochs and attempts, for those since the newest checkpoint that left nothing in the log."""
_FIRST_ATTEMPT_AT_MS = 1_577_836_800_000
"""The start of 2020. A rebuilt ledger numbers its attempts from the number of seconds since then."""


@dataclass(frozen=True)
class RebuiltStream:
    """The derived stream, its accepted blocks, and notices for a person."""

    found: FoundStream
    blocks: AcceptedBlocks
    notices: Sequence[str]


def rebuild_stream(
    contents: FolderContents, definition: Stream | None, *, folder_url: str | None, now_ms: int
) -> RebuiltStream:
    """Derive the stream's state from the contents of its folder.

    Args:
        definition: becomes the stream's definition. Without it that of the checkpoint does, so it is needed if there is
            no checkpoint.
        folder_url: the stream's folder for the manifests' URIs; None: the definition's folder.

    Raises:
        ContradictionError: blocks overlap, or their orders contradict each other.
        ManifestError: a batch's manifest is missing or damaged.
    """
    saved = contents.saved
    declared = None if definition is None else Declared.by(definition)
    if saved is not None:
        # The DAG's definition is the newer one, whatever the file says of its own age.
        stream, revisions = dataclasses.replace(saved.stream, declared_at_ms=0), saved.revisions
    elif declared is not None:
        stream = new_stream(contents.stream, declared, now_ms)
        revisions = [StreamRevision(**declared.columns(), revision=stream.revision, created_at_ms=now_ms)]
    else:
        raise ValueError("A stream of which no checkpoint can be read needs its definition.")
    recorded = Stream.from_json(stream.definition)
    blocks = accepted_blocks(contents)
    batches = rebuild_batches(
        contents,
        stream,
        {info.handle: info for info in blocks.blocks},
        folder_url=folder_url or (definition or recorded).folder_url,
        coalesces=recorded.coalesces,
        now_ms=now_ms,
    )
    listed = _with_batch_times(contents, stream, blocks, batches, now_ms)
    sealed_ms = max((batch.row.batch_time_ms for batch in batches.batches), default=0)
    stream = dataclasses.replace(
        stream,
        job_epoch=_last_job_epoch(contents) + EPOCH_JUMP,
        sealed_until_ms=max(sealed_ms, stream.sealed_until_ms),
        zero_time_ms=stream.zero_time_ms if saved is not None else _zero_time_ms(stream, listed, batches),
    )
    accounted = check_positions(contents, blocks.blocks, _positions(contents, listed, batches, now_ms), now_ms)
    positions = _with_source_positions(contents, blocks.blocks, accounted.positions)
    known = [batch.row.attempt for batch in batches.batches]
    rebuilt = FoundStream(
        stream=stream,
        revisions=revisions,
        declared=declared,
        receiver_epochs={receiver_id: epoch + EPOCH_JUMP for receiver_id, epoch in _epochs(contents).items()},
        last_attempt=max((now_ms - _FIRST_ATTEMPT_AT_MS) // 1_000, *(number + EPOCH_JUMP for number in known), 1),
        topics=_topics(contents, blocks.blocks, now_ms),
        positions=positions,
        segments=_segments(contents, blocks.blocks, now_ms),
        blocks=listed,
        batches=batches.batches,
        replay_definitions=() if saved is None else saved.replay_definitions,
        gaps=_gaps(contents, batches, now_ms),
        found_gaps=accounted.gaps,
        runs={**({} if saved is None else saved.runs), **_runs(contents)},
        notes={
            "checkpoint": None if saved is None else saved.checkpoint.path,
            "undecided_blocks": len(blocks.undecided),
            "refused_blocks": blocks.refused,
            "gaps": len(accounted.gaps),
            "lost": [part.what for part in contents.lost if not part.is_tail],
        },
    )
    notices = [*contents.notices, *batches.notices, *_unknown_starts(contents, accounted.positions)]
    notices += [
        f"Block {info.handle} of {info.receiver} is its writer's last, and nothing shows whether the ledger had "
        "accepted it: it counts, since no other block has its offsets. Kafka is not read again for it; a queue "
        "that had not been told that it is stored gives its records once more."
        for info in blocks.undecided
    ]
    notices += accounted.notices
    return RebuiltStream(rebuilt, blocks, notices)


def _gaps(contents: FolderContents, batches: RebuiltBatches, now_ms: int) -> list[GapRow]:
    """The checkpoint's gaps, oldest first, and those of the batches that were abandoned after it."""
    gaps = [] if contents.saved is None else sorted(contents.saved.gaps, key=lambda gap: gap.gap_id)
    known = {gap.batch_time_ms for gap in gaps}
    # Blocks that vanished have a gap already.
    starts = {(gap.input_id, gap.partition, gap.from_offset) for gap in gaps}
    for batch in batches.batches:
        time_ms, why = batch.row.batch_time_ms, f"batch abandoned: {batch.row.error}"
        if batch.row.state is BatchState.ABANDONED and time_ms not in known:
            for taken in batch.inputs:
                place, span = (taken.input_id, taken.partition), (taken.from_offset, taken.until_offset)
                if (*place, taken.from_offset) not in starts:
                    gaps.append(GapRow(0, contents.stream, *place, *span, why, time_ms, now_ms))
    return gaps


def _runs(contents: FolderContents) -> dict[str, int]:
    results = contents.results.by_time.items()
    return {run_id: batch_time_ms for batch_time_ms, result in results for run_id in result.runs}


def _unknown_starts(contents: FolderContents, positions: Iterable[PositionRow]) -> list[str]:
    """Notices of unknown starts: without a checkpoint, a missing segment may have held a partition's first offsets."""
    if contents.saved is not None:
        return []
    return [
        f"Where {row.input_id}/{row.partition.topic}-{row.partition.partition} began is not known, since "
        f"{part.what}: offsets before {row.starting_offset} may be lost."
        for part in contents.lost
        if part.is_missing
        for row in positions
        if part.may_hold((row.input_id, row.partition), (0, row.starting_offset))
    ]


def _with_batch_times(
    contents: FolderContents, stream: StreamRow, blocks: AcceptedBlocks, batches: RebuiltBatches, now_ms: int
) -> list[StoredBlock]:
    """All blocks with their batch times, in the order for the ledger.

    A block that no manifest lists gets the batch time of its cut, or a later one: not before the batch times of earlier
    blocks in its partitions, and not one that was sealed when it was added, as far as that is known.
    """
    claimed = {batch.row.batch_time_ms for batch in batches.batches}
    of_batches = {block.info.handle: block.batch_time_ms for block in batches.blocks}
    # What followed an absorbed time in a partition follows the batch that absorbed it.
    owners = {batch.row.batch_time_ms: batch.row.absorbed_by_ms or batch.row.batch_time_ms for batch in batches.batches}
    saved = contents.saved
    known = {} if saved is None else {r.receiver_id: (r.epoch, r.last_accepted_sequence) for r in saved.receivers}
    moved = {} if saved is None else {_identity(block): block.batch_time_ms for block in saved.moved_blocks}
    sealed_then_ms = 0 if saved is None else saved.stream.sealed_until_ms
    latest: dict[Place, int] = defaultdict(int)
    in_log = {place for info in blocks.blocks for place, _ in places(info)}
    for row in () if saved is None else saved.positions:
        # A partition with blocks in the log takes its latest batch time from them, one after the other.
        if (row.input_id, row.partition) not in in_log:
            latest[row.input_id, row.partition] = row.last_batch_time_ms
    unclaimed = []
    for info in blocks.blocks:
        batch_time_ms = of_batches.get(info.handle)
        of_block = [place for place, _ in places(info)]
        if batch_time_ms is None:
            first_ms = moved.get((info.receiver.input_id, info.receiver.index, info.epoch, info.sequence), 0)
            first_ms = first_ms or first_batch_time(stream, info)
            batch_time_ms = max([first_ms, *(latest[place] for place in of_block)])
            if (info.epoch, info.sequence) > known.get(info.receiver, (0, -1)):
                batch_time_ms = max(batch_time_ms, stream.batch_time_after(sealed_then_ms))
            while batch_time_ms in claimed:
                batch_time_ms += stream.batch_interval_ms
            unclaimed.append(StoredBlock(0, batch_time_ms, now_ms, info))
        for place in of_block:
            latest[place] = max(latest[place], owners.get(batch_time_ms, batch_time_ms))
    # Each batch's blocks keep their manifest's order, so that the same manifest can be written again.
    runs: dict[tuple[int, str], list[BlockHandle]] = defaultdict(list)
    for block in batches.blocks:
        runs[block.batch_time_ms, block.info.receiver.input_id].append(block.info.handle)
    block_of = {block.info.handle: block for block in [*batches.blocks, *unclaimed]}
    return [block_of[info.handle] for info in in_order(blocks.blocks, runs.values())]


def _identity(block: MovedBlock) -> tuple[str, int, int, int]:
    return block.input_id, block.receiver_index, block.epoch, block.sequence


def _epochs(contents: FolderContents) -> dict[ReceiverId, int]:
    epochs = dict(contents.epochs)
    for receiver in () if contents.saved is None else contents.saved.receivers:
        epochs[receiver.receiver_id] = max(receiver.epoch, epochs.get(receiver.receiver_id, 0))
    return epochs


def _last_job_epoch(contents: FolderContents) -> int:
    if contents.saved is None:
        return 0
    return max([contents.saved.stream.job_epoch, *(receiver.job_epoch for receiver in contents.saved.receivers)])


def _zero_time_ms(stream: StreamRow, blocks: Iterable[StoredBlock], batches: RebuiltBatches) -> int:
    """The zero time, moved before everything that was received: received records must not be built from Kafka again."""
    times = [block.batch_time_ms for block in blocks]
    for batch in batches.batches:
        if batch.inputs and not batch.row.built:
            times += [*batch.row.absorbed, batch.row.batch_time_ms]
    return min([stream.zero_time_ms, *(batch_time_ms - stream.batch_interval_ms for batch_time_ms in times)])


def _segments(contents: FolderContents, blocks: Iterable[BlockInfo], now_ms: int) -> list[SegmentRow]:
    writers = {info.handle.segment: (info.receiver, info.epoch) for info in blocks}
    return [
        SegmentRow(0, contents.stream, path, *writer, now_ms, None, contents.segments.get(path), None, None)
        for path, writer in writers.items()
    ]


def _topics(contents: FolderContents, blocks: Iterable[BlockInfo], now_ms: int) -> list[TopicRow]:
    """The checkpoint's topics, with partitions seen since, and the topics first seen since."""
    saved = contents.saved
    known = {} if saved is None else {(row.input_id, row.topic, row.topic_id): row for row in saved.topics}
    sizes: dict[tuple[str, str, str], int] = defaultdict(int)
    incarnations: dict[tuple[str, str, str], int] = {}
    for input_id, partition in [*contents.positions, *(place for info in blocks for place, _ in places(info))]:
        key = (input_id, partition.topic, partition.topic_id)
        sizes[key] = max(sizes[key], partition.partition + 1)
        incarnations[key] = partition.incarnation
    rows = [dataclasses.replace(row, partitions=max(row.partitions, sizes[key])) for key, row in known.items()]
    added = [key for key in sizes if key not in known]
    newest: dict[tuple[str, str], int] = defaultdict(int)
    for input_id, topic, topic_id in added:
        incarnation = incarnations[input_id, topic, topic_id]
        newest[input_id, topic] = max(newest[input_id, topic], incarnation)
        rows.append(
            TopicRow(
                stream=contents.stream,
                input_id=input_id,
                topic=topic,
                topic_id=topic_id,
                incarnation=incarnation,
                partitions=sizes[input_id, topic, topic_id],
                first_partitions=sizes[input_id, topic, topic_id],
                at_start=False,
                current=True,
                first_seen_ms=now_ms,
                changed_at_ms=now_ms,
            )
        )
    # The latest incarnation of a topic name is the current one.
    return [
        dataclasses.replace(row, current=row.incarnation == newest[row.input_id, row.topic])
        if (row.input_id, row.topic) in newest
        else row
        for row in rows
    ]


def _positions(
    contents: FolderContents, blocks: Sequence[StoredBlock], batches: RebuiltBatches, now_ms: int
) -> list[PositionRow]:
    """Each partition's position and start: the checkpoint's, moved by what was written since."""
    saved = contents.saved
    rows: dict[Place, PositionRow] = {}
    for row in () if saved is None else saved.positions:
        rows[row.input_id, row.partition] = dataclasses.replace(row, receiver_index=None, wanted_receiver_index=None)

    known = set(rows)

    def move(place: Place, starting: int, offset: int, batch_time_ms: int = 0, watermark_ms: int = 0) -> None:
        row = rows.get(place) or _first_position(place, starting, now_ms)
        rows[place] = dataclasses.replace(
            row,
            starting_offset=row.starting_offset if place in known else min(row.starting_offset, starting),
            next_offset=max(row.next_offset, offset),
            last_batch_time_ms=max(row.last_batch_time_ms, batch_time_ms),
            watermark_ms=max(row.watermark_ms, watermark_ms),
        )

    for place, offsets in contents.positions.items():
        move(place, min(offsets), max(offsets))
    for batch in batches.batches:
        for taken in () if batch.row.built else batch.inputs:
            place = (taken.input_id, taken.partition)
            # The checkpoint's last batch time is exact; a manifest names the batch that absorbed the block's time.
            move(place, taken.from_offset, taken.until_offset, batch.row.batch_time_ms if saved is None else 0)
    for block in blocks:
        event_ms = min(block.info.event_time_ms or 0, block.info.cut_time_ms)
        for place, r in places(block.info):
            move(place, r.from_offset, r.until_offset, block.batch_time_ms, max(0, event_ms))
    return list(rows.values())


def _with_source_positions(
    contents: FolderContents, blocks: Iterable[BlockInfo], positions: Iterable[PositionRow]
) -> list[PositionRow]:
    """The positions with where each custom receiver's source stood there: what it gave after that is read again."""
    known: dict[Place, list[tuple[int, str]]] = defaultdict(list)
    for row in () if contents.saved is None else contents.saved.positions:
        if row.source_position is not None:
            known[row.input_id, row.partition].append((row.next_offset, row.source_position))
    for info in blocks:
        for place, r in places(info):
            if info.source_position is not None:
                known[place].append((r.until_offset, info.source_position))
    return [
        dataclasses.replace(
            row,
            source_position=max(
                (position for position in known[row.input_id, row.partition] if position[0] <= row.next_offset),
                default=(0, None),
            )[1],
        )
        for row in positions
    ]


def _first_position(place: Place, offset: int, now_ms: int) -> PositionRow:
    return PositionRow(
        input_id=place[0],
        partition=place[1],
        next_offset=offset,
        starting_offset=offset,
        receiver_index=None,
        wanted_receiver_index=None,
        last_batch_time_ms=0,
        state=PartitionState.ACTIVE,
        error=None,
        updated_at_ms=now_ms,
    )


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
    listed = {handle for of_time in contents.manifests.values() for manifest in of_time for handle in manifest.in_log}
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
            reached = max(
                (covered.until_offset for covered in known if covered.until_offset <= r.from_offset), default=0
            )
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


UNEXPLAINED = "nothing that the rebuild found explains them: control records, or what no checkpoint knows was lost"


@dataclass(frozen=True)
class CheckedPositions:
    """The corrected positions, the gaps below them that no checkpoint has, and notices about both."""

    positions: Sequence[PositionRow]
    gaps: Sequence[GapRow]
    notices: Sequence[str]


def check_positions(
    contents: FolderContents, blocks: Iterable[BlockInfo], positions: Iterable[PositionRow], now_ms: int
) -> CheckedPositions:
    """Check every partition from its start to its position; returns corrected positions and new gaps."""
    finder = _Finder(contents, blocks)
    corrected: list[PositionRow] = []
    gaps: list[GapRow] = []
    notices: list[str] = []
    for row in positions:
        place = (row.input_id, row.partition)
        name = f"{row.input_id}/{row.partition.topic}-{row.partition.partition}"
        end = finder.end(place, row)
        if end < row.next_offset:
            corrected.append(dataclasses.replace(row, next_offset=end))
            if reason := finder.reason(place, (end, row.next_offset)):
                notices.append(f"[{end}, {row.next_offset}) of {name} is read from Kafka again: {reason}.")
        else:
            corrected.append(row)
        for start, until, why in finder.holes(place, row.kept_from, end):
            gaps.append(
                GapRow(len(gaps), contents.stream, row.input_id, row.partition, start, until, why, None, now_ms)
            )
            notices.append(f"[{start}, {until}) of {name} is a gap: {why}.")
    return CheckedPositions(corrected, gaps, notices)


class _Finder:
    def __init__(self, contents: FolderContents, blocks: Iterable[BlockInfo]) -> None:
        self._lost = contents.lost
        self._pieces: dict[Place, list[Span]] = defaultdict(list)
        for info in blocks:
            for place, r in places(info):
                self._pieces[place].append((r.from_offset, r.until_offset))
        for place, spans in listed_spans(contents.manifests).items():
            self._pieces[place] += spans
        saved = contents.saved
        for gap in () if saved is None else saved.gaps:
            if gap.batch_time_ms is None:
                self._pieces[gap.input_id, gap.partition].append((gap.from_offset, gap.until_offset))
        # The ledger was complete at the checkpoint: below these positions only later damage can have lost offsets.
        self._at_checkpoint = {(row.input_id, row.partition): row for row in (() if saved is None else saved.positions)}

    def end(self, place: Place, row: PositionRow) -> int:
        """The offset up to which the folder's contents confirm the partition's position."""
        # Manifests of batches that were removed from the history are gone.
        reached = max([row.kept_from, *(until for _, until in self._pieces[place])])
        at_checkpoint = self._at_checkpoint.get(place)
        if at_checkpoint is not None:
            beyond = (max(reached, at_checkpoint.starting_offset), at_checkpoint.next_offset)
            if not self._parts(place, beyond, with_tails=True):
                reached = max(reached, at_checkpoint.next_offset)
        return max(reached, row.starting_offset)

    def holes(self, place: Place, start: int, until: int) -> Iterator[tuple[int, int, str]]:
        """The gaps between accounted ranges, as (start, until, reason), without those that the checkpoint explains."""
        at_checkpoint = self._at_checkpoint.get(place)
        borne_out = 0 if at_checkpoint is None else at_checkpoint.next_offset
        reached = start
        for piece_start, piece_until in sorted([*self._pieces[place], (until, until)]):
            if piece_start > reached:
                span = (reached, piece_start)
                if why := self.reason(place, span):
                    yield (*span, why)
                elif piece_start > borne_out:
                    yield max(reached, borne_out), piece_start, UNEXPLAINED
            reached = max(reached, piece_until)

    def reason(self, place: Place, span: Span) -> str:
        """The damage that may have lost the offsets; empty if there is none."""
        return "; ".join(part.what for part in self._parts(place, span))

    def _parts(self, place: Place, span: Span, *, with_tails: bool = False) -> list[LostPart]:
        if span[0] >= span[1]:
            return []
        return [part for part in self._lost if part.may_hold(place, span) and (with_tails or not part.is_vague_tail)]
