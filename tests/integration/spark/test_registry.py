"""Batches of records framed for a real schema registry: several versions, one that is gone or was set up again."""

from __future__ import annotations

import io
import json
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka.schema_registry import Schema, SchemaReference, SchemaRegistryClient
from pyspark.sql import SparkSession
from tests.integration.conftest import new_server_folder
from tests.integration.spark.conftest import records
from tests.integration.spark.registry_shop import (
    FIRST,
    ID,
    SECOND,
    THIRD,
    UNREADABLE,
    Define,
    Shop,
    Topic,
    connect,
    framed,
    order,
    read_rows,
)
from tests.support.confluent_serializers import ConfluentSerializers

from headrace.batch.places import READERS
from headrace.batch.readers import BatchReaders
from headrace.connections import resolve
from headrace.devstack.registry import RegistryServer
from headrace.errors import Failure
from headrace.ledger.states import EventKind
from headrace.registry.client import (
    Registry,
    RegistryPathError,
    RegistryUnavailableError,
    SchemaUnknownError,
    SubjectUnknownError,
)
from headrace.spark.preview import export_batch, preview_batch
from headrace.stream import AvroDecoder, JsonSchemaDecoder, KafkaInput, ParquetOutput, ProtobufDecoder
from headrace.stream_context import StreamContext

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("small_data")]


@pytest.fixture
def shop_of(connections: Define, make_batch_ledger: Any, tmp_path: Path) -> Callable[[RegistryServer], Shop]:
    return lambda server: Shop(server, connections, make_batch_ledger, tmp_path)


def test_versions_of_a_subject_are_read_by_the_newest(
    spark: SparkSession, registry: RegistryServer, shop_of: Callable[..., Shop]
) -> None:
    shop = shop_of(registry)
    framed_by = shop.topic.framed
    time_ms = shop.allocate(
        framed_by(FIRST, id=1),
        framed_by(UNREADABLE, id="x"),
        framed_by(SECOND, id=2, note="two"),
        b"no frame",
        framed_by(THIRD, id=3, total=2.5),
        framed_by(THIRD, id=4, total=3.5)[:-1],
        None,
    )
    counts = shop.run(spark, time_ms).outputs["parquet"]
    assert shop.written() == [{"id": 1, "total": 1.5}, {"id": 2, "total": 1.5}, {"id": 3, "total": 2.5}, None]
    assert counts["undecodable"] == 3
    assert [reader["version"] for reader in counts[READERS].values()] == [4]
    preview = preview_batch(StreamContext(shop.batch.stream, shop.batch.ledger), time_ms, lambda: spark)
    reasons = [record.reason for record in preview.outputs[0].undecodable_records]
    assert "id is string where it was written, and long in the columns" in reasons[0]
    assert "begins with the byte 110, not with 0 or 1" in reasons[1]
    assert "it ends too early (schema " in reasons[2]


def test_a_batch_runs_again_as_it_did_without_a_registry(
    spark: SparkSession, own_registry: RegistryServer, shop_of: Callable[..., Shop]
) -> None:
    shop = shop_of(own_registry)
    first_ms = shop.allocate(shop.topic.framed(FIRST, id=1))
    shop.run(spark, first_ms)
    shop.topic.register(SECOND)
    second_ms = shop.allocate(framed(1, FIRST, id=2))
    shop.run(spark, second_ms)
    after = shop.written()
    assert after == [{"id": 1}, {"id": 2, "note": None}]
    (event,) = shop.batch.ledger.events.latest(shop.batch.stream.name, [EventKind.SCHEMA_CHANGED])
    assert event.batch_time_ms == second_ms
    assert event.payload["differences"] == ["note is new (STRING)", "id was INT and is BIGINT"]
    own_registry.stop()
    for time_ms in (first_ms, second_ms):
        shop.run(spark, time_ms, force=True)
    assert shop.written() == after
    third_ms = shop.allocate(framed(1, FIRST, id=3))
    with pytest.raises(RegistryUnavailableError, match=f"subject '{shop.topic.name}-value'"):
        shop.run(spark, third_ms)
    assert shop.failure(third_ms) == Failure.PASSING
    own_registry.start()
    shop.run(spark, third_ms)
    assert shop.written() == [*after, {"id": 3, "note": None}]


