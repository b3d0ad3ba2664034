"""Plans what each output of a batch reads. It uses only the ledger, because a batch may not need Spark at all.

Airflow uses it too, so nothing here imports pyspark.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.spark.outputs.registry import needs_empty_batches
from headrace.stream import STATE_STEP

if TYPE_CHECKING:
    from headrace.ledger import Ledger
    from headrace.ledger.models import BatchOrigin
    from headrace.stream import Output, Stream


@dataclass(frozen=True, slots=True)
class OutputPlan:
    """What one output does at a batch time.

    Its rows are made from the batches of ``origins``, oldest first. Undecodable records of the batches in ``fresh``
    become dead letters. ``fresh`` has the batches since the previous window, so each such record is written once,
    whether a window contains it or not. ``needs_spark`` is False if these batches give no rows. ``skipped`` is the
    reason why the output has nothing to do at this batch time.
    """

    output: Output
    origins: tuple[BatchOrigin, ...] = ()
    fresh: tuple[BatchOrigin, ...] = ()
    needs_spark: bool = False
    skipped: str | None = None

    @property
    def read(self) -> tuple[BatchOrigin, ...]:
        """All batches that are read, oldest first."""
        return tuple(sorted({*self.origins, *self.fresh}, key=lambda origin: origin.batch_time_ms))

    @property
    def from_kafka(self) -> bool:
        """Whether some of these batches are read from Kafka, because the log does not have them."""
        return any(origin.source == "kafka" for origin in self.read)


def plan_outputs(ledger: Ledger, stream: Stream, batch_time_ms: int, steps: Iterable[str]) -> list[OutputPlan]:
    """The plans of these steps' outputs, in the order of ``steps``; the step "state" has no plan."""
    return [_plan(ledger, stream, batch_time_ms, stream.output(step)) for step in steps if step != STATE_STEP]


def _plan(ledger: Ledger, stream: Stream, batch_time_ms: int, output: Output) -> OutputPlan:
    interval_ms = stream.batch_interval_ms
    window = output.window
    if window is not None and not window.is_due(batch_time_ms, interval_ms):
        every = window.slide_ms(interval_ms)
        return OutputPlan(output, skipped=f"no window ends at this batch time, but every {every} ms")
    held: Iterable[int] = (batch_time_ms,)
    fresh: Iterable[int] = (batch_time_ms,)
    if window is not None:
        held = window.batch_times_ms(batch_time_ms, interval_ms)
        fresh = window.fresh_times_ms(batch_time_ms, interval_ms)
    by_time = ledger.batches.origins(stream.name, {*held, *fresh})
    return OutputPlan(
        output,
        tuple(by_time[time] for time in held if time in by_time),
        tuple(by_time[time] for time in fresh if time in by_time),
        needs_empty_batches(output, stream) or _hold_records(ledger, stream, sorted(by_time)),
    )


def _hold_records(ledger: Ledger, stream: Stream, times_ms: Sequence[int]) -> bool:
    # The newest first: the batch itself is rarely empty, so usually one query is enough.
    return any(ledger.batches.get(stream.name, time_ms).records for time_ms in reversed(times_ms))
