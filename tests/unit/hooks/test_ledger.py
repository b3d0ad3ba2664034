"""Blocking calls of an event loop: those of a ledger that hangs hold few threads, and nobody else's."""

from __future__ import annotations

import asyncio
import contextvars
import json
import sys
import threading
import uuid
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from tests.unit.ledger.next_schema import OLDER, install_next_schema

from headrace.hooks.ledger import THREADS, LedgerHook, in_thread, register
from headrace.ledger import Ledger
from headrace.ledger.database import Database, engine_url, read_version
from headrace.ledger.engines import open_engine
from headrace.ledger.errors import LedgerUrlError, SchemaError
from headrace.stream import ConsoleOutput, KafkaInput, ParquetOutput, State, Stream


def test_a_url_is_opened_as_it_is(tmp_path):
    with LedgerHook(f"sqlite:///{tmp_path}/ledger.db").opened() as ledger:
        assert ledger.streams.all() == []


@pytest.mark.parametrize("kind", ["headrace_ledger", "sqlite"])
def test_a_connection_without_host_is_a_file(tmp_path, monkeypatch, kind):
    connection = {"conn_type": kind, "schema": f"{tmp_path}/ledger.db"}
    monkeypatch.setenv("AIRFLOW_CONN_MY_LEDGER", json.dumps(connection))
    hook = LedgerHook(ledger_conn_id="my_ledger")
    ok, message = hook.test_connection()
    assert not ok
    assert "no ledger at" in message
    assert list(tmp_path.iterdir()) == [], "the Test button makes nothing"
    with LedgerHook("connection:my_ledger").opened() as ledger:
        assert ledger.streams.all() == []
    assert hook.test_connection() == (True, "The ledger holds 0 stream(s).")


def test_neither_the_hook_nor_the_test_button_migrates(tmp_path, monkeypatch):
    url = f"sqlite:///{tmp_path}/ledger.db"
    Ledger.open(url).close()
    install_next_schema(monkeypatch, tmp_path)
    with pytest.raises(SchemaError, match="headrace ledger migrate"):
        LedgerHook(url).get_conn()
    with pytest.raises(SchemaError, match="headrace ledger migrate"):
        asyncio.run(LedgerHook(url).aget_conn())
    assert not LedgerHook(url).test_connection()[0]
    with Database(open_engine(engine_url(url), create=False)).read() as connection:
        assert read_version(connection) == OLDER


def test_an_event_loop_opens_it_too(tmp_path):
    async def scenario():
        ledger = await LedgerHook(f"sqlite:///{tmp_path}/ledger.db").aget_conn()
        await asyncio.to_thread(ledger.close)

    asyncio.run(scenario())


def test_another_kind_of_connection_is_refused_without_secrets(monkeypatch):
    connection = {"conn_type": "http", "host": "db", "password": "s3cret"}
    monkeypatch.setenv("AIRFLOW_CONN_MY_LEDGER", json.dumps(connection))
    with pytest.raises(LedgerUrlError, match="headrace_ledger") as found:
        LedgerHook("connection:my_ledger").get_conn()
    assert "s3cret" not in str(found.value)


def test_the_test_button_shows_what_is_wrong(monkeypatch):
    monkeypatch.setenv("AIRFLOW_CONN_MY_LEDGER", json.dumps({"conn_type": "headrace_ledger"}))
    ok, message = LedgerHook(ledger_conn_id="my_ledger").test_connection()
    assert not ok
    assert message


def test_a_stream_is_registered_with_steps_order_and_lateness(tmp_path):
    stream = Stream(
        name="flights",
        inputs=KafkaInput(id="departures", bootstrap_servers="127.0.0.1:1", topics="departures"),
        outputs=[ConsoleOutput(), ParquetOutput(path=f"{tmp_path}/files")],
        batch_interval="10 s",
        batch_by="timestamp",
        allowed_lateness="30 s",
        coalesce=True,
        state=State(update="module:update", fields="word STRING, count BIGINT", keys="word"),
        storage=tmp_path / "storage",
        ledger=f"sqlite:///{tmp_path}/ledger.db",
    )
    with Ledger.open(stream.ledger) as ledger:
        register(ledger, stream)
        row = ledger.streams.get("flights")
        register(ledger, stream)
        assert ledger.streams.get("flights").revision == 1
    assert row.outputs == ("state", "console", "parquet")
    assert (row.ordered, row.batch_by, row.allowed_lateness_ms) == (True, "timestamp", 30_000)
    assert row.max_concurrent_batches == 1


