"""Parses Protobuf messages, and takes their fields into Arrow as they are: a message is a struct of all its fields, an
enum its number, a map has its entries in the order of their keys.

protobuf (upb) decides what is a message. Taking fields from its objects costs more than parsing JSON does, so ptars,
which makes arrays of bytes, takes the fields that it takes exactly: `ArrowReader` says which.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from operator import attrgetter, methodcaller
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.formats.protobuf_schema import (
    ProtoField,
    ProtoKind,
    ProtoType,
    descriptor_pool,
    descriptor_set,
    is_repeated,
    is_required,
)
from headrace.spark.records.exact_columns import MOST_CELLS, check_cells, element_offsets, must_count, widest_element

_INT32, _GROUP, _MESSAGE, _ENUM = 5, 10, 11, 14
_OPTIONAL, _REPEATED = 1, 3
_WIRE_TYPES = ("a varint", "8 bytes", "bytes with a length", "a group", "the end of a group", "4 bytes")

_SCALARS = {
    ProtoKind.DOUBLE: pa.float64(),
    ProtoKind.FLOAT: pa.float32(),
    ProtoKind.INT32: pa.int32(),
    ProtoKind.INT64: pa.int64(),
    ProtoKind.UINT32: pa.uint32(),
    ProtoKind.UINT64: pa.uint64(),
    ProtoKind.BOOL: pa.bool_(),
    ProtoKind.STRING: pa.string(),
    ProtoKind.BYTES: pa.binary(),
    ProtoKind.ENUM: pa.int32(),
    ProtoKind.JSON: pa.string(),
}


def raw_type(made: ProtoType) -> pa.DataType:
    """The Arrow type of values as they are."""
    if made.kind is ProtoKind.LIST:
        return pa.list_(raw_type(made.element))
    if made.kind is ProtoKind.MAP:
        return pa.map_(raw_type(made.key), raw_type(made.element))
    if made.kind in _SCALARS:
        return _SCALARS[made.kind]
    return pa.struct([(field.name, raw_type(field.type)) for field in made.fields])


class MessageParser:
    """Parses messages of one type."""

    def __init__(self, schema: str, message: str) -> None:
        """``schema``: a FileDescriptorSet in base64."""
        from google.protobuf import message_factory

        files = descriptor_set(schema)
        for file in files.file:
            for each in file.message_type:
                _prepare(each)
            for extension in file.extension:
                _as_number(extension)
        made = message_factory.GetMessageClass(descriptor_pool(files).FindMessageTypeByName(message))
        self._parse: Callable[[bytes], Any] = made.FromString
        self._empty = made()
        self._has_messages, self._has_required = _shape(made.DESCRIPTOR)
        self._known = _Known(made.DESCRIPTOR, {})

    def check(self, values: Sequence[bytes | None], refused: dict[int, str]) -> None:
        """Put the rows of the values that are no message into ``refused``, with the reasons."""
        for row in self._doubtful(values):
            if reason := self._reason(values[row]):
                refused[row] = reason

    def messages(self, values: Sequence[bytes | None], refused: Mapping[int, str]) -> list[Any]:
        """The messages of values that were checked; one without a field for none, and for those that are refused."""
        parse, empty = self._parse, self._empty
        return [empty if value is None or row in refused else parse(value) for row, value in enumerate(values)]

    def _doubtful(self, values: Sequence[bytes | None]) -> Iterator[int]:
        """Yield the rows whose values may be no message. Each message is dropped at once: the next one has its memory,
        which makes this twice as fast."""
        from google.protobuf.unknown_fields import UnknownFieldSet

        parse, has_messages, has_required = self._parse, self._has_messages, self._has_required
        for row, value in enumerate(values):
            if value is None:
                continue
            try:
                message = parse(value)
                if has_messages:
                    # A message with no unknown field, in any depth, has the size of its bytes without them too. Other
                    # writers than protobuf's may write it in another size, and are looked at.
                    message.DiscardUnknownFields()
                    doubtful = message.ByteSize() != len(value)
                else:
                    doubtful = len(UnknownFieldSet(message)) > 0
            except Exception:
                doubtful = True
            if doubtful or (has_required and not message.IsInitialized()):
                yield row

    def _reason(self, value: bytes | None) -> str:
        """Why it is no message, or ""."""
        try:
            message = self._parse(value or b"")
        except Exception as error:
            # Whatever the bytes are, they are one record's.
            return next((reason for said, reason in _REASONS.items() if said in str(error)), _UNSAID)
        if self._has_required and not message.IsInitialized():
            return f"it has no `{'`, no `'.join(message.FindInitializationErrors())}`, which is required"
        from google.protobuf.unknown_fields import UnknownFieldSet

        return self._known.foreign(message, UnknownFieldSet)


_REASONS = {
    "Wire format was corrupt": "its bytes are damaged, or end too early",
    "String field had bad UTF-8": "a text is not UTF-8",
    "Exceeded maximum recursion depth": "it is nested too deep",
}
# Before protobuf 6 it does not say which.
_UNSAID = "its bytes are damaged, or end too early, or a text is not UTF-8"


def _prepare(message: Any) -> None:
    """Make enums numbers, since protobuf drops a number that a closed enum does not have, and give other names to
    fields that are named as what protobuf's objects have."""
    for field in (*message.field, *message.extension):
        _as_number(field)
    for field in message.field:
        field.name = _attribute(field.name)
    for nested in message.nested_type:
        _prepare(nested)


