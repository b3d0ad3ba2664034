"""The report file of one write of the state: over Spark Connect the commit cannot return values to the caller."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from headrace.batch.checksummed_json import DocumentDamagedError, decode_document, encode_document
from headrace.spark.state.errors import StateDamagedError
from headrace.spark.state.version import StoredFile
from headrace.wal.errors import StoredFileMissingError
from headrace.wal.storage import LogStorage


@dataclass
class WriteReport:
    """The files of a write, the number of keys by outcome, and an example key (as JSON) for each problem."""

    files: list[StoredFile] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """The total size of the files in bytes."""
        return sum(file.size for file in self.files)

    def write(self, storage: LogStorage, path: str) -> None:
        """Write the report, durable on return."""
        files = [[file.path, file.rows, file.size] for file in self.files]
        storage.write_atomically(
            path, encode_document({"files": files, "outcomes": dict(self.outcomes), "examples": self.examples})
        )

    @classmethod
    def read(cls, storage: LogStorage, path: str) -> WriteReport:
        """Read a report. Raises StateDamagedError if it is missing or damaged."""
        try:
            fields = decode_document(storage.read(path))
        except (StoredFileMissingError, DocumentDamagedError) as error:
            raise StateDamagedError(
                f"What was written of the state is not told in {storage.url}/{path}: {error}",
                remedy="Run the batch again; the caller and Spark must reach the same storage.",
            ) from error
        return cls([StoredFile(*file) for file in fields["files"]], Counter(fields["outcomes"]), fields["examples"])
