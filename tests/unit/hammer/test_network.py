"""What headrace does goes through the links, and what the hammer does goes past them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.hammer.brokers import further_brokers
from tests.hammer.kinds import LINKS, Target
from tests.hammer.network import Network

from headrace.devstack.kafka import KafkaServer
from headrace.devstack.stack import LEDGER_CONNECTION, Stack, StackOptions
from headrace.devstack.state import STACK_VARIABLE


@pytest.fixture
def stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stack:
    """Not started."""
    for variable in (STACK_VARIABLE, "HEADRACE_DATA"):
        monkeypatch.setenv(variable, "")
    return Stack(StackOptions(data=tmp_path, dags=tmp_path / "dags", plugins=tmp_path / "plugins"))


def test_airflows_connections_use_the_links_and_the_stacks_none(stack: Stack) -> None:
    assert stack.kafka and stack.elasticsearch and stack.postgres and stack.airflow
    network = Network(stack, [stack.kafka], ledger=True)
    assert set(network.links) == set(LINKS)
    connections = stack.airflow.connections
    (kafka,), (search,), (ledger,) = (
        network.links[target] for target in (Target.KAFKA_LINK, Target.SEARCH_LINK, Target.LEDGER_LINK)
    )
    assert connections["kafka_default"]["extra"] == {"bootstrap.servers": f"127.0.0.1:{kafka.port}"}
    assert connections["elasticsearch_default"]["port"] == search.port != stack.elasticsearch.port
    assert search.target == stack.elasticsearch.port
    assert connections[LEDGER_CONNECTION]["port"] == ledger.port
    assert ledger.target == stack.postgres.port


def test_a_broker_advertises_its_link_to_those_who_came_by_it(stack: Stack) -> None:
    assert stack.kafka
    network = Network(stack, [stack.kafka], ledger=False)
    (link,) = network.links[Target.KAFKA_LINK]
    properties = stack.kafka.properties
    assert f"LINK://127.0.0.1:{link.target}" in properties["listeners"]
    assert f"PLAINTEXT://127.0.0.1:{stack.kafka.port}" in properties["advertised.listeners"]
    assert f"LINK://127.0.0.1:{link.port}" in properties["advertised.listeners"]
    assert link.port != link.target
    assert Target.LEDGER_LINK not in network.links


def test_each_of_three_brokers_has_a_link_of_its_own(stack: Stack, tmp_path: Path) -> None:
    assert stack.kafka and stack.airflow
    brokers = [stack.kafka, *further_brokers(stack.kafka, tmp_path, 3)]
    network = Network(stack, brokers, ledger=True)
    links = network.links[Target.KAFKA_LINK]
    assert len({link.port for link in links} | {link.target for link in links}) == 6
    addresses = stack.airflow.connections["kafka_default"]["extra"]["bootstrap.servers"]
    assert addresses == ",".join(f"127.0.0.1:{link.port}" for link in links)


def test_three_brokers_are_a_cluster_that_survives_its_leader(tmp_path: Path) -> None:
    """Nothing is lost with the leader."""
    first = KafkaServer(tmp_path / "kafka")
    brokers = [first, *further_brokers(first, tmp_path, 3)]
    assert [broker.name for broker in brokers] == ["kafka", "kafka-2", "kafka-3"]
    (voters,) = {broker.properties["controller.quorum.voters"] for broker in brokers}
    assert voters == ",".join(f"{n}@127.0.0.1:{broker.controller_port}" for n, broker in enumerate(brokers, 1))
    assert [broker.properties.get("node.id", "1") for broker in brokers] == ["1", "2", "3"]
    for broker in brokers:
        assert broker.properties["min.insync.replicas"] == "2"
        assert broker.properties["unclean.leader.election.enable"] == "false"