def _attribute(name: str) -> str:
    """The name of a field's attribute."""
    return f"{name}_of_message" if name in _names_of_objects() else name


@lru_cache(maxsize=1)
def _names_of_objects() -> frozenset[str]:
    from google.protobuf import empty_pb2

    return frozenset(dir(empty_pb2.Empty()))


def _as_number(field: Any) -> None:
    if field.type == _ENUM:
        field.type = _INT32
        field.ClearField("type_name")
        field.ClearField("default_value")


def _shape(descriptor: Any) -> tuple[bool, bool]:
    """Whether the message has fields of messages, and whether a field of any depth is required."""
    met, left = {descriptor.full_name}, [descriptor]
    has_required = False
    while left:
        for field in left.pop().fields:
            has_required |= is_required(field)
            if field.message_type is not None and field.message_type.full_name not in met:
                met.add(field.message_type.full_name)
                left.append(field.message_type)
    return any(field.message_type is not None for field in descriptor.fields), has_required


class _Known:
    """The fields of a message type, by which fields of another kind are found: protobuf keeps them among the unknown
    ones. The message was then written by another schema."""

    def __init__(self, descriptor: Any, met: dict[str, _Known]) -> None:
        """``met``: the types that were met before, by their names, and then this one too."""
        met[descriptor.full_name] = self
        self._names = {field.number: field.name for field in descriptor.fields}
        self._messages: list[tuple[str, Callable[[Any], Any] | None, _Known]] = []
        for field in descriptor.fields:
            held = field.message_type
            each: Callable[[Any], Any] | None = iter if is_repeated(field) else None
            if held is not None and held.GetOptions().map_entry:
                held, each = held.fields_by_name["value"].message_type, methodcaller("values")
            if held is not None:
                known = met.get(held.full_name) or _Known(held, met)
                self._messages.append((field.name, each, known))

    def foreign(self, message: Any, unknown_of: Callable[[Any], Any], place: str = "$") -> str:
        """Where the first field of another kind is, and what it has; "" if there is none. ``unknown_of``: protobuf's
        UnknownFieldSet."""
        for unknown in unknown_of(message):
            if (name := self._names.get(unknown.field_number)) is not None:
                return f"it has {_WIRE_TYPES[unknown.wire_type]} at `{place}.{name}`, by another schema"
        for name, each, known in self._messages:
            if each is None:
                held = (getattr(message, name),) if message.HasField(name) else ()
            else:
                held = each(getattr(message, name))
            for below in held:
                if found := known.foreign(
                    below, unknown_of, f"{place}.{name}" if each is None else f"{place}.{name}[]"
                ):
                    return found
        return ""


_SHORTEST_ELEMENT = 2
"""Bytes of an empty message: its field's number, and its length."""


