"""What an operator can do, each with a preview in words and recorded as an event with the operator's name; and the dead
letters, which Elasticsearch holds.

A preview and its action make the same checks: if the preview says that the action is refused, the action answers 409.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any

from fastapi import APIRouter, Depends, HTTPException, Query, Request
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel, ConfigDict, Field

from headrace.clock import time_text
from headrace.elasticsearch.dead_letter_index import LetterFilter
from headrace.ledger import Ledger
from headrace.ledger.batches.tables import BatchRow
from headrace.ledger.states import AttemptState, BatchState, DesiredState, EventKind
from headrace.stream import Stream
from headrace.ui.api.airflow_side import Interval, Run
from headrace.ui.api.read_routes import own_run
from headrace.ui.api.requests import (
    ACTION_RESPONSES,
    SLOW,
    BatchTime,
    KnownStream,
    OperableDep,
    StreamDep,
    may_operate,
    refuse_forgery,
    time_ms,
)
from headrace.views.base import View
from headrace.views.batch_detail import run_ids
from headrace.views.dead_letters import DeadLetterPage, DeadLettersOf, NoSuchOutputError, elasticsearch_output

_ACTIVE = ("running", "queued")
# A person waits for the answer.
_ANSWER_SECONDS = 5.0


class Preview(View):
    """What an action would do, or why it is refused: the words of the confirmation."""

    will: str
    refused: str | None = None


class Done(View):
    """What an action has done, in words."""

    done: str


class Reason(BaseModel):
    """The body of an action."""

    model_config = ConfigDict(extra="forbid")
    reason: str | None = Field(default=None, max_length=2000, examples=["The mapping is corrected."])


class AbandonBody(BaseModel):
    """Why a batch is abandoned. Nothing else explains the gap later."""

    model_config = ConfigDict(extra="forbid")
    reason: str = Field(min_length=1, max_length=2000)
    output: str | None = Field(default=None, description="Give up only this output of the batch; null: the batch.")


class RunBody(Reason):
    """How a batch is run again."""

    outputs: tuple[str, ...] | None = Field(default=None, description="Only these outputs; null: all of them.")


class ReplayBody(Reason):
    """Where a batch is replayed to."""

    target: str = Field(description="The id of a replay DAG of the stream.", examples=["orders_replay_v2"])


class DeadLetterReplayBody(Reason):
    """Which dead letters are indexed again."""

    output: str
    limit: int = Field(default=1000, ge=1, le=10_000)


reads = APIRouter(tags=["actions"])
"""Previews and dead letters: for those who may read the stream."""
writes = APIRouter(tags=["actions"], dependencies=[Depends(refuse_forgery)], responses=ACTION_RESPONSES)
"""Actions: for those who may change the stream's batch DAG."""

OutputId = Annotated[str | None, Query(description="Needed if the stream has several Elasticsearch outputs.")]


def _shown(stream: KnownStream, intent: Preview) -> Preview:
    """The preview for this caller, who may be refused the action as such."""
    return intent if stream.may_operate else intent.model_copy(update={"refused": stream.not_operable})


def _refuse(intent: Preview) -> None:
    """Raise 409 if the action is refused."""
    if intent.refused is not None:
        raise HTTPException(409, intent.refused)


def _audit(stream: KnownStream, action: str, *, batch_time_ms: int | None = None, **details: Any) -> None:
    """Record who did what as an event of the stream."""
    payload = {"action": action, "by": stream.caller.name, **{k: v for k, v in details.items() if v is not None}}
    stream.ask(
        lambda ledger: ledger.events.append(
            stream.name, EventKind.OPERATOR_ACTION, payload, batch_time_ms=batch_time_ms
        )
    )


# -- the stream --------------------------------------------------------------------------------------------------------


@reads.get("/streams/{name}/stop/preview", summary="Say what stopping will do")
def preview_stop(stream: StreamDep) -> Preview:
    """In words, or why it is refused."""
    return _shown(stream, _stop_intent(stream))


