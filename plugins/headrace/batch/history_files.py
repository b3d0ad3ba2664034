"""A stream's history files: they hold finished batches, so that checkpoints do not have to.

A checkpoint is by default written after every batch. It holds only batches that are in no history file, so it does not
grow with the number of batches in the log or the ledger. A history file is written once, as a document with
a checksum (`headrace.batch.manifest`), and named by its number. This is the ledger's time, or more if the clock
was set back: numbers always grow. A batch that changes later (run again, replayed) is in checkpoints again, and then in
a file with a higher number: the newest copy of a batch counts.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.batch.manifest import DocumentDamagedError, decode_document, encode_document
from headrace.errors import HeadraceError
from headrace.ledger import Ledger
from headrace.ledger.batch_tables import BatchRow
from headrace.stream_context import StreamContext
from headrace.wal.errors import StoredFileExistsError
from headrace.wal.storage import LogStorage

logger = logging.getLogger(__name__)

VERSION = 1
FOLDER = "history"
FILED = 500
"""Batches in a file, about 300 kB. A checkpoint holds at most this many finished batches."""


class HistoryError(HeadraceError):
    """A history file is missing, damaged, or of another version."""


def file_batches(context: StreamContext) -> int:
    """Write finished batches into new history files while there are enough for a full file; returns how many.

    Raises:
        StorageError: a file could not be written; its batches stay in the checkpoints.
    """
    stream_name, ledger, folder = context.name, context.ledger, context.storage
    filed, number = 0, max(history_numbers(folder), default=0)
    while (begun := ledger.history.begin_filing(stream_name, FILED, after=number)) is not None:
        number, batches = begun
        document = {"version": VERSION, "stream": stream_name, "number": number}
        try:
            folder.write_atomically(
                history_path(number),
                encode_document({**document, "batches": batches_to_json(ledger, stream_name, batches)}),
                exclusive=True,
            )
        except StoredFileExistsError:
            logger.info("%s: another checkpoint writes the history's file %d", stream_name, number)
            break
        ledger.history.end_filing(stream_name, number)
        filed += len(batches)
    return filed


def batches_to_json(ledger: Ledger, stream_name: str, batches: Sequence[BatchRow]) -> list[dict[str, Any]]:
    """The batches as checkpoints and history hold them: their rows, the results and definition revisions of their
    outputs, and their replays."""
    times = [batch.batch_time_ms for batch in batches]
    recorded = ledger.attempts.recorded(stream_name, times)
    replays = ledger.history.replays_of(stream_name, times)
    return [
        {
            **dataclasses.asdict(batch),
            "outputs": {output: written.counts for output, written in recorded[batch.batch_time_ms].items()},
            "revisions": {
                output: written.revision
                for output, written in recorded[batch.batch_time_ms].items()
                if written.revision is not None
            },
            "replays": [dataclasses.asdict(replay) for replay in replays[batch.batch_time_ms]],
        }
        for batch in batches
    ]


def history_path(number: int) -> str:
    """The path of a history file below the stream's folder."""
    return f"{FOLDER}/{number:013d}.json"


def history_numbers(folder: LogStorage) -> list[int]:
    """The numbers of the existing history files, oldest first."""
    names = [path.rpartition("/")[2].removesuffix(".json") for path in folder.paths(FOLDER) if path.endswith(".json")]
    return sorted(int(name) for name in names if name.isdigit())


def read_history(folder: LogStorage, number: int) -> list[Mapping[str, Any]]:
    """The batches in a history file.

    Raises:
        HistoryError: the file is damaged, or of a version that this headrace does not read.
    """
    path = history_path(number)
    try:
        fields = decode_document(folder.read(path))
    except DocumentDamagedError as error:
        raise HistoryError(
            f"The file {folder.url}/{path} is damaged: {error}.",
            remedy="With the ledger there, `headrace streams recover` writes it again; else restore it from a copy.",
        ) from None
    if fields.get("version") != VERSION:
        raise HistoryError(
            f"The file {folder.url}/{path} is of version {fields.get('version')}, this headrace reads {VERSION}.",
            remedy="Use the headrace that wrote it, or a newer one.",
        )
    batches: list[Mapping[str, Any]] = fields["batches"]
    return batches