def test_keys_and_values_of_other_formats_run_again(
    spark: SparkSession, own_registry: RegistryServer, connections: Define, make_batch_ledger: Any, tmp_path: Path
) -> None:
    """Keys of Protobuf and values of JSON Schema, as Confluent's serializers write them."""
    write, connection = ConfluentSerializers(own_registry.url), connect(connections, own_registry.url)
    source = KafkaInput(
        bootstrap_servers="127.0.0.1:1",
        topics=write.topic,
        key_decoder=ProtobufDecoder(registry=connection),
        value_decoder=JsonSchemaDecoder(registry=connection),
    )
    batch = make_batch_ledger(inputs=source, outputs=ParquetOutput(path=str(tmp_path / "written")))
    imports = {"shop/part.proto": 'syntax = "proto3"; package shop; message Part { string name = 1; }'}

    def key(fields: str, text: str) -> bytes:
        file = f'syntax = "proto3"; import "shop/part.proto"; message Key {{ {fields} }}'
        return write.protobuf(file, "Key", text, part="key", imports=imports)[0]

    def value(schema: Any, given: Any, **conf: Any) -> bytes:
        return write.json({"title": "Order", "type": "object", **schema}, given, **conf)[0]

    def allocate(first_offset: int, *pairs: tuple[bytes, bytes]) -> int:
        made = records([value for _, value in pairs], topic=write.topic, first_offset=first_offset)
        keys = pa.array([key for key, _ in pairs], pa.binary())
        batch.add(made.set_column(made.schema.get_field_index("key"), made.schema.field("key"), keys))
        return int(batch.allocate())

    def run(time_ms: int, *, force: bool = False) -> Any:
        return batch.run(spark, batch.begin(time_ms, force=force), out=io.StringIO()).outputs["parquet"]

    closed = {"properties": {"id": {"type": "integer"}}, "additionalProperties": False}
    newer = {"properties": {**closed["properties"], "note": {"type": "string"}}}  # type: ignore[dict-item]
    old_key, old_value = key("int32 id = 1;", "id: 1"), value(closed, {"id": 1})
    first_ms = allocate(0, (old_key, old_value))
    run(first_ms)
    text_key = key("string id = 1;", 'id: "x"')
    second_ms = allocate(
        1,
        (old_key, old_value),
        (key("int64 id = 1; shop.Part part = 2;", 'id: 2 part { name: "p" }'), value(newer, {"id": 2, "note": "n"})),
        (text_key, old_value),
        (old_key, value(closed, {"id": 1, "note": "n"}, validate=False)),
    )
    counts = run(second_ms)
    after = read_rows(tmp_path / "written", "key", "value")
    assert after == [
        {"key": {"id": 1}, "value": {"id": 1}},
        {"key": {"id": 1, "part": None}, "value": {"id": 1, "note": None}},
        {"key": {"id": 2, "part": {"name": "p"}}, "value": {"id": 2, "note": "n"}},
    ]
    assert counts["undecodable"] == 2
    assert {name.split(" of ")[0]: fact["version"] for name, fact in counts[READERS].items()} == {
        "records.key_decoder": 3,
        "records.value_decoder": 2,
    }
    events = batch.ledger.events.latest(batch.stream.name, [EventKind.SCHEMA_CHANGED])
    assert {event.payload["decoder"]: event.payload["differences"] for event in events} == {
        "records.key_decoder": ["part.name is new (STRING)", "id was INT and is BIGINT"],
        "records.value_decoder": ["note is new (STRING)"],
    }
    own_registry.stop()
    for time_ms in (first_ms, second_ms):
        run(time_ms, force=True)
    assert read_rows(tmp_path / "written", "key", "value") == after
    preview = preview_batch(StreamContext(batch.stream, batch.ledger), second_ms, lambda: spark)
    reasons = [record.reason for record in preview.outputs[0].undecodable_records]
    assert "the key is no Protobuf message Key: it was written by another schema: `$.id` was string" in reasons[0]
    assert (
        "the value is no JSON object of Order: it has the field `note`, which the schema does not allow" in reasons[1]
    )


