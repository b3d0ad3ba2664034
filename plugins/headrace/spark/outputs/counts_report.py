"""How the counts of a write come to whoever asked for it.

Over Spark Connect the write's commit runs in a process of the server, out of the caller's reach. So it leaves a small
JSON file in the stream's folder, which the caller reads, and deletes: the ledger has the counts then.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from headrace.spark.outputs.errors import CountsMissingError
from headrace.wal.errors import StoredFileMissingError
from headrace.wal.storage import open_storage

if TYPE_CHECKING:
    from headrace.spark.outputs.writer import Counts, WrittenBatch


def counted(write: Callable[[str], None], batch: WrittenBatch, output_id: str) -> Counts:
    """Call ``write`` with the URI for its report; the counts that it left there with `leave_counts`.

    Raises CountsMissingError when it left none.
    """
    storage = open_storage(f"{batch.stream.folder_url}/reports")
    replay = f"{batch.target}-" if batch.target else ""
    # No other attempt has the same: not another output's at the same batch, nor a replay's.
    name = f"{batch.batch_time_ms}-{replay}{batch.attempt}-{output_id}-counts.json"
    try:
        write(f"{batch.stream.folder_url}/reports/{name}")
        return cast("Counts", json.loads(storage.read(name)))
    except StoredFileMissingError:
        raise CountsMissingError(
            f"Output {output_id!r} was written, but its counts are not in {storage.url}.",
            remedy="Spark has to see the stream's storage where it runs; then run the batch again.",
        ) from None
    finally:
        storage.delete(name)


def leave_counts(uri: str, counts: Counts) -> None:
    """Write the counts to the URI that `counted` gave."""
    folder, _, name = uri.rpartition("/")
    open_storage(folder).write_atomically(name, json.dumps(counts).encode())
