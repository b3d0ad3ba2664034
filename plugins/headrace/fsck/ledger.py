"""Checks the ledger's rows against each other: blocks and segments, batches, attempts and outputs, leases and topics.

`headrace.fsck.coverage` checks the offsets of blocks, batches and gaps.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from headrace.blocks import ReceiverId
from headrace.clock import time_text
from headrace.fsck.coverage import InputPartition, partition_text
from headrace.fsck.findings import Finding, Problem
from headrace.ledger.allocations import sum_inputs
from headrace.ledger.batch_states import is_recorded
from headrace.ledger.batch_tables import BatchInputRow, BatchRow
from headrace.ledger.clock_corrections import CLOCK_SKEW_MS
from headrace.ledger.receiving_tables import SegmentRow, StoredBlock
from headrace.ledger.snapshots import StreamSnapshot
from headrace.ledger.states import BatchState, PartitionState


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
            known = "is not registered" if receiver is None else f"has reached only epoch {receiver.epoch}"
            what = f"Receiver {info.receiver} wrote it in epoch {info.epoch}, but that receiver {known}."
            yield Finding(Problem.BLOCK_WRONG, f"block {block.block_id}", what)
        elif info.epoch == receiver.epoch and info.sequence > receiver.last_accepted_sequence:
            what = f"Its sequence is {info.sequence}, after the last accepted one, {receiver.last_accepted_sequence}."
            yield Finding(Problem.BLOCK_WRONG, f"block {block.block_id}", what)
        before = last.get((info.receiver, info.epoch), -1)
        if info.sequence <= before:
            what = f"Its sequence {info.sequence} comes after {before} in epoch {info.epoch} of {info.receiver}."
            yield Finding(Problem.BLOCK_WRONG, f"block {block.block_id}", what)
        last[info.receiver, info.epoch] = info.sequence
        counted = sum(r.records for r in info.ranges)
        if counted != info.records:
            what = f"It has {info.records} records, but its offset ranges count {counted}."
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
            f"Its batch time is {time_text(block.batch_time_ms)}, but its records can be in no batch before "
            f"{time_text(earliest_ms)}."
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
                f"Its latest batch time is {time_text(row.last_batch_time_ms)}, but a block of it is in "
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
            yield from _removed_too_early(snapshot, segment, blocks)


def _segment_problems(segment: SegmentRow, blocks: list[StoredBlock], epochs: dict[ReceiverId, int]) -> Iterator[str]:
    if segment.epoch > epochs.get(segment.receiver_id, 0):
        known = epochs.get(segment.receiver_id)
        yield f"Segment of receiver {segment.receiver_id}, epoch {segment.epoch}; the ledger knows epoch {known} of it."
    if blocks and segment.removed_at_ms is not None:
        yield f"It was removed, but the ledger has {len(blocks)} blocks of it."
    strange = [
        block.block_id
        for block in blocks
        if (block.info.receiver, block.info.epoch) != (segment.receiver_id, segment.epoch)
    ]
    if strange:
        yield (
            f"Segment of receiver {segment.receiver_id}, epoch {segment.epoch}; it contains block {strange[0]} of "
            "another writer."
        )
    ends: Any = sorted((block.info.handle.offset, block.info.handle.length, block.block_id) for block in blocks)
    for (offset, length, first), (following, _, second) in itertools.pairwise(ends):
        if offset + length > following:
            yield f"Blocks {first} and {second} overlap in it at byte {following}."
    if segment.bytes is not None and ends and ends[-1][0] + ends[-1][1] > segment.bytes:
        yield f"It was closed with {segment.bytes} bytes, but block {ends[-1][2]} ends at {ends[-1][0] + ends[-1][1]}."
    latest_ms, reported_ms = max((block.batch_time_ms for block in blocks), default=0), segment.last_batch_time_ms
    if segment.closed_at_ms is not None and reported_ms is not None and reported_ms < latest_ms:
        yield (
            f"It was closed with {time_text(reported_ms)} as its latest batch time, but has a block of "
            f"{time_text(latest_ms)}."
        )


def _removed_too_early(snapshot: StreamSnapshot, segment: SegmentRow, blocks: list[StoredBlock]) -> Iterator[Finding]:
    for owner_ms in sorted({snapshot.owner_ms(block.batch_time_ms) for block in blocks}):
        batch = snapshot.batch.get(owner_ms)
        is_done = batch is not None and (batch.checkpointed_at_ms is not None or batch.state is BatchState.ABANDONED)
        if not is_done:
            state = "not allocated" if batch is None else f"{batch.state.value} and in no checkpoint"
            what = f"It is {state}, and {segment.path}, which holds blocks of it, is being removed."
            yield Finding(Problem.CLEANED_TOO_EARLY, time_text(owner_ms), what)


def check_allocations(snapshot: StreamSnapshot) -> Iterator[Finding]:
    """Check that each batch has its allocated blocks and their ranges, until cleanup may delete them from the log."""
    for batch in snapshot.batches:
        name = time_text(batch.batch_time_ms)
        for what in _time_problems(snapshot, batch):
            yield Finding(Problem.BATCH_TIME_WRONG, name, what)
        blocks = snapshot.blocks_by_batch.get(batch.batch_time_ms, [])
        if batch.state is BatchState.ABSORBED:
            continue
        if len(blocks) > batch.blocks:
            what = f"It was allocated {batch.blocks} blocks, but the ledger has {len(blocks)} of its times."
            yield Finding(Problem.BATCH_BLOCKS_WRONG, name, what)
        elif len(blocks) < batch.blocks:
            yield from _what_is_gone(batch, len(blocks))
        else:
            yield from _check_sums(snapshot, batch, blocks)


def _time_problems(snapshot: StreamSnapshot, batch: BatchRow) -> Iterator[str]:
    if batch.batch_time_ms % batch.interval_ms or batch.interval_ms != snapshot.stream.batch_interval_ms:
        interval_ms = snapshot.stream.batch_interval_ms
        yield f"It is not the end of an interval of {interval_ms} ms (its own is {batch.interval_ms})."
    if batch.batch_time_ms > snapshot.stream.sealed_until_ms:
        yield f"It was allocated, but the stream is sealed only until {snapshot.stream.sealed_until_ms}."


def _what_is_gone(batch: BatchRow, left: int) -> Iterator[Finding]:
    is_done = batch.checkpointed_at_ms is not None or batch.state is BatchState.ABANDONED
    if not is_done:
        what = (
            f"It is {batch.state.value} and in no checkpoint, but of its {batch.blocks} blocks the ledger has {left}."
        )
        yield Finding(Problem.CLEANED_TOO_EARLY, time_text(batch.batch_time_ms), what)


def _check_sums(snapshot: StreamSnapshot, batch: BatchRow, blocks: list[StoredBlock]) -> Iterator[Finding]:
    name = time_text(batch.batch_time_ms)
    inputs = snapshot.inputs_by_batch.get(batch.batch_time_ms, [])
    if batch.cleaned_at_ms is not None and blocks:
        what = f"It is marked as cleaned, but {len(blocks)} blocks of it are there."
        yield Finding(Problem.BATCH_STATE_WRONG, name, what)
    if batch.built:
        if sum(row.records for row in inputs) != batch.records:
            what = f"It has {batch.records} records, but its offset ranges count {sum(row.records for row in inputs)}."
            yield Finding(Problem.BATCH_INPUTS_WRONG, name, what)
        return
    summed = sum(block.info.records for block in blocks), sum(block.info.payload_bytes for block in blocks)
    if summed != (batch.records, batch.payload_bytes):
        what = (
            f"It has {batch.records} records of {batch.payload_bytes} bytes, but its blocks {summed[0]} of {summed[1]}."
        )
        yield Finding(Problem.BATCH_BLOCKS_WRONG, name, what)
    wanted = {(row.input_id, row.partition): row for row in sum_inputs(batch.stream, batch.batch_time_ms, blocks)}
    reported = {(row.input_id, row.partition): row for row in inputs}
    for key in sorted({*wanted, *reported}):
        if wanted.get(key) != reported.get(key):
            takes, hold = _range(reported.get(key)), _range(wanted.get(key))
            what = f"Of {partition_text(key)} it takes {takes}, and its blocks hold {hold}."
            yield Finding(Problem.BATCH_INPUTS_WRONG, name, what)


def _range(row: BatchInputRow | None) -> str:
    if row is None:
        return "nothing"
    return f"[{row.from_offset}, {row.until_offset}) with {row.records} records in {row.blocks} blocks"


def check_built(snapshot: StreamSnapshot) -> Iterator[Finding]:
    """Check that ranges built from Kafka are before the stream's starting offsets, and do not overlap each other."""
    starting = {(row.input_id, row.partition): row.starting_offset for row in snapshot.positions}
    reached: dict[object, tuple[int, int]] = {}
    for row in snapshot.inputs:
        batch = snapshot.batch.get(row.batch_time_ms)
        if batch is None or not batch.built:
            continue
        key = (row.input_id, row.partition)
        until, other_ms = reached.get(key, (0, 0))
        name = partition_text(key)
        if row.until_offset > starting.get(key, row.until_offset):
            what = f"{_offsets(row)} was built from Kafka, and the stream began at {starting[key]}."
            yield Finding(Problem.OFFSETS_TWICE, f"{name} at {row.from_offset}", what)
        if row.from_offset < until:
            what = f"{_offsets(row)} begins before {until}, where batch {time_text(other_ms)} ends."
            yield Finding(Problem.OFFSETS_TWICE, f"{name} at {row.from_offset}", what)
        reached[key] = max((row.until_offset, row.batch_time_ms), (until, other_ms))


