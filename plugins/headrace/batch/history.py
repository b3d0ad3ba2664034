"""The files of a stream's history: batches that are over, so that checkpoints need not hold them.

A checkpoint is written after every batch and holds what no such file does, so it does not grow with the batches that
the log or the ledger keeps. A file is written once, as a sealed document (`headrace.batch.sealed_document`), and
named by its number, which is the ledger's time. A batch that changes later (run again, replayed) is in checkpoints
again, and then in a file of a higher number: of a batch the newest place counts.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.batch.sealed_document import DocumentDamagedError, seal, unseal
from headrace.errors import HeadraceError
from headrace.ledger import Ledger
from headrace.ledger.rows import BatchRow
from headrace.wal.errors import StoredFileExistsError
from headrace.wal.storage import LogStorage

logger = logging.getLogger(__name__)

VERSION = 1
FOLDER = "history"
FILED = 500
"""Batches in a file, some 300 kB; so many settled ones are in a checkpoint at most."""


class HistoryError(HeadraceError):
    """A file of the history is missing, damaged, or of another version."""


def file_batches(stream: str, ledger: Ledger, folder: LogStorage) -> int:
    """Write the batches that are over and in no file yet into files, as long as there are enough; how many went.

    Raises:
        StorageError: a file could not be written; its batches stay in the checkpoints.
    """
    filed, number = 0, max(history_numbers(folder), default=0)
    while (begun := ledger.history.begin_filing(stream, FILED, after=number)) is not None:
        number, batches = begun
        document = {"version": VERSION, "stream": stream, "number": number}
        try:
            folder.write_atomically(
                history_path(number),
                seal({**document, "batches": describe(ledger, stream, batches)}),
                exclusive=True,
            )
        except StoredFileExistsError:
            logger.info("%s: another checkpoint writes the history's file %d", stream, number)
            break
        ledger.history.end_filing(stream, number)
        filed += len(batches)
    return filed


def describe(ledger: Ledger, stream: str, batches: Sequence[BatchRow]) -> list[dict[str, Any]]:
    """The batches as checkpoints and history hold them: rows, what their outputs recorded and by which definitions,
    their replays."""
    times = [batch.batch_time_ms for batch in batches]
    recorded = ledger.batches.recorded(stream, times)
    replays = ledger.history.replays_of(stream, times)
    return [
        {
            **dataclasses.asdict(batch),
            "outputs": {output: each.counts for output, each in recorded[batch.batch_time_ms].items()},
            "revisions": {
                output: each.revision
                for output, each in recorded[batch.batch_time_ms].items()
                if each.revision is not None
            },
            "replays": [dataclasses.asdict(replay) for replay in replays[batch.batch_time_ms]],
        }
        for batch in batches
    ]


def history_path(number: int) -> str:
    """Where a file stands below the stream's folder."""
    return f"{FOLDER}/{number:013d}.json"


def history_numbers(folder: LogStorage) -> list[int]:
    """The numbers of the files that there are, oldest first."""
    names = [path.rpartition("/")[2].removesuffix(".json") for path in folder.paths(FOLDER) if path.endswith(".json")]
    return sorted(int(name) for name in names if name.isdigit())


def read_history(folder: LogStorage, number: int) -> list[Mapping[str, Any]]:
    """The batches in a file.

    Raises:
        HistoryError: it is damaged, or of a version that this headrace does not read.
    """
    path = history_path(number)
    try:
        fields = unseal(folder.read(path))
    except DocumentDamagedError as error:
        raise HistoryError(
            f"The file {folder.url}/{path} is damaged: {error}.",
            remedy="With the ledger there, `headrace recover` writes it again; else restore it from a copy.",
        ) from None
    if fields.get("version") != VERSION:
        raise HistoryError(
            f"The file {folder.url}/{path} is of version {fields.get('version')}, this headrace reads {VERSION}.",
            remedy="Use the headrace that wrote it, or a newer one.",
        )
    batches: list[Mapping[str, Any]] = fields["batches"]
    return batches
