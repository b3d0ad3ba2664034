"""Whether the values of a writer's schema become columns of a reader's by the names of fields alone.

These are the common changes: fields that were added with a default, removed, or put in another order, a type that may
be null now, a wider number. By Avro 1.12's specification, "Schema Resolution". Other pairs of schemas are not refused
here: another reader resolves them.
"""

from __future__ import annotations

from typing import Any

from headrace.formats.avro_schema import AvroKind, AvroType
from headrace.spark.records.avro.scan import NotScannedError

_EXACTLY_WIDER = {
    ("int", AvroKind.LONG),
    ("int", AvroKind.DOUBLE),
    ("float", AvroKind.DOUBLE),
}
"""What a number is, and what it may become without a change of its value."""
_DEFAULTS: dict[AvroKind, type | tuple[type, ...]] = {
    AvroKind.BOOLEAN: bool,
    AvroKind.INT: int,
    AvroKind.LONG: int,
    AvroKind.DOUBLE: (int, float),
    AvroKind.STRING: str,
    AvroKind.ENUM: str,
}
"""The kinds whose defaults in JSON are their values."""


def check_resolves(writer: AvroType, reader: AvroType) -> None:
    """Raise NotScannedError unless values of the writer's type are columns of the reader's."""
    if isinstance(reader.plain, list) and reader.kind is AvroKind.UNION:
        # Members are told apart by their numbers. What a name stands for may differ.
        _check(writer.plain == reader.plain, "different unions")
        for (_, written), (_, part) in zip(writer.parts, reader.parts, strict=True):
            check_resolves(written, part)
        return
    _check(_may_be_null(reader) or not _may_be_null(writer), "a null that the reader does not take")
    _check(not isinstance(writer.plain, list) or writer.kind is not AvroKind.UNION, "fewer members")
    if reader.kind is AvroKind.RECORD and writer.kind is AvroKind.RECORD:
        _check_fields(writer, reader)
    elif reader.kind in (AvroKind.ARRAY, AvroKind.MAP):
        _check(writer.kind is reader.kind, "another type")
        check_resolves(writer.parts[0][1], reader.parts[0][1])
    else:
        below, wanted = (_below(each) for each in (writer, reader))
        _check(below == wanted or (below, reader.kind) in _EXACTLY_WIDER, "another type")
        _check(_details(writer) == _details(reader), "another enum, fixed or decimal")
        logical = [each.kind.value not in (below, wanted) for each in (writer, reader)]
        _check(writer.kind is reader.kind or not all(logical), "times of another unit")


def _details(made: AvroType) -> tuple[object, ...]:
    return made.name, made.size, made.symbols, made.precision, made.scale


def default_of(reader: AvroType, name: str) -> Any:
    """The default of a record's field; None if it is null. Raises NotScannedError if there is none, or it is none of
    JSON."""
    plain = reader.plain if isinstance(reader.plain, list) else [reader.plain]
    fields = [
        field for each in plain if isinstance(each, dict) for field in each.get("fields", ()) if field["name"] == name
    ]
    _check(len(fields) == 1 and "default" in fields[0], f"no default of {name}")
    default, part = fields[0]["default"], dict(reader.parts)[name]
    if default is None:
        _check(_may_be_null(part), "a default of another type")
        return None
    is_bool = isinstance(default, bool) and part.kind is not AvroKind.BOOLEAN
    _check(isinstance(default, _DEFAULTS.get(part.kind, ())) and not is_bool, "a default of another type")
    _check(not isinstance(part.plain, list), "a default of a union")
    return default


def _check_fields(writer: AvroType, reader: AvroType) -> None:
    _check(writer.name == reader.name, "another name")
    _check("aliases" not in str(reader.plain), "aliases")
    written, all_written = dict(writer.parts), _names(writer)
    for name, part in reader.parts:
        if name in written:
            check_resolves(written[name], part)
        else:
            _check(all_written is not None and name not in all_written, "a field that was only null")
            default_of(reader, name)


def _names(record: AvroType) -> set[str] | None:
    """The names of all fields; None if the record is defined elsewhere in its schema."""
    plain = record.plain if isinstance(record.plain, list) else [record.plain]
    found = [each for each in plain if isinstance(each, dict) and each.get("name") == record.name]
    return {field["name"] for field in found[0]["fields"]} if found else None


def _may_be_null(made: AvroType) -> bool:
    return isinstance(made.plain, list) and "null" in made.plain


def _below(made: AvroType) -> str:
    """The type without a logical one; that of the only member which is not null."""
    plain = [each for each in (made.plain if isinstance(made.plain, list) else [made.plain]) if each != "null"]
    _check(len(plain) == 1, "several numbers in one column")
    if isinstance(plain[0], dict):
        return str(plain[0]["type"])
    return "named" if made.name else str(plain[0])


def _check(fits: bool, why: str) -> None:
    if not fits:
        raise NotScannedError(why)
