"""The actions of an operator. Each has a preview in words, and is recorded with the operator's name as an event.

A preview and its action make the same checks: if the preview says that the action is refused, the action answers 409.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastapi import HTTPException, Request

from headrace.clock import time_text
from headrace.ledger import Ledger
from headrace.ledger.batch_tables import BatchRow
from headrace.ledger.states import BatchState, DesiredState, EventKind
from headrace.ui.api.airflow_side import Interval, Run
from headrace.ui.api.read_routes import own_run
from headrace.ui.api.requests import KnownStream, may_operate
from headrace.views.batch_detail import run_ids

_ACTIVE = ("running", "queued")


@dataclass(frozen=True, slots=True)
class Intent:
    """What an action will do, in words, or why it is refused."""

    will: str
    refused: str | None = None


@dataclass(frozen=True, slots=True)
class _BatchNow:
    """A batch with its run. ``running``: a live attempt runs it."""

    batch: BatchRow | None
    run: Run | None
    interval_ms: int
    running: bool
    source: str | None
    removed: bool


def not_allowed(stream: KnownStream) -> str | None:
    """Why the caller may not act on the stream, None if they may."""
    if stream.may_operate:
        return None
    return stream.not_operable


def refuse(intent: Intent) -> None:
    """Raise 409 if the action is refused."""
    if intent.refused is not None:
        raise HTTPException(409, intent.refused)


# -- the stream --------------------------------------------------------------------------------------------------------


def stop_intent(stream: KnownStream) -> Intent:
    """What `stop` will do."""
    desired, alive = stream.ask(lambda ledger: _wanted(ledger, stream.name))
    will = (
        f"The receivers of {stream.name} store what they have read, then they end. Batches go on until all stored "
        "records are written. Kafka keeps everything that comes later."
    )
    if desired is DesiredState.STOPPED and not alive:
        return Intent(will, f"{stream.name} is stopped already.")
    return Intent(will)


def stop(stream: KnownStream, reason: str | None) -> str:
    """Stop the stream gracefully."""
    refuse(stop_intent(stream))
    by = stream.caller.name

    def act(ledger: Ledger) -> None:
        ledger.streams.set_desired_state(stream.name, DesiredState.STOPPED, by=by, reason=reason)
        ledger.jobs.request_stop(stream.name, f"{by}: {reason or 'stopped on the page'}")

    stream.ask(act)
    return f"{stream.name} is asked to stop: its receivers store what they have read, then they end."


def start_intent(stream: KnownStream) -> Intent:
    """What `start` will do."""
    desired, _ = stream.ask(lambda ledger: _wanted(ledger, stream.name))
    dag_id = stream.place.receiver_dag_id
    facts = stream.airflow.facts((dag_id,)).get(dag_id)
    will = f"A run of {dag_id} starts a receiver job, which continues at the positions in the ledger."
    if facts is not None and facts.paused:
        will += f" The DAG {dag_id} is paused in Airflow: unpause it too, or nothing starts."
    if desired is DesiredState.RUNNING:
        return Intent(will, f"{stream.name} is not stopped.")
    return Intent(will)


def start(stream: KnownStream, reason: str | None) -> str:
    """Let a stopped stream run again."""
    intent = start_intent(stream)
    refuse(intent)
    by = stream.caller.name
    stream.ask(lambda ledger: ledger.streams.set_desired_state(stream.name, DesiredState.RUNNING, by=by, reason=reason))
    return f"{stream.name} is to run. {intent.will}"


def _wanted(ledger: Ledger, name: str) -> tuple[DesiredState, bool]:
    job = ledger.jobs.current(name)
    return ledger.streams.get(name).desired_state, job is not None and job.alive(ledger.now_ms())


# -- one batch ---------------------------------------------------------------------------------------------------------


def run_intent(stream: KnownStream, batch_time_ms: int, outputs: tuple[str, ...] | None = None) -> Intent:
    """What `run_again` will do."""
    return _run_intent(stream, batch_time_ms, _batch_now(stream, batch_time_ms), outputs)


async def run_again(
    request: Request, stream: KnownStream, batch_time_ms: int, now: _BatchNow, body: dict[str, Any]
) -> str:
    """Clear the batch's run, or trigger one if it has none or only some outputs are wanted."""
    dag_id, outputs, reason = stream.place.batch_dag_id, body.get("outputs"), body.get("reason")
    if now.run is not None and not outputs:
        await stream.airflow.clear(request, now.run, reason=reason)
        return f"Run {now.run.run_id} of {dag_id} is cleared: Airflow runs batch {time_text(batch_time_ms)} again."
    conf = {"reprocess": True, **({"outputs": list(outputs)} if outputs else {})}
    run = await stream.airflow.trigger(request, dag_id, Interval(batch_time_ms, now.interval_ms), conf)
    return f"Run {run.run_id} of {dag_id} is {run.state}: it runs batch {time_text(batch_time_ms)} again."


