"""Decodes values in the frame of a schema registry: each by the schema that it was written with.

It imports no Spark. The schemas come from what the stream keeps; the registry is asked for those that are not there,
and in the first run of a batch for all of them, since a registry that was set up again may give an id to another
schema. An id that the registry does not have, or a registry that does not answer, fails the batch: the records are
good.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

import pyarrow as pa

from headrace.formats.schema_text import UnreadableSchemaError
from headrace.kept_values import KeptValues
from headrace.registry.client import RegisteredSchema
from headrace.registry.framing import SchemaId, read_frames
from headrace.registry.schemas import KeptSchemas

_MOST_DECODERS = 256
_FORMAT_NAMES = {"AVRO": "Avro", "PROTOBUF": "Protobuf", "JSON": "JSON Schema"}


class ValuesOfSchema(Protocol):
    """Decodes values of one schema, such as `headrace.spark.records.avro.values.AvroValues`."""

    def decode(self, values: pa.Array) -> tuple[pa.Array, dict[int, str]]:
        """As `headrace.spark.records.decoding.ColumnDecoder.decode`."""
        ...


class FramedValues:
    """Decodes framed values of a column into the columns of one reader schema."""

    def __init__(
        self,
        column: pa.DataType,
        *,
        time_zone: str = "UTC",
        kept: KeptValues,
        of: str,
        registry: str | None = None,
        format: str = "",
        part: str = "value",
        refused_ids: Collection[SchemaId] = (),
        **keywords: Any,
    ) -> None:
        """
        Args:
            registry: the id of the registry's connection; None: the values have no frame.
            of: the class that decodes values of one schema, as "module:Class". It is called with the writer's schema as
                ``writer``, for Protobuf with the path of the message in its file as ``message_path``, and ``keywords``.
            format: the format of its schemas, as the registry names it.
            part: "key" or "value".
            refused_ids: schema ids and GUIDs whose records are refused.
        """
        module, _, name = of.partition(":")
        self._make: Callable[..., ValuesOfSchema] = getattr(importlib.import_module(module), name)
        self._column = column
        self._keywords: Mapping[str, Any] = {"time_zone": time_zone, **keywords}
        self._unframed: ValuesOfSchema | None = None
        if registry is None:
            self._unframed = self._make(column, **self._keywords)
        self._schemas = KeptSchemas(kept, registry or "")
        self._ask = kept.is_first
        self._found: dict[SchemaId, RegisteredSchema] = {}
        self._format = format
        self._part = part
        self._refused_ids = frozenset(refused_ids)
        self._decoders: dict[tuple[SchemaId, tuple[int, ...]], ValuesOfSchema | str] = {}

    def decode(self, values: pa.Array, *, headers: pa.Array | None = None) -> tuple[pa.Array, dict[int, str]]:
        """The decoded values, and the reasons by row of those that are refused.

        Raises SchemaUnknownError, RegistryUnavailableError and the other errors of `KeptSchemas.of_id`.
        """
        if self._unframed is not None:
            return self._unframed.decode(values)
        frames = read_frames(values, headers, self._part, message_paths=self._format == "PROTOBUF")
        refused = dict(frames.refused)
        parts: list[pa.Array] = []
        places: list[int] = []
        for id_, path, rows, payloads in frames.groups():
            decoder = self._decoder(id_, path)
            numbers = range(len(values)) if rows is None else rows
            if isinstance(decoder, str):
                refused |= {row: decoder for row, payload in zip(numbers, payloads, strict=True) if payload.is_valid}
                continue
            decoded, reasons = decoder.decode(payloads)
            refused |= {numbers[row]: f"{reason} (schema {id_})" for row, reason in reasons.items()}
            if rows is None:
                whole: pa.Array = decoded
                return whole, refused
            parts.append(decoded)
            places += rows
        if not parts:
            return pa.nulls(len(values), self._column), refused
        order: list[int | None] = [None] * len(values)
        for at, row in enumerate(places):
            order[row] = at
        return pa.concat_arrays(parts).take(pa.array(order, pa.int64())), refused

    def _decoder(self, id_: SchemaId, path: tuple[int, ...]) -> ValuesOfSchema | str:
        """The decoder of the values of a schema, or the reason why they cannot be decoded."""
        if (id_, path) not in self._decoders:
            if len(self._decoders) >= _MOST_DECODERS:
                # Each record may name a message of its own.
                self._decoders.clear()
            self._decoders[id_, path] = self._made(id_, path)
        return self._decoders[id_, path]

    def _made(self, id_: SchemaId, path: tuple[int, ...]) -> ValuesOfSchema | str:
        if id_ in self._refused_ids:
            return f"of schema {id_}, which refused_ids names"
        if id_ not in self._found:
            self._found[id_] = self._schemas.of_id(id_, ask=self._ask)
        found = self._found[id_]
        if found.format != self._format:
            theirs, ours = (_FORMAT_NAMES.get(name, name) for name in (found.format, self._format))
            return f"of schema {id_}, which is {theirs} and not {ours}"
        more = {"message_path": path} if path else {}
        try:
            return self._make(self._column, writer=found.schema.to_json(), **more, **self._keywords)
        except UnreadableSchemaError as error:
            return f"of schema {id_}, which cannot be read by the schema of the columns: {error}"
