"""What Kafka has no more, serves damaged, has given to other records, or refuses: on one broker of these tests' own."""

from __future__ import annotations

import os
import shutil
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    ResourcePatternType,
    ResourceType,
)
from tests.integration.receiver.kafka_bytes import batches_of, cut_off

from headrace.devstack.kafka import KafkaServer
from headrace.kafka.errors import RecordsReplacedError
from headrace.kafka.range_reader import RangeClients
from headrace.ledger import EventKind, PartitionState
from headrace.receiver import kafka_errors
from headrace.receiver.kafka_errors import KafkaEvidence, OffsetGaps

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server() -> Iterator[KafkaServer]:
    folder = Path(tempfile.mkdtemp(prefix="headrace-test-"))
    try:
        properties = {
            "log.retention.check.interval.ms": "500",
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "allow.everyone.if.no.acl.found": "true",
        }
        with KafkaServer(folder, properties=properties) as server:
            yield server
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def rig(server: KafkaServer, make_rig: Callable[[str], Any]) -> Any:
    return make_rig(server.bootstrap_servers)


def folder_of(server: KafkaServer, rig: Any, partition: int = 0) -> Path:
    return server.folder / "data" / f"{rig.topic}-{partition}"


def gaps(rig: Any) -> list[tuple[str, int, int, int]]:
    return sorted(
        (gap.partition.topic, gap.partition.partition, gap.from_offset, gap.until_offset)
        for gap in rig.ledger.gaps.page("air")
    )


def state_of(rig: Any, partition: int) -> tuple[PartitionState, str]:
    (row,) = [row for row in rig.ledger.positions.all("air") if row.partition.partition == partition]
    return row.state, row.error or ""


def assert_reported(rig: Any, wanted: list[tuple[str, int, int, int]]) -> None:
    """In the ledger, as events and in the receiver's numbers."""
    assert gaps(rig) == wanted
    events = [event.payload for event in rig.ledger.events.page("air", kinds=[EventKind.GAP])]
    assert [(e["topic"], e["partition"], e["from_offset"], e["until_offset"]) for e in events] == wanted
    lost = sum(until - begin for _, _, begin, until in wanted)
    rig.eventually(lambda: rig.stats().get("lost_offsets") == lost)


@pytest.mark.parametrize("how", ["deleted", "retention"])
def test_what_retention_took_stops_its_partition_or_is_a_gap(rig: Any, how: str) -> None:
    """By on_lost_offsets: "fail" stops the partition, and "reset" records the gap."""
    rig.create(partitions=2)
    rig.produce(100, timestamp=int(time.time() * 1000))
    rig.begin(rig.define())
    rig.await_positions({(rig.topic, 0): 100, (rig.topic, 1): 0})
    rig.end()
    rig.produce(50, tag="lost")
    if how == "deleted":
        target = TopicPartition(rig.topic, 0, 150)
        rig.admin.delete_records([target])[target].result()
    else:
        rig.configure(retention_ms="1", segment_ms="1")
        rig.eventually(lambda: rig.first_offset(0) == 150)
        rig.configure(retention_ms="-1", segment_ms="604800000")
    rig.produce(50, tag="kept")

    rig.begin(rig.define(on_lost_offsets="fail"))
    rig.eventually(lambda: state_of(rig, 0)[0] is PartitionState.FAILED)
    assert "offsets [100, 150) are gone" in state_of(rig, 0)[1]
    (failed,) = rig.ledger.events.page("air", kinds=[EventKind.PARTITION_FAILED])
    assert "[100, 150)" in str(failed.payload)
    rig.produce(10, partition=1)
    rig.await_positions({(rig.topic, 0): 100, (rig.topic, 1): 10})
    rig.eventually(lambda: rig.stats().get("failed") == 1)
    rig.end()

    rig.begin(rig.define(on_lost_offsets="reset"))
    rig.await_positions({(rig.topic, 0): 200, (rig.topic, 1): 10})
    assert_reported(rig, [(rig.topic, 0, 100, 150)])
    rig.end()
    assert rig.offsets() == {(rig.topic, 0): [*range(100), *range(150, 200)], (rig.topic, 1): list(range(10))}


