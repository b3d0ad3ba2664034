"""Decoders whose columns come from a schema, their own or one of a registry: Avro, Protobuf and JSON Schema."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, JsonValue, NonNegativeInt, PositiveInt, PrivateAttr, model_validator

from headrace.errors import HeadraceError
from headrace.formats import json_schema, protobuf_schema
from headrace.formats.avro_references import joined
from headrace.formats.avro_schema import AvroKind, Decimals, read_schema
from headrace.formats.json_schema import DateTimes, JsonType
from headrace.formats.protobuf_schema import Enums, Nanoseconds, ProtobufSchemaError, ProtoKind, ProtoType, Unset
from headrace.formats.schema_text import SchemaText
from headrace.stream.ddl import parse_columns
from headrace.stream.decoder import KEPT_FOLDER, DecoderDefinition, SchemaQuestion, ambiguous_names

if TYPE_CHECKING:
    from headrace.stream.fields import StreamFields


# In the form that an error names, as the frame of a record has its bytes only.
_Guid = Annotated[str, AfterValidator(lambda given: str(uuid.UUID(given)))]


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

    def kept_url(self, folder_url: str) -> str:
        # One folder for all formats: a decoder of another one finds what a batch was read by.
        return f"{folder_url}/{KEPT_FOLDER}/registry"

    def with_registry(self, connection_id: str) -> Self:
        return self.model_copy(update={"registry": connection_id}) if self.is_framed else self

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
                yield from ambiguous_names(stream, "schema_text", column)


class AvroDecoder(SchemaDecoder):
    """Decode Avro. Values that do not fit their schema, or that the columns' schema cannot read, are dead-lettered.

    A value is the bytes of one Avro value, in the frame of a registry if there is one. ``schema_text`` is the schema in
    Avro's JSON. docs/types.md says what each of Avro's types becomes. Hosts of Spark need the extra ``registry``.
    """

    of: ClassVar[str] = "headrace.spark.records.avro.values:AvroValues"
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

    of: ClassVar[str] = "headrace.spark.records.protobuf.values:values_of"
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
