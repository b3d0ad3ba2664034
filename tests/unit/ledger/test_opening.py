"""Opening a ledger: URLs, schema, secrets, threads, forks."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import re
import socket
import sqlite3
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import inspect, make_url
from sqlalchemy.exc import OperationalError
from tests.unit.ledger.next_schema import NEWER, OLDER, install_next_schema

from headrace.blocks import TopicPartition
from headrace.ledger import Ledger, errors
from headrace.ledger.database import (
    HEAD,
    MIGRATIONS,
    Database,
    Migration,
    engine_url,
    migrate_schema,
    read_version,
)
from headrace.ledger.engines import open_engine
from headrace.ledger.errors import (
    LedgerError,
    LedgerFullError,
    LedgerUnavailableError,
    LedgerUrlError,
    SchemaError,
    StreamNotFoundError,
)
from headrace.ledger.model import Model
from headrace.ledger.postgres_engine import BoundedConnection, postgres_engine

SECRET = "hunter2"
STREAM = {"batch_interval_ms": 1000, "block_interval_ms": 200}


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql+psycopg://me:{SECRET}@db/ledger",
        f"postgresql://db/ledger?user=me&password={SECRET}",
        f"postgresql://db/ledger?sslpassword={SECRET}",
    ],
)
def test_a_url_with_a_password_is_refused_without_showing_it(url: str) -> None:
    with pytest.raises(LedgerUrlError, match="connection:<conn_id>") as refused:
        Ledger.open(url)
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize(
    "url", ["sqlite://", "sqlite:///:memory:", "sqlite:///relative.db", "mysql://db/x", "nonsense"]
)
def test_other_urls_are_refused_with_a_remedy(url: str) -> None:
    with pytest.raises(LedgerUrlError) as refused:
        Ledger.open(url)
    assert refused.value.remedy


def test_postgres_means_psycopg() -> None:
    assert engine_url("postgresql://me@db/ledger").drivername == "postgresql+psycopg"


@pytest.mark.parametrize("scheme", ["postgres", "mysql", "postgres+psycopg2"])
def test_a_url_of_another_scheme_is_refused_with_the_known_forms(scheme: str) -> None:
    with pytest.raises(LedgerUrlError) as refused:
        engine_url(f"{scheme}://me@db/ledger")
    assert f"does not begin with '{scheme}'" in str(refused.value)
    assert "postgresql+psycopg://user@host/db" in str(refused.value)
    assert ("sqlite:////absolute/path.db" in str(refused.value)) is (scheme == "mysql")


def test_the_password_of_a_connection_is_used_and_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    connection = {"conn_type": "postgres", "host": "127.0.0.1", "port": 1, "login": "me", "password": SECRET}
    libpq = {"sslmode": "disable", "options": "-c statement_timeout=5000", "keepalives_idle": 7}
    extra = libpq | {"cursor": "dictcursor", "host": "elsewhere", "password": "another"}
    monkeypatch.setenv("AIRFLOW_CONN_LEDGER", json.dumps(connection | {"schema": "ledger", "extra": extra}))
    url = engine_url("connection:ledger")
    assert (url.password, url.database, dict(url.query)) == (
        SECRET,
        "ledger",
        {name: str(value) for name, value in libpq.items()},
    )
    assert SECRET not in repr(url)
    with pytest.raises(LedgerUnavailableError) as refused:
        Ledger.open("connection:ledger")
    assert "login and password" in str(refused.value.remedy)
    assert SECRET not in repr(refused.value) + str(refused.value) + repr(refused.value.__cause__)


def test_a_connection_that_leads_nowhere_ends_within_16_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an outage of the network, a receiver that waits for such a connection stores nothing until then."""
    given: dict[str, Any] = {}

    def connect(*_: Any, **parameters: Any) -> BoundedConnection:
        given.update(parameters)
        raise psycopg.OperationalError("no server here")

    monkeypatch.setattr(BoundedConnection, "connect", connect)
    engine = postgres_engine(make_url("postgresql+psycopg://me@db/ledger"))
    with pytest.raises(OperationalError), engine.connect():
        pass
    # A lost request, and a lost answer.
    assert given["tcp_user_timeout"] <= 16_000
    assert given["keepalives_idle"] + given["keepalives_count"] * given["keepalives_interval"] <= 16
    assert given["keepalives"] == 1


