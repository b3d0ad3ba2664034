"""Cleanup: delete log segments and records of batches that no batch needs, by reference and never by age (rule 9)."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from itertools import groupby

from headrace.batch.manifest import LOG_FOLDER, manifest_path
from headrace.batch.old_batches import Removed, remove_old_batches
from headrace.clock import time_text
from headrace.ledger.errors import BatchStateError
from headrace.ledger.states import BatchState
from headrace.stream_context import StreamContext
from headrace.wal.frame import segments_in
from headrace.wal.recovery import is_orphaned
from headrace.wal.storage import LogStorage

logger = logging.getLogger(__name__)

EVENTS_KEPT_MS = 7 * 24 * 3_600_000
"""Minimum time that a stream's events stay in the ledger. Events of blocks are deleted with the blocks."""
PARTIAL_WRITE_SECONDS = 86_400.0
"""Minimum age at which a partly written file is deleted. No write takes a thousandth of this time."""
_HOUR_MS = 3_600_000
_PRUNED_AT_ONCE = 10  # Deletions of thousands of events each. The next cleanup deletes the rest.


@dataclass(frozen=True)
class Cleaned:
    """What a cleanup did.

    ``segments`` were deleted and the rows of ``blocks`` folded. ``batches`` have nothing left in the log. ``leftovers``
    are deleted files: segments without an accepted block, and manifests that no batch names. ``events`` were deleted
    from the ledger. ``removed`` counts what was removed at the end of the history. ``partial_writes`` are deleted files
    that killed writers had left incomplete.
    """

    segments: int
    blocks: int
    batches: int
    leftovers: int = 0
    events: int = 0
    removed: Removed = field(default_factory=Removed)
    partial_writes: int = 0


def clean_up(context: StreamContext) -> Cleaned:
    """Delete the log segments that are no longer needed, then their rows in the ledger.

    A segment is no longer needed when every block in it belongs to a batch that is completed and checkpointed, or
    abandoned, and that is older than the stream's remember window. In a stream with windows, the remember window counts
    back from the oldest batch that is still to be run. So a stream that catches up after downtime finds the blocks that
    its windows need.

    Each step can be repeated after a crash. Also deletes log files without an accepted block, and events that are older
    than a week and than the remember window. Removes batches that are older than the stream's history
    (`headrace.batch.old_batches`). Deletes incomplete files of killed writers after a day. It looks for these once an
    hour, because the stream's folder has files of each batch.

    Raises:
        StorageError: a segment could not be deleted; it and those after it stay for the next cleanup.
    """
    stream, ledger = context.stream, context.ledger
    log = context.storage.below(LOG_FOLDER)
    windows = bool(stream.window_ms)
    before_ms = (ledger.cleanup.needed_from(stream.name) if windows else ledger.now_ms()) - stream.remember_ms
    segments = blocks = 0
    while found := ledger.cleanup.removable_segments(stream.name, before_ms):
        # Claimed before the file is deleted: a block that is added meanwhile is refused and goes into another segment.
        claimed = ledger.cleanup.claim_removal(
            stream.name,
            [segment.path for segment in found],
            before_ms,
            window_reach_ms=stream.remember_ms if windows else None,
        )
        if not claimed:
            break
        for segment in claimed:
            log.delete(segment.path)
            blocks += ledger.cleanup.fold_blocks(stream.name, segment.path)
            segments += 1
    marked, manifests = _mark_cleaned(context, before_ms)
    leftovers = manifests + _sweep(context, log)
    # A run may leave old batches to the next run: they do not slow down new batches.
    removed = remove_old_batches(context, needed_ms=before_ms)
    partial = 0
    if _begins_an_hour(context):
        partial = context.storage.remove_partial_writes(PARTIAL_WRITE_SECONDS)
    return Cleaned(segments, blocks, marked, leftovers, _prune_events(context), removed, partial)


def _begins_an_hour(context: StreamContext) -> bool:
    """Whether the newest batch is in another hour than the one before it, or is the only batch."""
    own = [state for state in BatchState if state is not BatchState.ABSORBED]
    hours = [batch.batch_time_ms // _HOUR_MS for batch in context.ledger.batches.page(context.name, 2, own)]
    return len(hours) == 1 or len(set(hours)) == 2


def _prune_events(context: StreamContext) -> int:
    """Delete old events and samples; returns the number of events."""
    before_ms = context.ledger.now_ms() - max(EVENTS_KEPT_MS, context.stream.remember_ms)
    pruned = 0
    while context.ledger.samples.prune(context.name, before_ms):
        pass
    for _ in range(_PRUNED_AT_ONCE):
        gone = context.ledger.events.prune(context.name, before_ms)
        pruned += gone
        if not gone:
            break
    return pruned


def _mark_cleaned(context: StreamContext, before_ms: int) -> tuple[int, int]:
    """Mark batches that have nothing left in the log; returns how many, and how many unused manifests were deleted."""
    stream_name, ledger = context.name, context.ledger
    marked = manifests = 0
    while cleanable := ledger.cleanup.cleanable_batches(stream_name, before_ms):
        before = marked
        for batch in cleanable:
            try:
                ledger.batches.mark_cleaned(stream_name, batch.batch_time_ms)
            except BatchStateError as error:
                # A new attempt has begun since the query: a later cleanup marks the batch.
                logger.info(
                    "%s: batch %s is not marked as cleaned: %s", stream_name, time_text(batch.batch_time_ms), error
                )
            else:
                marked += 1
                # A crashed allocation may have left a manifest under the plain name.
                plain = manifest_path(batch.batch_time_ms)
                if batch.manifest_uri.rpartition("/")[2] != plain.rpartition("/")[2]:
                    manifests += context.storage.delete(plain)
        if marked == before:
            break
    return marked, manifests


def _sweep(context: StreamContext, log: LogStorage) -> int:
    """Delete orphaned files at the front of each receiver's log; returns how many.

    The ledger adds a segment's row when it accepts the first block in it. A full disk leaves a file for each failed
    attempt to write, and the ledger does not know these files. Such a file is deleted when four conditions hold:

    - Its writer is fenced: a newer instance has registered, or this one has ended. The ledger accepts nothing more from
      it, so a segment that is unknown now stays unknown. Hence the order of reading: files, epochs, the ledger's rows.
    - The ledger has no row of it, and rows outlive their files. So no block, batch or manifest names it.
    - The log proves no block in it accepted. A ledger that was lost, or restored from an older backup, does not know
      files that it had accepted before. It is rebuilt from these files, so they stay.
    - No earlier file stays. So deletion always goes from the front. A recovery that finds a deleted file named by a
      later segment can explain why it is missing. Files that prove other blocks accepted are never deleted.
    """
    stream_name, ledger = context.name, context.ledger
    swept = 0
    files = sorted(segments_in(log.paths()))
    rows = {(row.receiver_id.input_id, row.receiver_id.index): row for row in ledger.receivers.all(stream_name)}
    for receiver, of_receiver in groupby(files, key=lambda name: (name.input_id, name.index)):
        names = list(of_receiver)
        row = rows.get(receiver)
        for place, name in enumerate(names):
            is_fenced = row is not None and (name.epoch < row.epoch or (name.epoch == row.epoch and row.state.ended))
            if not is_fenced or ledger.segments.get(stream_name, name.path) is not None:
                break
            if not is_orphaned(log, name, names[place + 1 :]):
                logger.warning("%s: the ledger does not know %s, whose blocks were accepted", stream_name, name.path)
                break
            log.delete(name.path)
            swept += 1
    return swept
