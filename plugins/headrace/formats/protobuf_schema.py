"""Reads a compiled Protobuf schema, and says of which type its messages are in Spark.

A schema is kept as protoc compiles it: a FileDescriptorSet in base64, with all files that it imports. So a batch that
runs again in a year needs no protoc, and no later protoc can say something else. DAG files and pages ask for the
columns of a definition; Spark's tasks turn values by the same tree.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Any, Literal

from headrace.formats.missing_library import LibraryMissingError
from headrace.formats.schema_text import MAX_COLUMNS, MAX_DEPTH, MAX_SCHEMA_BYTES

_MAX_DIGITS = 38
"""The most digits of a decimal in Spark."""
_CONFLUENT_META = 1088

Enums = Literal["name", "number"]
Nanoseconds = Literal["refuse", "cut", "text"]
Unset = Literal["default", "null"]


class ProtobufSchemaError(ValueError):
    """A schema does not compile, does not have the message, or the message has no columns of a fixed depth."""


class ProtoKind(StrEnum):
    """What a value is, with the messages of Google and Confluent that headrace turns."""

    DOUBLE = "double"
    FLOAT = "float"
    INT32 = "int32"
    INT64 = "int64"
    UINT32 = "uint32"
    UINT64 = "uint64"
    BOOL = "bool"
    STRING = "string"
    BYTES = "bytes"
    ENUM = "enum"
    MESSAGE = "message"
    LIST = "list"
    MAP = "map"
    WRAPPER = "wrapper"
    TIMESTAMP = "timestamp"
    DATE = "date"
    TIME_OF_DAY = "time of day"
    DECIMAL = "decimal"
    FIELD_MASK = "field mask"
    JSON = "json"


@dataclass(frozen=True, slots=True)
class ProtoType:
    """The type of a value.

    ``name`` is the full name of a message or enum, else "". ``fields`` are those of a message, also of one that
    becomes something else. ``key`` and ``element`` are those of a list or map. ``symbols`` are an enum's numbers and
    names, the first name of each number. ``precision`` and ``scale`` are those of a decimal, 0 if it declares none.
    """

    kind: ProtoKind
    name: str = ""
    fields: tuple[ProtoField, ...] = ()
    parts: tuple[ProtoType, ...] = ()
    symbols: tuple[tuple[int, str], ...] = ()
    precision: int = 0
    scale: int = 0
    leaves: int = 1
    """The number of columns in it, of all depths."""

    @property
    def key(self) -> ProtoType:
        """The type of a map's keys."""
        return self.parts[0]

    @property
    def element(self) -> ProtoType:
        """The type of a list's elements, or of a map's values."""
        return self.parts[-1]

    def ddl(self, enums: Enums = "name", nanoseconds: Nanoseconds = "refuse") -> str:
        """The type of the value in Spark's DDL. ``enums``: whether they are names or numbers. ``nanoseconds``: whether
        a Timestamp is a text with nine digits."""
        kind = self.kind
        made = _DDL.get(kind, "")
        if kind is ProtoKind.MESSAGE:
            made = f"STRUCT<{self.columns(enums, nanoseconds)}>"
        elif kind is ProtoKind.LIST:
            made = f"ARRAY<{self.element.ddl(enums, nanoseconds)}>"
        elif kind is ProtoKind.MAP:
            made = f"MAP<{self.key.ddl()}, {self.element.ddl(enums, nanoseconds)}>"
        elif kind is ProtoKind.WRAPPER:
            made = self.fields[0].type.ddl()
        elif kind is ProtoKind.ENUM and enums == "number":
            made = "INT"
        elif kind is ProtoKind.TIMESTAMP and nanoseconds == "text":
            made = "STRING"
        elif kind is ProtoKind.DECIMAL and self.precision:
            made = f"DECIMAL({self.precision}, {self.scale})"
        return made

    def columns(self, enums: Enums = "name", nanoseconds: Nanoseconds = "refuse") -> str:
        """The fields of a message in Spark's DDL."""
        return ", ".join(f"`{field.name}` {field.type.ddl(enums, nanoseconds)}" for field in self.fields)


