"""Change events through whole batches: an index that is equal to a table, in a real Spark and Elasticsearch."""

from __future__ import annotations

import json
import sys
import urllib.request
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from pyspark.sql import SparkSession
from sqlalchemy import make_url
from tests.support.avro_examples import encoded
from tests.support.change_events import UNAVAILABLE, event, field, postgres, with_schema
from tests.support.debezium import Debezium

from headrace.devstack.postgres import PostgresServer
from headrace.stream import (
    AvroDecoder,
    DebeziumDecoder,
    DebeziumKeyDecoder,
    ElasticsearchOutput,
    KafkaInput,
    KeyIds,
    SparkSettings,
    Stream,
)
from headrace.stream.stream import replayed
from headrace.testing.extensions import check_decoder

pytestmark = pytest.mark.slow

FIELDS = "id INT, name STRING, total DECIMAL(10, 2)"
Change = tuple[int | None, Any]


class Follower:
    """A stream that keeps an index equal to a table, whose batches are run one by one."""

    def __init__(self, spark: SparkSession, batches: Any, records: Any, url: str) -> None:
        self._spark = spark
        self.batches = batches
        self._records = records
        self._url = url
        self.index = batches.stream.outputs[0].index
        self._next: dict[int, int] = {}

    def add(self, *changes: Change, partition: int = 0) -> None:
        """Add records of keys and events."""
        values = [
            value if value is None or isinstance(value, bytes) else json.dumps(value).encode() for _, value in changes
        ]
        keys = [None if key is None else json.dumps({"id": key}).encode() for key, _ in changes]
        self.add_records(keys, values, partition=partition)

    def add_records(self, keys: Sequence[bytes | None], values: Sequence[bytes | None], *, partition: int = 0) -> None:
        first = self._next.get(partition, 0)
        self._next[partition] = first + len(values)
        block = self._records(values, topic="shop.public.orders", partition=partition, first_offset=first)
        self.batches.add(block.set_column(0, block.schema.field("key"), pa.array(keys, pa.binary())))

    def run(self, batch_time_ms: int | None = None) -> dict[str, Any]:
        time_ms = self.batches.allocate() if batch_time_ms is None else batch_time_ms
        attempt = self.batches.begin(time_ms, force=batch_time_ms is not None)
        (counts,) = self.batches.run(self._spark, attempt).outputs.values()
        return counts

    def replay(self, batch_time_ms: int, target: str) -> dict[str, Any]:
        """Write a batch again, to the index ``<index>-<target>``."""
        stream = self.batches.stream
        definition = replayed(stream, {"elasticsearch": {"index": f"{self.index}-{target}"}}).to_json()
        named: dict[str, Any] = {"target": target, "definition": definition, "outputs": ["elasticsearch"]}
        begun = {"holder": "test", "way": "submit", "lease_ms": 30_000}
        attempt = self.batches.ledger.replays.begin(stream.name, batch_time_ms, **named, **begun)
        (counts,) = self.batches.run(self._spark, attempt, stream=Stream.from_json(definition)).outputs.values()
        return counts

    def documents(self) -> dict[str, Any]:
        self._ask("POST", f"/{self.index}/_refresh?ignore_unavailable=true")
        hits = self._ask("POST", f"/{self.index}/_search?ignore_unavailable=true", {"size": 1000})["hits"]["hits"]
        return {hit["_id"]: hit["_source"] for hit in hits}

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(self._url + path, data, headers, method=method)  # noqa: S310
        with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310
            return json.load(answer)


@pytest.fixture
def follow(
    spark: SparkSession, make_batch_ledger: Any, make_records: Any, elasticsearch: str
) -> Callable[..., Follower]:
    def make(decoder: Any = None, stream: Any = None, **output: Any) -> Follower:
        source = KafkaInput(
            bootstrap_servers="127.0.0.1:1",
            topics="shop.public.orders",
            key_decoder=DebeziumKeyDecoder(fields="id INT"),
            value_decoder=decoder or DebeziumDecoder(fields=FIELDS),
        )
        index = ElasticsearchOutput(
            **{"hosts": elasticsearch, "index": f"orders-{uuid.uuid4().hex[:12]}", "document_ids": KeyIds(), **output}
        )
        return Follower(
            spark, make_batch_ledger(inputs=source, outputs=index, **(stream or {})), make_records, elasticsearch
        )

    return make


TRANSFORM = """
def columns(records):
    return records.select("key", "topic", "partition", "offset", "op", "source", "value.name")
"""


def row(key: int, name: str) -> dict[str, Any]:
    return {"id": key, "name": name, "total": "AMg="}