def _offsets(row: BatchInputRow) -> str:
    return f"[{row.from_offset}, {row.until_offset}) of batch {time_text(row.batch_time_ms)}"


def check_absorbed(snapshot: StreamSnapshot) -> Iterator[Finding]:
    """Check that absorbed batch times and the batches that absorbed them name each other."""
    for batch in snapshot.batches:
        name = time_text(batch.batch_time_ms)
        if batch.absorbed_by_ms is not None or batch.state is BatchState.ABSORBED:
            owner = None if batch.absorbed_by_ms is None else snapshot.batch.get(batch.absorbed_by_ms)
            if owner is None or batch.batch_time_ms not in owner.absorbed or batch.state is not BatchState.ABSORBED:
                what = (
                    f"It is {batch.state.value}, absorbed by {time_text(batch.absorbed_by_ms)}, but that batch does "
                    "not say so."
                )
                yield Finding(Problem.ABSORBED_WRONG, name, what)
            if snapshot.inputs_by_batch.get(batch.batch_time_ms):
                yield Finding(Problem.ABSORBED_WRONG, name, "It was absorbed, but has offset ranges of its own.")
        for batch_time_ms in batch.absorbed:
            taken = snapshot.batch.get(batch_time_ms)
            if taken is None or taken.absorbed_by_ms != batch.batch_time_ms or batch_time_ms >= batch.batch_time_ms:
                by = None if taken is None else taken.absorbed_by_ms
                what = f"It says that it absorbed {time_text(batch_time_ms)}, which is absorbed by {time_text(by)}."
                yield Finding(Problem.ABSORBED_WRONG, name, what)


