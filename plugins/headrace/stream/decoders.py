"""The decoders of keys and values: bytes, UTF-8, JSON, Avro, and those of other packages."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial, reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, JsonValue, SerializeAsAny, WrapValidator, field_validator

from headrace.formats import change_events
from headrace.formats.avro_schema import AvroKind, Decimals, read_schema
from headrace.formats.change_events import DecimalTexts, TimeUnit
from headrace.stream.contract import DECODER_SHAPES, KindDefinition, Shape
from headrace.stream.ddl import ColumnsText, ColumnType, differing_in_case, parse_columns
from headrace.stream.model import validate_part

if TYPE_CHECKING:
    from headrace.stream.fields import StreamFields

# What is escaped in JSON: msgspec, by which records are decoded, takes no such names.
_ESCAPED_IN_JSON = re.compile(r'["\\\x00-\x1f]')

# Types of Spark's DDL that JSON is not decoded into.
_NOT_OF_JSON = frozenset(
    {"char", "character", "varchar", "geometry", "geography", "interval", "variant", "void"},
)


def _check_held_by_json(value: str) -> str:
    """The columns in DDL, if JSON can hold them. Raises ValueError."""
    for kind in ColumnType("struct", parse_columns(value)).all():
        if kind.name == "map" and kind.parts[0].type.name != "string":
            raise ValueError("has a MAP whose keys are not STRING, as the names in a JSON object are")
        if kind.name in _NOT_OF_JSON:
            raise ValueError(
                f"has {kind.name.upper()}, which JSON is not decoded into; take STRING, which holds any value as its "
                "text, and convert it in the transform"
            )
        names = [part.name for part in kind.parts if kind.name == "struct"]
        if double := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"has a STRUCT that names {', '.join(double)} twice")
        if escaped := [name for name in names if _ESCAPED_IN_JSON.search(name)]:
            raise ValueError(f"names {escaped[0]!r}; a name has no quotes, backslashes or control characters")
    return value


class DecoderDefinition(KindDefinition):
    """The base class of decoders: what a user writes in a stream's definition, and how Spark's tasks decode.

    Spark's tasks do not get the definition: they get the texts that are named here.
    """

    shapes: ClassVar[Mapping[str, Shape]] = DECODER_SHAPES

    decodes: ClassVar[str | None] = None
    """The class that decodes in Spark's tasks (``headrace.spark.records.decoding.ColumnDecoder``), as "module:Class".
    None: any bytes are accepted, and stay as they are."""

    keeps: ClassVar[bool] = False
    """Whether the class keeps values with the stream, such as a registry's schemas: it is then called with ``kept``
    too, a ``headrace.spark.records.kept_values.KeptValues``."""

    bytes_are_json: ClassVar[bool] = False
    """Whether the bytes that it accepts are the value's JSON, so that a document is these bytes where no transform
    makes another one."""

    reads: ClassVar[tuple[str, ...]] = ()
    """The columns of the record that the class gets beside the values, of "headers" and "topic"."""

    kind: str

    @property
    def column(self) -> str:
        """The type of a decoded value in Spark's DDL: a type such as ``STRING``, or the fields of a struct."""
        return "BINARY"

    @property
    def beside(self) -> str:
        """The columns in Spark's DDL that a decoder of values gives beside the value, such as the operation of a change
        event. They are the record's own, as its offset is, and not part of the document."""
        return ""

    @property
    def keywords(self) -> dict[str, JsonValue]:
        """The keyword arguments with which tasks call the class ``decodes``."""
        return {}


class BytesDecoder(DecoderDefinition):
    """Keep the bytes as they are."""

    bytes_are_json: ClassVar[bool] = True

    kind: Literal["bytes"] = "bytes"


class Utf8Decoder(DecoderDefinition):
    """Decode the bytes as UTF-8 text. Bytes that are not UTF-8 are dead-lettered."""

    decodes: ClassVar[str | None] = "headrace.spark.records.json_objects:Utf8Texts"
    bytes_are_json: ClassVar[bool] = True

    kind: Literal["utf8"] = "utf8"

    @property
    def column(self) -> str:
        return "STRING"


class JsonDecoder(DecoderDefinition):
    """Decode a JSON object into a struct column. Values that do not parse by ``fields`` are dead-lettered.

    ``fields`` is a schema in Spark's DDL, such as ``"carrier STRING, flight INT"``.
    """

    decodes: ClassVar[str | None] = "headrace.spark.records.json_objects:JsonObjects"
    bytes_are_json: ClassVar[bool] = True

    kind: Literal["json"] = "json"
    fields: ColumnsText

    @property
    def column(self) -> str:
        return self.fields

    @property
    def keywords(self) -> dict[str, JsonValue]:
        return {"fields": self.fields}

    _fields_are_what_json_can_hold = field_validator("fields")(_check_held_by_json)

    def problems(self, stream: StreamFields) -> Iterator[str]:
        yield from _ambiguous_names(stream, "fields", self.fields)


