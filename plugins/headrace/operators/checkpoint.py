"""The operator that checkpoints a stream after a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.clock import time_text
from headrace.operators.batch import BatchStepOperator
from headrace.operators.batch_events import batch_alias, emit_batch_events
from headrace.runs.batch_run import BatchRun

if TYPE_CHECKING:
    from airflow.sdk import Context

    from headrace.stream import Stream


class CheckpointOperator(BatchStepOperator):
    """Writes the stream's checkpoint: positions, allocations and completed batches, for recovery without the ledger.

    It runs whether the batch succeeded or not; a batch that was never allocated has nothing to checkpoint. If the batch
    is not complete, a warning names the steps that are left: a run that asked for only some of the outputs succeeds
    without the others. Emits the asset events of the batch and of earlier batches, if this run completed them.

    :param stream: the stream.
    """

    ui_color = "#f6ecd2"

    def __init__(self, *, stream: Stream, outlets: Any = (), **kwargs: Any) -> None:
        super().__init__(stream=stream, outlets=[batch_alias(stream), *outlets], **kwargs)

    def execute(self, context: Context) -> Any:
        """Write the checkpoint."""
        with self.opened() as stream_context:
            run = BatchRun.of(context, stream_context)
            checkpoint_after(run, self.log)
            emit_batch_events(run)


def checkpoint_after(run: BatchRun, log: Any) -> None:
    """Write the stream's checkpoint if the batch is allocated and a checkpoint is due. Log the result, and what is left
    of the batch."""
    from headrace.batch.checkpoint_writer import write_checkpoint
    from headrace.ledger.states import BatchState

    at, batch = time_text(run.batch_time_ms), run.find_batch()
    if batch is None:
        log.info("Batch %s was not allocated, so there is nothing to checkpoint.", at)
        return
    if batch.state is BatchState.FAILED:
        # All tasks of this run have ended. An output whose task began no attempt does not delay the event any longer.
        run.ledger.attempts.end_run(batch.stream, batch.batch_time_ms)
    written = write_checkpoint(run.stream_context, run.batch_time_ms)
    if written is None:
        log.info("No checkpoint is due at batch %s; the next one covers it.", at)
    else:
        log.info("Checkpoint %s/%s", run.stream.folder_url, written.path)
    _warn_of_steps_left(run, log)


def _warn_of_steps_left(run: BatchRun, log: Any) -> None:
    """Warn of the steps that the batch still needs and that no live attempt is running, and of how to run them."""
    from headrace.ledger.errors import StepsLostError
    from headrace.ledger.states import AttemptState, BatchState
    from headrace.runs.steps_to_run import attempts_without_replays

    batch = run.find_batch()
    if batch is None or batch.state not in (BatchState.ALLOCATED, BatchState.RUNNING, BatchState.FAILED):
        return
    now_ms = run.ledger.now_ms()
    seen_to = {
        row.output_id
        for row in run.ledger.attempts.outputs(batch.stream, batch.batch_time_ms)
        if row.state is AttemptState.COMPLETED
    }
    for attempt in attempts_without_replays(run.ledger, batch):
        if attempt.alive(now_ms):
            seen_to.update(attempt.outputs)
    left = [step for step in batch.needs(run.stream.steps) if step not in seen_to]
    if left and not set(left) & set(run.stream.steps):
        log.warning("%s", StepsLostError(batch, left))
    elif left:
        log.warning(
            "Batch %s is not complete, %s left to do: %s. Clear what failed of this run. What it did not ask for is "
            "done by a run without `outputs`, with any other date from %s until %s.",
            time_text(batch.batch_time_ms), "one step is" if len(left) == 1 else f"{len(left)} steps are",
            ", ".join(left), time_text(batch.batch_time_ms - batch.interval_ms), time_text(batch.batch_time_ms),
        )  # fmt: skip