@dataclass(frozen=True, slots=True)
class ProtoField:
    """A field of a message. ``has_presence``: an unset one is told from one with its default. ``wire``: the type of
    one of its values as a number of FieldDescriptorProto. ``oneof``: the name of that which it is a member of."""

    name: str
    number: int
    type: ProtoType
    has_presence: bool = False
    is_required: bool = False
    wire: int = 0
    oneof: str = ""


_DDL = {
    ProtoKind.DOUBLE: "DOUBLE",
    ProtoKind.FLOAT: "FLOAT",
    ProtoKind.INT32: "INT",
    ProtoKind.INT64: "BIGINT",
    ProtoKind.UINT32: "BIGINT",
    ProtoKind.UINT64: "DECIMAL(20, 0)",
    ProtoKind.BOOL: "BOOLEAN",
    ProtoKind.STRING: "STRING",
    ProtoKind.BYTES: "BINARY",
    ProtoKind.ENUM: "STRING",
    ProtoKind.TIMESTAMP: "TIMESTAMP",
    ProtoKind.DATE: "DATE",
    ProtoKind.TIME_OF_DAY: "STRING",
    ProtoKind.DECIMAL: "STRING",
    ProtoKind.FIELD_MASK: "STRING",
    ProtoKind.JSON: "STRING",
}

_ENUM, _GROUP, _MESSAGE = 14, 10, 11
_SCALARS = {
    1: ProtoKind.DOUBLE,
    2: ProtoKind.FLOAT,
    3: ProtoKind.INT64,
    4: ProtoKind.UINT64,
    5: ProtoKind.INT32,
    6: ProtoKind.UINT64,
    7: ProtoKind.UINT32,
    8: ProtoKind.BOOL,
    9: ProtoKind.STRING,
    12: ProtoKind.BYTES,
    13: ProtoKind.UINT32,
    15: ProtoKind.INT32,
    16: ProtoKind.INT64,
    17: ProtoKind.INT32,
    18: ProtoKind.INT64,
}
"""By the type's number of FieldDescriptorProto: 3 is int64, 6 fixed64, 16 sfixed64, 18 sint64, and so on."""

# The messages that become something else, with the fields that they must have: name, number, and kind.
_Shape = tuple[tuple[str, int, ProtoKind], ...]
_VALUE = "value"
_KNOWN: dict[str, tuple[ProtoKind, _Shape]] = {
    "google.protobuf.Timestamp": (
        ProtoKind.TIMESTAMP,
        (("seconds", 1, ProtoKind.INT64), ("nanos", 2, ProtoKind.INT32)),
    ),
    "google.protobuf.FieldMask": (ProtoKind.FIELD_MASK, (("paths", 1, ProtoKind.LIST),)),
    "google.type.Date": (
        ProtoKind.DATE,
        (("year", 1, ProtoKind.INT32), ("month", 2, ProtoKind.INT32), ("day", 3, ProtoKind.INT32)),
    ),
    "google.type.TimeOfDay": (
        ProtoKind.TIME_OF_DAY,
        tuple((name, at, ProtoKind.INT32) for at, name in enumerate(("hours", "minutes", "seconds", "nanos"), 1)),
    ),
    "google.type.Decimal": (ProtoKind.WRAPPER, ((_VALUE, 1, ProtoKind.STRING),)),
    "confluent.type.Decimal": (
        ProtoKind.DECIMAL,
        ((_VALUE, 1, ProtoKind.BYTES), ("precision", 2, ProtoKind.UINT32), ("scale", 3, ProtoKind.INT32)),
    ),
    **{
        f"google.protobuf.{name}Value": (ProtoKind.WRAPPER, ((_VALUE, 1, kind),))
        for name, kind in {
            "Double": ProtoKind.DOUBLE,
            "Float": ProtoKind.FLOAT,
            "Int64": ProtoKind.INT64,
            "UInt64": ProtoKind.UINT64,
            "Int32": ProtoKind.INT32,
            "UInt32": ProtoKind.UINT32,
            "Bool": ProtoKind.BOOL,
            "String": ProtoKind.STRING,
            "Bytes": ProtoKind.BYTES,
        }.items()
    },
}
# Their types contain themselves: they are texts of JSON.
_JSON = frozenset({"google.protobuf.Struct", "google.protobuf.Value", "google.protobuf.ListValue"})


