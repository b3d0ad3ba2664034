"""Reports the delays of the last batches in the receiver job's log, as Spark's StatsReportListener does."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence

from headrace.listeners.events import BatchCompleted, BatchInfo
from headrace.listeners.stream_listener import StreamListener

logger = logging.getLogger(__name__)

# The quantiles of Spark's report.
_PERCENTS = (0, 5, 10, 25, 50, 75, 90, 95, 100)
_FIGURES: tuple[tuple[str, Callable[[BatchInfo], int | None]], ...] = (
    ("Scheduling delay", lambda batch: batch.scheduling_delay_ms),
    ("Processing time", lambda batch: batch.processing_time_ms),
    ("Total delay", lambda batch: batch.total_delay_ms),
)


class StatsReport(StreamListener):
    """After each batch that succeeded, logs the quantiles of the delays of the last ``batches`` of them.

    With a ``prefix``, its lines begin with it.
    """

    def __init__(self, batches: int = 10, prefix: str = "") -> None:
        if batches < 1:
            raise ValueError(f"batches must be 1 or more, not {batches}")
        self._prefix = prefix
        self._last: deque[BatchInfo] = deque(maxlen=batches)

    def on_batch_completed(self, event: BatchCompleted) -> None:
        if not event.succeeded:
            return
        # A batch that is run again, or an event that comes again, replaces the former.
        kept = [batch for batch in self._last if batch.batch_time_ms != event.batch.batch_time_ms]
        self._last.clear()
        self._last.extend([*kept, event.batch])
        for line in self.lines():
            logger.info("%s%s", self._prefix, line)

    def lines(self) -> list[str]:
        """The report in lines: for each figure, its quantiles in seconds."""
        shown = []
        for name, figure in _FIGURES:
            values = sorted(value for batch in self._last if (value := figure(batch)) is not None)
            if values:
                cells = (f"{percent}% {_quantile(values, percent) / 1000:.1f} s" for percent in _PERCENTS)
                shown.append(f"{name} of the last {len(values)} batches: {', '.join(cells)}")
        return shown


def _quantile(values: Sequence[int], percent: int) -> int:
    """The value below which this part of the sorted values lies, as Spark's Distribution takes it."""
    return values[min(len(values) * percent // 100, len(values) - 1)]
