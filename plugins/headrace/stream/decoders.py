"""The decoders of keys and values: bytes, UTF-8, JSON, Avro, Protobuf, JSON Schema, and those of other packages."""

from __future__ import annotations

import contextlib
import re
import uuid
from collections.abc import Iterator, Mapping
from functools import partial, reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import (
    AfterValidator,
    Field,
    JsonValue,
    NonNegativeInt,
    PositiveInt,
    PrivateAttr,
    SerializeAsAny,
    WrapValidator,
    field_validator,
    model_validator,
)

from headrace.errors import HeadraceError
from headrace.formats import json_schema, protobuf_schema
from headrace.formats.avro_references import joined
from headrace.formats.avro_schema import AvroKind, Decimals, read_schema
from headrace.formats.json_schema import DateTimes, JsonType
from headrace.formats.protobuf_schema import Enums, Nanoseconds, ProtobufSchemaError, ProtoKind, ProtoType, Unset
from headrace.formats.schema_text import SchemaText
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


# In the form that an error names, as the frame of a record has its bytes only.
_Guid = Annotated[str, AfterValidator(lambda given: str(uuid.UUID(given)))]

KEPT_FOLDER = "kept"
"""The folder of what decoders keep, in the folder of the stream. Nothing deletes it, as nothing knows who reads it."""


class SchemaQuestion(NamedTuple):
    """The schema of a registry: the connection's id, the format as the registry names it, the subject (None: that of
    the topic) and the version (None: the newest)."""

    registry: str
    format: str
    subject: str | None
    version: int | None


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
        for kind in ColumnType("struct", parse_columns(value)).all():
            if kind.name == "map" and kind.parts[0].type.name != "string":
                raise ValueError("has a MAP whose keys are not STRING, as the names in a JSON object are")
            if kind.name in _NOT_OF_JSON:
                raise ValueError(
                    f"has {kind.name.upper()}, which JSON is not decoded into; take STRING, which holds any value as "
                    "its text, and convert it in the transform"
                )
            names = [part.name for part in kind.parts if kind.name == "struct"]
            if double := sorted({name for name in names if names.count(name) > 1}):
                raise ValueError(f"has a STRUCT that names {', '.join(double)} twice")
            if escaped := [name for name in names if _ESCAPED_IN_JSON.search(name)]:
                raise ValueError(f"names {escaped[0]!r}; a name has no quotes, backslashes or control characters")
        return value

    def problems(self, stream: StreamFields) -> Iterator[str]:
        yield from _ambiguous_names(stream, "fields", self.fields)


class SchemaNotKnownError(HeadraceError):
    """The columns of a decoder come from a registry's schema, and no batch has begun with one yet."""