def checked_run(stream: KnownStream, batch_time_ms: int, outputs: tuple[str, ...] | None) -> _BatchNow:
    """Check that the batch can be run again, and return it; 409 if not."""
    now = _batch_now(stream, batch_time_ms)
    refuse(_run_intent(stream, batch_time_ms, now, outputs))
    return now


def _run_intent(stream: KnownStream, batch_time_ms: int, now: _BatchNow, outputs: tuple[str, ...] | None) -> Intent:
    batch, dag_id, time = now.batch, stream.place.batch_dag_id, time_text(batch_time_ms)
    what = f"outputs {', '.join(outputs)} of batch {time}" if outputs else f"batch {time}"
    how = f"run {now.run.run_id} of {dag_id} is cleared" if now.run and not outputs else f"a run of {dag_id} starts"
    will = f"{how[0].upper()}{how[1:]}, and {what} is run again"
    if batch is not None:
        source = "Kafka, by its offset ranges" if now.source == "kafka" else "the log"
        will += f" with the same {batch.records:,} records, read from {source}"
    will += ". A document that is in the index already is not written twice."
    facts = stream.airflow.facts((dag_id,)).get(dag_id)
    if facts is not None and facts.paused:
        will += f" The DAG {dag_id} is paused in Airflow: nothing runs before it is unpaused."
    return Intent(will, _not_again(now, batch_time_ms))


def _not_again(now: _BatchNow, batch_time_ms: int) -> str | None:
    """Why a batch cannot be run again or replayed now."""
    batch, time = now.batch, time_text(batch_time_ms)
    if batch is None:
        gone = f"Batch {time} was removed: the stream keeps its batches for limits.history."
        missing = f"There is no batch {time} yet: the next run of the batch DAG allocates it if there are records."
        return gone if now.removed else missing
    if batch.state is BatchState.ABSORBED:
        return f"Batch {time_text(batch.absorbed_by_ms)} took it over: run that one."
    if batch.state is BatchState.ABANDONED:
        return f"Batch {time} was abandoned, which is final."
    if now.running:
        return f"Batch {time} is being run at this moment."
    if now.run is not None and now.run.state in _ACTIVE:
        return f"Its run {now.run.run_id} is {now.run.state}. Wait for it, or clear its tasks in Airflow."
    return None


def abandon_intent(stream: KnownStream, batch_time_ms: int, output: str | None = None) -> Intent:
    """What `abandon` will do."""
    now = _batch_now(stream, batch_time_ms)
    batch, time = now.batch, time_text(batch_time_ms)
    records = 0 if batch is None else batch.records
    will = (
        f"Batch {time} is abandoned for good. Its {records:,} records become a gap: they are not written, and their "
        "part of the log may be deleted. Other batches no longer wait for it. This cannot be undone."
    )
    if output is not None:
        will = (
            f"Output {output} of batch {time} is given up for good: its {records:,} records are not written there. The "
            "batch completes without it. This cannot be undone."
        )
    if batch is None:
        return Intent(will, _not_again(now, batch_time_ms))
    if batch.state in (BatchState.COMPLETED, BatchState.ABSORBED, BatchState.ABANDONED):
        return Intent(will, f"Batch {time} is {batch.state.value}.")
    if output is not None:
        row = stream.ask(lambda ledger: ledger.streams.get(stream.name))
        needed = row.step_of(output) in batch.needs(row.outputs)
        return Intent(will, None if needed else f"Batch {time} needs no output {output}.")
    if batch.steps is not None:
        return Intent(will, f"Batch {time} has completed before, so its records are no gap.")
    return Intent(will)


