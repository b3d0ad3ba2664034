"""Checks the results of batches: their states against their outputs, their order, their slots, and the replays."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.clock import time_text
from headrace.fsck.findings import Finding, Problem
from headrace.ledger.batch_states import is_recorded
from headrace.ledger.models import BatchRow
from headrace.ledger.snapshots import StreamSnapshot
from headrace.ledger.states import BatchState

_UNFINISHED = (BatchState.ALLOCATED, BatchState.RUNNING, BatchState.FAILED)


def check_states(snapshot: StreamSnapshot) -> Iterator[Finding]:
    """Check that a batch's state agrees with its outputs' newest attempts and its running attempts."""
    running = {row.batch_time_ms for row in snapshot.running if not row.target}
    for batch in snapshot.batches:
        name = time_text(batch.batch_time_ms)
        for what in _state_problems(snapshot, batch, is_run=batch.batch_time_ms in running):
            yield Finding(Problem.BATCH_STATE_WRONG, name, what)
        if batch.checkpointed_at_ms is not None and (batch.steps is None or batch.checkpoint_uri is None):
            what = f"It has never completed, and is marked as being in checkpoint {batch.checkpoint_uri}."
            yield Finding(Problem.BATCH_STATE_WRONG, name, what)
        if batch.attempt < snapshot.newest_attempts.get(batch.batch_time_ms, 0):
            what = (
                f"Its newest attempt is {snapshot.newest_attempts[batch.batch_time_ms]}, and it says {batch.attempt}."
            )
            yield Finding(Problem.BATCH_STATE_WRONG, name, what)
        if batch.cleaned_at_ms is not None and not (
            batch.checkpointed_at_ms or batch.state in (BatchState.ABANDONED, BatchState.ABSORBED)
        ):
            what = f"It is {batch.state.value}, in no checkpoint, and marked as cleaned."
            yield Finding(Problem.CLEANED_TOO_EARLY, name, what)


def _state_problems(snapshot: StreamSnapshot, batch: BatchRow, *, is_run: bool) -> Iterator[str]:
    newest = snapshot.outputs.get((batch.batch_time_ms, ""), {})
    # An output that was removed from the stream does not count.
    steps = [step for step in batch.steps or () if step in snapshot.stream.outputs]
    missing = [step for step in steps if not is_recorded(newest.get(step))]
    if batch.state is BatchState.COMPLETED:
        if batch.completed_at_ms is None or batch.steps is None:
            yield "It has completed, and the ledger does not say when, or by which outputs."
        if missing:
            yield f"It has completed, and {', '.join(missing)} has no record of success."
    elif batch.state is BatchState.RUNNING and not is_run:
        yield "It is running, and no attempt runs it."
    elif batch.state is BatchState.FAILED and not is_run and newest and _all_recorded(snapshot, batch):
        yield "It has failed, and all its outputs have a record of success."
    if is_run and batch.state in (BatchState.COMPLETED, BatchState.ABANDONED, BatchState.ABSORBED):
        taken = {
            output for row in snapshot.running if row.batch_time_ms == batch.batch_time_ms for output in row.outputs
        }
        if batch.state is not BatchState.COMPLETED or taken & set(steps):
            yield f"It is {batch.state.value}, and an attempt runs it."


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
            what = f"It is still to be run, and {len(overtaken)} later ones were begun, {overtaken[0]} first."
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
            what = f"It has completed, and {', '.join(missing)} has no record of success."
            yield Finding(Problem.REPLAY_STATE_WRONG, name, what)
    for attempt in snapshot.running:
        recorded = snapshot.outputs.get((attempt.batch_time_ms, attempt.target), {})
        ahead = [row for row in recorded.values() if row.attempt > attempt.number and row.output_id in attempt.outputs]
        if ahead:
            what = f"Attempt {attempt.number} runs, and {ahead[0].output_id!r} was taken by attempt {ahead[0].attempt}."
            yield Finding(Problem.LEASE_WRONG, f"batch {time_text(attempt.batch_time_ms)}", what)
