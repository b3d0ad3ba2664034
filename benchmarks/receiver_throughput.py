"""How fast one receiver takes a backlog from Kafka into the synced log and the ledger, beside a bare consume() loop.

    python -m benchmarks.receiver_throughput --records 2000000 --rounds 3 [--shape keyed] [--delivery MODE …]
        [--receivers N] [--json]

Starts an embedded Kafka, fills 4 partitions (``--partitions``), then in each round runs a loop that consumes the
records and forgets them, and one receiver (``--receivers``). Each is a process of its own. ``--shape``: JSON records of
190 bytes; the same with a key and two headers; records of 10 bytes; records of 100 KB. The records' timestamps are
spread over the last --spread seconds, as those of a down-time are; by timestamp each batch interval of 10 s has blocks
of its own.

``--delivery`` names modes of `Stream.delivery`, each of which runs in each round; without it, only the default does.

The clock runs from the first message or block to the last, the start of the process (imports, registration) apart. The
broker shares the machine's cores with both. The loop is as fast as we could make it: without garbage collection, 500
messages at a time, the receiver's client settings.
"""

from __future__ import annotations

import argparse
import base64
import gc
import multiprocessing
import random
import resource
import shutil
import sys
import threading
import time
import uuid
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, get_args

from benchmarks.measures import Measure, bench_folder, print_measures
from confluent_kafka import Consumer, Producer
from confluent_kafka import TopicPartition as KafkaPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from headrace.blocks import ReceiverId, TopicPartition
from headrace.devstack.kafka import KafkaServer
from headrace.kafka.client import consumer_config
from headrace.ledger import Ledger
from headrace.ledger.tables import Declared
from headrace.receiver.supervisor import ReceiverTask, run_receiver
from headrace.stream import ConsoleOutput, KafkaInput, Limits, Stream

PARTITIONS = 4
RECORD_BYTES = 190
MIB = 1024 * 1024
LOOP = "bare consume() loop"
BatchBy = Literal["arrival", "timestamp"]
Delivery = Literal["exactly_once", "at_least_once", "at_most_once"]


# The bare loop's messages at a time; with more of them it is slower.
LOT = 500


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


def tiny(number: int) -> bytes:
    return b"%010d" % number


def large(number: int) -> bytes:
    """100 KB of a text that compresses by a quarter. (The client unpacks a fetch at once: a thousand times the same
    record would be gigabytes.)"""
    return b'{"id":%d,"pad":"%b"}' % (number, base64.b64encode(random.Random(number).randbytes(75_000)))


SHAPES: dict[str, tuple[Callable[[int], bytes], bool]] = {
    "json": (record, False),
    "keyed": (record, True),
    "tiny": (tiny, False),
    "large": (large, False),
}
"""The value of a record by its number, and whether it has a key and headers."""


def fill(
    bootstrap: str,
    topic: str,
    records: int,
    spread_seconds: int,
    shape: str = "json",
    *,
    partitions: int = PARTITIONS,
    ago_seconds: int = 0,
) -> None:
    """Produce so many records, with timestamps that end so long ago and spread over so many seconds before."""
    admin = AdminClient({"bootstrap.servers": bootstrap})
    if topic not in admin.list_topics(timeout=10).topics:
        admin.create_topics([NewTopic(topic, partitions, 1)])[topic].result()
    producer = Producer(
        {
            "bootstrap.servers": bootstrap,
            "linger.ms": 50,
            "batch.size": 1_000_000,
            "queue.buffering.max.messages": 500_000,
            "compression.type": "lz4",
            # On a new topic a first request may fail, and its retry would come after later ones.
            "enable.idempotence": True,
        }
    )
    value, is_keyed = SHAPES[shape]
    begun_ms = int(time.time() * 1000) - (ago_seconds + spread_seconds) * 1000
    for number in range(records):
        fields: dict[str, Any] = {"partition": number % partitions}
        fields["timestamp"] = begun_ms + spread_seconds * 1000 * number // records
        if is_keyed:
            fields |= {"key": b"user-%05d" % (number % 99_991), "headers": [("source", b"web"), ("version", b"3")]}
        while True:
            try:
                producer.produce(topic, value(number), **fields)
                break
            except BufferError:
                producer.poll(0.05)
        if number % 10_000 == 0:
            producer.poll(0)
    producer.flush()