def check_encoded(given: str | bytes) -> str:
    """A FileDescriptorSet, as bytes or in base64, as base64 in its one form.

    Raises ProtobufSchemaError.
    """
    try:
        raw = base64.b64decode("".join(given.split()), validate=True) if isinstance(given, str) else given
    except (binascii.Error, ValueError) as error:
        raise ProtobufSchemaError(f"is no base64: {error}") from None
    if len(raw) > MAX_SCHEMA_BYTES:
        raise ProtobufSchemaError(f"has {len(raw):,} bytes, more than {MAX_SCHEMA_BYTES:,}")
    return base64.b64encode(raw).decode()


def descriptor_set(schema: str) -> Any:
    """The FileDescriptorSet (of google.protobuf) of a schema in base64.

    Raises ProtobufSchemaError and LibraryMissingError.
    """
    try:
        from google.protobuf import descriptor_pb2, message
    except ImportError as error:
        raise LibraryMissingError.of("read a Protobuf schema", error) from error
    try:
        return descriptor_pb2.FileDescriptorSet.FromString(base64.b64decode(schema))
    except (message.DecodeError, UnicodeDecodeError) as error:
        raise ProtobufSchemaError(f"is no FileDescriptorSet: {error}") from None


def file_descriptor(encoded: str, name: str) -> Any:
    """The FileDescriptorProto (of google.protobuf) of base64, under this name.

    Raises ProtobufSchemaError and LibraryMissingError.
    """
    try:
        from google.protobuf import descriptor_pb2, message
    except ImportError as error:
        raise LibraryMissingError.of("read a Protobuf schema", error) from error
    try:
        file = descriptor_pb2.FileDescriptorProto.FromString(base64.b64decode(encoded))
    except (binascii.Error, message.DecodeError, UnicodeDecodeError) as error:
        raise ProtobufSchemaError(f"has the file {name}, which is no FileDescriptorProto in base64: {error}") from None
    file.name = name
    return file


def descriptor_pool(files: Any) -> Any:
    """A DescriptorPool with the files of a FileDescriptorSet.

    Raises ProtobufSchemaError.
    """
    from google.protobuf import descriptor_pool as pools

    pool = pools.DescriptorPool()
    for file in files.file:
        try:
            pool.Add(file) if hasattr(pool, "Add") else pool.AddSerializedFile(file.SerializeToString())
        except (TypeError, ValueError, KeyError) as error:
            raise ProtobufSchemaError(
                f"has the file {file.name}, which does not stand: {error}; compile it with --include_imports"
            ) from None
    return pool


def message_names(schema: str) -> list[str]:
    """The full names of the messages of the schema's own file, which is the last, with those within them."""
    files = descriptor_set(schema).file
    return [name for name, _ in _messages(files[-1].message_type, files[-1].package)] if files else []


def message_at(schema: str, indexes: Sequence[int]) -> str:
    """The full name of the message at ``indexes`` of the schema's own file: of a message, then of one within it, and
    so on, as Confluent's wire format numbers them.

    Raises ProtobufSchemaError.
    """
    files = descriptor_set(schema).file
    name, held = (files[-1].package, files[-1].message_type) if files else ("", ())
    for index in indexes:
        if 0 <= index < len(held) and held[index].options.map_entry:
            # A map is a message within its message, before or after the others: Confluent's serializer in Java, and its
            # registry where it writes a file anew, have it after them. No record is one.
            held = [message for message in held if not message.options.map_entry]
        if not 0 <= index < len(held):
            raise ProtobufSchemaError(f"has no message at {list(indexes)}")
        name, held = f"{name}.{held[index].name}".lstrip("."), held[index].nested_type
    return str(name)


def _messages(held: Any, within: str) -> Iterator[tuple[str, Any]]:
    for message in held:
        name = f"{within}.{message.name}".lstrip(".")
        if not message.options.map_entry:
            yield name, message
        yield from _messages(message.nested_type, name)


