"""The links of the stack that is hammered. What headrace does goes through them, what the hammer does does not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from tests.hammer.kinds import Target
from tests.hammer.link import Link

from headrace.devstack.kafka import KafkaServer
from headrace.devstack.server import LOOPBACK, free_port
from headrace.devstack.stack import LEDGER_CONNECTION, Stack

_LISTENER = "LINK"


class Network:
    """Put links before the servers of a stack that has not started. They pass from entering to leaving the context.

    A Kafka client goes to the address that the broker advertises. So each broker gets a second listener, which
    advertises the link's port.
    """

    def __init__(self, stack: Stack, brokers: Sequence[KafkaServer], *, ledger: bool) -> None:
        """``ledger``: whether the ledger is in the stack's Postgres, and so has a link."""
        kafka_links = [put_link_before(broker) for broker in brokers]
        self.links: dict[Target, list[Link]] = {Target.KAFKA_LINK: kafka_links}
        """The links of each target that is one; a fault hits all of a target's."""
        connections = stack.airflow.connections if stack.airflow is not None else {}
        addresses = ",".join(f"{LOOPBACK}:{link.port}" for link in kafka_links)
        connections["kafka_default"] = {"conn_type": "kafka", "extra": {"bootstrap.servers": addresses}}
        self._put_before(Target.SEARCH_LINK, connections, "elasticsearch_default")
        if ledger:
            self._put_before(Target.LEDGER_LINK, connections, LEDGER_CONNECTION)

    def __enter__(self) -> Self:
        for link in self._all():
            link.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for link in self._all():
            link.__exit__(kind, error, traceback)

    def _all(self) -> list[Link]:
        return [link for links in self.links.values() for link in links]

    def _put_before(self, target: Target, connections: dict[str, Mapping[str, object]], name: str) -> None:
        link = Link(int(str(connections[name]["port"])))
        self.links[target] = [link]
        connections[name] = {**connections[name], "port": link.port}


def put_link_before(broker: KafkaServer, *, silent: bool = False) -> Link:
    """The link through which this broker, which has not started, is reached by those who ask the link first."""
    link = Link(free_port({broker.port, broker.controller_port}), silent=silent)
    own = {
        "listeners": f"PLAINTEXT://{LOOPBACK}:{broker.port},{_LISTENER}://{LOOPBACK}:{link.target}"
        f",CONTROLLER://{LOOPBACK}:{broker.controller_port}",
        "advertised.listeners": f"PLAINTEXT://{LOOPBACK}:{broker.port},{_LISTENER}://{LOOPBACK}:{link.port}",
        "listener.security.protocol.map": f"PLAINTEXT:PLAINTEXT,{_LISTENER}:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "inter.broker.listener.name": "PLAINTEXT",
    }
    broker.properties |= own
    return link
