"""The operator that replays a batch: runs it again into another target, beside the stream's own outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException

from headrace.clock import time_text
from headrace.operators.wal_spark_submit import FIRST_LEASE_MS, SparkAttemptOperator, Wait
from headrace.runs.batch_run import NoBatchTimeError, end_of_interval_ms, holder, run_request

if TYPE_CHECKING:
    from airflow.sdk import Context

    from headrace.ledger import Ledger
    from headrace.ledger.batch_tables import AttemptRow, BatchRow
    from headrace.runs.batch_run import RunRequest
    from headrace.stream import Stream


class ReplayBatchOperator(SparkAttemptOperator):
    """Runs one output of a batch with the replay's code, into the replay's target, while the stream itself continues.

    The replay reads the records that the batch was allocated, whether the batch has completed or not. It does not
    change the batch's state, its results or its slots: the ledger records the replay under its own name. A batch time
    that has no blocks of its own is skipped: it was never allocated, or a later batch took its blocks over.

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
        """Replay the batch of this run's logical date."""
        request = run_request(context, self.replay, options=("outputs", "parameters"))
        if not request.wants(self.step):
            raise AirflowSkipException(f"This run does not ask for {self.step}, so there is nothing to replay.")
        try:
            batch_time_ms = end_of_interval_ms(context, self.stream.batch_interval)
        except NoBatchTimeError as error:
            raise AirflowFailException(str(error)) from error
        with self.opened() as stream_context:
            while (awaited := self._replay(stream_context.ledger, batch_time_ms, context, request)) is not None:
                self.wait(awaited)

    def _replay(self, ledger: Ledger, batch_time_ms: int, context: Context, request: RunRequest) -> Wait | None:
        """Replay the batch; return what it has to wait for first, if anything."""
        from headrace.ledger.errors import NotItsTurnError

        batch = self._batch(ledger, batch_time_ms)
        if self._is_done(ledger, batch_time_ms, request):
            self.log.info("This run has already replayed output %s of batch %s.", self.step, time_text(batch_time_ms))
            return None
        awaited = self.wait_for_application(ledger, batch, (self.step,))
        if awaited is not None:
            return awaited
        way = self.choose_way(ledger)
        try:
            attempt = ledger.replays.begin(
                self.stream.name,
                batch_time_ms,
                target=self.target,
                definition=self.replay.to_json(),
                outputs=(self.step,),
                ordered=(self.step,) if self.replay.output_of_step(self.step).deletes_by_key else (),
                holder=holder(context),
                way=way,
                lease_ms=FIRST_LEASE_MS[way],
                attributes=request.attributes,
            )
        except NotItsTurnError as error:
            return Wait(str(error), f"batches {error.busy}", otherwise=error)
        self.run_attempt(ledger, attempt, batch, context)
        return None

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
                f"Batch {time_text(batch.absorbed_by_ms)} took over the blocks of {time_text(batch_time_ms)}: "
                "replay that one."
            )
        if batch.state is BatchState.ABANDONED:
            raise AirflowSkipException(f"Batch {time_text(batch_time_ms)} was abandoned: {batch.error}.")
        return batch

    def _is_done(self, ledger: Ledger, batch_time_ms: int, request: RunRequest) -> bool:
        from headrace.ledger.states import AttemptState

        return any(
            row.state is AttemptState.COMPLETED and self.step in row.outputs and request.run.made(row.attributes)
            for row in self._attempts(ledger, batch_time_ms)
        )

    def _attempts(self, ledger: Ledger, batch_time_ms: int) -> list[AttemptRow]:
        """The attempts of this replay, oldest first."""
        return [row for row in ledger.attempts.of_batch(self.stream.name, batch_time_ms) if row.target == self.target]
