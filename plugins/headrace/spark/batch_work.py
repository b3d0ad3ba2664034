"""Does an attempt's work: updates the state, then writes each output. A step that fails does not stop the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import IO, TYPE_CHECKING, Any

from headrace.elasticsearch.errors import ForeignDocumentsError
from headrace.spark.batch_reading import BatchReading
from headrace.spark.output_frames import OutputFrames, sharing_a_frame
from headrace.spark.outputs.registry import writer_of
from headrace.spark.outputs.writer import Counts, WrittenBatch
from headrace.spark.transforms import BatchContext
from headrace.stream import STATE_STEP, ElasticsearchOutput

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from headrace.ledger.models import Attempt, BatchOrigin
    from headrace.spark.batch_plan import OutputPlan
    from headrace.spark.incarnations import BatchIncarnations
    from headrace.spark.job_scope import JobScope
    from headrace.stream import Stream, Window


class WorkStopped(Exception):  # noqa: N818 - not an error: the code that stopped it reports why
    """The attempt was stopped before one of its steps."""


@dataclass
class BatchWork:
    """One attempt's work. Afterwards ``results`` has the counts of the completed steps, ``failures`` the errors of the
    failed ones.

    Args:
        own: the origin of the batch's own records.
        leaving: the origins of the records that leave the state's window.
        plans: what each output reads.
        session: opens the Spark session; called when it is first needed.
        new_scope: makes the scope of the attempt's Spark jobs.
        out: where console outputs print.
        progress: receives lines of text on the progress.
        stopped: returns True if no further step may begin.
        partitions: the approximate number of tasks that read an input.
        written_before: the outputs to which an earlier attempt may have written documents.
        tried_before: the outputs that an earlier attempt included.
    """

    stream: Stream
    attempt: Attempt
    own: BatchOrigin
    leaving: tuple[BatchOrigin, ...]
    plans: Sequence[OutputPlan]
    parameters: Mapping[str, Any]
    session: Callable[[], SparkSession]
    new_scope: Callable[[SparkSession], JobScope]
    out: IO[str]
    progress: Callable[[str], None]
    stopped: Callable[[], bool] = lambda: False
    partitions: int | None = None
    written_before: Collection[str] = ()
    tried_before: Collection[str] = ()
    results: dict[str, Counts] = field(default_factory=dict)
    failures: dict[str, Exception] = field(default_factory=dict)
    _begun: set[str] = field(default_factory=set, init=False)
    _scope: JobScope | None = field(default=None, init=False)

    def run(self, record: Callable[[str, Counts], None]) -> None:
        """Run every step. ``record`` is called with the counts of each step as soon as it is done.

        Raises WorkStopped and the errors of ``session`` and ``record``. A step's own error is stored in ``failures``.
        """
        reading = BatchReading(self.stream, self._open, self.partitions)
        if STATE_STEP in self.attempt.outputs:
            _ = reading.spark
            self._step(STATE_STEP, record, partial(self._update_state, reading))
        elif any(plan.needs_spark for plan in self.plans):
            _ = reading.spark
        for group in sharing_a_frame(self.stream, self.plans):
            frames = OutputFrames(
                self.stream,
                group,
                reading,
                self._context(group[0].output.window),
                batch_time_ms=self.attempt.batch_time_ms,
                state_failed=STATE_STEP in self.failures,
            )
            with frames:
                for plan in group:
                    self._step(plan.output.id, record, partial(self._write, plan, reading, frames))

    @property
    def written(self) -> list[str]:
        """The outputs that may hold documents of this attempt, as `earlier_attempts.WRITTEN` defines it."""
        return sorted(
            output for output in self._begun if not isinstance(self.failures.get(output), ForeignDocumentsError)
        )

    def _open(self) -> SparkSession:
        spark = self.session()
        self._scope = self.new_scope(spark)
        return spark

    def _step(self, step: str, record: Callable[[str, Counts], None], work: Callable[[], Counts]) -> None:
        if self.stopped():
            raise WorkStopped
        started = time.monotonic()
        if self._scope is not None:
            self._scope.enter(step)
        try:
            counts = work()
        except Exception as error:
            self.failures[step] = error
            self.progress(f"{_named(step)} failed")
            return
        counts = {**counts, "duration_seconds": round(time.monotonic() - started, 3)}
        record(step, counts)
        self.results[step] = counts
        self.progress(f"{_named(step)}: {readable(counts)}")

    def _update_state(self, reading: BatchReading) -> Counts:
        from headrace.spark.state.updating import update_state

        leaving = reading.decoded(self.leaving) if self.leaving else None
        inputs = reading.decoded((self.own,))
        return update_state(reading.spark, self.stream, inputs, self._batch(None), leaving=leaving)

    def _write(self, plan: OutputPlan, reading: BatchReading, frames: OutputFrames) -> Counts:
        if plan.skipped is not None:
            return {"skipped": plan.skipped}
        writer, window = writer_of(plan.output), plan.output.window
        if not plan.needs_spark:
            self._begun.add(plan.output.id)
            return {"undecodable": 0, **writer.write(None, self._batch(plan))}
        undecodable, letters = reading.undecodable(plan.fresh)
        if undecodable:
            kept = isinstance(plan.output, ElasticsearchOutput)
            where = "go to the dead letters as they are" if kept else "are not among the rows"
            self.progress(f"{_named(plan.output.id)}: {undecodable:,} records do not decode and {where}")
        incarnations = partial(reading.incarnations, plan.origins)
        frame = frames.of(plan.output)
        self._begun.add(plan.output.id)
        counts = writer.write(frame, self._batch(plan, letters, incarnations))
        batches = {} if window is None else {"batches": len(plan.origins)}
        return {"undecodable": undecodable, **batches, **counts}

    def _batch(
        self,
        plan: OutputPlan | None,
        undecodable: Mapping[str, DataFrame] | None = None,
        incarnations: Callable[[], BatchIncarnations] | None = None,
    ) -> WrittenBatch:
        return WrittenBatch(
            stream=self.stream,
            context=self._context(None if plan is None else plan.output.window),
            batch_time_ms=self.attempt.batch_time_ms,
            attempt=self.attempt.number,
            manifest_uri=self.own.manifest_uri,
            from_kafka=self.own.source == "kafka",
            target=self.attempt.target,
            undecodable=undecodable or {},
            out=self.out,
            progress=self.progress,
            earlier=() if plan is None else tuple(origin for origin in plan.read if origin != self.own),
            incarnations=incarnations,
            written_before=plan is not None and plan.output.id in self.written_before,
            tried_before=plan is not None and plan.output.id in self.tried_before,
        )

    def _context(self, window: Window | None) -> BatchContext:
        return BatchContext.of(
            self.stream.name,
            self.attempt.batch_time_ms,
            self.stream.batch_interval_ms,
            self.attempt.number,
            parameters=self.parameters,
            window_ms=None if window is None else window.length_ms,
            target=self.attempt.target,
        )


def _named(step: str) -> str:
    return "the state" if step == STATE_STEP else f"output {step}"


def readable(counts: Counts) -> str:
    """The counts that are not 0, as readable text."""
    if "skipped" in counts:
        return str(counts["skipped"])
    shown = {name: value for name, value in counts.items() if value and isinstance(value, int | float)}
    return ", ".join(f"{name} {value:,}" for name, value in shown.items()) or "nothing to do"
