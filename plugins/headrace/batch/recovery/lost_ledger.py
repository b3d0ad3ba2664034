"""Detects a lost ledger: the ledger does not know the stream, and the stream's folder has a log or a checkpoint."""

from __future__ import annotations

from headrace.batch.checkpoint import checkpoint_paths
from headrace.batch.manifest import LOG_FOLDER
from headrace.errors import HeadraceError
from headrace.failure import Failure
from headrace.ledger.errors import StreamNotFoundError
from headrace.stream_context import StreamContext
from headrace.wal.segments import segments_in


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
    if checkpoint_paths(context.storage) or segments_in(context.storage.below(LOG_FOLDER).paths()):
        raise LostLedgerError(
            f"The ledger does not know stream {stream.name!r}, which has a log in {stream.folder_url}.",
            remedy=f"If its ledger was lost: `headrace recover {stream.name} --storage {stream.storage.url}`. If it is "
            "elsewhere, name that one. To begin anew, give the stream another name, or move the folder away.",
        )
