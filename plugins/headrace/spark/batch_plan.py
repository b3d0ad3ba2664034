"""What each output of a batch reads: decided by the ledger alone, without Spark, which may not be needed at all.

Airflow asks it too: nothing here imports pyspark.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.spark.outputs.registry import needs_empty_batches
from headrace.stream import STATE_STEP

if TYPE_CHECKING:
    from headrace.ledger import Ledger
    from headrace.ledger.rows import BatchOrigin
    from headrace.stream import Output, Stream, Window


@dataclass(frozen=True, slots=True)
class OutputPlan:
    """What one output does at a batch time.

    It reads the batches of ``origins``, oldest first. The dead letters of records that do not decode are those of
    ``fresh``: of the batches that no earlier window of the output held, so that each is written once. ``needs_spark``
    is False where nothing comes of it. ``skipped`` says why the output has nothing to do at this batch time.
    """

    output: Output
    origins: tuple[BatchOrigin, ...] = ()
    fresh: tuple[BatchOrigin, ...] = ()
    needs_spark: bool = False
    skipped: str | None = None

    @property
    def from_kafka(self) -> bool:
        """Whether some of what it reads is no longer in the log."""
        return any(origin.source == "kafka" for origin in self.origins)


def plan_outputs(ledger: Ledger, stream: Stream, batch_time_ms: int, steps: Iterable[str]) -> list[OutputPlan]:
    """The plans of these steps' outputs, in the order of ``steps``; the step "state" is none."""
    return [_plan(ledger, stream, batch_time_ms, stream.output(step)) for step in steps if step != STATE_STEP]


def _plan(ledger: Ledger, stream: Stream, batch_time_ms: int, output: Output) -> OutputPlan:
    interval_ms = stream.batch_interval_ms
    window = output.window
    if window is not None and not window.is_due(batch_time_ms, interval_ms):
        every = window.slide_ms(interval_ms)
        return OutputPlan(output, skipped=f"no window ends at this batch time, but every {every} ms")
    times = (batch_time_ms,) if window is None else tuple(window.batch_times_ms(batch_time_ms, interval_ms))
    by_time = ledger.batches.origins(stream.name, times)
    origins = tuple(by_time[time] for time in times if time in by_time)
    return OutputPlan(
        output,
        origins,
        tuple(origin for origin in origins if _is_fresh(origin, window, batch_time_ms, interval_ms)),
        needs_empty_batches(output, stream) or _hold_records(ledger, stream, origins),
    )


def _is_fresh(origin: BatchOrigin, window: Window | None, batch_time_ms: int, interval_ms: int) -> bool:
    return window is None or origin.batch_time_ms > batch_time_ms - window.slide_ms(interval_ms)


def _hold_records(ledger: Ledger, stream: Stream, origins: tuple[BatchOrigin, ...]) -> bool:
    # The newest first: the batch itself seldom is empty, and then no other is asked.
    return any(ledger.batches.get(stream.name, origin.batch_time_ms).records for origin in reversed(origins))