@writes.post("/streams/{name}/stop", summary="Stop a stream gracefully")
def stop(stream: OperableDep, body: Reason) -> Done:
    """The receivers store what they have read, then they end. Batches go on."""
    _refuse(_stop_intent(stream))
    by = stream.caller.name

    def act(ledger: Ledger) -> None:
        ledger.streams.set_desired_state(stream.name, DesiredState.STOPPED, by=by, reason=body.reason)
        ledger.jobs.request_stop(stream.name, f"{by}: {body.reason or 'stopped on the page'}")

    stream.ask(act)
    return Done(done=f"{stream.name} is asked to stop: its receivers store what they have read, then they end.")


@reads.get("/streams/{name}/start/preview", summary="Say what starting will do")
def preview_start(stream: StreamDep) -> Preview:
    """In words, or why it is refused."""
    return _shown(stream, _start_intent(stream))


@writes.post("/streams/{name}/start", summary="Let a stopped stream run again")
def start(stream: OperableDep, body: Reason) -> Done:
    """The receiver DAG starts a receiver job, which continues at the ledger's positions."""
    intent = _start_intent(stream)
    _refuse(intent)
    by, running = stream.caller.name, DesiredState.RUNNING
    stream.ask(lambda ledger: ledger.streams.set_desired_state(stream.name, running, by=by, reason=body.reason))
    return Done(done=f"{stream.name} is to run. {intent.will}")


def _stop_intent(stream: KnownStream) -> Preview:
    desired, alive = stream.ask(lambda ledger: _wanted(ledger, stream.name))
    will = (
        f"The receivers of {stream.name} store what they have read, then they end. Batches go on until all stored "
        "records are written. Kafka keeps everything that comes later."
    )
    stopped = desired is DesiredState.STOPPED and not alive
    return Preview(will=will, refused=f"{stream.name} is stopped already." if stopped else None)


def _start_intent(stream: KnownStream) -> Preview:
    desired, _ = stream.ask(lambda ledger: _wanted(ledger, stream.name))
    dag_id = stream.place.receiver_dag_id
    facts = stream.airflow.facts((dag_id,)).get(dag_id)
    will = f"A run of {dag_id} starts a receiver job, which continues at the positions in the ledger."
    if facts is not None and facts.paused:
        will += f" The DAG {dag_id} is paused in Airflow: unpause it too, or nothing starts."
    running = desired is DesiredState.RUNNING
    return Preview(will=will, refused=f"{stream.name} is not stopped." if running else None)


def _wanted(ledger: Ledger, name: str) -> tuple[DesiredState, bool]:
    job = ledger.jobs.current(name)
    return ledger.streams.get(name).desired_state, job is not None and job.alive(ledger.now_ms())


# -- one batch ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _BatchNow:
    """A batch with its run. ``running``: a live attempt runs it. ``removed``: the ledger had it once.

    ``completed_by``: the runs that have completed an output of it.
    """

    interval_ms: int
    batch: BatchRow | None = None
    run: Run | None = None
    running: bool = False
    source: str | None = None
    removed: bool = False
    completed_by: frozenset[str | None] = frozenset()

    @property
    def run_to_clear(self) -> Run | None:
        """The run that runs the whole batch again if it is cleared: one repeats only what it has completed itself, and
        leaves outputs alone that it was not asked for. Parameters of its own belong to it until the batch is complete.
        """
        if self.run is None or self.run.conf.get("outputs"):
            return None
        if self.batch is None or self.batch.state is not BatchState.COMPLETED:
            return self.run
        repeats = self.run.run_id in self.completed_by and not self.run.conf.get("parameters")
        return self.run if repeats else None


