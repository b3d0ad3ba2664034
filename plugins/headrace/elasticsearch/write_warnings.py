"""Passes the warnings of a running write to the process that waits for its report.

The logs of Spark's Python workers are not part of a batch's log. So during a write the workers store their warnings as
small files beside the report, where the process that started the write reads them
(`headrace.spark.outputs.report_files`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator

from headrace.wal.storage import open_storage

SUFFIX = ".warning-"
"""A warning file's name is the report's name, this, the process id, the handler's id and a number."""
# The least time between two stored warnings: several requests of a task wait at the same time for the same reason.
_EVERY_SECONDS = 5.0


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
            name = f"{self._name}{SUFFIX}{os.getpid()}-{id(self)}-{self._written}"
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
        if path.startswith(name + SUFFIX):
            found.append(storage.read(path).decode())
            storage.delete(path)
    return found