def test_a_registry_that_was_set_up_again_is_refused(
    spark: SparkSession, own_registry: RegistryServer, shop_of: Callable[..., Shop]
) -> None:
    shop = shop_of(own_registry)
    first = shop.topic.framed(FIRST, id=1)
    time_ms = shop.allocate(first)
    shop.run(spark, time_ms)
    own_registry.stop()
    with new_server_folder() as folder, RegistryServer(folder, port=own_registry.port):
        other = shop.topic.framed(SECOND, id=2, note="x")
        assert other[:5] == first[:5]
        second_ms = shop.allocate(other)
        with pytest.raises(Exception, match="gives another schema for schema 1 than it did before"):
            shop.run(spark, second_ms)
        assert shop.failure(second_ms) == Failure.FINAL
        # What was decoded before is decoded as it was.
        shop.run(spark, time_ms, force=True)
    assert shop.written() == [{"id": 1}]


def test_an_export_keeps_nothing(
    spark: SparkSession, registry: RegistryServer, shop_of: Callable[..., Shop], tmp_path: Path
) -> None:
    shop = shop_of(registry)
    time_ms = shop.allocate(shop.topic.framed(FIRST, id=1))
    context = StreamContext(shop.batch.stream, shop.batch.ledger)
    assert export_batch(context, time_ms, tmp_path / "records.parquet", lambda: spark).records == 1
    assert not (Path(shop.batch.stream.folder_url) / "kept").exists()


def test_an_unknown_id_fails_the_batch_until_it_is_refused(
    spark: SparkSession, registry: RegistryServer, shop_of: Callable[..., Shop]
) -> None:
    shop = shop_of(registry)
    time_ms = shop.allocate(shop.topic.framed(FIRST, id=1), framed(2**31 - 1, FIRST, id=2))
    with pytest.raises(Exception, match=r"has no schema 2147483647.*refused_ids"):
        shop.run(spark, time_ms)
    assert shop.failure(time_ms) == Failure.PASSING
    result = shop.run(spark, time_ms, refused_ids=(2**31 - 1,))
    assert shop.written() == [{"id": 1}]
    assert result.outputs["parquet"]["undecodable"] == 1


@pytest.mark.parametrize(
    ("decoder", "wanted"),
    [
        ({"version": 1}, {"id": 3}),
        ({"schema_text": json.dumps(order(ID, THIRD["fields"][1]))}, {"id": 3, "total": 1.5}),
    ],
)
def test_a_definition_may_name_the_schema_of_its_columns(
    spark: SparkSession, registry: RegistryServer, shop_of: Callable[..., Shop], decoder: Any, wanted: Any
) -> None:
    shop = shop_of(registry)
    value = shop.topic.framed(FIRST, id=3)
    shop.topic.register(SECOND)
    shop.run(spark, shop.allocate(value), **decoder)
    assert shop.written() == [wanted]


def test_a_registry_that_is_asked_in_vain_says_why(registry: RegistryServer, connections: Define) -> None:
    asked = Registry(resolve(connect(connections, registry.url)))
    with pytest.raises(SchemaUnknownError, match="has no schema 2147483647"):
        asked.schema(2**31 - 1)
    with pytest.raises(SubjectUnknownError, match="has no subject 'nothing-value'"):
        asked.version("nothing-value")
    subject = Topic(registry.url)
    subject.register(FIRST)
    with pytest.raises(SubjectUnknownError, match="has no version 9 of subject"):
        asked.version(f"{subject.name}-value", 9)
    elsewhere = Registry(resolve(connect(connections, registry.url.replace("/apis/ccompat/v7", "/apis"))))
    with pytest.raises(RegistryPathError, match="/apis/ccompat/v7"):
        elsewhere.version("nothing-value")
    with pytest.raises(RegistryUnavailableError, match="There is no answer from the schema registry"):
        Registry(resolve(connect(connections, "http://127.0.0.1:1"))).schema(1)