_UNFINISHED = (BatchState.ALLOCATED, BatchState.RUNNING, BatchState.FAILED)


def check_states(snapshot: StreamSnapshot) -> Iterator[Finding]:
    """Check that a batch's state agrees with its outputs' newest attempts and its running attempts."""
    running = {row.batch_time_ms for row in snapshot.running if not row.target}
    for batch in snapshot.batches:
        name = time_text(batch.batch_time_ms)
        for what in _state_problems(snapshot, batch, is_run=batch.batch_time_ms in running):
            yield Finding(Problem.BATCH_STATE_WRONG, name, what)
        if batch.checkpointed_at_ms is not None and (batch.steps is None or batch.checkpoint_uri is None):
            what = f"It has never completed, but is marked as being in checkpoint {batch.checkpoint_uri}."
            yield Finding(Problem.BATCH_STATE_WRONG, name, what)
        if batch.attempt < snapshot.newest_attempts.get(batch.batch_time_ms, 0):
            what = (
                f"Its newest attempt is {snapshot.newest_attempts[batch.batch_time_ms]}, but it says {batch.attempt}."
            )
            yield Finding(Problem.BATCH_STATE_WRONG, name, what)
        if batch.cleaned_at_ms is not None and not (
            batch.checkpointed_at_ms or batch.state in (BatchState.ABANDONED, BatchState.ABSORBED)
        ):
            what = f"It is {batch.state.value}, in no checkpoint, but marked as cleaned."
            yield Finding(Problem.CLEANED_TOO_EARLY, name, what)


