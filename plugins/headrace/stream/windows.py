"""Windows: batches that read the records of the batches before them too."""

from __future__ import annotations

from pydantic import Field

from headrace.stream.model import Duration, Part, milliseconds


class Window(Part):
    """The batches of the last ``length``, at every ``slide``; both are multiples of the batch interval.

    The window of batch time T holds the data interval ``[T - length, T)``. Between two slides an output with a window
    writes nothing, as in Spark: of a slide of 30 s, the batch times that are multiples of 30 s since the epoch count.

    It holds whole batches: one that took over batch times before it (coalescing) is in the windows that its own time is
    in, with all of its records.
    """

    length: Duration
    slide: Duration | None = Field(default=None, description="By default the batch interval.")

    @property
    def length_ms(self) -> int:
        """Milliseconds that a window reaches back."""
        return milliseconds(self.length)

    def slide_ms(self, batch_interval_ms: int) -> int:
        """Milliseconds from one window to the next."""
        return batch_interval_ms if self.slide is None else milliseconds(self.slide)

    def is_due(self, batch_time_ms: int, batch_interval_ms: int) -> bool:
        """Whether a window ends at this batch time."""
        return batch_time_ms % self.slide_ms(batch_interval_ms) == 0

    def reach_ms(self, batch_interval_ms: int) -> int:
        """Milliseconds back to the window before, or to the window's own begin if that is longer ago."""
        return max(self.length_ms, self.slide_ms(batch_interval_ms))

    def batch_times_ms(self, batch_time_ms: int, batch_interval_ms: int) -> range:
        """The batch times in the window that ends at ``batch_time_ms``, oldest first."""
        return _times_in(self.length_ms, batch_time_ms, batch_interval_ms)

    def fresh_times_ms(self, batch_time_ms: int, batch_interval_ms: int) -> range:
        """The batch times since the window before this one ended, oldest first."""
        return _times_in(self.slide_ms(batch_interval_ms), batch_time_ms, batch_interval_ms)


def _times_in(span_ms: int, batch_time_ms: int, batch_interval_ms: int) -> range:
    return range(batch_time_ms - span_ms + batch_interval_ms, batch_time_ms + 1, batch_interval_ms)