def test_references_between_schemas_are_followed(registry: RegistryServer, connections: Define) -> None:
    client = SchemaRegistryClient({"url": registry.url})
    unique = uuid.uuid4().hex[:8]
    currency = {"type": "enum", "name": "shop.Currency", "symbols": ["EUR"]}
    client.register_schema(f"currency-{unique}", Schema(json.dumps(currency), "AVRO"))
    money = {"type": "record", "name": "shop.Money", "fields": [{"name": "currency", "type": "shop.Currency"}]}
    of_currency = [SchemaReference("shop.Currency", f"currency-{unique}", 1)]
    client.register_schema(f"money-{unique}", Schema(json.dumps(money), "AVRO", of_currency))
    of_money = [SchemaReference("shop.Money", f"money-{unique}", 1)]
    schema = order({"name": "net", "type": "shop.Money"})
    id_ = client.register_schema(f"order-{unique}", Schema(json.dumps(schema), "AVRO", of_money))
    found = Registry(resolve(connect(connections, registry.url))).schema(id_)
    assert [name for name, _ in found.schema.references] == ["shop.Currency", "shop.Money"]
    decoder = AvroDecoder(registry="any").with_reader(found.schema, "value")
    assert decoder.column == "`net` STRUCT<`currency` STRING>"


def version_of(readers: BatchReaders) -> list[int]:
    return [reader["version"] for reader in readers.facts.values()]


def test_a_preview_tells_and_keeps_nothing(registry: RegistryServer, shop_of: Callable[..., Shop]) -> None:
    shop = shop_of(registry)
    time_ms = shop.allocate(shop.topic.framed(FIRST, id=1))
    folder = Path(shop.batch.stream.folder_url) / "kept"
    assert version_of(shop.readers(time_ms)) == [1]
    assert not folder.exists()
    attempt = shop.batch.begin(time_ms)
    shop.readers(time_ms, claim=attempt)
    shop.topic.register(SECOND)
    assert version_of(shop.readers(time_ms)) == [1]
    later_ms = shop.allocate(shop.topic.framed(FIRST, id=2))
    assert version_of(shop.readers(later_ms)) == [2]
    shop.batch.ledger.attempts.fail(attempt, "so that the next one has the slot")
    shop.readers(later_ms, claim=shop.batch.begin(later_ms))
    (event,) = shop.batch.ledger.events.latest(shop.batch.stream.name, [EventKind.SCHEMA_CHANGED])
    assert event.batch_time_ms == later_ms


def test_a_named_version_stays_with_the_stream(registry: RegistryServer, shop_of: Callable[..., Shop]) -> None:
    """It needs no registry again."""
    shop = shop_of(registry)
    time_ms = shop.allocate(shop.topic.framed(FIRST, id=1))
    assert version_of(shop.readers(time_ms, claim=shop.batch.begin(time_ms), version=1)) == [1]
    folder = Path(shop.batch.stream.folder_url) / "kept"
    assert [file for file in folder.rglob("version-*") if file.is_file()]


def test_a_batch_keeps_its_version_and_another_question_asks(
    registry: RegistryServer, connections: Define, shop_of: Callable[..., Shop]
) -> None:
    """A definition that names another version, subject or registry later."""
    shop = shop_of(registry)
    time_ms = shop.allocate(shop.topic.framed(FIRST, id=1))
    attempt = shop.batch.begin(time_ms)
    assert version_of(shop.readers(time_ms, claim=attempt)) == [1]
    shop.topic.register(SECOND)
    assert version_of(shop.readers(time_ms, claim=attempt, version=2)) == [1]
    other = connect(connections, registry.url)
    for _ in range(2):
        assert version_of(shop.readers(time_ms, claim=attempt, registry=other)) == [2]
        shop.topic.register(THIRD)
    assert version_of(shop.readers(time_ms, claim=attempt)) == [1]
