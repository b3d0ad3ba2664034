"""The Airflow asset of a stream's batches: other DAGs run after a completed batch, and read its numbers.

A plain outlet emits an event whenever its task succeeds, and the checkpoint task succeeds after a failed batch too. An
alias emits an event only when the task adds one (`emit_batch_event`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from airflow.sdk import Asset, AssetAlias

from headrace.clock import to_ms
from headrace.runs.batch_run import BatchRun, run_identity

if TYPE_CHECKING:
    from airflow.sdk import Context

    from headrace.ledger import Ledger
    from headrace.ledger.batches.tables import BatchOutputRow, BatchRow
    from headrace.stream import Stream


# Allowed clock difference: a run's start is by Airflow's clock, a batch's completion by the ledger's.
_CLOCK_DIFFERENCE_MS = 60_000


# A repair that has completed more batches than this emits the events of the latest of them.
_MAX_REPAIRED = 1_000


def batch_asset(stream: Stream | str) -> Asset:
    """The asset of a stream's completed batches: ``DAG(schedule=[batch_asset("flights")])`` runs after each."""
    return Asset(uri=f"headrace://{_name(stream)}/batches", group="headrace")


def batch_alias(stream: Stream | str) -> AssetAlias:
    """The outlet of a task that calls `emit_batch_event`."""
    return AssetAlias(f"{_name(stream)}_batches", group="headrace")


def emit_batch_event(run: BatchRun) -> list[int]:
    """Emit, with this task's success, the event of the run's batch if this run completed it. Returns its batch time.

    A run that finds its batch already completed emits nothing, and neither does one whose batch failed. The task needs
    ``outlets=[batch_alias(stream)]``. Airflow stores the events and the task's success in one transaction: a task that
    dies before that emits them in its next try.
    """
    return _emit(run.context, run.ledger, run.stream.name, [run.batch_time_ms])


def emit_events_of_repair(context: Context, ledger: Ledger, stream_name: str) -> list[int]:
    """Emit the events of all batches that the task's run has completed, like `emit_batch_event`; the latest 1,000 of
    them. Returns their batch times, in order."""
    from headrace.ledger.states import EventKind

    began = context["dag_run"].start_date
    since_ms = 0 if began is None else to_ms(began) - _CLOCK_DIFFERENCE_MS
    completed = ledger.events.latest(stream_name, [EventKind.BATCH_COMPLETED], limit=_MAX_REPAIRED)
    times = {event.batch_time_ms for event in completed if event.at_ms >= since_ms and event.batch_time_ms is not None}
    return _emit(context, ledger, stream_name, sorted(times))


def _emit(context: Context, ledger: Ledger, stream_name: str, times: Iterable[int]) -> list[int]:
    emitted = []
    for batch_time_ms in times:
        numbers = _numbers_of_own(context, ledger, stream_name, batch_time_ms)
        if numbers is not None:
            context["outlet_events"][batch_alias(stream_name)].add(batch_asset(stream_name), extra=numbers)
            emitted.append(batch_time_ms)
    return emitted


def _numbers_of_own(context: Context, ledger: Ledger, stream_name: str, batch_time_ms: int) -> dict[str, Any] | None:
    """The batch's numbers if it is complete and this run, since it was last cleared, made the attempt that recorded
    its last output; else None."""
    from headrace.ledger.states import BatchState

    batch = ledger.batches.find(stream_name, batch_time_ms)
    if batch is None or batch.state is not BatchState.COMPLETED:
        return None
    outputs = ledger.attempts.outputs(stream_name, batch_time_ms)
    if not outputs:
        return None
    last = max(outputs, key=lambda output: (output.recorded_at_ms, output.attempt)).attempt
    attempts = [row for row in ledger.attempts.of_batch(stream_name, batch_time_ms) if not row.target]
    identity = run_identity(context)
    if not any(identity.made(attempt.attributes) for attempt in attempts if attempt.number == last):
        return None
    return _numbers(batch, outputs, tried=len(attempts))


def _numbers(batch: BatchRow, outputs: Sequence[BatchOutputRow], *, tried: int) -> dict[str, Any]:
    """The event's ``extra``; times are milliseconds since the epoch, the batch time also as text."""
    return {
        "stream": batch.stream,
        "batch_time": datetime.fromtimestamp(batch.batch_time_ms / 1000, UTC).isoformat(),
        "batch_time_ms": batch.batch_time_ms,
        "interval_start_ms": batch.first_time_ms - batch.interval_ms,
        "interval_end_ms": batch.batch_time_ms,
        "absorbed_ms": list(batch.absorbed),
        "blocks": batch.blocks,
        "records": batch.records,
        "late_records": batch.late_records,
        "attempts": tried,
        "outputs": {output.output_id: output.counts for output in outputs},
        "code_version": batch.code_version,
    }


def _name(stream: Stream | str) -> str:
    return stream if isinstance(stream, str) else stream.name
