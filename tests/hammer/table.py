"""`python -m tests.hammer.table`: a table of a real Postgres under random writes, kept equal to an index by Debezium.

Meanwhile the receiver job, batches, Debezium and the schema registry are killed. At the end the index is compared with
the table row by row; then all batches are replayed into another index with the registry gone for good, and that is
compared too.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import subprocess
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any

import psutil
import psycopg
import typer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from tests.integration.spark.application import Application, until
from tests.support.debezium import Debezium

from headrace.batch.allocation import allocate
from headrace.devstack.elasticsearch import ElasticsearchServer
from headrace.devstack.kafka import KafkaServer
from headrace.devstack.postgres import PostgresServer
from headrace.devstack.registry import RegistryServer
from headrace.ledger import Ledger
from headrace.stream import (
    AvroDecoder,
    DebeziumDecoder,
    ElasticsearchOutput,
    KafkaInput,
    KeyIds,
    SparkSettings,
    Stream,
)
from headrace.stream_context import StreamContext

STREAM = "orders"
TOPIC = "shop.public.orders"
SENTINEL = -1
AGAIN = "again"
PARTITIONS = 3
DRAIN_SECONDS = 600.0

TABLE = """
CREATE TABLE orders (
    id int PRIMARY KEY, code text NOT NULL, total numeric(38, 4), at timestamptz, day date, note text, ok boolean);
ALTER TABLE orders REPLICA IDENTITY FULL;
CREATE TABLE signals (id text PRIMARY KEY, type text NOT NULL, data text);
"""


class Writer(threading.Thread):
    """Writes at random: inserts, updates, deletions, changed keys, transactions, truncates, a second snapshot."""

    def __init__(self, connection: psycopg.Connection, seed: int, rows: int, until_: float, *, truncates: bool) -> None:
        super().__init__(name="writer", daemon=True)
        self._connection = connection
        self._random = random.Random(seed)
        self._rows = rows
        self._until = until_
        self._truncates = truncates
        self._next = rows
        self.done: Counter[str] = Counter()
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            self._write()
        except Exception as error:
            self.error = error

    def _write(self) -> None:
        began = time.monotonic()
        share = iter((0.3, 0.6, 2.0))
        due = next(share)
        while time.monotonic() < self._until:
            if self._random.random() < 0.1:
                # Several changes at once, some of the same row.
                with self._connection.transaction():
                    for _ in range(self._random.randrange(2, 30)):
                        self._one()
            else:
                self._one()
            if (time.monotonic() - began) / (self._until - began) > due:
                due = next(share)
                self._rare()
            time.sleep(self._random.random() * 0.01)

    def _rare(self) -> None:
        signal = json.dumps({"type": "blocking", "data-collections": ["public.orders"]})
        self._connection.execute(
            "INSERT INTO signals VALUES (%s, 'execute-snapshot', %s)", (f"s{time.time_ns()}", signal)
        )
        self.done["second snapshot"] += 1
        if self._truncates:
            time.sleep(5)
            self._connection.execute("TRUNCATE orders")
            self.done["truncate"] += 1
            fill(self._connection, range(self._next, self._next + self._rows // 10), self._random)
            self._next += self._rows // 10

    def _one(self) -> None:
        what = self._random.choices(("insert", "update", "delete", "key"), (3, 10, 2, 1))[0]
        self.done[what] += 1
        known = self._random.randrange(max(1, self._next))
        if what == "insert":
            fill(self._connection, [self._next], self._random)
            self._next += 1
        elif what == "update":
            total, note = amount(self._random), self._random.choice((None, "", "ü" * 10, "x"))
            self._connection.execute("UPDATE orders SET total = %s, note = %s WHERE id = %s", (total, note, known))
        elif what == "delete":
            self._connection.execute("DELETE FROM orders WHERE id = %s", (known,))
        else:
            self._connection.execute("UPDATE orders SET id = %s WHERE id = %s", (self._next, known))
            self._next += 1


def amount(chance: random.Random) -> Decimal:
    return Decimal(chance.randrange(-(10**38) + 1, 10**38)).scaleb(-4) if chance.random() < 0.1 else Decimal("12.3400")


def fill(connection: psycopg.Connection, ids: Any, chance: random.Random) -> None:
    with connection.cursor() as cursor:
        cursor.executemany(
            "INSERT INTO orders VALUES (%s, %s, %s, %s, %s, %s, %s)",
            [
                (
                    id_,
                    f"code {chance.randrange(1000)}",
                    amount(chance),
                    datetime.fromtimestamp(chance.randrange(2**31), UTC) + timedelta(microseconds=chance.randrange(99)),
                    date.fromordinal(chance.randrange(1, date.max.toordinal())),
                    None,
                    chance.random() < 0.5,
                )
                for id_ in ids
            ],
        )  # fmt: skip


class Batches(threading.Thread):
    """Runs batches one after the other, each until it is done. `process` is the one that runs now."""

    def __init__(self, application: Application) -> None:
        super().__init__(name="batches", daemon=True)
        self._application = application
        self._ended = threading.Event()
        self.process: subprocess.Popen[str] | None = None
        self.tries = 0
        self.batches = 0

    def stop(self) -> None:
        self._ended.set()
        self.join()

    def run(self) -> None:
        application = self._application
        while not self._ended.is_set():
            time_ms = application.ledger.batches.next_unclaimed(STREAM)
            if time_ms is None or application.ledger.now_ms() < time_ms:
                time.sleep(0.2)
                continue
            allocated = allocate(StreamContext(application.stream, application.ledger), time_ms).batch.batch_time_ms
            self.batches += 1
            while not self._ended.is_set():
                self.tries += 1
                self.process = application.start(application.batch_command(allocated), "batches")
                if self.process.wait() == 0:
                    break
                time.sleep(1)


def chaos(
    application: Application,
    debezium: Debezium,
    registry: RegistryServer,
    batches: Batches,
    chance: random.Random,
) -> tuple[str, Callable[[], None]]:
    """What to kill next, and how."""

    def kill_job() -> None:
        for process in application.job_processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        until("the end of the lease", lambda: not application.job().alive(application.ledger.now_ms()))
        application.running_job(start_job(application))

    def kill_batch() -> None:
        if batches.process is not None:
            batches.process.kill()

    def kill_debezium() -> None:
        debezium.kill()
        debezium.start()

    def stop_registry() -> None:
        registry.stop()
        time.sleep(5)
        registry.start()
        debezium.restart_if_failed()

    names = {"receiver job": kill_job, "batch": kill_batch, "Debezium": kill_debezium, "registry": stop_registry}
    name = chance.choices(tuple(names), (2, 3, 2, 1))[0]
    return name, names[name]


def start_job(application: Application) -> subprocess.Popen[str]:
    return application.start_job(master="local[3]", lease_ms=5_000)


def documents(url: str, index: str) -> dict[str, dict[str, Any]]:
    """All documents of an index by their ids; numbers with a point as decimals."""
    post(f"{url}/{index}/_refresh")
    found: dict[str, dict[str, Any]] = {}
    after: list[Any] | None = None
    while True:
        body: dict[str, Any] = {"size": 5000, "sort": [{"id": "asc"}], **({"search_after": after} if after else {})}
        hits = post(f"{url}/{index}/_search", body)["hits"]["hits"]
        found |= {hit["_id"]: hit["_source"] for hit in hits}
        if not hits:
            return found
        after = hits[-1]["sort"]


def post(url: str, body: Any = None) -> Any:
    data = b"" if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})  # noqa: S310 - http, ours
    with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
        return json.loads(answer.read(), parse_float=Decimal)


def differences(connection: psycopg.Connection, found: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Each row and document that are not equal."""
    rows = connection.execute("SELECT id, code, total, at, day, note, ok FROM orders").fetchall()
    for id_, code, total, at, day, note, ok in rows:
        document = found.pop(str(id_), None)
        if document is None:
            yield f"row {id_} has no document"
            continue
        wanted = {"id": id_, "code": code, "total": total, "at": at, "day": day.isoformat(), "note": note, "ok": ok}
        document = {**dict.fromkeys(wanted), **document}
        document["at"] = document["at"] and datetime.fromisoformat(document["at"])
        if isinstance(document["total"], int):
            document["total"] = Decimal(document["total"])
        yield from (
            f"row {id_}: {name} is {value!r} in the table and {document[name]!r} in the index"
            for name, value in wanted.items()
            if document[name] != value
        )
    yield from (f"document {id_} has no row" for id_ in found)


