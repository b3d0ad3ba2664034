"""The report file of a write, by which its commit and its tasks report counts and warnings to the caller.

Over Spark Connect a write's commit runs in a process of the server and cannot return values to the caller. So it writes
a small JSON file to the stream's folder. The caller reads and deletes it, and the counts go into the ledger. Warnings
of the tasks are in files beside it, and are passed on while the write runs.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

from headrace.elasticsearch.counts import take_warnings
from headrace.spark.outputs.errors import CountsMissingError
from headrace.wal.errors import StoredFileMissingError
from headrace.wal.storage import open_storage

if TYPE_CHECKING:
    from headrace.spark.outputs.writer import Counts, WrittenBatch

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


def counted(write: Callable[[str], None], batch: WrittenBatch, output_id: str) -> Counts:
    """Call ``write`` with the URI for its report. Returns the counts that it wrote there with `leave_counts`.

    Raises CountsMissingError if it wrote none.
    """
    with report_file(batch, f"{output_id}-counts") as uri:
        write(uri)
        folder, _, name = uri.rpartition("/")
        try:
            return cast("Counts", json.loads(open_storage(folder).read(name)))
        except StoredFileMissingError:
            raise CountsMissingError(
                f"Output {output_id!r} was written, but its counts are not in {folder}.",
                remedy="Make sure that Spark sees the stream's storage where it runs, and run the batch again.",
            ) from None


def leave_counts(uri: str, counts: Counts) -> None:
    """Write the counts to the URI from `counted`."""
    folder, _, name = uri.rpartition("/")
    open_storage(folder).write_atomically(name, json.dumps(counts).encode())


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
