"""Says where a writer's Protobuf messages have no value for a reader's type.

Fields belong together by their numbers. A writer's values are read by the writer's schema, so that each has what it
meant, and then become the reader's types; whether a number fits is decided for each value. So more can be read than
Protobuf promises for the bytes: an int32 that became a sint64 too.
"""

from __future__ import annotations

from collections.abc import Iterator

from headrace.formats.protobuf_schema import ProtoField, ProtoKind, ProtoType

_NUMBERS = frozenset({ProtoKind.INT32, ProtoKind.INT64, ProtoKind.UINT32, ProtoKind.UINT64, ProtoKind.ENUM})
_FLOATS = frozenset({ProtoKind.FLOAT, ProtoKind.DOUBLE})
_BYTES = frozenset({ProtoKind.STRING, ProtoKind.BYTES})
_PLAIN = _NUMBERS | _FLOATS | _BYTES | {ProtoKind.BOOL, ProtoKind.LIST, ProtoKind.MAP, ProtoKind.JSON}


def differences(reader: ProtoType, writer: ProtoType, place: str = "$") -> Iterator[str]:
    """Yield where the writer's type has no value for the reader's, such as "`$.id` was string, and is read as int32".

    A field that the writer does not have is unset, and one that only the writer has is left out.
    """
    if reader.kind is ProtoKind.LIST and writer.kind not in (ProtoKind.LIST, ProtoKind.MAP):
        # Of one element: an unset field is an empty list.
        writer = ProtoType(ProtoKind.LIST, parts=(writer,))
    if not _is_read(reader, writer):
        yield f"`{place}` was {_shown(writer)}, and is read as {_shown(reader)}"
    elif reader.kind is ProtoKind.MAP:
        yield from differences(reader.key, writer.key, f"{place}[].key")
        yield from differences(reader.element, writer.element, f"{place}[]")
    elif reader.kind is ProtoKind.LIST:
        yield from differences(reader.element, writer.element, f"{place}[]")
    elif reader.kind not in _PLAIN:
        theirs = {field.number: field for field in writer.fields}
        for field in reader.fields:
            yield from _of_field(field, theirs.get(field.number), f"{place}.{field.name}")


def _of_field(reader: ProtoField, writer: ProtoField | None, place: str) -> Iterator[str]:
    if writer is not None:
        yield from differences(reader.type, writer.type, place)
    elif reader.is_required:
        yield f"`{place}` was not there, and is required"


def _is_read(reader: ProtoType, writer: ProtoType) -> bool:
    if reader.kind in _NUMBERS:
        return writer.kind in _NUMBERS or writer.kind is ProtoKind.BOOL
    for kinds in (_FLOATS, _BYTES):
        if reader.kind in kinds:
            return writer.kind in kinds
    if reader.kind in _PLAIN:
        return writer.kind is reader.kind
    return writer.kind not in _PLAIN


def _shown(made: ProtoType) -> str:
    if made.kind is ProtoKind.LIST:
        return f"repeated {_shown(made.element)}"
    if made.kind is ProtoKind.MAP:
        return f"map<{_shown(made.key)}, {_shown(made.element)}>"
    return made.name or made.kind.value
