"""Writes a stream's checkpoint after a batch."""

from __future__ import annotations

import dataclasses
import logging

import tenacity

from headrace.batch.checkpoint import KEEP, Checkpoint, batch_time_of, checkpoint_paths, written_at
from headrace.batch.history_files import batches_to_json, file_batches, history_numbers
from headrace.clock import time_text
from headrace.ledger.errors import BatchStateError
from headrace.ledger.states import BatchState
from headrace.stream_context import StreamContext
from headrace.wal.errors import StorageError

logger = logging.getLogger(__name__)

_MANY = 10_000
"""A checkpoint with more batches than this logs a warning."""

_GAPS = 10_000
"""A checkpoint holds at most this many gaps, the newest."""

_OF_REMOVAL = ("removed_from_ms", "removed_until_ms", "removed_files_ms", "history_from")

_SEGMENTS = 100_000
"""A checkpoint names at most this many of the log's files."""

_write_retry = tenacity.retry(
    retry=tenacity.retry_if_exception_type((StorageError, OSError)),
    stop=tenacity.stop_after_attempt(3),
    wait=tenacity.wait_exponential(multiplier=0.2, max=2),
    reraise=True,
)


def write_checkpoint(context: StreamContext, batch_time_ms: int) -> Checkpoint | None:
    """Write the stream's checkpoint if it is due after this batch; see `checkpoint_now`.

    Returns None if it is not due: the next one covers the batch.

    Raises:
        StorageError: it could not be written, in three tries.
    """
    return checkpoint_now(context, batch_time_ms) if checkpoint_is_due(context, batch_time_ms) else None


def checkpoint_is_due(context: StreamContext, batch_time_ms: int) -> bool:
    """Whether the batch ends a checkpoint interval, or the newest checkpoint is of another interval.

    A stream that coalesces may have no batch at the end of an interval, however long it runs.
    """
    interval_ms = context.stream.checkpoint_interval_ms
    if batch_time_ms % interval_ms == 0:
        return True
    newest = checkpoint_paths(context.storage)[-1:]
    return not newest or batch_time_of(newest[0]) // interval_ms != batch_time_ms // interval_ms


def checkpoint_now(context: StreamContext, batch_time_ms: int) -> Checkpoint:
    """Write the stream's checkpoint and mark every completed batch in it as checkpointed; keeps the newest ten.

    Checkpoint and history files together hold every batch. A batch that was left out would be run again after a
    rebuild, although part of its log may be gone. Finished batches move into history files over time, so the checkpoint
    itself holds the waiting, the failed and the latest batches.

    Raises:
        StorageError: it could not be written, in three tries.
    """
    stream_name, folder = context.name, context.storage
    try:
        file_batches(context)
    except (StorageError, OSError) as error:
        # The batches stay in this checkpoint, and the next one tries again.
        logger.warning("%s: finished batches could not be written into the history: %s", stream_name, error)
    checkpoint = _make_checkpoint(context, batch_time_ms)
    _write_retry(checkpoint.write)(folder)
    uri = f"{context.stream.folder_url}/{checkpoint.path}"
    for batch in checkpoint.state["batches"]:
        if batch["state"] == BatchState.COMPLETED and batch["checkpointed_at_ms"] is None:
            try:
                context.ledger.batches.mark_checkpointed(stream_name, batch["batch_time_ms"], uri)
            except BatchStateError as error:
                # A new attempt has begun since the batch was read: a later checkpoint marks it.
                logger.info("%s: batch %s is not marked: %s", stream_name, time_text(batch["batch_time_ms"]), error)
    for path in checkpoint_paths(folder)[:-KEEP]:
        folder.delete(path)
    return checkpoint


def _make_checkpoint(context: StreamContext, batch_time_ms: int) -> Checkpoint:
    """The stream's current state in the ledger, with the batches that are in no history file."""
    stream_name, ledger, folder = context.name, context.ledger, context.storage
    # The checkpoint's time is chosen first, later than all existing history files: for a batch that is filed from now
    # on, the file counts. It is also later than the newest checkpoint's, so that the order holds for two checkpoints in
    # one millisecond and after the clock was set back. What was removed is read first too: this checkpoint still needs
    # the history files of batches that are removed meanwhile.
    before = ledger.streams.get(stream_name)
    numbers = [number for number in history_numbers(folder) if number >= before.history_from]
    taken = [*numbers[-1:], *map(written_at, checkpoint_paths(folder)[-1:])]
    written_at_ms = max(ledger.now_ms(), *(number + 1 for number in taken), 0)
    # Batches are read before positions: so the positions include the blocks of every batch in the checkpoint.
    batches = ledger.history.unfiled(stream_name)
    if len(batches) > _MANY:
        logger.warning(
            "%s: %d batches are unfinished, and every checkpoint holds them all, about 600 bytes each. The oldest is "
            "%s. Run them, abandon those that can never succeed, or set a longer checkpoint_interval.",
            stream_name, len(batches), time_text(batches[0].batch_time_ms),
        )  # fmt: skip
    job = ledger.jobs.current(stream_name)
    row, described = ledger.streams.get(stream_name), batches_to_json(ledger, stream_name, batches)
    # Only the definitions by which these batches were written, and the current one.
    named = {row.revision, *(revision for batch in described for revision in batch["revisions"].values())}
    return Checkpoint(
        stream=stream_name,
        written_at_ms=written_at_ms,
        batch_time_ms=batch_time_ms,
        state={
            "stream": {**dataclasses.asdict(row), **{name: getattr(before, name) for name in _OF_REMOVAL}},
            "revisions": [dataclasses.asdict(each) for each in ledger.streams.revisions(stream_name, named)],
            "batches": described,
            "history": {"files": len(numbers), "newest": numbers[-1] if numbers else 0},
            "moved_blocks": [dataclasses.astuple(block) for block in ledger.history.moved(stream_name)],
            "runs": ledger.runs.newest(stream_name),
            "replay_definitions": [dataclasses.asdict(row) for row in ledger.history.replay_definitions(stream_name)],
            "topics": [dataclasses.asdict(topic) for topic in ledger.topics.all(stream_name)],
            "positions": [dataclasses.asdict(position) for position in ledger.positions.all(stream_name)],
            # Gaps are read after the positions: so they include every loss that a position has skipped.
            "gaps": [dataclasses.asdict(gap) for gap in ledger.gaps.page(stream_name, limit=_GAPS)],
            # Distinguishes a segment that somebody deleted from those that cleanup deleted.
            "segments": {
                segment.path: segment.last_batch_time_ms
                for segment in ledger.segments.page(stream_name, limit=_SEGMENTS)
                if segment.removing_at_ms is None
            },
            "job": None if job is None else {"holder": job.holder, "lease_ms": job.lease_ms},
            "receivers": [
                {
                    "input_id": receiver.receiver_id.input_id,
                    "index": receiver.receiver_id.index,
                    "epoch": receiver.epoch,
                    "job_epoch": receiver.job_epoch,
                    "last_accepted_sequence": receiver.last_accepted_sequence,
                }
                for receiver in ledger.receivers.all(stream_name)
            ],
        },
    )
