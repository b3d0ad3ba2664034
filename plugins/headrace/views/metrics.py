"""The metrics for Prometheus: the list of all that a scrape can return, and their samples, by the ledger's numbers.

docs/metrics.md has the same list, and a test compares them. Names follow Prometheus' conventions: base units (seconds,
bytes), and `_total` for counters. Each label has a bounded number of values: a stream has a few inputs, receivers and
outputs, and the partitions of its topics.

Counters are the ledger's totals, so they go on after a receiver, a job or Airflow started again, and after old batches
and blocks were deleted. What only a live receiver knows (its queue, its lag) has no sample while none is alive.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as Family

from headrace.errors import HeadraceError
from headrace.ledger.batches.attempts import LIMIT_EXCEEDED
from headrace.ledger.errors import LedgerUrlError
from headrace.ledger.events import DELAY_BOUNDS, DURATION_BOUNDS
from headrace.ledger.overviews import StreamNumbers
from headrace.ledger.receiving.tables import ReceiverRow
from headrace.ledger.states import AttemptState
from headrace.listeners.bus import ListenerStatus, listener_statuses
from headrace.receiver.health import numbers
from headrace.views.batches import batch_line


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
    ("headrace_lag_records", _INPUT, "Offsets in Kafka that are not in the log, without partitions of unknown lag."),
    ("headrace_lag_unknown_partitions", _INPUT, "Partitions whose lag is not known."),
    ("headrace_lag_seconds", _INPUT, "Age in seconds of the oldest record in Kafka that is not in the log."),
    ("headrace_partition_lag_records", _PARTITION, "Lag of one partition, for up to 500 partitions of each receiver."),
    (
        "headrace_partition_lag_seconds",
        _PARTITION,
        "Age in seconds of the partition's oldest record that is not in the log.",
    ),
    ("headrace_partition_failed", _PARTITION, "1 if the partition is stopped by an error, else 0."),
    ("headrace_listener_slow", _LISTENER, "1 while a call of the listener takes longer than 30 s, else 0."),
    ("headrace_batches_unfinished", (*_STREAM, "state"), "Batches that are not completed, up to 1000 of each state."),
    ("headrace_unclaimed_batch_times", _STREAM, "Batch times that have records and no batch yet, up to 1000."),
    (
        "headrace_oldest_unfinished_batch_age_seconds",
        _STREAM,
        "Time since the oldest batch time that has never completed; 0 if there is none.",
    ),
    (
        "headrace_oldest_unfinished_batch_failed_attempts",
        _STREAM,
        "Failed attempts at the oldest batch that has never completed.",
    ),
    ("headrace_last_completed_batch_timestamp_seconds", _STREAM, "Batch time of the latest completed batch."),
    ("headrace_last_batch_records", _STREAM, "Records of the latest completed batch."),
    (
        "headrace_last_batch_scheduling_delay_seconds",
        _STREAM,
        "Time from the batch time to the start of the latest completed batch.",
    ),
    (
        "headrace_last_batch_processing_seconds",
        _STREAM,
        "Time from the start to the completion of the latest completed batch.",
    ),
    (
        "headrace_last_batch_total_delay_seconds",
        _STREAM,
        "Time from the batch time to the completion of the latest completed batch.",
    ),
)

_COUNTERS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("headrace_received_records_total", _PARTITION, "Records stored in the log."),
    ("headrace_received_offsets_total", _PARTITION, "Offsets consumed, including offsets without a record."),
    ("headrace_received_blocks_total", _RECEIVER, "Blocks stored in the log."),
    ("headrace_received_bytes_total", _RECEIVER, "Compressed bytes of the blocks stored in the log."),
    ("headrace_receiver_starts_total", _RECEIVER, "Starts of the receiver."),
    ("headrace_receiver_pauses_total", _RECEIVER, "Pauses of the receiver, each counted when it begins."),
    ("headrace_receiver_paused_seconds_total", _RECEIVER, "Time in which the receiver was paused."),
    (
        "headrace_receiver_dropped_records_total",
        _RECEIVER,
        "Records read and not stored, since another receiver reads them.",
    ),
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
    ("headrace_batch_records_total", _STREAM, "Records of completed batches."),
    ("headrace_batch_bytes_total", _STREAM, "Compressed bytes of completed batches in the log."),
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
    ("headrace_output_seconds_total", _OUTPUT, "Time that the output's writes took."),
    ("headrace_output_requests_total", _OUTPUT, "Bulk requests to Elasticsearch."),
    (
        "headrace_output_request_retries_total",
        _OUTPUT,
        "Bulk requests that were sent again, in whole or in part; not those that the server throttled.",
    ),
    (
        "headrace_output_throttled_requests_total",
        _OUTPUT,
        "Bulk requests that the server throttled with status 429, in whole or in part, and that were sent again.",
    ),
    (
        "headrace_output_throttled_seconds_total",
        _OUTPUT,
        "Time in which the output's tasks waited because the server had answered 429; the sum of the tasks.",
    ),
    (
        "headrace_output_ceiling_seconds_total",
        _OUTPUT,
        "Time in which the output's tasks waited because of its ceiling of requests and bytes; the sum of the tasks.",
    ),
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


logger = logging.getLogger(__name__)

Read = Callable[[str], list[StreamNumbers]]


def render(
    ledgers: Iterable[str],
    *,
    read: Read,
    accept: str = "",
    may_read: Callable[[str, str], bool] = lambda *_: True,
    declared: Collection[tuple[str, str]] = (),
    shows_ledger: Callable[[str], bool] = lambda _: True,
) -> tuple[bytes, str]:
    """Return the exposition and its content type.

    A ledger that does not answer has ``headrace_ledger_up`` 0 and no streams; the others are still shown. If two
    ledgers have a stream of the same name, the first declared one that may be read is shown, or the first one if none
    is declared: a sample may appear only once.

    Args:
        ledgers: their references.
        read: returns the readings of a ledger; it raises a HeadraceError if that does not answer.
        accept: the request's Accept header: the text format, or OpenMetrics.
        may_read: whether a stream, by its ledger's reference and its name, is shown.
        declared: the streams that DAGs declare, by their ledger's reference and their name. A stream that moved to
            another ledger has left a row in the first one.
        shows_ledger: whether a ledger, by its reference, is shown even if none of its streams may be read.
    """
    families, shown, seen = Families(), list[tuple[str, StreamNumbers]](), set[str]()
    labels = _labels(ledgers)
    for number, url in enumerate(labels):
        began = time.monotonic()
        try:
            readings = read(url)
        except HeadraceError as error:
            # A reference that is refused may hold a password.
            label = f"invalid {number}" if isinstance(error, LedgerUrlError) else labels[url]
            logger.warning("The metrics of ledger %s cannot be read: %s", label, error)
            if shows_ledger(url):
                families.add("headrace_ledger_up", (label,), 0)
            continue
        readable = [(url, reading) for reading in readings if may_read(url, reading.stream.name)]
        if readable or shows_ledger(url):
            families.add("headrace_ledger_up", (labels[url],), 1)
            families.add("headrace_ledger_scrape_seconds", (labels[url],), time.monotonic() - began)
        shown += readable
    for url, reading in sorted(shown, key=lambda pair: (pair[0], pair[1].stream.name) not in declared):
        name = reading.stream.name
        if name in seen:
            logger.warning("Stream %s of ledger %s has the name of another ledger's stream.", name, url)
            continue
        seen.add(name)
        add_stream(families, reading)
    encode, content_type = choose_encoder(accept)
    return encode(families), content_type


def _labels(ledgers: Iterable[str]) -> dict[str, str]:
    """Each ledger's label. One that another ledger has gets its number: two samples of one label are an error."""
    labels: dict[str, str] = {}
    for number, reference in enumerate(dict.fromkeys(ledgers)):
        label = _without_login(reference)
        labels[reference] = f"{label} {number}" if label in labels.values() else label
    return labels


