"""How long a stream stores nothing after its receiver was killed with SIGKILL.

    python -m benchmarks.recovery --rounds 5 [--json]

Starts an embedded Kafka and a receiver job, and produces 1,000 records a second. In each round it kills the process
that has the log open, and waits for the next block in the ledger. At the end every record has to be stored, once.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from threading import Event, Thread

import psutil
from benchmarks.measures import Measure, bench_folder, print_measures
from benchmarks.receiver_throughput import PARTITIONS, record
from benchmarks.warm_batch import received, receiving, until
from confluent_kafka import Producer

TOPIC = "bench"
RATE = 1_000
STEADY_SECONDS = 10.0
MAX_SECONDS = 10.0


class Load:
    """Produces ``RATE`` records a second from a thread; ``sent`` counts them."""

    def __init__(self, bootstrap_servers: str) -> None:
        self.sent = 0
        self._producer = Producer({"bootstrap.servers": bootstrap_servers, "linger.ms": 5})
        self._stop = Event()
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
        self._producer.flush()

    def _run(self) -> None:
        while not self._stop.wait(0.1):
            for _ in range(RATE // 10):
                self._producer.produce(TOPIC, record(self.sent), partition=self.sent % PARTITIONS)
                self.sent += 1
            self._producer.poll(0)


def receiver_of(job: int, log: Path) -> psutil.Process | None:
    """The process that has a segment of the log open for writing."""
    for process in psutil.Process(job).children(recursive=True):
        try:
            if any(file.path.startswith(str(log)) and file.mode != "r" for file in process.open_files()):
                return process
        except psutil.Error:
            continue
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    pauses = []
    with bench_folder() as folder, receiving(folder) as (bootstrap, ledger, job):
        load = Load(bootstrap)
        for _ in range(options.rounds):
            until("a receiver", lambda: receiver_of(job, folder / "storage"))
            time.sleep(STEADY_SECONDS)
            receiver = receiver_of(job, folder / "storage")
            assert receiver is not None
            receiver.kill()
            receiver.wait(10)
            began, before = time.monotonic(), received(ledger)
            until("the next block", lambda before=before: received(ledger) > before)  # type: ignore[misc]
            pauses.append(time.monotonic() - began)
        load.stop()
        until("all records", lambda: received(ledger) >= load.sent)
        added = [each for each in ledger.events.page("bench", limit=100_000) if each.kind == "block_added"]
        records = sum(each.payload["records"] for each in added)
        assert records == load.sent, (records, load.sent)
    limits = tuple(MAX_SECONDS for _ in pauses)
    name = "kill -9 of the receiver until the next block"
    print_measures([Measure(name, "s", tuple(pauses), f"{MAX_SECONDS:g} s", limits)], as_json=options.json)


if __name__ == "__main__":
    main()
