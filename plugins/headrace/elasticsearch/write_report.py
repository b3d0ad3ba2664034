"""What a write reports to the process that waits for it: its counts, and warnings while it runs.

Over Spark Connect the write's commit runs in a process of the server and cannot return values to the caller. So it
writes the report to the URI in the options, and the caller reads it. The report is durable before the write succeeds.
The logs of Spark's Python workers are not part of a batch's log, so the workers store their warnings as small files
beside the report meanwhile (read by `headrace.spark.outputs.report_files`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from headrace.elasticsearch.counts import IndexingCounts
from headrace.elasticsearch.errors import ForeignDocumentsError, IndexingError
from headrace.wal.errors import StoredFileMissingError
from headrace.wal.storage import open_storage

VERSION = 1

WARNING_SUFFIX = ".warning-"
"""A warning file's name is the report's name, this, the process id, the handler's id and a number."""
# The least time between two stored warnings: several requests of a task wait at the same time for the same reason.
_EVERY_SECONDS = 5.0


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
    duplicates: int = 0
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
            raise ReportError(f"{uri} is not an indexing report: {error}.", remedy="Run the batch again.") from error

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


class _BesideReport(logging.Handler):
    def __init__(self, report: str) -> None:
        super().__init__(logging.WARNING)
        self._folder, _, self._name = report.rpartition("/")
        self._written = 0
        self._next = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _EVERY_SECONDS
        self._written += 1
        # A write must not fail because a warning cannot be stored.
        with contextlib.suppress(Exception):
            name = f"{self._name}{WARNING_SUFFIX}{os.getpid()}-{id(self)}-{self._written}"
            open_storage(self._folder).write_atomically(name, record.getMessage().encode())


@contextlib.contextmanager
def warnings_beside(report: str) -> Iterator[None]:
    """Store the warnings of ``headrace.elasticsearch`` beside the report at this URI during the ``with`` block."""
    handler = _BesideReport(report)
    log = logging.getLogger("headrace.elasticsearch")
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


def take_warnings(report: str) -> list[str]:
    """Read and delete the warnings beside the report at this URI."""
    folder, _, name = report.rpartition("/")
    storage = open_storage(folder)
    found = []
    for path in storage.paths():
        if path.startswith(name + WARNING_SUFFIX):
            found.append(storage.read(path).decode())
            storage.delete(path)
    return found
