"""What a year of batches costs the ledger and the stream's folder, with and without a limit on the history.

    python -m benchmarks.ledger_size [--partitions 100] [--interval 10] [--batches 300] [--json]

Runs so many batches through a real SQLite ledger and a real folder (allocation, one attempt at one output, checkpoint,
cleanup), a block of one record for each partition in each. What the second half of them added is taken for what every
batch costs, and multiplied: a year itself is not run. Prints bytes and rows.
"""

from __future__ import annotations

import argparse
import json
import sqlite3
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa

from headrace.batch.allocation import allocate
from headrace.batch.checkpoint import checkpoint_now
from headrace.batch.cleanup import clean_up
from headrace.blocks import BlockInfo, OffsetRange, ReceiverId, TopicPartition
from headrace.clock import ManualClock
from headrace.ledger import Ledger
from headrace.stream import ConsoleOutput, KafkaInput, Limits, Stream
from headrace.stream_context import StreamContext
from headrace.wal.frame import RECORD_SCHEMA
from headrace.wal.writer import WriteAheadLogWriter

START_MS = 1_700_000_000_000
YEAR = timedelta(days=365)
KEPT = timedelta(days=30)
TABLES = ("batches", "batch_inputs", "batch_attempts", "batch_outputs", "segments", "events")


class Source:
    """A stream of so many partitions, whose ledger and log are real."""

    def __init__(self, folder: Path, partitions: int, interval_ms: int) -> None:
        self.clock = ManualClock(START_MS)
        self.interval_ms = interval_ms
        self.ledger_path = folder / "ledger.db"
        self.stream = Stream(
            name="size",
            inputs=KafkaInput(id="records", bootstrap_servers="127.0.0.1:1", topics="records"),
            outputs=ConsoleOutput(),
            batch_interval=timedelta(milliseconds=interval_ms),
            limits=Limits(history=None),
            storage=folder / "storage",
            ledger=f"sqlite:///{self.ledger_path}",
        )
        self.ledger = Ledger.open(self.stream.ledger, clock=self.clock)
        self.context = StreamContext(self.stream, self.ledger, clock=self.clock)
        self.ledger.streams.register(
            "size", self.stream.to_json(), batch_interval_ms=interval_ms, block_interval_ms=200, outputs=("console",)
        )
        self.job = self.ledger.jobs.acquire("size", holder="benchmark", lease_ms=3_600_000_000)
        self.ledger.topics.observe(self.job, "records", [("records", "topic-id", partitions)])
        self.partitions = [TopicPartition("records", "topic-id", number) for number in range(partitions)]
        self.ledger.positions.ensure_all(self.job, "records", dict.fromkeys(self.partitions, 0))
        self.ledger.positions.assign(self.job, "records", dict.fromkeys(self.partitions, 0))
        self.offset = 0

    def run(self, number: int) -> None:
        """One batch, from its block to its cleanup; its log file is closed, so that cleanup deletes it."""
        receiver = ReceiverId("size", "records", 0)
        lease = self.ledger.receivers.register(
            self.ledger.receivers.schedule(self.job, receiver), host="here", lease_ms=3_600_000_000
        )
        writer = WriteAheadLogWriter(self.context.storage, "log", receiver, lease.epoch, clock=self.clock)
        ranges = tuple(OffsetRange(each, self.offset, self.offset + 1, 1) for each in self.partitions)
        now_ms = self.clock.now_ms()
        written = writer.write(self._records(), ranges, cut_time_ms=now_ms, last_accepted_sequence=None)
        count = len(ranges)
        info = BlockInfo(
            receiver, lease.epoch, written.sequence, now_ms, written.handle, ranges, count, written.payload_bytes
        )
        self.ledger.blocks.add(lease, info)
        writer.close()
        self.offset += 1
        time_ms = START_MS + number * self.interval_ms
        self.clock.advance(time_ms - now_ms)
        allocate(self.context, time_ms)
        attempt = self.ledger.attempts.begin("size", time_ms, holder="benchmark", way="connect", lease_ms=60_000)
        self.ledger.attempts.record_output(attempt, "console", {"printed": count})
        self.ledger.attempts.complete(attempt)
        checkpoint_now(self.context, time_ms)
        clean_up(self.context)

    def _records(self) -> pa.RecordBatch:
        count = len(self.partitions)
        columns: dict[str, list[Any]] = {
            "key": [None] * count,
            "value": [b"{}"] * count,
            "topic": ["records"] * count,
            "partition": [each.partition for each in self.partitions],
            "offset": [self.offset] * count,
            "timestamp": [self.clock.now_ms()] * count,
            "timestampType": [0] * count,
            "headers": [None] * count,
            "incarnation": [1] * count,
        }
        return pa.RecordBatch.from_pydict({name: columns[name] for name in RECORD_SCHEMA.names}, RECORD_SCHEMA)

    def sizes(self) -> dict[str, int]:
        """Bytes of the ledger's pages in use, of the manifests, of the results; rows by table."""
        with sqlite3.connect(self.ledger_path) as connection:
            (pages,), (free,), (size,) = (
                connection.execute(f"PRAGMA {name}").fetchone()
                for name in ("page_count", "freelist_count", "page_size")
            )
            rows = {table: connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in TABLES}  # noqa: S608
        folder = self.context.storage
        return {
            "ledger_bytes": (pages - free) * size,
            "manifest_bytes": sum(map(folder.size, folder.paths("manifests"))),
            "manifests": len(folder.paths("manifests")),
            "result_bytes": sum(map(folder.size, folder.paths("results"))),
            "results": len(folder.paths("results")),
            **rows,
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--partitions", type=int, default=100)
    parser.add_argument("--interval", type=float, default=10.0, help="seconds from one batch to the next")
    parser.add_argument("--batches", type=int, default=300)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    interval = timedelta(seconds=options.interval)
    with tempfile.TemporaryDirectory() as folder:
        source = Source(Path(folder), options.partitions, interval // timedelta(milliseconds=1))
        half = options.batches // 2
        for number in range(1, half + 1):
            source.run(number)
        before = source.sizes()
        for number in range(half + 1, options.batches + 1):
            source.run(number)
        after = source.sizes()
        source.ledger.close()
    each = {name: (after[name] - before[name]) / (options.batches - half) for name in after}
    found = {
        "measured_batches": options.batches - half,
        "a_batch": each,
        "a_year": {name: value * (YEAR / interval) for name, value in each.items()},
        "kept_of_30_days": {name: value * (KEPT / interval) for name, value in each.items()},
    }
    if options.json:
        print(json.dumps(found, indent=2))
        return 0
    print(f"{options.partitions} partitions, a batch every {options.interval:g} s; extrapolated from {options.batches}")
    for name, value in each.items():
        year, kept = found["a_year"][name], found["kept_of_30_days"][name]
        print(f"{name:16} {value:12,.1f} a batch {year:20,.0f} a year {kept:18,.0f} in 30 days")
    return 0


if __name__ == "__main__":
    sys.exit(main())
