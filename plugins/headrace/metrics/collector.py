"""Turns the ledger's readings of streams into samples of the metrics.

Counters are the ledger's totals, so they go on after a receiver, a job or Airflow started again, and after old batches
and blocks were deleted. What only a live receiver knows (its queue, its lag) has no sample while none is alive.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping

from headrace.ledger.attempts import LIMIT_EXCEEDED
from headrace.ledger.events import DELAY_BOUNDS, DURATION_BOUNDS
from headrace.ledger.overviews import StreamNumbers
from headrace.ledger.receiving_tables import ReceiverRow
from headrace.ledger.states import AttemptState
from headrace.listeners.bus import ListenerStatus, listener_statuses
from headrace.metrics.families import Families
from headrace.receiver.tracker import numbers

_RECEIVER_TOTALS = {
    "headrace_receiver_pauses_total": "pauses",
    "headrace_receiver_paused_seconds_total": "paused_seconds",
    "headrace_receiver_dropped_records_total": "dropped_records",
    "headrace_receiver_late_records_total": "late_records",
    "headrace_receiver_partition_errors_total": "partition_errors",
    "headrace_receiver_commit_failures_total": "commit_failures",
    "headrace_log_write_failures_total": "store_failures",
}
_STREAM_TOTALS = {
    "headrace_lost_offsets_total": "gap_offsets",
    "headrace_batches_completed_total": "batches_completed",
    "headrace_batch_records_total": "batch_records",
    "headrace_batch_bytes_total": "batch_bytes",
    "headrace_batch_attempts_total": "attempts",
    "headrace_batch_retries_total": "retries",
}
_STREAM_HISTOGRAMS = {
    "headrace_batch_scheduling_delay_seconds": "scheduling_delay",
    "headrace_batch_processing_seconds": "processing_time",
    "headrace_batch_total_delay_seconds": "total_delay",
}
_OUTPUT_TOTALS = {
    "headrace_output_writes_total": "writes",
    "headrace_output_bytes_total": "bytes",
    "headrace_output_seconds_total": "duration_seconds",
    "headrace_dead_letters_total": "dead_lettered",
    "headrace_dead_letter_limit_exceeded_total": LIMIT_EXCEEDED,
    "headrace_undecodable_records_total": "undecodable",
}
# Only of Elasticsearch outputs.
_REQUEST_TOTALS = {
    "headrace_output_requests_total": "requests",
    "headrace_output_request_retries_total": "retries",
}
_RESULTS = {
    "created": "created",
    "updated": "updated",
    "repeated": "repeated",
    "kept": "kept",
    "uncompared": "uncompared",
    "superseded": "superseded",
    "deleted": "deleted",
    "ignored_tombstones": "ignored_tombstones",
    "dropped": "dropped",
    "messages": "sent",
    "printed": "printed",
}
_OF_ELASTICSEARCH = {"created", "updated", "repeated", "requests", "ignored_tombstones", "dead_lettered"}


def add_stream(families: Families, reading: StreamNumbers) -> None:
    """Add all samples of one stream."""
    _add_definition(families, reading)
    _add_batches(families, reading)
    _add_last_batch(families, reading)
    for output_id, totals in reading.totals.items():
        if output_id:
            _add_output(families, (reading.stream.name, output_id), totals)
    for receiver in reading.receivers:
        _add_receiver(families, receiver, reading.now_ms)
    for listener in listener_statuses(reading.job):
        _add_listener(families, (reading.stream.name, listener.name), listener)
    _add_partitions(families, reading)
    _add_lag(families, reading)


def _add_definition(families: Families, reading: StreamNumbers) -> None:
    row, job, name = reading.stream, reading.job, (reading.stream.name,)
    families.add("headrace_stream_running", name, row.desired_state == "running")
    families.add("headrace_batch_interval_seconds", name, row.batch_interval_ms / 1000)
    families.add("headrace_log_bytes", name, reading.log_bytes)
    families.add("headrace_log_limit_bytes", name, _log_limit(row.definition))
    families.add("headrace_receiver_job_up", name, job is not None and job.alive(reading.now_ms))
    if job is not None:
        families.add("headrace_receiver_job_lease_age_seconds", name, _age(reading.now_ms, job.heartbeat_ms))


def _add_batches(families: Families, reading: StreamNumbers) -> None:
    name, totals = (reading.stream.name,), reading.totals.get("", {})
    for metric, total in _STREAM_TOTALS.items():
        families.add(metric, name, totals.get(total, 0.0))
    for result in (AttemptState.COMPLETED, AttemptState.FAILED, AttemptState.FENCED):
        ended = totals.get(f"attempts_{result}", 0.0)
        families.add("headrace_batch_attempts_ended_total", (*name, result.value), ended)
    for metric, total in _STREAM_HISTOGRAMS.items():
        families.add_histogram(metric, name, totals, total, DELAY_BOUNDS)
    for state, count in reading.unfinished.items():
        families.add("headrace_batches_unfinished", (*name, state.value), count)
    families.add("headrace_unclaimed_batch_times", name, reading.unclaimed_times)
    oldest_ms = reading.oldest_unfinished_ms
    age = 0.0 if oldest_ms is None else _age(reading.now_ms, oldest_ms)
    families.add("headrace_oldest_unfinished_batch_age_seconds", name, age)
    families.add("headrace_oldest_unfinished_batch_failed_attempts", name, reading.oldest_failures)


def _add_last_batch(families: Families, reading: StreamNumbers) -> None:
    last, name = reading.last_completed, (reading.stream.name,)
    if last is None or last.completed_at_ms is None:
        return
    families.add("headrace_last_completed_batch_timestamp_seconds", name, last.batch_time_ms / 1000)
    families.add("headrace_last_batch_records", name, last.records)
    families.add("headrace_last_batch_total_delay_seconds", name, (last.completed_at_ms - last.batch_time_ms) / 1000)
    if last.started_at_ms is not None:
        delay, took = last.started_at_ms - last.batch_time_ms, last.completed_at_ms - last.started_at_ms
        families.add("headrace_last_batch_scheduling_delay_seconds", name, delay / 1000)
        families.add("headrace_last_batch_processing_seconds", name, took / 1000)


def _add_output(families: Families, labels: tuple[str, str], totals: Mapping[str, float]) -> None:
    for metric, total in _OUTPUT_TOTALS.items():
        families.add(metric, labels, totals.get(total, 0.0))
    if "requests" in totals:
        for metric, total in _REQUEST_TOTALS.items():
            families.add(metric, labels, totals.get(total, 0.0))
    for total, result in _RESULTS.items():
        if total in totals:
            families.add("headrace_output_rows_total", (*labels, result), totals[total])
    if "rows" in totals and not totals.keys() & _OF_ELASTICSEARCH:
        # Elasticsearch's counts name the outcome of each row; Parquet's have only their sum.
        families.add("headrace_output_rows_total", (*labels, "written"), totals["rows"])


def _add_receiver(families: Families, receiver: ReceiverRow, now_ms: int) -> None:
    identity = receiver.receiver_id
    labels = (identity.stream, identity.input_id, identity.index)
    totals = summed_totals(receiver)
    for metric, total in _RECEIVER_TOTALS.items():
        families.add(metric, labels, totals.get(total, 0.0))
    families.add("headrace_receiver_starts_total", labels, receiver.epoch)
    families.add("headrace_received_blocks_total", labels, receiver.received_blocks)
    families.add("headrace_received_bytes_total", labels, receiver.received_bytes)
    families.add_histogram("headrace_log_write_seconds", labels, totals, "log_write", DURATION_BOUNDS)
    families.add_histogram("headrace_ledger_transaction_seconds", labels, totals, "ledger_transaction", DURATION_BOUNDS)
    alive = receiver.alive(now_ms)
    families.add("headrace_receiver_up", labels, alive)
    families.add("headrace_receiver_lease_age_seconds", labels, _age(now_ms, receiver.heartbeat_ms))
    families.add("headrace_receiver_paused", labels, alive and receiver.paused_reason is not None)
    families.add("headrace_receiver_rate_limit", labels, receiver.max_rate)
    if alive and receiver.stats:
        stats = receiver.stats
        families.add("headrace_receiver_kafka_connected", labels, stats.get("connected"))
        families.add("headrace_receiver_queue_blocks", labels, stats.get("queued_blocks"))
        families.add("headrace_receiver_queue_bytes", labels, stats.get("queued_bytes"))
        free, size = stats.get("disk") or (None, None)
        families.add("headrace_receiver_disk_free_bytes", labels, free)
        families.add("headrace_receiver_disk_bytes", labels, size)


def _add_listener(families: Families, labels: tuple[str, str], listener: ListenerStatus) -> None:
    families.add("headrace_listener_slow", labels, listener.slow is not None)
    families.add("headrace_listener_dropped_events_total", labels, listener.dropped)
    families.add("headrace_listener_missed_events_total", labels, listener.missed)
    # One that could not be made has an error and no failed call.
    failures = max(listener.failed, int(listener.error is not None))
    families.add("headrace_listener_failures_total", labels, failures)


def summed_totals(receiver: ReceiverRow) -> dict[str, float]:
    """Return the totals of all instances of a receiver."""
    summed = dict(receiver.earlier_totals)
    for name, value in (receiver.stats.get("totals") or {}).items():
        summed[name] = summed.get(name, 0.0) + value
    return summed


def _add_partitions(families: Families, reading: StreamNumbers) -> None:
    name = reading.stream.name
    for each in reading.partitions:
        labels = (name, each.input_id, each.topic, each.partition)
        families.add("headrace_partition_failed", labels, each.failed)
        families.add("headrace_received_records_total", labels, each.received_records)
        families.add("headrace_received_offsets_total", labels, each.received_offsets)


def _add_lag(families: Families, reading: StreamNumbers) -> None:
    by_input: dict[str, list[ReceiverRow]] = defaultdict(list)
    for receiver in reading.receivers:
        by_input[receiver.receiver_id.input_id].append(receiver)
    # A partition that changes its receiver is for a moment in the stats of both, and a sample may appear only once.
    listed: dict[tuple[object, ...], tuple[float, float | None]] = {}
    for input_id, receivers in by_input.items():
        labels, found = (reading.stream.name, input_id), numbers(receivers, reading.now_ms)
        if found.lag is None:
            continue
        families.add("headrace_lag_records", labels, found.lag)
        families.add("headrace_lag_unknown_partitions", labels, found.lag_unknown)
        families.add("headrace_lag_seconds", labels, found.lag_seconds)
        for stats in (each.stats for each in receivers if each.alive(reading.now_ms)):
            for topic, partitions in stats.get("lag", {}).items():
                for partition, (lag, age) in partitions.items():
                    if lag is not None:
                        listed[(*labels, topic, partition)] = (lag, age)
    for key, (lag, age) in listed.items():
        families.add("headrace_partition_lag_records", key, lag)
        families.add("headrace_partition_lag_seconds", key, age)


def _log_limit(definition: str) -> float | None:
    try:
        limit = (json.loads(definition).get("limits") or {}).get("max_log_bytes")
    except (ValueError, AttributeError):
        return None
    return limit if isinstance(limit, int | float) else None


def _age(now_ms: int, at_ms: int) -> float:
    return max(0, now_ms - at_ms) / 1000
