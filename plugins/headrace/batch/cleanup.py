"""Cleanup: delete what no batch needs, by reference and never by age (rule 9 of the design; `clean_up`):

1. Claim segments of which every block is in a checkpointed or abandoned batch that has left the remember window. No
   block can be added to a claimed segment.
2. Delete the file of each, then fold its rows in the ledger.
3. Mark the batches that have nothing left in the log, and delete manifests and segments that nothing names.
4. Remove finished batches that are older than `Limits.history`, and their files.
5. Delete what killed writers left incomplete, and old events.

Step 4 removes the oldest part of a stream's history.
The ledger's rows are deleted first. The files are deleted once the oldest existing checkpoint records the removal. So a
ledger that is rebuilt from any checkpoint finds all files that it needs, and never treats a removed batch as one that
is still to be run.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from itertools import groupby

from headrace.batch.checkpoint import CheckpointError, checkpoint_paths, read_checkpoint
from headrace.batch.manifest import FOLDER, LOG_FOLDER, manifest_path, manifest_time
from headrace.batch.results import FOLDER as RESULTS
from headrace.batch.results import result_name
from headrace.clock import time_text
from headrace.ledger import Ledger
from headrace.ledger.errors import BatchStateError
from headrace.ledger.states import BatchState
from headrace.ledger.tables import StreamRow
from headrace.stream.model import milliseconds
from headrace.stream_context import StreamContext
from headrace.stream_folder import Mark
from headrace.wal.frame import segments_in
from headrace.wal.log_storage import LogStorage
from headrace.wal.recovery import is_orphaned

logger = logging.getLogger(__name__)

EVENTS_KEPT_MS = 7 * 24 * 3_600_000
"""Minimum time that a stream's events stay in the ledger. Events of blocks are deleted with the blocks."""
PARTIAL_WRITE_SECONDS = 86_400.0
"""Minimum age at which a partly written file is deleted. No write takes a thousandth of this time."""
_HOUR_MS = 3_600_000
_PRUNED_AT_ONCE = 10  # Deletions of thousands of events each. The next cleanup deletes the rest.


@dataclass(frozen=True)
class Removed:
    """What was removed: batches and rows of deleted segments from the ledger, and files."""

    batches: int = 0
    segments: int = 0
    files: int = 0