def test_a_task_of_a_known_stream_loads_no_recovery_or_receivers(tmp_path, monkeypatch):
    stream = clicks(tmp_path)
    with Ledger.open(stream.ledger) as ledger:
        register(ledger, stream)
        # This makes importing it an error.
        monkeypatch.setitem(sys.modules, "headrace.batch.recover", None)
        assert register(ledger, stream) == 1


@pytest.fixture
def in_a_task(monkeypatch):
    """A task of a version of its DAG that was made at this time."""

    def run(at_ms: int | None) -> None:
        version = uuid.uuid4() if at_ms is None else uuid.UUID(int=(at_ms << 80) | (7 << 76) | (2 << 62))
        ti = SimpleNamespace(dag_version_id=version)
        monkeypatch.setattr("headrace.hooks.ledger.get_current_context", lambda: {"ti": ti})

    return run


def test_an_older_dag_versions_tasks_keep_the_newest_definition(tmp_path, in_a_task):
    old = clicks(tmp_path)
    new = old.model_copy(update={"batch_by": "timestamp"})
    with Ledger.open(old.ledger) as ledger:
        newest = []
        for at_ms, stream in [(1_000, old), (2_000, new), (1_000, old), (2_000, new), (1_000, old), (3_000, old)]:
            in_a_task(at_ms)
            assert register(ledger, stream) == (1 if stream is old else 2)
            newest.append(ledger.streams.get("clicks").revision)
        assert newest == [1, 2, 2, 2, 2, 1]


def test_without_a_version_the_last_one_counts(tmp_path, in_a_task):
    old = clicks(tmp_path)
    new = old.model_copy(update={"batch_by": "timestamp"})
    in_a_task(None)
    with Ledger.open(old.ledger) as ledger:
        assert [register(ledger, stream) for stream in (old, new, old)] == [1, 2, 1]
        assert ledger.streams.get("clicks").batch_by == "arrival"


def clicks(folder) -> Stream:
    return Stream(
        name="clicks",
        inputs=KafkaInput(bootstrap_servers="127.0.0.1:1", topics="clicks"),
        outputs=ConsoleOutput(),
        batch_interval="10 s",
        storage=str(folder),
        ledger=f"sqlite:///{folder}/ledger.db",
    )


who = contextvars.ContextVar("who", default="nobody")


@pytest.fixture
def answer() -> Iterator[threading.Event]:
    """What the calls to a hanging ledger wait for."""
    event = threading.Event()
    yield event
    event.set()


async def fill(url: str, call) -> list[asyncio.Task]:
    """More calls to the ledger than it has threads."""
    tasks = [asyncio.create_task(in_thread(url, call)) for _ in range(THREADS + 20)]
    await asyncio.sleep(0.1)
    return tasks


def test_a_hanging_ledger_holds_no_thread_of_others(answer):
    async def scenario() -> tuple[str, str]:
        tasks = await fill("hangs-1", answer.wait)
        others = await asyncio.wait_for(in_thread("works", lambda: "works"), 10)
        default = await asyncio.wait_for(asyncio.to_thread(lambda: "free"), 10)
        answer.set()
        await asyncio.gather(*tasks)
        return others, default

    assert asyncio.run(scenario()) == ("works", "free")


def test_calls_that_have_not_begun_go_with_their_tasks(answer):
    begun: list[int] = []

    def call() -> None:
        begun.append(1)
        answer.wait()

    async def scenario() -> None:
        tasks = await fill("hangs-2", call)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        answer.set()
        await in_thread("hangs-2", lambda: None)

    asyncio.run(scenario())
    assert len(begun) == THREADS


def test_a_call_has_the_context_of_its_task():
    async def scenario() -> str:
        who.set("the task")
        return await in_thread("works", who.get)

    assert asyncio.run(scenario()) == "the task"
