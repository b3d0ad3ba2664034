"""The report of one write: the counts of all its tasks in a small JSON file.

Over Spark Connect the write's commit runs in a process of the server and cannot return values to the caller. So it
writes this file to the URI in the option ``report``, and the caller reads it. The file is durable before the write
succeeds.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from headrace.elasticsearch.counts import IndexingCounts
from headrace.elasticsearch.errors import ForeignDocumentsError, IndexingError
from headrace.wal.errors import StoredFileMissingError
from headrace.wal.storage import open_storage

VERSION = 1


class ReportError(IndexingError):
    """The report is missing or invalid."""


@dataclass(frozen=True)
class IndexingReport:
    """The counts of one output of one attempt at a batch."""

    stream: str
    output: str
    batch_time_ms: int | None
    index: str
    concrete_index: str | None
    """The concrete index behind the name; None if it was not checked or does not exist."""
    dead_letter_index: str
    tasks: int
    counts: IndexingCounts
    collisions: int = 0
    """Rows of the batch with the same id as another row."""

    def check_foreign(self) -> None:
        """Raise ForeignDocumentsError if the index holds documents of another source under ids of the batch."""
        counts = self.counts
        if counts.foreign:
            examples = ", ".join(map(repr, counts.foreign_ids))
            raise ForeignDocumentsError(
                f"Index {self.index!r} holds other documents under {counts.foreign} ids of the batch ({examples}), "
                "which no attempt at this batch wrote. They were left as they are, and the batch's documents of these "
                "ids are not in the index.",
                remedy="Find out what wrote them: another stream or program, a stream of this name with an earlier "
                'ledger, or a topic of the same name. Index into an index of its own, or set write_method="index" to '
                "replace them.",
            )

    def to_bytes(self) -> bytes:
        fields: dict[str, Any] = {"version": VERSION, **asdict(self), "counts": self.counts.to_dict()}
        return json.dumps(fields, separators=(",", ":")).encode() + b"\n"

    @classmethod
    def from_bytes(cls, data: bytes, uri: str) -> IndexingReport:
        """Parse a report; ``uri`` is for error texts. Raises ReportError."""
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
