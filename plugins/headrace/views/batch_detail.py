"""One batch in detail: its ranges and blocks, its attempts, what each output wrote, and its events."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from headrace.batch.due_batches import NextTries
from headrace.clock import readable_seconds, time_text
from headrace.errors import RANGE, REPAIR, WARNING
from headrace.ledger import Ledger
from headrace.ledger.batches.tables import AttemptRow, BatchInputRow, BatchOrigin, BatchOutputRow, BatchRow
from headrace.ledger.errors import BatchNotFoundError
from headrace.ledger.states import UNFINISHED, AttemptState, BatchState
from headrace.ledger.tables import StreamRow
from headrace.views.base import ROWS, UNPUBLISHED, Time, View
from headrace.views.batches import BatchLine, batch_line, last_error, with_next_try
from headrace.views.history import Event, event

BLOCKS = 100
"""How many blocks are listed."""
_EVENTS = 200


@dataclass(frozen=True, slots=True)
class BatchRows:
    """The rows that a batch is shown by. ``outputs`` are its own, not those of its replays. ``origin`` is None if it
    cannot be run again."""

    batch: BatchRow
    origin: BatchOrigin | None
    inputs: tuple[BatchInputRow, ...]
    outputs: tuple[BatchOutputRow, ...]
    attempts: tuple[AttemptRow, ...]


class BatchRange(View):
    """The offsets ``[from_offset, until_offset)`` of one partition in a batch."""

    input: str
    topic: str
    partition: int
    from_offset: int
    until_offset: int
    records: int
    blocks: int


class Block(View):
    """A block that is still in the log."""

    id: int
    input: str
    receiver: int
    epoch: int
    sequence: int
    cut_at_ms: Time
    records: int
    bytes: int
    segment: str


class Attempt(View):
    """An attempt at a batch, or at its replay ``target``."""

    number: int
    state: str
    holder: str
    way: str
    source: str
    target: str | None
    outputs: tuple[str, ...]
    started_at_ms: Time
    ended_at_ms: Time | None
    duration: float | None
    error: str | None
    warning: str | None = None
    code_version: str | None
    revision: int | None
    links: Links | None = None
    # Airflow's run: the batch's own, unless ``by_repair``, when it is the run of a repair.
    run_id: Annotated[str | None, UNPUBLISHED]
    by_repair: Annotated[bool, UNPUBLISHED]
    spark_ui: Annotated[str | None, UNPUBLISHED]


class OutputResult(View):
    """The newest result of one output of a batch."""

    id: str
    kind: str | None
    state: str
    counts: dict[str, Any]
    error: str | None
    retries: int = Field(description="The number of its earlier attempts.")
    recorded_at_ms: Time | None = None
    attempt: int | None = None
    target: str | None = Field(default=None, description="The replay that wrote it, null for the stream itself.")
    throttled: str | None = Field(
        default=None, description="What held its requests back, as text: the server, or the output's ceiling."
    )
    revision: Annotated[int | None, UNPUBLISHED]
    code_version: Annotated[str | None, UNPUBLISHED]


class Links(View):
    """Addresses below Airflow's own (they begin with /), and Spark's. Null where there is none."""

    run: str | None = None
    logs: str | None = None
    spark_ui: str | None = None
    grid: str | None = None


class BatchDetail(BatchLine):
    """A batch: what it holds, its attempts, and what became of it in each output."""

    allocated_at_ms: Time | None
    checkpointed_at_ms: Time | None
    cleaned_at_ms: Time | None
    absorbed_times_ms: tuple[Time, ...]
    absorbed_by_ms: Time | None
    interval: float
    ranges: tuple[BatchRange, ...]
    blocks: tuple[Block, ...] = Field(description="The first 100 that are still in the log.")
    block_count: int
    all_attempts: tuple[Attempt, ...] = Field(description="Oldest first.")
    outputs: tuple[OutputResult, ...]
    code_version: str | None
    revision: int | None
    manifest: str | None
    where: str | None = Field(description="Where its records are read from if it is run again: log, kafka or removed.")
    became: str | None = Field(description="Which run has completed it after another one failed.")
    links: Links
    events: tuple[Event, ...]
    run_ids: Annotated[tuple[str, ...], UNPUBLISHED]
    rows: Annotated[BatchRows, *ROWS]


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
    rows = BatchRows(
        batch=batch,
        origin=None if batch.state is BatchState.ABANDONED else origin,
        inputs=tuple(ledger.batches.inputs(stream_name, batch_time_ms)),
        outputs=tuple(ledger.attempts.outputs(stream_name, batch_time_ms)),
        attempts=tuple(attempts),
    )
    detail = BatchDetail(
        **dict(batch_line(batch, error=last_error(ledger, batch))),
        allocated_at_ms=batch.allocated_at_ms,
        checkpointed_at_ms=batch.checkpointed_at_ms,
        cleaned_at_ms=batch.cleaned_at_ms,
        absorbed_times_ms=batch.absorbed,
        absorbed_by_ms=batch.absorbed_by_ms,
        interval=batch.interval_ms / 1000,
        ranges=tuple(map(_range, rows.inputs)),
        blocks=tuple(
            Block(
                id=block.block_id,
                input=block.info.receiver.input_id,
                receiver=block.info.receiver.index,
                epoch=block.info.epoch,
                sequence=block.info.sequence,
                cut_at_ms=block.info.cut_time_ms,
                records=block.info.records,
                bytes=block.info.payload_bytes,
                segment=block.info.handle.segment,
            )
            for block in blocks[:BLOCKS]
        ),
        block_count=len(blocks),
        all_attempts=tuple(_attempt(attempt, row.id_of_step) for attempt in attempts),
        outputs=_outputs(ledger, row, rows),
        code_version=batch.code_version,
        revision=batch.revision,
        manifest=batch.manifest_uri or None,
        where=None if origin is None else origin.source,
        events=tuple(map(event, ledger.events.of_batch(stream_name, batch_time_ms)[-_EVENTS:])),
        run_ids=run_ids(ledger, batch, attempts),
        became=became(batch, attempts),
        links=Links(),
        rows=rows,
    )
    return with_next_try(detail, NextTries(ledger, stream_name)) if batch.state in UNFINISHED else detail


def became(batch: BatchRow, attempts: Sequence[AttemptRow]) -> str | None:
    """Which run has completed a batch after the run of its last failed attempt; None if that is the same run.

    The run that failed stays failed in Airflow, which does not know of the other one.
    """
    own = [attempt for attempt in attempts if not attempt.target]
    failed = [attempt for attempt in own if attempt.state is AttemptState.FAILED]
    done = max(
        (attempt for attempt in own if attempt.state is AttemptState.COMPLETED),
        key=lambda attempt: attempt.ended_at_ms or 0,
        default=None,
    )
    if batch.state is not BatchState.COMPLETED or not failed or done is None or failed[-1].number > done.number:
        return None
    first, second = (attempt.run_id or attempt.holder for attempt in (failed[-1], done))
    if first == second:
        return None
    at, then = time_text(failed[-1].ended_at_ms), time_text(done.ended_at_ms)
    return (
        f"The run {first} failed at {at}, and stays failed in Airflow. The run {second} completed the batch at {then}."
    )


def run_ids(ledger: Ledger, batch: BatchRow, attempts: Sequence[AttemptRow]) -> tuple[str, ...]:
    """The Airflow runs whose own batch it is: to which the ledger assigned it, or that made an attempt at it."""
    assigned = ledger.runs.of_batch(batch.stream, batch.batch_time_ms)
    own = [
        attempt.run_id
        for attempt in reversed(attempts)
        if not (attempt.target or attempt.attributes.get(REPAIR) or RANGE in attempt.attributes)
    ]
    tried = filter(None, own)
    return tuple(dict.fromkeys([*assigned, *tried]))


def _range(row: BatchInputRow) -> BatchRange:
    return BatchRange(
        input=row.input_id,
        topic=row.partition.topic,
        partition=row.partition.partition,
        from_offset=row.from_offset,
        until_offset=row.until_offset,
        records=row.records,
        blocks=row.blocks,
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
        run_id=row.run_id,
        by_repair=bool(row.attributes.get(REPAIR)),
        spark_ui=row.attributes.get("ui_url"),
    )


def _outputs(ledger: Ledger, row: StreamRow, rows: BatchRows) -> tuple[OutputResult, ...]:
    kinds, ids, batch = _kinds(row.definition), row.id_of_step, rows.batch
    outputs: list[OutputResult] = []
    for target in dict.fromkeys(["", *(attempt.target for attempt in rows.attempts)]):
        recorded = ledger.attempts.outputs(batch.stream, batch.batch_time_ms, target=target) if target else rows.outputs
        results = {result.output_id: result for result in recorded}
        given_up = {} if target else batch.abandoned_steps
        for step in dict.fromkeys([*(() if target else batch.needs(row.outputs)), *results, *given_up]):
            tries = [attempt for attempt in rows.attempts if attempt.target == target and step in attempt.outputs]
            output = _output(ids.get(step, step), kinds, results.get(step), tries, target or None)
            if step in given_up and output.state in ("failed", "not written"):
                output = output.model_copy(update={"state": "abandoned", "error": given_up[step]})
            outputs.append(output)
    return tuple(outputs)


def _output(
    output_id: str,
    kinds: Mapping[str, str],
    result: BatchOutputRow | None,
    tries: Sequence[AttemptRow],
    target: str | None,
) -> OutputResult:
    shown: dict[str, Any] = {"id": output_id, "kind": kinds.get(output_id), "target": target}
    shown["retries"] = max(0, len(tries) - 1)
    running = bool(tries) and tries[-1].state is AttemptState.RUNNING
    if result is None:
        state = "running" if running else "not written"
        return OutputResult(**shown, state=state, counts={}, error=None, revision=None, code_version=None)
    return OutputResult(
        **shown,
        state="running" if running else result.state.value,
        counts=result.counts,
        throttled=_throttled(result.counts),
        error=result.error,
        recorded_at_ms=result.recorded_at_ms,
        attempt=result.attempt,
        revision=next((attempt.revision for attempt in tries if attempt.number == result.attempt), None),
        code_version=result.code_version,
    )


def _throttled(counts: Mapping[str, Any]) -> str | None:
    """What held the requests of an output back; the seconds are the sum of its tasks."""
    # A user's function may return counts of any names and values.
    names = ("throttled_requests", "throttled_seconds", "ceiling_seconds", "slow_requests")
    given = [counts.get(name) for name in names]
    requests, waited, ceiling, slow = (value if isinstance(value, int | float) else 0 for value in given)
    parts = []
    if requests:
        parts.append(f"{readable_seconds(waited)} by the server (requests with 429: {requests:,})")
    if ceiling:
        parts.append(f"{readable_seconds(ceiling)} by its ceiling")
    if slow:
        parts.append(f"by slow answers ({slow:,})")
    return f"throttled {', '.join(parts)}" if parts else None


def _kinds(definition: str) -> dict[str, str]:
    outputs = json.loads(definition).get("outputs") or ()
    return {output["id"]: output.get("kind", "") for output in outputs if "id" in output}
