"""A decoder by a JSON Schema in a definition: what is stored, what is refused, and what is imported."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from headrace.stream import ElasticsearchOutput, JsonSchemaDecoder, KafkaInput, Stream, StreamDefinitionError

REFERENCES = {"line.json": '{"properties": {"n": {"type": "integer"}}}'}
SCHEMA = (
    '{"title": "Order", "properties": {"line": {"$ref": "line.json"}, "at": {"type": "string", "format": "date-time"}}}'
)


def stream_of(decoder: JsonSchemaDecoder, **fields: Any) -> Stream:
    source = KafkaInput(bootstrap_servers="127.0.0.1:1", topics="orders", value_decoder=decoder)
    return Stream(
        name="orders",
        inputs=source,
        outputs=ElasticsearchOutput(hosts="http://127.0.0.1:1", index="orders"),
        batch_interval="10 s",
        storage="/tmp/orders",
        ledger="sqlite:////tmp/orders/ledger.db",
        **fields,
    )


def test_a_json_schema_is_stored_with_its_references() -> None:
    decoder = JsonSchemaDecoder(schema_text=SCHEMA, references=REFERENCES, date_times="text")
    stream = stream_of(decoder)
    assert Stream.from_json(stream.to_json()) == stream
    assert decoder.column == "`line` STRUCT<`n` BIGINT>, `at` STRING"
    assert json.loads(json.dumps(decoder.keywords)) == {
        "of": decoder.of,
        "schema": SCHEMA,
        "references": REFERENCES,
        "date_times": "text",
    }
    assert decoder.description == ("JSON Schema", "`Order`")


def test_a_json_schema_without_its_references_is_refused() -> None:
    with pytest.raises(
        StreamDefinitionError, match=r"refers to 'line.json', which is neither in it nor among its references"
    ):
        JsonSchemaDecoder(schema_text=SCHEMA)


def test_names_that_differ_in_case_are_a_problem_of_transforms() -> None:
    schema = '{"properties": {"id": {"type": "integer"}, "ID": {"type": "integer"}}}'
    stream_of(JsonSchemaDecoder(schema_text=schema))
    with pytest.raises(StreamDefinitionError, match="id and ID differ in case only"):
        stream_of(JsonSchemaDecoder(schema_text=schema), transform="orders:transform")


def test_a_definition_needs_no_library_of_json_schema() -> None:
    code = f"""
import sys
from headrace.stream import JsonSchemaDecoder
JsonSchemaDecoder(schema_text={SCHEMA!r}, references={REFERENCES!r}).column
assert not {{"jsonschema_rs", "pyarrow", "msgspec"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
