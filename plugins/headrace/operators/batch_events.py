"""The asset of a stream's batches: other DAGs run after a completed batch, and read its numbers.

A task's plain outlet brings an event whenever the task succeeds, and the checkpoint succeeds after a failed batch too.
An alias brings one only when it is told to (`emit_batch_event`).
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from airflow.sdk import Asset, AssetAlias

if TYPE_CHECKING:
    from airflow.sdk import Context

    from headrace.ledger import Ledger
    from headrace.ledger.rows import AttemptRow, BatchOutputRow, BatchRow
    from headrace.stream import Stream


def batch_asset(stream: Stream | str) -> Asset:
    """What stands for a stream's completed batches: ``DAG(schedule=[batch_asset("flights")])`` runs after them."""
    return Asset(uri=f"headrace://{_name(stream)}/batches", group="headrace")


def batch_alias(stream: Stream | str) -> AssetAlias:
    """The outlet of a task that calls `emit_batch_event`."""
    return AssetAlias(f"{_name(stream)}_batches", group="headrace")


def emit_batch_event(context: Context, ledger: Ledger, stream: str, batch_time_ms: int) -> bool:
    """Have this task's success emit the batch's event, if the batch completed in this run; whether it did.

    A run that was repeated without running the batch again emits nothing, nor does one whose batch failed. What the
    run of a later batch did in this one's place counts as this run's. The task needs ``outlets=[batch_alias(stream)]``.
    Airflow keeps the event with the task's success, in one transaction: a task that dies before emits it in its next
    try.
    """
    from headrace.ledger.states import BatchState

    batch = ledger.batches.find(stream, batch_time_ms)
    if batch is None or batch.state is not BatchState.COMPLETED:
        return False
    outputs = ledger.batches.outputs(stream, batch_time_ms)
    written_by = {output.attempt for output in outputs}
    attempts = ledger.batches.attempts(stream, batch_time_ms)
    if not any(_is_of(attempt, context) for attempt in attempts if attempt.number in written_by):
        return False
    context["outlet_events"][batch_alias(stream)].add(
        batch_asset(stream), extra=_numbers(batch, outputs, tried=sum(not attempt.target for attempt in attempts))
    )
    return True


def _is_of(attempt: AttemptRow, context: Context) -> bool:
    """Whether the attempt was made by this task's run since it was last cleared, or in its place."""
    from headrace.operators.steps_to_run import AHEAD

    dag_run = context["dag_run"]
    clear_number = dag_run.clear_number or 0
    if attempt.attributes.get(AHEAD) and clear_number == 0:
        return True
    told = (attempt.attributes.get("run_id"), attempt.attributes.get("clear_number") or 0)
    return told == (dag_run.run_id, clear_number)


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
