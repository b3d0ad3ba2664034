"""The frame that serializers with a schema registry put around a value, read for a whole column at a time.

Confluent's wire format: a byte 0 and the schema's id in four bytes, or a byte 1 and its GUID in sixteen, then the
value. Newer serializers may put these bytes into a header of the record instead. Of Protobuf, the path to the message
within its file follows: the number of indexes and the indexes, as zigzag varints; a single 0 stands for the first
message.

https://docs.confluent.io/platform/current/schema-registry/fundamentals/serdes-develop/index.html#wire-format
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

HEADERS = {"key": "__key_schema_id", "value": "__value_schema_id"}

_ID_BYTES = 5
_GUID_BYTES = 17
_MAX_INDEXES = 100
_FEW = 16
# Of the first byte of an id: Confluent's are Java's ints.
_ID_TOP = 0x80
_MAX_BYTES = 2**31 - 1

SchemaId = int | str
"""A number, or a GUID."""


@dataclass(frozen=True)
class Frames:
    """The frames of a column. ``ids`` has the rows by schema id and message path, in order; ``payloads`` are the values
    without their frames (binary), null where there is none; ``refused`` has the reasons of rows without a frame."""

    payloads: pa.Array
    ids: Mapping[tuple[SchemaId, tuple[int, ...]], Sequence[int] | None] = field(default_factory=dict)
    """None in place of the rows: all of them."""
    refused: dict[int, str] = field(default_factory=dict)

    def groups(self) -> Iterator[tuple[SchemaId, tuple[int, ...], Sequence[int] | None, pa.Array]]:
        """Yield each schema id and message path with its rows (None: all) and their values."""
        for (id_, path), rows in self.ids.items():
            values = self.payloads if rows is None else self.payloads.take(pa.array(rows, pa.int64()))
            yield id_, path, rows, values


def read_frames(values: pa.Array, headers: pa.Array | None, part: str, *, message_paths: bool) -> Frames:
    """The frames of binary ``values``.

    Args:
        headers: the records' headers, as the log has them; None: they have none.
        part: "key" or "value".
        message_paths: whether the values are of Protobuf.
    """
    framed = None if headers is None else _framed_in_headers(headers, HEADERS[part])
    if framed is None and (found := _of_few_ids(values, message_paths=message_paths)) is not None:
        return found
    payloads: list[bytes | None] = []
    ids: dict[tuple[SchemaId, tuple[int, ...]], list[int]] = {}
    refused: dict[int, str] = {}
    for row, value in enumerate(values.to_pylist()):
        frame = framed[row] if framed is not None else None
        if value is None:
            payloads.append(None)
            continue
        try:
            id_, path, payload = _read(value, frame, message_paths=message_paths)
        except ValueError as error:
            refused[row] = str(error)
            payloads.append(None)
            continue
        payloads.append(payload)
        ids.setdefault((id_, path), []).append(row)
    return Frames(pa.array(payloads, pa.binary()), ids, refused)


def _of_few_ids(values: pa.Array, *, message_paths: bool) -> Frames | None:
    """The frames of values with few ids in the plainest form, which cost no Python for each value."""
    # Of Protobuf, a 0 for the first message follows.
    length = _ID_BYTES + message_paths
    heads = pc.binary_slice(values, 0, length)
    known = [head for head in pc.unique(heads).to_pylist() if head is not None]
    if len(known) > _FEW or any(not _is_plain(head, length, message_paths=message_paths) for head in known):
        return None
    path = (0,) if message_paths else ()
    ids: dict[tuple[SchemaId, tuple[int, ...]], list[int] | None] = {}
    for head in known:
        rows = None if len(known) == 1 else pc.indices_nonzero(pc.equal(heads, head)).to_pylist()
        ids[int.from_bytes(head[1:_ID_BYTES], "big"), path] = rows
    return Frames(pc.binary_slice(values, length, _MAX_BYTES), ids)


def _is_plain(head: bytes, length: int, *, message_paths: bool) -> bool:
    """Whether a value begins with a 0, an id, and for Protobuf a 0."""
    return len(head) == length and not head[0] and head[1] < _ID_TOP and not (message_paths and head[-1])


def _read(value: bytes, header: bytes | None, *, message_paths: bool) -> tuple[SchemaId, tuple[int, ...], bytes]:
    """The id, the message path and the payload of a value. Raises ValueError with a reason."""
    if header is not None:
        id_, at = _id_in(header, "the schema id in its header")
        path, end = _message_path(header, at) if message_paths and at < len(header) else ((0,) * message_paths, at)
        if end != len(header):
            raise ValueError(f"not framed: {len(header) - end} bytes follow the schema id in its header")
        return id_, path, value
    id_, at = _id_in(value, "it")
    path, at = _message_path(value, at) if message_paths else ((), at)
    return id_, path, value[at:]


def _id_in(framed: bytes, what: str) -> tuple[SchemaId, int]:
    if not framed:
        raise ValueError(f"not framed for a schema registry: {what} is empty")
    if framed[0] == 0 and len(framed) >= _ID_BYTES:
        id_ = int.from_bytes(framed[1:_ID_BYTES], "big")
        if framed[1] >= _ID_TOP:
            raise ValueError(f"not framed for a schema registry: {what} has the id {id_}, and ids end at {2**31 - 1}")
        return id_, _ID_BYTES
    if framed[0] == 1 and len(framed) >= _GUID_BYTES:
        return str(uuid.UUID(bytes=framed[1:_GUID_BYTES])), _GUID_BYTES
    if framed[0] in (0, 1):
        raise ValueError(f"not framed for a schema registry: {what} ends within the schema's id")
    raise ValueError(f"not framed for a schema registry: {what} begins with the byte {framed[0]}, not with 0 or 1")


def _message_path(framed: bytes, at: int) -> tuple[tuple[int, ...], int]:
    """The indexes of a message within its file, and where they end. Raises ValueError."""
    number, at = _varint(framed, at)
    if number == 0:
        return (0,), at
    if not 0 < number <= _MAX_INDEXES:
        raise ValueError(f"not framed for a schema registry: its message has {number} indexes")
    indexes = []
    for _ in range(number):
        index, at = _varint(framed, at)
        if index < 0:
            raise ValueError(f"not framed for a schema registry: its message has the index {index}")
        indexes.append(index)
    return tuple(indexes), at


def _varint(framed: bytes, at: int) -> tuple[int, int]:
    """A number that is encoded as a zigzag varint of up to five bytes. Raises ValueError."""
    number = 0
    for place, byte in enumerate(framed[at : at + 5]):
        number |= (byte & 0x7F) << (7 * place)
        if not byte & 0x80:
            return (number >> 1) ^ -(number & 1), at + place + 1
    raise ValueError("not framed for a schema registry: it ends within the indexes of its message")


def _framed_in_headers(headers: pa.Array, name: str) -> list[bytes | None] | None:
    """The values of the header of each record; None if no record has the header."""
    keys: Any = headers.flatten().field("key") if headers.null_count < len(headers) else None
    if keys is None or not pc.any(pc.equal(keys, name), min_count=0).as_py():
        return None
    found: list[bytes | None] = [None] * len(headers)
    values = headers.flatten().field("value")
    # flatten() leaves nulls out, and so do the lengths.
    rows = np.repeat(np.arange(len(headers)), pc.fill_null(pc.list_value_length(headers), 0).to_numpy())
    for place in pc.indices_nonzero(pc.equal(keys, name)).to_pylist():
        # The last one counts, as Kafka's clients read it.
        found[int(rows[place])] = values[place].as_py() or b""
    return found
