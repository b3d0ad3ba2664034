"""Finds offsets that no block, manifest or known gap accounts for, from each partition's start to its position.

Such offsets at the end of a partition are read from Kafka again: the position is set before them. Such offsets between
accounted ones are not read again: they are recorded as gaps, with the reason.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from headrace.batch.recovery.accepted_blocks import places
from headrace.batch.recovery.folder_contents import FolderContents, LostPart
from headrace.batch.recovery.found_manifests import Place, Span, listed_spans
from headrace.blocks import BlockInfo
from headrace.ledger.receiving_tables import PositionRow
from headrace.ledger.tables import GapRow

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
