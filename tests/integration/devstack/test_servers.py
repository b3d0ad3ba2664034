from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import psycopg
import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from sqlalchemy import create_engine, text

from headrace.devstack.airflow import DATABASE_SETTINGS
from headrace.devstack.elasticsearch import ElasticsearchServer
from headrace.devstack.errors import LocalStackError, ServerDiedError
from headrace.devstack.kafka import KafkaServer
from headrace.devstack.postgres import USER, PostgresServer
from headrace.devstack.registry import RegistryServer


def _create_topic(admin: AdminClient, topic: str, **config: str) -> None:
    for future in admin.create_topics([NewTopic(topic, 2, 1, config=dict(config))]).values():
        future.result(30)


def _read(bootstrap: str, topic: str, partition: int, count: int, **config: str) -> list[bytes]:
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "t", "enable.auto.commit": "false"} | config)
    consumer.assign([TopicPartition(topic, partition, 0)])
    try:
        return [message.value() or b"" for message in consumer.consume(count, timeout=30)]
    finally:
        consumer.close()


def test_kafka_takes_megabyte_values_and_transactions(kafka: str, kafka_admin: AdminClient) -> None:
    _create_topic(kafka_admin, "local-values")
    producer = Producer(
        {"bootstrap.servers": kafka, "transactional.id": "local-test", "message.max.bytes": str(4 << 20)}
    )
    producer.init_transactions(60)
    producer.begin_transaction()
    producer.produce("local-values", b"x" * (2 << 20), partition=0)
    producer.abort_transaction(60)
    producer.begin_transaction()
    producer.produce("local-values", b"y" * (2 << 20), partition=0)
    producer.commit_transaction(60)

    (value,) = _read(kafka, "local-values", 0, 1, **{"isolation.level": "read_committed"})

    assert value == b"y" * (2 << 20)


def test_kafka_does_not_create_topics_by_use(kafka: str, kafka_admin: AdminClient) -> None:
    assert "never-created" not in kafka_admin.list_topics("never-created", timeout=10).topics or (
        kafka_admin.list_topics("never-created", timeout=10).topics["never-created"].error is not None
    )


def test_kafka_keeps_its_data_and_port_over_a_crash(server_folder: Path) -> None:
    with KafkaServer(server_folder) as server:
        bootstrap = server.bootstrap_servers
        _create_topic(AdminClient({"bootstrap.servers": bootstrap}), "kept")
        producer = Producer({"bootstrap.servers": bootstrap})
        producer.produce("kept", b"before", partition=1)
        assert producer.flush(30) == 0
        server.kill()
        assert not server.alive

        server.start()

        assert server.bootstrap_servers == bootstrap
        assert _read(bootstrap, "kept", 1, 1) == [b"before"]


def test_elasticsearch_indexes_and_searches(elasticsearch: str) -> None:
    with httpx.Client(base_url=elasticsearch, timeout=60) as client:
        client.put("/local-a/_doc/1?refresh=true", json={"greeting": "hello world"})
        found = client.post("/local-a/_search", json={"query": {"match": {"greeting": "hello"}}}).json()
    assert found["hits"]["total"]["value"] == 1


def test_elasticsearch_keeps_its_data_and_port_over_a_crash(server_folder: Path) -> None:
    with ElasticsearchServer(server_folder) as server:
        url = server.url
        httpx.put(f"{url}/kept/_doc/1", json={"a": 1}, timeout=60).raise_for_status()
        server.kill()

        server.start()

        assert server.url == url
        httpx.get(f"{url}/_cluster/health/kept?wait_for_status=yellow&timeout=30s", timeout=60).raise_for_status()
        assert httpx.get(f"{url}/kept/_doc/1", timeout=60).json()["_source"] == {"a": 1}


_SCHEMA = '{"type":"record","name":"Order","fields":[{"name":"id","type":"long"}]}'


def _register(url: str, subject: str, schema: str) -> int:
    answer = httpx.post(f"{url}/subjects/{subject}/versions", json={"schema": schema}, timeout=60)
    return int(answer.raise_for_status().json()["id"])


def _schema(url: str, schema_id: int) -> str:
    return str(httpx.get(f"{url}/schemas/ids/{schema_id}", timeout=60).raise_for_status().json()["schema"])


def test_the_registry_serves_confluents_api(registry: RegistryServer) -> None:
    schema_id = _register(registry.url, "local-orders-value", _SCHEMA)
    assert _schema(registry.url, schema_id) == _SCHEMA
    assert httpx.get(f"{registry.url}/schemas/ids/1000000", timeout=60).json()["error_code"] == 40403

    assert httpx.get(f"{registry.url}/config", timeout=60).json() == {"compatibilityLevel": "NONE"}
    configured = httpx.put(f"{registry.url}/config/local-orders-value", json={"compatibility": "BACKWARD"}, timeout=60)
    configured.raise_for_status()
    with pytest.raises(httpx.HTTPStatusError, match="409"):
        _register(registry.url, "local-orders-value", _SCHEMA.replace('"id"', '"other"'))


def test_the_registry_keeps_its_schemas_over_a_crash(server_folder: Path) -> None:
    with RegistryServer(server_folder) as server:
        url = server.url
        schema_id = _register(url, "kept", _SCHEMA)
        server.kill()

        server.start()

        assert server.url == url
        assert _schema(url, schema_id) == _SCHEMA


def test_postgres_gives_a_fresh_database(postgres: str) -> None:
    engine = create_engine(postgres)
    with engine.begin() as connection:
        connection.execute(text("create table fresh (a int)"))
        assert connection.execute(text("select count(*) from fresh")).scalar() == 0
    engine.dispose()


