"""Passes the counts of a write from its commit to the caller, in a JSON file.

Over Spark Connect the write's commit runs in a process of the server and cannot return values to the caller. So it
writes a small JSON file to the stream's folder. The caller reads and deletes it, and the counts go into the ledger.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from headrace.spark.outputs.errors import CountsMissingError
from headrace.spark.outputs.report_files import report_file
from headrace.wal.errors import StoredFileMissingError
from headrace.wal.storage import open_storage

if TYPE_CHECKING:
    from headrace.spark.outputs.writer import Counts, WrittenBatch


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
                remedy="Spark has to see the stream's storage where it runs; then run the batch again.",
            ) from None


def leave_counts(uri: str, counts: Counts) -> None:
    """Write the counts to the URI from `counted`."""
    folder, _, name = uri.rpartition("/")
    open_storage(folder).write_atomically(name, json.dumps(counts).encode())