@dataclass(frozen=True)
class Cleaned:
    """What a cleanup did.

    ``segments`` were deleted and the rows of ``blocks`` folded. ``batches`` have nothing left in the log. ``leftovers``
    are deleted files: segments without an accepted block, and manifests that no batch names. ``events`` were deleted
    from the ledger. ``removed`` counts what was older than the history. ``partial_writes`` are deleted files that
    killed writers had left incomplete.
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
    (`remove_old_batches`). Deletes incomplete files of killed writers after a day. These are searched for once an hour
    only, because the stream's folder has files of each batch.

    Raises:
        LedgerSetBackError: the ledger is older than the folder. Nothing is deleted.
        StorageError: a segment could not be deleted; it and those after it stay for the next cleanup.
    """
    stream, ledger = context.stream, context.ledger
    # Before the ledger is changed, too.
    mark = context.storage.mark.check()
    log = context.storage.below(LOG_FOLDER)
    windows = bool(stream.window_ms)
    before_ms = (ledger.cleanup.needed_from(stream.name) if windows else ledger.now_ms()) - stream.remember_ms
    segments = blocks = 0
    while removable := ledger.cleanup.removable_segments(stream.name, before_ms):
        # Claimed before the file is deleted: a block that is added meanwhile is refused and goes into another segment.
        claimed = ledger.cleanup.claim_removal(
            stream.name,
            [segment.path for segment in removable],
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
    leftovers = manifests + _delete_orphans(context, log)
    # A run may leave old batches to the next run: they do not slow down new batches.
    needed_ms = ledger.cleanup.needed_from(stream.name, in_log=False) - stream.remember_ms if windows else before_ms
    removed = remove_old_batches(context, needed_ms=needed_ms)
    partial = 0
    if _begins_an_hour(context):
        partial = context.storage.remove_partial_writes(PARTIAL_WRITE_SECONDS)
    if segments or marked or leftovers or removed.files:
        # An older copy names files that are deleted now.
        context.storage.mark.leave()
    events = _prune_events(context, mark)
    return Cleaned(segments, blocks, marked, leftovers, events, removed, partial)


def _begins_an_hour(context: StreamContext) -> bool:
    """Whether the newest batch is in another hour than the one before it, or is the only batch."""
    own = [state for state in BatchState if state is not BatchState.ABSORBED]
    hours = [batch.batch_time_ms // _HOUR_MS for batch in context.ledger.batches.page(context.name, 2, own)]
    return len(hours) == 1 or len(set(hours)) == 2


def _prune_events(context: StreamContext, mark: Mark | None) -> int:
    """Delete old events and samples; returns the number of events. The event that the folder's ``mark`` names stays: it
    shows that this is the stream's ledger."""
    before_ms = context.ledger.now_ms() - max(EVENTS_KEPT_MS, context.stream.remember_ms)
    before_id = None if mark is None else mark.event_id
    pruned = 0
    while context.ledger.cleanup.prune_samples(context.name, before_ms):
        pass
    for _ in range(_PRUNED_AT_ONCE):
        gone = context.ledger.events.prune(context.name, before_ms, before_id=before_id)
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


def _delete_orphans(context: StreamContext, log: LogStorage) -> int:
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
    deleted = 0
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
                logger.warning(
                    "%s: segment %s is kept: its blocks were accepted, but the ledger has no row of it. "
                    "`headrace streams fsck` shows what to do.",
                    stream_name,
                    name.path,
                )
                break
            log.delete(name.path)
            deleted += 1
    return deleted


BATCHES_AT_ONCE = 500
"""One run removes about this many batches."""

SEGMENTS_AT_ONCE = 20_000
"""One run deletes the rows of about this many segments."""

SENT_FOLDER = "sent"
"""Below the stream's folder: what Kafka outputs store of their batches, one file a batch, named by its time."""

REPORTS_FOLDER = "reports"
"""Below the stream's folder: what writes report to their attempts, which delete it; that of killed ones is left. Its
name begins with the batch time."""

SLACK_BATCHES = 500
"""Removal begins when the oldest batch exceeds the history by this many intervals, or by an hour if that is less:
searching for the files costs more than removing a few more batches at once."""
_SLACK_MS = 3_600_000


def remove_old_batches(context: StreamContext, *, needed_ms: int) -> Removed:
    """Remove batches that are older than the stream's history, and the files of batches removed before.

    Args:
        needed_ms: the earliest time that the stream's windows may still need; nothing from then on is removed.

    Raises:
        StorageError: a file could not be deleted; the next run continues.
    """
    stream, ledger = context.stream, context.ledger
    if stream.limits.history is None:
        return Removed()
    history_ms = milliseconds(stream.limits.history)
    newest = ledger.batches.page(stream.name, limit=1)
    # The history counts back from the newest batch too: a stopped stream keeps its last batches, however old, because
    # its next batch builds on them.
    ends_ms = [ledger.now_ms() - history_ms, needed_ms, *(batch.batch_time_ms - history_ms for batch in newest)]
    batches = _remove_batches(context, min(ends_ms))
    segments = _remove_segments(context, ledger.now_ms() - history_ms)
    row = ledger.streams.get(stream.name)
    files = _remove_files(row, ledger, context.storage) if row.removed_until_ms > row.removed_files_ms else 0
    return Removed(batches, segments, files)


def _remove_batches(context: StreamContext, before_ms: int) -> int:
    removal = context.ledger.removal
    oldest_ms = removal.oldest(context.name)
    slack_ms = min(SLACK_BATCHES * context.stream.batch_interval_ms, _SLACK_MS)
    if oldest_ms is None or oldest_ms >= before_ms - slack_ms:
        return 0
    removed = 0
    while removed < BATCHES_AT_ONCE and (more := removal.remove_batches(context.name, before_ms)):
        removed += more
    return removed


def _remove_segments(context: StreamContext, before_ms: int) -> int:
    # Whether or not batches were removed: on object storage each block is a segment, far more than there are batches.
    removed = 0
    while removed < SEGMENTS_AT_ONCE and (more := context.ledger.removal.remove_segments(context.name, before_ms)):
        removed += more
    return removed


def _remove_files(row: StreamRow, ledger: Ledger, folder: LogStorage) -> int:
    """Delete the files of batches that every checkpoint records as removed; returns how many."""
    paths = checkpoint_paths(folder)
    if not paths:
        return 0
    try:
        state = read_checkpoint(folder, paths[0]).state["stream"]
    except CheckpointError as error:
        # The checkpoint is deleted once there are two newer ones.
        logger.info("%s: files of removed batches stay: %s", row.name, error)
        return 0
    from_ms, until_ms = state.get("removed_from_ms", 0), state.get("removed_until_ms", 0)
    if until_ms <= row.removed_files_ms:
        return 0
    # The results last: without a checkpoint, a manifest without a result would be that of a batch that was never run.
    gone = [path for path in folder.paths(FOLDER) if _is_within(from_ms, manifest_time(path), until_ms)]
    gone += [path for path in folder.paths(SENT_FOLDER) if _is_within(from_ms, _sent_time(path), until_ms)]
    gone += [path for path in folder.paths(REPORTS_FOLDER) if _is_within(from_ms, _report_time(path), until_ms)]
    gone += [path for path in folder.paths(RESULTS) if _is_within(from_ms, _result_time(path), until_ms)]
    for path in gone:
        folder.delete(path)
    ledger.removal.note_files(row.name, until_ms)
    return len(gone)


def _is_within(from_ms: int, batch_time_ms: int | None, until_ms: int) -> bool:
    return batch_time_ms is not None and from_ms <= batch_time_ms <= until_ms


def _result_time(path: str) -> int | None:
    named = result_name(path)
    return None if named is None else named[0]


def _sent_time(path: str) -> int | None:
    digits = path.rpartition("/")[2].removesuffix(".json")
    return int(digits) if digits.isdigit() else None


def _report_time(path: str) -> int | None:
    digits, _, _ = path.rpartition("/")[2].partition("-")
    return int(digits) if digits.isdigit() else None
