"""Checks the ledger's rows of blocks, segments and unclaimed batch times against each other."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from headrace.blocks import ReceiverId
from headrace.clock import time_text
from headrace.fsck.coverage import InputPartition, partition_text
from headrace.fsck.findings import Finding, Problem
from headrace.ledger.clock_corrections import CLOCK_SKEW_MS
from headrace.ledger.models import SegmentRow, StoredBlock
from headrace.ledger.snapshots import StreamSnapshot
from headrace.ledger.states import BatchState


def check_blocks(snapshot: StreamSnapshot) -> Iterator[Finding]:
    """Check each block's batch time, writer, sequence and number of records."""
    receivers = {row.receiver_id: row for row in snapshot.receivers}
    last: dict[tuple[ReceiverId, int], int] = {}
    for block in snapshot.blocks:
        info = block.info
        wrong = _time_problem(snapshot, block)
        if wrong:
            yield Finding(Problem.BATCH_TIME_WRONG, f"block {block.block_id}", wrong)
        receiver = receivers.get(info.receiver)
        if receiver is None or info.epoch > receiver.epoch:
            known = "is not registered" if receiver is None else f"is in epoch {receiver.epoch}"
            what = f"It is of {info.receiver} in epoch {info.epoch}, and that receiver {known}."
            yield Finding(Problem.BLOCK_WRONG, f"block {block.block_id}", what)
        elif info.epoch == receiver.epoch and info.sequence > receiver.last_accepted_sequence:
            what = f"Its sequence is {info.sequence}, and the last accepted one {receiver.last_accepted_sequence}."
            yield Finding(Problem.BLOCK_WRONG, f"block {block.block_id}", what)
        before = last.get((info.receiver, info.epoch), -1)
        if info.sequence <= before:
            what = f"Its sequence {info.sequence} comes after {before} in epoch {info.epoch} of {info.receiver}."
            yield Finding(Problem.BLOCK_WRONG, f"block {block.block_id}", what)
        last[info.receiver, info.epoch] = info.sequence
        counted = sum(r.records for r in info.ranges)
        if counted != info.records:
            what = f"It has {info.records} records, and its ranges {counted}."
            yield Finding(Problem.BLOCK_WRONG, f"block {block.block_id}", what)


def _time_problem(snapshot: StreamSnapshot, block: StoredBlock) -> str | None:
    stream, info = snapshot.stream, block.info
    if block.batch_time_ms % stream.batch_interval_ms:
        return (
            f"Its batch time {time_text(block.batch_time_ms)} is no multiple of the interval, "
            f"{stream.batch_interval_ms} ms."
        )
    since_ms = info.cut_time_ms if info.event_time_ms is None else max(0, info.event_time_ms)
    earliest_ms = stream.batch_time_after(min(since_ms, block.added_at_ms))
    if block.batch_time_ms < earliest_ms:
        return (
            f"Its batch time is {time_text(block.batch_time_ms)}, and its records came for {time_text(earliest_ms)} "
            "or later."
        )
    return None


def check_order_of_batch_times(snapshot: StreamSnapshot) -> Iterator[Finding]:
    """Check that batch times never decrease along a partition, and that its position has the latest."""
    latest: dict[InputPartition, int] = {}
    for block in snapshot.blocks:
        for r in block.info.ranges:
            key = (block.info.receiver.input_id, r.partition)
            if block.batch_time_ms < latest.get(key, 0):
                what = (
                    f"Its batch time {time_text(block.batch_time_ms)} is before {time_text(latest[key])}, that of "
                    f"earlier offsets of {partition_text(key)}."
                )
                yield Finding(Problem.BATCH_TIME_WRONG, f"block {block.block_id}", what)
            latest[key] = max(block.batch_time_ms, latest.get(key, 0))
    for row in snapshot.positions:
        key = (row.input_id, row.partition)
        if row.last_batch_time_ms < latest.get(key, 0):
            what = (
                f"Its latest batch time is {time_text(row.last_batch_time_ms)}, and a block of it is in "
                f"{time_text(latest[key])}."
            )
            yield Finding(Problem.POSITION_WRONG, partition_text(key), what)


