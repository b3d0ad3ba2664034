"""From a real Kafka into the log and the ledger."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
from confluent_kafka import Consumer, ConsumerGroupTopicPartitions, KafkaError, KafkaException, Producer, TopicPartition

from headrace.ledger import EventKind, PartitionState, ReceiverState
from headrace.receiver.tracker import TrackerEnd
from headrace.stream import Limits


def test_every_kind_of_record_arrives_whole(rig: Any) -> None:
    rig.create(max_message_bytes="2000000")
    producer = Producer({"bootstrap.servers": rig.bootstrap, "message.max.bytes": 2_000_000})
    producer.produce(rig.topic, b"plain", partition=0, timestamp=1_700_000_000_123)
    producer.produce(rig.topic, None, key=b"tombstone", partition=0)
    producer.produce(rig.topic, b"", key=b"", partition=0, headers=[("a", b"1"), ("a", None), ("b", "é".encode())])
    producer.produce(rig.topic, os.urandom(900_000), partition=0)
    assert producer.flush(30) == 0
    rig.begin(rig.define())
    rig.await_positions({(rig.topic, 0): 4, (rig.topic, 1): 0})
    rows = rig.rows()
    assert [row["value"] for row in rows[:3]] == [b"plain", None, b""]
    assert [row["key"] for row in rows[:3]] == [None, b"tombstone", b""]
    assert len(rows[3]["value"]) == 900_000
    assert rows[0]["timestamp"].timestamp() == 1_700_000_000.123
    assert [(each["key"], each["value"]) for each in rows[2]["headers"]] == [
        ("a", b"1"),
        ("a", None),
        ("b", "é".encode()),
    ]
    rig.eventually(lambda: committed(rig) == {0: 4})
    rig.end()


def committed_by_topic(rig: Any) -> dict[tuple[str, int], int]:
    group = rig.stream.inputs[0].group
    answer = rig.admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions(group)])[group].result()
    return {(each.topic, each.partition): each.offset for each in answer.topic_partitions if each.offset >= 0}


def committed(rig: Any) -> dict[int, int]:
    return {partition: offset for (_, partition), offset in committed_by_topic(rig).items()}


@pytest.mark.parametrize("count", [1, 3])
def test_every_topic_is_received_and_committed(rig: Any, count: int) -> None:
    """As Spark's ReliableKafkaStreamSuite: what was stored, and nothing before it, is committed for each topic."""
    topics = tuple(f"{rig.prefix}-{number}" for number in range(count))
    for topic in topics:
        rig.create(topic, 1)
        for word, times in (("a", 5), ("b", 3), ("c", 10)):
            rig.produce(times, topic=topic, tag=f"{topic}-{word}")
    rig.begin(rig.define(topics=topics))
    rig.await_positions({(topic, 0): 18 for topic in topics})
    rig.eventually(lambda: committed_by_topic(rig) == {(topic, 0): 18 for topic in topics})
    rig.end()
    values = sorted(row["value"] for row in rig.rows())
    assert values == sorted(
        f"{topic}-{word}-{number}".encode()
        for topic in topics
        for word, times in (("a", 5), ("b", 3), ("c", 10))
        for number in range(times)
    )


def test_a_rate_per_partition_holds_for_a_busy_partition_only(rig: Any) -> None:
    rig.create()
    producer = Producer({"bootstrap.servers": rig.bootstrap})
    for number in range(20_000):
        producer.produce(rig.topic, b"%d" % number, partition=0)
    for number in range(50):
        producer.produce(rig.topic, b"%d" % number, partition=1)
    assert producer.flush(30) == 0
    began = time.monotonic()
    rig.begin(rig.define(limits=Limits(max_rate_per_partition=500, max_rate=10_000)))
    rig.eventually(lambda: rig.positions().get((rig.topic, 0), 0) >= 500)
    reading = time.monotonic()
    rig.eventually(lambda: rig.positions()[(rig.topic, 0)] >= 2_500)
    # Four seconds' worth. Not much less than the rate, either.
    assert time.monotonic() - reading < 8
    assert rig.positions()[(rig.topic, 1)] == 50
    rig.end()
    reached = rig.positions()[(rig.topic, 0)]
    # The first second's worth comes at once.
    assert reached <= 500 * (time.monotonic() - began + 1)
    assert rig.offsets()[(rig.topic, 0)] == list(range(reached))


