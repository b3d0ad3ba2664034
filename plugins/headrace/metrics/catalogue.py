"""Lists every metric that a scrape can return. docs/metrics.md has the same table, and a test compares them.

Names follow Prometheus' conventions: base units (seconds, bytes), and `_total` for counters. Each label has a bounded
number of values: a stream has a few inputs, receivers and outputs, and the partitions of its topics.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """The types of metrics."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric: its name in the exposition, its type, its labels in order, and what it says."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    help: str

    @property
    def samples(self) -> tuple[str, ...]:
        """The names of its samples, as queries use them."""
        if self.kind is Kind.HISTOGRAM:
            return (f"{self.name}_bucket", f"{self.name}_sum", f"{self.name}_count")
        return (self.name,)


_LEDGER = ("ledger",)
_STREAM = ("stream",)
_INPUT = ("stream", "input")
_RECEIVER = ("stream", "input", "receiver")
_PARTITION = ("stream", "input", "topic", "partition")
_OUTPUT = ("stream", "output")
_LISTENER = ("stream", "listener")

_GAUGES: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("headrace_ledger_up", _LEDGER, "1 if the ledger answered this scrape, else 0."),
    ("headrace_ledger_scrape_seconds", _LEDGER, "Time that this scrape waited for the ledger."),
    ("headrace_stream_running", _STREAM, "1 if the stream is to run, 0 if it was stopped."),
    ("headrace_batch_interval_seconds", _STREAM, "The stream's batch interval."),
    ("headrace_log_bytes", _STREAM, "Bytes in the log."),
    ("headrace_log_limit_bytes", _STREAM, "Bytes that the log may hold (limits.max_log_bytes), if it is limited."),
    ("headrace_receiver_job_up", _STREAM, "1 if the receiver job's lease is live, else 0."),
    ("headrace_receiver_job_lease_age_seconds", _STREAM, "Time since the receiver job last renewed its lease."),
    ("headrace_receiver_up", _RECEIVER, "1 if the receiver's lease is live, else 0."),
    ("headrace_receiver_lease_age_seconds", _RECEIVER, "Time since the receiver last renewed its lease."),
    ("headrace_receiver_paused", _RECEIVER, "1 while the receiver is paused (log limit, disk), else 0."),
    ("headrace_receiver_kafka_connected", _RECEIVER, "1 if the receiver's client has a broker, else 0."),
    ("headrace_receiver_queue_blocks", _RECEIVER, "Blocks that wait to be stored."),
    ("headrace_receiver_queue_bytes", _RECEIVER, "Bytes of the blocks that wait to be stored."),
    ("headrace_receiver_rate_limit", _RECEIVER, "The rate control's limit in records per second, if there is one."),
    ("headrace_receiver_disk_free_bytes", _RECEIVER, "Free bytes of the log's disk, as the receiver sees it."),
    ("headrace_receiver_disk_bytes", _RECEIVER, "Size of the log's disk."),
    ("headrace_lag_records", _INPUT, "Offsets that Kafka has and the log has not, without partitions of unknown lag."),
    ("headrace_lag_unknown_partitions", _INPUT, "Partitions whose lag is not known."),
    ("headrace_lag_seconds", _INPUT, "Everything that Kafka had this long ago is in the log."),
    ("headrace_partition_lag_records", _PARTITION, "Lag of one partition; of 500 partitions of each receiver."),
    ("headrace_partition_lag_seconds", _PARTITION, "Everything that the partition had this long ago is in the log."),
    ("headrace_partition_failed", _PARTITION, "1 if the partition is stopped by an error, else 0."),
    ("headrace_listener_slow", _LISTENER, "1 while a call of the listener takes longer than 30 s, else 0."),
    ("headrace_batches_unfinished", (*_STREAM, "state"), "Batches that are not completed, up to 1000 of each state."),
    ("headrace_unclaimed_batch_times", _STREAM, "Batch times that have records and no batch yet, up to 1000."),
    (
        "headrace_oldest_unfinished_batch_age_seconds",
        _STREAM,
        "Time since the earliest batch time that is not completed and never was; 0 if there is none.",
    ),
    (
        "headrace_oldest_unfinished_batch_failed_attempts",
        _STREAM,
        "Failed attempts at the earliest batch that is not completed and never was.",
    ),
    ("headrace_last_completed_batch_timestamp_seconds", _STREAM, "Batch time of the latest completed batch."),
    ("headrace_last_batch_records", _STREAM, "Records of the latest completed batch."),
    ("headrace_last_batch_scheduling_delay_seconds", _STREAM, "Its time from batch time to start."),
    ("headrace_last_batch_processing_seconds", _STREAM, "Its time from start to completion."),
    ("headrace_last_batch_total_delay_seconds", _STREAM, "Its time from batch time to completion."),
)

