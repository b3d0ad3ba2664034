"""How soon a stream has caught up after Elasticsearch was away for many batch times, while nobody clears a run.

    python -m benchmarks.outage --batch-times 40 [--json]

Starts the embedded stack with the stream of benchmarks.latency and produces 100 records a second. When batches run,
it kills Elasticsearch, waits for --batch-times intervals, and starts it again on the same data. The time runs from
Elasticsearch's first answer until no batch is unfinished whose time is more than two intervals past, in batch
intervals. At the end every acknowledged record has to be in the index, once. It also counts the runs of Airflow that
failed: these are what a person sees of the outage.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from benchmarks.latency import STREAM, Load, begin, count, dag_file, open_ledger, stack_options
from benchmarks.measures import Measure, bench_folder, print_measures
from benchmarks.slow_elasticsearch import completed
from benchmarks.warm_batch import until
from examples.demo.elasticsearch_side import ElasticsearchSide

from headrace.devstack.stack import Stack
from headrace.ledger import Ledger

RATE = 100.0
INTERVAL_SECONDS = 10
MAX_INTERVALS = 10
_FOUND_SECONDS = 300.0
_CAUGHT_UP_SECONDS = 1_800.0


def due_ms(ledger: Ledger) -> int:
    """The batch time, in milliseconds since the epoch, up to which all is to be completed: two intervals ago."""
    return ledger.now_ms() - 2 * INTERVAL_SECONDS * 1000


def unfinished(ledger: Ledger) -> int:
    """The number of batches up to this time that have not completed."""
    return len(ledger.batches.earlier_unfinished(STREAM, due_ms(ledger), limit=1_000))


def has_caught_up(ledger: Ledger) -> bool:
    """Whether no batch up to this time is unfinished, and the stream runs on."""
    newest = max(batch.batch_time_ms for batch in completed(ledger))
    return newest + INTERVAL_SECONDS * 1000 >= due_ms(ledger) and unfinished(ledger) == 0


def measure(folder: Path, batch_times: int) -> tuple[float, int]:
    """The batch intervals until all has caught up, and the number of failed runs."""
    stack = Stack(stack_options(folder, dag_file()))
    try:
        kafka, elasticsearch, api = begin(stack)
        load = Load(kafka.bootstrap_servers, RATE)
        with open_ledger(folder) as ledger:
            until("the first batches", lambda: len(completed(ledger)) >= 3, _FOUND_SECONDS)
            elasticsearch.kill()
            time.sleep(batch_times * INTERVAL_SECONDS)
            # A late run takes over the batch times before it, so there may be fewer batches than batch times.
            behind = unfinished(ledger)
            assert behind, "the outage did not stop the batches"
            elasticsearch.start()
            began = time.monotonic()
            until("all batches", lambda: has_caught_up(ledger), _CAUGHT_UP_SECONDS)
            took = (time.monotonic() - began) / INTERVAL_SECONDS
            print(f"{behind} batches were unfinished at Elasticsearch's return", file=sys.stderr)
            load.stop()
            index = ElasticsearchSide(elasticsearch.url)
            until("all records", lambda: count(index, 0) >= len(load.sent), _FOUND_SECONDS)
            assert count(index, 0) == len(load.sent), (count(index, 0), len(load.sent))
        failed = sum(run["state"] == "failed" for run in api.runs(f"{STREAM}_batches"))
    finally:
        stack.stop()
    return took, failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-times", type=int, default=40, help="that Elasticsearch is away")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with bench_folder() as folder:
        took, failed = measure(folder, options.batch_times)
    name = f"Elasticsearch away for {options.batch_times} batch times"
    print_measures(
        [
            Measure(f"{name}: batch times until caught up", "batches", (took,), "ten", (MAX_INTERVALS,)),
            Measure(f"{name}: batches whose runs failed", "batches", (failed,), "all", (options.batch_times,)),
        ],
        as_json=options.json,
    )


if __name__ == "__main__":
    main()
