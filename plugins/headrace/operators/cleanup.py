"""The operator that deletes what no batch needs any more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.errors import HeadraceError
from headrace.operators.batch import BatchStepOperator

if TYPE_CHECKING:
    from airflow.sdk import Context


class BatchNotCheckpointedError(HeadraceError):
    """The batch completed, and its checkpoint is missing."""


class CleanupOperator(BatchStepOperator):
    """Deletes log segments whose every block is in a batch that has completed, is checkpointed and is old enough.

    It decides by what the ledger says of each batch, never by age, so it is as safe after a failed batch as after
    a good one. A completed batch without checkpoint is an error here: this is the last task of the run, and the
    run must not look well.

    :param stream: the stream.
    """

    ui_color = "#f3dede"

    def execute(self, context: Context) -> Any:
        """Clean up, then check that this batch left nothing undone."""
        from headrace.batching.cleanup import clean_up

        at_ms = self.batch_time_ms(context)
        with self.opened() as (ledger, storage):
            batch = ledger.batches.find(self.stream.name, at_ms)
            if batch is None:
                self.log.info("Batch %d was not allocated, so there is nothing to clean up after it.", at_ms)
                return
            self.log.info("Cleanup after batch %d: %s", at_ms, clean_up(self.stream, ledger, storage))
        due = at_ms % self.stream.checkpoint_interval_ms == 0
        if due and batch.completed_at_ms is not None and batch.checkpointed_at_ms is None:
            raise BatchNotCheckpointedError(
                f"Batch {at_ms} of stream {self.stream.name!r} completed without a checkpoint, so its log is kept.",
                remedy="See why the task 'checkpoint' failed, and clear it.",
            )
