"""`RecordDecoding.run`, as a task calls it."""

from __future__ import annotations

import importlib
import json
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import IntegerType, StringType, StructField, StructType
from tests.support.change_events import changes_of
from tests.support.records import make_block

from headrace.kept_values import KeptValues
from headrace.spark.records.arrow_types import arrow_schema
from headrace.spark.records.decoding import DecoderMissingError, RecordDecoding, TaskDecoder
from headrace.spark.records.events.decoded_events import arrow_type
from headrace.spark.records.exact_columns import TooManyCellsError
from headrace.spark.records.record_columns import RECORD_SCHEMA, own_columns, record_mark
from headrace.spark.records.wal_source import to_spark
from headrace.stream import (
    AvroDecoder,
    DebeziumDecoder,
    DebeziumKeyDecoder,
    JsonDecoder,
    JsonSchemaDecoder,
    ProtobufDecoder,
    Utf8Decoder,
)
from headrace.stream.ddl import type_tree

DECODERS = {
    "key": TaskDecoder("headrace.spark.records.json_objects:Utf8Texts", StringType(), {}),
    "value": TaskDecoder(
        "headrace.spark.records.json_objects:JsonObjects",
        StructType([StructField("n", IntegerType())]),
        {"fields": "n INT"},
    ),
}


@pytest.mark.parametrize(
    ("keep_bytes", "values", "raw"),
    [
        ("undecodable", [{"n": 1}, None], [None, b"x"]),
        ("all", [{"n": 1}, None], [b'{"n":1}', b"x"]),
        (None, [b'{"n":1}', b"x"], None),
    ],
)
def test_bytes_are_kept_of_undecodable_records_of_all_or_instead(keep_bytes: Any, values: list[Any], raw: Any) -> None:
    block, _ = make_block([b'{"n":1}', b"x"], from_offset=0)
    given = RecordDecoding(DECODERS, "UTC", keep_bytes)
    decoding = pickle.loads(pickle.dumps(given))  # noqa: S301 - as Spark sends it to a task
    (batch,) = decoding.run(iter([to_spark(block, arrow_schema(RECORD_SCHEMA))]))
    assert batch.column("value").to_pylist() == values
    assert raw is None or batch.column("raw_value").to_pylist() == raw
    reasons = batch.column("undecodable_reason").to_pylist()
    assert reasons[0] is None
    assert reasons[1].startswith("the value is no JSON object of n INT: JSON is malformed")


COLUMNS = json.dumps({"type": "record", "name": "Row", "fields": [{"name": "n", "type": "int"}]})
PROPERTIES = json.dumps({"type": "object", "properties": {"n": {"type": "integer"}}})
MESSAGE = "syntax = 'proto3'; message Row { int32 n = 1; }"
EVENTS = JsonDecoder(fields="op STRING, after STRUCT<n: INT>, source STRUCT<connector: STRING>, ts_ms BIGINT")


@pytest.mark.parametrize(
    "decoder",
    [
        JsonDecoder(fields="n INT, at TIMESTAMP, total DECIMAL(10, 2), tags ARRAY<STRING>"),
        Utf8Decoder(),
        AvroDecoder(schema_text=COLUMNS),
        ProtobufDecoder(schema_text=MESSAGE, message="Row"),
        JsonSchemaDecoder(schema_text=PROPERTIES),
        DebeziumKeyDecoder(fields="n INT, at TIMESTAMP"),
        DebeziumDecoder(fields="n INT, at TIMESTAMP, total DECIMAL(10, 2)"),
        DebeziumDecoder(events=EVENTS),
        DebeziumDecoder(events=JsonDecoder(fields="n INT, __deleted STRING")),
        DebeziumDecoder(
            events=AvroDecoder(schema_text=COLUMNS.replace("}]", '}, {"name": "__op", "type": "string"}]'))
        ),
    ],
    ids=str,
)
def test_no_values_give_no_values(decoder: Any, tmp_path: Path) -> None:
    module, _, name = decoder.decodes.partition(":")
    kind = arrow_type(type_tree(decoder.column))
    kept = {"kept": KeptValues(str(tmp_path))} if decoder.keeps else {}
    column = changes_of(kind) if decoder.beside else kind
    made = getattr(importlib.import_module(module), name)(column, time_zone="UTC", **kept, **decoder.keywords)
    read = {each: pa.nulls(0) for each in decoder.reads}
    decoded, refused = made.decode(pa.array([], pa.binary()), **read)
    assert (decoded.type, len(decoded), refused) == (column, 0, {})


class ForgetfulDigits:
    """A decoder that gives no reason for some of the values that it refuses."""

    def __init__(self, kind: pa.DataType, *, time_zone: str) -> None:
        self._kind = kind

    def decode(self, values: pa.Array) -> tuple[pa.Array, dict[int, str]]:
        texts = [None if value is None else value.decode() for value in values.to_pylist()]
        decoded = [text if text is not None and text.isdigit() else None for text in texts]
        return pa.array(decoded, self._kind), {row: "no number" for row, text in enumerate(texts) if text == "x"}


