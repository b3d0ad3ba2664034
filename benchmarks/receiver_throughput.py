"""How fast one receiver takes a backlog from Kafka into the synced log and the ledger, and in how much memory.

    python -m benchmarks.receiver_throughput --records 1000000 [--json] [--minimum 300000] [--batch-by timestamp]

Starts an embedded Kafka (or uses --bootstrap), fills 4 partitions with JSON records of 190 bytes, then runs one
receiver in a process of its own until nothing is left. The records' timestamps are spread over the last --spread
seconds, as those of a down-time are; by timestamp each batch interval of 10 s has blocks of its own.

The clock runs from the receiver's first block to its last, the start of the process (imports, registration) apart. The
broker shares the machine's cores with the receiver.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import resource
import shutil
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, get_args

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from headrace.blocks import ReceiverId, TopicPartition
from headrace.ledger import Ledger
from headrace.receiver.receiver_task import ReceiverTask, run_receiver
from headrace.stream import ConsoleOutput, KafkaInput, Limits, Stream

PARTITIONS = 4
RECORD_BYTES = 190
MIB = 1024 * 1024
BatchBy = Literal["arrival", "timestamp"]


@contextlib.contextmanager
def broker(bootstrap: str | None, folder: Path) -> Iterator[str]:
    if bootstrap is not None:
        yield bootstrap
        return
    from headrace.devstack.kafka import KafkaServer

    with KafkaServer(folder / "kafka") as server:
        yield server.bootstrap_servers


def record(number: int) -> bytes:
    start = (
        b'{"id":%d,"t":%d,"user":"user-%05d","action":"click","page":"/products/%06d","price":%.2f,"agent":"%s","pad":"'
        % (
            number,
            1_700_000_000_000 + number,
            number % 99_991,
            number * 7919 % 999_983,
            (number % 9999) / 7,
            b"Mozilla/5.0 (X11; Linux x86_64)",
        )
    )
    return start + b"x" * (RECORD_BYTES - len(start) - 2) + b'"}'


def fill(bootstrap: str, topic: str, records: int, spread_seconds: int) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap})
    if topic not in admin.list_topics(timeout=10).topics:
        admin.create_topics([NewTopic(topic, PARTITIONS, 1)])[topic].result()
    producer = Producer(
        {
            "bootstrap.servers": bootstrap,
            "linger.ms": 50,
            "batch.size": 1_000_000,
            "queue.buffering.max.messages": 500_000,
            "compression.type": "lz4",
        }
    )
    begun_ms = int(time.time() * 1000) - spread_seconds * 1000
    for number in range(records):
        timestamp_ms = begun_ms + spread_seconds * 1000 * number // records
        while True:
            try:
                producer.produce(topic, record(number), partition=number % PARTITIONS, timestamp=timestamp_ms)
                break
            except BufferError:
                producer.poll(0.05)
        if number % 10_000 == 0:
            producer.poll(0)
    producer.flush()


def receive(task: ReceiverTask, pipe: Connection) -> None:
    """The receiver's process: says how it ended and how much memory it took."""
    stop = threading.Event()
    threading.Thread(target=lambda: (pipe.recv(), stop.set()), daemon=True).start()
    report = run_receiver(task, stop)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    pipe.send((report, usage.ru_maxrss * 1024, usage.ru_utime + usage.ru_stime))


def define(bootstrap: str, topic: str, folder: Path, prefetch_mib: int, batch_by: BatchBy) -> Stream:
    return Stream(
        name="bench",
        inputs=(KafkaInput(bootstrap_servers=bootstrap, topics=(topic,)),),
        outputs=(ConsoleOutput(id="console"),),
        batch_interval="10 s",
        batch_by=batch_by,
        storage=str(folder / "storage"),
        ledger=f"sqlite:///{folder}/ledger.db",
        limits=Limits(prefetch_bytes=prefetch_mib * MIB),
    )


def measure(bootstrap: str, topic: str, records: int, folder: Path, stream: Stream) -> dict[str, Any]:
    ledger = Ledger.open(stream.ledger)
    ledger.streams.register(
        stream.name,
        stream.model_dump_json(),
        batch_interval_ms=stream.batch_interval_ms,
        block_interval_ms=stream.block_interval_ms,
        batch_by=stream.batch_by,
        allowed_lateness_ms=stream.allowed_lateness_ms,
    )
    job = ledger.jobs.acquire(stream.name, holder="benchmark", lease_ms=600_000, versions={})
    described = AdminClient({"bootstrap.servers": bootstrap}).list_topics(topic, timeout=10)
    assert len(described.topics[topic].partitions) == PARTITIONS
    topic_id = topic_id_of(bootstrap, topic)
    ledger.topics.observe(job, "records", [(topic, topic_id, PARTITIONS)])
    partitions = [TopicPartition(topic, topic_id, number) for number in range(PARTITIONS)]
    ledger.positions.ensure_all(job, "records", dict.fromkeys(partitions, 0))
    ledger.positions.assign(job, "records", dict.fromkeys(partitions, 0))
    task = ReceiverTask(stream.model_dump_json(), ReceiverId("bench", "records", 0), job)
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=receive, args=(task, there))
    process.start()
    deadline = time.monotonic() + 300
    while sum(row.next_offset for row in ledger.positions.all("bench")) < records:
        assert time.monotonic() < deadline and process.is_alive()
        time.sleep(0.05)
    here.send("stop")
    report, max_rss, cpu_seconds = here.recv()
    process.join()
    blocks = [each.at_ms for each in ledger.events.page("bench", limit=100_000) if each.kind == "block_added"]
    # The first block's own making is part of the work: about one block interval before it was added.
    seconds = (blocks[-1] - blocks[0] + stream.block_interval_ms) / 1000
    log_bytes = sum(path.stat().st_size for path in (folder / "storage").rglob("*") if path.is_file())
    ledger.close()
    assert report.records == records, report
    return {
        "records": records,
        "seconds": round(seconds, 3),
        "records_per_second": round(records / seconds),
        "blocks": report.blocks,
        "max_rss_mib": round(max_rss / MIB),
        "cpu_seconds": round(cpu_seconds, 2),
        "log_mib": round(log_bytes / MIB, 1),
    }


def topic_id_of(bootstrap: str, topic: str) -> str:
    from confluent_kafka import TopicCollection

    admin = AdminClient({"bootstrap.servers": bootstrap})
    return str(admin.describe_topics(TopicCollection(topic_names=[topic]))[topic].result().topic_id)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--bootstrap", help="an existing Kafka instead of an embedded one")
    parser.add_argument("--prefetch-mib", type=int, default=128)
    parser.add_argument("--batch-by", choices=get_args(BatchBy), default="arrival")
    parser.add_argument("--spread", type=int, default=600, help="seconds that the records' timestamps lie in")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--minimum", type=int, default=0, help="exit with 1 below so many records a second")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="headrace-bench-"))
    try:
        with broker(options.bootstrap, folder) as bootstrap:
            topic = f"bench-{uuid.uuid4().hex[:8]}"
            fill(bootstrap, topic, options.records, options.spread)
            for run in range(options.runs):
                target = folder / f"run-{run}"
                target.mkdir()
                stream = define(bootstrap, topic, target, options.prefetch_mib, options.batch_by)
                result = measure(bootstrap, topic, options.records, target, stream)
                print(
                    json.dumps(result)
                    if options.json
                    else f"{result['records_per_second']:,} records/s, {result['max_rss_mib']} MiB at most, {result}"
                )
                if result["records_per_second"] < options.minimum:
                    sys.exit(1)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