class SchemaDecoder(DecoderDefinition):
    """The base class of decoders whose columns come from a schema: their own, or one of a registry.

    ``registry`` is the id of the connection of a schema registry. The values then have its frame, and each is read by
    the schema that it was written with. The columns are those of one schema, the reader's: ``schema_text``, or else the
    ``version`` of the ``subject``, by default the newest one when a batch first begins.
    """

    decodes: ClassVar[str | None] = "headrace.spark.records.framed_values:FramedValues"
    keeps: ClassVar[bool] = True
    reads: ClassVar[tuple[str, ...]] = ("headers",)

    of: ClassVar[str]
    """The class that decodes the values of one schema in tasks, as "module:Class"."""
    format: ClassVar[str]
    """The name that registries have for the format."""

    kind: str
    schema_text: str | None = Field(
        default=None, description="The schema of the columns, in the format's own language."
    )
    registry: str | None = Field(
        default=None, description="The id of the connection of a schema registry with Confluent's API."
    )
    subject: str | None = Field(
        default=None,
        min_length=1,
        description="The subject of the columns' schema; by default the input's topic with -key or -value.",
    )
    version: PositiveInt | None = Field(
        default=None, description="The version of the subject; by default the newest when a batch first begins."
    )
    refused_ids: tuple[NonNegativeInt | _Guid, ...] = Field(
        default=(),
        description="Schema ids, or GUIDs, whose records are dead letters, such as those of a broken producer.",
    )

    _reader: SchemaText | None = PrivateAttr(default=None)
    _part: Literal["key", "value"] = PrivateAttr(default="value")

    @model_validator(mode="after")
    def _has_one_schema(self) -> Self:
        own = self._own_schema
        given = [name for name in ("subject", "version") if getattr(self, name) is not None]
        if own is None and self.registry is None:
            raise ValueError("has no schema: give schema_text, or the connection of a registry")
        if given and (own is not None or self.registry is None):
            why = "schema_text is the schema of the columns" if own is not None else "there is no registry"
            raise ValueError(f"{' and '.join(given)}: names a schema of a registry, but {why}; leave one out")
        if self.refused_ids and self.registry is None:
            raise ValueError("refused_ids: only values in the frame of a registry have the id of a schema")
        if own is not None:
            self._check(own)
        return self

    @property
    def _own_schema(self) -> SchemaText | None:
        """The schema of the definition itself."""
        return None if self.schema_text is None else SchemaText(self.schema_text)

    def _check(self, schema: SchemaText) -> None:
        """Raise ValueError if values of the schema have no columns."""
        self._column_of(schema)

    def _column_of(self, schema: SchemaText) -> str:
        """The type of values that are read by this schema, in Spark's DDL. Raises ValueError."""
        raise NotImplementedError

    def _settings(self, schema: SchemaText) -> dict[str, JsonValue]:
        """The keyword arguments of the class ``of`` for reading by this schema."""
        raise NotImplementedError

    @property
    def reader(self) -> SchemaText | None:
        """The schema of the columns; None as long as it is a question to a registry."""
        return self._own_schema or self._reader

    @property
    def column(self) -> str:
        """Raises SchemaNotKnownError as long as the `question` is not answered."""
        return self._column_of(self._known_reader())

    @property
    def keywords(self) -> dict[str, JsonValue]:
        """Raises SchemaNotKnownError as long as the `question` is not answered."""
        settings = {"of": self.of, **self._settings(self._known_reader())}
        if self.registry is None:
            return settings
        ids: list[JsonValue] = [*self.refused_ids]
        return {**settings, "registry": self.registry, "format": self.format, "part": self._part, "refused_ids": ids}

    def _known_reader(self) -> SchemaText:
        reader = self.reader
        if reader is None:
            raise SchemaNotKnownError(
                f"The columns of a decoder come from the schema registry of connection {self.registry!r}, and are not "
                "known yet.",
                remedy="They are recorded when the first batch begins. `headrace streams check --connect` asks now.",
            )
        return reader

    @property
    def question(self) -> SchemaQuestion | None:
        if self.registry is None or self._own_schema is not None:
            return None
        return SchemaQuestion(self.registry, self.format, self.subject, self.version)

    @property
    def is_framed(self) -> bool:
        return self.registry is not None

    def with_reader(self, schema: SchemaText | None, part: Literal["key", "value"]) -> Self:
        if schema is not None:
            self._check(schema)
        read = self.model_copy()
        read._reader, read._part = schema, part
        return read

    @property
    def connection_ids(self) -> tuple[str, ...]:
        return () if self.registry is None else (self.registry,)

    def problems(self, stream: StreamFields) -> Iterator[str]:
        reader = self.reader
        if reader is not None:
            column = self._column_of(reader)
            with contextlib.suppress(ValueError):
                # A value that is no record has no columns.
                parse_columns(column)
                yield from _ambiguous_names(stream, "schema_text", column)
        if self.question is None or self.subject is not None:
            return
        for source in stream.inputs:
            if any(self == decoder for decoder in source.decoders.values()) and len(source.topic_names) != 1:
                yield (
                    f"subject: input {source.id} has no single topic, after which a subject could be named; name the "
                    "subject of the schema that all records are read by"
                )


