"""What `streams check` says of the columns of a schema registry."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.confluent_serializers import ConfluentSerializers
from typer.testing import CliRunner

from headrace.batch.readers import ask_reader
from headrace.checks.connecting import check_schemas
from headrace.cli.main import app
from headrace.kafka import client
from headrace.kept_values import KeptValues
from headrace.registry.schemas import KeptSchemas
from headrace.stream import AvroDecoder, ConsoleOutput, JsonSchemaDecoder, KafkaInput, ProtobufDecoder, Stream

pytestmark = pytest.mark.slow

FIRST: Any = {"type": "record", "name": "Order", "fields": [{"name": "id", "type": "int"}]}
SECOND: Any = {"type": "record", "name": "Order", "fields": [{"name": "id", "type": "long"}]}
KEY = 'syntax = "proto3"; message Key { int32 id = 1; }'


@pytest.fixture
def stream(connection: str, serializers: ConfluentSerializers, tmp_path: Path) -> Stream:
    """Its keys are of Protobuf, its values of Avro."""
    source = KafkaInput(
        bootstrap_servers="127.0.0.1:1",
        topics=serializers.topic,
        key_decoder=ProtobufDecoder(registry=connection),
        value_decoder=AvroDecoder(registry=connection),
    )
    return Stream(
        name="orders",
        inputs=source,
        outputs=ConsoleOutput(),
        batch_interval="10 s",
        storage=str(tmp_path / "storage"),
        ledger=f"sqlite:///{tmp_path}/ledger.db",
    )


def begin_with(stream: Stream, field: str) -> None:
    """Record the newest schema, as a batch does that begins."""
    asked = ask_reader(stream, stream.inputs[0], field)
    assert asked.found is not None
    assert asked.reader is not None
    (registry,) = asked.decoder.connection_ids
    schemas = KeptSchemas(KeptValues(asked.decoder.kept_url(stream.folder_url)), registry)
    schemas.keep(asked.found)
    schemas.record(f"{stream.inputs[0].id}.{field}", asked.reader)


def test_the_columns_are_shown_and_how_they_change(
    stream: Stream, serializers: ConfluentSerializers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "HOPE_SECONDS", 0.2)
    definition = tmp_path / "orders.json"
    definition.write_text(stream.to_json())

    def checked(*options: str) -> list[str]:
        lines = CliRunner().invoke(app, ["streams", "check", str(definition), *options]).stdout.splitlines()
        return [line for line in lines if "key" in line or "value" in line]

    key, value = serializers.subject("key"), serializers.subject("value")
    missing = checked("--connect")
    assert [line.startswith("FAILED input records: the schema registry of connection") for line in missing] == [
        True
    ] * 2
    assert f"has no subject '{key}'" in missing[0]
    assert f"has no subject '{value}'" in missing[1]
    serializers.protobuf(KEY, "Key", "id: 1", part="key")
    serializers.avro(FIRST, {"id": 1})
    of_key = f"ok     input records: version 1 of subject {key} for the key: `id` INT"
    assert checked("--connect") == [
        of_key,
        f"ok     input records: version 1 of subject {value} for the value: `id` INT",
    ]
    # Nothing is recorded by a check.
    unknown = "columns of a schema registry, which --connect asks"
    assert checked() == [f"Input records, key: {unknown}", f"Input records, value: {unknown}"]
    for field in ("key_decoder", "value_decoder"):
        begin_with(stream, field)
    serializers.avro(SECOND, {"id": 1})
    assert checked("--connect") == [
        of_key,
        f"ok     input records: version 2 of subject {value} for the value: `id` BIGINT; since the last batch id was "
        "INT and is BIGINT",
    ]
    assert checked() == ["Input records, key: `id` INT", "Input records, value: `id` INT"]


def test_a_schema_that_gives_no_columns_fails_the_check(
    stream: Stream, serializers: ConfluentSerializers, connection: str
) -> None:
    serializers.avro(FIRST, {"id": 1}, part="key")
    tree = {"title": "Tree", "type": "object", "properties": {"below": {"$ref": "#"}}}
    serializers.json(tree, {})
    decoders = {
        "key_decoder": ProtobufDecoder(registry=connection),
        "value_decoder": JsonSchemaDecoder(registry=connection),
    }
    source = stream.inputs[0].model_copy(update=decoders)
    key, value = check_schemas(stream.model_copy(update={"inputs": (source,)}))
    assert "is AVRO, and the decoder's format is PROTOBUF" in str(key.error)
    assert "refers to '#', which contains itself at below" in str(value.error)
    own = AvroDecoder(registry=connection, schema_text=json.dumps(SECOND))
    source = stream.inputs[0].model_copy(update={"key_decoder": own, "value_decoder": own})
    checks = list(check_schemas(stream.model_copy(update={"inputs": (source,)})))
    assert [check.error for check in checks] == [None, None]
    assert checks[1].where.endswith(" for the value: `id` BIGINT")