_COUNTERS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("headrace_received_records_total", _PARTITION, "Records stored in the log."),
    ("headrace_received_offsets_total", _PARTITION, "Offsets passed, with those that hold no record."),
    ("headrace_received_blocks_total", _RECEIVER, "Blocks stored in the log."),
    ("headrace_received_bytes_total", _RECEIVER, "Bytes of these blocks, compressed."),
    ("headrace_receiver_starts_total", _RECEIVER, "Instances of the receiver that began."),
    ("headrace_receiver_pauses_total", _RECEIVER, "Pauses that began."),
    ("headrace_receiver_paused_seconds_total", _RECEIVER, "Time in which the receiver was paused."),
    ("headrace_receiver_dropped_records_total", _RECEIVER, "Records read and not stored: another receiver reads them."),
    (
        "headrace_receiver_late_records_total",
        _RECEIVER,
        "Records that came too late for the batch of their timestamps.",
    ),
    ("headrace_receiver_partition_errors_total", _RECEIVER, "Errors of Kafka about a partition."),
    ("headrace_receiver_commit_failures_total", _RECEIVER, "Commits of offsets that Kafka refused or did not answer."),
    (
        "headrace_log_write_failures_total",
        _RECEIVER,
        "Writes of blocks to log or ledger that failed and were repeated.",
    ),
    ("headrace_listener_dropped_events_total", _LISTENER, "Events that came while the listener's queue was full."),
    ("headrace_listener_missed_events_total", _LISTENER, "Events that were deleted before the listener got them."),
    ("headrace_listener_failures_total", _LISTENER, "Calls of the listener that raised, and its failures to start."),
    ("headrace_lost_offsets_total", _STREAM, "Offsets that were given up: lost by Kafka, or abandoned with a batch."),
    ("headrace_batches_completed_total", _STREAM, "Batches that completed, each once."),
    ("headrace_batch_records_total", _STREAM, "Records of these batches."),
    ("headrace_batch_bytes_total", _STREAM, "Bytes of these batches in the log, compressed."),
    ("headrace_batch_attempts_total", _STREAM, "Attempts at batches that began; each output task makes one."),
    (
        "headrace_batch_attempts_ended_total",
        (*_STREAM, "result"),
        "Attempts that ended: completed, failed, or fenced (replaced by a later attempt).",
    ),
    ("headrace_batch_retries_total", _STREAM, "Attempts at outputs that an earlier attempt had begun."),
    ("headrace_output_writes_total", _OUTPUT, "Batches that the output has written, with repetitions."),
    (
        "headrace_output_rows_total",
        (*_OUTPUT, "result"),
        "Rows by what became of them; the output's counts in docs/stream.md say what each result means.",
    ),
    ("headrace_output_bytes_total", _OUTPUT, "Bytes that the output has sent or written."),
    ("headrace_output_seconds_total", _OUTPUT, "Time that these writes took."),
    ("headrace_output_requests_total", _OUTPUT, "Bulk requests to Elasticsearch."),
    ("headrace_output_request_retries_total", _OUTPUT, "Bulk requests that were sent again, in whole or in part."),
    ("headrace_dead_letters_total", _OUTPUT, "Records written to the dead letters, with repetitions."),
    ("headrace_dead_letter_limit_exceeded_total", _OUTPUT, "Writes that failed because of the dead_letter_limit."),
    ("headrace_undecodable_records_total", _OUTPUT, "Records that the decoder refused."),
)

_HISTOGRAMS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("headrace_log_write_seconds", _RECEIVER, "Time to write a block to the log and sync it."),
    ("headrace_ledger_transaction_seconds", _RECEIVER, "Time of the ledger's transaction that adds a block."),
    ("headrace_batch_scheduling_delay_seconds", _STREAM, "Time from the batch time to the batch's start."),
    ("headrace_batch_processing_seconds", _STREAM, "Time from the batch's start to its completion."),
    ("headrace_batch_total_delay_seconds", _STREAM, "Time from the batch time to the batch's completion."),
)

METRICS: tuple[Metric, ...] = tuple(
    Metric(name, kind, labels, text)
    for kind, rows in ((Kind.GAUGE, _GAUGES), (Kind.COUNTER, _COUNTERS), (Kind.HISTOGRAM, _HISTOGRAMS))
    for name, labels, text in rows
)
