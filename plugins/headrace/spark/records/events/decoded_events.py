"""Change events that another decoder has decoded, such as Avro's: the row after the change, and columns beside it.

It imports no Spark. What is decoded is an envelope (before, after, op, source), or a row in flattened form with
``__op``, ``__deleted`` and the like.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from headrace.formats.change_events import DELETED, OPERATIONS, ROW_OPERATIONS, is_envelope
from headrace.spark.records.events.event_columns import columns_of_source, connector_of, refuse_unsent
from headrace.spark.records.events.event_reader import SOURCE_FIELDS, UNKNOWN_OPERATION

_TRANSACTION = ("id", "total_order", "data_collection_order")


class DecodedEvents:
    """Decodes as `headrace.spark.records.events.change_events.ChangeEvents` does, by the decoder of another format."""

    def __init__(
        self, column: pa.StructType, *, time_zone: str = "UTC", events: Mapping[str, Any], kept: Any = None
    ) -> None:
        """``events``: the other decoder: what it ``decodes``, the tree of its ``columns``
        (`headrace.stream.ddl.type_tree`), what it ``reads``, and its ``keywords``."""
        module, _, name = events["decodes"].partition(":")
        more = {} if kept is None else {"kept": kept}
        made = getattr(importlib.import_module(module), name)
        self._decoder = made(arrow_type(events["columns"]), time_zone=time_zone, **more, **events["keywords"])
        self._reads = tuple(events["reads"])
        self._are_envelopes = is_envelope(events["columns"])
        self._column = column
        self._row = column.field("value").type

    def decode(self, values: pa.Array, **columns: pa.Array) -> tuple[pa.Array, dict[int, str]]:
        """As `ChangeEvents.decode`."""
        decoded, refused = self._decoder.decode(values, **{name: columns[name] for name in self._reads})
        refused = dict(refused)
        parts = dict(zip((field.name for field in decoded.type), decoded.flatten(), strict=True))
        absent = pc.is_null(decoded)
        made = self._of_envelopes(parts, refused) if self._are_envelopes else self._of_rows(parts)
        _refuse_operations(made["op"], pc.invert(absent), refused, required=self._are_envelopes)
        refuse_unsent(made["value"], refused)
        if refused:
            absent = pc.or_(absent, pa.array([row in refused for row in range(len(values))], pa.bool_()))
        arrays = [made[field.name].cast(field.type) for field in self._column]
        return pa.StructArray.from_arrays(arrays, fields=list(self._column), mask=absent), refused

    def _of_envelopes(self, parts: Mapping[str, pa.Array], refused: dict[int, str]) -> dict[str, pa.Array]:
        ops = parts["op"].to_pylist()
        after = parts["after"].cast(self._row)
        for row in pc.indices_nonzero(pc.is_null(after)).to_pylist():
            if ops[row] in ROW_OPERATIONS:
                refused.setdefault(row, f"no change event: it has the operation {ops[row]!r}, and no row after it")
        number = len(after)
        nothing = pa.nulls(number, self._row)
        source, transaction = parts.get("source"), parts.get("transaction")
        said = _texts_of(source, SOURCE_FIELDS, number)
        present = [False] * number if source is None else pc.is_valid(source).to_pylist()
        sent = parts["ts_ms"].to_pylist() if "ts_ms" in parts else [None] * number
        return {
            "value": _where_rows(parts["op"], after),
            "before": parts["before"].cast(self._row) if "before" in parts else nothing,
            "op": parts["op"],
            **columns_of_source(said, ops, [True] * number, _numbers(sent), present),
            "transaction": self._transactions(transaction, number),
        }

    def _of_rows(self, parts: Mapping[str, pa.Array]) -> dict[str, pa.Array]:
        """Of rows in flattened form."""
        row = pa.StructArray.from_arrays(
            [parts[field.name].cast(field.type) for field in self._row], fields=list(self._row)
        )
        number = len(row)
        nothing = pa.nulls(number, self._row)
        said = {name: _plain(parts.get(f"__source_{name}", parts.get(f"__{name}")), number) for name in SOURCE_FIELDS}
        deleted_texts = parts["__deleted"].cast(pa.string()) if "__deleted" in parts else pa.nulls(number, pa.string())
        op = parts["__op"].cast(pa.string()) if "__op" in parts else pa.nulls(number, pa.string())
        is_deleted = pc.or_(
            pc.fill_null(pc.equal(pc.utf8_lower(deleted_texts), "true"), False),
            pc.fill_null(pc.equal(op, DELETED), False),
        )
        if said["connector"] == [None] * number:
            said["connector"] = list(map(connector_of, said["lsn"], said["sequence"], said["file"]))
        op = pc.if_else(is_deleted, DELETED, op)
        present = [True] * number
        return {
            "value": _where_rows(op, row),
            "before": pc.if_else(is_deleted, row, nothing),
            "op": op,
            **columns_of_source(said, op.to_pylist(), pc.is_valid(deleted_texts).to_pylist(), [None] * number, present),
            "transaction": self._transactions(None, number),
        }

    def _transactions(self, given: pa.Array | None, number: int) -> pa.Array:
        kind = self._column.field("transaction").type
        if given is None:
            return pa.nulls(number, kind)
        parts = dict(zip((field.name for field in given.type), given.flatten(), strict=True))
        held = [
            parts[name].cast(field.type) if name in parts else pa.nulls(number, field.type)
            for name, field in zip(_TRANSACTION, kind, strict=True)
        ]
        return pa.StructArray.from_arrays(held, fields=list(kind), mask=pc.is_null(given))


def _where_rows(op: pa.Array, rows: pa.Array) -> pa.Array:
    """The rows after operations of rows, and of events that say no operation; null after the others."""
    of_rows = pc.or_(pc.is_null(op), pc.is_in(op, pa.array(sorted(ROW_OPERATIONS), op.type)))
    return rows if pc.all(of_rows, min_count=0).as_py() else pc.if_else(of_rows, rows, pa.nulls(len(rows), rows.type))


def _refuse_operations(op: pa.Array, valid: pa.Array, refused: dict[int, str], *, required: bool) -> None:
    """Refuse the valid events of operations that are not known, or, where one is required, of none."""
    known = pc.is_in(op, pa.array(sorted(OPERATIONS), op.type))
    if not required:
        known = pc.or_(known, pc.is_null(op))
    for row in pc.indices_nonzero(pc.and_(valid, pc.invert(known))).to_pylist():
        refused.setdefault(row, f"no change event: {UNKNOWN_OPERATION.format(op[row].as_py())}")


def _texts_of(given: pa.Array | None, names: Sequence[str], number: int) -> dict[str, Sequence[Any]]:
    parts = {} if given is None else dict(zip((field.name for field in given.type), given.flatten(), strict=True))
    return {name: _plain(parts.get(name), number) for name in names}


def _plain(given: pa.Array | None, number: int) -> Sequence[Any]:
    return [None] * number if given is None else _numbers(given.to_pylist())


def _numbers(values: Sequence[Any]) -> Sequence[Any]:
    """Times, of Avro's or Protobuf's own types, as milliseconds."""
    return [round(value.timestamp() * 1_000) if hasattr(value, "timestamp") else value for value in values]


_DECIMAL = re.compile(r"(?:DECIMAL|DEC|NUMERIC)(?:\s*\(\s*(\d+)\s*(?:,\s*(\d+)\s*)?\))?")
_TYPES: Mapping[str, pa.DataType] = {
    "BOOLEAN": pa.bool_(),
    "TINYINT": pa.int8(),
    "BYTE": pa.int8(),
    "SMALLINT": pa.int16(),
    "SHORT": pa.int16(),
    "INT": pa.int32(),
    "INTEGER": pa.int32(),
    "BIGINT": pa.int64(),
    "LONG": pa.int64(),
    "FLOAT": pa.float32(),
    "REAL": pa.float32(),
    "DOUBLE": pa.float64(),
    "STRING": pa.string(),
    "BINARY": pa.binary(),
    "DATE": pa.date32(),
    "TIMESTAMP": pa.timestamp("us", "UTC"),
    "TIMESTAMP_LTZ": pa.timestamp("us", "UTC"),
    "TIMESTAMP_NTZ": pa.timestamp("us"),
}


def arrow_type(tree: Any) -> pa.DataType:
    """The type of a tree of `headrace.stream.ddl.type_tree`."""
    if isinstance(tree, dict):
        return pa.struct([(name, arrow_type(kind)) for name, kind in tree.items()])
    if isinstance(tree, list):
        held = [arrow_type(kind) for kind in tree]
        return pa.map_(*held) if len(held) == 2 else pa.list_(pa.field("element", held[0]))
    if (decimal := _DECIMAL.fullmatch(tree)) is not None:
        return pa.decimal128(int(decimal[1] or 10), int(decimal[2] or 0))
    return _TYPES[tree]
