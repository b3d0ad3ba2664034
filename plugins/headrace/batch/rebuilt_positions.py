"""Derives the partitions' positions of a lost ledger, and the gaps below them.

A position is the checkpoint's, moved by what was written since. From each partition's start to its position, no block,
manifest or known gap may account for some offsets. At the end of a partition they are read from Kafka again: the
position is set before them. Between accounted ones they are not read again: they are recorded as gaps, with the reason.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from headrace.batch.found_files import FolderContents, LostPart, Span, last_epoch_end, partition_of, spans_of
from headrace.blocks import BlockInfo, InputPartition
from headrace.ledger.rebuild import FoundBatch
from headrace.ledger.receiving.tables import EpochEnd, PositionRow, StoredBlock
from headrace.ledger.states import PartitionState
from headrace.ledger.tables import GapRow

UNEXPLAINED = "nothing that the rebuild found explains them: control records, or what no checkpoint knows was lost"


@dataclass(frozen=True)
class RebuiltPositions:
    """The positions, the gaps below them that no checkpoint has, and notices about both."""

    positions: Sequence[PositionRow]
    gaps: Sequence[GapRow]
    notices: Sequence[str]


def rebuild_positions(
    contents: FolderContents, blocks: Sequence[StoredBlock], batches: Iterable[FoundBatch], now_ms: int
) -> RebuiltPositions:
    """Derive every partition's position, and check the offsets from its start up to there.

    Args:
        blocks: the blocks that count, with their batch times.
    """
    finder = _Finder(contents, blocks)
    positions: list[PositionRow] = []
    gaps: list[GapRow] = []
    notices: list[str] = []
    for row in _moved(contents, blocks, batches, now_ms):
        key = partition_of(row)
        name = f"{row.input_id}/{row.partition.topic}-{row.partition.partition}"
        end = finder.end(key, row)
        if reason := finder.reason(key, (end, row.next_offset)):
            notices.append(f"[{end}, {row.next_offset}) of {name} is read from Kafka again: {reason}.")
        at = min(end, row.next_offset)
        known = finder.epoch_end(key, at)
        positions.append(
            dataclasses.replace(
                row,
                next_offset=at,
                leader_epoch=None if known is None else known.leader_epoch,
                epoch_end_offset=None if known is None else known.end_offset,
                source_position=finder.source_position(key, at),
            )
        )
        for start, until, why in finder.holes(key, row.kept_from, end):
            gaps.append(GapRow(0, contents.stream, *key, start, until, why, None, now_ms))
            notices.append(f"[{start}, {until}) of {name} is a gap: {why}.")
        if contents.saved.stream is None:
            # A missing segment may have held the partition's first offsets.
            notices += [
                f"Where {name} began is not known, since {part.what}: offsets before {row.starting_offset} may be lost."
                for part in contents.lost
                if part.is_missing and part.may_hold(key, (0, row.starting_offset))
            ]
    return RebuiltPositions(positions, gaps, notices)


def _moved(
    contents: FolderContents, blocks: Iterable[StoredBlock], batches: Iterable[FoundBatch], now_ms: int
) -> Iterator[PositionRow]:
    """Each partition's position and start: the checkpoint's, moved by what was written since."""
    saved = contents.saved
    # The offsets, the batch time and the watermark of each move.
    moves: dict[InputPartition, list[tuple[int, int, int, int]]] = defaultdict(list)
    for key, offsets in contents.positions.items():
        moves[key].append((min(offsets), max(offsets), 0, 0))
    for batch in batches:
        # The checkpoint's last batch time is exact; a manifest names the batch that absorbed the block's time.
        time_ms = batch.row.batch_time_ms if saved.stream is None else 0
        for taken in () if batch.row.built else batch.inputs:
            moves[partition_of(taken)].append((taken.from_offset, taken.until_offset, time_ms, 0))
    for block in blocks:
        event_ms = max(0, min(block.info.event_time_ms or 0, block.info.cut_time_ms))
        for key, span in spans_of(block.info):
            moves[key].append((*span, block.batch_time_ms, event_ms))
    for key in {**saved.positions, **moves}:
        starts, untils, times, marks = zip(*moves.get(key, [(0, 0, 0, 0)]), strict=True)
        row = saved.positions.get(key)
        if row is None:
            row = PositionRow(*key, 0, min(starts), None, None, 0, PartitionState.ACTIVE, None, now_ms)
        yield dataclasses.replace(
            row,
            next_offset=max(row.next_offset, *untils),
            last_batch_time_ms=max(row.last_batch_time_ms, *times),
            watermark_ms=max(row.watermark_ms, *marks),
        )


def _epoch_ends(contents: FolderContents, blocks: Iterable[BlockInfo]) -> dict[InputPartition, list[EpochEnd]]:
    """The ends of ranges with a leader epoch, by partition. Each range in a manifest or in the log has that of its last
    record, and a position in the checkpoint the one of its time."""
    ends: dict[InputPartition, list[EpochEnd]] = defaultdict(list)
    for key, row in contents.saved.positions.items():
        if row.leader_epoch is not None and row.epoch_end_offset is not None:
            ends[key].append(EpochEnd(row.leader_epoch, row.epoch_end_offset))
    for manifest in (each for of_time in contents.manifests.values() for each in of_time):
        for key, end in manifest.epochs:
            ends[key].append(end)
    for info in blocks:
        for r in info.ranges:
            if (known := last_epoch_end([r])) is not None:
                ends[info.receiver.input_id, r.partition].append(known)
    return ends


class _Finder:
    def __init__(self, contents: FolderContents, blocks: Sequence[StoredBlock]) -> None:
        self._lost = contents.lost
        self._pieces: dict[InputPartition, list[Span]] = defaultdict(list)
        self._source_positions: dict[InputPartition, list[tuple[int, str]]] = defaultdict(list)
        self._epoch_ends = _epoch_ends(contents, (block.info for block in blocks))
        # The ledger was complete at the checkpoint: below these positions only later damage can have lost offsets.
        self._at_checkpoint = {key: row.next_offset for key, row in contents.saved.positions.items()}
        for key, row in contents.saved.positions.items():
            if row.source_position is not None:
                self._source_positions[key].append((row.next_offset, row.source_position))
        for info in (block.info for block in blocks):
            for key, span in spans_of(info):
                self._pieces[key].append(span)
                if info.source_position is not None:
                    self._source_positions[key].append((span[1], info.source_position))
        for key, spans in contents.accounted.items():
            self._pieces[key] += spans

    def end(self, key: InputPartition, row: PositionRow) -> int:
        """The offset up to which the folder's contents confirm the partition's position."""
        # Manifests of batches that were removed from the history are gone.
        reached = max([row.kept_from, *(until for _, until in self._pieces[key])])
        at_checkpoint = self._at_checkpoint.get(key, 0)
        return reached if self._parts(key, (reached, at_checkpoint), with_tails=True) else max(reached, at_checkpoint)

    def holes(self, key: InputPartition, start: int, until: int) -> Iterator[tuple[int, int, str]]:
        """The gaps between accounted ranges, as (start, until, reason), without those that the checkpoint explains."""
        at_checkpoint = self._at_checkpoint.get(key, 0)
        reached = start
        for piece_start, piece_until in sorted([*self._pieces[key], (until, until)]):
            if why := self.reason(key, (reached, piece_start)):
                yield reached, piece_start, why
            elif piece_start > max(reached, at_checkpoint):
                yield max(reached, at_checkpoint), piece_start, UNEXPLAINED
            reached = max(reached, piece_until)

    def reason(self, key: InputPartition, span: Span) -> str:
        """The damage that may have lost the offsets; empty if there is none."""
        return "; ".join(part.what for part in self._parts(key, span))

    def epoch_end(self, key: InputPartition, offset: int) -> EpochEnd | None:
        """Of the last record below the offset whose leader epoch some file has. By it the receiver notices that Kafka's
        log was truncated since."""
        known = (end for end in self._epoch_ends.get(key, ()) if end.end_offset <= offset)
        return max(known, key=lambda end: (end.end_offset, end.leader_epoch), default=None)

    def source_position(self, key: InputPartition, offset: int) -> str | None:
        """Where a custom receiver's source stood at the offset: what it gave after that is read again."""
        known = (position for position in self._source_positions[key] if position[0] <= offset)
        return max(known, default=(0, None))[1]

    def _parts(self, key: InputPartition, span: Span, *, with_tails: bool = False) -> list[LostPart]:
        return [part for part in self._lost if part.may_hold(key, span) and (with_tails or not part.is_vague_tail)]
