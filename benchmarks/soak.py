"""Whether a stream under a real Airflow grows: memory, open files and threads of its processes, and the batches' delay.

    python -m benchmarks.soak --minutes 60 --rate 5000 [--json]

Starts the embedded stack with the stream of benchmarks.latency, produces at a steady rate, and samples every process
that lives from the end of the warm-up (10 minutes) to the end: those of the receiver job, and Airflow's. For each
process it compares the medians of the last quarter with those of the first. It reports the process that grew most, by
memory (without what processes share), by open files, and by threads; and the batches' delay, from the batch time to the
end of the batch. At the end every record has to be in the index, once, and no attempt may have failed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread

import psutil
from benchmarks.latency import STREAM, begin, count, dag_file, stack_options
from benchmarks.measures import Measure, Unit, bench_folder, print_measures
from benchmarks.slow_elasticsearch import completed, failures
from benchmarks.warm_batch import until
from confluent_kafka import Producer
from examples.demo.elasticsearch_side import ElasticsearchSide

from headrace.devstack.stack import Stack
from headrace.ledger import BatchState, Ledger

WARM_UP_SECONDS = 600.0
SAMPLE_SECONDS = 20.0
# The servers beside which headrace runs are not its processes.
SERVERS = ("postgres", "kafka.Kafka", "org.elasticsearch", "elasticsearch_node")
FIELDS: tuple[tuple[str, float, Unit], ...] = (
    ("memory", 1 << 20, "MiB"),
    ("files", 1, "files"),
    ("threads", 1, "threads"),
)
_FOUND_SECONDS = 300.0
_CAUGHT_UP_SECONDS = 600.0


class SteadyLoad:
    """Produces records at a rate, and counts those that Kafka has acknowledged."""

    def __init__(self, bootstrap_servers: str, rate: float) -> None:
        self.acknowledged = 0
        self._rate = rate
        self._producer = Producer({"bootstrap.servers": bootstrap_servers, "linger.ms": 20, "compression.type": "lz4"})
        self._over = Event()
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        began, number = time.monotonic(), 0
        while not self._over.wait(0.05):
            due = int((time.monotonic() - began) * self._rate)
            for each in range(number, due):
                value = b'{"number":%d,"item":"cup","cents":350,"pieces":%d}' % (each, each % 5)
                self._producer.produce(STREAM, key=b"%d" % (each % 997), value=value, on_delivery=self._delivered)
                if each % 1_000 == 0:
                    self._producer.poll(0)
            number = due
            self._producer.poll(0)
        self._producer.flush(60)

    def _delivered(self, error: object, _message: object) -> None:
        self.acknowledged += error is None


@dataclass(frozen=True)
class Sample:
    """What a process had at one time."""

    memory: int
    files: int
    threads: int


class Processes:
    """Samples the descendants of this process that live long."""

    def __init__(self) -> None:
        self.samples: dict[psutil.Process, list[Sample]] = {}
        self._rounds = 0

    def sample(self) -> None:
        self._rounds += 1
        for process in psutil.Process().children(recursive=True):
            try:
                with process.oneshot():
                    sample = Sample(process.memory_full_info().uss, process.num_fds(), process.num_threads())
            except psutil.Error:
                continue
            self.samples.setdefault(process, []).append(sample)

    def that_lived(self) -> Iterator[tuple[str, list[Sample]]]:
        """The command and the samples of each process that was there every time, without the servers."""
        for process, samples in self.samples.items():
            if len(samples) == self._rounds:
                try:
                    command = " ".join(process.cmdline())
                except psutil.Error:
                    # It has ended, and nobody has asked for its exit code.
                    continue
                if not any(server in command for server in SERVERS):
                    yield command[:160], samples


def quarters(figures: list[float]) -> tuple[float, float]:
    """The medians of the first and of the last quarter."""
    quarter = max(1, len(figures) // 4)
    return statistics.median(figures[:quarter]), statistics.median(figures[-quarter:])


def most_grown(processes: Processes, field: str, unit: float) -> tuple[str, float, float]:
    """The process that grew most, with its first and last quarter."""
    found = []
    for command, samples in processes.that_lived():
        first, last = quarters([getattr(each, field) / unit for each in samples])
        found.append((last / max(first, 1.0), command, first, last))
    for ratio, command, first, last in sorted(found, reverse=True)[:5]:
        print(f"{field}: {first:,.0f} to {last:,.0f} ({ratio:.2f}): {command}", file=sys.stderr)
    _, command, first, last = max(found)
    return command, first, last


def measure(folder: Path, options: argparse.Namespace) -> list[Measure]:
    stack = Stack(stack_options(folder, dag_file()))
    try:
        kafka, elasticsearch, _ = begin(stack)
        load = SteadyLoad(kafka.bootstrap_servers, options.rate)
        index = ElasticsearchSide(elasticsearch.url)
        until("the first documents", lambda: count(index, 0), _FOUND_SECONDS)
        time.sleep(options.warm_up)
        processes = Processes()
        began_ms, deadline = time.time() * 1000, time.monotonic() + options.minutes * 60
        while time.monotonic() < deadline:
            processes.sample()
            time.sleep(SAMPLE_SECONDS)
        load.stop()
        until("all records", lambda: count(index, 0) >= load.acknowledged, _CAUGHT_UP_SECONDS)
        assert count(index, 0) == load.acknowledged, (count(index, 0), load.acknowledged)
        with Ledger.open(f"sqlite:///{folder}/{STREAM}/ledger.db", create=False) as ledger:
            assert not failures(ledger), failures(ledger)
            rows = ledger.batches.page(STREAM, 10_000, [BatchState.COMPLETED])
            rows = sorted((row for row in rows if row.batch_time_ms >= began_ms), key=lambda row: row.batch_time_ms)
            assert completed(ledger)
        delays = [((row.completed_at_ms or 0) - row.batch_time_ms) / 1000 for row in rows]
        print(
            f"{load.acknowledged:,} records, {len(rows)} batches, the longest delay {max(delays):.1f} s",
            file=sys.stderr,
        )
        name = f"soak of {options.minutes:g} minutes at {options.rate:,.0f} records/s"
        measures = []
        for field, unit, shown in FIELDS:
            _, first, last = most_grown(processes, field, unit)
            measures.append(
                Measure(f"{name}: {field} of the process that grew most", shown, (last,), "first quarter", (first,))
            )
        first, last = quarters(delays)
        return [*measures, Measure(f"{name}: delay of a batch", "s", (last,), "first quarter", (first,))]
    finally:
        stack.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="after the warm-up")
    parser.add_argument("--warm-up", type=float, default=WARM_UP_SECONDS, help="in seconds")
    parser.add_argument("--rate", type=float, default=5_000.0, help="records a second")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with bench_folder() as folder:
        measures = measure(folder, options)
    print_measures(measures, as_json=options.json)


if __name__ == "__main__":
    main()
