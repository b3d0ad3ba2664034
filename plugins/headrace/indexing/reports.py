"""What all tasks of one write did, as one small JSON file.

Over Spark Connect the write's commit runs in a process of the server, out of the caller's reach; so it leaves this
file where the option ``report`` says, and the caller reads it. The file is durable before the write succeeds.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from headrace.indexing.counts import IndexingCounts
from headrace.indexing.errors import IndexingError
from headrace.wal.errors import StoredFileMissingError
from headrace.wal.storage import open_storage

VERSION = 1


class ReportError(IndexingError):
    """There is no report, or it is not one."""


@dataclass(frozen=True)
class IndexingReport:
    """The counts of one output of one attempt at a batch."""

    stream: str
    output: str
    batch_time_ms: int | None
    index: str
    concrete_index: str | None
    """The index behind the name, None if it was not asked for or nothing was indexed."""
    dead_letter_index: str
    tasks: int
    counts: IndexingCounts

    def to_bytes(self) -> bytes:
        fields: dict[str, Any] = {"version": VERSION, **asdict(self), "counts": self.counts.to_dict()}
        return json.dumps(fields, separators=(",", ":")).encode() + b"\n"

    @classmethod
    def from_bytes(cls, data: bytes, uri: str) -> IndexingReport:
        """Raises ReportError."""
        try:
            fields = json.loads(data)
            version = fields.pop("version")
            if version != VERSION:
                raise ReportError(f"The report {uri} is of version {version}, not {VERSION}.")
            return cls(**{**fields, "counts": IndexingCounts.from_dict(fields["counts"])})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ReportError(f"{uri} is no indexing report: {error}.", remedy="Run the batch again.") from error

    def write(self, uri: str) -> None:
        """Write the report, durable on return."""
        folder, _, name = uri.rpartition("/")
        open_storage(folder).write_atomically(name, self.to_bytes())

    @classmethod
    def load(cls, uri: str) -> IndexingReport:
        """Read the report at this URI. Raises ReportError."""
        folder, _, name = uri.rpartition("/")
        try:
            data = open_storage(folder).read(name)
        except StoredFileMissingError:
            raise ReportError(
                f"There is no report {uri}.", remedy="The write did not commit; see Spark's log."
            ) from None
        return cls.from_bytes(data, uri)