class Elements:
    """Counts the elements of lists in values that are not parsed: an empty message has two bytes, and a place for each
    of its fields when it is parsed."""

    def __init__(self, made: ProtoType) -> None:
        self._made, self._widest = made, widest_element(raw_type(made))
        self._parts: dict[int, Mapping[int, ProtoType]] = {}
        self._tags = frozenset(_tags(made)) if self._widest else frozenset()

    def check(self, values: pa.Array) -> None:
        """Raise TooManyCellsError if one of binary ``values`` has too many, or several may have."""
        if not must_count(values, self._widest, _SHORTEST_ELEMENT) or not values[0].is_valid:
            return
        data = values[0].as_py()
        # Each element begins with its tag, and few other bytes are equal to it.
        elements = sum(map(data.count, self._tags))
        if elements * self._widest > MOST_CELLS:
            elements = self._of_message(memoryview(data), self._made)
        check_cells(elements, self._widest)

    def _of_message(self, data: memoryview, made: ProtoType | None) -> int:
        """Those of a message that are messages; of one that is damaged, those before the damage."""
        found, at, end = 0, 0, len(data)
        parts, outside = self._parts_of(made), []
        while at < end:
            tag, at = _varint(data, at)
            wire, held = tag & 7, parts.get(tag >> 3)
            inner = held.element if held is not None and held.kind is ProtoKind.LIST else held
            is_nested = inner is not None and inner.kind in (ProtoKind.MESSAGE, ProtoKind.MAP)
            found += is_nested and held is not None and held.kind is not ProtoKind.MESSAGE
            if wire == _VARINT:
                _, at = _varint(data, at)
            elif wire == _LENGTH:
                length, at = _varint(data, at)
                found += self._of_message(data[at : at + length], inner) if is_nested else 0
                at += length
            elif wire in _SIZES:
                at += _SIZES[wire]
            elif wire == _GROUP_BEGINS:
                outside.append(parts)
                parts = self._parts_of(inner)
            elif wire == _GROUP_ENDS and outside:
                parts = outside.pop()
            else:
                return found
        return found

    def _parts_of(self, made: ProtoType | None) -> Mapping[int, ProtoType]:
        """The types of a message's fields, by their numbers; a map's entry is a message too."""
        if made is None:
            return {}
        if id(made) not in self._parts:
            fields = {field.number: field.type for field in made.fields}
            self._parts[id(made)] = {2: made.element} if made.kind is ProtoKind.MAP else fields
        return self._parts[id(made)]


def _tags(made: ProtoType) -> Iterator[bytes]:
    """The first bytes of all elements, of any depth, that are messages."""
    for field in made.fields:
        held = field.type.element if field.type.kind is ProtoKind.LIST else field.type
        if held.kind in (ProtoKind.MESSAGE, ProtoKind.MAP):
            if held is not field.type or held.kind is ProtoKind.MAP:
                wire = _GROUP_BEGINS if field.wire == _GROUP else _LENGTH
                yield _varint_of(field.number << 3 | wire)
            yield from _tags(held.element if held.kind is ProtoKind.MAP else held)


def _varint_of(number: int) -> bytes:
    made = bytearray()
    while number > 0x7F:
        made.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*made, number])


_VARINT, _LENGTH, _GROUP_BEGINS, _GROUP_ENDS = 0, 2, 3, 4
_SIZES = {1: 8, 5: 4}
_MOST_OF_A_VARINT = 10


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """A number, and the place behind it; beyond the end if it is damaged."""
    number = 0
    for place, byte in enumerate(data[at : at + _MOST_OF_A_VARINT]):
        number |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return number, at + place + 1
    return 0, len(data)


def raw_field(field: ProtoField, messages: Sequence[Any]) -> pa.Array:
    """The values of a field of messages, null where a field with presence is unset.

    Raises UnicodeDecodeError if a text of proto2 is not UTF-8, and ValueError if a JSON has no text.
    """
    name, made = _attribute(field.name), field.type
    get = attrgetter(name)
    if made.kind is ProtoKind.LIST:
        lists = list(map(get, messages))
        flat = list(chain.from_iterable(lists))
        check_cells(len(flat), widest_element(raw_type(made)))
        return pa.ListArray.from_arrays(element_offsets(lists), raw_values(made.element, flat), type=raw_type(made))
    if made.kind is ProtoKind.MAP:
        maps = list(map(get, messages))
        # protobuf gives them in another order in each process.
        check_cells(sum(map(len, maps)), widest_element(raw_type(made)))
        keys = [sorted(each) for each in maps]
        items = [each[key] for each, sorted_keys in zip(maps, keys, strict=True) for key in sorted_keys]
        flat_keys = raw_values(made.key, list(chain.from_iterable(keys)))
        offsets = element_offsets(keys)
        return pa.MapArray.from_arrays(offsets, flat_keys, raw_values(made.element, items), raw_type(made))
    if not field.has_presence:
        return raw_values(made, list(map(get, messages)))
    is_set = [message.HasField(name) for message in messages]
    values = raw_values(made, [get(message) for message, there in zip(messages, is_set, strict=True) if there])
    if len(values) == len(messages):
        return values
    mask = np.fromiter(is_set, bool, len(is_set))
    return values.take(pa.array(np.cumsum(mask) - 1, pa.int64(), mask=~mask))


def raw_values(made: ProtoType, values: Sequence[Any]) -> pa.Array:
    """The values of a type that is no list and no map, as they are."""
    if made.kind is ProtoKind.JSON:
        return pa.array([_json_text(value) for value in values], pa.string())
    if made.kind in _SCALARS:
        return pa.array(values, _SCALARS[made.kind])
    if not made.fields:
        return pa.array([{}] * len(values), pa.struct([]))
    kind = raw_type(made)
    return pa.StructArray.from_arrays([raw_field(field, values) for field in made.fields], fields=list(kind))