def _state_problems(snapshot: StreamSnapshot, batch: BatchRow, *, is_run: bool) -> Iterator[str]:
    newest = snapshot.outputs.get((batch.batch_time_ms, ""), {})
    # An output that was removed from the stream does not count.
    steps = [step for step in batch.steps or () if step in snapshot.stream.outputs]
    missing = [step for step in steps if not is_recorded(newest.get(step))]
    if batch.state is BatchState.COMPLETED:
        if batch.completed_at_ms is None or batch.steps is None:
            yield "It has completed, but the ledger does not say when, or by which outputs."
        if missing:
            yield f"It has completed, but {', '.join(missing)} has no record of success."
    elif batch.state is BatchState.RUNNING and not is_run:
        yield "It is running, but no attempt runs it."
    elif batch.state is BatchState.FAILED and not is_run and newest and _all_recorded(snapshot, batch):
        yield "It has failed, but all its outputs have a record of success."
    if is_run and batch.state in (BatchState.COMPLETED, BatchState.ABANDONED, BatchState.ABSORBED):
        taken = {
            output for row in snapshot.running if row.batch_time_ms == batch.batch_time_ms for output in row.outputs
        }
        if batch.state is not BatchState.COMPLETED or taken & set(steps):
            yield f"It is {batch.state.value}, but an attempt runs it."


def _all_recorded(snapshot: StreamSnapshot, batch: BatchRow) -> bool:
    newest = snapshot.outputs.get((batch.batch_time_ms, ""), {})
    return all(is_recorded(newest.get(step)) for step in batch.needs(snapshot.stream.outputs))


def check_turns(snapshot: StreamSnapshot) -> Iterator[Finding]:
    """Check that in an ordered stream no batch began before an earlier batch or unclaimed batch time was run.

    Only batches that began under the present definition are checked: an earlier definition may not have been ordered.
    """
    stream = snapshot.stream
    if not stream.ordered:
        return
    begun = {
        batch.batch_time_ms: since_ms
        for batch in snapshot.batches
        if not batch.built
        and (since_ms := _begun_since_ms(batch)) is not None
        and (stream.revision == 1 or since_ms >= stream.updated_at_ms)
    }
    waiting = [(batch.batch_time_ms, batch.allocated_at_ms) for batch in snapshot.batches if _is_unfinished(batch)]
    waiting += [(row.batch_time_ms, 0) for row in snapshot.unclaimed]
    for batch_time_ms, since_ms in sorted(waiting):
        overtaken = [later_ms for later_ms, at_ms in begun.items() if later_ms > batch_time_ms and at_ms > since_ms]
        if overtaken:
            what = f"It is still to be run, but {len(overtaken)} later ones were begun, {overtaken[0]} first."
            yield Finding(Problem.OUT_OF_TURN, time_text(batch_time_ms), what)


def _begun_since_ms(batch: BatchRow) -> int | None:
    """When the batch was started, or allocated if it has completed; None if it never started.

    The first start of a completed batch is not known: it may have been run again, which is allowed at any time.
    """
    return batch.started_at_ms if batch.steps is None else batch.allocated_at_ms


def _is_unfinished(batch: BatchRow) -> bool:
    return batch.state in _UNFINISHED and batch.steps is None and not batch.built


def check_slots(snapshot: StreamSnapshot) -> Iterator[Finding]:
    """Check that no more batches run than the stream has slots, and that no two attempts write one output."""
    stream = snapshot.stream
    live = [row for row in snapshot.running if not row.target and row.alive(snapshot.now_ms)]
    times = sorted({row.batch_time_ms for row in live if row.started_at_ms >= stream.updated_at_ms})
    slots = 1 if stream.ordered else stream.max_concurrent_batches
    if len(times) > slots:
        what = f"Batches {', '.join(map(str, times))} run, and the stream runs {slots} at a time."
        yield Finding(Problem.SLOTS_EXCEEDED, stream.name, what)
    holders: dict[tuple[int, str, str], int] = {}
    for row in snapshot.running:
        for output in row.outputs:
            other = holders.setdefault((row.batch_time_ms, row.target, output), row.number)
            if other != row.number:
                what = f"Attempts {other} and {row.number} both write {output!r}."
                yield Finding(Problem.LEASE_WRONG, f"batch {time_text(row.batch_time_ms)}", what)


