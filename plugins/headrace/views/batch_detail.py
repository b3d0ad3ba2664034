"""One batch in detail: its ranges and blocks, its attempts, what each output wrote, and its events."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headrace.clock import time_text
from headrace.errors import TAKEN_UP, WARNING
from headrace.ledger import Ledger
from headrace.ledger.batch_tables import AttemptRow, BatchOutputRow, BatchRow
from headrace.ledger.errors import BatchNotFoundError
from headrace.ledger.states import AttemptState, BatchState
from headrace.ledger.tables import StreamRow
from headrace.views.batches import BatchLine, batch_line, last_error
from headrace.views.history import Event, event

BLOCKS = 100
"""How many blocks are listed."""
_EVENTS = 200


@dataclass(frozen=True, slots=True)
class Range:
    """The offsets ``[from_offset, until_offset)`` of a partition in the batch."""

    input: str
    topic: str
    partition: int
    from_offset: int
    until_offset: int
    records: int
    blocks: int


@dataclass(frozen=True, slots=True)
class Block:
    """A block that is still in the log."""

    id: int
    input: str
    receiver: int
    epoch: int
    sequence: int
    cut_at_ms: int
    records: int
    bytes: int
    segment: str


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attempt; ``target`` is the replay that it belongs to, None for the batch itself. ``run_id`` is Airflow's:
    the batch's own run, unless ``taken_up``, when it is the run of a later batch."""

    number: int
    state: str
    holder: str
    way: str
    source: str
    target: str | None
    outputs: tuple[str, ...]
    started_at_ms: int
    ended_at_ms: int | None
    duration: float | None
    error: str | None
    warning: str | None
    code_version: str | None
    revision: int | None
    run_id: str | None
    taken_up: bool
    spark_ui: str | None


@dataclass(frozen=True, slots=True)
class Output:
    """The newest result of an output; "not written" without one, "abandoned" with the reason as its error."""

    id: str
    kind: str | None
    state: str
    counts: Mapping[str, Any]
    error: str | None
    retries: int
    recorded_at_ms: int | None
    attempt: int | None
    target: str | None


@dataclass(frozen=True, slots=True)
class BatchDetail:
    """A batch in detail. ``run_ids`` are the Airflow runs whose batch it is, the best known first. ``became``: see
    `became`."""

    line: BatchLine
    allocated_at_ms: int | None
    checkpointed_at_ms: int | None
    cleaned_at_ms: int | None
    absorbed_times_ms: tuple[int, ...]
    absorbed_by_ms: int | None
    interval: float
    ranges: tuple[Range, ...]
    blocks: tuple[Block, ...]
    block_count: int
    all_attempts: tuple[Attempt, ...]
    outputs: tuple[Output, ...]
    code_version: str | None
    revision: int | None
    manifest: str | None
    where: str | None
    events: tuple[Event, ...]
    run_ids: tuple[str, ...]
    became: str | None = None


def batch_detail(ledger: Ledger, stream_name: str, batch_time_ms: int) -> BatchDetail:
    """Read a batch.

    Raises:
        BatchNotFoundError: it was not allocated, or was removed with the stream's history; the text says which.
    """
    row = ledger.streams.get(stream_name)
    batch = ledger.batches.find(stream_name, batch_time_ms)
    if batch is None:
        raise BatchNotFoundError(stream_name, batch_time_ms)
    attempts = ledger.attempts.of_batch(stream_name, batch_time_ms)
    origin = ledger.batches.origins(stream_name, [batch_time_ms], abandoned=True).get(batch_time_ms)
    # Sums of the ledger, since the blocks' rows are deleted with the log.
    blocks = ledger.allocations.blocks_of(stream_name, batch_time_ms)
    return BatchDetail(
        line=batch_line(batch, error=last_error(ledger, batch)),
        allocated_at_ms=batch.allocated_at_ms,
        checkpointed_at_ms=batch.checkpointed_at_ms,
        cleaned_at_ms=batch.cleaned_at_ms,
        absorbed_times_ms=batch.absorbed,
        absorbed_by_ms=batch.absorbed_by_ms,
        interval=batch.interval_ms / 1000,
        ranges=_ranges(ledger, batch),
        blocks=tuple(
            Block(
                id=each.block_id,
                input=each.info.receiver.input_id,
                receiver=each.info.receiver.index,
                epoch=each.info.epoch,
                sequence=each.info.sequence,
                cut_at_ms=each.info.cut_time_ms,
                records=each.info.records,
                bytes=each.info.payload_bytes,
                segment=each.info.handle.segment,
            )
            for each in blocks[:BLOCKS]
        ),
        block_count=len(blocks),
        all_attempts=tuple(_attempt(each, row.id_of_step) for each in attempts),
        outputs=_outputs(ledger, row, batch, attempts),
        code_version=batch.code_version,
        revision=batch.revision,
        manifest=batch.manifest_uri or None,
        where=None if origin is None else origin.source,
        events=tuple(map(event, ledger.events.of_batch(stream_name, batch_time_ms)[-_EVENTS:])),
        run_ids=run_ids(ledger, batch, attempts),
        became=became(batch, attempts),
    )


