"""The asset of a stream's batches: other DAGs run after a completed batch, and read its numbers.

A task's plain outlet brings an event whenever the task succeeds, and the checkpoint succeeds after a failed batch too.
An alias brings one only when it is told to (`emit_batch_events`).
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from airflow.sdk import Asset, AssetAlias

from headrace.runs.identity import run_identity
from headrace.timetables.micro_batch import to_ms

if TYPE_CHECKING:
    from airflow.sdk import Context

    from headrace.ledger import Ledger
    from headrace.ledger.rows import BatchOutputRow, BatchRow
    from headrace.runs.identity import RunIdentity
    from headrace.stream import Stream

# Runs begin by Airflow's clock, and batches complete by the ledger's.
_CLOCKS_APART_MS = 60_000
# A run that has done more of earlier batches reports the latest.
_MOST_AHEAD = 1_000
# Of a stream that is not ordered: a run takes up failed batches for a bounded time.
_MOST_TAKEN_UP = 100


def batch_asset(stream: Stream | str) -> Asset:
    """What stands for a stream's completed batches: ``DAG(schedule=[batch_asset("flights")])`` runs after them."""
    return Asset(uri=f"headrace://{_name(stream)}/batches", group="headrace")


def batch_alias(stream: Stream | str) -> AssetAlias:
    """The outlet of a task that calls `emit_batch_events`."""
    return AssetAlias(f"{_name(stream)}_batches", group="headrace")


def emit_batch_events(context: Context, ledger: Ledger, stream: str, batch_time_ms: int) -> list[int]:
    """Have this task's success emit the event of the run's batch, if it completed in this run, and of each earlier
    batch that the run has completed ahead; the batch times, in order.

    A run that finds its batch done emits nothing, nor does one whose batch failed. The task needs
    ``outlets=[batch_alias(stream)]``. Airflow keeps the events with the task's success, in one transaction: a task that
    dies before emits them in its next try.
    """
    run = run_identity(context)
    reported = []
    for at_ms in (*_completed_ahead(context, ledger, stream, batch_time_ms), batch_time_ms):
        numbers = _numbers_of_own(run, ledger, stream, at_ms)
        if numbers is not None:
            context["outlet_events"][batch_alias(stream)].add(batch_asset(stream), extra=numbers)
            reported.append(at_ms)
    return reported


def _completed_ahead(context: Context, ledger: Ledger, stream: str, batch_time_ms: int) -> list[int]:
    """The earlier batch times that have completed since the run began: this run's work may be among them."""
    from headrace.ledger.states import EventKind

    began = context["dag_run"].start_date
    since_ms = 0 if began is None else to_ms(began) - _CLOCKS_APART_MS
    most = _MOST_AHEAD if ledger.streams.get(stream).ordered else _MOST_TAKEN_UP
    completed = ledger.events.latest(stream, [EventKind.BATCH_COMPLETED], limit=most)
    times = {event.batch_time_ms for event in completed if event.at_ms >= since_ms and event.batch_time_ms is not None}
    return sorted(time_ms for time_ms in times if time_ms < batch_time_ms)


def _numbers_of_own(run: RunIdentity, ledger: Ledger, stream: str, batch_time_ms: int) -> dict[str, Any] | None:
    """The batch's numbers if it is complete, and the last of it was done by this run since it was last cleared."""
    from headrace.ledger.states import BatchState

    batch = ledger.batches.find(stream, batch_time_ms)
    if batch is None or batch.state is not BatchState.COMPLETED:
        return None
    outputs = ledger.batches.outputs(stream, batch_time_ms)
    if not outputs:
        return None
    last = max(outputs, key=lambda output: (output.recorded_at_ms, output.attempt)).attempt
    attempts = [attempt for attempt in ledger.batches.attempts(stream, batch_time_ms) if not attempt.target]
    if not any(run.made(attempt.attributes) for attempt in attempts if attempt.number == last):
        return None
    return _numbers(batch, outputs, tried=len(attempts))


def _numbers(batch: BatchRow, outputs: Sequence[BatchOutputRow], *, tried: int) -> dict[str, Any]:
    """What a consumer finds in the event's ``extra``; times are epoch milliseconds, and the batch time also as text."""
    first_ms = min((batch.batch_time_ms, *batch.absorbed))
    return {
        "stream": batch.stream,
        "batch_time": datetime.fromtimestamp(batch.batch_time_ms / 1000, UTC).isoformat(),
        "batch_time_ms": batch.batch_time_ms,
        "interval_start_ms": first_ms - batch.interval_ms,
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
