"""The operators that run batches again: into another target, beside the stream's own outputs; or a range of completed
batches into the stream's outputs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException

from headrace.clock import time_text
from headrace.errors import FAILURE, TRY_NUMBER, Failure
from headrace.operators.wal_spark_submit import BatchTaskError, SparkAttemptOperator, cause_of
from headrace.runs.batch_run import RANGE_OPTIONS, NoBatchTimeError, end_of_interval_ms, run_request

if TYPE_CHECKING:
    from airflow.sdk import Context

    from headrace.batch.next_attempt import NextAttempt, ReplayTarget, Wait
    from headrace.batch.range_progress import RangeProgress
    from headrace.batch.run_request import RunRequest
    from headrace.batch.time_range import TimeRange
    from headrace.ledger import Ledger
    from headrace.ledger.batches.tables import Attempt, BatchRow
    from headrace.stream import Stream
    from headrace.stream_context import StreamContext


class RangeOperator(SparkAttemptOperator):
    """Runs a range of batches in one process, where a run asks for one. See ``headrace.batch.range_progress``."""

    def run_range(
        self,
        stream_context: StreamContext,
        request: RunRequest,
        context: Context,
        *,
        outputs: tuple[str, ...],
        replay: ReplayTarget | None = None,
    ) -> dict[str, int]:
        """Run what is left of the request's range, in one process (``headrace.spark.attempts.range_run``), and write
        the results of its batches. Returns the numbers of the range.

        Args:
            outputs: the outputs that the run writes of each batch.
            replay: the replay that writes them; None if the batches themselves are run again.

        Raises:
            AirflowFailException: no batch of the range can be run.
            BatchTaskError: batches have failed, or are left; the next try goes on with them.
            StorageError: a result could not be written; the next try writes it.
        """
        from headrace.batch.next_attempt import NextAttempt
        from headrace.batch.range_progress import RangeError, RangeProgress
        from headrace.batch.results import write_results

        ledger, target = stream_context.ledger, "" if replay is None else replay.target
        definition = str(self.revision) if replay is None else self.written.digest
        ordered = self.stream.is_ordered if replay is None else bool(replay.ordered)
        read = partial(RangeProgress.of, ledger, self.stream.name, outputs=outputs, target=target, ordered=ordered)
        try:
            batches, progress = self._range(
                ledger, request, read, outputs=outputs, definition=definition, target=target
            )
        except RangeError as error:
            raise AirflowFailException(str(error)) from error
        self.log.info("Range %s: %s.", batches, progress)
        if progress.left:
            left = progress.left[: 1 if ordered else None]
            # An empty batch does not show whether Spark is needed.
            largest = max(progress.left, key=lambda batch: batch.records)
            attributes = {**request.attributes, **batches.attributes, TRY_NUMBER: context["ti"].try_number}
            following = partial(
                NextAttempt.of_range, ledger, batches=batches, steps=outputs, attributes=attributes, replay=replay
            )

            def find() -> NextAttempt | Wait:
                return self.wait_for_application(ledger, largest, outputs) or _first_free(map(following, left))

            self.run_next(find, context, lambda first: self._run_range_process(ledger, first, context))
            progress = read(batches)
        # Those that the process has not written, or that a killed one had left.
        write_results(stream_context, after_ms=batches.after_ms, until_ms=batches.until_ms)
        numbers = progress.to_dict()
        context["ti"].xcom_push("range", numbers)
        if not progress.left:
            self.log.info("Range %s: %s.", batches, progress)
            return numbers
        failed = BatchTaskError(
            f"Range {batches} of stream {self.stream.name!r}: "
            + "; ".join([f"{progress}", *progress.failures()])
            + ".",
            remedy="The next try runs what is left. After the last try, clear the task. A new run repeats the range.",
        )
        kinds = {Failure(row.attributes.get(FAILURE, Failure.PASSING)) for row in progress.failed.values()}
        # If something is left that has not failed, it is worth a retry.
        if len(progress.failed) == len(progress.left) and Failure.PASSING not in kinds:
            failed.failure = Failure.CODE if Failure.CODE in kinds else Failure.FINAL
        raise failed

    def _range(
        self,
        ledger: Ledger,
        request: RunRequest,
        read: Callable[[TimeRange], RangeProgress],
        *,
        outputs: Collection[str],
        definition: str,
        target: str,
    ) -> tuple[TimeRange, RangeProgress]:
        """The range of the run, and its progress. A cleared run goes on with a range that it had not completed, and
        starts one again that it had completed. With another definition than the range was begun with, a retry starts it
        again too. Other tasks of the run may write other outputs: theirs are not this task's."""
        from headrace.batch.time_range import TimeRange

        after_ms, until_ms = request.span or (0, 0)
        new = TimeRange(after_ms, until_ms, str(request.run), definition)
        own = [
            row
            for row in ledger.attempts.between(self.stream.name, after_ms, until_ms, target=target)
            if request.run.clear_of(row.attributes) is not None and not set(outputs).isdisjoint(row.outputs)
        ]
        begun = {TimeRange.of(row.attributes): row.started_at_ms for row in own}
        last = max((known for known in begun if known is not None), key=lambda known: begun[known], default=new)
        if last.definition != definition:
            self.log.warning(
                "This run has begun its range with another definition of stream %s. It begins the range again, so that "
                "all of it is written with the present one.",
                self.stream.name,
            )
        elif last != new and (last.after_ms, last.until_ms) == (after_ms, until_ms):
            progress = read(last)
            if progress.left:
                return last, progress
        return new, read(new)

    def _run_range_process(self, ledger: Ledger, first: Attempt, context: Context) -> None:
        """Run the process of a range; log how it ended. The attempts that it has left running are failed."""
        from headrace.ledger.errors import LedgerError

        ended = "The process of the range has ended."
        try:
            self._run_application(first, context, spark=True)
        except Exception as error:
            # Its batches say what is left; the ledger has their errors.
            self.log.warning("%s", error)
            ended = cause_of(error)
        except BaseException as error:
            ended = cause_of(error)
            raise
        finally:
            # First, since it would begin more batches.
            self._end_process()
            for row in ledger.attempts.running(self.stream.name):
                if row.holder == first.holder:
                    with contextlib.suppress(LedgerError):
                        ledger.attempts.fail(row.claim(), ended)