def test_a_restarted_stream_goes_on_at_the_ledgers_position(rig: Any) -> None:
    rig.create()
    rig.produce(100)
    rig.begin(rig.define())
    rig.await_positions({(rig.topic, 0): 100, (rig.topic, 1): 0})
    assert rig.end().end is TrackerEnd.STOPPED
    rig.produce(50, tag="later")
    rig.begin(rig.define())
    rig.await_positions({(rig.topic, 0): 150, (rig.topic, 1): 0})
    rig.end()
    assert rig.offsets() == {(rig.topic, 0): list(range(150))}


def test_kill_9_in_mid_flow_loses_and_doubles_nothing(rig: Any, killable: Any) -> None:
    rig.create()
    rig.launcher = killable
    rig.begin(rig.define())
    producing = threading.Event()

    def produce() -> None:
        producer = Producer({"bootstrap.servers": rig.bootstrap, "linger.ms": 5})
        number = 0
        while not producing.is_set() and number < 200_000:
            producer.produce(rig.topic, b"%d" % number, partition=number % 2)
            number += 1
            if number % 500 == 0:
                producer.poll(0)
                producing.wait(0.01)
        producer.flush(30)
        rig.produced = number

    thread = threading.Thread(target=produce)
    thread.start()
    for life in range(3):
        before = sum(rig.positions().values())
        rig.eventually(lambda before=before: sum(rig.positions().values()) > before + 2_000)
        process = killable.handles[-1].process
        os.kill(process.pid, signal.SIGKILL)
        rig.eventually(lambda life=life: len(killable.handles) == life + 2)
    producing.set()
    thread.join(60)
    total = rig.produced
    rig.await_positions({(rig.topic, 0): (total + 1) // 2, (rig.topic, 1): total // 2})
    rig.end()
    assert rig.offsets() == {
        (rig.topic, 0): list(range((total + 1) // 2)),
        (rig.topic, 1): list(range(total // 2)),
    }


def test_positions_pass_aborted_transactions(rig: Any) -> None:
    rig.create(partitions=1)

    def transact(records: int, *, abort: bool) -> None:
        producer = Producer({"bootstrap.servers": rig.bootstrap, "transactional.id": f"{rig.prefix}-{abort}"})
        producer.init_transactions(30)
        producer.begin_transaction()
        for number in range(records):
            producer.produce(rig.topic, f"{abort}-{number}".encode(), partition=0)
        producer.flush(30)
        producer.abort_transaction(30) if abort else producer.commit_transaction(30)

    rig.produce(10)
    transact(11, abort=True)
    rig.begin(rig.define())
    rig.await_positions({(rig.topic, 0): 22})
    transact(5, abort=False)
    rig.await_positions({(rig.topic, 0): 28})
    rig.end()
    assert rig.offsets() == {(rig.topic, 0): [*range(10), *range(22, 27)]}


def test_holes_of_compaction_are_passed(rig: Any) -> None:
    # Every record is old enough to be compacted and rolls the segment before it: the broker goes by their times.
    rig.create(
        partitions=1,
        cleanup_policy="compact",
        segment_ms="100",
        min_cleanable_dirty_ratio="0.01",
        min_compaction_lag_ms="0",
        max_compaction_lag_ms="100",
        delete_retention_ms="100",
    )
    begun_ms = int(time.time() * 1000) - 60_000
    for number in range(20):
        rig.produce(1, key=b"same", tag=str(number), timestamp=begun_ms + number * 1_000)
    rig.produce(1, key=b"other")

    def left() -> int:
        """How many records the partition has, from its beginning to its end."""
        consumer = Consumer({"bootstrap.servers": rig.bootstrap, "group.id": "probe", "enable.partition.eof": True})
        consumer.assign([TopicPartition(rig.topic, 0, 0)])
        records = 0
        try:
            while True:
                message = consumer.poll(20)
                assert message is not None, "Kafka does not answer"
                if message.error() is not None:
                    assert message.error().code() == KafkaError._PARTITION_EOF, message.error()
                    return records
                records += 1
        finally:
            consumer.close()

    # The broker's cleaner looks every 15 s.
    until = time.monotonic() + 120
    while left() == 21:
        assert time.monotonic() < until, "Kafka has not compacted the topic, so there is no hole to pass"
    rig.begin(rig.define())
    rig.await_positions({(rig.topic, 0): 21})
    rig.end()
    offsets = rig.offsets()[rig.topic, 0]
    assert offsets[-1] == 20
    assert offsets == sorted(set(offsets))
    assert len(offsets) < 21, "no hole was passed"


def test_a_topics_new_partitions_are_read_from_the_beginning(rig: Any) -> None:
    rig.create(partitions=1)
    rig.produce(10)
    rig.begin(rig.define(starting_offsets="latest"))
    rig.await_positions({(rig.topic, 0): 10})
    rig.grow(3)
    rig.eventually(lambda: len(rig.positions()) == 3)
    rig.produce(5, partition=2)
    rig.await_positions({(rig.topic, 0): 10, (rig.topic, 1): 0, (rig.topic, 2): 5})
    rig.end()
    assert len(rig.ledger.events.page("air", kinds=[EventKind.PARTITIONS_GREW])) == 1


def test_a_new_topic_joins_by_the_pattern(rig: Any) -> None:
    rig.create(f"{rig.prefix}-one", 1)
    rig.begin(rig.define(topic_pattern=f"{rig.prefix}-.*"))
    rig.eventually(lambda: len(rig.positions()) == 1)
    rig.create(f"{rig.prefix}-two", 1)
    rig.produce(7, topic=f"{rig.prefix}-two")
    rig.await_positions({(f"{rig.prefix}-one", 0): 0, (f"{rig.prefix}-two", 0): 7})
    rig.end()


def recreate(rig: Any, *, partitions: int) -> None:
    rig.admin.delete_topics([rig.topic])[rig.topic].result()
    until = time.monotonic() + 30
    while True:
        try:
            rig.create(partitions=partitions)
            break
        except KafkaException:
            assert time.monotonic() < until
            time.sleep(0.1)


def test_a_topic_created_again_is_another_incarnation(rig: Any) -> None:
    rig.create(partitions=1)
    rig.produce(3, tag="old")
    rig.begin(rig.define())
    rig.await_positions({(rig.topic, 0): 3})
    recreate(rig, partitions=1)
    rig.produce(10, tag="new")
    rig.await_positions({(rig.topic, 0): 10})
    rig.end()
    rows = rig.rows()
    assert [row["offset"] for row in rows if row["incarnation"] == 1] == [0, 1, 2]
    assert [row["value"] for row in rows if row["incarnation"] == 2] == [b"new-%d" % number for number in range(10)]


def test_a_topic_created_again_unseen_is_recognised_by_its_id(rig: Any) -> None:
    """With fewer partitions, and grown past the old position: by offsets alone it would pass for the old one."""
    rig.create(partitions=2)
    rig.produce(5, tag="old")
    rig.produce(5, tag="old", partition=1)
    rig.begin(rig.define())
    rig.await_positions({(rig.topic, 0): 5, (rig.topic, 1): 5})
    rig.end()
    recreate(rig, partitions=1)
    rig.produce(20, tag="new")
    rig.begin(rig.define())
    rig.await_positions({(rig.topic, 0): 20})
    rig.end()
    (event,) = rig.ledger.events.page("air", kinds=[EventKind.TOPIC_RECREATED])
    assert rig.topic in str(event.payload)
    rows = rig.rows()
    assert [row["value"] for row in rows if row["incarnation"] == 2] == [b"new-%d" % number for number in range(20)]
    assert len([row for row in rows if row["incarnation"] == 1]) == 10


def test_a_deleted_topic_ends_its_partitions_and_no_others(rig: Any) -> None:
    other = f"{rig.prefix}-other"
    rig.create(partitions=1)
    rig.create(other, 1)
    rig.produce(5)
    rig.begin(rig.define(topics=(rig.topic, other)))
    rig.await_positions({(rig.topic, 0): 5, (other, 0): 0})
    rig.admin.delete_topics([rig.topic])[rig.topic].result()
    rig.eventually(lambda: set(rig.positions()) == {(other, 0)})
    (ended,) = [row for row in rig.ledger.positions.all("air") if row.partition.topic == rig.topic]
    assert (ended.state, ended.error) == (PartitionState.ENDED, "the topic was deleted")
    rig.produce(5, topic=other)
    rig.await_positions({(other, 0): 5})
    (row,) = rig.ledger.receivers.all("air")
    assert row.restarts == 0
    rig.end()


def test_two_receivers_share_and_the_one_left_takes_over(rig: Any, killable: Any) -> None:
    rig.create(partitions=4)
    rig.launcher = killable
    rig.begin(rig.define(receivers=2), restart_seconds=12.0)

    def owners() -> list[int]:
        indexes = [row.receiver_index for row in rig.ledger.positions.all("air")]
        return sorted(-1 if index is None else index for index in indexes)

    rig.eventually(lambda: owners() == [0, 0, 1, 1])
    for partition in range(4):
        rig.produce(100, partition=partition)
    rig.await_positions({(rig.topic, partition): 100 for partition in range(4)})
    killable.handles[0].process.kill()
    rig.eventually(lambda: len(set(owners())) == 1)
    for partition in range(4):
        rig.produce(100, partition=partition, tag="more")
    rig.await_positions({(rig.topic, partition): 200 for partition in range(4)})
    rig.eventually(lambda: owners() == [0, 0, 1, 1], 90)
    rig.end()
    assert rig.offsets() == {(rig.topic, partition): list(range(200)) for partition in range(4)}


def test_a_stop_drains_a_receiver_under_load(rig: Any, killable: Any) -> None:
    rig.create()
    rig.produce(60_000)
    rig.launcher = killable
    rig.begin(rig.define())
    rig.eventually(lambda: sum(rig.positions().values()) > 0)
    assert rig.end().end is TrackerEnd.STOPPED
    (row,) = rig.ledger.receivers.all("air")
    assert row.state is ReceiverState.STOPPED
    stored = rig.offsets()[rig.topic, 0]
    assert stored == list(range(rig.positions()[rig.topic, 0]))
    # The drained receiver committed what it had stored, before it left.
    assert committed(rig) == {0: len(stored)}


def test_a_foreign_group_member_makes_only_commits_fail(rig: Any) -> None:
    rig.create(partitions=1)
    stream = rig.define()
    rogue = Consumer({"bootstrap.servers": rig.bootstrap, "group.id": stream.inputs[0].group, "client.id": "rogue"})
    rogue.subscribe([rig.topic])
    until = time.monotonic() + 30
    while not rogue.assignment() and time.monotonic() < until:
        rogue.poll(0.1)
    assert rogue.assignment()
    rig.begin(stream)
    rig.produce(100)
    rig.await_positions({(rig.topic, 0): 100})

    def reported() -> bool:
        rogue.poll(0)
        errors = rig.ledger.events.page("air", kinds=[EventKind.RECEIVER_ERROR])
        failures = rig.stats().get("commit_failures", 0)
        return failures > 0 and any("rogue" in str(event.payload) for event in errors)

    rig.eventually(reported)
    rogue.close()
    rig.produce(10, tag="more")
    rig.await_positions({(rig.topic, 0): 110})
    rig.eventually(lambda: committed(rig) == {0: 110})
    rig.end()
    assert rig.offsets() == {(rig.topic, 0): list(range(110))}


@pytest.mark.parametrize("wish", ["latest", "timestamp", "offsets"])
def test_where_a_stream_begins(rig: Any, wish: str) -> None:
    rig.create(partitions=1)
    rig.produce(10, timestamp=1_000)
    rig.produce(10, timestamp=2_000)
    starting: Any = {
        "latest": "latest",
        "timestamp": {"timestamp_ms": 1_500},
        "offsets": {"offsets": {rig.topic: {0: 15}}},
    }[wish]
    rig.begin(rig.define(starting_offsets=starting))
    rig.eventually(lambda: rig.positions() != {})
    rig.produce(5)
    rig.await_positions({(rig.topic, 0): 25})
    rig.end()
    assert rig.offsets()[rig.topic, 0][0] == {"latest": 20, "timestamp": 10, "offsets": 15}[wish]