class AvroDecoder(SchemaDecoder):
    """Decode Avro. Values that do not fit their schema, or that the columns' schema cannot read, are dead-lettered.

    A value is the bytes of one Avro value, in the frame of a registry if there is one. ``schema_text`` is the schema in
    Avro's JSON. docs/types.md says what each of Avro's types becomes. Hosts of Spark need the extra ``registry``.
    """

    of: ClassVar[str] = "headrace.spark.records.avro_values:AvroValues"
    format: ClassVar[str] = "AVRO"

    kind: Literal["avro"] = "avro"
    decimals: Decimals = Field(
        default="number", description="Decimals of up to 38 digits as numbers, or all of them as texts."
    )

    def _column_of(self, schema: SchemaText) -> str:
        made = read_schema(joined(schema))
        return made.columns(self.decimals) if made.kind is AvroKind.RECORD else made.ddl(self.decimals)

    def _settings(self, schema: SchemaText) -> dict[str, JsonValue]:
        return {"schema": joined(schema), "decimals": self.decimals}

    @property
    def description(self) -> tuple[str, str]:
        reader = self.reader
        if reader is None:
            return "Avro", f"connection `{self.registry}`"
        made = read_schema(joined(reader))
        return "Avro", f"`{made.name or made.kind.value}`"


