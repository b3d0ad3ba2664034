"""The routes of what an operator does, each with a preview; and the dead letters, which Elasticsearch holds."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, HTTPException, Query, Request
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel, ConfigDict, Field

from headrace.connections import CONNECTION_PREFIX
from headrace.stream import Stream
from headrace.ui.api import actions
from headrace.ui.api.requests import (
    ACTION_RESPONSES,
    SLOW,
    BatchTime,
    KnownStream,
    OperableDep,
    StreamDep,
    refuse_forgery,
    time_ms,
)
from headrace.views.base import View
from headrace.views.dead_letters import DeadLetterPage, DeadLettersOf, NoSuchOutputError


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


def _preview(stream: KnownStream, intent: actions.Intent) -> Preview:
    return Preview(will=intent.will, refused=actions.not_allowed(stream) or intent.refused)


@reads.get("/streams/{name}/stop/preview", summary="Say what stopping will do")
def preview_stop(stream: StreamDep) -> Preview:
    """In words, or why it is refused."""
    return _preview(stream, actions.stop_intent(stream))


@writes.post("/streams/{name}/stop", summary="Stop a stream gracefully")
def stop(stream: OperableDep, body: Reason) -> Done:
    """The receivers store what they have read, then they end. Batches go on."""
    return Done(done=actions.stop(stream, body.reason))


@reads.get("/streams/{name}/start/preview", summary="Say what starting will do")
def preview_start(stream: StreamDep) -> Preview:
    """In words, or why it is refused."""
    return _preview(stream, actions.start_intent(stream))


@writes.post("/streams/{name}/start", summary="Let a stopped stream run again")
def start(stream: OperableDep, body: Reason) -> Done:
    """The receiver DAG starts a receiver job, which continues at the ledger's positions."""
    return Done(done=actions.start(stream, body.reason))


@reads.get("/streams/{name}/batches/{batch_time}/run/preview", summary="Say what running a batch again will do")
def preview_run(
    stream: StreamDep,
    batch_time: BatchTime,
    outputs: Annotated[list[str] | None, Query(description="Only these outputs.")] = None,
) -> Preview:
    """In words, or why it is refused."""
    wanted = tuple(outputs) if outputs else None
    return _preview(stream, actions.run_intent(stream, time_ms(batch_time, "batch_time"), wanted))


@writes.post("/streams/{name}/batches/{batch_time}/run", summary="Run a batch again")
async def run(request: Request, stream: OperableDep, batch_time: BatchTime, body: RunBody) -> Done:
    """Clears its Airflow run; triggers one if it has none, or if only some outputs are to be written again."""
    batch_time_ms = time_ms(batch_time, "batch_time")
    batch = await run_in_threadpool(actions.checked_run, stream, batch_time_ms, body.outputs)
    done = await actions.run_again(request, stream, batch_time_ms, batch, body.model_dump())
    await run_in_threadpool(
        actions.audit, stream, "run", batch_time_ms=batch_time_ms, reason=body.reason, outputs=body.outputs
    )
    return Done(done=done)


@reads.get("/streams/{name}/batches/{batch_time}/abandon/preview", summary="Say what abandoning a batch will do")
def preview_abandon(
    stream: StreamDep,
    batch_time: BatchTime,
    output: Annotated[str | None, Query(description="Only this output of the batch.")] = None,
) -> Preview:
    """In words, or why it is refused."""
    return _preview(stream, actions.abandon_intent(stream, time_ms(batch_time, "batch_time"), output))


@writes.post("/streams/{name}/batches/{batch_time}/abandon", summary="Abandon a batch that can never succeed")
def abandon(stream: OperableDep, batch_time: BatchTime, body: AbandonBody) -> Done:
    """Its records become a gap, or with ``output`` they are not written there. This is final."""
    if not body.reason.strip():
        raise HTTPException(422, "Give a reason; nothing else will explain the gap later.")
    return Done(done=actions.abandon(stream, time_ms(batch_time, "batch_time"), body.reason.strip(), body.output))


@reads.get("/streams/{name}/batches/{batch_time}/replay/preview", summary="Say what replaying a batch will do")
def preview_replay(
    stream: StreamDep,
    batch_time: BatchTime,
    target: Annotated[str, Query(description="The id of a replay DAG of the stream.")],
) -> Preview:
    """In words, or why it is refused."""
    return _preview(stream, actions.replay_intent(stream, time_ms(batch_time, "batch_time"), target))


@writes.post("/streams/{name}/batches/{batch_time}/replay", summary="Replay a batch into another place")
async def replay(request: Request, stream: OperableDep, batch_time: BatchTime, body: ReplayBody) -> Done:
    """Triggers a replay DAG of the stream for the batch time."""
    batch_time_ms = time_ms(batch_time, "batch_time")
    intent = await run_in_threadpool(actions.replay_intent, stream, batch_time_ms, body.target)
    actions.refuse(intent)
    interval_ms = await run_in_threadpool(actions.interval_of, stream)
    done = await actions.replay(request, stream, batch_time_ms, body.target, interval_ms)
    await run_in_threadpool(
        actions.audit, stream, "replay", batch_time_ms=batch_time_ms, reason=body.reason, target=body.target
    )
    return Done(done=done)


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
    plan = letters.plan(limit)
    will = (
        f"The documents of {plan.replayable:,} of {plan.letters:,} dead letters of output {letters.output.id} are "
        f"indexed again into {letters.output.index}. A document or newer version that is in the index stays."
    )
    will += "".join(f" {number:,} are left: {why}." for why, number in plan.left_because.items())
    refused = None if plan.replayable else "There is no dead letter that can be indexed again."
    if refused is not None and plan.letters == limit:
        refused = (
            f"None of the newest {limit:,} dead letters can be indexed again. `headrace dead-letters replay "
            f"{stream.name}` looks at all of them."
        )
    return _preview(stream, actions.Intent(will, refused))


@writes.post("/streams/{name}/dead-letters/replay", summary="Index dead letters again", dependencies=SLOW)
def replay_letters(stream: OperableDep, body: DeadLetterReplayBody) -> Done:
    """After the index was corrected. After the transform was corrected, run the batches again instead."""
    counts = _letters(stream, body.output).replay(body.limit)
    numbers = {"letters": counts.letters, "replayed": counts.replayed, "refused": counts.refused, "left": counts.left}
    actions.audit(stream, "replay dead letters", reason=body.reason, output=body.output, **numbers)
    why = "; ".join(f"{number:,} {text}" for text, number in (counts.refused_because + counts.left_because).items())
    return Done(
        done=f"{counts.replayed:,} of {counts.letters:,} dead letters are indexed; {counts.refused:,} were refused "
        f"again, {counts.left:,} are left." + (f" Because: {why}." if why else "")
    )


def _letters(stream: KnownStream, output: str | None) -> DeadLettersOf:
    definition = stream.ask(lambda ledger: ledger.streams.get(stream.name).definition)
    try:
        return DeadLettersOf(
            Stream.from_json(definition), output, lambda conn_id: stream.airflow.environ(CONNECTION_PREFIX + conn_id)
        )
    except NoSuchOutputError as error:
        raise HTTPException(404, str(error)) from error
