"""What a result file for each batch costs, beside one file for 500 batches.

    python -m benchmarks.result_files [--batches 20000] [--storage URL] [--json]

Writes the results of so many batches into a stream's folder, each as atomically and durably as a checkpoint task does,
reads them as a rebuild does, and deletes them as a removal does. Then the same with 500 results in each file. Last, it
notes the result files in a ledger on SQLite, one and 500 in a transaction. Prints seconds and bytes for 30 days of
batches of 10 s, extrapolated from the batches that were written.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path

from headrace.batch.manifest import decode_document, encode_document
from headrace.batch.results import StoredResult, read_results, result_path
from headrace.ledger import Ledger
from headrace.ledger.batches.tables import BatchRow
from headrace.ledger.database import insert_all
from headrace.ledger.states import BatchState
from headrace.wal.log_storage import LogStorage
from headrace.wal.storage import open_storage

START_MS = 1_700_000_000_000
INTERVAL_MS = 10_000
DAYS = timedelta(days=30)
A_FILE = 500
_THREADS = 16


def result(number: int) -> StoredResult:
    """The result of a batch with one output."""
    time_ms = START_MS + number * INTERVAL_MS
    row = BatchRow(
        stream="orders",
        batch_time_ms=time_ms,
        interval_ms=INTERVAL_MS,
        state=BatchState.COMPLETED,
        revision=1,
        manifest_uri=f"s3://data/headrace/orders/manifests/{time_ms}.json",
        manifest_sha256="0" * 64,
        code_version="0123456789abcdef",
        blocks=50,
        records=10_000,
        payload_bytes=1_900_000,
        absorbed=(),
        absorbed_by_ms=None,
        attempt=1,
        allocated_at_ms=time_ms + 300,
        started_at_ms=time_ms + 900,
        completed_at_ms=time_ms + 1_600,
        checkpointed_at_ms=time_ms + 1_900,
        checkpoint_uri=f"s3://data/headrace/orders/results/{time_ms}-4.json",
        cleaned_at_ms=None,
        cleanup=None,
        error=None,
        required=("elasticsearch",),
        steps=("elasticsearch",),
        change=4,
        result=4,
    )
    names = ("written", "created", "updated", "repeated", "superseded", "dead_letters", "deleted")
    counts = dict.fromkeys(names, 10_000)
    return StoredResult(row, {"elasticsearch": counts}, {"elasticsearch": 1}, (), ())


def seconds(work: Callable[[], object]) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began


def write_each(folder: LogStorage, batches: int) -> None:
    for number in range(batches):
        made = result(number)
        folder.write_atomically(result_path(made.row.batch_time_ms, 4), made.to_bytes())


def write_many(folder: LogStorage, batches: int) -> None:
    for first in range(0, batches, A_FILE):
        rows = [dataclasses.asdict(result(number)) for number in range(first, min(first + A_FILE, batches))]
        folder.write_atomically(f"history/{first:013d}.json", encode_document({"version": 1, "batches": rows}))


def delete(folder: LogStorage, below: str) -> None:
    for path in folder.paths(below):
        folder.delete(path)


def read_each(folder: LogStorage) -> int:
    return len(read_results(folder, folder.paths("results")).by_time)


def read_many(folder: LogStorage) -> int:
    def documents() -> Iterator[int]:
        with ThreadPoolExecutor(_THREADS) as pool:
            for data in pool.map(folder.read, folder.paths("history")):
                yield len(decode_document(data)["batches"])

    return sum(documents())


def measure(folder: LogStorage, batches: int) -> dict[str, dict[str, float]]:
    """Seconds to write, read and delete, files and bytes, by kind of file."""
    found: dict[str, dict[str, float]] = {}
    for name, below, write, read in (
        ("a file a batch", "results", write_each, partial(read_each, folder)),
        (f"a file for {A_FILE} batches", "history", write_many, partial(read_many, folder)),
    ):
        row = {"write_seconds": seconds(partial(write, folder, batches))}
        paths = folder.paths(below)
        row |= {"files": len(paths), "bytes": sum(map(folder.size, paths))}
        began = time.monotonic()
        assert read() == batches
        row["read_seconds"] = time.monotonic() - began
        row["delete_seconds"] = seconds(partial(delete, folder, below))
        found[name] = row
    return found


def mark_seconds(folder: Path, batches: int, at_once: int) -> float:
    """Seconds to note the result files of so many batches in a new ledger."""
    rows = [dataclasses.replace(result(number).row, result=0) for number in range(batches)]
    with Ledger.open(f"sqlite:///{folder}/{at_once}.db") as ledger:
        ledger.streams.register(
            "orders", "{}", batch_interval_ms=INTERVAL_MS, block_interval_ms=200, outputs=("elasticsearch",)
        )
        with ledger.batches._database.write() as connection:
            insert_all(connection, BatchRow.__table__, [row.to_columns() for row in rows])
        held = [row.filed(f"results/{row.batch_time_ms}-4.json", row.batch_time_ms) for row in rows]
        began = time.monotonic()
        for first in range(0, batches, at_once):
            ledger.batches.mark_checkpointed("orders", held[first : first + at_once])
        return time.monotonic() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=20_000)
    parser.add_argument("--storage", help="the URL of a storage; by default a temporary folder")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        measured = measure(open_storage(options.storage or temporary).below("bench"), options.batches)
        for at_once in (1, A_FILE):
            seconds_taken = mark_seconds(Path(temporary), options.batches, at_once)
            measured[f"{at_once} noted in a transaction"] = {"seconds": seconds_taken}
    times = DAYS / timedelta(milliseconds=INTERVAL_MS) / options.batches
    of_days = {name: {what: value * times for what, value in row.items()} for name, row in measured.items()}
    if options.json:
        print(json.dumps({"measured": measured, "of_30_days": of_days}, indent=2))
        return 0
    print(f"30 days of batches of {INTERVAL_MS // 1000} s, extrapolated from {options.batches:,}")
    for name, row in of_days.items():
        print(f"{name:28}", ", ".join(f"{what} {value:,.1f}" for what, value in row.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
