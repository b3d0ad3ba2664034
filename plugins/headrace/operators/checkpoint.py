"""The operator that checkpoints a stream after a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.operators.batch import BatchStepOperator

if TYPE_CHECKING:
    from airflow.sdk import Context


class CheckpointOperator(BatchStepOperator):
    """Writes the stream's checkpoint: positions, allocations and completed batches, for recovery without the ledger.

    It runs whether the batch succeeded or not; a batch that was never allocated has nothing to checkpoint.

    :param stream: the stream.
    """

    ui_color = "#f6ecd2"

    def execute(self, context: Context) -> Any:
        """Write the checkpoint."""
        from headrace.batching.checkpointing import write_checkpoint

        at_ms = self.batch_time_ms(context)
        with self.opened() as (ledger, storage):
            if ledger.batches.find(self.stream.name, at_ms) is None:
                self.log.info("Batch %d was not allocated, so there is nothing to checkpoint.", at_ms)
                return
            written = write_checkpoint(self.stream, ledger, storage, at_ms)
        if written is None:
            self.log.info("No checkpoint is due at batch %d; the next one covers it.", at_ms)
        else:
            self.log.info("Checkpoint %s/%s", self.stream.folder_url, written.path)
