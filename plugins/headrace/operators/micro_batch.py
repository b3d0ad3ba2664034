"""The operator that runs a whole batch in one task."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from headrace.operators.batch_events import batch_alias, emit_batch_event
from headrace.operators.batch_steps import allocate_blocks, checkpoint_after, clean_up_after
from headrace.operators.wal_spark_submit import WalSparkSubmitOperator
from headrace.runs.batch_run import BatchRun, NothingToRun, run_request
from headrace.triggers.ledger import (
    BlocksReadyTrigger,
    FirstReceiverTrigger,
    TurnTrigger,
    check_began,
    check_turn,
    report_readiness,
)

if TYPE_CHECKING:
    from airflow.sdk import Context

    from headrace.stream import Stream
    from headrace.stream_context import StreamContext


class MicroBatchOperator(WalSparkSubmitOperator):
    """A whole batch in one task: waits for its blocks, allocates them, runs its steps, checkpoints and cleans up.

    For short intervals, where five or more tasks for each batch are too many: with 10 s they make 43,200 task instances
    a day. It does what the tasks of ``batch_dag`` do, with the same functions and the same ledger, and waits deferred.
    One process writes the outputs, one after another; a retry runs those that have no record of success yet. The stream
    is checkpointed and cleaned up after a failed try as well.

    :param stream: the stream.
    :param grace: how long to wait for blocks, see ``BlocksReadySensor``.

    For the other parameters see ``WalSparkSubmitOperator``.
    """

    def __init__(
        self,
        *,
        stream: Stream,
        grace: timedelta | None = None,
        outlets: Any = (),
        **kwargs: Any,
    ) -> None:
        super().__init__(stream=stream, outlets=[batch_alias(stream), *outlets], **kwargs)
        self.grace = grace

    def run_step(self, context: Context) -> Any:
        """Determine the run's batch, wait for its blocks, then run the batch."""
        run_request(context, self.stream)  # Refuse an invalid request before any wait.
        with self.opened() as stream_context:
            ledger = stream_context.ledger
            awaited = FirstReceiverTrigger.awaited(context, stream_context)
            if awaited is not None and self.deferrable:
                self.defer(trigger=awaited, method_name="receiver_began")
            if awaited is not None:
                check_began(awaited.poll_until_it_fires(ledger), self.stream)
            run = self._begin(context, stream_context)
            trigger = BlocksReadyTrigger.of(
                self.stream, run.batch_time_ms, waiting_since_ms=ledger.now_ms(), grace=self.grace
            )
            readiness = trigger.poll_before_deferring(ledger)
            if readiness is None and self.deferrable:
                self.defer(trigger=trigger, method_name="blocks_are_ready")
            return self._with_blocks(run, readiness or trigger.poll_until_it_fires(ledger))

    def receiver_began(self, context: Context, event: dict[str, Any]) -> Any:
        """Called after the deferral: the stream's first receiver has begun, or the wait for it timed out."""
        check_began(event, self.stream)
        return self.execute(context)

    def blocks_are_ready(self, context: Context, event: dict[str, Any]) -> Any:
        """Called after the deferral: the trigger has found the blocks ready, or the wait has failed."""
        with self.opened() as stream_context:
            return self._with_blocks(self._begin(context, stream_context), event)

    def turn_has_come(self, context: Context, event: dict[str, Any]) -> Any:
        """Called after the deferral: it is the turn of the batch of an ordered stream, or the wait timed out."""
        with self.opened() as stream_context:
            return self._in_turn(self._begin(context, stream_context), event)

    def run_again(self, context: Context) -> Any:
        """Continue after a wait: the batch is allocated, so run its steps."""
        with self.opened() as stream_context:
            return self._run(BatchRun.of(context, stream_context))

    def _begin(self, context: Context, stream_context: StreamContext) -> BatchRun:
        try:
            return BatchRun.begin(context, stream_context)
        except NothingToRun as nothing:
            raise nothing.skip(context, self, itself=True) from None

    def _with_blocks(self, run: BatchRun, readiness: dict[str, Any]) -> Any:
        report_readiness(readiness, self.stream, self.log)
        awaited = TurnTrigger.awaited(run)
        if awaited is None:
            return self._in_turn(run, {"turn": True})
        if self.deferrable:
            self.defer(trigger=awaited, method_name="turn_has_come")
        return self._in_turn(run, awaited.poll_until_it_fires(run.ledger))

    def _in_turn(self, run: BatchRun, turn: dict[str, Any]) -> Any:
        try:
            check_turn(turn, run)
            allocate_blocks(run, self.log)
        except NothingToRun as nothing:
            raise nothing.skip(run.context, self, itself=True) from None
        return self._run(run)

    def _run(self, run: BatchRun) -> Any:
        try:
            self.run_batch(run)
        except Exception:
            try:
                self._conclude(run)
            except Exception:
                # The batch's own failure is the one to raise.
                self.log.exception("After the batch failed, its stream was not checkpointed and cleaned up.")
            raise
        self._conclude(run)
        emit_batch_event(run)
        batch = run.ledger.batches.get(self.stream.name, run.batch_time_ms)
        return {
            "batch_time_ms": batch.batch_time_ms,
            "state": batch.state.value,
            "records": batch.records,
            "blocks": batch.blocks,
        }

    def _conclude(self, run: BatchRun) -> None:
        checkpoint_after(run, self.log)
        clean_up_after(run, self.log)
