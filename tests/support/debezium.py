"""A real Debezium: Kafka Connect in one process, with the connector that sends a Postgres' changes to a Kafka."""

from __future__ import annotations

import json
import re
import time
import urllib.request
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, Self

import psycopg

from headrace.devstack.errors import LocalStackError
from headrace.devstack.guarded_process import ProcessSpec, child_environment
from headrace.devstack.jars import bundle_jars, find_java
from headrace.devstack.postgres import USER, PostgresServer
from headrace.devstack.registry import RegistryServer
from headrace.devstack.server import LOOPBACK, Server, free_port

Converter = Literal["json", "json-schema-part", "avro"]

FLATTENED = {
    "transforms": "unwrap",
    "transforms.unwrap.type": "io.debezium.transforms.ExtractNewRecordState",
    "transforms.unwrap.delete.tombstone.handling.mode": "rewrite",
    "transforms.unwrap.add.fields": "op,table,lsn,source.ts_ms,source.sequence",
    "transforms.unwrap.add.headers": "op",
}


class Debezium(Server):
    """Sends the changes of ``tables`` (regular expressions, with their schemas) to topics
    ``<prefix>.<schema>.<table>``.

    What it has sent is in ``folder`` and in Postgres' slot, so a start after `stop` goes on there, and one after `kill`
    may send changes again. Postgres, which needs ``wal_level=logical``, keeps its log for the slot until the database
    is dropped. ``settings`` are added to the connector's, or replace them.

    ``converter``: "json" is the events alone, "json-schema-part" has Connect's schema in each, "avro" needs a
    ``registry`` and writes Confluent's wire format.
    """

    name = "debezium"
    ready_seconds = 240.0

    def __init__(
        self,
        folder: Path,
        *,
        kafka: str,
        postgres: PostgresServer,
        database: str,
        tables: str = "public[.].*",
        prefix: str = "db",
        converter: Converter = "json",
        registry: RegistryServer | None = None,
        flattened: bool = False,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(folder)
        self.port = free_port()
        self.slot = f"headrace_{uuid.uuid4().hex[:12]}"
        self._kafka = kafka
        self._postgres = postgres
        self._database = database
        self._launched = datetime.now(UTC)
        self._converter = converter
        self._settings = (
            self._connector(tables, prefix)
            | _converters(converter, registry)
            | (FLATTENED if flattened else {})
            | dict(settings or {})
        )

    def launch(self) -> None:
        self._launched = datetime.now(UTC)
        super().launch()

    def specify(self) -> ProcessSpec:
        self._add_plugin("debezium-postgres")
        if self._converter == "avro":
            self._add_plugin("connect-avro")  # only there: Connect looks through all classes of all plugins
        worker = self._write("worker.properties", self._worker())
        connector = self._write("connector.properties", self._settings)
        jars = ":".join(str(jar) for jar in bundle_jars("connect"))
        main = "org.apache.kafka.connect.cli.ConnectStandalone"
        return ProcessSpec(
            name=self.name,
            argv=[str(find_java().executable), *_JVM_OPTIONS, "-cp", jars, main, str(worker), str(connector)],
            env=child_environment(),
            cwd=self.folder,
            log=self.log,
        )

    def probe(self) -> None:
        states = [self.status()["connector"], *self.status()["tasks"]]
        if len(states) < 2 or any(one["state"] != "RUNNING" for one in states):
            raise LocalStackError(f"the connector is {states}")

    def status(self) -> dict[str, Any]:
        """What Connect says of its connector and of its task, with a failed one's stack trace."""
        url = f"http://{LOOPBACK}:{self.port}/connectors/{self._settings['name']}/status"
        with urllib.request.urlopen(url, timeout=2) as answer:
            status: dict[str, Any] = json.loads(answer.read())
        return status

    def wait_until_streaming(self, seconds: float = 120.0) -> Self:
        """Return when this start's snapshot, if it makes one, is sent, and changes are read from Postgres' log."""
        reading = (
            "SELECT 1 FROM pg_replication_slots s JOIN pg_stat_replication r ON r.pid = s.active_pid "
            "WHERE s.slot_name = %s AND r.backend_start > %s"
        )
        deadline = time.monotonic() + seconds
        with self.connect() as connection:
            while connection.execute(reading, (self.slot, self._launched)).fetchone() is None:
                self.process.check()
                if time.monotonic() > deadline:
                    raise LocalStackError(f"Debezium does not stream: {self.status()}")
                time.sleep(0.1)
        return self

    def kill(self, seconds: float = 60.0) -> None:
        """As `Server.kill`, when a change behind the last snapshot is kept. A start without it would take a snapshot
        again, in which nothing says what was deleted meanwhile."""
        deadline = time.monotonic() + seconds
        # It stands still while its file is looked at: Connect writes it in place, and a half of it is none.
        self.suspend()
        while not self._is_snapshot_kept():
            self.resume()
            if time.monotonic() > deadline:
                raise LocalStackError("Debezium keeps no offsets of its streaming.")
            time.sleep(0.05)
            self.suspend()
        super().kill()

    def _is_snapshot_kept(self) -> bool:
        file = self.folder / "offsets"
        kept = file.read_bytes() if file.exists() else b""
        # A map that Java has serialized ends with this byte.
        return kept.endswith(b"x") and b'"lsn_proc"' in kept and b'"snapshot"' not in kept

    def restart_if_failed(self) -> None:
        """Restart its task if it has failed, as a person does: a converter that finds no registry ends it."""
        url = f"http://{LOOPBACK}:{self.port}/connectors/{self._settings['name']}"
        asked = urllib.request.Request(f"{url}/restart?includeTasks=true&onlyFailed=true", method="POST")  # noqa: S310
        urllib.request.urlopen(asked, timeout=10).close()  # noqa: S310

    def connect(self) -> psycopg.Connection:
        """A connection to its database, in which each statement commits by itself."""
        return psycopg.connect(
            host=LOOPBACK,
            port=self._postgres.port,
            user=USER,
            password=self._postgres.password,
            dbname=self._database,
            autocommit=True,
        )

    def _worker(self) -> dict[str, str]:
        return {
            "bootstrap.servers": self._kafka,
            "key.converter": "org.apache.kafka.connect.json.JsonConverter",
            "value.converter": "org.apache.kafka.connect.json.JsonConverter",
            "offset.storage.file.filename": str(self.folder / "offsets"),
            "offset.flush.interval.ms": "1000",
            "plugin.path": str(self.folder / "plugins"),
            "listeners": f"http://{LOOPBACK}:{self.port}",
        }

    def _connector(self, tables: str, prefix: str) -> dict[str, str]:
        return {
            "name": "changes",
            "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
            "tasks.max": "1",
            "plugin.name": "pgoutput",
            "database.hostname": LOOPBACK,
            "database.port": str(self._postgres.port),
            "database.user": USER,
            "database.password": self._postgres.password,
            "database.dbname": self._database,
            "table.include.list": tables,
            "topic.prefix": prefix,
            "slot.name": self.slot,
            "publication.name": self.slot,
            "publication.autocreate.mode": "filtered",
            # The broker makes no topics by itself.
            "topic.creation.default.replication.factor": "1",
            "topic.creation.default.partitions": "1",
            # Otherwise truncations are left out.
            "skipped.operations": "none",
            "poll.interval.ms": "50",
        }

    def _add_plugin(self, bundle: str) -> None:
        folder = self.folder / "plugins" / bundle
        folder.mkdir(parents=True, exist_ok=True)
        for jar in bundle_jars(bundle):
            link = folder / jar.name
            # Connect has its own of these.
            if not re.match(r"(kafka-clients|connect-api|connect-json|slf4j-api)-", jar.name) and not link.is_symlink():
                link.symlink_to(jar)

    def _write(self, name: str, settings: Mapping[str, str]) -> Path:
        path = self.folder / name
        path.touch(0o600)
        path.write_text("".join(f"{setting}={value}\n" for setting, value in settings.items()))
        return path


def _converters(converter: Converter, registry: RegistryServer | None) -> dict[str, str]:
    json_converter = "org.apache.kafka.connect.json.JsonConverter"
    schemas = str(converter == "json-schema-part").lower()
    settings = {
        "key.converter": json_converter,
        "key.converter.schemas.enable": schemas,
        "value.converter": json_converter,
        "value.converter.schemas.enable": schemas,
    }
    if converter == "avro":
        if registry is None:
            raise ValueError("Avro needs a registry.")
        for side in ("key", "value"):
            settings |= {
                f"{side}.converter": "io.apicurio.registry.utils.converter.AvroConverter",
                f"{side}.converter.apicurio.registry.url": registry.own_url,
                f"{side}.converter.apicurio.registry.auto-register": "true",
                # Confluent's wire format: a zero, four bytes of the id that its API knows, the value.
                f"{side}.converter.apicurio.registry.as-confluent": "true",
                f"{side}.converter.apicurio.registry.use-id": "contentId",
                f"{side}.converter.apicurio.registry.headers.enabled": "false",
            }
            del settings[f"{side}.converter.schemas.enable"]
    return settings


_JVM_OPTIONS = [
    "-Xmx400m",
    "-XX:+UseSerialGC",
    "-XX:+ExitOnOutOfMemoryError",
    "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
    "-Dorg.slf4j.simpleLogger.log.io.debezium=info",
    "-Dorg.slf4j.simpleLogger.showDateTime=true",
]
