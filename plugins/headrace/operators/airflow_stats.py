"""Sends the numbers of batches to Airflow's own metrics: StatsD, Datadog or OpenTelemetry, as ``[metrics]`` says.

Names are ``headrace.<metric>`` with tags, as Airflow's are since 3.0, and ``headrace.<stream>.<metric>`` without: plain
StatsD has no tags.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from airflow.sdk.observability import stats

if TYPE_CHECKING:
    from headrace.ledger import Ledger
    from headrace.ledger.batch_tables import Attempt, BatchRow

logger = logging.getLogger(__name__)

# The counts of outputs that are sent, and the names of their metrics.
_COUNTS: Mapping[str, str] = {
    "created": "created",
    "updated": "updated",
    "messages": "sent",
    "rows": "rows",
    "dead_lettered": "dead_letters",
}


def send_attempt(ledger: Ledger, attempt: Attempt) -> None:
    """Send the numbers of an attempt that has ended: of its outputs, and of its batch if it completed the batch for the
    first time, or ended a run of it that has failed.

    It never raises: a batch does not fail because its numbers cannot be sent. Replays are not sent.
    """
    if attempt.target:
        return
    try:
        _send(ledger, attempt)
    except Exception as error:
        logger.warning("The numbers of the batch could not be sent to Airflow's metrics: %s", error)


def _send(ledger: Ledger, attempt: Attempt) -> None:
    from headrace.ledger.states import AttemptState, BatchState, EventKind

    stream, batch_time_ms = attempt.stream, attempt.batch_time_ms
    attempts = [each for each in ledger.attempts.of_batch(stream, batch_time_ms) if not each.target]
    row = next(each for each in attempts if each.number == attempt.number)
    if row.state is AttemptState.FENCED:
        # The attempt that replaced it sends its own numbers.
        return
    _count("batch.attempts", 1, stream=stream, state=row.state.value)
    found = ledger.attempts.outputs(stream, batch_time_ms)
    for output in found:
        if output.attempt == attempt.number:
            # One that failed because of its dead letters has written them.
            letters = {name: output.counts[name] for name in ("dead_lettered",) if name in output.counts}
            _send_output(stream, output.output_id, output.counts if output.error is None else letters)
    outputs = [each for each in found if each.error is None]
    for event in ledger.events.of_batch(stream, batch_time_ms):
        if event.kind == EventKind.BATCH_FAILED and event.payload["ended_attempt"] == attempt.number:
            _count("batch.failed", 1, stream=stream)
    batch = ledger.batches.get(stream, batch_time_ms)
    last = max(outputs, key=lambda output: (output.recorded_at_ms, output.attempt), default=None)
    if batch.state is not BatchState.COMPLETED or last is None or last.attempt != attempt.number:
        return
    earlier = [each for each in attempts if each.number < attempt.number and each.state is AttemptState.COMPLETED]
    if not any(set(each.outputs) & set(attempt.outputs) for each in earlier):
        # A batch that is run again a year later is not a year late.
        _send_batch(batch, ledger.streams.get(stream).zero_time_ms)


def _send_batch(batch: BatchRow, zero_time_ms: int) -> None:
    stream = batch.stream
    _count("batch.completed", 1, stream=stream)
    _count("batch.records", batch.records, stream=stream)
    if batch.completed_at_ms is None or batch.batch_time_ms <= zero_time_ms:
        # Neither is one from before the stream began, such as those that are built from Kafka.
        return
    _time("batch.total_delay", batch.completed_at_ms - batch.batch_time_ms, stream)
    if batch.started_at_ms is not None:
        _time("batch.scheduling_delay", batch.started_at_ms - batch.batch_time_ms, stream)
        _time("batch.processing_time", batch.completed_at_ms - batch.started_at_ms, stream)


def _send_output(stream: str, output_id: str, counts: Mapping[str, Any]) -> None:
    for name, metric in _COUNTS.items():
        if counts.get(name):
            _count(f"output.{metric}", int(counts[name]), stream=stream, output=output_id)


def _count(metric: str, amount: int, *, stream: str, **tags: str) -> None:
    stats.incr(f"headrace.{metric}", amount, tags={"stream": stream, **tags})
    place = ".".join([stream, *tags.values()])
    stats.incr(f"headrace.{place}.{metric}", amount)


def _time(metric: str, milliseconds: int, stream: str) -> None:
    stats.timing(f"headrace.{metric}", timedelta(milliseconds=milliseconds), tags={"stream": stream})
    stats.timing(f"headrace.{stream}.{metric}", timedelta(milliseconds=milliseconds))