def replay(application: Application, index: str) -> int:
    """Replay all batches into another index, oldest first; their number."""
    output = application.stream.outputs[0].model_copy(update={"index": index})
    definition = application.stream.model_copy(update={"outputs": (output,)}).to_json()
    ledger = application.ledger
    rows = [row for row in ledger.batches.between(STREAM, 0, 2**62) if row.records]
    for row in rows:
        attempt = ledger.replays.begin(
            STREAM,
            row.batch_time_ms,
            target=AGAIN,
            definition=definition,
            outputs=application.stream.steps,
            holder="hammer",
            way="connect",
            lease_ms=60_000,
        )
        done = application.run_batch(row.batch_time_ms, "--attempt", str(attempt.number))
        if done.returncode:
            raise RuntimeError(f"The replay of batch {row.batch_time_ms} failed: {done.stderr[-2000:]}{done.stdout}")
    return len(rows)


def main(
    *,
    rows: Annotated[int, typer.Option(help="Rows of the table at the beginning.")] = 10_000,
    minutes: Annotated[float, typer.Option(help="How long it is written to.")] = 5.0,
    seed: Annotated[int, typer.Option(help="The same seed writes and kills the same.")] = 1,
    truncates: Annotated[
        bool, typer.Option("--truncates", help="Also truncate the table; versions are the source's positions.")
    ] = False,
    pace: Annotated[float, typer.Option(help="Seconds between two kills, on average.")] = 20.0,
    data: Annotated[Path, typer.Option(help="The run's folder. Each run deletes the one before it.")] = Path(
        ".headrace/table"
    ),
) -> None:
    """Exit code 0: the index was equal to the table, and so was the index of the replay."""
    data = data.absolute()
    shutil.rmtree(data, ignore_errors=True)
    data.mkdir(parents=True)
    chance = random.Random(seed)
    with ExitStack() as stack:
        kafka = stack.enter_context(KafkaServer(data / "kafka"))
        search = stack.enter_context(ElasticsearchServer(data / "elasticsearch"))
        registry = stack.enter_context(RegistryServer(data / "registry"))
        postgres = stack.enter_context(PostgresServer(data / "postgres", settings={"wal_level": "logical"}))
        stack.callback(postgres.wipe)
        postgres.create_database("shop")
        admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
        for created in admin.create_topics([NewTopic(TOPIC, PARTITIONS, 1)]).values():
            created.result()
        debezium = Debezium(
            data / "debezium",
            kafka=kafka.bootstrap_servers,
            postgres=postgres,
            database="shop",
            tables="public[.]orders",
            prefix="shop",
            converter="avro",
            registry=registry,
            settings={"signal.data.collection": "public.signals"},
        )
        connection = stack.enter_context(debezium.connect())
        connection.execute(TABLE)
        fill(connection, range(rows), chance)
        stack.enter_context(debezium)
        debezium.wait_until_streaming()
        application = make_application(data, kafka, search, registry, truncates=truncates)
        stack.callback(application.close)
        application.running_job(start_job(application))
        batches = Batches(application)
        batches.start()
        stack.callback(batches.stop)
        ends = time.monotonic() + minutes * 60
        writer = Writer(stack.enter_context(debezium.connect()), seed, rows, ends, truncates=truncates)
        writer.start()
        killed: Counter[str] = Counter()
        while (left := ends - time.monotonic()) > 0:
            time.sleep(min(left, chance.uniform(0.5, 1.5) * pace))
            name, kill = chaos(application, debezium, registry, batches, chance)
            typer.echo(f"{minutes * 60 - max(0, ends - time.monotonic()):.0f} s: {name}")
            kill()
            killed[name] += 1
        writer.join()
        if writer.error is not None:
            raise writer.error
        debezium.restart_if_failed()
        fill(connection, [SENTINEL], chance)
        until("the last row in the index", lambda: is_there(search.url, STREAM, str(SENTINEL)), DRAIN_SECONDS)
        until("the last batch", lambda: application.ledger.batches.next_unclaimed(STREAM) is None, DRAIN_SECONDS)
        batches.stop()
        failed = report("index", connection, search.url, STREAM)
        registry.stop()
        number = replay(application, AGAIN)
        failed += report("replay without a registry", connection, search.url, AGAIN)
        typer.echo(
            f"Written: {dict(writer.done)}. Killed: {dict(killed)}. {batches.batches} batches, {batches.tries} tries, "
            f"{number} replayed."
        )
    raise typer.Exit(1 if failed else 0)


