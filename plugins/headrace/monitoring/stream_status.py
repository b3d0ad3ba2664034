"""A stream's status in a few numbers: its lag behind Kafka, how late its batches are, whether its runs are too slow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from headrace.ledger import Ledger
from headrace.ledger.models import AttemptRow, BatchRow, JobRow, ReceiverRow, StreamRow
from headrace.ledger.states import BatchState, DesiredState
from headrace.receiver.input_health import InputTrouble, input_troubles

# A stream is late beyond the larger of this time and this many batch intervals.
_LATE_SECONDS = 60.0
_LATE_INTERVALS = 3
# Runs are too slow if this many batches in a row began late: a single late start is caught up.
_SLOW_BATCHES = 5
_ALLOCATED = [state for state in BatchState if state is not BatchState.ABSORBED]
UNFINISHED = (BatchState.ALLOCATED, BatchState.RUNNING, BatchState.FAILED)
NOT_ALLOCATED = "not allocated"
NOT_RECEIVED = "not received"
WARNING = "warning"
"""The attribute of a running attempt that says what delays it."""


@dataclass(frozen=True, slots=True)
class OldestUnfinished:
    """The earliest unfinished batch time. ``state`` is the batch's state, or "not allocated"; ``late_seconds`` is the
    time since its batch time."""

    batch_time_ms: int
    state: str
    error: str | None
    late_seconds: float


@dataclass(frozen=True, slots=True)
class StreamStatus:
    """A stream's status at one moment; a value that is not known is None.

    ``lag`` is the number of records that are in Kafka and not in the log; it excludes ``lag_unknown`` partitions, whose
    lag is not known. ``lag_seconds``: everything that Kafka had this long ago is in the log. ``rate`` is in records per
    second. The delays are those of the last completed batch, in seconds from its batch time to its start and to its
    completion. ``health`` is "well", "stopped", or a few words on each problem.
    """

    health: str
    lag: int | None
    lag_unknown: int
    lag_seconds: float | None
    rate: float
    scheduling_delay_seconds: float | None
    total_delay_seconds: float | None
    oldest_unfinished: OldestUnfinished | None
    troubles: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)


def stream_status(ledger: Ledger, row: StreamRow) -> StreamStatus:
    """The present status of a stream."""
    now_ms = ledger.now_ms()
    job, receivers = ledger.jobs.current(row.name), ledger.receivers.all(row.name)
    stopped = row.desired_state is DesiredState.STOPPED
    troubles = [] if stopped else input_troubles(job, receivers, now_ms)
    live = [each for each in receivers if each.alive(now_ms)]
    stats = [each.stats for each in live if "total_lag" in each.stats]
    seconds = [each.get("lag_seconds") for each in stats]
    known = [each for each in seconds if each is not None]
    last = next(iter(ledger.batches.page(row.name, 1, [BatchState.COMPLETED])), None)
    oldest = _oldest_unfinished(ledger, row, now_ms)
    lag_seconds = max(known) if known and len(known) == len(seconds) else None
    return StreamStatus(
        health=", ".join(_ailments(row, troubles=troubles, live=live, oldest=oldest, lag_seconds=lag_seconds))
        or ("stopped" if stopped else "well"),
        lag=sum(each["total_lag"] for each in stats) if stats else None,
        lag_unknown=sum(each.get("lag_unknown", 0) for each in stats),
        lag_seconds=lag_seconds,
        rate=round(sum(each.get("rate", 0.0) for each in stats), 1),
        scheduling_delay_seconds=None if last is None else _seconds(last.batch_time_ms, last.started_at_ms),
        total_delay_seconds=None if last is None else _seconds(last.batch_time_ms, last.completed_at_ms),
        oldest_unfinished=oldest,
        troubles=(*map(str, troubles), *_others(job, now_ms)),
    )


@dataclass(frozen=True, slots=True)
class SlowRuns:
    """Each of the last batches began after another batch time had ended. Milliseconds.

    ``run_ms`` is the mean time between the allocations of consecutive batches. ``late_ms`` is the time from the newest
    batch's first batch time to its allocation.
    """

    run_ms: int
    interval_ms: int
    late_ms: int
    coalesces: bool

    def __str__(self) -> str:
        grows = "batches take over several batch times" if self.coalesces else "the delay grows with each"
        return (
            f"runs take {self.run_ms / 1000:.1f} s and the batch interval is {self.interval_ms / 1000:g} s, so {grows} "
            f"(the last one began {self.late_ms / 1000:.1f} s after its first batch time). Give the stream a longer "
            "batch_interval, or its batch DAG single_task=True"
        )


def slow_runs(ledger: Ledger, stream_name: str, *, coalesces: bool) -> SlowRuns | None:
    """Figures of a stream whose runs take longer than its interval, or None if they do not."""
    newest = ledger.batches.page(stream_name, _SLOW_BATCHES, _ALLOCATED)
    if len(newest) < _SLOW_BATCHES:
        return None
    return slow_runs_of(newest, ledger.streams.get(stream_name).batch_interval_ms, coalesces=coalesces)


def slow_runs_of(newest: Sequence[BatchRow], interval_ms: int, *, coalesces: bool) -> SlowRuns | None:
    """The same from the newest batches that are not absorbed, newest first."""
    if len(newest) < _SLOW_BATCHES:
        return None
    newest = newest[:_SLOW_BATCHES]
    late_ms = [row.allocated_at_ms - min((row.batch_time_ms, *row.absorbed)) for row in newest]
    run_ms = (newest[0].allocated_at_ms - newest[-1].allocated_at_ms) // (_SLOW_BATCHES - 1)
    if run_ms <= interval_ms or min(late_ms) <= interval_ms:
        return None
    return SlowRuns(run_ms, interval_ms, late_ms[0], coalesces)


def last_error(ledger: Ledger, batch: BatchRow) -> str | None:
    """The batch's error, else that of its last failed attempt, or what delays a running attempt. None if the batch is
    done or has no error."""
    if batch.error is not None or batch.state not in UNFINISHED:
        return batch.error
    return error_of(batch, ledger.attempts.of_batch(batch.stream, batch.batch_time_ms))


def error_of(batch: BatchRow, attempts: Sequence[AttemptRow]) -> str | None:
    """`last_error` of an unfinished batch, whose attempts are known."""
    errors = [each.error or each.attributes.get(WARNING) for each in attempts if not each.target]
    return batch.error or next((error for error in reversed(errors) if error), None)


def _oldest_unfinished(ledger: Ledger, row: StreamRow, now_ms: int) -> OldestUnfinished | None:
    allocated = next(iter(ledger.batches.page(row.name, 1, UNFINISHED, oldest_first=True)), None)
    waiting = ledger.blocks.waiting(row.name, now_ms)
    if waiting is not None and (allocated is None or waiting.first_ms < allocated.batch_time_ms):
        return OldestUnfinished(waiting.first_ms, NOT_ALLOCATED, None, (now_ms - waiting.first_ms) / 1000)
    if allocated is None:
        return None
    late = (now_ms - allocated.batch_time_ms) / 1000
    return OldestUnfinished(allocated.batch_time_ms, allocated.state.value, last_error(ledger, allocated), late)


def _ailments(
    row: StreamRow,
    *,
    troubles: Sequence[InputTrouble],
    live: Sequence[ReceiverRow],
    oldest: OldestUnfinished | None,
    lag_seconds: float | None,
) -> Iterator[str]:
    """The problems of the stream, each in a few words."""
    limit = max(_LATE_SECONDS, _LATE_INTERVALS * row.batch_interval_ms / 1000)
    if troubles:
        yield "starting" if all(each.starting for each in troubles) else NOT_RECEIVED
    if any(each.paused_reason for each in live):
        yield "paused"
    if lag_seconds is not None and lag_seconds > limit:
        yield f"{readable_seconds(lag_seconds)} behind Kafka"
    if oldest is not None and oldest.late_seconds > limit:
        yield f"late by {readable_seconds(oldest.late_seconds)}"
    if oldest is not None and oldest.error is not None:
        yield "failing"


def _others(job: JobRow | None, now_ms: int) -> Sequence[str]:
    """Other problems that the tracker has found, such as a foreign member in the stream's group."""
    return tuple(job.attributes.get("troubles") or ()) if job is not None and job.alive(now_ms) else ()


def _seconds(from_ms: int, until_ms: int | None) -> float | None:
    return None if until_ms is None else round((until_ms - from_ms) / 1000, 1)


def readable_seconds(seconds: float) -> str:
    """A duration in its two largest units."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if whole < 10 else f"{whole} s"
    for unit, name, part, part_name in ((86_400, "d", 3_600, "h"), (3_600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= unit:
            rest = whole % unit // part
            return f"{whole // unit} {name}" + (f" {rest} {part_name}" if rest else "")
    raise AssertionError(seconds)
