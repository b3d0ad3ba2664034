"""What a stream with backpressure does while Elasticsearch has a tenth of its speed.

    python -m benchmarks.slow_elasticsearch --minutes 5 [--json]

Starts the embedded stack with the stream of benchmarks.latency, with backpressure and a batch interval of 10 s, and
produces 1,000 records a second. When batches run steadily, it stops Elasticsearch's process for nine tenths of each
second, for --minutes. No batch may fail, and every record has to be in the index at the end, once. It reports the
memory of the receiver job (the largest sum of its processes' own memory, before and meanwhile), and how many batches
complete after the slow time until one begins at most an interval late and receivers may read as fast as is produced.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from threading import Event, Thread

import psutil
from benchmarks.latency import STREAM, Load, begin, count, dag_file, open_ledger, stack_options
from benchmarks.measures import Measure, bench_folder, print_measures
from benchmarks.warm_batch import until
from examples.demo.elasticsearch_side import ElasticsearchSide

from headrace.devstack.elasticsearch import ElasticsearchServer
from headrace.devstack.stack import Stack
from headrace.ledger import BatchState, Ledger
from headrace.ledger.batches.tables import BatchRow

RATE = 1_000.0
INTERVAL_MS = 10_000
STEADY_BATCHES = 6
SHARE = 0.1
MAX_BATCHES = 3
_SECONDS = 1.0
_FOUND_SECONDS = 300.0
_CAUGHT_UP_SECONDS = 900.0
MIB = 1024 * 1024


class Slowed:
    """While entered, Elasticsearch runs for ``SHARE`` of each second only."""

    def __init__(self, elasticsearch: ElasticsearchServer) -> None:
        self._elasticsearch = elasticsearch
        self._over = Event()
        self._thread = Thread(target=self._run, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.is_set():
            self._elasticsearch.suspend()
            self._over.wait(_SECONDS * (1 - SHARE))
            self._elasticsearch.resume()
            self._over.wait(_SECONDS * SHARE)


class Memory:
    """Samples the memory of a process and its descendants: the largest sum, without what they share."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._over = Event()
        self.largest = 0
        self._thread = Thread(target=self._run, daemon=True)

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(2):
            used = 0
            for process in [self._process, *self._process.children(recursive=True)]:
                try:
                    used += process.memory_full_info().uss
                except psutil.Error:
                    continue
            self.largest = max(self.largest, used)


def completed(ledger: Ledger, after_ms: float = 0) -> list[BatchRow]:
    """The completed batches that ended after this time, in the order of their ends."""
    rows = ledger.batches.page(STREAM, 100, [BatchState.COMPLETED])
    ended = [row for row in rows if row.records and (row.completed_at_ms or 0) > after_ms]
    return sorted(ended, key=lambda row: row.completed_at_ms or 0)


def is_at_full_rate(ledger: Ledger, batch: BatchRow) -> bool:
    """Whether the batch began at most an interval late, and no receiver is limited below what is produced."""
    rates = [row.max_rate for row in ledger.receivers.all(STREAM)]
    free = all(rate is None or rate >= RATE for rate in rates)
    return free and (batch.started_at_ms or 0) - batch.batch_time_ms <= INTERVAL_MS


def batches_until_full_rate(ledger: Ledger) -> int:
    """The number of batches that complete from now on until the stream is at full rate."""
    since_ms, seen = time.time() * 1000, 0
    deadline = time.monotonic() + _CAUGHT_UP_SECONDS
    while time.monotonic() < deadline:
        done = completed(ledger, since_ms)
        if len(done) > seen:
            seen = len(done)
            if is_at_full_rate(ledger, done[-1]):
                return seen
        time.sleep(0.5)
    raise TimeoutError(f"not at full rate after {seen} batches")


def failures(ledger: Ledger) -> list[str]:
    """The failed attempts at batches."""
    rows = ledger.batches.page(STREAM, 1000)
    attempts = [each for row in rows for each in ledger.attempts.of_batch(STREAM, row.batch_time_ms)]
    return [f"{each.batch_time_ms} attempt {each.number}: {each.error}" for each in attempts if each.error is not None]


def measure(folder: Path, minutes: float) -> tuple[float, float, int]:
    """The memory before and meanwhile in MiB, and the batches until full rate."""
    text = dag_file().replace(
        'batch_interval="10 s",', 'batch_interval="10 s",\n    limits=Limits(backpressure=Backpressure()),'
    )
    text = text.replace("import ElasticsearchOutput,", "import Backpressure, ElasticsearchOutput, Limits,")
    stack = Stack(stack_options(folder, text))
    try:
        kafka, elasticsearch, _ = begin(stack)
        load = Load(kafka.bootstrap_servers, RATE)
        with open_ledger(folder) as ledger:
            until("the first batches", lambda: bool(completed(ledger)), _FOUND_SECONDS)
            job = ledger.jobs.current(STREAM)
            assert job is not None
            pid = int(job.attributes["pid"])
            with Memory(pid) as before:
                known = len(completed(ledger))
                until("steady batches", lambda: len(completed(ledger)) >= known + STEADY_BATCHES, _FOUND_SECONDS)
            with Memory(pid) as meanwhile, Slowed(elasticsearch):
                began_ms = time.time() * 1000
                time.sleep(minutes * 60)
            slow = completed(ledger, began_ms)
            sizes = ", ".join(
                f"{row.records} in {((row.completed_at_ms or 0) - (row.started_at_ms or 0)) / 1000:.1f} s"
                for row in slow
            )
            print(f"batches in the slow time: {sizes}", file=sys.stderr)
            batches = batches_until_full_rate(ledger)
            load.stop()
            index = ElasticsearchSide(elasticsearch.url)
            until("all records", lambda: count(index, 0) >= len(load.sent), _CAUGHT_UP_SECONDS)
            assert count(index, 0) == len(load.sent), (count(index, 0), len(load.sent))
            assert not failures(ledger), failures(ledger)
            last = ledger.jobs.current(STREAM)
            assert last is not None and last.epoch == job.epoch, "the receiver job was replaced"
    finally:
        stack.stop()
    return before.largest / MIB, meanwhile.largest / MIB, batches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0, help="of slowness")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with bench_folder() as folder:
        before, meanwhile, batches = measure(folder, options.minutes)
    name = "Elasticsearch at a tenth of its speed"
    print_measures(
        [
            Measure(f"{name}: memory of the receiver job", "MiB", (meanwhile,), "before", (before,)),
            Measure(f"{name}: batches until full rate", "batches", (batches,), "three", (MAX_BATCHES,)),
        ],
        as_json=options.json,
    )


if __name__ == "__main__":
    main()
