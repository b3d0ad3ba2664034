"""Detects a ledger that is older than the files beside it: a copy that was restored, or another ledger's log.

A stream on such a ledger would receive its records again, under batch times, epochs and block numbers that are used. So
the receiver job does not start, and no door writes to the folder (`headrace.stream_folder`, which looks at the folder's
mark). Before the job starts, and where the folder has no mark yet, the files themselves are read. Two things never
decrease in a ledger, and files hold them too: the epochs of receivers and of receiver jobs, and the number of the last
block that the ledger accepted from an instance of a receiver.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from headrace.batch.checkpoint import CheckpointError, read_newest
from headrace.batch.manifest import LOG_FOLDER
from headrace.blocks import ReceiverId
from headrace.ledger.receiving.tables import ReceiverRow
from headrace.stream_context import StreamContext
from headrace.stream_folder import LedgerSetBackError, set_back, unknown_block
from headrace.wal.errors import SegmentMissingError, StoredFileMissingError
from headrace.wal.frame import SegmentName, segments_in
from headrace.wal.log_storage import LogStorage
from headrace.wal.scan import RecoveryMode, ScannedFrame, scan_segment

__all__ = ["LedgerSetBackError", "open_for_writing", "refuse_if_set_back"]


def open_for_writing(context: StreamContext) -> None:
    """Refuse to begin a batch with a ledger that is older than the stream's folder, before the ledger changes. Reads
    the folder's mark; the files only where there is none, in the folder of a new stream or of an earlier version.

    Raises:
        LedgerSetBackError, LogVersionError, StorageError: as `refuse_if_set_back`.
    """
    if context.storage.mark.check() is None:
        refuse_if_set_back(context)
        context.storage.mark.leave()


def refuse_if_set_back(context: StreamContext) -> None:
    """Refuse to receive with a ledger that is older than the stream's folder. Reads the folder's mark, the newest
    checkpoint, and the newest segment of each receiver.

    Raises:
        LedgerSetBackError: a file shows that the ledger lacks what it had accepted.
        LogVersionError: the newest segment is of a version that this headrace does not read.
        StorageError: the storage cannot be read.
    """
    name, folder = context.name, context.storage
    folder.mark.check()
    # The files first: a process that still receives writes to the ledger before it writes what proves it.
    said = [*_of_checkpoint(name, folder), *_of_log(name, folder.below(LOG_FOLDER))]
    job_epoch = context.ledger.streams.get(name).job_epoch
    receivers = {row.receiver_id: row for row in context.ledger.receivers.all(name)}
    for path, receiver_id, epoch, accepted in said:
        ahead = _ahead(receivers.get(receiver_id), epoch, accepted) if receiver_id else _job_ahead(job_epoch, epoch)
        if ahead is not None:
            raise set_back(name, context.stream.storage.url, f"{folder.url}/{path}", ahead)
    log = folder.below(LOG_FOLDER)
    for path in {path for path, receiver_id, _, _ in said if receiver_id and path.startswith(f"{LOG_FOLDER}/")}:
        block = unknown_block(name, context.ledger, log, path.removeprefix(f"{LOG_FOLDER}/"))
        if block is not None:
            why = f"{block} was accepted, and the ledger does not have it"
            raise set_back(name, context.stream.storage.url, f"{folder.url}/{path}", why)


_Said = tuple[str, ReceiverId | None, int, int | None]
"""The file, the receiver (None: the receiver job), its epoch, and the last block accepted in this epoch, if known."""


def _of_checkpoint(name: str, folder: LogStorage) -> Iterator[_Said]:
    try:
        newest = read_newest(folder)
    except CheckpointError:
        return
    yield newest.path, None, newest.state["stream"]["job_epoch"], None
    for row in newest.state["receivers"]:
        receiver_id = ReceiverId(name, row["input_id"], row["index"])
        yield newest.path, receiver_id, row["epoch"], row["last_accepted_sequence"]


def _of_log(name: str, log: LogStorage) -> Iterator[_Said]:
    newest: Mapping[tuple[str, int], SegmentName] = {
        (segment.input_id, segment.index): segment for segment in sorted(segments_in(log.paths()))
    }
    for (input_id, index), segment in newest.items():
        receiver_id = ReceiverId(name, input_id, index)
        yield f"{LOG_FOLDER}/{segment.path}", receiver_id, segment.epoch, _accepted(log, segment)


def _accepted(log: LogStorage, segment: SegmentName) -> int | None:
    """The last block that the ledger had accepted in the segment's epoch when its last frame was written."""
    scan = scan_segment(log, segment.path, newest=True, mode=RecoveryMode.SKIP_ANY_CORRUPTED_RECORDS)
    accepted: int | None = None
    try:
        for event in scan.events():
            header = event.header if isinstance(event, ScannedFrame) else event
            if header.last_accepted_sequence is not None:
                accepted = max(accepted or 0, header.last_accepted_sequence)
    except (SegmentMissingError, StoredFileMissingError):
        # Cleanup has deleted it, so that the ledger knows it.
        return None
    return accepted


def _ahead(row: ReceiverRow | None, epoch: int, accepted: int | None) -> str | None:
    """How the file is ahead of the receiver's row; None if it is not."""
    if row is None:
        return f"it was written in epoch {epoch} of a receiver that the ledger does not know"
    if epoch > row.epoch:
        return f"it was written in epoch {epoch} of receiver {row.receiver_id}, and the ledger knows {row.epoch}"
    if epoch == row.epoch and accepted is not None and accepted > row.last_accepted_sequence:
        return (
            f"block {accepted} of receiver {row.receiver_id} in epoch {epoch} was accepted, and the ledger's last one "
            f"is {row.last_accepted_sequence}"
        )
    return None


def _job_ahead(known: int, epoch: int) -> str | None:
    return f"it knows receiver job {epoch}, and the ledger {known}" if epoch > known else None
