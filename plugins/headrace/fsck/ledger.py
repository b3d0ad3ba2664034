"""Checks of the ledger alone: the clock, what was deleted of the log, states, order.

`headrace.fsck.coverage` checks the offsets of blocks, batches and gaps. Other rules of the ledger's rows can only be
broken by a fault of headrace: ``tests/support/ledger_rules.py`` checks these.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from headrace.clock import time_text
from headrace.fsck.coverage import partition_text
from headrace.fsck.findings import Finding, Problem
from headrace.ledger.batches.batch_states import is_recorded
from headrace.ledger.batches.tables import BatchInputRow, BatchRow
from headrace.ledger.clock_corrections import CLOCK_SKEW_MS
from headrace.ledger.receiving.tables import SegmentRow, StoredBlock
from headrace.ledger.snapshots import StreamSnapshot
from headrace.ledger.states import UNFINISHED, BatchState


def check_clock(snapshot: StreamSnapshot) -> Iterator[Finding]:
    """Check that no block waits for a batch time, and no batch was allocated, that lies ahead of the clock."""
    stream, until_ms = snapshot.stream, snapshot.now_ms + CLOCK_SKEW_MS
    if stream.sealed_until_ms > until_ms:
        now = time_text(snapshot.now_ms)
        what = f"The stream is sealed up to here, but the ledger's time is {now}: no block can join an earlier batch."
        yield Finding(Problem.CLOCK_WAS_AHEAD, time_text(stream.sealed_until_ms), what)
    open_ms = stream.batch_time_after(max(until_ms, stream.sealed_until_ms))
    ahead = [row for row in snapshot.unclaimed if row.batch_time_ms > open_ms]
    if ahead:
        what = f"{sum(row.records for row in ahead)} records wait for this batch time and later ones."
        yield Finding(Problem.CLOCK_WAS_AHEAD, time_text(ahead[0].batch_time_ms), what)


def check_cleaned(snapshot: StreamSnapshot) -> Iterator[Finding]:
    """Check that the log holds all blocks of each batch that is still to be run, or run again."""
    by_segment: dict[str, list[StoredBlock]] = defaultdict(list)
    for block in snapshot.blocks:
        by_segment[block.info.handle.segment].append(block)
    for segment in snapshot.segments:
        if segment.removing_at_ms is not None:
            yield from _removed_too_early(snapshot, segment, by_segment[segment.path])
    for batch in snapshot.batches:
        left = len(snapshot.blocks_by_batch.get(batch.batch_time_ms, []))
        if batch.state is not BatchState.ABSORBED and left < batch.blocks:
            yield from _what_is_gone(batch, left)
        if batch.cleaned_at_ms is not None and not (
            batch.checkpointed_at_ms or batch.state in (BatchState.ABANDONED, BatchState.ABSORBED)
        ):
            what = f"It is {batch.state.value}, in no checkpoint, but marked as cleaned."
            yield Finding(Problem.CLEANED_TOO_EARLY, time_text(batch.batch_time_ms), what)


def _removed_too_early(snapshot: StreamSnapshot, segment: SegmentRow, blocks: list[StoredBlock]) -> Iterator[Finding]:
    for owner_ms in sorted({snapshot.owner_ms(block.batch_time_ms) for block in blocks}):
        batch = snapshot.batch.get(owner_ms)
        is_done = batch is not None and (batch.checkpointed_at_ms is not None or batch.state is BatchState.ABANDONED)
        if not is_done:
            state = "not allocated" if batch is None else f"{batch.state.value} and in no checkpoint"
            what = f"It is {state}, and {segment.path}, which holds blocks of it, is being removed."
            yield Finding(Problem.CLEANED_TOO_EARLY, time_text(owner_ms), what)


def _what_is_gone(batch: BatchRow, left: int) -> Iterator[Finding]:
    is_done = batch.checkpointed_at_ms is not None or batch.state is BatchState.ABANDONED
    if not is_done:
        what = (
            f"It is {batch.state.value} and in no checkpoint, but the ledger has {left} of its {batch.blocks} blocks."
        )
        yield Finding(Problem.CLEANED_TOO_EARLY, time_text(batch.batch_time_ms), what)


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
            newest = snapshot.newest_attempts[batch.batch_time_ms]
            what = f"Its newest attempt is {newest}, but its row has {batch.attempt}."
            yield Finding(Problem.BATCH_STATE_WRONG, name, what)


def _state_problems(snapshot: StreamSnapshot, batch: BatchRow, *, is_run: bool) -> Iterator[str]:
    newest = snapshot.outputs.get((batch.batch_time_ms, ""), {})
    # An output that was removed from the stream does not count.
    steps = [step for step in batch.steps or () if step in snapshot.stream.outputs]
    missing = [step for step in steps if not is_recorded(newest.get(step))]
    if batch.state is BatchState.COMPLETED:
        if batch.completed_at_ms is None or batch.steps is None:
            yield "It has completed, but the ledger has no time of completion, or no outputs."
        if missing:
            yield f"It has completed, but {', '.join(missing)} has no record of success."
    elif batch.state is BatchState.RUNNING and not is_run:
        yield "It is running, but no attempt runs it."
    elif batch.state is BatchState.FAILED and not is_run and newest and _all_recorded(snapshot, batch):
        yield "It has failed, but all its outputs have a record of success."
    if is_run and batch.state in (BatchState.COMPLETED, BatchState.ABANDONED, BatchState.ABSORBED):
        # An attempt that died after its last record runs nothing: the next one to begin completes the batch by them.
        taken = {
            output
            for row in snapshot.running
            if row.batch_time_ms == batch.batch_time_ms
            for output in row.outputs
            if not ((record := newest.get(output)) and record.attempt == row.number and is_recorded(record))
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
            later = f"{len(overtaken)} later batches have begun, such as {time_text(overtaken[0])}"
            what = f"It is still to be run, but {later}."
            yield Finding(Problem.OUT_OF_TURN, time_text(batch_time_ms), what)


def _begun_since_ms(batch: BatchRow) -> int | None:
    """When the batch was started, or allocated if it has completed; None if it never started.

    The first start of a completed batch is not known: it may have been run again, which is allowed at any time.
    """
    return batch.started_at_ms if batch.steps is None else batch.allocated_at_ms


def _is_unfinished(batch: BatchRow) -> bool:
    return batch.state in UNFINISHED and batch.steps is None and not batch.built


def check_replays(snapshot: StreamSnapshot) -> Iterator[Finding]:
    """Check that completed replays have a record of success for all outputs."""
    for row in snapshot.replays:
        newest = snapshot.outputs.get((row.batch_time_ms, row.target), {})
        missing = [output for output in row.outputs if not is_recorded(newest.get(output))]
        name = f"{row.target} {time_text(row.batch_time_ms)}"
        if row.state is BatchState.COMPLETED and missing:
            what = f"It has completed, but {', '.join(missing)} has no record of success."
            yield Finding(Problem.REPLAY_STATE_WRONG, name, what)