@lru_cache(maxsize=64)
def read_schema(schema: str, message: str) -> ProtoType:
    """The type of the values of a message; ``schema`` is a FileDescriptorSet in base64.

    Raises:
        ProtobufSchemaError: there is no such set or message, a message contains itself, or there is no column.
        LibraryMissingError: protobuf is not installed.
    """
    read = _MessageReader(_found(schema, message)).read(None)
    if read.kind is ProtoKind.MESSAGE and not read.fields:
        raise ProtobufSchemaError(f"has the message {message}, which has no field that could be a column")
    return read


@lru_cache(maxsize=64)
def read_like(schema: str, message: str, reader: ProtoType) -> ProtoType:
    """The type of the values of a writer's message, with only those fields that ``reader`` has by their numbers.

    What else the writer's message has is left out, a message that contains itself too.

    Raises ProtobufSchemaError and LibraryMissingError.
    """
    return _MessageReader(_found(schema, message)).read(reader)


def _found(schema: str, message: str) -> Any:
    files = descriptor_set(schema)
    try:
        return descriptor_pool(files).FindMessageTypeByName(message)
    except KeyError:
        names = [name for file in files.file[::-1] for name, _ in _messages(file.message_type, file.package)]
        raise ProtobufSchemaError(
            f"has no message {message!r}; it has {', '.join(names[:10]) or 'none'}{', ...' * (len(names) > 10)}"
        ) from None


class _MessageReader:
    """Reads the type of a message's descriptor, with the messages that are read and those that are open."""

    def __init__(self, descriptor: Any) -> None:
        self._descriptor = descriptor
        self._read: dict[str, ProtoType] = {}
        self._open: list[str] = []

    def read(self, guide: ProtoType | None) -> ProtoType:
        """The type. ``guide``: the type whose fields alone are read."""
        return self._message(self._descriptor, guide, "")

    def _message(self, descriptor: Any, guide: ProtoType | None, place: str) -> ProtoType:
        name = descriptor.full_name
        if name in _JSON:
            return ProtoType(ProtoKind.JSON, name)
        if guide is None and name in self._read:
            return self._read[name]
        if guide is None and name in self._open:
            raise ProtobufSchemaError(
                f"has the message {name}, which contains itself{_at(place)}; columns have a fixed depth: leave the "
                "field out of the schema that the values are read by"
            )
        if place.count(".") > MAX_DEPTH:
            raise ProtobufSchemaError(f"is deeper than {MAX_DEPTH} levels{_at(place)}")
        wanted = None if guide is None else {field.number: field.type for field in guide.fields}
        self._open.append(name)
        fields = tuple(
            self._field(each, None if wanted is None else wanted[each.number], f"{place}.{each.name}".lstrip("."))
            for each in descriptor.fields
            if wanted is None or each.number in wanted
        )
        self._open.pop()
        leaves = sum(field.type.leaves for field in fields)
        if leaves > MAX_COLUMNS:
            raise ProtobufSchemaError(f"has {leaves:,} columns in the message {name}, more than {MAX_COLUMNS:,}")
        kind = _kind_of_known(name, fields, complete=guide is None) or ProtoKind.MESSAGE
        made = ProtoType(kind, name, fields, leaves=max(1, leaves))
        if guide is None:
            self._read[name] = made
        return made

    def _field(self, given: Any, guide: ProtoType | None, place: str) -> ProtoField:
        oneof = given.containing_oneof
        entry = (
            given.message_type if given.message_type is not None and given.message_type.GetOptions().map_entry else None
        )
        if entry is not None:
            guide = guide if guide is not None and guide.kind is ProtoKind.MAP else None
            key = self._value(entry.fields_by_name["key"], None, place)
            item = self._value(entry.fields_by_name["value"], None if guide is None else guide.element, place)
            made = ProtoType(ProtoKind.MAP, entry.full_name, parts=(key, item), leaves=item.leaves + 1)
        elif is_repeated(given):
            inner = guide.element if guide is not None and guide.kind is ProtoKind.LIST else guide
            item = self._value(given, inner, place)
            made = ProtoType(ProtoKind.LIST, parts=(item,), leaves=item.leaves)
        else:
            if guide is not None and guide.kind is ProtoKind.LIST:
                guide = guide.element
            made = self._value(given, guide, place)
        return ProtoField(
            given.name,
            given.number,
            made,
            has_presence=bool(given.has_presence),
            is_required=is_required(given),
            wire=given.type,
            oneof="" if oneof is None or oneof.name == f"_{given.name}" else oneof.name,
        )

    def _value(self, given: Any, guide: ProtoType | None, place: str) -> ProtoType:
        if given.type in (_MESSAGE, _GROUP):
            made = self._message(given.message_type, guide, place)
            return _decimal(made, given) if made.kind is ProtoKind.DECIMAL else made
        if given.type == _ENUM:
            symbols: dict[int, str] = {}
            for value in given.enum_type.values:
                symbols.setdefault(value.number, value.name)
            return ProtoType(ProtoKind.ENUM, given.enum_type.full_name, symbols=tuple(symbols.items()))
        return ProtoType(_SCALARS[given.type])


