"""The definitions of decoders of change events, and what an output needs for them."""

from __future__ import annotations

import importlib
import json
from typing import Any

import pytest

from headrace.formats.schema_text import SchemaText
from headrace.stream import (
    AvroDecoder,
    DebeziumDecoder,
    DebeziumKeyDecoder,
    ElasticsearchOutput,
    JsonDecoder,
    KafkaInput,
    KeyIds,
    Stream,
    StreamDefinitionError,
)
from headrace.stream.ddl import type_tree, typed_columns


def stream_of(decoder: Any, **output: Any) -> Stream:
    return Stream(
        name="orders",
        inputs=KafkaInput(
            bootstrap_servers="k:9092",
            topics="orders",
            key_decoder=DebeziumKeyDecoder(fields="id INT"),
            value_decoder=decoder,
        ),
        outputs=ElasticsearchOutput(hosts="http://a:9200", index="orders", **output),
        batch_interval="10 s",
        storage="/data",
        ledger="sqlite:////data/ledger.db",
    )


def test_a_version_may_come_from_a_column_beside_the_row() -> None:
    stream = stream_of(
        DebeziumDecoder(fields="id INT"), document_ids=KeyIds(version_from="position"), truncates="apply"
    )
    assert stream.inputs[0].columns_beside == ("op", "position", "before", "changed_at", "source", "transaction")
    assert Stream.model_validate_json(stream.model_dump_json()) == stream
    assert "applies truncates of the table" in list(stream.outputs[0].reasons_for_order())


@pytest.mark.parametrize("ids", [{}, {"document_ids": KeyIds()}])
def test_truncates_are_applied_by_positions_only(ids: Any) -> None:
    with pytest.raises(StreamDefinitionError, match='truncates "apply" needs document_ids by key with version_from'):
        stream_of(DebeziumDecoder(fields="id INT"), truncates="apply", **ids)


@pytest.mark.parametrize(
    "fields", [{}, {"fields": "id INT", "events": JsonDecoder(fields="op STRING, after STRUCT<id INT>")}]
)
def test_a_decoder_has_fields_or_events(fields: Any) -> None:
    with pytest.raises(StreamDefinitionError, match="either the fields of the table"):
        DebeziumDecoder(**fields)


@pytest.mark.parametrize(
    "decoder",
    [
        DebeziumKeyDecoder(fields="id INT"),
        DebeziumDecoder(fields="id INT"),
        DebeziumDecoder(events=JsonDecoder(fields="op STRING, after STRUCT<id INT>")),
    ],
    ids=lambda decoder: str(decoder.decodes).rpartition(":")[2],
)
def test_the_class_that_decodes_is_there(decoder: Any) -> None:
    """A task imports it by its name; until then nothing does."""
    module, _, name = str(decoder.decodes).partition(":")
    assert isinstance(getattr(importlib.import_module(module), name), type)


def test_rows_of_other_formats_are_those_of_their_events() -> None:
    envelope = "op STRING, before STRUCT<id: INT, `a b`: DECIMAL(10, 2)>, after STRUCT<id: INT, `a b`: DECIMAL(10, 2)>"
    assert DebeziumDecoder(events=JsonDecoder(fields=envelope)).column == "STRUCT<id: INT, `a b`: DECIMAL(10, 2)>"
    flat = "id INT, tags ARRAY<STRING>, __op STRING, __deleted STRING"
    assert DebeziumDecoder(events=JsonDecoder(fields=flat)).column == "`id` INT, `tags` ARRAY<STRING>"


@pytest.mark.parametrize(
    "more",
    [
        "after STRING",
        "op STRING, after STRING",
        "op STRING, after STRUCT<id: INT>, before STRUCT<id: INT>, source STRUCT<lsn: INT>",
        "op INT, source STRING, before STRING",
    ],
)
def test_a_table_may_have_columns_of_an_envelope(more: str) -> None:
    decoder = DebeziumDecoder(events=JsonDecoder(fields=f"id INT, {more}, __deleted STRING"))
    assert [name for name, _ in typed_columns(decoder.column)] == ["id", *(name for name, _ in typed_columns(more))]


def test_columns_that_debezium_does_not_add_are_kept() -> None:
    added = (
        "__op STRING, __deleted STRING, __lsn BIGINT, __table STRING, __source_ts_ms BIGINT, __transaction_id STRING"
    )
    decoder = DebeziumDecoder(events=JsonDecoder(fields=f"_id STRING, __v INT, {added}, __my_op STRING"))
    assert decoder.column == "`_id` STRING, `__v` INT, `__my_op` STRING"


@pytest.mark.parametrize(
    "fields",
    [
        "id INT",
        "id INT, __v INT",
        "__deleted STRING",
        "op INT, after STRUCT<id: INT>",
        "op STRING, after STRUCT<id: INT>, source STRING",
        "op STRING, after STRUCT<id: INT>, before STRUCT<key: INT>",
        "op STRING, after INT",
    ],
)
def test_what_is_no_event_is_a_problem_of_the_stream(fields: str) -> None:
    with pytest.raises(StreamDefinitionError, match="events: describes no change events"):
        stream_of(DebeziumDecoder(events=JsonDecoder(fields=fields)))


def test_a_value_without_columns_is_no_event() -> None:
    with pytest.raises(StreamDefinitionError, match="events: describes no change events"):
        stream_of(DebeziumDecoder(events=AvroDecoder(schema_text='"string"')))


MONGO = {
    "type": "record",
    "name": "Envelope",
    "fields": [
        {"name": "before", "type": ["null", {"type": "string", "connect.name": "io.debezium.data.Json"}]},
        {"name": "after", "type": ["null", {"type": "string", "connect.name": "io.debezium.data.Json"}]},
        {"name": "op", "type": ["null", "string"]},
    ],
}


def test_documents_of_mongodb_are_read_in_json_only() -> None:
    words = "describes events whose row is a text, as MongoDB's documents are, which are read in JSON only"
    with pytest.raises(StreamDefinitionError, match=f"events: {words}"):
        stream_of(DebeziumDecoder(events=AvroDecoder(schema_text=json.dumps(MONGO))))
    decoder = DebeziumDecoder(events=AvroDecoder(registry="registry_default"))
    with pytest.raises(ValueError, match=f"^{words}"):
        decoder.with_reader(SchemaText(json.dumps(MONGO)), "value")


def test_the_schema_of_a_registry_is_that_of_the_events() -> None:
    decoder = DebeziumDecoder(events=AvroDecoder(registry="registry_default"))
    assert decoder.connection_ids == ("registry_default",)
    assert decoder.is_framed
    assert decoder.keeps
    assert decoder.question is not None
    assert decoder.kept_url("/s") == AvroDecoder(registry="registry_default").kept_url("/s")
    # The names beside the row are known before the schema is.
    assert stream_of(decoder).inputs[0].columns_beside[0] == "op"
    assert json.loads(decoder.model_dump_json())["events"]["registry"] == "registry_default"


def test_a_type_has_a_tree_without_spark() -> None:
    columns = "id INT, b STRUCT<`a,b`: DECIMAL(10, 2), c: ARRAY<MAP<STRING, INT>>> NOT NULL COMMENT 'x, y'"
    assert type_tree(columns) == {"id": "INT", "b": {"a,b": "DECIMAL(10, 2)", "c": [["STRING", "INT"]]}}
    assert type_tree("STRING") == "STRING"
    assert typed_columns("a INT, `b``c` ARRAY<INT>") == (("a", "INT"), ("b`c", "ARRAY<INT>"))
