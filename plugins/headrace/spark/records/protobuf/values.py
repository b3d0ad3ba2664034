"""Decodes Protobuf into Arrow columns, with the reason of each value that is refused.

It imports no Spark. Each value is parsed by protobuf, which decides whether it is a message. Then the fields of all
become columns at once, by `ArrowReader` where it can, else from protobuf's messages; both give equal columns. Only a
batch with a value that does not fit is divided until these are found.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.formats.missing_library import LibraryMissingError
from headrace.formats.protobuf_compiler import compile_schema
from headrace.formats.protobuf_evolution import differences
from headrace.formats.protobuf_schema import ProtobufSchemaError, ProtoKind, message_at, read_like, read_schema
from headrace.formats.schema_text import SchemaText, UnreadableSchemaError
from headrace.spark.records.exact_columns import UnfitError, unfit
from headrace.spark.records.protobuf.columns import Convert, FieldColumn, Settings, conversion
from headrace.spark.records.protobuf.messages import ArrowReader, Elements, MessageParser, raw_field, raw_values

if TYPE_CHECKING:
    from headrace.formats.protobuf_schema import Enums, Nanoseconds, ProtoType, Unset

_COMPARED = 50
"""Of the first values: both ways must give the same of them, or the faster one is not taken."""
_LONGEST_COMPARED = 10_000
_SHOWN_DIFFERENCES = 3


def values_of(
    column: pa.DataType, *, writer: str | None = None, message_path: Sequence[int] = (), **keywords: Any
) -> ProtobufValues:
    """The decoder of values that were written by a registry's schema: ``writer`` is the JSON of a `SchemaText`, and
    ``message_path`` the path of the message in it. Without a writer, it is the reader's schema.

    Raises UnreadableSchemaError if no value can be read, and LibraryMissingError.
    """
    if writer is None:
        return ProtobufValues(column, **keywords)
    try:
        compiled = compile_schema(SchemaText.from_json(writer))
        message = message_at(compiled, message_path or (0,))
        if message != keywords["message"]:
            raise UnreadableSchemaError(f"its message is {message}, and that of the columns is {keywords['message']}")
        return ProtobufValues(column, writer=compiled, writer_message=message, **keywords)
    except ProtobufSchemaError as error:
        raise UnreadableSchemaError(f"it {error}") from None


class ProtobufValues:
    """Decodes messages of one type, without a frame around them. ``column`` is the Arrow type of `ProtoType.ddl`."""

    def __init__(
        self,
        column: pa.DataType,
        *,
        time_zone: str = "UTC",  # noqa: ARG002 - of the contract
        schema: str,
        message: str,
        writer: str | None = None,
        writer_message: str | None = None,
        unset: Unset = "default",
        enums: Enums = "name",
        nanoseconds: Nanoseconds = "refuse",
    ) -> None:
        """``schema``: a FileDescriptorSet in base64, and ``writer`` that by which the values were written, with the
        full name of its message; by default both are the reader's. If the two do not go together, each value is
        refused. The time zone makes no difference: Protobuf's times are in UTC.

        Raises LibraryMissingError and ProtobufSchemaError.
        """
        try:
            import google.protobuf  # noqa: F401
        except ImportError as error:
            raise LibraryMissingError.of("decode Protobuf", error) from error
        want = read_schema(schema, message)
        written_by, written_as = writer or schema, writer_message or message
        have = want if (written_by, written_as) == (schema, message) else read_like(written_by, written_as, want)
        self._kind = column
        self._wanted = f"no Protobuf message {message}"
        self._differences = [] if have is want else list(differences(want, have))
        if self._differences:
            return
        self._parser = MessageParser(written_by, written_as)
        self._elements = Elements(have)
        settings = Settings(unset, enums, nanoseconds)
        self._columns: list[_FieldColumn | _MessageColumn]
        if want.kind is ProtoKind.MESSAGE:
            theirs = {field.number: field for field in have.fields}
            self._columns = [
                _FieldColumn(FieldColumn.of(field, theirs.get(field.number), kind.type, f"$.{field.name}", settings))
                for field, kind in zip(want.fields, column, strict=True)
            ]
            self._is_struct = True
        else:
            turn = conversion(want, have, column, "$", settings)
            self._columns = [_MessageColumn(turn, have)]
            self._is_struct = False
        self._reader = _arrow_reader(have) if self._is_struct else None
        self._is_compared = False

    def decode(self, values: pa.Array) -> tuple[pa.Array, dict[int, str]]:
        """The values of binary ``values``, and the reasons by row of those that are refused, which are null.

        Raises TooManyCellsError.
        """
        if self._differences:
            shown = "; ".join(self._differences[:_SHOWN_DIFFERENCES])
            reason = f"{self._wanted}: it was written by another schema: {shown}"
            rows = pc.indices_nonzero(values.is_valid()).to_pylist()
            return pa.nulls(len(values), self._kind), dict.fromkeys(rows, reason)
        self._elements.check(values)
        given = values.to_pylist()
        refused: dict[int, str] = {}
        self._parser.check(given, refused)
        try:
            arrays = [column.array(held) for column, held in self._sources(values, given, refused)]
        except UnfitError:
            for column, held in self._sources(values, given, refused):
                for row, error in unfit(column, held):
                    refused.setdefault(row, str(error))
            arrays = [column.array(held) for column, held in self._sources(values, given, refused)]
        return self._made(arrays, values, refused), {
            row: f"{self._wanted}: {reason}" for row, reason in refused.items()
        }

    def _sources(
        self, values: pa.Array, given: Sequence[bytes | None], refused: dict[int, str]
    ) -> list[tuple[_FieldColumn | _MessageColumn, Any]]:
        """The columns, each with what it is made of: an array of `ArrowReader`, or the messages."""
        raw: dict[int, Any] = self._raw(values, refused)
        if any(column.number not in raw for column in self._columns):
            messages = self._parser.messages(given, refused)
            return [(column, raw.get(column.number, messages)) for column in self._columns]
        return [(column, raw[column.number]) for column in self._columns]

    def _raw(self, values: pa.Array, refused: dict[int, str]) -> dict[int, pa.Array]:
        """The arrays of the fields that `ArrowReader` takes, by their numbers; none if it does not take the values.

        A field that the writer does not have is number 0: only the number of values counts.
        """
        if self._reader is None:
            return {0: values}
        if not self._is_compared:
            self._is_compared = True
            if not self._agrees(self._reader, values[:_COMPARED], refused):
                self._reader = None
                return {0: values}
        return {0: values, **(self._reader.raw(_without(values, refused)) or {})}

    def _agrees(self, reader: ArrowReader, values: pa.Array, refused: dict[int, str]) -> bool:
        """Whether both ways give the same for the first values: a ptars that reads otherwise is not taken."""
        lengths = pc.binary_length(values)
        longest = max(_LONGEST_COMPARED, pc.min(lengths).as_py() or 0)
        values = pc.if_else(pc.less_equal(lengths, longest), values, b"")
        first = {row: reason for row, reason in refused.items() if row < len(values)}
        messages = self._parser.messages(values.to_pylist(), first)
        raw = reader.raw(_without(values, first)) or {}
        return all(_are_equal(column, raw[column.number], messages) for column in self._columns if column.number in raw)

    def _made(self, arrays: list[pa.Array], values: pa.Array, refused: dict[int, str]) -> pa.Array:
        absent = values.is_null().to_numpy(zero_copy_only=False)
        absent[list(refused)] = True
        mask = pa.array(absent)
        if self._is_struct:
            return pa.StructArray.from_arrays(arrays, fields=list(self._kind), mask=mask)
        return arrays[0].take(pa.array(np.arange(len(values)), mask=absent))


class _FieldColumn:
    """A field's column. ``number``: of the field in the writer's message, 0 if it has none."""

    def __init__(self, column: FieldColumn) -> None:
        self._column = column
        self.number = 0 if column.have is None else column.have.number

    def array(self, values: Any) -> pa.Array:
        """The column of messages, or of the field's array. Raises UnfitError."""
        have = self._column.have
        if have is None:
            return self._column.absent(len(values))
        if isinstance(values, pa.Array):
            return self._column.convert(values)
        try:
            raw = raw_field(have, values)
        except ValueError as error:
            raise UnfitError(f"{error} at `$.{self._column.want.name}`") from None
        return self._column.convert(raw)