def bare_loop(config: dict[str, Any], topic: str, partitions: int, records: int, pipe: Connection) -> None:
    """The limit's process: consumes the records and forgets them. Sends the records per second."""
    gc.disable()
    consumer = Consumer(config)
    consumer.assign([KafkaPartition(topic, number, 0) for number in range(partitions)])
    seen, counted, started = 0, 0, 0.0
    while seen < records:
        messages = [message for message in consumer.consume(LOT, 1.0) if message.error() is None]
        seen += len(messages)
        if started:
            counted += len(messages)
        elif messages:
            started = time.monotonic()
    seconds = time.monotonic() - started
    consumer.close()
    pipe.send(counted / seconds)


def limit(stream: Stream, topic: str, records: int, partitions: int = PARTITIONS) -> float:
    config = consumer_config(stream.kafka_inputs[0], group="limit", limits=stream.limits)
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=bare_loop, args=(config, topic, partitions, records, there)
    )
    process.start()
    rate: float = here.recv()
    process.join()
    return rate


def receive(task: ReceiverTask, pipe: Connection) -> None:
    """The receiver's process: says how it ended and how much memory it took."""
    stop = threading.Event()

    def wait_for_the_end() -> None:
        pipe.recv()
        stop.set()

    threading.Thread(target=wait_for_the_end, daemon=True).start()
    report = run_receiver(task, stop)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    pipe.send((report, usage.ru_maxrss * 1024, usage.ru_utime + usage.ru_stime))


def define(
    bootstrap: str,
    topic: str,
    folder: Path,
    prefetch_mib: int,
    batch_by: BatchBy,
    *,
    delivery: Delivery = "exactly_once",
    receivers: int = 1,
) -> Stream:
    return Stream(
        name="bench",
        inputs=(KafkaInput(bootstrap_servers=bootstrap, topics=(topic,), receivers=receivers),),
        outputs=(ConsoleOutput(id="console"),),
        batch_interval="10 s",
        batch_by=batch_by,
        delivery=delivery,
        storage=str(folder / "storage"),
        ledger=f"sqlite:///{folder}/ledger.db",
        limits=Limits(prefetch_bytes=prefetch_mib * MIB),
    )


def measure(
    bootstrap: str,
    topic: str,
    records: int,
    folder: Path,
    stream: Stream,
    *,
    partitions: int = PARTITIONS,
    receivers: int = 1,
) -> dict[str, Any]:
    """Receive the backlog with ``receivers`` processes, to which the partitions are assigned in turn."""
    ledger = Ledger.open(stream.ledger)
    ledger.streams.register(stream.name, **Declared.by(stream).columns())
    job = ledger.jobs.acquire(stream.name, holder="benchmark", lease_ms=600_000, versions={})
    described = AdminClient({"bootstrap.servers": bootstrap}).list_topics(topic, timeout=10)
    assert len(described.topics[topic].partitions) == partitions
    topic_id = topic_id_of(bootstrap, topic)
    ledger.topics.observe(job, "records", [(topic, topic_id, partitions)])
    from_start = {TopicPartition(topic, topic_id, number): 0 for number in range(partitions)}
    ledger.positions.ensure_all(job, "records", from_start)
    pipes = []
    processes = []
    for index in range(receivers):
        scheduled = ledger.receivers.schedule(job, ReceiverId("bench", "records", index))
        here, there = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(
            target=receive, args=(ReceiverTask(stream.model_dump_json(), scheduled), there)
        )
        process.start()
        pipes.append(here)
        processes.append(process)
    deadline = time.monotonic() + 300
    while not all(row.host for row in ledger.receivers.all("bench")):
        assert time.monotonic() < deadline and all(process.is_alive() for process in processes)
        time.sleep(0.05)
    # Now that all of them have started: what their imports take is not part of the work.
    ledger.positions.assign(job, "records", {each: each.partition % receivers for each in from_start})
    while sum(row.next_offset for row in ledger.positions.all("bench")) < records:
        assert time.monotonic() < deadline and all(process.is_alive() for process in processes)
        time.sleep(0.05)
    for pipe in pipes:
        pipe.send("stop")
    reports, max_rss, cpu_seconds = zip(*[pipe.recv() for pipe in pipes], strict=True)
    for process in processes:
        process.join()
    blocks = [each.at_ms for each in ledger.events.page("bench", limit=100_000) if each.kind == "block_added"]
    # The first block's own making is part of the work: about one block interval before it was added.
    seconds = (blocks[-1] - blocks[0] + stream.block_interval_ms) / 1000
    log_bytes = sum(path.stat().st_size for path in (folder / "storage").rglob("*") if path.is_file())
    ledger.close()
    assert sum(report.records for report in reports) == records, reports
    return {
        "records": records,
        "seconds": round(seconds, 3),
        "records_per_second": round(records / seconds),
        "blocks": sum(report.blocks for report in reports),
        "max_rss_mib": round(max(max_rss) / MIB),
        "cpu_seconds": round(sum(cpu_seconds), 2),
        "log_mib": round(log_bytes / MIB, 1),
    }


