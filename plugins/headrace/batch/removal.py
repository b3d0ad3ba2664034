"""Removing the end of a stream's history: batches that are over and older than `Limits.history`, and their files.

The ledger's rows go first. Files go when the oldest checkpoint that there is knows of it: a ledger that is rebuilt from
any of them then finds all that this one needs, and takes no removed batch for one that is still to be run.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from headrace.batch.checkpoint import CheckpointError, checkpoint_paths, read_checkpoint
from headrace.batch.history import history_numbers, history_path
from headrace.batch.manifest import FOLDER, manifest_time
from headrace.ledger import Ledger
from headrace.ledger.rows import StreamRow
from headrace.stream import Stream
from headrace.stream.model import milliseconds
from headrace.wal.storage import LogStorage

logger = logging.getLogger(__name__)

AT_ONCE = 500
"""Batches that one run removes, about."""

SENT_FOLDER = "sent"
"""Below the stream's folder: what Kafka outputs remember of their batches, a file named by the time for each."""

# Removing begins when the oldest batch is older than the history by so many intervals, or by so many milliseconds: to
# look for its files costs more than to remove a few batches more.
_SLACK_BATCHES = 500
_SLACK_MS = 3_600_000


@dataclass(frozen=True)
class Removed:
    """What was removed: batches from the ledger, segments that it remembered of deleted files, and files."""

    batches: int = 0
    segments: int = 0
    files: int = 0


def remove_old(stream: Stream, ledger: Ledger, folder: LogStorage, *, needed_ms: int) -> Removed:
    """Remove batches that are older than the stream's history, and files of those that were removed before.

    Args:
        folder: the stream's folder in its storage.
        needed_ms: what the stream's windows may still reach back to; nothing from there on is removed.

    Raises:
        StorageError: a file could not be deleted; the next run goes on.
    """
    if stream.limits.history is None:
        return Removed()
    history_ms = milliseconds(stream.limits.history)
    newest = ledger.batches.page(stream.name, limit=1)
    # Of a stream that had stopped the last batches stay, however old they are: its next one builds on them.
    ends_ms = [ledger.now_ms() - history_ms, needed_ms, *(batch.batch_time_ms - history_ms for batch in newest)]
    batches = _remove_batches(stream, ledger, min(ends_ms))
    segments = ledger.removal.remove_segments(stream.name, ledger.now_ms() - history_ms) if batches else 0
    row = ledger.streams.get(stream.name)
    files = _remove_files(row, ledger, folder) if row.removed_until_ms > row.removed_files_ms else 0
    return Removed(batches, segments, files)


def _remove_batches(stream: Stream, ledger: Ledger, before_ms: int) -> int:
    oldest_ms = ledger.removal.oldest(stream.name)
    slack_ms = min(_SLACK_BATCHES * stream.batch_interval_ms, _SLACK_MS)
    if oldest_ms is None or oldest_ms >= before_ms - slack_ms:
        return 0
    removed = 0
    while removed < AT_ONCE and (more := ledger.removal.remove_batches(stream.name, before_ms)):
        removed += more
    if removed:
        ledger.removal.note_history(stream.name)
    return removed


def _remove_files(row: StreamRow, ledger: Ledger, folder: LogStorage) -> int:
    """Delete what belongs to batches that every checkpoint knows to be removed; how many files."""
    paths = checkpoint_paths(folder)
    if not paths:
        return 0
    try:
        state = read_checkpoint(folder, paths[0]).state["stream"]
    except CheckpointError as error:
        # It goes when nine newer ones are there.
        logger.info("%s: files of removed batches stay: %s", row.name, error)
        return 0
    until_ms = state.get("removed_until_ms", 0)
    if until_ms <= row.removed_files_ms:
        return 0
    gone = [path for path in folder.paths(FOLDER) if _is_of(row, manifest_time(path), until_ms)]
    gone += [path for path in folder.paths(SENT_FOLDER) if _is_of(row, _sent_time(path), until_ms)]
    gone += [history_path(number) for number in history_numbers(folder) if number < state.get("history_from", 0)]
    for path in gone:
        folder.delete(path)
    ledger.removal.note_files(row.name, until_ms)
    return len(gone)


def _is_of(row: StreamRow, batch_time_ms: int | None, until_ms: int) -> bool:
    return batch_time_ms is not None and batch_time_ms <= until_ms and row.has_removed(batch_time_ms)


def _sent_time(path: str) -> int | None:
    digits = path.rpartition("/")[2].removesuffix(".json")
    return int(digits) if digits.isdigit() else None