def _batch_now(stream: KnownStream, batch_time_ms: int) -> _BatchNow:
    def read(ledger: Ledger) -> tuple[_BatchNow, tuple[str, ...]]:
        row = ledger.streams.get(stream.name)
        batch = ledger.batches.find(stream.name, batch_time_ms)
        if batch is None:
            return _BatchNow(row.batch_interval_ms, removed=row.has_removed(batch_time_ms)), ()
        attempts = ledger.attempts.of_batch(stream.name, batch_time_ms)
        now_ms = ledger.now_ms()
        history = ledger.attempts.output_history(stream.name, batch_time_ms)
        done = {row.attempt for row in history if row.state is AttemptState.COMPLETED}
        origin = ledger.batches.origins(stream.name, [batch_time_ms]).get(batch_time_ms)
        now = _BatchNow(
            row.batch_interval_ms,
            batch,
            running=any(attempt.alive(now_ms) and not attempt.target for attempt in attempts),
            source=None if origin is None else origin.source,
            completed_by=frozenset(attempt.run_id for attempt in attempts if attempt.number in done),
        )
        return now, run_ids(ledger, batch, attempts)

    now, known_runs = stream.ask(read)
    return now if now.batch is None else replace(now, run=own_run(stream, batch_time_ms, known_runs))


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


@reads.get("/streams/{name}/batches/{batch_time}/run/preview", summary="Say what running a batch again will do")
def preview_run(
    stream: StreamDep,
    batch_time: BatchTime,
    outputs: Annotated[list[str] | None, Query(description="Only these outputs.")] = None,
) -> Preview:
    """In words, or why it is refused."""
    batch_time_ms = time_ms(batch_time, "batch_time")
    intent = _run_intent(stream, batch_time_ms, _batch_now(stream, batch_time_ms), tuple(outputs or ()))
    return _shown(stream, intent)


@writes.post("/streams/{name}/batches/{batch_time}/run", summary="Run a batch again")
async def run(request: Request, stream: OperableDep, batch_time: BatchTime, body: RunBody) -> Done:
    """Clears its Airflow run. Triggers one if it has none, or none that would run all of it again, or if only some
    outputs are to be written again."""
    batch_time_ms = time_ms(batch_time, "batch_time")
    at, dag_id, outputs = time_text(batch_time_ms), stream.place.batch_dag_id, body.outputs
    now = await run_in_threadpool(_batch_now, stream, batch_time_ms)
    _refuse(await run_in_threadpool(_run_intent, stream, batch_time_ms, now, outputs or ()))
    cleared = None if outputs else now.run_to_clear
    if cleared is not None:
        await stream.airflow.clear(request, cleared, reason=body.reason)
        done = f"Run {cleared.run_id} of {dag_id} is cleared: Airflow runs batch {at} again."
    else:
        conf = {"reprocess": True, **({"outputs": list(outputs)} if outputs else {})}
        run = await stream.airflow.trigger(request, dag_id, Interval(batch_time_ms, now.interval_ms), conf)
        done = f"Run {run.run_id} of {dag_id} is {run.state}: it runs batch {at} again."
    await run_in_threadpool(_audit, stream, "run", batch_time_ms=batch_time_ms, reason=body.reason, outputs=outputs)
    return Done(done=done)


def _run_intent(stream: KnownStream, batch_time_ms: int, now: _BatchNow, outputs: tuple[str, ...]) -> Preview:
    batch, dag_id, time = now.batch, stream.place.batch_dag_id, time_text(batch_time_ms)
    what = f"outputs {', '.join(outputs)} of batch {time}" if outputs else f"batch {time}"
    cleared = None if outputs else now.run_to_clear
    how = f"a run of {dag_id} starts" if cleared is None else f"run {cleared.run_id} of {dag_id} is cleared"
    will = f"{how[0].upper()}{how[1:]}, and {what} is run again"
    if batch is not None:
        source = "Kafka, by its offset ranges" if now.source == "kafka" else "the log"
        will += f" with the same {batch.records:,} records, read from {source}"
    will += ". A document that is in the index already is not written twice."
    facts = stream.airflow.facts((dag_id,)).get(dag_id)
    if facts is not None and facts.paused:
        will += f" The DAG {dag_id} is paused in Airflow: nothing runs before it is unpaused."
    return Preview(will=will, refused=_not_again(now, batch_time_ms))


