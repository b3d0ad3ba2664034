"""What a receiver stored in the log is read again from Kafka by its ranges, to the byte, or it is said what is gone."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition

from headrace.blocks import BlockInfo
from headrace.kafka.errors import RangesGoneError, RangesUnreadableError, RecordsDifferError
from headrace.kafka.range_reader import KafkaRangeReader, RangeClients, check_ranges
from headrace.kafka.ranges import RecordedRange, deal
from headrace.stream import KafkaInput
from headrace.wal.reader import read_block
from headrace.wal.storage import open_storage


def blocks_of(rig: Any) -> list[BlockInfo]:
    return [
        block.info
        for each in rig.ledger.blocks.unclaimed("air", limit=100_000)
        for block in rig.ledger.allocations.blocks_of("air", each.batch_time_ms)
    ]


def recorded(blocks: Iterable[BlockInfo]) -> list[RecordedRange]:
    return [
        RecordedRange(taken.partition, taken.from_offset, taken.until_offset, taken.records)
        for block in blocks
        for taken in block.ranges
    ]


def in_order(batches: Iterable[pa.RecordBatch]) -> pa.Table:
    table = pa.Table.from_batches(list(batches))
    return table.sort_by([(name, "ascending") for name in ("topic", "partition", "offset")])


def log_of(rig: Any) -> pa.Table:
    log = open_storage(rig.stream.folder_url).below("log")
    return in_order(read_block(log, block.handle)[1] for block in blocks_of(rig))


def replay(source: KafkaInput, ranges: list[RecordedRange], tasks: int = 1, **options: Any) -> list[pa.RecordBatch]:
    clients = RangeClients.of(source)
    dealt = deal(ranges, tasks, min_task_records=1)
    check_ranges(clients, [run for task in dealt for run in task])
    found: list[pa.RecordBatch] = []
    for task in dealt:
        with KafkaRangeReader(clients, **{"stall_seconds": 30.0, **options}) as reader:
            found += reader.read(task)
    return found


def assert_same(rig: Any, tasks: int = 1) -> pa.Table:
    """What the log has, Kafka gives again; the log's records."""
    log = log_of(rig)
    again = in_order(replay(rig.stream.inputs[0], recorded(blocks_of(rig)), tasks))
    assert again.schema == log.schema
    assert again.equals(log)
    return log


def transact(rig: Any, records: int, *, abort: bool, tag: str = "t") -> None:
    producer = Producer({"bootstrap.servers": rig.bootstrap, "transactional.id": f"{rig.prefix}-{abort}"})
    producer.init_transactions(30)
    producer.begin_transaction()
    for number in range(records):
        producer.produce(rig.topic, f"{tag}-{number}".encode(), partition=0)
    producer.flush(30)
    producer.abort_transaction(30) if abort else producer.commit_transaction(30)


def records_left(rig: Any) -> int:
    """How many records partition 0 has, from its beginning to its end."""
    consumer = Consumer({"bootstrap.servers": rig.bootstrap, "group.id": "probe", "enable.partition.eof": True})
    consumer.assign([TopicPartition(rig.topic, 0, 0)])
    found = 0
    try:
        while True:
            message = consumer.poll(20)
            assert message is not None, "Kafka does not answer"
            if (error := message.error()) is not None:
                assert error.code() == KafkaError._PARTITION_EOF, error
                return found
            found += 1
    finally:
        consumer.close()


def expire(rig: Any, partition: int, before: int) -> None:
    """Let Kafka delete the records before this offset."""
    rig.admin.delete_records([TopicPartition(rig.topic, partition, before)])[
        TopicPartition(rig.topic, partition)
    ].result()


def test_every_kind_of_record_is_the_same_again(rig: Any) -> None:
    rig.create(max_message_bytes="2000000", retention_ms="-1")
    producer = Producer({"bootstrap.servers": rig.bootstrap, "message.max.bytes": 2_000_000})
    producer.produce(rig.topic, b"plain", partition=0, timestamp=1_700_000_000_123)
    producer.produce(rig.topic, None, key=b"tombstone", partition=0)
    producer.produce(rig.topic, b"", key=b"", partition=0, headers=[("a", b"1"), ("a", None), ("b", "é".encode())])
    producer.produce(rig.topic, os.urandom(900_000), key=b"\x00\xff", partition=1, headers=[("", b"")])
    producer.produce(rig.topic, b"in the year 1970", partition=1, timestamp=1)
    assert producer.flush(30) == 0
    rig.begin(rig.define())
    rig.await_positions({(rig.topic, 0): 3, (rig.topic, 1): 2})
    rig.end()
    log = assert_same(rig)
    assert log.column("value").to_pylist()[:3] == [b"plain", None, b""]
    assert_same(rig, tasks=3)


