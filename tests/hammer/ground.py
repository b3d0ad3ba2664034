"""The system under test: the embedded stack, optionally a Spark cluster, and the small disk under the log."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from examples.demo.elasticsearch_side import ElasticsearchSide
from examples.demo.producing import create_topic
from examples.demo.stack import DemoStack
from tests.hammer.brokers import further_brokers, launch_further, name_of_leader
from tests.hammer.disk import SmallDisk
from tests.hammer.errors import HammerError, SmallDiskError
from tests.hammer.kinds import LedgerKind, Target
from tests.hammer.link import Link
from tests.hammer.network import Network
from tests.hammer.pipeline import (
    DAG_FILE,
    INDEX,
    KEYS_INDEX,
    KEYS_TRANSFORM,
    MAPPINGS,
    PARTITIONS,
    STREAM,
    TOPIC,
    TRANSFORM_FILE,
)
from tests.support.spark_cluster import SparkCluster

from headrace.devstack.airflow import Airflow
from headrace.devstack.elasticsearch import ElasticsearchServer
from headrace.devstack.kafka import KafkaServer
from headrace.devstack.server import Server
from headrace.devstack.stack import LEDGER_DATABASE, Stack, StackOptions
from headrace.devstack.state import end_stack_processes

_DISK_BYTES = 384 << 20
# Twice the receiver job's need: a batch that finds no job to connect to is submitted, beside the next receiver job.
_WORKERS, _CORES, _MEMORY = 2, 4, "2g"
_Server = TypeVar("_Server")


class Ground:
    """Started on entering, stopped with everything below it on leaving; the folder ``data`` is emptied before.

    Make it while the process has one thread: the small disk is in its own mount namespace. If that is not possible,
    ``disk`` is None and ``no_disk`` says why.
    """

    def __init__(
        self,
        data: Path,
        *,
        cluster: bool,
        ledger: LedgerKind = LedgerKind.POSTGRES,
        keys: bool = True,
        network: bool = False,
        brokers: int = 1,
    ) -> None:
        self.data = data.absolute()
        self._ledger = ledger
        self.keys = keys
        self.log = self.data / "log"
        DemoStack(self.data, self.data / "dags", keep=False).clear()
        self.disk: SmallDisk | None = None
        self.no_disk = ""
        try:
            self.disk = SmallDisk(self.log, _DISK_BYTES)
        except SmallDiskError as error:
            self.no_disk = str(error)
        self.cluster: SparkCluster | None = None
        if cluster:
            self.cluster = SparkCluster(self.data / "spark", workers=_WORKERS, cores=_CORES, memory=_MEMORY)
        self._stack = self._make_stack()
        others = further_brokers(self.kafka, self.data, brokers) if brokers > 1 else []
        self.brokers: list[KafkaServer] = [self.kafka, *others]
        extra = {"bootstrap.servers": self.bootstrap_servers}
        self.airflow.connections["kafka_default"] = {"conn_type": "kafka", "extra": extra}
        self.network: Network | None = None
        if network:
            self.network = Network(self._stack, self.brokers, ledger=ledger is LedgerKind.POSTGRES)

    def __enter__(self) -> Self:
        try:
            if self.network is not None:
                self.network.__enter__()
            launch_further(self.brokers)
            self._stack.start()
            if self.cluster is not None:
                self.cluster.start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop()

    def begin(self) -> None:
        """Make the topic and the index, and let the DAGs run."""
        create_topic(self.bootstrap_servers, TOPIC, PARTITIONS, len(self.brokers))
        elasticsearch = ElasticsearchSide(self.elasticsearch.url)
        elasticsearch.create_index(INDEX, MAPPINGS)
        if self.keys:
            elasticsearch.create_index(KEYS_INDEX, {"properties": {"offset": {"type": "long"}}})
        api = self.airflow.api()
        for dag_id in (f"{STREAM}_receiver", f"{STREAM}_batches"):
            api.wait_for_dag(dag_id)
            api.unpause(dag_id)

    @property
    def stack_id(self) -> str:
        """The stack's id, which all its processes have in their environment."""
        return self._stack.state.id

    @property
    def servers(self) -> Mapping[str, Server]:
        """All servers that a service manager would restart, by name."""
        further = {broker.name: broker for broker in self.brokers[1:]}
        return {**self._stack.servers, **further, **(self.cluster.servers if self.cluster else {})}

    @property
    def ledger_url(self) -> str:
        """The ledger. A file of SQLite is not on the small disk: the fault fills the log's disk alone."""
        if self._ledger is LedgerKind.SQLITE:
            return f"sqlite:///{self.data / 'ledger.db'}"
        return str(self._stack.state.services["postgres"].address)

    @property
    def shown_ledger_url(self) -> str:
        """The ledger as Airflow's tasks and pages reach it: through its link if it has one."""
        links = self.links.get(Target.LEDGER_LINK)
        if links is None:
            return self.ledger_url
        return self.ledger_url.replace(f":{links[0].target}/", f":{links[0].port}/")

    @property
    def links(self) -> Mapping[Target, Sequence[Link]]:
        """The links by target; empty without a network."""
        return self.network.links if self.network is not None else {}

    def delete_ledger(self) -> None:
        """Delete the ledger's database, in which all streams are lost."""
        if self._ledger is LedgerKind.SQLITE:
            for ending in ("", "-wal", "-shm"):
                (self.data / f"ledger.db{ending}").unlink(missing_ok=True)
        else:
            postgres = _there(self._stack.postgres)
            postgres.drop_database(LEDGER_DATABASE)
            postgres.create_database(LEDGER_DATABASE)

    @property
    def kafka(self) -> KafkaServer:
        """The broker, or the first of several."""
        return _there(self._stack.kafka)

    @property
    def bootstrap_servers(self) -> str:
        """All brokers, past the links."""
        return ",".join(broker.bootstrap_servers for broker in self.brokers)

    def leader(self) -> str:
        """The name of the broker that leads the topic's first partition. Raises TargetMissedError if none does."""
        return name_of_leader(self.bootstrap_servers, TOPIC, self.brokers)

    @property
    def elasticsearch(self) -> ElasticsearchServer:
        """The node."""
        return _there(self._stack.elasticsearch)

    @property
    def airflow(self) -> Airflow:
        """Airflow."""
        return _there(self._stack.airflow)

    def _make_stack(self) -> Stack:
        dags = self.data / "dags"
        dags.mkdir(parents=True, exist_ok=True)
        (dags / "hammer.py").write_text(DAG_FILE)
        os.environ["HAMMER_STORAGE"] = str(self.log)
        os.environ.pop("HAMMER_KEYS", None)
        if self.keys:
            transform = self.data / "code" / f"{KEYS_TRANSFORM}.py"
            transform.parent.mkdir(parents=True, exist_ok=True)
            transform.write_text(TRANSFORM_FILE)
            os.environ["HAMMER_KEYS"] = str(transform)
        in_postgres = self._ledger is LedgerKind.POSTGRES
        os.environ["HAMMER_LEDGER"] = "connection:headrace_ledger" if in_postgres else self.ledger_url
        os.environ.pop("HAMMER_SPARK_MASTER", None)
        if self.cluster is not None:
            os.environ["HAMMER_SPARK_MASTER"] = self.cluster.url
        return Stack(StackOptions(data=self.data, dags=dags, plugins=self.data / "plugins"))

    def _stop(self) -> None:
        self._stack.stop()
        for broker in self.brokers[1:]:
            broker.stop()
        if self.network is not None:
            self.network.__exit__(None, None, None)
        if self.cluster is not None:
            self.cluster.stop()
        end_stack_processes(self._stack.state.id, self._stack.state.recorded_processes())


def _there(server: _Server | None) -> _Server:
    if server is None:
        raise HammerError("The stack lacks a server.")
    return server