@reads.get("/streams/{name}/batches/{batch_time}/abandon/preview", summary="Say what abandoning a batch will do")
def preview_abandon(
    stream: StreamDep,
    batch_time: BatchTime,
    output: Annotated[str | None, Query(description="Only this output of the batch.")] = None,
) -> Preview:
    """In words, or why it is refused."""
    return _shown(stream, _abandon_intent(stream, time_ms(batch_time, "batch_time"), output))


@writes.post("/streams/{name}/batches/{batch_time}/abandon", summary="Abandon a batch that can never succeed")
def abandon(stream: OperableDep, batch_time: BatchTime, body: AbandonBody) -> Done:
    """Its records become a gap, or with ``output`` they are not written there. This is final."""
    output, reason = body.output, body.reason.strip()
    if not reason:
        raise HTTPException(422, "Give a reason; nothing else will explain the gap later.")
    batch_time_ms = time_ms(batch_time, "batch_time")
    _refuse(_abandon_intent(stream, batch_time_ms, output))
    by, at = stream.caller.name, time_text(batch_time_ms)

    # The ledger makes the checks again, under the stream's lock.
    def act(ledger: Ledger) -> BatchRow:
        if output is None:
            return ledger.batches.abandon(stream.name, batch_time_ms, reason, by=by)
        step = ledger.streams.get(stream.name).step_of(output)
        return ledger.batches.abandon_output(stream.name, batch_time_ms, step, reason, by=by)

    batch = stream.ask(act)
    if output is None:
        return Done(done=f"Batch {at} is abandoned: {batch.records:,} records are a gap now.")
    return Done(done=f"Output {output} of batch {at} is given up: the batch is {batch.state.value} now.")


def _abandon_intent(stream: KnownStream, batch_time_ms: int, output: str | None) -> Preview:
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
        return Preview(will=will, refused=_not_again(now, batch_time_ms))
    if batch.state in (BatchState.COMPLETED, BatchState.ABSORBED, BatchState.ABANDONED):
        return Preview(will=will, refused=f"Batch {time} is {batch.state.value}.")
    if output is not None:
        row = stream.ask(lambda ledger: ledger.streams.get(stream.name))
        needed = row.step_of(output) in batch.needs(row.outputs)
        return Preview(will=will, refused=None if needed else f"Batch {time} needs no output {output}.")
    if batch.steps is not None:
        return Preview(will=will, refused=f"Batch {time} has completed before, so its records are no gap.")
    return Preview(will=will)


@reads.get("/streams/{name}/batches/{batch_time}/replay/preview", summary="Say what replaying a batch will do")
def preview_replay(
    stream: StreamDep,
    batch_time: BatchTime,
    target: Annotated[str, Query(description="The id of a replay DAG of the stream.")],
) -> Preview:
    """In words, or why it is refused."""
    return _shown(stream, _replay_intent(stream, time_ms(batch_time, "batch_time"), target))


@writes.post("/streams/{name}/batches/{batch_time}/replay", summary="Replay a batch into another place")
async def replay(request: Request, stream: OperableDep, batch_time: BatchTime, body: ReplayBody) -> Done:
    """Triggers a replay DAG of the stream for the batch time."""
    batch_time_ms, target = time_ms(batch_time, "batch_time"), body.target
    _refuse(await run_in_threadpool(_replay_intent, stream, batch_time_ms, target))
    row = await run_in_threadpool(stream.ask, lambda ledger: ledger.streams.get(stream.name))
    interval = Interval(batch_time_ms, row.batch_interval_ms)
    run = await stream.airflow.trigger(request, target, interval, {})
    await run_in_threadpool(_audit, stream, "replay", batch_time_ms=batch_time_ms, reason=body.reason, target=target)
    return Done(done=f"Run {run.run_id} of {target} is {run.state}: it replays batch {time_text(batch_time_ms)}.")


