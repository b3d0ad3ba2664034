"""The operators of a batch's steps beside Spark: allocate its blocks, checkpoint the stream, clean up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseOperator

from headrace.airflow_versions import RetriedByPolicy
from headrace.clock import time_text
from headrace.errors import HeadraceError
from headrace.hooks.ledger import LedgerHook, register
from headrace.runs.batch_run import BatchRun, NothingToRun, run_times, takes_over
from headrace.runs.processes import connections_in_environment
from headrace.stream_context import StreamContext

if TYPE_CHECKING:
    from airflow.sdk import Context

    from headrace.batch.allocation import Allocation
    from headrace.batch.cleanup import Cleaned
    from headrace.ledger.batches.tables import BatchRow
    from headrace.stream import Stream
from headrace.operators.batch_events import batch_alias, emit_batch_event


class BatchStep(RetriedByPolicy):
    """Opens a stream for a task. Mixed into operators."""

    stream: Stream
    revision: int | None = None
    """The ledger's revision number of the stream's definition; None until the stream is open."""

    @contextmanager
    def opened(self) -> Iterator[StreamContext]:
        """The stream, registered in its ledger, for the length of a ``with`` block."""
        with LedgerHook(self.stream.ledger).opened() as ledger:
            self.revision = register(ledger, self.stream)
            yield StreamContext(self.stream, ledger)


class BatchStepOperator(BatchStep, BaseOperator):
    """A step that needs only its stream.

    :param stream: the stream.
    """

    template_fields: Sequence[str] = ()

    def __init__(self, *, stream: Stream, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.stream = stream


class AllocateBlocksOperator(BatchStepOperator):
    """Seals the run's batch time and allocates its blocks: as a manifest beside the log, then in the ledger.

    A batch that is already allocated keeps its blocks, however often the task runs. Returns a small summary.

    If the stream coalesces, the batch of a scheduled run takes over the earlier batch times that have no batch. In
    other streams, a scheduled run also allocates the earlier batch times that hold records and have no batch, and the
    stream's repair runs these batches (``headrace.batch.due_batches``). In an ordered stream this was done when the run
    waited for its turn. So no records remain unprocessed because the schedule began later than the receiver, or does
    not reach back far enough, or a run failed. A batch time from before the stream began is empty, unless the run asks
    to build it from Kafka.

    :param stream: the stream.
    """

    ui_color = "#e3f1d8"

    def execute(self, context: Context) -> dict[str, Any]:
        """Allocate the run's batch. Returns the allocation's `summary`."""
        with self.opened() as stream_context:
            try:
                return allocate_blocks(BatchRun.begin(context, stream_context), self.log)
            except NothingToRun as nothing:
                raise nothing.skip(context, self) from None


def allocate_blocks(run: BatchRun, log: Any) -> dict[str, Any]:
    """Allocate the run's batch, and earlier batch times that were missed. Returns the batch's `summary`.

    Raises:
        AirflowFailException: the run asks for something that the stream does not have.
        NothingToRun: another run's batch has taken the batch time over since this run began.
    """
    from headrace.batch.allocation import allocate

    if run.request.from_kafka:
        _build(run, log)
    over = takes_over(run.context, run.stream)
    allocation = allocate(run.stream_context, run.batch_time_ms, takes_over=over, known_ms=run_times(run.context))
    batch = allocation.batch
    if batch.absorbed_by_ms is not None:
        raise NothingToRun(f"batch {time_text(batch.absorbed_by_ms)} has taken {time_text(run.batch_time_ms)} over")
    log.info(
        "Batch %s %s: %d records in %d blocks of %d partitions, %d bytes; manifest %s",
        time_text(run.batch_time_ms), "is allocated" if allocation.fresh else "was allocated before",
        batch.records, batch.blocks, len(allocation.inputs), batch.payload_bytes, batch.manifest_uri,
    )  # fmt: skip
    if over:
        _report_taken_over(run, batch, log)
    elif not run.stream.coalesces and not run.stream.is_ordered:
        run.allocate_missed()
    return summary(allocation)


def _report_taken_over(run: BatchRun, batch: BatchRow, log: Any) -> None:
    """Log which batch times the batch took over, and how many are left for the next run."""
    if batch.absorbed:
        log.info(
            "Batch %s took over %d earlier batch time(s) that no run had allocated, from %s on.",
            time_text(batch.batch_time_ms), len(batch.absorbed), time_text(batch.absorbed[0]),
        )  # fmt: skip
    ledger, name = run.ledger, run.stream.name
    open_ms = ledger.streams.get(name).batch_time_after(ledger.now_ms())
    left = [pending for pending in ledger.blocks.unclaimed(name) if pending.batch_time_ms < open_ms]
    if left:
        log.info(
            "%d more batch time(s) with %d records wait for the next run. limits.max_coalesced_records and "
            "limits.max_coalesced_bytes limit what one batch takes over.",
            len(left), sum(pending.records for pending in left),
        )  # fmt: skip


def _build(run: BatchRun, log: Any) -> None:
    from headrace.batch.build_from_kafka import build_from_kafka

    if run.batch_time_ms > run.ledger.streams.get(run.stream.name).zero_time_ms:
        at = time_text(run.batch_time_ms)
        log.info("Batch %s is not built from Kafka, because it ends after the stream began.", at)
        return
    with connections_in_environment(run.stream):
        built = build_from_kafka(run.stream_context, run.batch_time_ms)
    log.info(
        "Batch %s %s built from Kafka by timestamps: %d records at most, in %d partitions.",
        time_text(run.batch_time_ms), "is" if built.fresh else "was already",
        built.batch.records, len(built.inputs),
    )  # fmt: skip


def summary(allocation: Allocation) -> dict[str, Any]:
    """The main numbers of an allocation, for the next tasks and for people. Small enough for an XCom."""
    batch = allocation.batch
    return {
        "batch_time_ms": batch.batch_time_ms,
        "fresh": allocation.fresh,
        "blocks": batch.blocks,
        "records": batch.records,
        "absorbed": len(batch.absorbed),
        "payload_bytes": batch.payload_bytes,
        "partitions": len(allocation.inputs),
        "manifest_uri": batch.manifest_uri,
    }


class CheckpointOperator(BatchStepOperator):
    """Writes the batch's result and the stream's checkpoint, for recovery without the ledger.

    It runs whether the batch succeeded or not; a batch that was never allocated has nothing to checkpoint. If the batch
    is not complete, a warning names the steps that are left: a run that asked for only some of the outputs succeeds
    without the others. Emits the batch's asset event, if this run completed it.

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
            emit_batch_event(run)