class AvroDecoder(DecoderDefinition):
    """Decode Avro by a schema of its own. Values that do not fit the schema are dead-lettered.

    A value is the bytes of one Avro value, without a frame around them. ``schema_text`` is the schema in Avro's JSON.
    docs/types.md says what each of Avro's types becomes. Hosts of Spark need the extra ``registry``.
    """

    decodes: ClassVar[str | None] = "headrace.spark.records.avro_values:AvroValues"

    kind: Literal["avro"] = "avro"
    schema_text: str
    decimals: Decimals = Field(
        default="number", description="Decimals of up to 38 digits as numbers, or all of them as texts."
    )

    @property
    def column(self) -> str:
        made = read_schema(self.schema_text)
        return made.columns(self.decimals) if made.kind is AvroKind.RECORD else made.ddl(self.decimals)

    @property
    def keywords(self) -> dict[str, JsonValue]:
        return {"schema": self.schema_text, "decimals": self.decimals}

    @property
    def description(self) -> tuple[str, str]:
        made = read_schema(self.schema_text)
        return "Avro", f"`{made.name or made.kind.value}`"

    @field_validator("schema_text")
    @classmethod
    def _schema_has_columns(cls, value: str) -> str:
        read_schema(value)
        return value

    def problems(self, stream: StreamFields) -> Iterator[str]:
        made = read_schema(self.schema_text)
        if made.kind is AvroKind.RECORD:
            yield from _ambiguous_names(stream, "schema_text", made.columns(self.decimals))


class _OfDebezium(DecoderDefinition):
    """What the decoders of change events and of their keys have in common."""

    decodes: ClassVar[str | None] = "headrace.spark.records.change_events:ChangeEvents"

    fields: ColumnsText
    times: TimeUnit | None = Field(
        default=None,
        description="The unit of a number in a TIMESTAMP or TIME, where the event has no schema part that says it.",
    )
    decimals: DecimalTexts = Field(
        default="base64",
        description="What a text in a DECIMAL is, where the event has no schema part that says it: base64 as Debezium "
        'sends decimals by default, or "number" with its decimal.handling.mode "string".',
    )

    @property
    def column(self) -> str:
        return self.fields

    @property
    def keywords(self) -> dict[str, JsonValue]:
        return {"fields": self.fields, "times": self.times, "decimals": self.decimals}

    _fields_are_what_json_can_hold = field_validator("fields")(_check_held_by_json)

    def problems(self, stream: StreamFields) -> Iterator[str]:
        yield from _ambiguous_names(stream, "fields", self.fields)


class DebeziumDecoder(_OfDebezium):
    """Decode Debezium's change events in JSON: the row after the change.

    ``fields`` are the table's columns in Spark's DDL, such as ``"id INT, total DECIMAL(38, 4), at TIMESTAMP"``. The
    record's value is the row; where a row was deleted it is null. Columns beside it say what happened: ``op``,
    ``position``, ``before``, ``changed_at``, ``source`` and ``transaction``. Events in flattened form and CloudEvents
    are recognised (docs/guides/change-events.md).
    """

    reads: ClassVar[tuple[str, ...]] = ("headers",)

    kind: Literal["debezium"] = "debezium"

    @property
    def beside(self) -> str:
        return change_events.beside(_as_struct(self.column))

    @property
    def description(self) -> tuple[str, str]:
        return "Debezium", f"`{self.fields}`"


class DebeziumKeyDecoder(_OfDebezium):
    """Decode the keys of Debezium's change events in JSON, with or without their schema part. ``fields`` are the
    columns of the table's primary key, such as ``"id INT"``."""

    kind: Literal["debezium_key"] = "debezium_key"

    @property
    def description(self) -> tuple[str, str]:
        return "Debezium's key", f"`{self.fields}`"


def _as_struct(columns: str) -> str:
    """The type of a value with these columns, which may be in ``STRUCT<…>`` already."""
    return columns if columns.strip().lower().startswith("struct<") else f"STRUCT<{columns}>"


def _ambiguous_names(stream: StreamFields, field: str, columns: str) -> Iterator[str]:
    """Yield the fields that a transform cannot name: Spark's error is AMBIGUOUS_REFERENCE_TO_FIELDS."""
    transforms = stream.state is not None or any(stream.transform_of(output) for output in stream.outputs)
    if not transforms or stream.spark.conf.get("spark.sql.caseSensitive", "").lower() == "true":
        return
    structs = ColumnType("struct", parse_columns(columns)).all()
    found = [differing_in_case(part.name for part in kind.parts) for kind in structs if kind.name == "struct"]
    for group in (group for groups in found for group in groups):
        yield (
            f"{field}: {' and '.join(group)} differ in case only, and to Spark they are one name, so that the "
            "transform can name neither; leave one out, or set spark.sql.caseSensitive to true in spark.conf"
        )


_BUILT_IN = (BytesDecoder, Utf8Decoder, JsonDecoder, AvroDecoder, DebeziumDecoder, DebeziumKeyDecoder)

if TYPE_CHECKING:
    Decoder = DecoderDefinition
else:
    Decoder = Annotated[
        Annotated[reduce(or_, _BUILT_IN), Field(discriminator="kind")],
        WrapValidator(partial(validate_part, DecoderDefinition, _BUILT_IN, "headrace.decoders")),
        # A decoder of another package is none of the union.
        SerializeAsAny(),
    ]