def test_a_server_that_refuses_all_for_its_full_disk_is_named(tmp_path: Path) -> None:
    """libpq gives no SQLSTATE of an error before the log-in, only the text."""
    fields = b"SFATAL\0C53100\0Mcould not write init file: No space left on device\0\0"

    def refuse() -> None:
        client, _ = server.accept()
        with client:
            client.recv(4096)
            client.sendall(b"E" + struct.pack("!I", 4 + len(fields)) + fields)

    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as thread:
        refused = thread.submit(refuse)
        url = f"postgresql://me@127.0.0.1:{server.getsockname()[1]}/ledger?sslmode=disable&gssencmode=disable"
        with pytest.raises(
            LedgerFullError, match=r"disk of the ledger's database ledger on 127\.0\.0\.1 is full"
        ) as full:
            Ledger.open(url)
        refused.result()
    assert full.value.remedy == "Make room on the disk of the database server."


def test_a_connection_of_another_kind_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_LEDGER", json.dumps({"conn_type": "http", "host": "x"}))
    with pytest.raises(LedgerUrlError, match="'http'"):
        Ledger.open("connection:ledger")


def test_a_sqlite_connection_names_its_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_LEDGER", json.dumps({"conn_type": "sqlite", "host": f"{tmp_path}/l.db"}))
    with Ledger.open("connection:ledger") as ledger:
        assert ledger.url == "connection:ledger"
        assert (tmp_path / "l.db").exists()


def test_a_connection_of_our_own_type_is_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_LEDGER", json.dumps({"conn_type": "headrace_ledger", "schema": "/data/l.db"}))
    assert engine_url("connection:ledger").get_backend_name() == "sqlite"
    connection = {"conn_type": "headrace_ledger", "host": "db", "schema": "ledger"}
    monkeypatch.setenv("AIRFLOW_CONN_LEDGER", json.dumps(connection))
    assert engine_url("connection:ledger").get_backend_name() == "postgresql"


