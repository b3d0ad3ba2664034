"""Runs a real Kafka: one process that is broker and controller (KRaft)."""

from __future__ import annotations

import base64
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from headrace.devstack.errors import LocalStackError
from headrace.devstack.guarded_process import ProcessSpec, child_environment
from headrace.devstack.jars import bundle_jars, find_java
from headrace.devstack.server import LOOPBACK, Server, free_port


class KafkaServer(Server):
    """One broker on loopback. ``properties`` are added to those of server.properties, or replace them.

    Topics are not created automatically, transactions work, and messages may have up to 8 MiB.
    """

    name = "kafka"

    def __init__(
        self,
        folder: Path,
        *,
        port: int | None = None,
        controller_port: int | None = None,
        properties: Mapping[str, str] | None = None,
        heap: str = "768m",
        jvm_options: Sequence[str] = (),
    ) -> None:
        super().__init__(folder)
        self.port = port or free_port()
        self.controller_port = controller_port or free_port({self.port})
        self.properties = dict(properties or {})
        self.heap = heap
        self.jvm_options = list(jvm_options)

    @property
    def bootstrap_servers(self) -> str:
        """The value for Kafka clients' `bootstrap.servers`."""
        return f"{LOOPBACK}:{self.port}"

    def specify(self) -> ProcessSpec:
        java = str(find_java().executable)
        jars = ":".join(str(jar) for jar in bundle_jars("kafka"))
        settings = self.folder / "server.properties"
        settings.write_text("".join(f"{name}={value}\n" for name, value in self._properties().items()))
        if not (self._data / "meta.properties").exists():
            self._format(java, jars, settings)
        return ProcessSpec(
            name=self.name,
            argv=[
                java,
                f"-Xmx{self.heap}",
                *_JVM_OPTIONS,
                *_LOG_OPTIONS,
                *self.jvm_options,
                "-cp",
                jars,
                "kafka.Kafka",
                str(settings),
            ],
            env=child_environment(),
            cwd=self.folder,
            log=self.log,
        )

    def probe(self) -> None:
        from confluent_kafka import KafkaException
        from confluent_kafka.admin import AdminClient

        admin = AdminClient({"bootstrap.servers": self.bootstrap_servers, "log_level": 0})
        if not admin.list_topics(timeout=2).brokers:
            raise KafkaException("no broker is registered yet")

    @property
    def _data(self) -> Path:
        return self.folder / "data"

    def _properties(self) -> dict[str, str]:
        return {
            "process.roles": "broker,controller",
            "node.id": "1",
            "controller.quorum.voters": f"1@{LOOPBACK}:{self.controller_port}",
            "controller.listener.names": "CONTROLLER",
            "listeners": f"PLAINTEXT://{LOOPBACK}:{self.port},CONTROLLER://{LOOPBACK}:{self.controller_port}",
            "advertised.listeners": f"PLAINTEXT://{LOOPBACK}:{self.port}",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
            "log.dirs": str(self._data),
            "offsets.topic.replication.factor": "1",
            "offsets.topic.num.partitions": "4",  # instead of 50: each is a folder with files
            "transaction.state.log.replication.factor": "1",
            "transaction.state.log.min.isr": "1",
            "transaction.state.log.num.partitions": "4",
            "share.coordinator.state.topic.replication.factor": "1",
            "share.coordinator.state.topic.min.isr": "1",
            "group.initial.rebalance.delay.ms": "0",
            # A broker that restarts after a crash waits for the end of its old session: 9 s by default.
            "broker.session.timeout.ms": "4000",
            "broker.heartbeat.interval.ms": "500",
            "auto.create.topics.enable": "false",
            "message.max.bytes": str(8 << 20),
            "replica.fetch.max.bytes": str(8 << 20),
        } | self.properties

    def _format(self, java: str, jars: str, settings: Path) -> None:
        # A cluster id is a UUID in URL-safe base64. `StorageTool random-uuid` would make one, but starts another JVM.
        cluster = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        command = [java, "-Xmx256m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-cp", jars]
        # With "=", because an id may begin with "-", and would then be taken for an option.
        command += ["kafka.tools.StorageTool", "format", f"--cluster-id={cluster}", "-c", str(settings)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=child_environment())
        if done.returncode != 0:
            raise LocalStackError(f"Kafka's data folder could not be prepared:\n{(done.stdout + done.stderr)[-3000:]}")


# The few cores are shared with Spark, Airflow and Elasticsearch, so one collector thread is enough.
_JVM_OPTIONS = ["-XX:+UseSerialGC", "-XX:+ExitOnOutOfMemoryError", "-Djava.awt.headless=true"]
_LOG_OPTIONS = [
    "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
    "-Dorg.slf4j.simpleLogger.log.kafka.server.KafkaRaftServer=info",
    "-Dorg.slf4j.simpleLogger.log.kafka.server.BrokerServer=info",
    "-Dorg.slf4j.simpleLogger.showDateTime=true",
    "-Dorg.slf4j.simpleLogger.dateTimeFormat=yyyy-MM-dd'T'HH:mm:ss.SSSXXX",
]
