"""Records that no well-behaved client would send, and those that are too large for a fetch."""

from __future__ import annotations

from typing import Any

import pytest
from confluent_kafka import Producer
from tests.integration.receiver.kafka_bytes import record_batch, send


def test_unreadable_headers_cost_their_record_the_headers_alone(rig: Any) -> None:
    """A header's name is any bytes to Kafka; the client fails at what is no UTF-8."""
    rig.create(partitions=1)
    good = [(b"name", b"content")]
    values = [(b"before", good), (b"poisoned", [(b"\xff\xfe", b"x"), *good]), (b"after", good)]
    send(rig.bootstrap, rig.topic, 0, record_batch(values))
    rig.begin(rig.define())
    rig.await_positions({(rig.topic, 0): 3})
    rig.eventually(lambda: rig.stats().get("unreadable_headers") == 1)
    rig.end()
    rows = rig.rows()
    assert [row["value"] for row in rows] == [b"before", b"poisoned", b"after"]
    kept = [{"key": "name", "value": b"content"}]
    assert [row["headers"] for row in rows] == [kept, None, kept]


def test_every_codec_is_read(rig: Any) -> None:
    rig.create(partitions=1)
    codecs = ["none", "gzip", "snappy", "lz4", "zstd"]
    for codec in codecs:
        producer = Producer({"bootstrap.servers": rig.bootstrap, "compression.type": codec, "linger.ms": 50})
        for number in range(20):
            producer.produce(rig.topic, f"{codec}-{number}-{'x' * 200}".encode(), partition=0)
        assert producer.flush(30) == 0
    rig.begin(rig.define())
    rig.await_positions({(rig.topic, 0): 100})
    rig.end()
    assert [row["value"].split(b"-")[0].decode() for row in rig.rows()] == [each for each in codecs for _ in range(20)]


@pytest.mark.parametrize("timestamp_ms", [-1, 0, 2**62])
def test_a_timestamp_that_is_none_or_beyond_all_time_is_kept(rig: Any, timestamp_ms: int) -> None:
    rig.create(partitions=1, message_timestamp_after_max_ms=str(2**63 - 1))
    send(rig.bootstrap, rig.topic, 0, record_batch([(b"when?", [])], timestamp_ms))
    rig.produce(1)
    rig.begin(rig.define(batch_by="timestamp"))
    rig.await_positions({(rig.topic, 0): 2})
    rig.end()
    found = {offset: stamp for offset, stamp in rig.timestamps()}
    assert found[0] == timestamp_ms


def test_a_record_larger_than_every_fetch_bound_delays_no_other(rig: Any) -> None:
    """Kafka sends at least one record however large; a client that refuses it drops the connection for all."""
    size = 66_000_000
    rig.create(partitions=2, max_message_bytes="80000000")
    rig.produce(1, tag="small")
    producer = Producer({"bootstrap.servers": rig.bootstrap, "message.max.bytes": 80_000_000})
    producer.produce(rig.topic, bytes(size), partition=0)
    assert producer.flush(60) == 0
    rig.produce(5, partition=1)
    rig.begin(rig.define(client={"fetch.max.bytes": 1 << 20, "max.partition.fetch.bytes": 1 << 20}))
    rig.await_positions({(rig.topic, 0): 2, (rig.topic, 1): 5})
    rig.end()
    assert sorted(len(row["value"]) for row in rig.rows() if row["partition"] == 0) == [7, size]
