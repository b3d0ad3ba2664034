"""Runs one attempt at a batch, from its plan to its result in the ledger:

1. Plan what each output reads, and check the manifests (``batch_plan``). Meanwhile check that the ledger is the
   folder's, and leave its mark (``stream_folder``).
2. Open the Spark session, if a step needs it (``batch_command``).
3. Update the state, if the attempt includes that step (``state.updating``).
4. Make the rows of the outputs that share a transform and a window (``batch_frames``), and write each of these outputs
   (``outputs``). A step that fails does not stop the others.
5. Record the counts of each step in the ledger as soon as it is done.
6. Complete the attempt. The ledger completes the batch when all of its required outputs are recorded.
   Or, if a step failed, fail the attempt. Its attributes record for the next attempts which outputs may hold documents,
   and whether to try again.

Steps 2 to 5 run in a thread of their own. The calling thread waits for it and renews the attempt's lease, so the lease
is renewed only as long as a caller waits. If the attempt is fenced or terminated, the calling thread cancels this
attempt's Spark jobs and no others.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING, Any, cast

from headrace.batch.places import READERS, left_behind, newest_place, newest_places
from headrace.elasticsearch.errors import ForeignDocumentsError, TooManyDeadLettersError
from headrace.errors import FAILURE, INTERRUPTED, TRIED_WITH, WARNING, Failure, HeadraceError
from headrace.ledger import BatchState
from headrace.ledger.batches.attempts import LIMIT_EXCEEDED
from headrace.ledger.errors import AttemptFencedError, LedgerUnavailableError
from headrace.spark.attempts.batch_plan import WRITTEN, plan_attempt
from headrace.spark.attempts.failures import (
    as_attempt_failed,
    attempt_failed,
    ended_from_outside,
    failure_of,
    reason_of,
)
from headrace.spark.outputs.writer import BlockWriter, Counts, WrittenBatch, writer_of
from headrace.spark.records.batch_frames import BatchInputs, OutputFrames, blocks_of, sends_blocks, sharing_frames
from headrace.spark.records.transforms import code_version, tried_with
from headrace.stream import STATE_STEP

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from headrace.elasticsearch.counts import HeldVersion
    from headrace.ledger.batches.tables import BatchRow
    from headrace.spark.attempts.batch_attempt import BatchAttempt
    from headrace.spark.attempts.batch_plan import AttemptPlan, OutputPlan
    from headrace.spark.outputs.documents import BatchIncarnations


logger = logging.getLogger(__name__)

# How long to wait for cancelled Spark jobs to end.
_CANCEL_SECONDS = 15.0
_ERROR_CHARACTERS = 2_000


@dataclass(frozen=True, slots=True)
class BatchResult:
    """The result of an attempt. ``outputs`` has each step's counts, ``seconds`` is the attempt's duration.

    ``state`` is the batch's state afterwards: "completed", or another one while other outputs are not done.
    """

    stream: str
    batch_time_ms: int
    attempt: int
    records: int
    blocks: int
    seconds: float
    outputs: dict[str, Counts] = field(default_factory=dict)
    state: str = BatchState.COMPLETED.value
    source: str = "log"
    target: str = ""
    code_version: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON fields."""
        return asdict(self)


def run_attempt(attempt: BatchAttempt) -> BatchResult:
    """Run the steps of an attempt that has begun, and complete it. The attempt runs its own outputs only.

    Raises:
        AttemptFailedError: the transform, an output or Spark failed. The attempt has failed; the batch can be run
            again. If the only failed step raised another of headrace's errors, that one is raised.
        AttemptFencedError: a newer attempt took the batch. This attempt's Spark jobs are cancelled.
    """
    return _AttemptRun(attempt).run()


class _Stopped(Exception):  # noqa: N818 - not an error: the code that stopped the attempt reports why
    """The attempt was stopped before one of its steps."""


