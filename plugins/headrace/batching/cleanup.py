"""Deleting what no batch needs any more, by reference and never by age (rule 9 of the design)."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.batching.manifest import LOG_FOLDER
from headrace.ledger import Ledger
from headrace.stream import Stream
from headrace.wal.storage import LogStorage


@dataclass(frozen=True)
class Cleaned:
    """What a cleanup did: segments deleted, their blocks' rows folded, batches with nothing left in the log."""

    segments: int
    blocks: int
    batches: int


def clean_up(stream: Stream, ledger: Ledger, storage: LogStorage) -> Cleaned:
    """Delete the log's segments that are done with, then their rows in the ledger.

    A segment is done with when every block in it belongs to a batch that has completed and is checkpointed, or was
    abandoned, and has left the stream's remember window. Each step can be repeated after a crash.

    Raises:
        StorageError: a segment could not be deleted; those after it stay for the next cleanup.
    """
    log = storage.below(stream.name).below(LOG_FOLDER)
    before_ms = ledger.now_ms() - stream.remember_ms
    segments = blocks = 0
    while found := ledger.cleanup.removable_segments(stream.name, before_ms):
        # Claimed before the file goes: a block that is added meanwhile is refused and finds another segment.
        claimed = ledger.cleanup.claim_removal(stream.name, [segment.path for segment in found], before_ms)
        if not claimed:
            break
        for segment in claimed:
            log.delete(segment.path)
            blocks += ledger.cleanup.fold_blocks(stream.name, segment.path)
            segments += 1
    batches = 0
    while cleanable := ledger.cleanup.cleanable_batches(stream.name, before_ms):
        for batch in cleanable:
            ledger.batches.mark_cleaned(stream.name, batch.batch_time_ms)
            batches += 1
    return Cleaned(segments, blocks, batches)