def test_log_append_time_is_the_same_again(rig: Any) -> None:
    rig.create(message_timestamp_type="LogAppendTime")
    rig.produce(5)
    rig.begin(rig.define())
    rig.await_positions({(rig.topic, 0): 5, (rig.topic, 1): 0})
    rig.end()
    assert set(assert_same(rig).column("timestampType").to_pylist()) == {1}


def test_many_records_of_many_blocks_in_any_number_of_tasks(rig: Any) -> None:
    rig.create(partitions=3)
    rig.begin(rig.define())
    for round_ in range(5):
        for partition in range(3):
            rig.produce(2_000, partition=partition, tag=f"{round_}-{partition}")
        rig.await_positions({(rig.topic, partition): 2_000 * (round_ + 1) for partition in range(3)})
    rig.end()
    # What came since is not the batches'.
    rig.produce(1_000)
    assert len(blocks_of(rig)) > 3
    assert_same(rig, tasks=1)
    assert_same(rig, tasks=7)


def test_aborted_transactions_leave_holes_also_at_the_end(rig: Any) -> None:
    rig.create(partitions=1)
    rig.produce(10)
    transact(rig, 11, abort=True)
    rig.begin(rig.define())
    rig.await_positions({(rig.topic, 0): 22})
    transact(rig, 5, abort=False)
    rig.await_positions({(rig.topic, 0): 28})
    transact(rig, 3, abort=True, tag="last")
    rig.await_positions({(rig.topic, 0): 32})
    rig.end()
    assert log_of(rig).num_rows == 15
    assert_same(rig)
    # A whole that ends with what was aborted, however it is cut.
    whole = [RecordedRange(blocks_of(rig)[0].ranges[0].partition, 0, 32, 15)]
    assert in_order(replay(rig.stream.inputs[0], whole)).equals(log_of(rig))
    # Another isolation level reads other records, and that is no replay.
    loose = rig.stream.inputs[0].model_copy(update={"client": {"isolation.level": "read_uncommitted"}})
    with pytest.raises(RecordsDifferError, match=r"15 recorded, 29 read.*isolation\.level"):
        replay(loose, whole)


def test_a_compacted_topic_is_read_again_until_records_are_gone(rig: Any) -> None:
    """Then the error says how many are gone."""
    rig.create(
        partitions=1,
        cleanup_policy="compact",
        segment_ms="100",
        min_cleanable_dirty_ratio="0.01",
        min_compaction_lag_ms="0",
        max_compaction_lag_ms="100",
        delete_retention_ms="100",
    )
    # All in the active segment, which is never compacted.
    rig.produce(1, key=b"same", tag="first")
    rig.produce(19, key=b"same")
    rig.begin(rig.define())
    rig.await_positions({(rig.topic, 0): 20})
    rig.end()
    assert_same(rig)
    # A record that is younger rolls the segment.
    rig.produce(1, key=b"other", timestamp=int(time.time() * 1000) + 1_000)
    until = time.monotonic() + 120
    while (left := records_left(rig)) == 21:
        assert time.monotonic() < until, "Kafka has not compacted the topic"
    with pytest.raises(RecordsDifferError, match=r"of 20 records are gone from Kafka.*Compacted") as reported:
        replay(rig.stream.inputs[0], recorded(blocks_of(rig)))
    assert f"{21 - left} of" in str(reported.value)
    assert rig.topic in str(reported.value)


