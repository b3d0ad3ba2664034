"""What the tasks of one write did, as a file: over Spark Connect the commit is out of the caller's reach."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from headrace.batch.sealed_document import DocumentDamagedError, seal, unseal
from headrace.spark.state.errors import StateDamagedError
from headrace.spark.state.version import StoredFile
from headrace.wal.errors import StoredFileMissingError
from headrace.wal.storage import LogStorage


@dataclass
class WriteReport:
    """The files of a write, how many keys had which outcome, and a key (as JSON) for each problem."""

    files: list[StoredFile] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Bytes of the files."""
        return sum(file.size for file in self.files)

    def write(self, storage: LogStorage, path: str) -> None:
        """Durable on return."""
        files = [[file.path, file.rows, file.size] for file in self.files]
        storage.write_atomically(
            path, seal({"files": files, "outcomes": dict(self.outcomes), "examples": self.examples})
        )

    @classmethod
    def read(cls, storage: LogStorage, path: str) -> WriteReport:
        """Raises StateDamagedError when there is none, or it is not whole."""
        try:
            fields = unseal(storage.read(path))
        except (StoredFileMissingError, DocumentDamagedError) as error:
            raise StateDamagedError(
                f"What was written of the state is not told in {storage.url}/{path}: {error}",
                remedy="Run the batch again; the caller and Spark must reach the same storage.",
            ) from error
        return cls([StoredFile(*file) for file in fields["files"]], Counter(fields["outcomes"]), fields["examples"])