def make_application(
    data: Path, kafka: KafkaServer, search: ElasticsearchServer, registry: RegistryServer, *, truncates: bool
) -> Application:
    os.environ["AIRFLOW_CONN_SCHEMAS"] = json.dumps({"conn_type": "http", "host": registry.url})
    by_position = {"document_ids": KeyIds(version_from="position"), "truncates": "apply"}
    stream = Stream(
        name=STREAM,
        inputs=KafkaInput(
            bootstrap_servers=kafka.bootstrap_servers,
            topics=TOPIC,
            key_decoder=AvroDecoder(registry="schemas"),
            value_decoder=DebeziumDecoder(events=AvroDecoder(registry="schemas")),
        ),
        outputs=ElasticsearchOutput(
            hosts=search.url, index=STREAM, **(by_position if truncates else {"document_ids": KeyIds()})
        ),
        batch_interval="1 s",
        storage=str(data / "storage"),
        ledger=f"sqlite:///{data}/ledger.db",
        spark=SparkSettings(master="local[3]"),
    )
    ledger = Ledger.open(stream.ledger)
    ledger.streams.register(
        stream.name,
        stream.to_json(),
        batch_interval_ms=stream.batch_interval_ms,
        block_interval_ms=stream.block_interval_ms,
        outputs=stream.steps,
        ordered=stream.is_ordered,
    )
    return Application(stream, ledger, kafka.bootstrap_servers, data)


def is_there(url: str, index: str, id_: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/{index}/_doc/{id_}", timeout=5):  # noqa: S310 - http, ours
            return True
    except OSError:
        return False


def report(what: str, connection: psycopg.Connection, url: str, index: str) -> int:
    """Print how the index differs from the table; the number of differences."""
    found = documents(url, index)
    number = len(found)
    wrong = list(differences(connection, found))
    typer.echo(f"{what}: {number:,} documents, {len(wrong):,} differences")
    for each in wrong[:20]:
        typer.echo(f"  {each}")
    return len(wrong)


if __name__ == "__main__":
    typer.run(main)
