"""How fast to receive so that batches keep up: Spark's PIDRateEstimator, from what each finished batch took."""

from __future__ import annotations

from headrace.stream.limits import Backpressure


class PidRateEstimator:
    """A proportional-integral-derivative controller of a rate, in records per second.

    The rate that was last asked for is corrected by the error (how far it is above the rate of processing), by the
    backlog (what waited before the batch, as a rate) and by the error's change. Not thread-safe.
    """

    def __init__(
        self, batch_interval_ms: int, settings: Backpressure | None = None, *, latest_rate: float | None = None
    ) -> None:
        """``latest_rate``: the rate that is in force already, by an earlier estimator; its first estimate then comes
        after the first batch. Raises ValueError for an interval or a rate that is not above 0.
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
        """The rate to receive at from now on, or None where this batch gives none: the first one, one of no records or
        that took no time, and one that did not finish after the one before.

        Args:
            time_ms: when the batch's processing ended.
            records: what was processed.
            processing_delay_ms: how long that took.
            scheduling_delay_ms: how long the batch waited before.
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
        # With a rate taken over from another estimator the change of its error is not known.
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
        """Go on from ``rate``: the last estimate was not followed."""
        self._latest_rate = rate
