"""Where a write leaves what it did, for whoever asked for it: a file for each write in the stream's folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from headrace.wal.storage import open_storage

if TYPE_CHECKING:
    from headrace.spark.outputs.writer import WrittenBatch

REPORTS_FOLDER = "reports"


@contextmanager
def report_file(batch: WrittenBatch, name: str) -> Iterator[str]:
    """The URI of a write's report, which is deleted once it was read: the ledger has its counts then.

    No other attempt has the same: not another output's at the same batch, nor a replay's.
    """
    folder = f"{batch.stream.folder_url}/{REPORTS_FOLDER}"
    replay = f"{batch.target}-" if batch.target else ""
    file = f"{batch.batch_time_ms}-{replay}{batch.attempt}-{name}.json"
    try:
        yield f"{folder}/{file}"
    finally:
        open_storage(folder).delete(file)
