"""Checks that every offset from a partition's start to its position is in one block, one batch, or a recorded gap."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from headrace.blocks import InputPartition, TopicPartition
from headrace.clock import time_text
from headrace.fsck.findings import Finding, Problem
from headrace.ledger.snapshots import StreamSnapshot


@dataclass(frozen=True, slots=True, order=True)
class Piece:
    """Accounted offsets ``[start, until)`` of a partition; ``reported_by`` names the block, batch or gap.

    ``has_others``: it may include offsets of other pieces, because it is the range of a batch that absorbed earlier
    times.
    """

    start: int
    until: int
    reported_by: str
    has_others: bool = False


@dataclass(frozen=True, slots=True)
class Hole:
    """Offsets that are in no block, batch or gap. Normally they hold no record; only Kafka can confirm that."""

    input_id: str
    partition: TopicPartition
    start: int
    until: int

    def __str__(self) -> str:
        return f"{partition_text((self.input_id, self.partition))} [{self.start}, {self.until})"


def partition_text(key: InputPartition) -> str:
    """A partition with its input and its topic's incarnation, as text."""
    input_id, partition = key
    incarnation = "" if partition.incarnation == 1 else f" (incarnation {partition.incarnation})"
    return f"{input_id}/{partition.topic}-{partition.partition}{incarnation}"


def check_coverage(snapshot: StreamSnapshot) -> tuple[list[Finding], list[Hole]]:
    """Check every partition. Offsets covered twice or past the position are findings; uncovered offsets are holes."""
    findings: list[Finding] = []
    holes: list[Hole] = []
    pieces = _pieces(snapshot)
    spans = {(row.input_id, row.partition): (row.kept_from, row.next_offset) for row in snapshot.positions}
    removed = {(row.input_id, row.partition): row.removed_until_offset or 0 for row in snapshot.positions}
    for key in sorted({*pieces, *spans}):
        if key not in spans:
            what = f"{len(pieces[key])} ranges of the partition were received, but it has no position."
            findings.append(Finding(Problem.POSITION_WRONG, partition_text(key), what))
            continue
        start, until = spans[key]
        # Skip pieces before the end of the removed batches: gaps between their records stay in the ledger.
        kept = [piece for piece in pieces[key] if piece.until > removed[key]]
        findings += _walk(key, start, until, sorted(kept), holes)
    return findings, holes


def _walk(key: InputPartition, start: int, until: int, pieces: list[Piece], holes: list[Hole]) -> Iterator[Finding]:
    name = partition_text(key)
    if start > until:
        yield Finding(Problem.POSITION_WRONG, name, f"Its position {until} is before its starting offset {start}.")
    reached, before = start, Piece(start, start, "the starting offset")
    for piece in pieces:
        if piece.start < reached and not (piece.has_others or before.has_others):
            what = (
                f"[{piece.start}, {piece.until}) of {piece.reported_by} begins before the end of {before.reported_by}."
            )
            yield Finding(Problem.OFFSETS_TWICE, f"{name} at {piece.start}", what)
        elif piece.start > reached:
            holes.append(Hole(*key, reached, piece.start))
        if piece.until >= reached:
            reached, before = piece.until, piece
    if reached > until:
        what = f"Its position is {until}, but {before.reported_by} ends at {reached}."
        yield Finding(Problem.POSITION_WRONG, name, what)
    elif reached < until:
        holes.append(Hole(*key, reached, until))


def _pieces(snapshot: StreamSnapshot) -> dict[InputPartition, list[Piece]]:
    """The accounted offsets of each partition: a batch's blocks if all are in the ledger, otherwise the batch's ranges;
    and the recorded gaps that are not of abandoned batches."""
    pieces: dict[InputPartition, list[Piece]] = defaultdict(list)
    by_ranges = {
        batch.batch_time_ms
        for batch in snapshot.batches
        if not batch.built and len(snapshot.blocks_by_batch.get(batch.batch_time_ms, ())) != batch.blocks
    }
    for block in snapshot.blocks:
        if snapshot.owner_ms(block.batch_time_ms) in by_ranges:
            continue
        reported_by = f"block {block.block_id} (batch {time_text(block.batch_time_ms)})"
        for r in block.info.ranges:
            key = (block.info.receiver.input_id, r.partition)
            pieces[key].append(Piece(r.from_offset, r.until_offset, reported_by))
    ranged: dict[InputPartition, list[Piece]] = defaultdict(list)
    for row in snapshot.inputs:
        if row.batch_time_ms in by_ranges:
            reported_by = f"batch {time_text(row.batch_time_ms)}"
            absorbs = bool(snapshot.batch[row.batch_time_ms].absorbed)
            ranged[row.input_id, row.partition].append(Piece(row.from_offset, row.until_offset, reported_by, absorbs))
    for key, ranges in ranged.items():
        pieces[key] += ranges
    for gap in snapshot.gaps:
        if gap.batch_time_ms is not None:
            continue
        key = (gap.input_id, gap.partition)
        # A batch's range has only its ends: it includes a gap between two of its blocks.
        within = any(
            piece.start <= gap.from_offset and gap.until_offset <= piece.until for piece in ranged.get(key, ())
        )
        if not within:
            pieces[key].append(Piece(gap.from_offset, gap.until_offset, "a gap"))
    return pieces
