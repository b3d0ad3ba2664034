"""The result of a write, and its warnings while it runs.

The logs of Spark's Python workers are not part of a batch's log. So they store their warnings as small files meanwhile,
beside the URI in the options; `headrace.spark.outputs.report_files` reads them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass

from headrace.elasticsearch.counts import IndexingCounts
from headrace.elasticsearch.errors import ForeignDocumentsError
from headrace.wal.storage import open_storage

WARNING_SUFFIX = ".warning-"
"""A warning file's name is the report's name, this, the process id, the handler's id and a number."""
# The least time between two stored warnings: several requests of a task wait at the same time for the same reason.
_EVERY_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class IndexingReport:
    """The result of one write."""

    index: str
    concrete_index: str | None
    """The concrete index behind the name; None if it does not exist."""
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
