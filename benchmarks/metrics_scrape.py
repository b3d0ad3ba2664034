"""How long a scrape of /headrace/metrics takes: 20 streams with 10,000 batches each in one SQLite ledger.

    python -m benchmarks.metrics_scrape [--streams 20] [--batches 10000] [--partitions 12]

The batches are inserted as rows, each with its attempt, output and input. Prints milliseconds of the first scrape, and
the median and the longest of the next twenty. The processor time does not depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from typing import Any

from sqlalchemy import insert

from headrace.blocks import ReceiverId, TopicPartition
from headrace.ledger import Ledger
from headrace.ledger.batches.tables import batch_attempts, batch_inputs, batch_outputs, batches
from headrace.ledger.events import add_totals, batch_delays
from headrace.views.metrics import render

_INTERVAL_MS = 10_000
_SCRAPES = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=20)
    parser.add_argument("--batches", type=int, default=10_000)
    parser.add_argument("--partitions", type=int, default=12)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Ledger.open(f"sqlite:///{folder}/ledger.db") as ledger:
        for number in range(given.streams):
            _fill(ledger, f"stream{number}", given.batches, given.partitions)
        times, processor = [], []
        for _ in range(_SCRAPES + 1):
            began, worked = time.monotonic(), time.process_time()
            body, _ = render([ledger.url], read=lambda _: ledger.overviews.numbers())
            times.append((time.monotonic() - began) * 1000)
            processor.append((time.process_time() - worked) * 1000)
        first, *others = times
        print(
            f"{given.streams} streams, {given.batches} batches each: first {first:.0f} ms, "
            f"median {statistics.median(others):.0f} ms, longest {max(others):.0f} ms; processor time: median "
            f"{statistics.median(processor):.0f} ms, longest {max(processor):.0f} ms; {len(body):,} bytes"
        )


def _fill(ledger: Ledger, name: str, count: int, partitions: int) -> None:
    ledger.streams.register(
        name, '{"outputs": [{"id": "index"}]}', batch_interval_ms=_INTERVAL_MS, block_interval_ms=200
    )
    job = ledger.jobs.acquire(name, holder="benchmark", lease_ms=600_000)
    (topic,) = ledger.topics.observe(job, "records", [(name, "id", partitions)])
    owned = [TopicPartition(name, "id", index, topic.incarnation) for index in range(partitions)]
    ledger.positions.ensure_all(job, "records", dict.fromkeys(owned, 0))
    ledger.positions.assign(job, "records", dict.fromkeys(owned, 0))
    lease = ledger.receivers.register(
        ledger.receivers.schedule(job, ReceiverId(name, "records", 0)), host="here", lease_ms=600_000
    )
    lags = {f"{name}-{index}": 5 for index in range(partitions)}
    stats = {"total_lag": 60, "lag": lags, "lag_ages": dict.fromkeys(lags, 1.5), "lag_seconds": 1.5, "connected": True}
    ledger.receivers.heartbeat(lease, sealed_through_ms=0, stats=stats)
    last_ms = ledger.now_ms() // _INTERVAL_MS * _INTERVAL_MS
    with ledger.streams._database.write() as connection:
        rows = [_rows(name, last_ms - number * _INTERVAL_MS, number) for number in range(count)]
        for table, index in ((batches, 0), (batch_attempts, 1), (batch_outputs, 2), (batch_inputs, 3)):
            connection.execute(insert(table), [row[index] for row in rows])
        for _ in range(10):
            add_totals(connection, name, {"batches_completed": 1, **batch_delays(0, 1_000, 3_000)})
        add_totals(connection, name, {"created": 10, "requests": 1, "writes": 1}, output_id="index")


def _rows(name: str, batch_time_ms: int, number: int) -> tuple[dict[str, Any], ...]:
    key = {"stream": name, "batch_time_ms": batch_time_ms}
    batch = {
        **key,
        "interval_ms": _INTERVAL_MS,
        # A hundred have failed, of which the oldest is looked at.
        "state": "failed" if number < 100 else "completed",
        "revision": 1,
        "manifest_uri": f"m/{batch_time_ms}",
        "manifest_sha256": "0" * 64,
        "blocks": 50,
        "records": 1_000,
        "payload_bytes": 100_000,
        "absorbed": (),
        "attempt": 1,
        "allocated_at_ms": batch_time_ms,
        "started_at_ms": batch_time_ms + 1_000,
        "completed_at_ms": batch_time_ms + 4_000,
    }
    attempt = {
        **key,
        "number": 1,
        "holder": "benchmark",
        "way": "connect",
        "state": "completed",
        "outputs": ("index",),
        "attributes": {},
        "started_at_ms": batch_time_ms,
        "lease_ms": 0,
        "lease_until_ms": 0,
        "heartbeat_ms": 0,
    }
    output = {**key, "attempt": 1, "output_id": "index", "counts": {"created": 1_000}, "recorded_at_ms": batch_time_ms}
    place = {"input_id": "records", "topic": name, "topic_id": "id", "partition": 0, "incarnation": 1}
    offsets = {"from_offset": batch_time_ms - 1_000, "until_offset": batch_time_ms, "records": 1_000, "blocks": 50}
    return batch, attempt, output, {**key, **place, **offsets}


if __name__ == "__main__":
    main()