def test_a_damaged_batch_fails_its_partition_until_it_is_deleted(
    rig: Any, server: KafkaServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The records around the batch are received; none of its offsets is skipped before a person deletes them."""
    monkeypatch.setattr(kafka_errors, "FIRST_BACKOFF_SECONDS", 0.01)
    rig.create(partitions=2)
    for tag, records in (("good", 7), ("rotten", 300), ("after", 5)):
        rig.produce(records, tag=tag, settings={"linger.ms": 1_000, "batch.num.messages": 1_000})
    server.stop()
    (segment,) = folder_of(server, rig).glob("*.log")
    bases = [batch.base_offset for batch in batches_of(segment)]
    assert bases == [0, 7, 307]
    data = segment.read_bytes()
    segment.write_bytes(data.replace(b"rotten-100", b"rotted-100"))
    server.start()
    rig.begin(rig.define(on_lost_offsets="reset"))
    rig.produce(10, partition=1)
    rig.await_positions({(rig.topic, 0): 7, (rig.topic, 1): 10})
    rig.eventually(lambda: state_of(rig, 0)[0] is PartitionState.FAILED)
    assert "the record batch at offset 7 cannot be read" in state_of(rig, 0)[1]
    assert gaps(rig) == []
    rig.end()
    target = TopicPartition(rig.topic, 0, 307)
    rig.admin.delete_records([target])[target].result()
    rig.begin(rig.define(on_lost_offsets="reset"))
    rig.await_positions({(rig.topic, 0): 312, (rig.topic, 1): 10})
    assert_reported(rig, [(rig.topic, 0, 7, 307)])
    rig.end()
    assert rig.offsets()[rig.topic, 0] == [*range(7), *range(307, 312)]


def test_an_unservable_batch_fails_its_partition_until_repaired(
    rig: Any, server: KafkaServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch whose length is damaged: the broker refuses the fetch, and serves nothing after it."""
    monkeypatch.setattr(kafka_errors, "FIRST_BACKOFF_SECONDS", 0.01)
    rig.create(partitions=2)
    for tag in ("good", "rotten", "after"):
        rig.produce(1, tag=tag)
    (segment,) = folder_of(server, rig).glob("*.log")
    rotten = batches_of(segment)[1]
    whole = segment.read_bytes()
    with segment.open("r+b") as file:
        file.seek(rotten.begin + 8)
        file.write(struct.pack(">i", 5))
    try:
        rig.begin(rig.define(on_lost_offsets="reset"))
        rig.produce(10, partition=1)
        rig.await_positions({(rig.topic, 0): 1, (rig.topic, 1): 10})
        rig.eventually(lambda: state_of(rig, 0)[0] is PartitionState.FAILED)
        assert "cannot be read" in state_of(rig, 0)[1]
        assert gaps(rig) == []
    finally:
        segment.write_bytes(whole)
    rig.end()
    rig.begin(rig.define(on_lost_offsets="reset"))
    rig.await_positions({(rig.topic, 0): 3, (rig.topic, 1): 10})
    rig.end()


@pytest.mark.parametrize("regrown", [False, True])
def test_a_cut_off_log_fails_its_partition_even_if_grown_again(rig: Any, server: KafkaServer, regrown: bool) -> None:
    """As an unclean election leaves it. Offsets alone would not tell: the same ones belong to other records then."""
    rig.create(partitions=2)
    for number in range(6):
        rig.produce(1, tag=f"old{number}")
    rig.begin(rig.define(on_lost_offsets="fail"))
    rig.await_positions({(rig.topic, 0): 6, (rig.topic, 1): 0})
    server.stop()
    cut_off(folder_of(server, rig), 3)
    server.start()
    if regrown:
        rig.produce(20, tag="new")
    rig.eventually(lambda: state_of(rig, 0)[0] is PartitionState.FAILED)
    assert "truncat" in state_of(rig, 0)[1]
    rig.eventually(lambda: rig.ledger.events.page("air", kinds=[EventKind.OFFSETS_REUSED]))
    (event,) = rig.ledger.events.page("air", kinds=[EventKind.OFFSETS_REUSED])
    assert (event.payload["partition"], event.payload["from_offset"], event.payload["until_offset"]) == (0, 3, 6)
    rig.produce(5, partition=1)
    rig.await_positions({(rig.topic, 0): 6, (rig.topic, 1): 5})
    rig.end()
    assert rig.offsets() == {(rig.topic, 0): list(range(6)), (rig.topic, 1): list(range(5))}


def test_a_log_cut_off_and_grown_without_a_receiver_is_reported(rig: Any, server: KafkaServer) -> None:
    rig.create(partitions=2)
    for number in range(6):
        rig.produce(1, tag=f"old{number}")
    rig.produce(3, partition=1)
    rig.begin(rig.define(on_lost_offsets="reset"))
    rig.await_positions({(rig.topic, 0): 6, (rig.topic, 1): 3})
    rig.end()
    assert rig.read_again() == 9
    server.stop()
    cut_off(folder_of(server, rig), 3)
    server.start()
    rig.produce(20, tag="new")
    rig.produce(2, partition=1)
    # No receiver has noticed it. A batch that is read again from Kafka does, by what its manifest knows.
    with pytest.raises(RecordsReplacedError, match=rf"{rig.topic}-0 \[.*ended in leader epoch"):
        rig.read_again()
    rig.begin(rig.define(on_lost_offsets="reset"))
    rig.await_positions({(rig.topic, 0): 23, (rig.topic, 1): 5})
    (event,) = rig.ledger.events.page("air", kinds=[EventKind.OFFSETS_REUSED])
    assert (event.payload["partition"], event.payload["from_offset"], event.payload["until_offset"]) == (0, 3, 6)
    rig.end()
    # It is told once, and what was read of an honest log is read on.
    rig.produce(2)
    rig.begin(rig.define(on_lost_offsets="reset"))
    rig.await_positions({(rig.topic, 0): 25, (rig.topic, 1): 5})
    rig.end()
    assert len(rig.ledger.events.page("air", kinds=[EventKind.OFFSETS_REUSED])) == 1
    assert gaps(rig) == []
    assert rig.offsets() == {(rig.topic, 0): list(range(25)), (rig.topic, 1): list(range(5))}


def test_a_gone_segment_is_a_gap_but_no_aborted_transaction_is(rig: Any, server: KafkaServer) -> None:
    """Kafka passes over both alike, without a word."""
    rig.create(partitions=1, segment_bytes=str(1 << 20))

    def fill(records: int, **settings: Any) -> None:
        producer = Producer({"bootstrap.servers": rig.bootstrap, **settings})
        if settings:
            producer.init_transactions(30)
            producer.begin_transaction()
        for _ in range(records):
            producer.produce(rig.topic, os.urandom(300), partition=0)
            producer.poll(0)
        assert producer.flush(30) == 0
        if settings:
            producer.abort_transaction(30)

    fill(9_000)
    server.stop()
    logs = sorted(folder_of(server, rig).glob("*.log"))
    begin, until = int(logs[1].stem), int(logs[2].stem)
    assert until - begin > 1_000
    for file in folder_of(server, rig).glob(f"{logs[1].stem}.*"):
        file.unlink()
    server.start()
    rig.begin(rig.define())
    rig.await_positions({(rig.topic, 0): 9_000})
    assert_reported(rig, [(rig.topic, 0, begin, until)])
    # There are transactions in this cluster from here on.
    fill(1_000, **{"transactional.id": f"{rig.prefix}-aborted"})
    fill(1_000 - 1, **{"transactional.id": f"{rig.prefix}-aborted"})
    # The coordinator writes the marker of the abort after it has answered.
    rig.eventually(lambda: rig.end_offset(0) == 11_001)
    rig.produce(1, tag="end")
    rig.await_positions({(rig.topic, 0): 11_002})
    rig.end()
    assert gaps(rig) == [(rig.topic, 0, begin, until)]
    assert rig.offsets()[rig.topic, 0] == [*range(begin), *range(until, 9_000), 11_001]
    # With transactions in the cluster, a long hole of lost records is still found: it holds no aborted records.
    judge = OffsetGaps(lambda: KafkaEvidence(RangeClients.of(rig.stream.inputs[0])))
    partition = rig.ledger.positions.all("air")[0].partition
    assert judge.first_lost(partition, [(9_000, 11_001)]) is None
    assert judge.first_lost(partition, [(begin, until), (9_000, 11_001)]) == (begin, until)


def test_a_topic_that_may_not_be_read_holds_up_no_other(rig: Any) -> None:
    other = f"{rig.prefix}-other"
    for topic in (rig.topic, other):
        rig.create(topic, 1)
        rig.produce(10, topic=topic)
    denied = AclBinding(
        ResourceType.TOPIC,
        other,
        ResourcePatternType.LITERAL,
        "User:ANONYMOUS",
        "*",
        AclOperation.ALL,
        AclPermissionType.DENY,
    )
    everything = AclBindingFilter(
        ResourceType.TOPIC, other, ResourcePatternType.LITERAL, None, None, AclOperation.ANY, AclPermissionType.ANY
    )
    (future,) = rig.admin.create_acls([denied]).values()
    future.result()
    rig.begin(rig.define(topics=(rig.topic, other)))
    rig.await_positions({(rig.topic, 0): 10})
    rig.eventually(lambda: f"{other} may not be described" in str(rig.ledger.jobs.current("air").attributes))
    (future,) = rig.admin.delete_acls([everything]).values()
    assert len(future.result()) == 1
    rig.await_positions({(rig.topic, 0): 10, (other, 0): 10})
    # Taken away again from a receiver that reads it.
    (future,) = rig.admin.create_acls([denied]).values()
    future.result()
    rig.eventually(lambda: "AUTHORIZATION" in str(rig.stats().get("troubled", {}).get(f"{other}-0")))
    rig.produce(10, topic=rig.topic)
    rig.await_positions({(rig.topic, 0): 20, (other, 0): 10})
    (future,) = rig.admin.delete_acls([everything]).values()
    future.result()
    rig.produce(10, topic=other)
    rig.await_positions({(rig.topic, 0): 20, (other, 0): 20})
    rig.end()
    assert rig.offsets() == {(rig.topic, 0): list(range(20)), (other, 0): list(range(20))}
