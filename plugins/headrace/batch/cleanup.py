"""Deleting what no batch needs any more, by reference and never by age (rule 9 of the design)."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from itertools import groupby

from headrace.batch.manifest import LOG_FOLDER, manifest_path
from headrace.batch.removal import Removed, remove_old
from headrace.clock import time_text
from headrace.ledger import Ledger
from headrace.ledger.errors import BatchStateError
from headrace.ledger.states import BatchState
from headrace.stream import Stream
from headrace.wal.orphaned_segments import is_orphaned
from headrace.wal.segments import segments_in
from headrace.wal.storage import LogStorage

logger = logging.getLogger(__name__)

EVENTS_KEPT_MS = 7 * 24 * 3_600_000
"""How long a stream's events stay in the ledger at least: those of its blocks go with the blocks."""
PARTIAL_WRITE_SECONDS = 86_400.0
"""How old a file must be that an atomic write did not complete: no write takes a thousandth of that."""
_HOUR_MS = 3_600_000
_PRUNED_AT_ONCE = 10  # Thousands of events each, and what is left goes with the next cleanup.


@dataclass(frozen=True)
class Cleaned:
    """What a cleanup did: segments deleted, their blocks' rows folded, batches with nothing left in the log; files
    deleted that never became segments, or manifests of no batch; events forgotten; the end of the history; files that
    killed writers left incomplete."""

    segments: int
    blocks: int
    batches: int
    leftovers: int = 0
    events: int = 0
    removed: Removed = field(default_factory=Removed)
    partial_writes: int = 0


def clean_up(stream: Stream, ledger: Ledger, storage: LogStorage) -> Cleaned:
    """Delete the log's segments that are done with, then their rows in the ledger.

    A segment is done with when every block in it belongs to a batch that has completed and is checkpointed, or was
    abandoned, and has left the stream's remember window. In a stream with windows that counts from the oldest batch
    that is still to be run, so that catching up after a down-time finds what its windows reach back to.

    Each step can be repeated after a crash. Files of the log that no block was ever accepted of go too, and events that
    are older than a week and than the remember window. Batches that are older than the stream's history are removed
    (`headrace.batch.removal`). What killed writers left incomplete goes after a day; it is looked for once an hour,
    since the stream's folder has files of each batch.

    Raises:
        StorageError: a segment could not be deleted; those after it stay for the next cleanup.
    """
    log = storage.below(stream.name).below(LOG_FOLDER)
    windows = bool(stream.window_ms)
    before_ms = (ledger.cleanup.needed_from(stream.name) if windows else ledger.now_ms()) - stream.remember_ms
    segments = blocks = 0
    while found := ledger.cleanup.removable_segments(stream.name, before_ms):
        # Claimed before the file goes: a block that is added meanwhile is refused and finds another segment.
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
    marked, manifests = _mark_cleaned(stream, ledger, storage.below(stream.name), before_ms)
    leftovers = manifests + _sweep(stream, ledger, log)
    # What one run leaves the next takes: batches that are over are not in the way of those to come.
    removed = remove_old(stream, ledger, storage.below(stream.name), needed_ms=before_ms)
    partial = 0
    if _begins_an_hour(stream, ledger):
        partial = storage.below(stream.name).remove_partial_writes(PARTIAL_WRITE_SECONDS)
    return Cleaned(segments, blocks, marked, leftovers, _prune_events(stream, ledger), removed, partial)


def _begins_an_hour(stream: Stream, ledger: Ledger) -> bool:
    """Whether the newest batch is of another hour than the one before it, if there is one."""
    own = [state for state in BatchState if state is not BatchState.ABSORBED]
    hours = [batch.batch_time_ms // _HOUR_MS for batch in ledger.batches.page(stream.name, 2, own)]
    return len(hours) == 1 or len(set(hours)) == 2


def _prune_events(stream: Stream, ledger: Ledger) -> int:
    before_ms = ledger.now_ms() - max(EVENTS_KEPT_MS, stream.remember_ms)
    pruned = 0
    for _ in range(_PRUNED_AT_ONCE):
        gone = ledger.events.prune(stream.name, before_ms)
        pruned += gone
        if not gone:
            break
    return pruned


def _mark_cleaned(stream: Stream, ledger: Ledger, folder: LogStorage, before_ms: int) -> tuple[int, int]:
    """Note which batches have nothing left in the log: how many, and how many manifests went that none names."""
    marked = manifests = 0
    while cleanable := ledger.cleanup.cleanable_batches(stream.name, before_ms):
        before = marked
        for batch in cleanable:
            try:
                ledger.batches.mark_cleaned(stream.name, batch.batch_time_ms)
            except BatchStateError as error:
                # It was taken to be run again since it was found: a later cleanup marks it.
                logger.info(
                    "%s: batch %s is not marked as cleaned: %s", stream.name, time_text(batch.batch_time_ms), error
                )
            else:
                marked += 1
                # An allocation that crashed may have left it, beside the one that counts.
                plain = manifest_path(batch.batch_time_ms)
                if batch.manifest_uri.rpartition("/")[2] != plain.rpartition("/")[2]:
                    manifests += folder.delete(plain)
        if marked == before:
            break
    return marked, manifests


def _sweep(stream: Stream, ledger: Ledger, log: LogStorage) -> int:
    """Delete the files at the front of each receiver's log whose first block was never accepted; how many went.

    The ledger hears of a segment when it accepts a block in it, so it knows nothing of what a full disk leaves: a file
    for each try. Such a file goes when four things hold, each for a reason:

    - Its writer is fenced: a newer instance has registered, or this one has ended. The ledger accepts nothing more of
      it, so what it does not know now it will never know. Hence the order: files, then epochs, then the ledger's rows.
    - The ledger has no row of it, and rows outlive their files. So no block, batch or manifest names it.
    - The log itself proves no block in it accepted. A ledger that was lost, or set back to a backup, knows nothing of
      files that the one before accepted, and those are what it is rebuilt from: they prove it, and stay.
    - Nothing that stays is before it. So cleanup goes from the front here too, and a recovery that finds it named by
      a later segment sees that it is missing for that reason; and what proves others accepted is never taken.
    """
    swept = 0
    files = sorted(segments_in(log.paths()))
    rows = {(row.receiver_id.input_id, row.receiver_id.index): row for row in ledger.receivers.all(stream.name)}
    for receiver, of_receiver in groupby(files, key=lambda name: (name.input_id, name.index)):
        names = list(of_receiver)
        row = rows.get(receiver)
        for place, name in enumerate(names):
            is_fenced = row is not None and (name.epoch < row.epoch or (name.epoch == row.epoch and row.state.ended))
            if not is_fenced or ledger.segments.get(stream.name, name.path) is not None:
                break
            if not is_orphaned(log, name, names[place + 1 :]):
                logger.warning("%s: the ledger does not know %s, whose blocks were accepted", stream.name, name.path)
                break
            log.delete(name.path)
            swept += 1
    return swept