def _replay_intent(stream: KnownStream, batch_time_ms: int, target: str) -> Preview:
    now = _batch_now(stream, batch_time_ms)
    will = (
        f"A run of {target} writes batch {time_text(batch_time_ms)} into the places of that replay, with the same "
        f"{0 if now.batch is None else now.batch.records:,} records. The stream itself goes on unchanged. If the "
        "replay has completed this batch before, nothing is written."
    )
    refused = _no_replay(stream, target)
    if refused is None and now.batch is not None and now.batch.state is not BatchState.COMPLETED:
        refused = f"Batch {time_text(batch_time_ms)} is {now.batch.state.value}: only a completed one is replayed."
    return Preview(will=will, refused=refused or (_not_again(now, batch_time_ms) if now.batch is None else None))


def _no_replay(stream: KnownStream, target: str) -> str | None:
    known = stream.place.replay_dag_ids
    if target not in known:
        there = f"it has {', '.join(known)}" if known else "it has none; headrace.dags.factories makes one"
        return f"{target!r} is no replay DAG of {stream.name}: {there}."
    if not may_operate(stream.airflow, stream.caller, target):
        return f"{stream.caller.name} may not start runs of the DAG {target}."
    return None


# -- dead letters ------------------------------------------------------------------------------------------------------


@reads.get("/streams/{name}/dead-letters", summary="List an output's dead letters", dependencies=SLOW)
def list_dead_letters(
    stream: StreamDep, output: OutputId = None, limit: Annotated[int, Query(ge=1, le=500)] = 50
) -> DeadLetterPage:
    """Those that were not replayed, the newest batch first, from Elasticsearch."""
    return _letters(stream, output).page(limit)


@reads.get(
    "/streams/{name}/dead-letters/replay/preview", summary="Say what replaying dead letters will do", dependencies=SLOW
)
def preview_letters(
    stream: StreamDep, output: OutputId = None, limit: Annotated[int, Query(ge=1, le=10_000)] = 1000
) -> Preview:
    """In words, or why it is refused."""
    letters = _letters(stream, output)
    plan = letters.plan(LetterFilter(), limit)
    number = plan.replayable + plan.left
    will = (
        f"The documents of {plan.replayable:,} of {number:,} dead letters of output {letters.output.id} are "
        f"indexed again into {letters.output.index_text}. A document or newer version that is in the index stays."
    )
    will += "".join(f" {left:,} are left: {why}." for why, left in plan.left_because.items())
    refused = None if plan.replayable else "There is no dead letter that can be indexed again."
    if refused is not None and number == limit:
        refused = (
            f"None of the newest {limit:,} dead letters can be indexed again. `headrace dead-letters replay "
            f"{stream.name}` checks all of them."
        )
    return _shown(stream, Preview(will=will, refused=refused))


@writes.post("/streams/{name}/dead-letters/replay", summary="Index dead letters again", dependencies=SLOW)
def replay_letters(stream: OperableDep, body: DeadLetterReplayBody) -> Done:
    """After the index was corrected. After the transform was corrected, run the batches again instead."""
    counts = _letters(stream, body.output).replay(LetterFilter(), body.limit)
    numbers = {"letters": counts.letters, "replayed": counts.replayed, "refused": counts.refused, "left": counts.left}
    _audit(stream, "replay dead letters", reason=body.reason, output=body.output, **numbers)
    why = "; ".join(f"{number:,} {text}" for text, number in (counts.refused_because + counts.left_because).items())
    return Done(
        done=f"{counts.replayed:,} of {counts.letters:,} dead letters are indexed; {counts.refused:,} were refused "
        f"again, {counts.left:,} are left." + (f" Because: {why}." if why else "")
    )


def _letters(stream: KnownStream, output: str | None) -> DeadLettersOf:
    definition = stream.ask(lambda ledger: ledger.streams.get(stream.name).definition)
    try:
        declared = elasticsearch_output(Stream.from_json(definition), output)
    except NoSuchOutputError as error:
        raise HTTPException(404, str(error)) from error
    environ: dict[str, str] = {}
    for conn_id in declared.connection_ids:
        environ |= stream.airflow.connection(conn_id)
    return DeadLettersOf(
        stream.name,
        declared,
        max_retry_seconds=_ANSWER_SECONDS,
        timeout_seconds=_ANSWER_SECONDS,
        environ=environ or None,
    )
