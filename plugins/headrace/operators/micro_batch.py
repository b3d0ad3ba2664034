"""The operator that runs a whole batch in one task."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from airflow.sdk.exceptions import AirflowSkipException

from headrace.operators.allocate_blocks import allocate_for_run
from headrace.operators.batch_events import batch_alias, emit_batch_events
from headrace.operators.checkpoint import warn_of_what_is_left, write_checkpoint_after
from headrace.operators.cleanup import clean_up_after
from headrace.operators.wal_spark_submit import WalSparkSubmitOperator
from headrace.runs.batch_time import NothingToRun, begin_run
from headrace.runs.request import run_request
from headrace.triggers.blocks_ready import BlocksReadyTrigger, report_what_was_found
from headrace.triggers.first_look import look_before_deferring
from headrace.triggers.first_receiver import FirstReceiverTrigger, check_began

if TYPE_CHECKING:
    from airflow.sdk import Context

    from headrace.ledger import Ledger
    from headrace.stream import Stream
    from headrace.wal.storage import LogStorage


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
        with self.opened() as (ledger, storage):
            awaited = FirstReceiverTrigger.awaited(context, self.stream, ledger)
            if awaited is not None and self.deferrable:
                self.defer(trigger=awaited, method_name="receiver_began")
            if awaited is not None:
                check_began(awaited.look_until_it_fires(ledger), self.stream)
            try:
                batch_time_ms = begin_run(context, self.stream, ledger)
            except NothingToRun as nothing:
                raise AirflowSkipException(f"Nothing to run: {nothing}.") from None
            trigger = BlocksReadyTrigger.of(
                self.stream, batch_time_ms, waiting_since_ms=ledger.now_ms(), grace=self.grace
            )
            found = look_before_deferring(trigger, ledger)
            if found is None and self.deferrable:
                self.defer(trigger=trigger, method_name="blocks_are_ready")
            while found is None:
                time.sleep(trigger.poll_interval)
                found = trigger.look(ledger)
            return self._do(ledger, storage, batch_time_ms, context, found)

    def receiver_began(self, context: Context, event: dict[str, Any]) -> Any:
        """Called after the deferral: the stream's first receiver has begun, or the wait for it timed out."""
        check_began(event, self.stream)
        return self.execute(context)

    def blocks_are_ready(self, context: Context, event: dict[str, Any]) -> Any:
        """Called after the deferral: the trigger has found the blocks ready, or the wait has failed."""
        return self._until_done(context, lambda context: self._with_blocks(context, event))

    def _with_blocks(self, context: Context, found: dict[str, Any]) -> Any:
        with self.opened() as (ledger, storage):
            return self._do(ledger, storage, self.batch_time_ms(context, ledger), context, found)

    def run_again(self, context: Context) -> Any:
        """Continue after a wait: the batch is allocated, so run its steps."""
        with self.opened() as (ledger, storage):
            return self._run(ledger, storage, self.batch_time_ms(context, ledger), context)

    def _do(
        self, ledger: Ledger, storage: LogStorage, batch_time_ms: int, context: Context, found: dict[str, Any]
    ) -> Any:
        report_what_was_found(found, self.stream, self.log)
        allocate_for_run(self.stream, ledger, storage, batch_time_ms, context, self.log)
        return self._run(ledger, storage, batch_time_ms, context)

    def _run(self, ledger: Ledger, storage: LogStorage, batch_time_ms: int, context: Context) -> Any:
        try:
            self.run_batch(ledger, storage, batch_time_ms, context)
        except Exception:
            try:
                self._conclude(ledger, storage, batch_time_ms)
            except Exception:
                # The batch's own failure is the one to raise.
                self.log.exception("After the batch failed, its stream was not checkpointed and cleaned up.")
            raise
        self._conclude(ledger, storage, batch_time_ms)
        emit_batch_events(context, ledger, self.stream.name, batch_time_ms)
        batch = ledger.batches.get(self.stream.name, batch_time_ms)
        return {
            "batch_time_ms": batch_time_ms,
            "state": batch.state.value,
            "records": batch.records,
            "blocks": batch.blocks,
        }

    def _conclude(self, ledger: Ledger, storage: LogStorage, batch_time_ms: int) -> None:
        write_checkpoint_after(self.stream, ledger, storage, batch_time_ms, self.log)
        warn_of_what_is_left(self.stream, ledger, batch_time_ms, self.log)
        clean_up_after(self.stream, ledger, storage, batch_time_ms, self.log)
