"""Provides a report file in the stream's folder for each write, and passes on the write's warnings meanwhile."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from headrace.elasticsearch.write_report import take_warnings
from headrace.wal.storage import open_storage

if TYPE_CHECKING:
    from headrace.spark.outputs.writer import WrittenBatch

REPORTS_FOLDER = "reports"
WARNING = "warning: "
"""The prefix of a progress line that is a warning."""
_LOOK_SECONDS = 1.0
# The least time between two reported warnings: every task of a write may warn of the same.
_REPORT_SECONDS = 15.0

logger = logging.getLogger(__name__)


@contextmanager
def report_file(batch: WrittenBatch, name: str) -> Iterator[str]:
    """A context manager that gives the URI of a write's report and deletes the report at the end.

    During the ``with`` block the write's warnings are reported to ``batch.progress``. The URI is unique to the attempt:
    no other output of the batch and no replay has the same.
    """
    folder = f"{batch.stream.folder_url}/{REPORTS_FOLDER}"
    replay = f"{batch.target}-" if batch.target else ""
    file = f"{batch.batch_time_ms}-{replay}{batch.attempt}-{name}.json"
    uri = f"{folder}/{file}"
    over = threading.Event()
    listener = threading.Thread(
        target=_listen, args=(uri, name, batch.progress, over), name="headrace-warnings", daemon=True
    )
    listener.start()
    try:
        yield uri
    finally:
        over.set()
        listener.join(2 * _LOOK_SECONDS)
        open_storage(folder).delete(file)


def _listen(uri: str, name: str, progress: Callable[[str], None], over: threading.Event) -> None:
    """Report the first warning at once; later ones at most every ``_REPORT_SECONDS``, with their number."""
    held = 0
    reported_at = -_REPORT_SECONDS
    while True:
        ended = over.wait(_LOOK_SECONDS)
        try:
            warnings = take_warnings(uri)
        except Exception as error:
            # Not an error: the write itself reports its result.
            logger.debug("the warnings of %s cannot be read: %s", uri, error)
            warnings = []
        held += len(warnings)
        if warnings and (ended or time.monotonic() >= reported_at + _REPORT_SECONDS):
            more = f" (and {held - 1} more like it)" if held > 1 else ""
            progress(f"{WARNING}output {name}: {warnings[-1]}{more}")
            held, reported_at = 0, time.monotonic()
        if ended:
            return
