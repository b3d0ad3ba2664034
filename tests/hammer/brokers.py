"""Three brokers instead of the stack's one, so that a partition's leader can fail and another one takes over."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.hammer.errors import TargetMissedError

from headrace.devstack.kafka import KafkaServer
from headrace.devstack.server import LOOPBACK

_HEAP = "384m"
_ANSWER_SECONDS = 5.0
_META = Path("data") / "meta.properties"


class Broker(KafkaServer):
    """A further broker and controller of the cluster that ``first`` belongs to."""

    def __init__(self, folder: Path, number: int, first: KafkaServer) -> None:
        super().__init__(folder, heap=_HEAP, properties={"node.id": str(number)})
        self.name = f"{first.name}-{number}"
        self._first = first

    def _format(self, java: str, jars: str, settings: Path) -> None:
        super()._format(java, jars, settings)
        # The tool gives each folder a cluster of its own.
        own, first = self.folder / _META, self._first.folder / _META
        cluster = [line for line in first.read_text().splitlines() if line.startswith("cluster.id=")]
        rest = [line for line in own.read_text().splitlines() if not line.startswith("cluster.id=")]
        own.write_text("\n".join([*rest, *cluster]) + "\n")


def further_brokers(first: KafkaServer, folder: Path, brokers: int) -> list[Broker]:
    """The brokers 2 to ``brokers``, none of them started; ``first`` becomes the first of their cluster.

    An acknowledged record is on two of three brokers at least, and no broker leads that does not have it.
    """
    others = [Broker(folder / f"kafka-{number}", number, first) for number in range(2, brokers + 1)]
    voters = ",".join(
        f"{number}@{LOOPBACK}:{broker.controller_port}" for number, broker in enumerate([first, *others], 1)
    )
    first.heap = _HEAP
    for broker in (first, *others):
        broker.properties |= {
            "controller.quorum.voters": voters,
            "listeners": f"PLAINTEXT://{LOOPBACK}:{broker.port},CONTROLLER://{LOOPBACK}:{broker.controller_port}",
            "offsets.topic.replication.factor": str(brokers),
            "transaction.state.log.replication.factor": str(brokers),
            "min.insync.replicas": str(brokers // 2 + 1),
            "unclean.leader.election.enable": "false",
        }
    return others


def launch_further(brokers: Sequence[KafkaServer]) -> None:
    """Start all but the first, before the first: it answers only when a majority of the controllers runs."""
    first, *others = brokers
    if others:
        first.folder.mkdir(parents=True, exist_ok=True)
        first.specify()  # prepares its folder, which has the cluster's id
    for broker in others:
        broker.launch()


def name_of_leader(bootstrap_servers: str, topic: str, brokers: Sequence[KafkaServer]) -> str:
    """The name of the server that leads partition 0.

    Raises:
        TargetMissedError: nobody leads it, or nobody answers.
    """
    from confluent_kafka import KafkaException
    from confluent_kafka.admin import AdminClient

    admin = AdminClient({"bootstrap.servers": bootstrap_servers, "log_level": 0})
    try:
        partitions = admin.list_topics(topic, timeout=_ANSWER_SECONDS).topics[topic].partitions
    except KafkaException as error:
        raise TargetMissedError(f"Kafka does not say who leads {topic}-0: {error}") from error
    leader = partitions[0].leader if 0 in partitions else -1
    if not 0 < leader <= len(brokers):
        raise TargetMissedError(f"nobody leads {topic}-0")
    return brokers[leader - 1].name