def test_postgres_needs_its_password(postgres_server: PostgresServer) -> None:
    """Every user of the machine reaches its port, and its superuser can run programs."""
    assert postgres_server.passfile.stat().st_mode & 0o077 == 0
    login = {"host": "127.0.0.1", "port": postgres_server.port, "user": USER, "dbname": "postgres"}
    for password in ({"passfile": "/dev/null"}, {"password": "wrong"}):
        with pytest.raises(psycopg.OperationalError, match="password"):
            psycopg.connect(**login, **password)
    engine = create_engine(postgres_server.url())
    with engine.connect() as connection:
        assert connection.execute(text("show unix_socket_directories")).scalar() == ""
        kinds = connection.execute(text("select distinct auth_method from pg_hba_file_rules")).scalars().all()
    engine.dispose()
    assert kinds == ["scram-sha-256"]


def test_postgres_gives_every_test_its_own(postgres: str) -> None:
    engine = create_engine(postgres)
    with engine.begin() as connection:
        assert connection.execute(text("select to_regclass('fresh')")).scalar() is None
    engine.dispose()


def test_postgres_keeps_its_data_over_a_crash(server_folder: Path) -> None:
    with PostgresServer(server_folder) as server:
        engine = create_engine(server.create_database("kept"))
        with engine.begin() as connection:
            connection.execute(text("create table kept as select 1 as a"))
        server.kill()
        engine.dispose()

        server.start()

        with engine.begin() as connection:
            assert connection.execute(text("select a from kept")).scalar() == 1
        engine.dispose()


@pytest.mark.skipif(os.geteuid() != 0, reason="only for root does Postgres run as another user")
def test_postgres_of_root_works_in_a_closed_folder(server_folder: Path) -> None:
    server_folder.chmod(0o700)
    server = PostgresServer(server_folder / "postgres")
    try:
        with server:
            assert server.create_database("a") == server.create_database("a")
            assert psutil.Process(server.process.pid).uids().effective != 0
        assert not server.data.is_relative_to(server_folder)
        again = PostgresServer(server_folder / "postgres")
        assert again.data == server.data, "the next start finds its data"
    finally:
        server.wipe()
    assert not server.data.exists()


def test_postgres_is_not_given_a_folder_that_links_elsewhere(server_folder: Path) -> None:
    (server_folder / "elsewhere").mkdir()
    (server_folder / "data").symlink_to(server_folder / "elsewhere")
    with pytest.raises(LocalStackError, match="not a folder of ours"):
        PostgresServer(server_folder).start()


def test_a_server_that_dies_at_start_says_why(server_folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        server = KafkaServer(server_folder, port=other.getsockname()[1])
        with pytest.raises(ServerDiedError) as raised:
            server.start()
    assert "Address already in use" in str(raised.value)
    assert not server.alive


def test_servers_listen_on_loopback_only(
    kafka_server: KafkaServer,
    elasticsearch_server: ElasticsearchServer,
    postgres_server: PostgresServer,
    registry: RegistryServer,
) -> None:
    for server in (kafka_server, elasticsearch_server, postgres_server, registry):
        processes = psutil.Process(server.process.guard_pid).children(recursive=True)
        listening = {
            connection.laddr.ip
            for process in processes
            for connection in process.net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        }
        assert listening <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}, server.name
        assert listening, server.name


_OWNER = """
import sys, pathlib
from headrace.devstack.postgres import PostgresServer
server = PostgresServer(pathlib.Path(sys.argv[1])).start()
print(server.process.guard_pid, server.process.pid, flush=True)
sys.stdin.read()
"""


def test_a_server_ends_with_an_owner_that_is_killed(server_folder: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", _OWNER, str(server_folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    line = owner.stdout.readline()
    processes = [psutil.Process(int(pid)) for pid in line.split()]
    assert len(processes) == 2, "the owner failed"
    os.kill(owner.pid, signal.SIGKILL)
    owner.communicate()

    _, alive = psutil.wait_procs(processes, timeout=20)

    assert not alive


@pytest.mark.parametrize("pipelined", [False, True])
def test_airflows_database_ends_an_idle_transaction(postgres_server: PostgresServer, *, pipelined: bool) -> None:
    """A killed scheduler's forked workers hold its connection open, and with it the lock on a run."""
    assert set(DATABASE_SETTINGS) == {"idle_in_transaction_session_timeout", "transaction_timeout"}
    name = f"abandoned_{pipelined}".lower()
    url = postgres_server.create_database(name, settings=dict.fromkeys(DATABASE_SETTINGS, "2s"))
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE runs AS SELECT 1 AS run"))
    locked = text("SELECT run FROM runs FOR UPDATE SKIP LOCKED")
    with engine.connect() as abandoned:
        assert abandoned.execute(locked).all()
        if pipelined:
            # As the scheduler leaves it when it is killed between two statements of an executemany.
            raw: Any = abandoned.connection.driver_connection
            raw.pgconn.enter_pipeline_mode()
            raw.pgconn.send_query_params(b"SELECT 1", None)
            raw.pgconn.send_flush_request()
            raw.pgconn.flush()

        def is_free() -> bool:
            with engine.begin() as connection:
                return bool(connection.execute(locked).all())

        assert not is_free()
        deadline = time.monotonic() + 60
        while not is_free():
            assert time.monotonic() < deadline, "the lock is held for ever"
            time.sleep(0.2)
        abandoned.invalidate()
    engine.dispose()
    postgres_server.drop_database(name)