class _AttemptRun:
    """``results`` has the counts of the completed steps, ``failures`` the errors of the failed ones."""

    def __init__(self, attempt: BatchAttempt) -> None:
        self._attempt = attempt
        self._claim = attempt.claim
        self._ledger = attempt.ledger
        self._clock = attempt.context.clock
        self._results: dict[str, Counts] = {}
        self._failures: dict[str, Exception] = {}
        self._begun: set[str] = set()
        self._readers: Mapping[str, Any] = {}
        self._error: BaseException | None = None
        self._ended = threading.Event()
        self._cancelled = threading.Event()

    def run(self) -> BatchResult:
        started = self._clock.monotonic()
        batch = self._ledger.batches.get(self._claim.stream, self._claim.batch_time_ms)
        try:
            with ThreadPoolExecutor(1, "headrace-mark") as pool:
                # Before anything is written: a ledger that was set back to a time before this attempt is then refused.
                marked = pool.submit(self._attempt.context.storage.mark.leave, attempt=self._claim.number)
                plan = plan_attempt(self._attempt.context, self._claim, batch)
                marked.result()
        except Exception as error:
            self._fail(error, [])
            raise
        self._attempt.report(_records_line(batch, plan))
        threading.Thread(target=self._run_steps, args=(plan,), name="headrace-batch", daemon=True).start()
        try:
            self._renew_until_ended()
        except BaseException as error:
            self._cancel()
            # Steps that have not ended may still begin to write to any output.
            self._fail(error, self._written() if self._ended.is_set() else list(self._claim.outputs))
            raise
        failure = self._error or (attempt_failed(self._failures, self._results) if self._failures else None)
        if failure is not None:
            self._raise_if_fenced(failure)
            self._fail(failure, self._written())
            raise failure
        return self._complete(batch, plan, started)

    def _run_steps(self, plan: AttemptPlan) -> None:
        """Steps 2 to 5, in a thread of their own."""
        attempt = self._attempt
        try:
            inputs = BatchInputs(attempt)
            has_state = STATE_STEP in self._claim.outputs
            if has_state or any(output.needs_spark for output in plan.outputs):
                self._readers = inputs.readers.facts
            if has_state or any(output.needs_spark and not self._shares_jobs(output) for output in plan.outputs):
                # The property opens the session.
                _ = attempt.spark
            if has_state:
                self._run_step(STATE_STEP, partial(self._update_state, plan, inputs))
            for group in sharing_frames(attempt.stream, plan.outputs):
                with OutputFrames(attempt, inputs, group, state_failed=STATE_STEP in self._failures) as frames:
                    for output in group:
                        self._run_step(output.output.step, partial(self._write, plan, output, inputs, frames))
        except BaseException as error:
            self._error = as_attempt_failed(error)
        finally:
            self._ended.set()

    def _shares_jobs(self, output: OutputPlan) -> bool:
        return self._attempt.shares_jobs and sends_blocks(self._attempt.stream, output)

    def _run_step(self, step: str, work: Callable[[], Counts]) -> None:
        """Run one step and record its counts. If it fails, note its error.

        Raises _Stopped, and HeadraceError if the ledger refuses the counts.
        """
        if self._cancelled.is_set():
            raise _Stopped
        started = self._clock.monotonic()
        try:
            self._attempt.name_jobs(step)
        except Exception as error:
            # It makes requests to a Connect server. If the server is gone, the step itself reports that.
            logger.debug("the Spark jobs of %s have no names: %s", step, error)
        name = "the state" if step == STATE_STEP else f"output {self._attempt.stream.output_of_step(step).id}"
        try:
            counts = work()
        except Exception as error:
            self._failures[step] = error
            self._attempt.report(f"{name} failed")
            return
        counts = {**counts, "duration_seconds": round(self._clock.monotonic() - started, 3)}
        version = code_version(self._attempt.stream, [step])
        self._ledger.attempts.record_output(self._claim, step, counts, code_version=version)
        self._results[step] = counts
        self._attempt.report(f"{name}: {_counts_line(counts)}")

    def _update_state(self, plan: AttemptPlan, inputs: BatchInputs) -> Counts:
        from headrace.spark.state.updating import update_state

        leaving = inputs.decoded(plan.leaving, by_state=True) if plan.leaving else None
        entering = inputs.decoded((plan.own,))
        counts = update_state(
            self._attempt.spark, self._attempt.stream, entering, self._written_batch(plan), leaving=leaving
        )
        return {**counts, **self._read_by}

    @property
    def _read_by(self) -> Counts:
        """The count by which later attempts know how the records were decoded; none if a step decoded no record."""
        return {READERS: dict(self._readers)} if self._readers else {}

    def _write(self, plan: AttemptPlan, output: OutputPlan, inputs: BatchInputs, frames: OutputFrames) -> Counts:
        if output.skipped is not None:
            return {"skipped": output.skipped}
        step, writer = output.output.step, writer_of(output.output)
        if not output.needs_spark:
            self._begun.add(step)
            return {"undecodable": 0, **writer.write(None, self._written_batch(plan, output))}
        batches = {} if output.output.window is None else {"batches": len(output.origins)}
        if sends_blocks(self._attempt.stream, output):
            return {"undecodable": 0, **batches, **self._write_blocks(plan, output, cast("BlockWriter", writer))}
        frame = frames.of(output.output)
        # Cached: the writer may call it. Else it is called after the write, when it does not read all records again.
        undecodable = cache(partial(self._undecodable, output, inputs))
        incarnations = partial(inputs.incarnations, output.origins)
        self._begun.add(step)
        counts = writer.write(frame, self._written_batch(plan, output, lambda: undecodable()[1], incarnations))
        return {"undecodable": undecodable()[0], **batches, **counts, **self._read_by}

    def _undecodable(self, output: OutputPlan, inputs: BatchInputs) -> tuple[int, Mapping[str, DataFrame]]:
        number, frames = inputs.undecodable(output.fresh)
        if number:
            kept = output.output.keeps_undecodable
            where = "are kept as they are, apart from the rows" if kept else "are not among the rows"
            self._attempt.report(f"output {output.output.id}: {number:,} records do not decode and {where}")
        return number, frames

    def _write_blocks(self, plan: AttemptPlan, output: OutputPlan, writer: BlockWriter) -> Counts:
        """Let Spark's tasks write the records of the log as they are."""
        self._begun.add(output.output.step)
        blocks = blocks_of(self._attempt.stream, output)
        return writer.write_blocks(self._attempt.run_blocks, blocks, self._written_batch(plan, output))

    def _written_batch(
        self,
        plan: AttemptPlan,
        output: OutputPlan | None = None,
        undecodable: Callable[[], Mapping[str, DataFrame]] = dict,
        incarnations: Callable[[], BatchIncarnations] | None = None,
    ) -> WrittenBatch:
        attempt, own = self._attempt, plan.own
        of_batch: dict[str, Any] = {
            "batch_time_ms": self._claim.batch_time_ms,
            "interval_ms": attempt.stream.batch_interval_ms,
            "target": self._claim.target,
        }
        return WrittenBatch(
            stream=attempt.stream,
            context=attempt.batch_context(None if output is None else output.output.window),
            batch_time_ms=attempt.batch_time_ms,
            attempt=self._claim.number,
            manifest_uri=own.manifest_uri,
            from_kafka=own.source == "kafka",
            target=self._claim.target,
            undecodable=undecodable,
            out=attempt.out,
            progress=attempt.report,
            earlier=() if output is None else tuple(origin for origin in output.read if origin != own),
            incarnations=incarnations,
            written_before=output is not None and output.written_before,
            tried_before=output is not None and output.tried_before,
            former_steps=() if output is None else output.former_steps,
            stream_steps=plan.stream_steps,
            check_held_versions=self._check_held_versions,
            left_behind=lambda output, names: left_behind(self._ledger, output, self._claim, names),
            known_place=partial(newest_place, self._ledger, self._claim.stream, **of_batch),
            known_places=partial(newest_places, self._ledger, self._claim.stream, **of_batch),
        )

    def _check_held_versions(self, index: str, held: Mapping[tuple[str, int], HeldVersion]) -> str | None:
        # Not at the top: hardly any batch needs a client of Kafka.
        from headrace.batch.held_versions import check_held_versions

        return check_held_versions(self._attempt.context, self._claim.batch_time_ms, index, held)

    def _renew_until_ended(self) -> None:
        """Wait for the steps, and renew the lease after each third of its time. Raises AttemptFencedError."""
        period = self._claim.lease_ms / 3000
        held_until = self._clock.monotonic() + self._claim.lease_ms / 1000
        while not self._clock.wait(self._ended, period):
            try:
                warning = self._attempt.warning
                self._ledger.attempts.renew(self._claim, attributes=None if warning is None else {WARNING: warning})
                held_until = self._clock.monotonic() + self._claim.lease_ms / 1000
            except LedgerUnavailableError:
                # The attempt goes on until its lease expires; then another attempt may have begun.
                if self._clock.monotonic() > held_until:
                    raise

    def _cancel(self) -> None:
        self._cancelled.set()
        deadline = time.monotonic() + _CANCEL_SECONDS
        # Repeated, because a job may start just after the others are cancelled.
        while not self._ended.is_set() and time.monotonic() < deadline:
            with contextlib.suppress(Exception):
                self._attempt.cancel_jobs()
            self._ended.wait(0.5)

    def _raise_if_fenced(self, failure: BaseException) -> None:
        """Raise AttemptFencedError if a later attempt has replaced this one.

        A later attempt interrupts this one's jobs in Spark, so a step can fail before the fencing is noticed.
        """
        try:
            self._ledger.attempts.renew(self._claim)
        except AttemptFencedError as fenced:
            raise fenced from failure
        except LedgerUnavailableError:
            # Fencing cannot be checked, so the caller raises the failure itself.
            return

    def _complete(self, batch: BatchRow, plan: AttemptPlan, started: float) -> BatchResult:
        claim = self._claim
        version = code_version(self._attempt.stream, claim.outputs)
        after = self._ledger.attempts.complete(claim, code_version=version)
        seconds = round(self._clock.monotonic() - started, 3)
        if claim.target:
            self._attempt.report(f"replayed into {claim.target} in {seconds} s")
        elif after.state is BatchState.COMPLETED:
            self._attempt.report(f"completed in {seconds} s")
        else:
            left = f"the batch is {after.state.value} until all are"
            self._attempt.report(f"{', '.join(claim.outputs)} done in {seconds} s; {left}")
        return BatchResult(
            claim.stream,
            claim.batch_time_ms,
            claim.number,
            batch.records,
            batch.blocks,
            seconds,
            self._results,
            after.state.value,
            plan.own.source,
            claim.target,
            version,
        )

    def _fail(self, error: BaseException, written: list[str]) -> None:
        if isinstance(error, AttemptFencedError):
            return
        failure = failure_of(error)
        attributes: dict[str, Any] = {FAILURE: failure.value, WRITTEN: written}
        if failure is Failure.PASSING and all(map(ended_from_outside, self._failures.values() or [error])):
            attributes[INTERRUPTED] = True
        if failure is not Failure.PASSING:
            # The code that failed may be what cannot be read.
            with contextlib.suppress(Exception):
                attributes[TRIED_WITH] = tried_with(self._attempt.stream, self._claim.outputs)
        with contextlib.suppress(HeadraceError):
            # The decision about another try reads these attributes.
            self._ledger.attempts.renew(self._claim, attributes=attributes)
            failures = {step: reason_of(failure)[:_ERROR_CHARACTERS] for step, failure in self._failures.items()}
            counts = {
                step: {**failure.counts, LIMIT_EXCEEDED: failure.exceeded}
                for step, failure in self._failures.items()
                if isinstance(failure, TooManyDeadLettersError)
            }
            self._ledger.attempts.fail(self._claim, reason_of(error)[:_ERROR_CHARACTERS], failures, counts)

    def _written(self) -> list[str]:
        """The outputs that may hold documents of this attempt, as `WRITTEN` defines it."""
        return sorted(
            output for output in self._begun if not isinstance(self._failures.get(output), ForeignDocumentsError)
        )


def _records_line(batch: BatchRow, plan: AttemptPlan) -> str:
    line = f"{batch.records:,} records in {batch.blocks:,} blocks"
    if plan.own.source == "kafka":
        line = f"{batch.records:,} records, read from Kafka, as the log does not have them"
    for output_plan in plan.outputs:
        if output_plan.output.window is not None and output_plan.skipped is None:
            in_kafka = sum(origin.source == "kafka" for origin in output_plan.origins)
            line += f"; output {output_plan.output.id} has a window of {len(output_plan.origins)} batches"
            line += f", {in_kafka} of them from Kafka" if in_kafka else ""
    return line


def _counts_line(counts: Counts) -> str:
    """The counts that are not 0."""
    if "skipped" in counts:
        return str(counts["skipped"])
    shown = {name: value for name, value in counts.items() if value and isinstance(value, int | float)}
    return ", ".join(f"{name} {value:,}" for name, value in shown.items()) or "nothing to do"
