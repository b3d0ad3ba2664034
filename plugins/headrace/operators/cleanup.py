"""The operator that deletes the log segments and files that no batch needs any more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.clock import time_text
from headrace.errors import HeadraceError
from headrace.operators.batch import BatchStepOperator
from headrace.runs.batch_run import BatchRun

if TYPE_CHECKING:
    from airflow.sdk import Context

    from headrace.batch.cleanup import Cleaned


class BatchNotCheckpointedError(HeadraceError):
    """The batch completed, and its checkpoint is missing."""


class CleanupOperator(BatchStepOperator):
    """Deletes log segments whose blocks are all in batches that have completed, are checkpointed and have left the
    remember window.

    The decision rests on the ledger's record of each batch, never on age alone, so it is as safe after a failed batch
    as after a successful one. A completed batch whose checkpoint is missing is an error: this is the last task of the
    run, and the run must not look successful.

    :param stream: the stream.
    """

    ui_color = "#f3dede"

    def execute(self, context: Context) -> Any:
        """Clean up, then check that this batch is checkpointed if a checkpoint was due."""
        with self.opened() as stream_context:
            clean_up_after(BatchRun.of(context, stream_context), self.log)


def clean_up_after(run: BatchRun, log: Any) -> None:
    """Delete what no batch needs any more, if the batch is allocated; log what was deleted.

    Raises:
        BatchNotCheckpointedError: the batch completed, and its checkpoint was due and is missing.
    """
    from headrace.batch.checkpoint_writer import checkpoint_is_due
    from headrace.batch.cleanup import clean_up

    at, batch = time_text(run.batch_time_ms), run.find_batch()
    if batch is None:
        log.info("Batch %s was not allocated, so there is nothing to clean up after it.", at)
        return
    log.info("Cleanup after batch %s: %s.", at, _account(clean_up(run.stream_context)))
    # Read again: meanwhile a later batch's checkpoint may have marked this one.
    batch = run.ledger.batches.get(run.stream.name, run.batch_time_ms)
    is_missing = batch.completed_at_ms is not None and batch.checkpointed_at_ms is None
    if is_missing and checkpoint_is_due(run.stream_context, run.batch_time_ms):
        raise BatchNotCheckpointedError(
            f"Batch {at} of stream {run.stream.name!r} completed without a checkpoint, so its log is kept.",
            remedy="See why the checkpoint failed (the task 'checkpoint' has its own log), and clear it.",
        )


def _account(cleaned: Cleaned) -> str:
    """A cleanup's result, in words."""
    numbers = {
        "segments of the log deleted": cleaned.segments,
        "blocks folded into their batches": cleaned.blocks,
        "batches with nothing left in the log": cleaned.batches,
        "files of no batch deleted": cleaned.leftovers,
        "incomplete files of killed writers deleted": cleaned.partial_writes,
        "events forgotten": cleaned.events,
        "batches older than the history removed": cleaned.removed.batches,
        "deleted segments forgotten": cleaned.removed.segments,
        "files of removed batches deleted": cleaned.removed.files,
    }
    return ", ".join(f"{number:,} {what}" for what, number in numbers.items() if number) or "nothing to do"
