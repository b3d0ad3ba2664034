"""Windows: a batch with a window also reads the records of earlier batches."""

from __future__ import annotations

from pydantic import Field

from headrace.stream.model import Duration, Part, milliseconds


class Window(Part):
    """The batches of the last ``length``, at every ``slide``; both are multiples of the batch interval.

    The window of batch time T holds the data interval ``[T - length, T)``. Between two slides an output with a window
    writes nothing, as in Spark: with a slide of 30 s it writes at batch times that are multiples of 30 s since the Unix
    epoch.

    A window holds whole batches. A batch that took over earlier batch times (coalescing) is, with all its records, in
    the windows that contain its own batch time.
    """

    length: Duration
    slide: Duration | None = Field(default=None, description="By default the batch interval.")

    @property
    def length_ms(self) -> int:
        """The window's length in milliseconds."""
        return milliseconds(self.length)

    def slide_ms(self, batch_interval_ms: int) -> int:
        """Milliseconds from one window to the next."""
        return batch_interval_ms if self.slide is None else milliseconds(self.slide)

    def is_due(self, batch_time_ms: int, batch_interval_ms: int) -> bool:
        """Whether a window ends at this batch time."""
        return batch_time_ms % self.slide_ms(batch_interval_ms) == 0

    def reach_ms(self, batch_interval_ms: int) -> int:
        """Milliseconds back to the window's start, or to the end of the window before it if that is earlier."""
        return max(self.length_ms, self.slide_ms(batch_interval_ms))

    def batch_times_ms(self, batch_time_ms: int, batch_interval_ms: int) -> range:
        """The batch times in the window that ends at ``batch_time_ms``, oldest first."""
        return _times_in(self.length_ms, batch_time_ms, batch_interval_ms)

    def fresh_times_ms(self, batch_time_ms: int, batch_interval_ms: int) -> range:
        """The batch times after the end of the previous window, oldest first."""
        return _times_in(self.slide_ms(batch_interval_ms), batch_time_ms, batch_interval_ms)


def _times_in(span_ms: int, batch_time_ms: int, batch_interval_ms: int) -> range:
    return range(batch_time_ms - span_ms + batch_interval_ms, batch_time_ms + 1, batch_interval_ms)
