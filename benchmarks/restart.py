"""How long a stream completes no batch after all of its processes and servers were killed with SIGKILL at once.

    python -m benchmarks.restart --rounds 3 [--json]

Starts the embedded stack with the stream of benchmarks.latency and produces 100 records a second. In each round it
kills everything with SIGKILL (the receiver job, batches, Airflow, Postgres, Kafka, Elasticsearch), then starts the
servers again on the same data. The time runs from the kill until a batch has completed that began after it. At the end
every acknowledged record has to be in the index, once. After the machine itself was down, nothing shows that the
receiver job's process is gone, and the next job also waits for the end of its lease of 30 s.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import psutil
from benchmarks.latency import STREAM, Load, begin, count, dag_file, stack_options
from benchmarks.measures import Measure, bench_folder, print_measures
from benchmarks.warm_batch import until
from examples.demo.elasticsearch_side import ElasticsearchSide

from headrace.devstack.stack import Stack
from headrace.devstack.state import processes_of_stack
from headrace.ledger import BatchState, Ledger
from headrace.ledger.errors import LedgerMissingError, SchemaError

RATE = 100.0
STEADY_SECONDS = 40.0
MAX_SECONDS = 60.0
_FOUND_SECONDS = 300.0


def kill_everything(stack: Stack) -> None:
    """SIGKILL to each process of the stack, until there is none."""
    while processes := processes_of_stack(stack.state.id):
        for process in processes:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(processes, timeout=10)


def completed_since(folder: Path, began_ms: float) -> bool:
    """Whether a batch with records has completed that began after this time."""
    try:
        with Ledger.open(f"sqlite:///{folder}/{STREAM}/ledger.db", create=False) as ledger:
            newest = ledger.batches.page(STREAM, 5, [BatchState.COMPLETED])
    except (LedgerMissingError, SchemaError):
        # The first task has made the file, and not yet its tables.
        return False
    return any(row.records and (row.started_at_ms or 0) > began_ms for row in newest)


def measure(folder: Path, rounds: int) -> list[float]:
    """The seconds of each round."""
    options = stack_options(folder, dag_file())
    stack = Stack(options)
    took: list[float] = []
    sent = 0
    try:
        begin(stack)
        ledger = folder / STREAM / "ledger.db"
        until("the ledger", ledger.exists, _FOUND_SECONDS)
        began_ms = 0.0
        for _ in range(rounds):
            assert stack.kafka
            load = Load(stack.kafka.bootstrap_servers, RATE)
            until("a batch", lambda after=began_ms: completed_since(folder, after), _FOUND_SECONDS)  # type: ignore[misc]
            time.sleep(STEADY_SECONDS)
            load.stop()
            sent += len(load.sent)
            began, began_ms = time.monotonic(), time.time() * 1000
            kill_everything(stack)
            stack = Stack(options)
            stack.start()
            until("a batch", lambda after=began_ms: completed_since(folder, after), _FOUND_SECONDS)  # type: ignore[misc]
            took.append(time.monotonic() - began)
        assert stack.elasticsearch
        index = ElasticsearchSide(stack.elasticsearch.url)
        until("all records", lambda: count(index, 0) >= sent, _FOUND_SECONDS)
        assert count(index, 0) == sent, (count(index, 0), sent)
    finally:
        stack.stop()
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with bench_folder() as folder:
        took = measure(folder, options.rounds)
    name = "kill -9 of everything until the first batch has completed"
    limits = tuple(MAX_SECONDS for _ in took)
    print_measures([Measure(name, "s", tuple(took), f"{MAX_SECONDS:g} s", limits)], as_json=options.json)


if __name__ == "__main__":
    main()
