"""A checkpoint file: the state of a stream that is in neither the log nor the manifests (rule 10 of the design).

Together with these and the history files (`headrace.batch.history_files`), a checkpoint is enough to rebuild a lost
ledger. It holds the definition, the topics' incarnations, the positions, the gaps, the writers' epochs, and the batches
that no history file holds in their present state. It is a document with a checksum (`headrace.batch.checksummed_json`)
in the stream's ``checkpoints`` folder. It is named by the time it was written, so the newest name is the newest state,
whichever batch was run last.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.batch.checksummed_json import DocumentDamagedError, decode_document, encode_document
from headrace.errors import HeadraceError
from headrace.wal.errors import StoredFileMissingError
from headrace.wal.storage import LogStorage

VERSION = 2
FOLDER = "checkpoints"
_NAME = re.compile(rf"{FOLDER}/\d{{13}}-\d+\.json")
KEEP = 10
"""Checkpoints that are kept, as in Spark: the newest, and older ones to fall back to."""


class CheckpointError(HeadraceError):
    """There is no checkpoint that can be read."""


class CheckpointVersionError(CheckpointError):
    """A checkpoint is of a version that this headrace does not read."""


@dataclass(frozen=True)
class Checkpoint:
    """A stream's state as of ``written_at_ms`` of the ledger's clock; ``state`` is plain JSON."""

    stream: str
    written_at_ms: int
    batch_time_ms: int
    state: Mapping[str, Any]

    @property
    def path(self) -> str:
        """The path below the stream's folder. Names sort by time: thirteen digits last until the year 2286."""
        return f"{FOLDER}/{self.written_at_ms:013d}-{self.batch_time_ms}.json"

    def write(self, storage: LogStorage) -> None:
        """Write the checkpoint into the stream's folder, atomically and durably."""
        storage.write_atomically(
            self.path,
            encode_document(
                {
                    "version": VERSION,
                    "stream": self.stream,
                    "written_at_ms": self.written_at_ms,
                    "batch_time_ms": self.batch_time_ms,
                    "state": self.state,
                }
            ),
        )


@dataclass(frozen=True)
class FoundCheckpoint:
    """The newest valid checkpoint, and what is wrong with each newer one, by path."""

    checkpoint: Checkpoint
    passed_over: Mapping[str, str]


def checkpoint_paths(storage: LogStorage) -> list[str]:
    """The paths of the checkpoints in the stream's folder, oldest first; other files are ignored."""
    return sorted(path for path in storage.paths(FOLDER) if _NAME.fullmatch(path))


def written_at(path: str) -> int:
    """When the checkpoint at ``path`` was written, in milliseconds since the epoch."""
    return int(path.rpartition("/")[2].partition("-")[0])


def batch_time_of(path: str) -> int:
    """The batch time after which the checkpoint at ``path`` was written, in milliseconds since the epoch."""
    return int(path.rpartition("-")[2].partition(".")[0])


def read_newest(storage: LogStorage) -> Checkpoint:
    """The newest valid checkpoint; see `find_newest`."""
    return find_newest(storage).checkpoint


def find_newest(storage: LogStorage) -> FoundCheckpoint:
    """Find the newest valid checkpoint. Skips damaged ones, as Spark's reader does.

    Raises:
        CheckpointVersionError: the newest undamaged one is of another version. An earlier one would be an older state,
            and what was done since would be done again.
        CheckpointError: there is no valid checkpoint; the text names what is wrong with each.
    """
    refused: dict[str, str] = {}
    for path in reversed(checkpoint_paths(storage)):
        try:
            return FoundCheckpoint(_read(storage, path), refused)
        except (DocumentDamagedError, StoredFileMissingError) as error:
            refused[path] = str(error)
    reported = "; ".join(f"{path}: {why}" for path, why in refused.items())
    raise CheckpointError(
        f"{storage.url} has no checkpoint that can be read" + (f" ({reported})." if refused else "."),
        remedy="A checkpoint is written after a completed batch; with the ledger there, `headrace streams recover` "
        "writes one.",
    )


def read_checkpoint(storage: LogStorage, path: str) -> Checkpoint:
    """Read the checkpoint at ``path``, which may not be the newest.

    Raises:
        CheckpointError: it is missing, damaged, or of another version.
    """
    try:
        return _read(storage, path)
    except (DocumentDamagedError, StoredFileMissingError) as error:
        raise CheckpointError(f"The checkpoint {storage.url}/{path} cannot be read: {error}.") from error


def _read(storage: LogStorage, path: str) -> Checkpoint:
    fields = decode_document(storage.read(path))
    version = fields.get("version")
    if version != VERSION:
        raise CheckpointVersionError(
            f"The checkpoint {storage.url}/{path} is of version {version}, this headrace reads version {VERSION}.",
            remedy="Use the headrace that wrote it, or a newer one.",
        )
    return Checkpoint(fields["stream"], fields["written_at_ms"], fields["batch_time_ms"], fields["state"])
