"""Records as Confluent's own serializers write them, with a schema registry."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
from confluent_kafka.schema_registry import Schema, SchemaReference, SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroSerializer
from confluent_kafka.schema_registry.json_schema import JSONSerializer
from confluent_kafka.schema_registry.protobuf import ProtobufSerializer
from confluent_kafka.serialization import SerializationContext
from google.protobuf import text_format
from tests.support.protobuf_examples import message_class

from headrace.formats.protobuf_compiler import compile_schema
from headrace.formats.schema_text import SchemaText
from headrace.wal.frame import RECORD_SCHEMA

Record = tuple[bytes, list[tuple[str, bytes]]]
"""The bytes of a key or value, and the headers that the serializer added."""


class ConfluentSerializers:
    """Serializes keys and values of a topic of its own. ``part`` is "key" or "value"; ``conf`` is that of Confluent."""

    def __init__(self, url: str) -> None:
        self.topic = f"orders-{uuid.uuid4().hex[:8]}"
        self.client = SchemaRegistryClient({"url": url})

    def avro(
        self, schema: Any, value: Any, *, part: str = "value", refers_to: Mapping[str, Any] | None = None, **conf: Any
    ) -> Record:
        """``refers_to``: the schemas that it refers to, by name; each may refer to those before it."""
        named = Schema(json.dumps(schema), "AVRO", self._references("AVRO", refers_to or {}))
        return self._by(AvroSerializer(self.client, named, conf=_named(conf)), value, part)

    def json(
        self, schema: Any, value: Any, *, part: str = "value", refers_to: Mapping[str, Any] | None = None, **conf: Any
    ) -> Record:
        """As `avro`."""
        named = Schema(json.dumps(schema), "JSON", self._references("JSON", refers_to or {}))
        return self._by(JSONSerializer(named, self.client, conf=_named(conf)), value, part)

    def protobuf(
        self,
        text: str,
        message: str,
        value: str,
        *,
        part: str = "value",
        imports: Mapping[str, str] | None = None,
        **conf: Any,
    ) -> Record:
        """``value``: the message in Protobuf's text format. The serializer registers what the file imports."""
        schema = compile_schema(SchemaText(text, tuple((imports or {}).items())))
        kind = message_class(schema, message)
        serializer = ProtobufSerializer(kind, self.client, _named(conf))
        return self._by(serializer, text_format.Parse(value, kind()), part)

    def subject(self, part: str = "value") -> str:
        """The subject that the serializers name."""
        return f"{self.topic}-{part}"

    def _by(self, serializer: Any, value: Any, part: str) -> Record:
        headers: list[tuple[str, bytes]] = []
        return serializer(value, SerializationContext(self.topic, part, headers)), headers

    def _references(self, format_: str, schemas: Mapping[str, Any]) -> list[SchemaReference]:
        made: list[SchemaReference] = []
        for name, schema in schemas.items():
            subject = f"{self.topic}-{name}"
            # Avro's parser of a registry takes no schema that is referred to and is not needed.
            needed = [each for each in made if f'"{each.name}"' in json.dumps(schema)]
            self.client.register_schema(subject, Schema(json.dumps(schema), format_, needed))
            made.append(SchemaReference(name, subject, 1))
        return made


def columns_of(records: Sequence[Record | None]) -> tuple[pa.Array, pa.Array]:
    """The bytes of records, None for those that have none, and their headers, as a decoder is given them."""
    headers = [
        None if record is None else [{"key": name, "value": value} for name, value in record[1]] for record in records
    ]
    values = [None if record is None else record[0] for record in records]
    return pa.array(values, pa.binary()), pa.array(headers, RECORD_SCHEMA.field("headers").type)


def id_in_header(payload: bytes, context: Any, schema_id: Any) -> bytes:
    """As Confluent's ``header_schema_id_serializer``, with the number for the GUID: Apicurio 2.6 has no GUIDs."""
    context.headers.append((f"__{context.field}_schema_id", schema_id.id_to_bytes()))
    return payload


def _named(conf: Mapping[str, Any]) -> dict[str, Any]:
    """Confluent's names of the settings, which have dots."""
    return {name.replace("_", "."): value for name, value in conf.items()}