class _MessageColumn:
    """The only column of messages that become another type, such as google.protobuf.StringValue."""

    number = -1

    def __init__(self, convert: Convert, have: ProtoType) -> None:
        self._convert, self._have = convert, have

    def array(self, values: Any) -> pa.Array:
        try:
            return self._convert(raw_values(self._have, values))
        except ValueError as error:
            raise UnfitError(f"{error} at `$`") from None


def _are_equal(column: _FieldColumn | _MessageColumn, raw: Any, messages: Any) -> bool:
    made, wanted = _array_or_error(column, raw), _array_or_error(column, messages)
    if isinstance(made, pa.Array) and isinstance(wanted, pa.Array):
        # In Arrow a NaN is not equal to itself.
        return bool(made.equals(wanted)) or repr(made.to_pylist()) == repr(wanted.to_pylist())
    return made == wanted


def _array_or_error(column: _FieldColumn | _MessageColumn, values: Any) -> pa.Array | str:
    try:
        return column.array(values)
    except UnfitError as error:
        return str(error)


def _arrow_reader(have: ProtoType) -> ArrowReader | None:
    """None if it takes no field, or a host does not have its library."""
    try:
        made = ArrowReader(have)
    except ImportError:
        return None
    return made if made.fields else None


def _without(values: pa.Array, refused: dict[int, str]) -> pa.Array:
    """The values, with no bytes in place of those that are refused."""
    if not refused:
        return values
    mask = np.zeros(len(values), bool)
    mask[list(refused)] = True
    return pc.if_else(pa.array(mask), pa.scalar(b"", values.type), values)