def topic_id_of(bootstrap: str, topic: str) -> str:
    from confluent_kafka import TopicCollection

    admin = AdminClient({"bootstrap.servers": bootstrap})
    return str(admin.describe_topics(TopicCollection(topic_names=[topic]))[topic].result().topic_id)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=2_000_000)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="json")
    parser.add_argument("--prefetch-mib", type=int, default=128)
    parser.add_argument("--batch-by", choices=get_args(BatchBy), default="arrival")
    parser.add_argument("--delivery", choices=get_args(Delivery), nargs="+", default=["exactly_once"])
    parser.add_argument("--partitions", type=int, default=PARTITIONS)
    parser.add_argument("--receivers", type=int, default=1)
    parser.add_argument("--spread", type=int, default=600, help="seconds that the records' timestamps lie in")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    limits: list[float] = []
    rates: dict[str, list[float]] = {delivery: [] for delivery in options.delivery}
    with bench_folder() as folder, KafkaServer(folder / "kafka") as kafka:
        topic = f"bench-{uuid.uuid4().hex[:8]}"
        fill(
            kafka.bootstrap_servers,
            topic,
            options.records,
            options.spread,
            options.shape,
            partitions=options.partitions,
        )
        for number in range(options.rounds):
            for delivery in options.delivery:
                target = folder / f"round-{number}-{delivery}"
                target.mkdir()
                stream = define(
                    kafka.bootstrap_servers,
                    topic,
                    target,
                    options.prefetch_mib,
                    options.batch_by,
                    delivery=delivery,
                    receivers=options.receivers,
                )
                if len(limits) == number:
                    limits.append(limit(stream, topic, options.records, options.partitions))
                result = measure(
                    kafka.bootstrap_servers,
                    topic,
                    options.records,
                    target,
                    stream,
                    partitions=options.partitions,
                    receivers=options.receivers,
                )
                rates[delivery].append(result["records_per_second"])
                print(f"{number}: limit {limits[-1]:,.0f} records/s, {delivery} {result}", file=sys.stderr)
                shutil.rmtree(target)
    by_timestamp = " by timestamp" if options.batch_by == "timestamp" else ""
    name = f"receive a backlog{by_timestamp}, {options.shape} records"
    if options.partitions != PARTITIONS:
        name += f", {options.partitions} partitions"
    if options.receivers > 1:
        name += f", {options.receivers} receivers"
    measures = [
        Measure(f"{name}, {delivery}" if len(rates) > 1 else name, "records/s", tuple(found), LOOP, tuple(limits))
        for delivery, found in rates.items()
    ]
    print_measures(measures, as_json=options.json)


if __name__ == "__main__":
    main()