def document(key: int, name: str) -> dict[str, Any]:
    return {"id": key, "name": name, "total": 2.0}


def test_an_index_follows_a_table(follow: Any) -> None:
    """Inserts, updates, a deletion with its tombstone, a changed key, and a snapshot that is taken again."""
    follower = follow()
    follower.add(
        (1, event("r", None, row(1, "a"))), (2, event("c", None, row(2, "b"))), (3, event("c", None, row(3, "c")))
    )
    assert follower.run()["created"] == 3
    follower.add(
        (1, event("u", None, row(1, "A"))),
        (2, event("d", row(2, "b"), None)),
        (2, None),
        (3, event("d", row(3, "c"), None)),
        (3, None),
        (4, event("c", None, row(4, "c"))),
        (None, {"ts_ms": 5}),
    )
    counts = follower.run()
    assert (counts["deleted"], counts["ignored_events"], counts["dead_lettered"]) == (4, 1, 0), counts
    assert follower.documents() == {"1": document(1, "A"), "4": document(4, "c")}
    follower.add((1, event("r", None, row(1, "A"))), (4, event("r", None, row(4, "c"))))
    follower.run()
    assert follower.documents() == {"1": document(1, "A"), "4": document(4, "c")}
    # Older batches again: what is newer stays.
    assert follower.run(10_000)["superseded"] == 3
    assert follower.documents() == {"1": document(1, "A"), "4": document(4, "c")}


