"""What all decoders of keys and values have in common, and those that need no schema: bytes, UTF-8 and JSON."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, Self

from pydantic import JsonValue, field_validator

from headrace.formats.schema_text import SchemaText
from headrace.stream.contract import DECODER_SHAPES, KindDefinition, Shape
from headrace.stream.ddl import ColumnsText, ColumnType, differing_in_case, parse_columns

if TYPE_CHECKING:
    from headrace.stream.fields import StreamFields

# What is escaped in JSON: msgspec, by which records are decoded, takes no such names.
_ESCAPED_IN_JSON = re.compile(r'["\\\x00-\x1f]')

# Types of Spark's DDL that JSON is not decoded into.
_NOT_OF_JSON = frozenset(
    {"char", "character", "varchar", "geometry", "geography", "interval", "variant", "void"},
)


KEPT_FOLDER = "kept"
"""The folder of what decoders keep, in the folder of the stream. Nothing deletes it, as nothing knows who reads it."""


class SchemaQuestion(NamedTuple):
    """The schema of a registry: the connection's id, the format as the registry names it, the subject (None: that of
    the topic) and the version (None: the newest)."""

    registry: str
    format: str
    subject: str | None
    version: int | None


def check_held_by_json(value: str) -> str:
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
    too, a ``headrace.kept_values.KeptValues``."""

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

    def kept_url(self, folder_url: str) -> str:
        """The folder of what the class keeps, in the folder of the stream."""
        return f"{folder_url}/{KEPT_FOLDER}/{self.kind}"

    @property
    def question(self) -> SchemaQuestion | None:
        """The schema of a registry that the columns come from. `with_reader` then gives the decoder with its answer."""
        return None

    @property
    def is_framed(self) -> bool:
        """Whether the values have the frame of a schema registry."""
        return False

    def with_registry(self, connection_id: str) -> Self:  # noqa: ARG002
        """The decoder by the registry of another connection, if its values have the frame of one."""
        return self

    def with_reader(self, schema: SchemaText | None, part: Literal["key", "value"]) -> Self:  # noqa: ARG002
        """The decoder of keys or values that reads by this schema, the answer to its `question` if it has one.

        Raises ValueError if values of the schema have no columns.
        """
        return self


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

    @field_validator("fields")
    @classmethod
    def _fields_are_what_json_can_hold(cls, value: str) -> str:
        return check_held_by_json(value)

    def problems(self, stream: StreamFields) -> Iterator[str]:
        yield from ambiguous_names(stream, "fields", self.fields)


def ambiguous_names(stream: StreamFields, field: str, columns: str) -> Iterator[str]:
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
