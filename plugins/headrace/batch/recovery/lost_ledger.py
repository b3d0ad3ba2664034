"""Detects a lost ledger: the stream's folder has a log or a checkpoint of which the ledger knows nothing."""

from __future__ import annotations

from headrace.batch.checkpoint import CheckpointError, checkpoint_paths, read_newest
from headrace.batch.manifest import LOG_FOLDER
from headrace.errors import Failure, HeadraceError
from headrace.ledger import Ledger
from headrace.ledger.errors import StreamNotFoundError
from headrace.stream_context import StreamContext
from headrace.wal.frame import segments_in
from headrace.wal.storage import LogStorage


class LostLedgerError(HeadraceError):
    """The stream has been received before, and the ledger does not know it."""

    failure = Failure.FINAL


def refuse_if_lost(context: StreamContext) -> None:
    """Refuse to begin a stream whose folder holds data of an earlier ledger.

    The stream would be received again from its starting offsets, which contradicts the existing log and manifests.

    Raises:
        LostLedgerError: the ledger does not know the stream, and its folder has a log or a checkpoint.
    """
    stream = context.stream
    try:
        context.ledger.streams.get(stream.name)
    except StreamNotFoundError:
        pass
    else:
        return
    if checkpoint_paths(context.storage) or _has_log(context.storage):
        error = LostLedgerError(
            f"The ledger does not know stream {stream.name!r}, which has a log in {stream.folder_url}.",
            remedy="The task of its receiver job rebuilds the ledger."
            if stream.recover == "automatic"
            else f"If its ledger was lost: `headrace streams recover {stream.name} --storage {stream.storage.url}`. "
            "If it is elsewhere, name that one. To begin anew, give the stream another name, or move the folder away.",
        )
        if stream.recover == "automatic":
            error.failure = Failure.PASSING
        raise error


def is_lost(stream_name: str, ledger: Ledger, folder: LogStorage) -> bool:
    """Whether the ledger of the stream is lost: it does not know the stream, or the stream was registered anew and has
    received nothing."""
    if not ledger.rebuild.is_new(stream_name):
        return False
    try:
        created_at_ms = ledger.streams.get(stream_name).created_at_ms
        return bool(read_newest(folder).state["stream"]["created_at_ms"] != created_at_ms)
    except StreamNotFoundError:
        return True
    except CheckpointError:
        # Without a checkpoint, segments in the log are the only sign that an earlier ledger was lost.
        return _has_log(folder)


def _has_log(folder: LogStorage) -> bool:
    return bool(segments_in(folder.below(LOG_FOLDER).paths()))