def test_a_transform_that_makes_columns_deletes_too(
    follow: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    code = tmp_path / f"changes_{uuid.uuid4().hex}.py"
    code.write_text(TRANSFORM)
    follower = follow(stream={"transform": f"{code.stem}:columns", "spark": SparkSettings(py_files=(str(code),))})
    follower.add(
        (1, event("c", None, row(1, "a"))),
        (2, event("c", None, row(2, "b"))),
        (2, event("d", row(2, "b"), None)),
        (2, None),
        (None, {"ts_ms": 5}),
    )
    counts = follower.run()
    assert (counts["ignored_events"], counts["dead_lettered"]) == (1, 0), counts
    documents = follower.documents()
    assert {key: (each["op"], each["name"]) for key, each in documents.items()} == {"1": ("c", "a")}


def test_the_position_orders_a_key_of_several_partitions(follow: Any) -> None:
    follower = follow(document_ids=KeyIds(version_from="position"))
    follower.add(
        (1, event("u", None, row(1, "new"), postgres(300))), (1, event("d", None, None, postgres(500))), (1, None)
    )
    follower.add((2, event("u", None, row(2, "new"), postgres(400))))
    follower.add(
        (1, event("c", None, row(1, "old"), postgres(200))),
        (2, event("c", None, row(2, "old"), postgres(100))),
        partition=1,
    )
    counts = follower.run()
    assert (counts["ignored_tombstones"], counts["dead_lettered"]) == (1, 0), counts
    follower.add((1, event("u", None, row(1, "late"), postgres(400))), partition=2)
    assert follower.run()["superseded"] == 1
    assert follower.documents() == {"2": document(2, "new")}


def test_a_truncate_leaves_what_is_newer(follow: Any) -> None:
    follower = follow(document_ids=KeyIds(version_from="position"), truncates="apply")
    follower.add(*((key, event("c", None, row(key, "old"), postgres(100 + key))) for key in range(20)))
    follower.run()
    follower.add(
        (20, event("c", None, row(20, "old"), postgres(200))),
        (None, event("t", None, None, postgres(300))),
        (3, event("c", None, row(3, "new"), postgres(400))),
    )
    counts = follower.run()
    assert (counts["truncates"], counts["truncated"], counts["dead_lettered"]) == (1, 20, 0), counts
    assert "truncated_below" not in counts
    assert follower.documents() == {"3": document(3, "new")}
    # A row from before the truncate that another partition brings later, and the batch of the truncate again.
    follower.add((7, event("u", None, row(7, "late"), postgres(250))), partition=1)
    assert follower.run()["superseded"] == 1
    follower.run(20_000)
    assert follower.documents() == {"3": document(3, "new")}
    # The batch before it: again, and then as a replay, which is to have what the index had.
    assert follower.run(10_000)["superseded"] == 20
    assert follower.documents() == {"3": document(3, "new")}
    assert follower.replay(10_000, "v2")["created"] == 20
    assert follower.replay(20_000, "v2")["truncated"] == 20
    assert follower.replay(30_000, "v2")["superseded"] == 1
    assert follower.replay(30_000, "v3")["superseded"] == 1


def test_a_truncate_that_is_not_applied_is_a_dead_letter(follow: Any) -> None:
    follower = follow()
    follower.add(
        (1, event("c", None, row(1, "a"))),
        (None, event("t", None, None)),
        (2, event("u", None, {"id": 2, "name": UNAVAILABLE})),
    )
    counts = follower.run()
    assert counts["dead_letter_reasons"] == {"truncate": 1, "undecodable": 1} or counts["dead_lettered"] == 2, counts
    assert follower.documents() == {"1": document(1, "a")}


ROW = {
    "type": "record",
    "name": "Value",
    "fields": [
        {"name": "id", "type": "int"},
        {"name": "name", "type": ["null", "string"], "default": None},
        {"name": "total", "type": ["null", {"type": "bytes", "logicalType": "decimal", "precision": 10, "scale": 2}]},
    ],
}
SOURCE = {
    "type": "record",
    "name": "Source",
    "namespace": "io.debezium.connector.postgresql",
    "fields": [
        {"name": "connector", "type": "string"},
        {"name": "ts_ms", "type": "long"},
        {"name": "lsn", "type": ["null", "long"]},
        {"name": "txId", "type": ["null", "long"]},
    ],
}
ENVELOPE = {
    "type": "record",
    "name": "Envelope",
    "namespace": "shop.public.orders",
    "fields": [
        {"name": "before", "type": ["null", ROW]},
        {"name": "after", "type": ["null", "Value"]},
        {"name": "source", "type": SOURCE},
        {"name": "op", "type": "string"},
        {"name": "ts_ms", "type": ["null", "long"]},
    ],
}


def in_avro(op: str, before: Any, after: Any, lsn: int) -> bytes:
    source = {"connector": "postgresql", "ts_ms": 1_767_617_100_250, "lsn": lsn, "txId": 5}
    return encoded(ENVELOPE, {"before": before, "after": after, "source": source, "op": op, "ts_ms": 5})


def test_events_in_avro_give_the_same(follow: Any) -> None:
    decoder = DebeziumDecoder(events=AvroDecoder(schema_text=json.dumps(ENVELOPE)))
    follower = follow(decoder, document_ids=KeyIds(version_from="position"))
    one, two = ({"id": key, "name": "a", "total": b"\x00\xc8"} for key in (1, 2))
    follower.add(
        (1, in_avro("c", None, one, 100)),
        (2, in_avro("c", None, two, 108)),
        (2, in_avro("d", two, None, 116)),
        (2, None),
    )
    counts = follower.run()
    assert (counts["created"], counts["dead_lettered"]) == (2, 0), counts
    assert follower.documents() == {"1": document(1, "a")}


def test_both_decoders_keep_the_contract(spark: SparkSession) -> None:
    total = field("total", "bytes", "org.apache.kafka.connect.data.Decimal", parameters={"scale": "2"})
    wrapped = with_schema(event("c", None, row(1, "a")), field("id", "int32"), field("name", "string"), total)
    values = [json.dumps(each).encode() for each in (event("u", None, row(1, "a")), wrapped)]
    check_decoder(DebeziumDecoder(fields=FIELDS), values, refused=[b"", b"{}", b"[]"], spark=spark)
    check_decoder(DebeziumKeyDecoder(fields="id INT"), [b'{"id": 1}'], refused=[b"", b"null", b"[]"], spark=spark)
    avro = DebeziumDecoder(events=AvroDecoder(schema_text=json.dumps(ENVELOPE)))
    one = {"id": 1, "name": "a", "total": b"\x01"}
    check_decoder(avro, [in_avro("r", None, one, 4)], refused=[b"", in_avro("c", None, None, 4)], spark=spark)


SIGNAL = """INSERT INTO signal VALUES ('again', 'execute-snapshot',
    '{"type": "blocking", "data-collections": ["public.orders"]}')"""
LAST = 1_000
"""The key of the row that is written last."""


def write_at_random(connection: Any, random: Random, times: int) -> None:
    """Insert, update, delete rows and change their keys, some of them twice in a transaction."""
    for _ in range(times):
        key, other = random.sample(range(40), 2)
        with connection.transaction():
            for _ in range(random.randint(1, 2)):
                name, total = f"name {random.random()}", random.randint(-99_999, 99_999) / 100
                values = {"key": key, "other": other, "name": name, "total": total}
                connection.execute(
                    random.choice(
                        [
                            "INSERT INTO orders VALUES (%(key)s, %(name)s, %(total)s) ON CONFLICT (id) DO UPDATE "
                            "SET name = excluded.name, total = excluded.total",
                            "UPDATE orders SET name = %(name)s WHERE id < %(key)s",
                            "DELETE FROM orders WHERE id = %(key)s",
                            "UPDATE orders SET id = %(other)s WHERE id = %(key)s "
                            "AND NOT EXISTS (SELECT 1 FROM orders WHERE id = %(other)s)",
                        ]
                    ),
                    values,
                )


def sent(kafka: str, topic: str, done: Callable[[list[Any]], bool]) -> list[Any]:
    """The records of a topic, up to the first with which they are ``done``."""
    consumer = Consumer({"bootstrap.servers": kafka, "group.id": "changes", "enable.auto.commit": "false"})
    consumer.assign([TopicPartition(topic, 0, 0)])
    messages: list[Any] = []
    try:
        while not messages or not done(messages):
            (message,) = consumer.consume(1, timeout=90)
            messages.append(message)
    finally:
        consumer.close()
    return messages


def has_last_row(messages: list[Any]) -> bool:
    """Its change: a killed Debezium reads the signal of the second snapshot again, and takes a third one, in which the
    row may be while changes from before it are still to come."""
    key, value = messages[-1].key(), messages[-1].value()
    return bool(json.loads(key or b"{}").get("id") == LAST and value and json.loads(value)["op"] == "c")


def has_second_snapshot(messages: list[Any]) -> bool:
    values = [json.loads(message.value()) for message in messages if message.value()]
    return [value["op"] == "r" and value["source"]["snapshot"] == "last" for value in values].count(True) == 2


@pytest.mark.parametrize("by_position", [True, False])
def test_a_real_table_and_its_index_are_equal(
    by_position: bool,
    follow: Any,
    kafka: str,
    postgres: str,
    request: pytest.FixtureRequest,
) -> None:
    """A real Postgres and a real Debezium, with a second snapshot, a kill, and batches that run again.

    Only positions can apply a truncate, and only offsets order a transaction that was open during the snapshot.
    """
    prefix = "positions" if by_position else "offsets"
    topic = f"{prefix}.public.orders"
    server: PostgresServer = request.getfixturevalue("postgres_server")
    debezium = Debezium(
        request.getfixturevalue("server_folder"),
        kafka=kafka,
        postgres=server,
        database=str(make_url(postgres).database),
        prefix=prefix,
        settings={"signal.data.collection": "public.signal"},
    )
    # Kept until the topic is made: a client that is gone makes none.
    admin = AdminClient({"bootstrap.servers": kafka})
    for made in admin.create_topics([NewTopic(topic, 1, 1)]).values():
        made.result(30)
    random = Random(7)
    with debezium.connect() as connection:
        connection.execute("CREATE TABLE orders (id int PRIMARY KEY, name text, total numeric(10, 2))")
        connection.execute("CREATE TABLE signal (id text PRIMARY KEY, type text, data text)")
        write_at_random(connection, random, 30)
        with debezium:
            debezium.wait_until_streaming()
            write_at_random(connection, random, 100)
            connection.execute("TRUNCATE orders" if by_position else "DELETE FROM orders WHERE id > 20")
            write_at_random(connection, random, 60)
            connection.execute("INSERT INTO orders VALUES (100, 'before', 1)")
            with debezium.connect() as other, other.transaction():
                if not by_position:
                    other.execute("UPDATE orders SET name = 'open' WHERE id = 100")
                connection.execute(SIGNAL)
                sent(kafka, topic, has_second_snapshot)
            connection.execute("INSERT INTO orders VALUES (101, 'behind the snapshot', 1)")
            debezium.kill()
            write_at_random(connection, random, 60)
            debezium.start().wait_until_streaming()
            write_at_random(connection, random, 30)
            connection.execute("INSERT INTO orders VALUES (%s, 'last', 1)", (LAST,))
            messages = sent(kafka, topic, has_last_row)
        table = connection.execute("SELECT id, name, total FROM orders").fetchall()
    by = {"document_ids": KeyIds(version_from="position"), "truncates": "apply"} if by_position else {}
    follower = follow(**by)
    operations = {json.loads(message.value())["op"] for message in messages if message.value()}
    assert operations == {"r", "c", "u", "d", *(["t"] if by_position else [])}
    for first in range(0, len(messages), 400):
        part = messages[first : first + 400]
        follower.add_records([message.key() for message in part], [message.value() for message in part])
        assert follower.run()["dead_lettered"] == 0
    expected = {str(id_): {"id": id_, "name": name, "total": float(total)} for id_, name, total in table}
    assert follower.documents() == expected
    assert expected["100"]["name"] == ("before" if by_position else "open")
    follower.run(10_000)
    assert follower.documents() == expected