def _without_login(reference: str) -> str:
    """The reference, without the login and the options of a URL."""
    scheme, separator, rest = reference.partition("://")
    if not separator or scheme.startswith("sqlite"):
        return reference
    return f"{scheme}://{rest.partition('?')[0].rpartition('@')[2]}"


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
    "headrace_output_throttled_requests_total": "throttled_requests",
    "headrace_output_throttled_seconds_total": "throttled_seconds",
    "headrace_output_ceiling_seconds_total": "ceiling_seconds",
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
    "ignored_events": "ignored_events",
    "truncates": "truncates",
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
    if reading.last_completed is None:
        return
    last, name = batch_line(reading.last_completed), (reading.stream.name,)
    families.add("headrace_last_completed_batch_timestamp_seconds", name, last.batch_time_ms / 1000)
    families.add("headrace_last_batch_records", name, last.records)
    families.add("headrace_last_batch_total_delay_seconds", name, last.total_delay)
    families.add("headrace_last_batch_scheduling_delay_seconds", name, last.scheduling_delay)
    families.add("headrace_last_batch_processing_seconds", name, last.processing_time)


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
    totals = receiver.totals
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


def _add_partitions(families: Families, reading: StreamNumbers) -> None:
    name = reading.stream.name
    for partition in reading.partitions:
        labels = (name, partition.input_id, partition.topic, partition.partition)
        families.add("headrace_partition_failed", labels, partition.failed)
        families.add("headrace_received_records_total", labels, partition.received_records)
        families.add("headrace_received_offsets_total", labels, partition.received_offsets)