def test_a_value_decoded_to_null_is_no_record_without_a_value() -> None:
    """The decoder gives no reason."""
    block, _ = make_block([b"1", b"x", None, b"forgotten"], from_offset=0)
    decoding = RecordDecoding({"value": TaskDecoder(f"{__name__}:ForgetfulDigits", StringType(), {})}, "UTC")
    (batch,) = decoding.run(iter([to_spark(block, arrow_schema(RECORD_SCHEMA))]))
    assert batch.column("value").to_pylist() == ["1", None, None, None]
    assert batch.column("undecodable_reason").to_pylist() == [
        None,
        "the value is no number",
        None,
        "the value is decoded to null, and its decoder gives no reason",
    ]
    assert batch.column("raw_value").to_pylist() == [None, b"x", None, b"forgotten"]


def test_a_task_imports_no_definition_to_decode() -> None:
    modules = "headrace.spark.records.decoding, headrace.spark.records.json_objects"
    code = f"import sys, {modules}; print('pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


@pytest.mark.parametrize("reference", ["headrace_nowhere:Decoder", "headrace.spark.records.json_objects:Nothing"])
def test_a_decoder_a_task_cannot_import_is_named_with_the_remedy(reference: str) -> None:
    with pytest.raises(DecoderMissingError, match=rf"cannot import the decoder {reference}.*on all hosts"):
        TaskDecoder(reference, StringType(), {}).make("UTC")


class Operations:
    """A decoder that gives a column beside the value, and reads headers."""

    def __init__(self, kind: pa.DataType, *, time_zone: str) -> None:
        self._kind = kind

    def decode(self, values: pa.Array, *, headers: pa.Array) -> tuple[pa.Array, dict[int, str]]:
        rows = [
            None if value is None else {"value": None if value == b"d" else value.decode(), "op": value.decode()[:1]}
            for value in values.to_pylist()
        ]
        assert len(headers) == len(values)
        return pa.array(rows, self._kind), {}


def test_columns_beside_a_value_are_the_records_own() -> None:
    block, _ = make_block([b"c", b"d", None], from_offset=0)
    beside = (StructField("op", StringType(), metadata=record_mark("op")),)
    decoders = {"value": TaskDecoder(f"{__name__}:Operations", StringType(), {}, beside=beside, reads=("headers",))}
    decoding = RecordDecoding(decoders, "UTC")
    (batch,) = decoding.run(iter([to_spark(block, arrow_schema(RECORD_SCHEMA))]))
    assert batch.column("value").to_pylist() == ["c", None, None]
    assert batch.column("op").to_pylist() == ["c", "d", None]
    assert batch.column("undecodable_reason").null_count == 3
    assert "op" in own_columns(decoding.schema)
    (batch,) = replace(decoding, keep_bytes=None).run(iter([to_spark(block, arrow_schema(RECORD_SCHEMA))]))
    assert batch.column("value").to_pylist() == [b"c", b"d", None]


class LimitedMemory:
    """A decoder that has no memory for more than two values, nor for a big one; or too little for its lists."""

    def __init__(self, kind: pa.DataType, *, time_zone: str) -> None:
        self._kind = kind

    def decode(self, values: pa.Array, *, headers: pa.Array) -> tuple[pa.Array, dict[int, str]]:
        given = values.to_pylist()
        assert len(headers) == len(given)
        if len(given) > 2 or b"big" in given:
            raise MemoryError
        if b"wide" in given:
            raise TooManyCellsError
        texts = [None if value in (None, b"bad") else value.decode() for value in given]
        return pa.array(texts, self._kind), {row: "bad" for row, value in enumerate(given) if value == b"bad"}


def test_only_a_record_that_takes_too_much_memory_is_refused() -> None:
    values = [b"a", b"bad", b"big", b"b", b"wide", None, b"c"]
    block, _ = make_block(values, from_offset=0)
    decoders = {"value": TaskDecoder(f"{__name__}:LimitedMemory", StringType(), {}, reads=("headers",))}
    parts = list(RecordDecoding(decoders, "UTC").run(iter([to_spark(block, arrow_schema(RECORD_SCHEMA))])))
    assert max(part.num_rows for part in parts) == 2
    batch = pa.Table.from_batches(parts)
    assert batch.column("value").to_pylist() == ["a", None, None, "b", None, None, "c"]
    assert batch.column("offset").to_pylist() == list(range(7))
    reasons = batch.column("undecodable_reason").to_pylist()
    assert [row for row, reason in enumerate(reasons) if reason is not None] == [1, 2, 4]
    assert "takes more memory than there is" in reasons[2]
    assert "lists have more than 20,000,000 fields" in reasons[4]
