"""Brokers that are not there: none at the start, none that leads a partition, none that coordinates the group."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import NewTopic

from headrace.devstack.kafka import KafkaServer
from headrace.ledger import EventKind

pytestmark = pytest.mark.slow


class Follower(KafkaServer):
    """A second broker, of another's cluster."""

    def __init__(self, folder: Path, first: KafkaServer) -> None:
        super().__init__(folder)
        self._first = first
        self.properties = {
            "process.roles": "broker",
            "node.id": "2",
            "controller.quorum.voters": f"1@127.0.0.1:{first.controller_port}",
            "listeners": f"PLAINTEXT://127.0.0.1:{self.port}",
        }

    def _format(self, java: str, jars: str, settings: Path) -> None:
        super()._format(java, jars, settings)
        # Its folder is prepared for a cluster of its own.
        mine, its = (folder / "data" / "meta.properties" for folder in (self.folder, self._first.folder))
        cluster = {line for line in its.read_text().splitlines() if line.startswith("cluster.id=")}
        rest = [line for line in mine.read_text().splitlines() if not line.startswith("cluster.id=")]
        mine.write_text("\n".join([*rest, *cluster]) + "\n")


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[KafkaServer, Follower]]:
    """Two brokers, not started, whose groups have no coordinator: its topic wants three."""
    folder = Path(tempfile.mkdtemp(prefix="headrace-test-"))
    for name in ("first", "second"):
        (folder / name).mkdir()
    first = KafkaServer(folder / "first", properties={"offsets.topic.replication.factor": "3"})
    second = Follower(folder / "second", first)
    try:
        yield first, second
    finally:
        second.stop()
        first.stop()
        shutil.rmtree(folder, ignore_errors=True)


def troubles(rig: Any) -> str:
    job = rig.ledger.jobs.current("air")
    return f"{job.attributes.get('troubles')} {job.attributes.get('inputs')}" if job is not None else ""


def test_missing_brokers_are_waited_for_and_delay_nothing_else(
    servers: tuple[KafkaServer, Follower], make_rig: Callable[[str], Any]
) -> None:
    first, second = servers
    rig = make_rig(first.bootstrap_servers)
    # -- no broker at the start
    rig.begin(rig.define(starting_offsets="latest"))
    rig.eventually(lambda: "cannot be asked" in troubles(rig))
    (event,) = rig.ledger.events.page("air", kinds=[EventKind.RECEIVER_ERROR])
    assert "cannot be asked" in str(event.payload)
    first.start()
    rig.eventually(lambda: "not exist" in troubles(rig))
    second.start()
    rig.eventually(lambda: len(rig.admin.list_topics(timeout=10).brokers) == 2)
    new = NewTopic(rig.topic, num_partitions=2, replica_assignment=[[1], [2]])
    rig.admin.create_topics([new])[rig.topic].result()
    rig.eventually(lambda: len(rig.positions()) == 2)
    rig.produce(10, partition=0)
    rig.produce(10, partition=1)
    rig.await_positions({(rig.topic, 0): 10, (rig.topic, 1): 10})
    # -- one that loses its leader
    second.stop()
    rig.eventually(lambda: rig.stats().get("leaderless") == 1)
    assert "no leader" in rig.stats()["troubled"][f"{rig.topic}-1"]["error"]
    rig.produce(10, partition=0)
    rig.await_positions({(rig.topic, 0): 20, (rig.topic, 1): 10})
    second.start()
    rig.produce(10, partition=0)
    rig.produce(10, partition=1)
    rig.await_positions({(rig.topic, 0): 30, (rig.topic, 1): 20})
    rig.eventually(lambda: rig.stats().get("leaderless") == 0 and not rig.stats()["troubled"])
    (row,) = rig.ledger.receivers.all("air")
    assert row.restarts == 0
    # No offset was ever committed, for want of a coordinator, and nothing waits for it.
    rig.end()
    assert rig.offsets() == {(rig.topic, 0): list(range(30)), (rig.topic, 1): list(range(20))}


def test_a_partition_without_a_leader_yet_lets_the_others_begin(
    servers: tuple[KafkaServer, Follower], make_rig: Callable[[str], Any]
) -> None:
    first, second = servers
    rig = make_rig(first.bootstrap_servers)
    for server in servers:
        if not server.alive:
            server.start()
    rig.eventually(lambda: len(rig.admin.list_topics(timeout=10).brokers) == 2)
    new = NewTopic(rig.topic, num_partitions=2, replica_assignment=[[1], [2]])
    rig.admin.create_topics([new])[rig.topic].result()
    rig.produce(5, partition=1)
    second.stop()
    rig.produce(10, partition=0)
    rig.begin(rig.define())
    rig.await_positions({(rig.topic, 0): 10})
    rig.eventually(lambda: f"{rig.topic}-1 is not known yet" in troubles(rig))
    second.start()
    rig.await_positions({(rig.topic, 0): 10, (rig.topic, 1): 5})
    rig.eventually(lambda: "not known yet" not in troubles(rig))
    rig.end()
    assert rig.offsets() == {(rig.topic, 0): list(range(10)), (rig.topic, 1): list(range(5))}
