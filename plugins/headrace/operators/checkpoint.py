"""The operator that checkpoints a stream after a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.operators.batch import BatchStepOperator
from headrace.operators.batch_events import batch_alias, emit_batch_events

if TYPE_CHECKING:
    from airflow.sdk import Context

    from headrace.ledger import Ledger
    from headrace.stream import Stream
    from headrace.wal.storage import LogStorage


class CheckpointOperator(BatchStepOperator):
    """Writes the stream's checkpoint: positions, allocations and completed batches, for recovery without the ledger.

    It runs whether the batch succeeded or not; a batch that was never allocated has nothing to checkpoint. A batch that
    completed in this run emits its asset event, and so do those that the run completed ahead.

    :param stream: the stream.
    """

    ui_color = "#f6ecd2"

    def __init__(self, *, stream: Stream, outlets: Any = (), **kwargs: Any) -> None:
        super().__init__(stream=stream, outlets=[batch_alias(stream), *outlets], **kwargs)

    def execute(self, context: Context) -> Any:
        """Write the checkpoint."""
        with self.opened() as (ledger, storage):
            at_ms = self.batch_time_ms(context, ledger)
            write_checkpoint_after(self.stream, ledger, storage, at_ms, self.log)
            emit_batch_events(context, ledger, self.stream.name, at_ms)


def write_checkpoint_after(stream: Stream, ledger: Ledger, storage: LogStorage, at_ms: int, log: Any) -> None:
    """Write the stream's checkpoint if the batch is there and it is due; says so."""
    from headrace.batching.checkpointing import write_checkpoint

    if ledger.batches.find(stream.name, at_ms) is None:
        log.info("Batch %d was not allocated, so there is nothing to checkpoint.", at_ms)
        return
    written = write_checkpoint(stream, ledger, storage, at_ms)
    if written is None:
        log.info("No checkpoint is due at batch %d; the next one covers it.", at_ms)
    else:
        log.info("Checkpoint %s/%s", stream.folder_url, written.path)
