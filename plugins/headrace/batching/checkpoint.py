"""A checkpoint: what the log and the manifests do not tell of a stream (rule 10 of the design).

With them it is enough to rebuild a lost ledger: the definition, the topics' incarnations, the positions, the
writers' epochs, and the state of the batches that still have something in the log. A sealed document
(`headrace.batching.sealed_document`) in the stream's ``checkpoints`` folder, named by the time it was written, so
that the newest name is the newest state whatever batch it followed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.batching.sealed_document import DocumentDamagedError, seal, unseal
from headrace.errors import HeadraceError
from headrace.wal.storage import LogStorage

VERSION = 1
FOLDER = "checkpoints"
KEEP = 10
"""Checkpoints that stay, as in Spark: the newest, and older ones to fall back to."""


class CheckpointError(HeadraceError):
    """There is no checkpoint that can be read."""


@dataclass(frozen=True)
class Checkpoint:
    """A stream's state as of ``written_at_ms`` of the ledger's clock; ``state`` is plain JSON."""

    stream: str
    written_at_ms: int
    batch_time_ms: int
    state: Mapping[str, Any]

    @property
    def path(self) -> str:
        """Where it stands below the stream's folder. Names sort by time: thirteen digits last until the year 2286."""
        return f"{FOLDER}/{self.written_at_ms:013d}-{self.batch_time_ms}.json"

    def write(self, storage: LogStorage) -> None:
        """Write it into the stream's folder; durable and whole on return, or not there."""
        storage.write_atomically(
            self.path,
            seal(
                {
                    "version": VERSION,
                    "stream": self.stream,
                    "written_at_ms": self.written_at_ms,
                    "batch_time_ms": self.batch_time_ms,
                    "state": self.state,
                }
            ),
        )


def checkpoint_paths(storage: LogStorage) -> list[str]:
    """The checkpoints in the stream's folder, oldest first."""
    return sorted(path for path in storage.list(FOLDER) if path.endswith(".json"))


def read_newest(storage: LogStorage) -> Checkpoint:
    """The newest checkpoint that is whole; a damaged one is passed over for the one before, as Spark's reader does.

    Raises:
        CheckpointError: there is none, or none that is whole; the text names what is wrong with each.
    """
    refused = []
    for path in reversed(checkpoint_paths(storage)):
        try:
            return _read(storage, path)
        except (DocumentDamagedError, CheckpointError) as error:
            refused.append(f"{path}: {error}")
    raise CheckpointError(
        f"{storage.url} has no checkpoint that can be read" + (f" ({'; '.join(refused)})." if refused else "."),
        remedy="A checkpoint is written after a completed batch.",
    )


def _read(storage: LogStorage, path: str) -> Checkpoint:
    fields = unseal(storage.read(path))
    if fields.get("version") != VERSION:
        raise CheckpointError(f"it is of version {fields.get('version')}, this headrace reads version {VERSION}")
    return Checkpoint(fields["stream"], fields["written_at_ms"], fields["batch_time_ms"], fields["state"])
