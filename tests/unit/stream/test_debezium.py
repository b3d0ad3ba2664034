"""The definitions of decoders of change events, and what an output needs for them."""

from __future__ import annotations

import importlib
import json
from typing import Any

import pytest

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


def test_what_is_no_event_is_a_problem_of_the_stream() -> None:
    with pytest.raises(StreamDefinitionError, match="decodes no change events"):
        stream_of(DebeziumDecoder(events=JsonDecoder(fields="id INT")))


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
