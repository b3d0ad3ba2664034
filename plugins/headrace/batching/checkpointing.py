"""Writing a stream's checkpoint after a batch."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

import tenacity

from headrace.batching.checkpoint import KEEP, Checkpoint, checkpoint_paths
from headrace.ledger import Ledger
from headrace.ledger.errors import BatchStateError
from headrace.ledger.rows import BatchRow
from headrace.ledger.states import BatchState
from headrace.stream import Stream
from headrace.wal.errors import StorageError
from headrace.wal.storage import LogStorage

logger = logging.getLogger(__name__)

MANY = 10_000
"""Batches in a checkpoint from which on it says so."""

_write_retry = tenacity.retry(
    retry=tenacity.retry_if_exception_type((StorageError, OSError)),
    stop=tenacity.stop_after_attempt(3),
    wait=tenacity.wait_exponential(multiplier=0.2, max=2),
    reraise=True,
)


def write_checkpoint(stream: Stream, ledger: Ledger, storage: LogStorage, batch_time_ms: int) -> Checkpoint | None:
    """Write the stream's checkpoint and note it with every completed batch that it covers; keeps the newest ten.

    None when the batch time is not a multiple of the stream's checkpoint interval: the next due one covers it.

    It holds every batch that is not cleaned, however many: one that was left out would be run again after a rebuild,
    whose log is in part gone. So it grows with what the log keeps: a batch for every interval of the remember window,
    and those that wait, failed, or were completed and not cleaned since.

    Raises:
        StorageError: it could not be written, in three tries.
    """
    if batch_time_ms % stream.checkpoint_interval_ms:
        return None
    # Batches are read before positions: a batch that is in the checkpoint then has its blocks' positions in it too.
    batches = ledger.batches.uncleaned(stream.name)
    if len(batches) > MANY:
        logger.warning(
            "%s: %d batches are not cleaned, and every checkpoint holds them all, some 600 bytes each. "
            "The oldest is %d. Let cleanup run, remember less, or set a longer checkpoint_interval.",
            stream.name, len(batches), batches[0].batch_time_ms,
        )  # fmt: skip
    checkpoint = take(ledger, stream.name, batch_time_ms, batches)
    folder = storage.below(stream.name)
    _write_retry(checkpoint.write)(folder)
    uri = f"{stream.folder_url}/{checkpoint.path}"
    for batch in batches:
        if batch.state is BatchState.COMPLETED and batch.checkpointed_at_ms is None:
            try:
                ledger.batches.mark_checkpointed(stream.name, batch.batch_time_ms, uri)
            except BatchStateError as error:
                # It was taken to be run again since it was read: the checkpoint after that holds it.
                logger.info("%s: batch %d is not marked: %s", stream.name, batch.batch_time_ms, error)
    for path in checkpoint_paths(folder)[:-KEEP]:
        folder.delete(path)
    return checkpoint


def take(ledger: Ledger, stream: str, batch_time_ms: int, batches: Sequence[BatchRow]) -> Checkpoint:
    """The stream's state as the ledger has it now, with these batches."""
    recorded = ledger.batches.recorded(stream, [batch.batch_time_ms for batch in batches])
    return Checkpoint(
        stream=stream,
        written_at_ms=ledger.now_ms(),
        batch_time_ms=batch_time_ms,
        state={
            "stream": dataclasses.asdict(ledger.streams.get(stream)),
            "batches": [{**dataclasses.asdict(batch), "outputs": recorded[batch.batch_time_ms]} for batch in batches],
            "runs": ledger.runs.newest(stream),
            "topics": [dataclasses.asdict(topic) for topic in ledger.topics.list(stream)],
            "positions": [dataclasses.asdict(position) for position in ledger.positions.list(stream)],
            "receivers": [
                {
                    "input_id": receiver.receiver_id.input_id,
                    "index": receiver.receiver_id.index,
                    "epoch": receiver.epoch,
                    "job_epoch": receiver.job_epoch,
                    "last_accepted_sequence": receiver.last_accepted_sequence,
                }
                for receiver in ledger.receivers.list(stream)
            ],
        },
    )