def _first_free(attempts: Iterable[NextAttempt]) -> NextAttempt | Wait:
    """The attempt at the first batch that no attempt of another run is running."""
    from headrace.batch.next_attempt import Wait

    free = (each for each in attempts if each.awaited() is None)
    return next(free, Wait("Other runs run all batches that are left of the range.", "other runs", soon=True))


class ReplayBatchOperator(RangeOperator):
    """Runs one output of a batch with the replay's code, into the replay's target, while the stream itself continues.

    The replay reads the records that the batch was allocated, whether the batch has completed or not. It does not
    change the batch's state, its results or its slots: the ledger records the replay under its own name. A batch time
    that has no blocks of its own is skipped: it was never allocated, or a later batch took its blocks over.

    A run with ``from`` and ``until`` in its conf replays all allocated batches of this range, in one process. What it
    has done is not done again by a retry.

    :param stream: the stream whose batches are replayed.
    :param replay: the stream definition with the replay's outputs (``headrace.stream.stream.replayed``).
    :param target: the replay's name in the ledger.
    :param step: the id of the output.
    """

    def __init__(self, *, replay: Stream, target: str, step: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.replay = replay
        self.target = target
        self.step = replay.step_of_id.get(step, step)

    @property
    def written(self) -> Stream:
        return self.replay

    def run_step(self, context: Context) -> Any:
        """Replay the batch of this run's logical date, and write its result."""
        from headrace.batch.results import write_own_result

        request = run_request(context, self.replay, options=RANGE_OPTIONS)
        if not request.wants(self.step):
            raise AirflowSkipException(f"This run does not ask for {self.step}, so there is nothing to replay.")
        if request.span is not None:
            return self._replay_range(context, request)
        try:
            batch_time_ms = end_of_interval_ms(context, self.stream.batch_interval)
        except NoBatchTimeError as error:
            raise AirflowFailException(str(error)) from error
        with self.opened() as stream_context:
            self.run_next(lambda: self._next_attempt(stream_context.ledger, batch_time_ms, request), context)
            write_own_result(stream_context, batch_time_ms)
        return None

    def _replay_range(self, context: Context, request: RunRequest) -> dict[str, int]:
        with self.opened() as stream_context:
            return self.run_range(stream_context, request, context, outputs=(self.step,), replay=self._replay_target())

    def _next_attempt(self, ledger: Ledger, batch_time_ms: int, request: RunRequest) -> NextAttempt | None:
        """What is left of the batch for this run; None if the run has replayed it."""
        from headrace.batch.next_attempt import NextAttempt

        batch = self._batch(ledger, batch_time_ms)
        following = NextAttempt.of_replay(ledger, batch, request, self.step, self._replay_target())
        if following is None:
            self.log.info("This run has already replayed output %s of batch %s.", self.step, time_text(batch_time_ms))
        return following

    def _replay_target(self) -> ReplayTarget:
        from headrace.batch.next_attempt import ReplayTarget

        ordered = (self.step,) if self.replay.output_of_step(self.step).deletes_by_key else ()
        return ReplayTarget(self.target, self.replay.to_json(), ordered)

    def _batch(self, ledger: Ledger, batch_time_ms: int) -> BatchRow:
        from headrace.ledger.errors import BatchRemovedError
        from headrace.ledger.states import BatchState

        batch = ledger.batches.find(self.stream.name, batch_time_ms)
        row = ledger.streams.get(self.stream.name)
        if batch is None and row.has_removed(batch_time_ms):
            removed = BatchRemovedError(row.name, batch_time_ms, until_ms=row.removed_until_ms)
            raise AirflowFailException(str(removed)) from removed
        if batch is None:
            raise AirflowSkipException(
                f"Batch {time_text(batch_time_ms)} of stream {self.stream.name!r} is not allocated, "
                "so there is nothing to replay yet."
            )
        if batch.state is BatchState.ABSORBED:
            raise AirflowSkipException(
                f"Batch {time_text(batch_time_ms)} has no blocks: batch {time_text(batch.absorbed_by_ms)} took them "
                "over. Replay that one."
            )
        if batch.state is BatchState.ABANDONED:
            raise AirflowSkipException(f"Batch {time_text(batch_time_ms)} was abandoned: {batch.error}.")
        return batch


class RepeatBatchesOperator(RangeOperator):
    """Runs the completed batches of a range again, into the stream's own outputs, with the code as it is.

    A run needs ``from`` and ``until`` in its conf. One process runs all steps of a batch in one attempt, and several
    batches at a time, without taking slots from the batches that are due; in an ordered stream one after another, and
    then a batch that is due comes first. A retry goes on with what is left. If the stream has another definition since
    the range was begun, it begins the range again: all of a range is written with one definition. Batches that have
    never completed are left to their own runs and to the repair.

    :param stream: the stream; it has no state, since each batch would start from the state that the one before it left.

    For the other parameters see ``SparkAttemptOperator``.
    """

    def run_step(self, context: Context) -> dict[str, int]:
        """Run what is left of the run's range. Returns its numbers."""
        request = run_request(context, self.stream, options=RANGE_OPTIONS)
        if request.span is None:
            raise AirflowFailException(
                'This run has no range. Trigger it with two times, such as {"from": "2026-11-20T00:00:00Z", "until": '
                '"2026-11-21T00:00:00Z"} for a day.'
            )
        steps = tuple(filter(request.wants, self.stream.steps))
        with self.opened() as stream_context:
            self._warn_of_deletions(stream_context.ledger, steps, request.span[1])
            return self.run_range(stream_context, request, context, outputs=steps)

    def _warn_of_deletions(self, ledger: Ledger, steps: Sequence[str], until_ms: int) -> None:
        """Warn if newer batches may have deleted what the range writes again: Elasticsearch forgets deletions."""
        deleting = [output.id for output in map(self.stream.output_of_step, steps) if output.deletes_by_key]
        newest = ledger.batches.page(self.stream.name, 1)
        if deleting and newest and newest[0].batch_time_ms > until_ms:
            self.log.warning(
                "Output %s deletes documents by key, and the stream has newer batches than this range, up to %s. What "
                "they have deleted may come back with an older value. Pause the batch DAG, and run a range that ends "
                "now, from the same time on.",
                ", ".join(deleting), time_text(newest[0].batch_time_ms),
            )  # fmt: skip