def test_opening_makes_the_folder_and_the_schema_once(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/new folder/ledger.db"
    with pytest.raises(LedgerUnavailableError, match="no ledger at"):
        Ledger.open(url, create=False)
    assert not (tmp_path / "new folder").exists()
    with Ledger.open(url) as ledger:
        ledger.streams.register("s", "{}", **STREAM)
    with Ledger.open(url, create=False) as ledger:
        assert ledger.streams.get("s").name == "s"


def test_an_older_ledger_is_migrated_by_the_command_alone(
    fresh_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with Ledger.open(fresh_url) as ledger:
        ledger.streams.register("s", "{}", **STREAM)
    install_next_schema(monkeypatch, tmp_path)
    database = Database(open_engine(engine_url(fresh_url, None), create=True))
    for create in (False, True):
        with pytest.raises(SchemaError, match=rf"is {OLDER}.*headrace ledger migrate --ledger {re.escape(fresh_url)}"):
            Ledger.open(fresh_url, create=create)
    with database.read() as connection:
        assert read_version(connection) == OLDER
    assert Ledger.migrate(fresh_url) == Migration(OLDER, NEWER)
    assert Ledger.migrate(fresh_url) == Migration(NEWER, NEWER)
    with Ledger.open(fresh_url, create=False), database.read() as connection:
        assert connection.exec_driver_sql("SELECT name, owner FROM streams").all() == [("s", "nobody")]


def test_a_ledger_an_older_headrace_creates_is_not_migrated(
    fresh_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The database was empty when it was looked at, and has the older schema once the lock is held."""
    Ledger.open(fresh_url).close()
    install_next_schema(monkeypatch, tmp_path)
    database = Database(open_engine(engine_url(fresh_url, None), create=True))
    with pytest.raises(SchemaError, match="headrace ledger migrate"):
        migrate_schema(database, only_empty=fresh_url)
    with database.read() as connection:
        assert read_version(connection) == OLDER


def test_an_empty_file_is_no_ledger_and_stays_empty(tmp_path: Path) -> None:
    (tmp_path / "ledger.db").touch()
    with pytest.raises(LedgerUnavailableError, match="no ledger at"):
        Ledger.open(f"sqlite:///{tmp_path}/ledger.db", create=False)
    assert (tmp_path / "ledger.db").read_bytes() == b""


def test_another_programs_database_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "airflow.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE alembic_version (version_num TEXT)")
    before = path.read_bytes()
    for create in (False, True):
        with pytest.raises(LedgerUrlError, match=r"another program's database.*file of its own"):
            Ledger.open(f"sqlite:///{path}", create=create)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["airflow.db"]


def test_an_open_ledger_needs_no_alembic_and_only_its_dialect(ledger_url: str) -> None:
    Ledger.open(ledger_url)
    script = (
        "import sys; from headrace.ledger import Ledger; Ledger.open(sys.argv[1]); "
        "names = ('alembic', 'airflow', 'pyspark', 'sqlalchemy.dialects.sqlite', 'sqlalchemy.dialects.postgresql'); "
        "print([name for name in names if name in sys.modules])"
    )
    run = subprocess.run(
        [sys.executable, "-c", script, ledger_url], check=True, capture_output=True, text=True, timeout=60
    )
    assert run.stdout.strip() == f"['sqlalchemy.dialects.{ledger_url.partition(':')[0].partition('+')[0]}']"


def test_no_row_number_is_used_twice_on_sqlite(tmp_path: Path) -> None:
    """The tables are those of blocks, segments, gaps and events."""
    url = f"sqlite:///{tmp_path}/ledger.db"
    with Ledger.open(url) as ledger, ledger.streams._database.write() as connection:
        query = "SELECT name FROM sqlite_master WHERE sql LIKE '% AUTOINCREMENT%' ORDER BY name"
        assert connection.exec_driver_sql(query).scalars().all() == ["blocks", "events", "gaps", "segments"]


def test_a_newer_schema_is_refused(ledger: Any) -> None:
    database = ledger.streams._database
    with database.write() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
    for create in (False, True):
        with pytest.raises(SchemaError, match=r"is 9999.*newer headrace"):
            Ledger.open(ledger.url, create=create)
    with pytest.raises(SchemaError, match="newer headrace"):
        Ledger.migrate(ledger.url)
    with pytest.raises(StreamNotFoundError, match="KafkaReceiverOperator"):
        ledger.streams.get("nobody's")


def test_the_head_is_the_newest_migration() -> None:
    assert ScriptDirectory(str(MIGRATIONS)).get_current_head() == HEAD


def test_the_migrations_make_the_tables(ledger: Any) -> None:
    with ledger.streams._database.read() as connection:
        context = MigrationContext.configure(connection, opts={"target_metadata": Model.metadata})
        assert compare_metadata(context, Model.metadata) == []


def test_the_migrations_make_partial_indexes_like_the_tables(ledger: Any) -> None:
    """SQLAlchemy does not compare the conditions."""
    described = {
        index.name: index.info["where"]
        for table in Model.metadata.tables.values()
        for index in table.indexes
        if "where" in index.info
    }
    with ledger.streams._database.read() as connection:
        option = f"{connection.dialect.name}_where"
        made = {
            index["name"]: str(index["dialect_options"][option])
            for table in Model.metadata.tables
            for index in inspect(connection).get_indexes(table)
            if option in index.get("dialect_options", {})
        }
        keeps_the_text = connection.dialect.name == "sqlite"
    assert made.keys() == described.keys()
    assert made == described or not keeps_the_text


def test_a_ledger_pickles_as_its_url(ledger: Any) -> None:
    ledger.streams.register("s", "{}", **STREAM)
    again = pickle.loads(pickle.dumps(ledger))  # noqa: S301
    assert again.url == ledger.url
    assert again.streams.get("s") == ledger.streams.get("s")


def test_the_clock_is_the_databases(ledger_url: str) -> None:
    with Ledger.open(ledger_url) as ledger:
        first, second = ledger.now_ms(), ledger.now_ms()
    assert 1_700_000_000_000 < first <= second < first + 60_000


def test_threads_and_event_loops_share_a_ledger(world: Any) -> None:
    events = world.ledger.events
    before = len(events.page("flights"))
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda _: world.ledger.jobs.renew(world.job), range(40)))
        list(threads.map(lambda n: world.ledger.receivers.heartbeat(world.receiver, sealed_through_ms=n), range(40)))

    async def look() -> list[Any]:
        return await asyncio.gather(*(asyncio.to_thread(world.ledger.jobs.current, "flights") for _ in range(20)))

    assert {row.epoch for row in asyncio.run(look())} == {1}
    assert len(events.page("flights")) == before
    assert world.ledger.receivers.all("flights")[0].sealed_through_ms == 39


def test_a_forked_child_has_connections_of_its_own(world: Any) -> None:
    child = os.fork()
    if child == 0:
        # Nothing of pytest may run in here.
        try:
            world.add({0: (0, 10)})
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert world.position() == 10
    world.add({0: (10, 20)}, sequence=1)


def test_errors_pickle(world: Any) -> None:
    partition = TopicPartition("t", "id", 1)
    raised = [
        errors.StreamNotFoundError("s"),
        errors.PositionConflictError(partition, expected=1, got=2),
        errors.PartitionNotAssignedError("r", partition, None),
        errors.OutputsMissingError(1, {"a"}),
        errors.SlotBusyError("busy", busy=[1], remedy="wait"),
        errors.LeaseHeldError("held", holder="h", since_ms=1, until_ms=2, remedy="wait"),
    ]
    for error in raised:
        again = pickle.loads(pickle.dumps(error))  # noqa: S301
        assert (type(again), str(again), again.__dict__) == (type(error), str(error), error.__dict__)
        assert isinstance(error, LedgerError)