def checkpoint_after(run: BatchRun, log: Any) -> None:
    """Write the batch's result, and the stream's checkpoint if one is due. Log what was written, and what is left to
    do of the batch."""
    from headrace.batch.checkpoint import write_checkpoint
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
        log.info("The result of batch %s is written. No checkpoint of the stream is due.", at)
    else:
        log.info("Checkpoint %s/%s is written.", run.stream.folder_url, written.path)
    _warn_of_steps_left(run, log)


def _warn_of_steps_left(run: BatchRun, log: Any) -> None:
    """Warn of the steps that the batch still needs and that no live attempt is running, and of how to run them."""
    from headrace.batch.next_attempt import BatchProgress
    from headrace.ledger.errors import StepsLostError
    from headrace.ledger.states import UNFINISHED

    batch = run.find_batch()
    if batch is None or batch.state not in UNFINISHED:
        return
    now_ms = run.ledger.now_ms()
    progress = BatchProgress.of(run.ledger, batch, run.stream.steps)
    left = [step for step in progress.missing if not progress.live([step], now_ms)]
    if left and not set(left) & set(run.stream.steps):
        log.warning("%s", StepsLostError(batch, left))
    elif left:
        log.warning(
            "Batch %s is not complete, %s left to do: %s. Clear the failed tasks of this run. To run outputs "
            "that it did not ask for, trigger a run without `outputs` and with another logical date from %s to %s.",
            time_text(batch.batch_time_ms), "one step is" if len(left) == 1 else f"{len(left)} steps are",
            ", ".join(left), time_text(batch.batch_time_ms - batch.interval_ms), time_text(batch.batch_time_ms),
        )  # fmt: skip


class BatchNotCheckpointedError(HeadraceError):
    """The batch completed, and its result file is missing."""


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
        """Clean up, then check that this batch is checkpointed."""
        with self.opened() as stream_context:
            clean_up_after(BatchRun.of(context, stream_context), self.log)


def clean_up_after(run: BatchRun, log: Any) -> None:
    """Delete what no batch needs any more, if the batch is allocated; log what was deleted.

    Raises:
        BatchNotCheckpointedError: the batch completed, and no result file of it was written.
    """
    from headrace.batch.cleanup import clean_up

    at, batch = time_text(run.batch_time_ms), run.find_batch()
    if batch is None:
        log.info("Batch %s was not allocated, so there is nothing to clean up after it.", at)
        return
    log.info("Cleanup after batch %s: %s.", at, _cleaned_text(clean_up(run.stream_context)))
    # Read again: meanwhile a later batch's checkpoint may have marked this one.
    batch = run.ledger.batches.get(run.stream.name, run.batch_time_ms)
    if batch.completed_at_ms is not None and batch.checkpointed_at_ms is None:
        raise BatchNotCheckpointedError(
            f"Batch {at} of stream {run.stream.name!r} has completed, but it has no result file. Its log is kept.",
            remedy="The log of the task 'checkpoint' or 'micro_batch' shows the error. Clear that task once its cause "
            "is removed.",
        )


def _cleaned_text(cleaned: Cleaned) -> str:
    """What a cleanup deleted, for a line of the log."""
    numbers = {
        "segments of the log deleted": cleaned.segments,
        "blocks folded into their batches": cleaned.blocks,
        "batches with nothing left in the log": cleaned.batches,
        "files that belong to no batch deleted": cleaned.leftovers,
        "incomplete files of killed writers deleted": cleaned.partial_writes,
        "old events deleted": cleaned.events,
        "batches older than the history removed": cleaned.removed.batches,
        "rows of deleted segments removed": cleaned.removed.segments,
        "files of removed batches deleted": cleaned.removed.files,
    }
    return ", ".join(f"{number:,} {what}" for what, number in numbers.items() if number) or "nothing to do"
