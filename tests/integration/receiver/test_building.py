"""A batch from before the stream, built by timestamps from a real Kafka and read from it."""

from __future__ import annotations

from typing import Any

import pytest
from confluent_kafka import Producer, TopicPartition

from headrace.batch.build_from_kafka import BatchBuildError, build_from_kafka
from headrace.batch.manifest import Manifest
from headrace.kafka.errors import RangesUnreadableError
from headrace.kafka.range_reader import KafkaRangeReader, RangeClients, check_ranges
from headrace.kafka.ranges import deal
from headrace.stream_context import StreamContext


def produce(rig: Any, partition: int, *timestamps: int) -> None:
    # One after the other, so that each is a batch of Kafka's, and several in one.
    producer = Producer({"bootstrap.servers": rig.bootstrap, "linger.ms": 5})
    for number, timestamp in enumerate(timestamps):
        producer.produce(rig.topic, b"%d" % timestamp, partition=partition, timestamp=timestamp)
        if number % 3 == 0:
            producer.flush(30)
    assert producer.flush(30) == 0


def create(rig: Any, topic: str | None = None, partitions: int = 1) -> None:
    # The records are of the past: Kafka's own retention would take them in the middle of a test.
    rig.create(topic, partitions, retention_ms="-1")


def build(rig: Any, batch_time_ms: int) -> list[int]:
    """Build the batch; the values of its records, as they are read."""
    batch = build_from_kafka(StreamContext(rig.stream, rig.ledger), batch_time_ms).batch
    manifest = Manifest.load(batch.manifest_uri, sha256=batch.manifest_sha256)
    clients = RangeClients.of(rig.stream.inputs[0])
    found: list[int] = []
    for task in deal(manifest.ranges(rig.stream.inputs[0].id), 4, min_task_records=1):
        check_ranges(clients, task)
        with KafkaRangeReader(clients, stall_seconds=30) as reader:
            found += [int(value) for each in reader.read(task) for value in each.column("value").to_pylist()]
    return sorted(found)


def begin(rig: Any, count: int, **source: Any) -> int:
    """Start the stream at its latest; its zero time."""
    rig.begin(rig.define(starting_offsets="latest", **source))
    rig.eventually(lambda: len(rig.positions()) == count)
    return int(rig.ledger.streams.get("air").zero_time_ms)


def test_batches_before_the_stream_follow_kafkas_timestamps(rig: Any) -> None:
    create(rig, partitions=3)
    base = 1_700_000_000_000
    produce(rig, 0, *(base + shift for shift in (0, 300, 999, 1_000, 1_500, 2_000)))
    # Out of order: what comes after the first of an interval is of that interval, or a later one.
    produce(rig, 1, *(base + shift for shift in (100, 1_200, 400, 1_100, 2_500, 1_300)))
    transactional = Producer({"bootstrap.servers": rig.bootstrap, "transactional.id": rig.prefix})
    transactional.init_transactions(30)
    for end in (transactional.abort_transaction, transactional.commit_transaction):
        transactional.begin_transaction()
        transactional.produce(rig.topic, b"%d" % (base + 1_700), partition=2, timestamp=base + 1_700)
        transactional.flush(30)
        end(30)
    begin(rig, 3)
    rig.produce(10)
    rig.await_positions({(rig.topic, 0): 16, (rig.topic, 1): 6, (rig.topic, 2): 4})
    rig.end()
    assert build(rig, base + 2_000) == [base + shift for shift in (400, 1_000, 1_100, 1_200, 1_500, 1_700)]
    assert build(rig, base + 1_000) == [base + shift for shift in (0, 100, 300, 999)]
    assert build(rig, base + 3_000) == [base + shift for shift in (1_300, 2_000, 2_500)]
    assert build(rig, base + 4_000) == []
    before = rig.ledger.batches.get("air", base + 2_000)
    assert build(rig, base + 2_000) == [base + shift for shift in (400, 1_000, 1_100, 1_200, 1_500, 1_700)]
    assert rig.ledger.batches.get("air", base + 2_000) == before


def test_topics_by_a_pattern_are_built_together(rig: Any) -> None:
    base = 1_700_000_000_000
    for topic in ("one", "two"):
        create(rig, f"{rig.prefix}-{topic}")
        rig.produce(2, topic=f"{rig.prefix}-{topic}", timestamp=base, tag="x")
    begin(rig, 2, topic_pattern=f"{rig.prefix}-.*")
    rig.end()
    inputs = build_from_kafka(StreamContext(rig.stream, rig.ledger), base + 1_000).inputs
    assert [(row.partition.topic, row.from_offset, row.until_offset) for row in inputs] == [
        (f"{rig.prefix}-one", 0, 2),
        (f"{rig.prefix}-two", 0, 2),
    ]


def test_retention_within_the_interval_is_an_error_with_its_time(rig: Any) -> None:
    create(rig)
    base = 1_700_000_000_000
    produce(rig, 0, base + 100, base + 200, base + 1_100, base + 1_200)
    begin(rig, 1)
    rig.end()
    rig.admin.delete_records([TopicPartition(rig.topic, 0, 1)])[TopicPartition(rig.topic, 0)].result()
    with pytest.raises(BatchBuildError, match=rf"{rig.topic}-0: Kafka keeps offsets from 1 on, records since 2023-"):
        build(rig, base + 1_000)
    assert build(rig, base + 2_000) == [base + 1_100, base + 1_200]


def test_a_broker_that_does_not_answer_is_an_error(rig: Any) -> None:
    create(rig)
    begin(rig, 1)
    rig.end()
    source = rig.stream.inputs[0].model_copy(update={"bootstrap_servers": "127.0.0.1:1"})
    stream = rig.stream.model_copy(update={"inputs": (source,)})
    with pytest.raises(RangesUnreadableError, match="Kafka does not answer with the topics"):
        build_from_kafka(StreamContext(stream, rig.ledger), 1_700_000_000_000)