def became(batch: BatchRow, attempts: Sequence[AttemptRow]) -> str | None:
    """Which run has completed a batch after the run of its last failed attempt; None if that is the same run.

    The run that failed stays failed in Airflow, which does not know of the other one.
    """
    own = [each for each in attempts if not each.target]
    failed = [each for each in own if each.state is AttemptState.FAILED]
    done = max(
        (each for each in own if each.state is AttemptState.COMPLETED),
        key=lambda each: each.ended_at_ms or 0,
        default=None,
    )
    if batch.state is not BatchState.COMPLETED or not failed or done is None or failed[-1].number > done.number:
        return None
    first, second = (each.attributes.get("run_id") or each.holder for each in (failed[-1], done))
    if first == second:
        return None
    at, then = time_text(failed[-1].ended_at_ms), time_text(done.ended_at_ms)
    return (
        f"The run {first} failed at {at}, and stays failed in Airflow. The run {second} completed the batch at {then}."
    )


def run_ids(ledger: Ledger, batch: BatchRow, attempts: Sequence[AttemptRow]) -> tuple[str, ...]:
    """The Airflow runs whose own batch it is: to which the ledger assigned it, or that made an attempt at it."""
    assigned = ledger.runs.of_batch(batch.stream, batch.batch_time_ms)
    own = [each for each in attempts if not each.target and not each.attributes.get(TAKEN_UP)]
    tried = [each.attributes["run_id"] for each in reversed(own) if each.attributes.get("run_id")]
    return tuple(dict.fromkeys([*assigned, *tried]))


def _ranges(ledger: Ledger, batch: BatchRow) -> tuple[Range, ...]:
    return tuple(
        Range(
            input=each.input_id,
            topic=each.partition.topic,
            partition=each.partition.partition,
            from_offset=each.from_offset,
            until_offset=each.until_offset,
            records=each.records,
            blocks=each.blocks,
        )
        for each in ledger.batches.inputs(batch.stream, batch.batch_time_ms)
    )


def _attempt(row: AttemptRow, ids: Mapping[str, str]) -> Attempt:
    return Attempt(
        number=row.number,
        state=row.state.value,
        holder=row.holder,
        way=row.way,
        source=row.source,
        target=row.target or None,
        outputs=tuple(ids.get(step, step) for step in row.outputs),
        started_at_ms=row.started_at_ms,
        ended_at_ms=row.ended_at_ms,
        duration=None if row.ended_at_ms is None else round((row.ended_at_ms - row.started_at_ms) / 1000, 3),
        error=row.error,
        warning=row.attributes.get(WARNING),
        code_version=row.code_version,
        revision=row.revision,
        run_id=row.attributes.get("run_id"),
        taken_up=bool(row.attributes.get(TAKEN_UP)),
        spark_ui=row.attributes.get("ui_url"),
    )


def _outputs(ledger: Ledger, row: StreamRow, batch: BatchRow, attempts: Sequence[AttemptRow]) -> tuple[Output, ...]:
    kinds, ids = _kinds(row.definition), row.id_of_step
    targets = dict.fromkeys(["", *(each.target for each in attempts)])
    found: list[Output] = []
    for target in targets:
        results = {
            each.output_id: each for each in ledger.attempts.outputs(batch.stream, batch.batch_time_ms, target=target)
        }
        given_up = {} if target else batch.abandoned_steps
        for step in dict.fromkeys([*(() if target else batch.needs(row.outputs)), *results, *given_up]):
            tries = [each for each in attempts if each.target == target and step in each.outputs]
            output = _output(ids.get(step, step), kinds, results.get(step), tries, target or None)
            if step in given_up and output.state in ("failed", "not written"):
                output = replace(output, state="abandoned", error=given_up[step])
            found.append(output)
    return tuple(found)


def _output(
    output_id: str,
    kinds: Mapping[str, str],
    result: BatchOutputRow | None,
    tries: Sequence[AttemptRow],
    target: str | None,
) -> Output:
    running = bool(tries) and tries[-1].state.value == "running"
    missing = "running" if running else "not written"
    return Output(
        id=output_id,
        kind=kinds.get(output_id),
        state=missing if running or result is None else result.state.value,
        counts={} if result is None else result.counts,
        error=None if result is None else result.error,
        retries=max(0, len(tries) - 1),
        recorded_at_ms=None if result is None else result.recorded_at_ms,
        attempt=None if result is None else result.attempt,
        target=target,
    )


def _kinds(definition: str) -> dict[str, str]:
    outputs = json.loads(definition).get("outputs") or ()
    return {each["id"]: each.get("kind", "") for each in outputs if "id" in each}
