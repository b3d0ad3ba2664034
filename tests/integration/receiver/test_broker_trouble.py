"""A broker that goes away for a while, and one whose disk has rotted. Each test has a broker of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.devstack.kafka import KafkaServer
from headrace.ledger import PartitionState

pytestmark = pytest.mark.slow


def test_a_broker_that_is_gone_is_waited_for_visibly(server_folder: Path, make_rig: Callable[[str], Any]) -> None:
    with KafkaServer(server_folder) as server:
        rig = make_rig(server.bootstrap_servers)
        rig.create(partitions=1)
        rig.produce(100)
        rig.begin(rig.define())
        rig.await_positions({(rig.topic, 0): 100})
        # What tells an empty batch from one of which nothing is known.
        rig.eventually(lambda: rig.health()["error"] is None and rig.stats()["lag"] == {rig.topic: {"0": [0, 0]}})
        server.stop()
        rig.eventually(lambda: rig.stats().get("connected") is False)
        assert rig.stats()["client_error"]
        rig.eventually(lambda: f"Kafka at {rig.bootstrap} cannot be asked" in (rig.health()["error"] or ""))
        rig.eventually(lambda: "Connection refused" in rig.health()["error"])
        rig.eventually(lambda: [each["topic"] for each in rig.stats()["unasked"]] == [rig.topic])
        server.start()
        rig.produce(100, tag="later")
        rig.await_positions({(rig.topic, 0): 200}, 90)
        rig.eventually(lambda: rig.stats().get("connected") is True and rig.stats()["client_error"] is None)
        rig.eventually(lambda: rig.health()["error"] is None and rig.stats()["unasked"] == [])
        (row,) = rig.ledger.receivers.all("air")
        assert row.restarts == 0
        rig.end()
    assert rig.offsets() == {(rig.topic, 0): list(range(200))}


def test_a_rotten_record_stops_its_partition_and_no_other(server_folder: Path, make_rig: Callable[[str], Any]) -> None:
    """The broker serves what is on its disk unchecked; the client's checksums find it."""
    with KafkaServer(server_folder) as server:
        rig = make_rig(server.bootstrap_servers)
        rig.create(partitions=2)
        rig.produce(1, tag="good")
        rig.produce(1, tag="rotten")
        rig.produce(1, tag="after")
        server.stop()
        (segment,) = server_folder.rglob(f"{rig.topic}-0/00000000000000000000.log")
        data = segment.read_bytes()
        assert data.count(b"rotten") == 1
        segment.write_bytes(data.replace(b"rotten", b"rotted"))
        server.start()
        rig.begin(rig.define(on_lost_offsets="fail"))
        rig.await_positions({(rig.topic, 0): 1, (rig.topic, 1): 0})
        rig.eventually(lambda: f"{rig.topic}-0" in rig.stats().get("troubled", {}))
        rig.produce(10, partition=1)
        rig.await_positions({(rig.topic, 0): 1, (rig.topic, 1): 10})
        trouble = rig.stats()["troubled"][f"{rig.topic}-0"]
        assert "CRC" in trouble["error"]
        assert all(row.state is PartitionState.ACTIVE for row in rig.ledger.positions.all("air"))
        rig.end()
    assert rig.offsets() == {(rig.topic, 0): [0], (rig.topic, 1): list(range(10))}
