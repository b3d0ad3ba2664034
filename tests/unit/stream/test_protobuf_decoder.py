"""A ProtobufDecoder: how its schema is given, and what the definition keeps of it."""

from __future__ import annotations

import base64
import subprocess
import sys
from typing import Any

import pytest
from tests.support.protobuf_examples import compiled

from headrace.formats import protobuf_compiler
from headrace.stream import ElasticsearchOutput, KafkaInput, ProtobufDecoder, Stream, StreamDefinitionError

TEXT = 'syntax = "proto3"; package shop; message Order { int32 n = 1; string s = 2; }'
IMPORTING = 'syntax = "proto3"; import "a/order.proto"; message M { shop.Order order = 1; }'


def test_a_text_is_kept_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = ProtobufDecoder(schema_text=TEXT, message="shop.Order")
    assert decoder.column == "`n` INT, `s` STRING"
    assert decoder.description == ("Protobuf", "`shop.Order`")
    monkeypatch.setattr(protobuf_compiler, "compile_schema", None)
    stored = decoder.model_dump_json()
    assert "schema_text" not in stored
    assert ProtobufDecoder.model_validate_json(stored) == decoder


def test_a_compiled_schema_is_bytes_or_base64() -> None:
    decoder = ProtobufDecoder(schema_text=TEXT, message="shop.Order")
    raw = base64.b64decode(decoder.descriptor_set)
    for given in (raw, base64.encodebytes(raw).decode()):
        assert ProtobufDecoder(descriptor_set=given, message="shop.Order") == decoder  # type: ignore[arg-type]


def test_imports_are_texts_by_their_names() -> None:
    decoder = ProtobufDecoder(schema_text=IMPORTING, imports={"a/order.proto": TEXT}, message="M")
    assert decoder.column == "`order` STRUCT<`n` INT, `s` STRING>"


def test_settings_are_of_the_column_and_of_the_tasks() -> None:
    fields = compiled("Colour c = 1; google.protobuf.Timestamp at = 2;")
    decoder = ProtobufDecoder(
        descriptor_set=fields, message="shop.Order", enums="number", nanoseconds="text", unset="null"
    )
    assert decoder.column == "`c` INT, `at` STRING"
    wanted = {"message": "shop.Order", "enums": "number", "nanoseconds": "text", "unset": "null"}
    assert {**decoder.keywords, **wanted, "schema": fields} == decoder.keywords


def test_a_message_that_becomes_a_value_is_no_struct() -> None:
    decoder = ProtobufDecoder(
        descriptor_set=compiled("google.protobuf.StringValue s = 1;"), message="google.protobuf.StringValue"
    )
    assert decoder.column == "STRING"


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no schema": ({}, "has no schema: give schema_text, or the connection of a registry"),
    "two schemas": ({"schema_text": TEXT, "descriptor_set": "YQ=="}, "has schema_text and descriptor_set"),
    "imports of none": ({"descriptor_set": "YQ==", "imports": {"a": TEXT}}, "imports are those of schema_text"),
    "imports of numbers": ({"schema_text": TEXT, "imports": {"a": 1}}, "and imports texts by names"),
    "a wrong text": ({"schema_text": "{}"}, "schema_text does not compile: schema.proto:1:1"),
    "no base64": ({"descriptor_set": "ä"}, "descriptor_set is no base64"),
    "no set": ({"descriptor_set": "YWFh"}, "the schema is no FileDescriptorSet"),
    "another message": ({"schema_text": TEXT.replace("Order", "X")}, "the schema has no message 'shop.Order'; it has"),
    "itself": ({"schema_text": TEXT.replace("int32 n", "Order n")}, "message shop.Order, which contains itself at n"),
    "an unknown setting": ({"schema_text": TEXT, "enums": "symbol"}, "enums"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_schema_is_refused_when_defined(name: str) -> None:
    fields, says = REFUSED[name]
    with pytest.raises(StreamDefinitionError, match=says):
        ProtobufDecoder(message="shop.Order", **fields)


def test_a_stream_finds_names_that_differ_in_case(tmp_path: Any) -> None:
    text = 'syntax = "proto3"; message M { int32 id = 1; int32 ID = 2 [json_name = "other"]; }'
    source = KafkaInput(
        bootstrap_servers="h:1",
        topics="t",
        value_decoder={"kind": "protobuf", "schema_text": text, "message": "M"},  # type: ignore[arg-type]
    )
    with pytest.raises(StreamDefinitionError, match="id and ID differ in case only"):
        Stream(
            name="orders",
            inputs=source,
            batch_interval="10 s",
            storage=str(tmp_path),
            ledger=f"sqlite:///{tmp_path}/ledger.db",
            outputs=ElasticsearchOutput(hosts="http://127.0.0.1:1", index="orders", transform="os.path:join"),
        )


def test_other_streams_do_not_import_protobuf() -> None:
    code = "import sys, headrace.stream; sys.exit('google.protobuf' in sys.modules or 'pyarrow' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