def check_unclaimed(snapshot: StreamSnapshot) -> Iterator[Finding]:
    """Check the counts of blocks, records and bytes of each unclaimed batch time."""
    held: dict[int, list[int]] = defaultdict(lambda: [0, 0, 0])
    for block in snapshot.blocks:
        if block.batch_time_ms not in snapshot.batch:
            for place, size in enumerate((1, block.info.records, block.info.payload_bytes)):
                held[block.batch_time_ms][place] += size
    reported = {row.batch_time_ms: [row.blocks, row.records, row.payload_bytes] for row in snapshot.unclaimed}
    for batch_time_ms in sorted({*held, *reported}):
        has, says = held.get(batch_time_ms, [0, 0, 0]), reported.get(batch_time_ms, [0, 0, 0])
        if has != says:
            what = "It has {} blocks without a batch, with {} records and {} bytes".format(*has)
            what += "; {}, {} and {} are counted.".format(*says)
            yield Finding(Problem.UNCLAIMED_WRONG, time_text(batch_time_ms), what)


def check_clock(snapshot: StreamSnapshot) -> Iterator[Finding]:
    """Check that no block waits for a batch time, and no batch was allocated, that lies ahead of the clock."""
    stream, until_ms = snapshot.stream, snapshot.now_ms + CLOCK_SKEW_MS
    if stream.sealed_until_ms > until_ms:
        what = f"It is sealed until then, and it is {time_text(snapshot.now_ms)}: no block can join an earlier time."
        yield Finding(Problem.CLOCK_WAS_AHEAD, time_text(stream.sealed_until_ms), what)
    open_ms = stream.batch_time_after(max(until_ms, stream.sealed_until_ms))
    ahead = [row for row in snapshot.unclaimed if row.batch_time_ms > open_ms]
    if ahead:
        what = f"{sum(row.records for row in ahead)} records wait for it and later ones."
        yield Finding(Problem.CLOCK_WAS_AHEAD, time_text(ahead[0].batch_time_ms), what)


def check_segments(snapshot: StreamSnapshot) -> Iterator[Finding]:
    """Check the segments' rows: their writer, that their blocks do not overlap, and that none is removed too early."""
    epochs = {row.receiver_id: row.epoch for row in snapshot.receivers}
    by_segment: dict[str, list[StoredBlock]] = defaultdict(list)
    for block in snapshot.blocks:
        by_segment[block.info.handle.segment].append(block)
    for segment in snapshot.segments:
        blocks = by_segment.get(segment.path, [])
        for what in _segment_problems(segment, blocks, epochs):
            yield Finding(Problem.SEGMENT_WRONG, segment.path, what)
        if segment.removing_at_ms is not None:
            yield from _let_go_early(snapshot, segment, blocks)


def _segment_problems(segment: SegmentRow, blocks: list[StoredBlock], epochs: dict[ReceiverId, int]) -> Iterator[str]:
    if segment.epoch > epochs.get(segment.receiver_id, 0):
        yield f"It is of epoch {segment.epoch} of {segment.receiver_id}, which is in {epochs.get(segment.receiver_id)}."
    if blocks and segment.removed_at_ms is not None:
        yield f"It was removed, and the ledger has {len(blocks)} blocks of it."
    strange = [
        block.block_id
        for block in blocks
        if (block.info.receiver, block.info.epoch) != (segment.receiver_id, segment.epoch)
    ]
    if strange:
        yield f"It is of {segment.receiver_id}, epoch {segment.epoch}, and block {strange[0]} in it of another writer."
    ends: Any = sorted((block.info.handle.offset, block.info.handle.length, block.block_id) for block in blocks)
    for (offset, length, first), (following, _, second) in itertools.pairwise(ends):
        if offset + length > following:
            yield f"Blocks {first} and {second} overlap in it at byte {following}."
    if segment.bytes is not None and ends and ends[-1][0] + ends[-1][1] > segment.bytes:
        yield f"It was closed with {segment.bytes} bytes, and block {ends[-1][2]} ends at {ends[-1][0] + ends[-1][1]}."
    latest_ms, reported_ms = max((block.batch_time_ms for block in blocks), default=0), segment.last_batch_time_ms
    if segment.closed_at_ms is not None and reported_ms is not None and reported_ms < latest_ms:
        yield (
            f"It was closed with {time_text(reported_ms)} as its latest batch time, and has a block of "
            f"{time_text(latest_ms)}."
        )


def _let_go_early(snapshot: StreamSnapshot, segment: SegmentRow, blocks: list[StoredBlock]) -> Iterator[Finding]:
    for owner_ms in sorted({snapshot.owner_ms(block.batch_time_ms) for block in blocks}):
        batch = snapshot.batch.get(owner_ms)
        is_done = batch is not None and (batch.checkpointed_at_ms is not None or batch.state is BatchState.ABANDONED)
        if not is_done:
            state = "not allocated" if batch is None else f"{batch.state.value} and in no checkpoint"
            what = f"It is {state}, and {segment.path}, which holds blocks of it, is being removed."
            yield Finding(Problem.CLEANED_TOO_EARLY, time_text(owner_ms), what)