def abandon(stream: KnownStream, batch_time_ms: int, reason: str, output: str | None = None) -> str:
    """Abandon a batch, or one output of it. The ledger makes the checks again, under the stream's lock."""
    refuse(abandon_intent(stream, batch_time_ms, output))
    by, time = stream.caller.name, time_text(batch_time_ms)
    if output is None:
        batch = stream.ask(lambda ledger: ledger.batches.abandon(stream.name, batch_time_ms, reason, by=by))
        return f"Batch {time} is abandoned: {batch.records:,} records are a gap now."

    def give_up(ledger: Ledger) -> BatchRow:
        step = ledger.streams.get(stream.name).step_of(output)
        return ledger.batches.abandon_output(stream.name, batch_time_ms, step, reason, by=by)

    return f"Output {output} of batch {time} is given up: the batch is {stream.ask(give_up).state.value} now."


def replay_intent(stream: KnownStream, batch_time_ms: int, target: str) -> Intent:
    """What `replay` will do."""
    now = _batch_now(stream, batch_time_ms)
    will = (
        f"A run of {target} writes batch {time_text(batch_time_ms)} into the places of that replay, with the same "
        f"{0 if now.batch is None else now.batch.records:,} records. The stream itself goes on unchanged. If the "
        "replay has completed this batch before, nothing is written."
    )
    refused = _no_replay(stream, target)
    if refused is None and now.batch is not None and now.batch.state is not BatchState.COMPLETED:
        refused = f"Batch {time_text(batch_time_ms)} is {now.batch.state.value}: only a completed one is replayed."
    return Intent(will, refused or (_not_again(now, batch_time_ms) if now.batch is None else None))


async def replay(request: Request, stream: KnownStream, batch_time_ms: int, target: str, interval_ms: int) -> str:
    """Trigger the replay DAG for one batch time."""
    run = await stream.airflow.trigger(request, target, Interval(batch_time_ms, interval_ms), {})
    return f"Run {run.run_id} of {target} is {run.state}: it replays batch {time_text(batch_time_ms)}."


def interval_of(stream: KnownStream) -> int:
    """The stream's batch interval in milliseconds."""
    return stream.ask(lambda ledger: ledger.streams.get(stream.name).batch_interval_ms)


def _no_replay(stream: KnownStream, target: str) -> str | None:
    known = stream.place.replay_dag_ids
    if target not in known:
        there = f"it has {', '.join(known)}" if known else "it has none; headrace.dags.replay_dag makes one"
        return f"{target!r} is no replay DAG of {stream.name}: {there}."
    if not may_operate(stream.airflow, stream.caller, target):
        return f"{stream.caller.name} may not start runs of the DAG {target}."
    return None


def audit(stream: KnownStream, action: str, *, batch_time_ms: int | None = None, **details: Any) -> None:
    """Record who did what as an event of the stream."""
    payload = {"action": action, "by": stream.caller.name, **{k: v for k, v in details.items() if v is not None}}
    stream.ask(
        lambda ledger: ledger.events.append(
            stream.name, EventKind.OPERATOR_ACTION, payload, batch_time_ms=batch_time_ms
        )
    )


def _batch_now(stream: KnownStream, batch_time_ms: int) -> _BatchNow:
    def read(ledger: Ledger) -> tuple[Any, ...]:
        row = ledger.streams.get(stream.name)
        batch = ledger.batches.find(stream.name, batch_time_ms)
        if batch is None:
            return None, (), row.batch_interval_ms, False, None, row.has_removed(batch_time_ms)
        attempts = ledger.attempts.of_batch(stream.name, batch_time_ms)
        now_ms = ledger.now_ms()
        origin = ledger.batches.origins(stream.name, [batch_time_ms]).get(batch_time_ms)
        return (
            batch,
            run_ids(ledger, batch, attempts),
            row.batch_interval_ms,
            any(attempt.alive(now_ms) and not attempt.target for attempt in attempts),
            None if origin is None else origin.source,
            False,
        )

    batch, known_runs, interval_ms, running, source, removed = stream.ask(read)
    run = None if batch is None else own_run(stream, batch_time_ms, known_runs)
    return _BatchNow(batch, run, interval_ms, running, source, removed)