def _json_text(value: Any) -> str:
    return json.dumps(_json(value), ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":"))


def _json(value: Any) -> Any:
    """A google.protobuf.Struct, ListValue or Value as Python's. It was parsed, so its depth has a bound."""
    name = value.DESCRIPTOR.name
    if name == "Struct":
        return {key: _json(item) for key, item in value.fields.items()}
    if name == "ListValue":
        return [_json(each) for each in value.values]
    kind = value.WhichOneof("kind")
    if kind is None or kind == "null_value":
        return None
    held = getattr(value, kind)
    if kind == "number_value":
        if not math.isfinite(held):
            raise ValueError(f"{held} is no number of JSON")
        return int(held) if held.is_integer() and abs(held) < 2**53 else held
    return _json(held) if kind in ("struct_value", "list_value") else held


class ArrowReader:
    """Makes Arrow's arrays of messages' bytes, by ptars, of those fields that it takes exactly: all but maps, groups,
    JSON, and messages without a field. It is given bytes that are messages.

    It does not heed that of a oneof's members only the last counts: `raw` then has none of the fields.
    """

    def __init__(self, made: ProtoType) -> None:
        """Raises ImportError."""
        from google.protobuf import descriptor_pb2, message_factory
        from ptars import HandlerPool

        self.fields = tuple(field for field in made.fields if _is_taken(field.type, field.wire))
        file = descriptor_pb2.FileDescriptorProto(name="headrace/row.proto", package="headrace", syntax="proto3")
        _add_message(file, self.fields, "Row")
        pool = descriptor_pool(descriptor_pb2.FileDescriptorSet(file=[file]))
        self._descriptor = message_factory.GetMessageClass(pool.FindMessageTypeByName("headrace.Row")).DESCRIPTOR
        self._handler: Any = HandlerPool([self._descriptor.file]).get_for_message(self._descriptor)

    def raw(self, values: pa.Array) -> dict[int, pa.Array] | None:
        """The arrays of the fields, by their numbers; None if they would not be exact."""
        try:
            arrays = self._handler.array_to_record_batch(values).columns
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:
            # A panic of Rust is no Exception. protobuf judges the values.
            return None
        if not _is_one_of_each(self.fields, arrays):
            return None
        return {field.number: array for field, array in zip(self.fields, arrays, strict=True)}


def _is_taken(made: ProtoType, wire: int) -> bool:
    if made.kind is ProtoKind.LIST:
        return _is_taken(made.element, wire)
    if made.kind in _SCALARS:
        return made.kind is not ProtoKind.JSON
    if made.kind is ProtoKind.MAP or wire == _GROUP or not made.fields:
        return False
    return all(_is_taken(field.type, field.wire) for field in made.fields)


def _add_message(file: Any, fields: Sequence[ProtoField], name: str) -> None:
    """Add a message with the fields to the file. Its names are its own: ptars makes something else of those that it
    knows, such as google.protobuf.Timestamp."""
    message = file.message_type.add(name=name)
    for at, field in enumerate(fields):
        is_list = field.type.kind is ProtoKind.LIST
        held = field.type.element if is_list else field.type
        added = message.field.add(name=f"f{at}", number=field.number, label=_REPEATED if is_list else _OPTIONAL)
        added.type = _INT32 if held.kind is ProtoKind.ENUM else field.wire
        if held.kind not in _SCALARS:
            below = f"M{len(file.message_type)}"
            added.type, added.type_name = _MESSAGE, f".headrace.{below}"
            _add_message(file, held.fields, below)
        elif field.has_presence:
            added.proto3_optional = True
            added.oneof_index = len(message.oneof_decl)
            message.oneof_decl.add(name=f"_f{at}")


def _is_one_of_each(fields: Sequence[ProtoField], arrays: Sequence[pa.Array]) -> bool:
    """Whether no message has two members of a oneof."""
    members: dict[str, pa.Array] = {}
    for field, array in zip(fields, arrays, strict=True):
        if field.oneof:
            is_set = array.is_valid()
            if field.oneof in members and pc.any(pc.and_(members[field.oneof], is_set)).as_py():
                return False
            members[field.oneof] = pc.or_(members[field.oneof], is_set) if field.oneof in members else is_set
        held = field.type.element if field.type.kind is ProtoKind.LIST else field.type
        if held.kind not in _SCALARS:
            below = array.values if field.type.kind is ProtoKind.LIST else array
            if not _is_one_of_each(held.fields, [below.field(at) for at in range(len(held.fields))]):
                return False
    return True
