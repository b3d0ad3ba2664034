"""Real servers for the tests: started when first asked for, shared by the session, gone with it however it ends.

Session-scoped: `kafka` (bootstrap servers), `elasticsearch` (base URL), and behind them `kafka_server`,
`elasticsearch_server`, `postgres_server`; `registry` (its `url` is the base of Confluent's API). Function-scoped:
`postgres` (the SQLAlchemy URL of a fresh database).
A test that kills, suspends or stops a server makes one of its own, in `server_folder`: `RegistryServer(server_folder)`.
Started again it has its schemas; one of another folder on the same `port` is a registry that has lost them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import uuid
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient

from headrace.devstack.elasticsearch import ElasticsearchServer
from headrace.devstack.jars import ELASTICSEARCH_VERSION, bundle_jars
from headrace.devstack.kafka import KafkaServer
from headrace.devstack.postgres import PostgresServer
from headrace.devstack.registry import RegistryServer


@contextmanager
def new_server_folder() -> Iterator[Path]:
    """A folder for the data of servers, which goes with them."""
    # Not below pytest's own temporary folder: that is closed to others, and Postgres runs as nobody under root.
    folder = Path(tempfile.mkdtemp(prefix="headrace-test-"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def server_folder() -> Iterator[Path]:
    """A folder for the data of a test's own servers."""
    with new_server_folder() as folder:
        yield folder


@pytest.fixture(scope="session")
def kafka_server() -> Iterator[KafkaServer]:
    """The session's Kafka. Do not stop it: others use it too."""
    with new_server_folder() as folder, KafkaServer(folder) as server:
        yield server


@pytest.fixture(scope="session")
def kafka(kafka_server: KafkaServer) -> str:
    """Bootstrap servers of a real Kafka. Topics are not created by use, and are shared: name yours uniquely."""
    return kafka_server.bootstrap_servers


@pytest.fixture(scope="session")
def kafka_admin(kafka: str) -> AdminClient:
    """An admin client of the session's Kafka."""
    return AdminClient({"bootstrap.servers": kafka})


@pytest.fixture(scope="session")
def elasticsearch_server() -> Iterator[ElasticsearchServer]:
    """The session's Elasticsearch. Do not stop it: others use it too."""
    with new_server_folder() as folder:
        server = ElasticsearchServer(folder)
        if shutil.which("javac"):
            _add_processor(folder)
        with server:
            yield server


def _add_processor(folder: Path) -> None:
    """Give Elasticsearch an ingest processor: those that come with it are not published as jars."""
    module, classes = folder / "home" / "modules" / "acting", folder / "classes"
    module.mkdir(parents=True)
    source = Path(__file__).with_name("ActingPlugin.java")
    jars = os.pathsep.join(map(str, bundle_jars("elasticsearch")))
    subprocess.run(["javac", "-proc:none", "--release", "17", "-cp", jars, "-d", classes, source], check=True)
    with zipfile.ZipFile(module / "acting.jar", "w") as jar:
        for each in classes.rglob("*.class"):
            jar.write(each, each.relative_to(classes))
    (module / "plugin-descriptor.properties").write_text(
        f"description=a processor for tests\nversion={ELASTICSEARCH_VERSION}\nname=acting\njava.version=17\n"
        f"elasticsearch.version={ELASTICSEARCH_VERSION}\nclassname=headrace.tests.ActingPlugin\n"
        "extended.plugins=\nhas.native.controller=false\n"
    )


@pytest.fixture(scope="session")
def elasticsearch(elasticsearch_server: ElasticsearchServer) -> str:
    """The base URL of a real Elasticsearch. Indices are shared: name yours uniquely."""
    return elasticsearch_server.url


@pytest.fixture(scope="session")
def registry() -> Iterator[RegistryServer]:
    """A real schema registry. Do not stop it: others use it too. Subjects are shared: name yours uniquely.

    It checks no compatibility until it is told to.
    """
    with new_server_folder() as folder, RegistryServer(folder) as server:
        yield server


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """The session's Postgres; it survives kill -9 of itself, not of the machine (no fsync)."""
    with (
        new_server_folder() as folder,
        PostgresServer(
            folder, settings={"fsync": "off", "synchronous_commit": "off", "wal_level": "logical"}
        ) as server,
    ):
        yield server


@pytest.fixture
def postgres(postgres_server: PostgresServer) -> Iterator[str]:
    """The SQLAlchemy URL of a fresh Postgres database, dropped after the test."""
    name = f"test_{uuid.uuid4().hex[:12]}"
    url = postgres_server.create_database(name)
    yield url
    postgres_server.drop_database(name)
