"""Limits the rates of receivers to what batches can process, as Spark's RateController. The tracker runs it.

Each receiver has its own estimate (as Spark's PIDRateEstimator, from finished batches), so one with a busy partition is
not limited to the share of an idle one. The rates are kept in the ledger: receivers get them with their orders, and the
next tracker continues from them. A full block queue slows a receiver down too.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterable, Sequence

from headrace.blocks import ReceiverId
from headrace.clock import Clock
from headrace.ledger.batches.tables import BatchRow
from headrace.ledger.states import BatchState
from headrace.ledger.tables import JobLease
from headrace.stream.settings import Backpressure
from headrace.stream_context import StreamContext


class PidRateEstimator:
    """A proportional-integral-derivative controller of a rate, in records per second.

    It corrects the last rate by the error (how far that rate is above the processing rate), by the backlog (the records
    that waited before the batch, as a rate) and by the change of the error. Not thread-safe.
    """

    def __init__(
        self, batch_interval_ms: int, settings: Backpressure | None = None, *, latest_rate: float | None = None
    ) -> None:
        """``latest_rate`` is the rate already in force, set by an earlier estimator; the first batch then gives an
        estimate. Raises ValueError for an interval or a rate that is not above 0.
        """
        if batch_interval_ms <= 0:
            raise ValueError(f"a batch interval is above 0 ms, got {batch_interval_ms}")
        if latest_rate is not None and latest_rate <= 0:
            raise ValueError(f"a rate is above 0 records/s, got {latest_rate}")
        self._interval_ms = batch_interval_ms
        self._settings = settings or Backpressure()
        self._latest_rate = latest_rate
        self._latest_error = 0.0
        self._latest_ms: int | None = None

    def compute(
        self, time_ms: int, records: int, *, processing_delay_ms: int, scheduling_delay_ms: int
    ) -> float | None:
        """Return the rate to receive at from now on, in records/s.

        Returns None if this batch gives no estimate: it is the first, has no records, took no time, or did not finish
        after the previous one.

        Args:
            time_ms: when the batch's processing ended.
            records: the number of records processed.
            processing_delay_ms: how long the processing took.
            scheduling_delay_ms: how long the batch waited before it.
        """
        if (self._latest_ms is not None and time_ms <= self._latest_ms) or records <= 0 or processing_delay_ms <= 0:
            return None
        processing_rate = records * 1000 / processing_delay_ms
        before_ms, self._latest_ms = self._latest_ms, time_ms
        if self._latest_rate is None:
            self._latest_rate = processing_rate
            return None
        error = self._latest_rate - processing_rate
        backlog = scheduling_delay_ms * processing_rate / self._interval_ms
        # The error's change is unknown when the rate was taken over from another estimator.
        change = 0.0 if before_ms is None else (error - self._latest_error) * 1000 / (time_ms - before_ms)
        settings = self._settings
        rate = (
            self._latest_rate
            - settings.proportional * error
            - settings.integral * backlog
            - settings.derivative * change
        )
        self._latest_rate = max(settings.min_rate, rate)
        self._latest_error = error
        return self._latest_rate

    def stay_at(self, rate: float) -> None:
        """Continue from ``rate``, because the last estimate was not applied."""
        self._latest_rate = rate


# How much unused rate may be used at once. Short, so that the limit also holds per block.
_BURST_SECONDS = 0.2


class RateLimiter:
    """A token bucket of records. ``grant()`` returns how many records may be taken now. Thread-safe."""

    def __init__(self, max_rate: float | None, clock: Clock, *, initial_rate: float | None = None) -> None:
        """Rates in records/s; None for no limit. ``initial_rate`` is in force, below ``max_rate``, until `update`."""
        for rate in (max_rate, initial_rate):
            if rate is not None and rate <= 0:
                raise ValueError(f"a rate is a positive number of records/s, got {rate}")
        self._max_rate = max_rate
        self._initial_rate = initial_rate
        self._rate = self._at_most(initial_rate)
        self._clock = clock
        self._lock = threading.Lock()
        self._tokens = 1.0
        self._filled = clock.monotonic()

    @property
    def rate(self) -> float | None:
        """The rate in force, in records/s; None for no limit."""
        with self._lock:
            return self._rate

    def update(self, wanted: float | None) -> None:
        """Set the rate to ``wanted`` records/s, at most ``max_rate``; None means ``initial_rate``.

        A value that is not above 0 changes nothing.
        """
        if wanted is not None and wanted <= 0:
            return
        rate = self._at_most(self._initial_rate if wanted is None else wanted)
        with self._lock:
            if rate == self._rate:
                return
            if self._rate is None:
                # Nothing was counted without a limit, so records taken before do not count now.
                self._tokens, self._filled = 1.0, self._clock.monotonic()
            else:
                self._fill(self._rate)
            self._rate = rate

    def grant(self, wanted: int) -> int:
        """Return how many of ``wanted`` records may be taken now, at least 0. The caller reports them to ``spend``."""
        with self._lock:
            if self._rate is None:
                return wanted
            self._fill(self._rate)
            return max(0, min(wanted, int(self._tokens)))

    def spend(self, records: int) -> None:
        """Account for ``records`` that were taken."""
        with self._lock:
            # Unused rate up to now is bounded before, so that the end of a long pause gives no burst.
            if self._rate is not None:
                self._fill(self._rate)
            self._tokens -= records

    def delay(self) -> float:
        """Return the seconds until at least one record may be taken."""
        with self._lock:
            if self._rate is None:
                return 0.0
            self._fill(self._rate)
            return max(0.0, (1.0 - self._tokens) / self._rate)

    def _at_most(self, rate: float | None) -> float | None:
        return min((bound for bound in (self._max_rate, rate) if bound is not None), default=None)

    def _fill(self, rate: float) -> None:
        now = self._clock.monotonic()
        most = max(1.0, rate * _BURST_SECONDS)
        self._tokens = min(most, self._tokens + (now - self._filled) * rate)
        self._filled = now


logger = logging.getLogger(__name__)

_POLL_SECONDS = 1.0
# Completed batches read at a time, besides those that run at the same time: more than complete within a second.
_MAX_BATCHES = 20


class RateController:
    """Sets the rates of the stream's receivers. Every call may raise LedgerUnavailableError; repeat it then."""

    def __init__(self, context: StreamContext, job: JobLease) -> None:
        stream = context.stream
        self._stream = stream
        self._ledger = context.ledger
        self._clock = context.clock
        self._job = job
        self._settings = stream.limits.backpressure
        self._receivers = [
            ReceiverId(stream.name, source.id, index) for source in stream.inputs for index in range(source.receivers)
        ]
        self._estimators: dict[ReceiverId, PidRateEstimator] = {}
        self._rates: dict[ReceiverId, float] = {}
        self._unsent: dict[ReceiverId, float | None] = {}
        self._seen_ms: int | None = None
        self._next_poll = 0.0

    def begin(self) -> None:
        """Continue from the ledger's rates, at the newest completed batch; without backpressure remove the rates."""
        rates = {row.receiver_id: row.max_rate for row in self._ledger.receivers.all(self._stream.name)}
        if self._settings is None:
            self._unsent = {receiver: None for receiver, rate in rates.items() if rate is not None}
            self._send()
            return
        initial = self._settings.initial_rate
        self._rates = {
            receiver: rate for receiver in self._receivers if (rate := rates.get(receiver) or initial) is not None
        }
        self._estimators = {
            receiver: PidRateEstimator(
                self._stream.batch_interval_ms, self._settings, latest_rate=self._rates.get(receiver)
            )
            for receiver in self._receivers
        }
        newest = self._completed(1)
        self._seen_ms = newest[0].batch_time_ms if newest else 0

    def follow(self) -> None:
        """Update the rates if a batch has completed since the last call. Raises LeaseLostError."""
        now = self._clock.monotonic()
        if self._seen_ms is None or now < self._next_poll:
            return
        self._next_poll = now + _POLL_SECONDS
        slots = 1 if self._stream.is_ordered else self._stream.limits.max_concurrent_batches
        batches = self._completed(_MAX_BATCHES + slots)
        running = self._ledger.batches.page(self._stream.name, slots, [BatchState.RUNNING])
        # The records of built batches were read from Kafka by batches, not by receivers.
        fresh = [batch for batch in batches if batch.batch_time_ms > self._seen_ms and not batch.built]
        for batch in sorted(fresh, key=lambda completed: (completed.completed_at_ms or 0, completed.batch_time_ms)):
            # Batches that run at the same time process that many times the records.
            at_once = min(slots, ran_at_once(batch, [*batches, *running]))
            self._learn(batch, waited_ms(batch, batches, slots, since_ms=self._ready_ms(batch)), at_once)
        self._seen_ms = max([self._seen_ms, *(batch.batch_time_ms for batch in batches)])
        self._send()

    def _ready_ms(self, batch: BatchRow) -> int:
        """The time from which the batch could run.

        By timestamp, its records may come long after the batch time, and it waits until late records are no longer
        allowed. Neither is a backlog of batches.
        """
        if self._stream.batch_by == "arrival":
            return batch.batch_time_ms
        blocks = self._ledger.allocations.blocks_of(self._stream.name, batch.batch_time_ms)
        cuts = (block.info.cut_time_ms for block in blocks)
        return max(batch.batch_time_ms + self._stream.allowed_lateness_ms, *cuts, 0)

    def _completed(self, limit: int) -> list[BatchRow]:
        return self._ledger.batches.page(self._stream.name, limit, [BatchState.COMPLETED])

    def _learn(self, batch: BatchRow, scheduling_delay_ms: int, at_once: int) -> None:
        if batch.started_at_ms is None or batch.completed_at_ms is None:
            return
        records = self._records(batch.batch_time_ms)
        for receiver, estimator in self._estimators.items():
            rate = estimator.compute(
                batch.completed_at_ms,
                records[receiver],
                processing_delay_ms=-(-(batch.completed_at_ms - batch.started_at_ms) // at_once),
                scheduling_delay_ms=scheduling_delay_ms,
            )
            if rate is None:
                continue
            before = self._rates.get(receiver)
            if before is not None and rate < before and not scheduling_delay_ms:
                # Batches keep up. A small batch may take as long as a large one because of its fixed cost; that is no
                # reason to lower the rate.
                estimator.stay_at(before)
                continue
            self._rates[receiver] = self._unsent[receiver] = rate

    def _records(self, batch_time_ms: int) -> Counter[ReceiverId]:
        """Return the batch's records per receiver, counting only partitions by their present owner."""
        owners = {
            (row.input_id, row.partition): row.receiver_index
            for row in self._ledger.positions.all(self._stream.name, live=True)
        }
        records: Counter[ReceiverId] = Counter()
        for taken in self._ledger.batches.inputs(self._stream.name, batch_time_ms):
            owner = owners.get((taken.input_id, taken.partition))
            if owner is not None:
                records[ReceiverId(self._stream.name, taken.input_id, owner)] += taken.records
        return records

    def _send(self) -> None:
        if self._unsent:
            self._ledger.receivers.set_rate(self._job, self._unsent)
            logger.info(
                "rates of %s: %s", self._stream.name, {str(receiver): r for receiver, r in self._unsent.items()}
            )
            self._unsent = {}


def waited_ms(batch: BatchRow, completed: Sequence[BatchRow], slots: int, *, since_ms: int) -> int:
    """Return how long the batch waited for earlier batches, of which ``slots`` run at the same time, from ``since_ms``.

    This is the backlog. It does not include the start-up cost of a run before Spark begins, which exists without any
    backlog. ``completed`` may hold any batches.
    """
    ends_ms = sorted(
        (
            earlier.completed_at_ms
            for earlier in completed
            if earlier.batch_time_ms < batch.batch_time_ms and earlier.completed_at_ms is not None
        ),
        reverse=True,
    )
    if len(ends_ms) < slots or batch.started_at_ms is None:
        return 0
    return max(0, min(batch.started_at_ms, ends_ms[slots - 1]) - since_ms)


def ran_at_once(batch: BatchRow, others: Iterable[BatchRow]) -> int:
    """Return the most batches that ran at one time during this one's run, including it. ``others`` may hold any."""
    begun_ms, end_ms = batch.started_at_ms, batch.completed_at_ms
    if begun_ms is None or end_ms is None:
        return 1
    runs = [
        (max(begun_ms, other.started_at_ms), end_ms if other.completed_at_ms is None else other.completed_at_ms)
        for other in others
        if other.batch_time_ms != batch.batch_time_ms and other.started_at_ms is not None
    ]
    # The maximum is reached when one of them has just begun.
    together = (
        sum(at_ms <= start_ms < until_ms for at_ms, until_ms in runs) for start_ms, _ in runs if start_ms < end_ms
    )
    return 1 + max(together, default=0)
