"""Removes the end of a stream's history: finished batches that are older than `Limits.history`, and their files.

The ledger's rows are deleted first. The files are deleted once the oldest existing checkpoint records the removal. So a
ledger that is rebuilt from any checkpoint finds all files that it needs, and never treats a removed batch as one that
is still to be run.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from headrace.batch.checkpoint import CheckpointError, checkpoint_paths, read_checkpoint
from headrace.batch.history_files import history_numbers, history_path
from headrace.batch.manifest import FOLDER, manifest_time
from headrace.ledger import Ledger
from headrace.ledger.tables import StreamRow
from headrace.stream.model import milliseconds
from headrace.stream_context import StreamContext
from headrace.wal.storage import LogStorage

logger = logging.getLogger(__name__)

AT_ONCE = 500
"""One run removes about this many batches."""

SEGMENTS_AT_ONCE = 20_000
"""One run deletes the rows of about this many segments."""

SENT_FOLDER = "sent"
"""Below the stream's folder: what Kafka outputs store of their batches, one file a batch, named by its time."""

# Removal begins when the oldest batch exceeds the history by this many intervals, or by this time if that is less:
# searching for the files costs more than removing a few more batches at once.
_SLACK_BATCHES = 500
_SLACK_MS = 3_600_000


@dataclass(frozen=True)
class Removed:
    """What was removed: batches and rows of deleted segments from the ledger, and files."""

    batches: int = 0
    segments: int = 0
    files: int = 0


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
    slack_ms = min(_SLACK_BATCHES * context.stream.batch_interval_ms, _SLACK_MS)
    if oldest_ms is None or oldest_ms >= before_ms - slack_ms:
        return 0
    removed = 0
    while removed < AT_ONCE and (more := removal.remove_batches(context.name, before_ms)):
        removed += more
    if removed:
        removal.note_history(context.name)
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
        # The checkpoint is deleted once there are ten newer ones.
        logger.info("%s: files of removed batches stay: %s", row.name, error)
        return 0
    from_ms, until_ms = state.get("removed_from_ms", 0), state.get("removed_until_ms", 0)
    if until_ms <= row.removed_files_ms:
        return 0
    gone = [path for path in folder.paths(FOLDER) if _is_within(from_ms, manifest_time(path), until_ms)]
    gone += [path for path in folder.paths(SENT_FOLDER) if _is_within(from_ms, _sent_time(path), until_ms)]
    gone += [history_path(number) for number in history_numbers(folder) if number < state.get("history_from", 0)]
    for path in gone:
        folder.delete(path)
    ledger.removal.note_files(row.name, until_ms)
    return len(gone)


def _is_within(from_ms: int, batch_time_ms: int | None, until_ms: int) -> bool:
    return batch_time_ms is not None and from_ms <= batch_time_ms <= until_ms


def _sent_time(path: str) -> int | None:
    digits = path.rpartition("/")[2].removesuffix(".json")
    return int(digits) if digits.isdigit() else None
