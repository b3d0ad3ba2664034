"""The operator that checkpoints a stream after a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.clock import time_text
from headrace.operators.batch import BatchStepOperator
from headrace.operators.batch_events import batch_alias, emit_batch_events
from headrace.stream_context import StreamContext

if TYPE_CHECKING:
    from airflow.sdk import Context

    from headrace.ledger import Ledger
    from headrace.stream import Stream
    from headrace.wal.storage import LogStorage


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
        with self.opened() as (ledger, storage):
            batch_time_ms = self.batch_time_ms(context, ledger)
            write_checkpoint_after(self.stream, ledger, storage, batch_time_ms, self.log)
            warn_of_what_is_left(self.stream, ledger, batch_time_ms, self.log)
            emit_batch_events(context, ledger, self.stream.name, batch_time_ms)


def write_checkpoint_after(stream: Stream, ledger: Ledger, storage: LogStorage, batch_time_ms: int, log: Any) -> None:
    """Write the stream's checkpoint if the batch is allocated and a checkpoint is due; log the result."""
    from headrace.batch.checkpointing import write_checkpoint

    if ledger.batches.find(stream.name, batch_time_ms) is None:
        log.info("Batch %s was not allocated, so there is nothing to checkpoint.", time_text(batch_time_ms))
        return
    written = write_checkpoint(StreamContext(stream, ledger, storage=storage.below(stream.name)), batch_time_ms)
    if written is None:
        log.info("No checkpoint is due at batch %s; the next one covers it.", time_text(batch_time_ms))
    else:
        log.info("Checkpoint %s/%s", stream.folder_url, written.path)


def warn_of_what_is_left(stream: Stream, ledger: Ledger, batch_time_ms: int, log: Any) -> None:
    """Warn of the steps that the batch still needs and that no live attempt is running, and of how to run them."""
    from headrace.ledger.states import AttemptState, BatchState
    from headrace.runs.steps_to_run import live_attempts

    batch = ledger.batches.find(stream.name, batch_time_ms)
    if batch is None or batch.state not in (BatchState.ALLOCATED, BatchState.RUNNING, BatchState.FAILED):
        return
    now_ms = ledger.now_ms()
    seen_to = {
        row.output_id
        for row in ledger.attempts.outputs(stream.name, batch_time_ms)
        if row.state is AttemptState.COMPLETED
    }
    for attempt in live_attempts(ledger, batch):
        if attempt.alive(now_ms):
            seen_to.update(attempt.outputs)
    required = batch.steps or batch.required or stream.steps
    left = [step for step in stream.steps if step in required and step not in seen_to]
    if left:
        log.warning(
            "Batch %s is not complete, %s left to do: %s. Clear what failed of this run; what it did not ask for is "
            "done by a run without `outputs` of any other date from %s until %s.",
            time_text(batch_time_ms), "one step is" if len(left) == 1 else f"{len(left)} steps are", ", ".join(left),
            time_text(batch_time_ms - batch.interval_ms), time_text(batch_time_ms),
        )  # fmt: skip