def check_replays(snapshot: StreamSnapshot) -> Iterator[Finding]:
    """Check that completed replays have a record of success for all outputs, and that no later attempt took an output
    of a running one."""
    for row in snapshot.replays:
        newest = snapshot.outputs.get((row.batch_time_ms, row.target), {})
        missing = [output for output in row.outputs if not is_recorded(newest.get(output))]
        name = f"{row.target} {time_text(row.batch_time_ms)}"
        if row.state is BatchState.COMPLETED and missing:
            what = f"It has completed, but {', '.join(missing)} has no record of success."
            yield Finding(Problem.REPLAY_STATE_WRONG, name, what)
    for attempt in snapshot.running:
        recorded = snapshot.outputs.get((attempt.batch_time_ms, attempt.target), {})
        ahead = [row for row in recorded.values() if row.attempt > attempt.number and row.output_id in attempt.outputs]
        if ahead:
            what = f"Attempt {attempt.number} runs, and {ahead[0].output_id!r} was taken by attempt {ahead[0].attempt}."
            yield Finding(Problem.LEASE_WRONG, f"batch {time_text(attempt.batch_time_ms)}", what)


def check_jobs(snapshot: StreamSnapshot) -> Iterator[Finding]:
    """Check that only the newest job runs, and that receivers run only in it."""
    stream = snapshot.stream
    for job in snapshot.jobs:
        name = f"receiver job {job.epoch}"
        if job.epoch > stream.job_epoch:
            yield Finding(Problem.LEASE_WRONG, name, f"The stream's row names job {stream.job_epoch} as the newest.")
        elif job.epoch < stream.job_epoch and not job.state.ended:
            what = f"It is {job.state.value}, held by {job.holder}, but job {stream.job_epoch} has begun since."
            yield Finding(Problem.LEASE_WRONG, name, what)
    current = next((job for job in snapshot.jobs if job.epoch == stream.job_epoch), None)
    for receiver in snapshot.receivers:
        name = f"receiver {receiver.receiver_id}"
        if receiver.job_epoch > stream.job_epoch:
            what = f"Job {receiver.job_epoch} scheduled it, but the newest job is {stream.job_epoch}."
            yield Finding(Problem.LEASE_WRONG, name, what)
        elif not receiver.state.ended and (
            receiver.job_epoch < stream.job_epoch or current is None or current.state.ended
        ):
            what = f"It is {receiver.state.value}, but its job {receiver.job_epoch} has ended."
            yield Finding(Problem.LEASE_WRONG, name, what)


def check_topics(snapshot: StreamSnapshot) -> Iterator[Finding]:
    """Check that each topic has one current incarnation, and that no partition of another incarnation is being read."""
    current: dict[tuple[str, str], list[str]] = defaultdict(list)
    known = {}
    for row in snapshot.topics:
        known[row.input_id, row.topic, row.topic_id] = row
        current[row.input_id, row.topic] += [row.topic_id] if row.current else []
    for (input_id, topic), ids in sorted(current.items()):
        if len(ids) != 1:
            what = f"{len(ids)} of its incarnations are marked as the current one."
            yield Finding(Problem.TOPIC_WRONG, f"{input_id}/{topic}", what)
    for position in snapshot.positions:
        tp = position.partition
        name = partition_text((position.input_id, tp))
        observed = known.get((position.input_id, tp.topic, tp.topic_id))
        if observed is None or observed.incarnation != tp.incarnation or tp.partition >= observed.partitions:
            what = "The ledger has no such topic."
            if observed is not None:
                what = (
                    f"The ledger has incarnation {observed.incarnation} of its topic, {observed.partitions} partitions."
                )
            yield Finding(Problem.TOPIC_WRONG, name, what)
        elif position.state is PartitionState.ACTIVE and not observed.current and position.receiver_index is not None:
            what = f"It is read by receiver {position.receiver_index}, but another topic has its name since."
            yield Finding(Problem.TOPIC_WRONG, name, what)
