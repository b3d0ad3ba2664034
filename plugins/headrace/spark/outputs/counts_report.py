"""How the counts of a write come to whoever asked for it.

Over Spark Connect the write's commit runs in a process of the server, out of the caller's reach. So it leaves a small
JSON file in the stream's folder, which the caller reads, and deletes: the ledger has the counts then.
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
    """Call ``write`` with the URI for its report; the counts that it left there with `leave_counts`.

    Raises CountsMissingError when it left none.
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
    """Write the counts to the URI that `counted` gave."""
    folder, _, name = uri.rpartition("/")
    open_storage(folder).write_atomically(name, json.dumps(counts).encode())
