"""Estimates the rate to receive at so that batches keep up, from finished batches, as Spark's PIDRateEstimator."""

from __future__ import annotations

from headrace.stream.settings import Backpressure


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