def is_repeated(given: Any) -> bool:
    """Whether a FieldDescriptor is that of a list or map."""
    # protobuf 7 has no `label`, 5 no `is_repeated`.
    return bool(given.is_repeated) if hasattr(given, "is_repeated") else given.label == given.LABEL_REPEATED


def is_required(given: Any) -> bool:
    """Whether a FieldDescriptor is that of a required field."""
    return bool(given.is_required) if hasattr(given, "is_required") else given.label == given.LABEL_REQUIRED


def _kind_of_known(name: str, fields: tuple[ProtoField, ...], *, complete: bool) -> ProtoKind | None:
    """What the message becomes, if it has the shape of the known one with this name."""
    if name not in _KNOWN:
        return None
    kind, shape = _KNOWN[name]
    found = tuple((field.name, field.number, field.type.kind) for field in fields)
    return kind if found == shape or (not complete and set(found) <= set(shape)) else None


def _decimal(made: ProtoType, given: Any) -> ProtoType:
    """The decimal with the precision and scale that Confluent's option of the field declares."""
    parameters = _field_meta(given.GetOptions().SerializeToString())
    if not {"precision", "scale"} & set(parameters):
        return made
    try:
        precision, scale = int(parameters.get("precision", _MAX_DIGITS)), int(parameters.get("scale", 0))
    except ValueError:
        return made
    fits = 1 <= precision <= _MAX_DIGITS and 0 <= scale <= precision
    return ProtoType(made.kind, made.name, made.fields, precision=precision, scale=scale) if fits else made


def _field_meta(options: bytes) -> dict[str, str]:
    """The parameters in ``confluent.field_meta`` of a field's serialized options."""
    from google.protobuf import message

    try:
        return dict(_options_class().FromString(options).meta.params)
    except (message.DecodeError, UnicodeDecodeError):
        return {}


@lru_cache(maxsize=1)
def _options_class() -> Any:
    """A message with Confluent's option as a field: whether protobuf knows the extension depends on the imports."""
    from google.protobuf import descriptor_pb2, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="headrace/options.proto", package="headrace", syntax="proto3")
    meta = file.message_type.add(name="Meta")
    meta.field.add(name="params", number=2, type=_MESSAGE, label=3, type_name=".headrace.Meta.ParamsEntry")
    entry = meta.nested_type.add(name="ParamsEntry")
    entry.options.map_entry = True
    for number, name in ((1, "key"), (2, "value")):
        entry.field.add(name=name, number=number, type=9, label=1)
    options = file.message_type.add(name="Options")
    options.field.add(name="meta", number=_CONFLUENT_META, type=_MESSAGE, label=1, type_name=".headrace.Meta")
    files = descriptor_pb2.FileDescriptorSet(file=[file])
    return message_factory.GetMessageClass(descriptor_pool(files).FindMessageTypeByName("headrace.Options"))


def _at(place: str) -> str:
    return f" at {place}" if place else ""
