"""The system under test: the embedded stack, optionally a Spark cluster, and what is between and below its parts."""

from __future__ import annotations

import os
import sqlite3
import stat
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from examples.demo.elasticsearch_side import ElasticsearchSide
from examples.demo.producing import create_topic
from examples.demo.stack import DemoStack
from tests.hammer.brokers import further_brokers, launch_further, name_of_leader
from tests.hammer.disk import SmallDisk
from tests.hammer.errors import HammerError, SmallDiskError
from tests.hammer.false_clock import FalseClock
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
from tests.hammer.slow_syncs import SlowSyncs
from tests.support.spark_cluster import SparkCluster

from headrace.devstack.airflow import Airflow
from headrace.devstack.elasticsearch import ElasticsearchServer
from headrace.devstack.jars import find_java
from headrace.devstack.kafka import KafkaServer
from headrace.devstack.server import Server
from headrace.devstack.stack import LEDGER_DATABASE, Stack, StackOptions
from headrace.devstack.state import end_stack_processes

_DISK_BYTES = 384 << 20
# A database of Postgres has 8 MiB before anything is in it, and there are two.
_LEDGER_DISK_BYTES = 128 << 20
_LEDGER_TEMPLATE = "empty_ledger"
# Twice the receiver job's need: a batch that finds no job to connect to is submitted, beside the next receiver job.
_WORKERS, _CORES, _MEMORY = 2, 4, "2g"
_Server = TypeVar("_Server")


class Ground:
    """Started on entering, stopped with everything below it on leaving; the folder ``data`` is emptied before.

    Make it while the process has one thread: the small disks are in its own mount namespace. ``targets`` are those of
    the run's faults. ``impossible`` says of some of them why they cannot be hit here.
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
        targets: Collection[Target] = (),
    ) -> None:
        self.data = data.absolute()
        self._ledger = ledger
        self._ledger_template = "template1"
        self.keys = keys
        self.log = self.data / "log"
        DemoStack(self.data, self.data / "dags", keep=False).clear()
        self.impossible: dict[Target, str] = {}
        self.disks: dict[Target, SmallDisk] = {}
        self._make_disk(Target.DISK, self.log, _DISK_BYTES)
        if Target.LEDGER_DISK in targets:
            self._make_disk(Target.LEDGER_DISK, self._ledger_folder, _LEDGER_DISK_BYTES)
        self.syncs = SlowSyncs(self.data / "syncs", self.log) if Target.SYNCS in targets else None
        self.clock = self._make_clock() if Target.CLOCK in targets else None
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
            if Target.LEDGER_LINK not in self.network.links:
                self.impossible[Target.LEDGER_LINK] = "a file of SQLite is not behind a network"

    def __enter__(self) -> Self:
        try:
            if self.network is not None:
                self.network.__enter__()
            launch_further(self.brokers)
            self._stack.start()
            if Target.LEDGER_DISK in self.disks and self._ledger is LedgerKind.POSTGRES:
                self._move_ledger()
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
        """The ledger. It is not on the log's small disk."""
        if self._ledger is LedgerKind.SQLITE:
            return f"sqlite:///{self._ledger_folder / 'ledger.db'}"
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
                (self._ledger_folder / f"ledger.db{ending}").unlink(missing_ok=True)
        else:
            postgres = _there(self._stack.postgres)
            postgres.drop_database(LEDGER_DATABASE)
            postgres.create_database(LEDGER_DATABASE, template=self._ledger_template)

    def shrink_ledger(self) -> None:
        """Leave the ledger's files no space that they do not use."""
        if self._ledger is LedgerKind.SQLITE:
            with closing(sqlite3.connect(self._ledger_folder / "ledger.db", timeout=5.0)) as connection:
                (busy, *_) = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            if busy:
                raise HammerError("The ledger's WAL is in use.")
        else:
            with self._connect(LEDGER_DATABASE) as connection:
                connection.execute("VACUUM FULL")

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

    @property
    def _ledger_folder(self) -> Path:
        return self.data / "ledger"

    def _make_disk(self, target: Target, folder: Path, size: int) -> None:
        try:
            self.disks[target] = SmallDisk(folder, size)
        except SmallDiskError as error:
            self.impossible[target] = str(error)

    def _make_clock(self) -> FalseClock | None:
        if self._ledger is LedgerKind.SQLITE:
            self.impossible[Target.CLOCK] = "a file of SQLite has the clock of each process that writes to it."
            return None
        return FalseClock(self.data / "java", find_java().executable)

    def _move_ledger(self) -> None:
        """Put the ledger's database on its small disk, by its template. Postgres's own log stays elsewhere: Postgres
        ends when it cannot write that, and Airflow's database with it."""
        import psycopg

        owner = _there(self._stack.postgres).data.stat()
        os.chown(self._ledger_folder, owner.st_uid, owner.st_gid)
        self._ledger_folder.chmod(stat.S_IRWXU)
        try:
            with self._connect("postgres") as connection:
                connection.execute(f"CREATE TABLESPACE small LOCATION '{self._ledger_folder}'")
                connection.execute(f"CREATE DATABASE {_LEDGER_TEMPLATE} TABLESPACE small")
        except psycopg.Error as error:
            raise HammerError(
                f"Postgres cannot have the ledger in {self._ledger_folder}: {error}.",
                remedy="Give the run a folder (--data) that each user of this machine can enter.",
            ) from error
        self._ledger_template = _LEDGER_TEMPLATE
        self.delete_ledger()

    def _connect(self, database: str) -> Any:
        """A connection to Postgres in which each statement is a transaction."""
        import psycopg

        url = _there(self._stack.postgres).url(database).replace("postgresql+psycopg:", "postgresql:")
        return psycopg.connect(url, autocommit=True)

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
        os.environ.pop("HAMMER_JAVA_HOME", None)
        if self.clock is not None:
            os.environ["HAMMER_JAVA_HOME"] = str(self.clock.home)
        if self.syncs is not None:
            os.environ["PYTHONPATH"] = os.pathsep.join(
                [self.syncs.python_path, *filter(None, [os.environ.get("PYTHONPATH")])]
            )
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