def _add_lag(families: Families, reading: StreamNumbers) -> None:
    by_input: dict[str, list[ReceiverRow]] = defaultdict(list)
    for receiver in reading.receivers:
        by_input[receiver.receiver_id.input_id].append(receiver)
    # A partition that changes its receiver is for a moment in the stats of both, and a sample may appear only once.
    listed: dict[tuple[object, ...], tuple[float, float | None]] = {}
    for input_id, receivers in by_input.items():
        labels, now = (reading.stream.name, input_id), numbers(receivers, reading.now_ms)
        if now.lag is None:
            continue
        families.add("headrace_lag_records", labels, now.lag)
        families.add("headrace_lag_unknown_partitions", labels, now.lag_unknown)
        families.add("headrace_lag_seconds", labels, now.lag_seconds)
        for stats in (receiver.stats for receiver in receivers if receiver.alive(reading.now_ms)):
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


_KINDS: Mapping[Kind, Any] = {
    Kind.GAUGE: GaugeMetricFamily,
    Kind.COUNTER: CounterMetricFamily,
    Kind.HISTOGRAM: HistogramMetricFamily,
}


class Families:
    """The families of one scrape. Labels are given as text or numbers, in the order of the catalogue."""

    def __init__(self) -> None:
        self._families = {
            metric.name: _KINDS[metric.kind](metric.name, metric.help, labels=metric.labels) for metric in METRICS
        }

    def add(self, name: str, labels: Sequence[object], value: float | None) -> None:
        """Add a sample of a gauge or counter; nothing if its value is not known."""
        if value is not None:
            self._families[name].add_metric([str(label) for label in labels], float(value))

    def add_histogram(
        self, name: str, labels: Sequence[object], totals: Mapping[str, float], total: str, bounds: Sequence[float]
    ) -> None:
        """Add the histogram that `headrace.ledger.events.observation` has made under the name ``total``."""
        buckets, so_far = [], 0.0
        for bound in (*bounds, math.inf):
            so_far += totals.get(f"{total}_le_{bound:g}", 0.0)
            buckets.append(("+Inf" if bound == math.inf else str(bound), so_far))
        self._families[name].add_metric([str(label) for label in labels], buckets, totals.get(f"{total}_sum", 0.0))

    def collect(self) -> Iterator[Family]:
        """Yield the families that have samples."""
        for family in self._families.values():
            if family.samples:
                yield family