class ProtobufDecoder(SchemaDecoder):
    """Decode Protobuf. Values that do not fit their schema, or that the columns' schema cannot read, are dead-lettered.

    A value is the bytes of one message, in the frame of a registry if there is one. A schema of the definition is
    either ``schema_text``, in Protobuf's language, with the texts of the files that it imports as ``imports``, by their
    names; or ``descriptor_set``, compiled: the bytes, or their base64, of what ``protoc --include_imports
    --descriptor_set_out`` writes. The definition keeps the compiled one. docs/types.md says what each of Protobuf's
    types becomes. Hosts of Spark need the extra ``registry``.
    """

    of: ClassVar[str] = "headrace.spark.records.protobuf_values:values_of"
    format: ClassVar[str] = "PROTOBUF"

    kind: Literal["protobuf"] = "protobuf"
    descriptor_set: str = Field(
        default="", description="A FileDescriptorSet in base64, with all imported files.", repr=False
    )
    message: str = Field(
        default="",
        description='The full name of the message, such as "shop.Order"; with a registry by default the first of the '
        "schema.",
    )
    unset: Unset = Field(
        default="default",
        description="Fields without presence that a message does not have: their default, or null. Fields with "
        "presence are null.",
    )
    enums: Enums = Field(default="name", description="Enums as names, or as numbers.")
    nanoseconds: Nanoseconds = Field(
        default="refuse",
        description="A Timestamp with nanoseconds, which Spark's times do not have: a dead letter, cut to its "
        "microsecond, or all Timestamps as texts with nine digits.",
    )
    # Of a definition in Python. They are compiled, and not kept.
    schema_text: str | None = Field(default=None, exclude=True, repr=False)
    imports: Mapping[str, str] | None = Field(default=None, exclude=True, repr=False)

    @property
    def description(self) -> tuple[str, str]:
        return "Protobuf", f"`{self.message}`" if self.message else f"connection `{self.registry}`"

    @property
    def _own_schema(self) -> SchemaText | None:
        return SchemaText(self.descriptor_set) if self.descriptor_set else None

    def _check(self, schema: SchemaText) -> None:
        if self.descriptor_set and not self.message:
            raise ValueError("message: name the message of the schema that a value is")
        with _named("the schema"):
            self._column_of(schema)

    def _column_of(self, schema: SchemaText) -> str:
        made = self._type_of(schema)
        if made.kind is ProtoKind.MESSAGE:
            return made.columns(self.enums, self.nanoseconds)
        return made.ddl(self.enums, self.nanoseconds)

    def _settings(self, schema: SchemaText) -> dict[str, JsonValue]:
        compiled, message = self._compiled(schema)
        settings: dict[str, JsonValue] = {"unset": self.unset, "enums": self.enums, "nanoseconds": self.nanoseconds}
        return {"schema": compiled, "message": message, **settings}

    def _compiled(self, schema: SchemaText) -> tuple[str, str]:
        """The compiled schema, and the name of the message."""
        if self.descriptor_set:
            return self.descriptor_set, self.message
        from headrace.formats.protobuf_compiler import compile_schema

        compiled = compile_schema(schema)
        return compiled, self.message or protobuf_schema.message_at(compiled, (0,))

    def _type_of(self, schema: SchemaText) -> ProtoType:
        return protobuf_schema.read_schema(*self._compiled(schema))

    @model_validator(mode="before")
    @classmethod
    def _schema_is_compiled(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        given = dict(given)
        text, imports = given.pop("schema_text", None), given.pop("imports", None)
        compiled = given.get("descriptor_set")
        if text is None and imports:
            raise ValueError("imports are those of schema_text, which is not given")
        if text is not None and compiled:
            raise ValueError("has schema_text and descriptor_set; leave one out")
        if text is not None:
            if not isinstance(text, str) or not _are_texts(imports or {}):
                raise ValueError("schema_text must be a text, and imports texts by names")
            from headrace.formats.protobuf_compiler import compile_schema

            with _named("schema_text"):
                given["descriptor_set"] = compile_schema(SchemaText(text, tuple((imports or {}).items())))
        elif compiled and isinstance(compiled, str | bytes):
            with _named("descriptor_set"):
                given["descriptor_set"] = protobuf_schema.check_encoded(compiled)
        return given


@contextlib.contextmanager
def _named(field: str) -> Iterator[None]:
    """Put the field's name before an error of its schema."""
    try:
        yield
    except ProtobufSchemaError as error:
        raise ProtobufSchemaError(f"{field} {error}") from None


def _are_texts(given: Any) -> bool:
    return isinstance(given, Mapping) and all(isinstance(each, str) for pair in given.items() for each in pair)


class JsonSchemaDecoder(SchemaDecoder):
    """Decode JSON objects by a JSON Schema. Values that are not valid by it, or do not fit its columns, are
    dead-lettered.

    A value is the JSON itself, in the frame of a registry if there is one. ``schema_text`` is the schema;
    ``references`` are the schemas that it refers to, directly or not, by the URI in ``$ref``: nothing else is ever
    read. docs/types.md says what each type becomes. Hosts of Spark need the extra ``registry``.
    """

    of: ClassVar[str] = "headrace.spark.records.json_schema_values:values_of"
    format: ClassVar[str] = "JSON"
    bytes_are_json: ClassVar[bool] = True

    kind: Literal["json_schema"] = "json_schema"
    references: dict[str, str] = Field(default={}, description="The texts of the schemas that it refers to, by URI.")
    date_times: DateTimes = Field(
        default="timestamp",
        description='Texts of the format "date-time" as times with microseconds, or as the texts that they are.',
    )

    @property
    def description(self) -> tuple[str, str]:
        reader = self.reader
        if reader is None:
            return "JSON Schema", f"connection `{self.registry}`"
        made = json_schema.read_schema(reader)
        return "JSON Schema", f"`{made.title}`" if made.title else ""

    @property
    def _own_schema(self) -> SchemaText | None:
        return None if self.schema_text is None else SchemaText(self.schema_text, tuple(self.references.items()))

    def _column_of(self, schema: SchemaText) -> str:
        return self._type_of(schema).columns(self.date_times)

    def _settings(self, schema: SchemaText) -> dict[str, JsonValue]:
        references: dict[str, JsonValue] = dict(schema.references)
        return {"schema": schema.text, "references": references, "date_times": self.date_times}

    @staticmethod
    def _type_of(schema: SchemaText) -> JsonType:
        return json_schema.read_schema(schema)


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


_BUILT_IN = (BytesDecoder, Utf8Decoder, JsonDecoder, AvroDecoder, ProtobufDecoder, JsonSchemaDecoder)

if TYPE_CHECKING:
    Decoder = DecoderDefinition
else:
    Decoder = Annotated[
        Annotated[reduce(or_, _BUILT_IN), Field(discriminator="kind")],
        WrapValidator(partial(validate_part, DecoderDefinition, _BUILT_IN, "headrace.decoders")),
        # A decoder of another package is none of the union.
        SerializeAsAny(),
    ]