def test_gone_ranges_of_all_partitions_are_named_before_reading(rig: Any) -> None:
    rig.create(partitions=3, retention_ms="-1")
    for partition in range(3):
        rig.produce(10, partition=partition, timestamp=1_700_000_000_000)
        rig.produce(10, partition=partition, timestamp=1_700_000_060_000)
    rig.begin(rig.define())
    rig.await_positions({(rig.topic, partition): 20 for partition in range(3)})
    rig.end()
    expire(rig, 0, 10)
    expire(rig, 2, 20)
    with pytest.raises(RangesGoneError) as reported:
        replay(rig.stream.inputs[0], recorded(blocks_of(rig)))
    text = str(reported.value)
    assert f"{rig.topic}-0 [0, 10), of ranges with 20 records, is gone" in text
    assert "Kafka keeps offsets from 10 on, records since 2023-11-14T22:14:20Z" in text
    assert f"{rig.topic}-2 [0, 20), of ranges with 20 records, is gone" in text
    assert "Kafka keeps offsets from 20 on, and no record" in text
    assert f"{rig.topic}-1" not in text


def test_what_is_left_is_replayed_if_only_older_records_are_gone(rig: Any) -> None:
    rig.create(partitions=1)
    rig.produce(10)
    rig.begin(rig.define())
    rig.await_positions({(rig.topic, 0): 10})
    rig.produce(10, tag="later")
    rig.await_positions({(rig.topic, 0): 20})
    rig.end()
    later = [block for block in blocks_of(rig) if block.ranges[0].from_offset >= 10]
    expire(rig, 0, 10)
    again = in_order(replay(rig.stream.inputs[0], recorded(later)))
    assert again.column("value").to_pylist() == [b"later-%d" % number for number in range(10)]


def test_retention_that_comes_while_ranges_are_read_is_reported(rig: Any) -> None:
    rig.create(partitions=1)
    rig.produce(100)
    rig.begin(rig.define())
    rig.await_positions({(rig.topic, 0): 100})
    rig.end()
    runs = [run for task in deal(recorded(blocks_of(rig)), 1) for run in task]
    clients = RangeClients.of(rig.stream.inputs[0])
    check_ranges(clients, runs)
    expire(rig, 0, 50)
    with KafkaRangeReader(clients, stall_seconds=30) as reader, pytest.raises(RangesGoneError, match="from 50 on"):
        list(reader.read(runs))


def test_a_topic_that_is_gone_or_was_created_again_is_reported(rig: Any) -> None:
    rig.create(partitions=1)
    rig.produce(3, tag="old")
    rig.begin(rig.define())
    rig.await_positions({(rig.topic, 0): 3})
    rig.end()
    runs = [run for task in deal(recorded(blocks_of(rig)), 1) for run in task]
    clients = RangeClients.of(rig.stream.inputs[0])
    reader = KafkaRangeReader(clients, stall_seconds=30)
    rig.admin.delete_topics([rig.topic])[rig.topic].result()
    until = time.monotonic() + 60
    while True:
        try:
            check_ranges(clients, runs)
        except RangesGoneError as error:
            assert "the topic was deleted" in str(error)
            break
        assert time.monotonic() < until
    while True:
        try:
            rig.create(partitions=1)
            break
        except Exception:
            assert time.monotonic() < until
            time.sleep(0.1)
    rig.produce(5, tag="new")
    with pytest.raises(RangesGoneError, match=r"deleted and created again \(its id was"):
        check_ranges(clients, runs)
    # Created again after the check: its records are under the old offsets, and yet they are not taken for the old.
    with reader, pytest.raises(RangesGoneError, match="while it was read"):
        list(reader.read(runs))


def test_a_silent_broker_is_an_error_in_bounded_time(rig: Any) -> None:
    rig.create(partitions=1)
    rig.produce(3)
    rig.begin(rig.define())
    rig.await_positions({(rig.topic, 0): 3})
    rig.end()
    runs = [run for task in deal(recorded(blocks_of(rig)), 1) for run in task]
    nowhere = RangeClients.of(KafkaInput(bootstrap_servers="127.0.0.1:1", topics=rig.topic))
    begun = time.monotonic()
    with pytest.raises(RangesUnreadableError, match=rig.topic):
        check_ranges(nowhere, runs)
    assert time.monotonic() - begun < 30
    with (
        KafkaRangeReader(nowhere, stall_seconds=1) as reader,
        pytest.raises(RangesUnreadableError, match=rf"missing is {rig.topic}-0 \[0, 3\) from offset 0 on.*127.0.0.1"),
    ):
        list(reader.read(runs))
