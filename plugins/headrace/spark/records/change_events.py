"""Decodes Debezium's change events in JSON: the row after the change, and columns about the change beside it.

It imports no Spark. Each record shows by itself what it is: an envelope (before, after, op, source), with Connect's
schema part around it or not; a row in flattened form, with ``__op`` and ``__deleted`` in fields or headers; either of
them within a CloudEvent; or an event that changes no row (a heartbeat, a change of the schema, the end of a
transaction, a truncate, a message). Envelopes are read by one parse each, and turned column by column.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from functools import lru_cache
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.formats.change_events import (
    BESIDE,
    DELETED,
    HEARTBEAT,
    MESSAGE,
    PLAIN,
    ROW_OPERATIONS,
    SCHEMA_CHANGE,
    TRANSACTION,
    TRUNCATED,
    DecimalTexts,
    Said,
    TimeUnit,
    said_of_places,
)
from headrace.spark.records.connect_values import ConnectLeaf
from headrace.spark.records.event_columns import (
    columns_of_source,
    connector_of,
    refuse_unsent,
    text_of,
    transactions_of,
)
from headrace.spark.records.exact_columns import YEARS_1_TO_9999, UnfitError
from headrace.spark.records.json_objects import REFUSED, Objects, not_utf8

OPERATIONS = ROW_OPERATIONS | {DELETED, TRUNCATED, MESSAGE}
UNKNOWN_OPERATION = "it has the operation {!r}, which headrace does not know"
_NO_FIELDS = "it has neither an operation nor a field of the row"
_SCHEMAS_KEPT = 64
_NO_SCHEMA = 0
_CLOUD = "iodebezium"
_SHOWN_CHARACTERS = 60

_Number = int | str | None


class _Source(msgspec.Struct, gc=False):
    """Where a change comes from."""

    connector: str | None = None
    name: str | None = None
    db: str | None = None
    schema: str | None = None
    table: str | None = None
    snapshot: str | bool | None = None
    txId: _Number = None  # noqa: N815 - as Debezium names it
    collection: str | None = None
    ts_ms: _Number = None
    ts_us: _Number = None
    lsn: _Number = None
    sequence: str | None = None
    file: str | None = None
    pos: _Number = None
    row: _Number = None
    ord: _Number = None
    txnNumber: _Number = None  # noqa: N815


SOURCE_FIELDS = _Source.__struct_fields__
_NO_SOURCE = _Source()


class _Transaction(msgspec.Struct, gc=False):
    id: str | None = None
    total_order: _Number = None
    data_collection_order: _Number = None


class _Event(NamedTuple):
    """A change event, of whichever form. ``before`` and ``after`` are rows as msgspec has read them."""

    op: str | None
    before: Any = None
    after: Any = None
    source: Any = None
    transaction: Any = None
    ts_ms: Any = None
    schema: int = _NO_SCHEMA
    has_position: bool = True


class _RefusedError(Exception):
    """The value is no change event, or one of which no row can be made."""


_UNREADABLE = (_RefusedError, *REFUSED, ValueError, TypeError, KeyError, ArithmeticError)
"""What a record may be refused by. Whatever a value holds, it is that record's fault and not the batch's."""


class _Envelope(msgspec.Struct, gc=False):
    """The part of an envelope that has no rows."""

    op: str | None = None
    source: _Source | None = None
    transaction: _Transaction | None = None
    ts_ms: _Number = None


class _DeclaredRows:
    """The rows of one declared type, as msgspec reads them, and as Arrow's columns by each schema part."""

    def __init__(self, kind: pa.StructType, leaf: ConnectLeaf) -> None:
        self.kind = kind
        self._leaf = leaf
        self._objects: dict[tuple[int, str], Objects] = {}
        self._said: list[Mapping[str, Mapping[str, Said]] | None] = [None]
        self._by_said: dict[Hashable, int] = {}
        self._numbers: dict[bytes, int] = {}
        objects = Objects(kind, "$", leaf)
        self.strict, self.loose = objects.strict, objects.loose
        self.names = frozenset(field.name for field in kind)
        self._first, *_ = self.strict.__struct_fields__

    def is_bare(self, row: Any) -> bool:
        """Whether all fields of a row are null, or absent."""
        # The first is asked by itself, as this is asked of each row, and most have a key in it.
        return getattr(row, self._first) is None and not any(
            getattr(row, name) is not None for name in row.__struct_fields__
        )

    def schema_number(self, text: bytes) -> int:
        """The number of a schema part. Raises _RefusedError if it is none."""
        if (number := self._numbers.get(text)) is None:
            try:
                schema = msgspec.json.decode(text)
            except REFUSED as error:
                raise _RefusedError(f"its schema part is no JSON: {error}") from None
            said = _said_of_parts(schema)
            # Schema parts that differ in what is of no account here, such as a version, are one.
            same = frozenset((part, frozenset(places.items())) for part, places in said.items())
            if (number := self._by_said.get(same)) is None:
                number = self._by_said[same] = len(self._said)
                self._said.append(said)
            if len(self._numbers) >= _SCHEMAS_KEPT:
                self._numbers.clear()
            self._numbers[text] = number
        return number

    def forget_schemas(self) -> bool:
        """Forget the schema parts, and their numbers, if there are many; whether it has. Only between batches."""
        if len(self._said) <= _SCHEMAS_KEPT:
            return False
        self._said[1:] = []
        for kept in (self._numbers, self._by_said, self._objects):
            kept.clear()
        return True

    def array(self, rows: list[Any], schemas: Sequence[int], part: str, refused: dict[int, str]) -> pa.Array:
        """The rows as Arrow's; those that do not fit are null, and added to ``refused``. ``part``: "before", "after",
        or "" of a row that is no part of an envelope."""
        numbers = set(schemas)
        if len(numbers) == 1:
            return self._array(rows, numbers.pop(), part, refused)
        made, order = [], []
        for number in sorted(numbers):
            own = [row for row, schema in enumerate(schemas) if schema == number]
            of_number: dict[int, str] = {}
            made.append(self._array([rows[row] for row in own], number, part, of_number))
            refused |= {own[row]: reason for row, reason in of_number.items() if own[row] not in refused}
            order += own
        return pa.concat_arrays(made).take(pa.array(np.argsort(order)))

    def _array(self, rows: list[Any], schema: int, part: str, refused: dict[int, str]) -> pa.Array:
        if not any(row is not None for row in rows):
            return pa.nulls(len(rows), self.kind)
        objects = self._objects_of(schema, part)
        try:
            return objects.array(rows)
        except UnfitError:
            kept = list(rows)
            for row, error in objects.unfit(rows):
                refused.setdefault(row, str(error))
                kept[row] = None
        return objects.array(kept)

    def _objects_of(self, schema: int, part: str) -> Objects:
        if (objects := self._objects.get((schema, part))) is None:
            said = self._said[schema]
            place = f"$.{part}" if part else "$"
            leaf = self._leaf
            if said is not None:
                # In a flattened row the fields are beside each other, in an envelope within its parts.
                leaf = ConnectLeaf(said.get(part, said[""]), leaf.times, leaf.decimals, leaf.time_zone)
                leaf = ConnectLeaf(
                    {place + at[1:]: each for at, each in (leaf.said or {}).items()},
                    leaf.times,
                    leaf.decimals,
                    leaf.time_zone,
                )
            if len(self._objects) >= _SCHEMAS_KEPT:
                self._objects.clear()
            objects = self._objects[schema, part] = Objects(self.kind, place, leaf)
        return objects


def _said_of(schema: Any) -> Mapping[str, Said]:
    return {place: said for place, said in said_of_places(schema) if said != PLAIN}


def _said_of_parts(schema: Any) -> Mapping[str, Mapping[str, Said]]:
    """What a schema part says of the places in "before" and "after", and of those in the value itself ("")."""
    fields = schema.get("fields") if isinstance(schema, dict) else None
    parts: dict[str, Mapping[str, Said]] = {"": _said_of(schema)}
    for field in fields if isinstance(fields, list) else ():
        if isinstance(field, dict) and field.get("type") == "struct":
            if field.get("field") in ("before", "after"):
                parts[field["field"]] = _said_of(field)
            elif field.get("field") == "data":
                # Of a CloudEvent.
                parts |= {name: said for name, said in _said_of_parts(field).items() if name}
    return parts


class ChangeEvents:
    """Decodes into a struct of ``value``, the row after the change, and the columns of ``change_events.beside``.

    Called with another type, it decodes the keys of change events, into the struct of their fields.
    """

    def __init__(
        self,
        column: pa.StructType,
        *,
        time_zone: str = "UTC",
        fields: str = "",
        times: TimeUnit | None = None,
        decimals: DecimalTexts = "base64",
    ) -> None:
        self._column = column
        self._is_key = tuple(field.name for field in column) != ("value", *BESIDE)
        self._rows = _DeclaredRows(
            column if self._is_key else column.field("value").type, ConnectLeaf(None, times, decimals, time_zone)
        )
        self._wanted = f"no {'key' if self._is_key else 'change event'} of {fields}" if fields else "no change event"
        self._reader = _EventReader(self._rows)

    def decode(self, values: pa.Array, *, headers: pa.Array | None = None) -> tuple[pa.Array, dict[int, str]]:
        """The structs of binary ``values``, and the reasons by row of those that are refused, which are null.

        ``headers``: the records' headers, which may say what a flattened row does not. The value within the struct is
        null where a row was deleted, and where the event changes no row; a tombstone is null as a whole.
        """
        texts = values.to_pylist()
        refused = not_utf8(values)
        self._reader.forget_schemas()
        if self._is_key:
            decoded = self._keys(texts, refused)
        else:
            events = self._reader.events(texts, headers, refused)
            self._check_rows(events, refused)
            decoded = self._array(events, refused)
        return decoded, {row: f"{self._wanted}: {reason}" for row, reason in refused.items()}

    def _keys(self, texts: list[bytes | None], refused: dict[int, str]) -> pa.Array:
        rows, schemas = self._reader.rows(texts, refused)
        return self._rows.array(rows, schemas, "", refused)

    @staticmethod
    def _check_rows(events: list[_Event | None], refused: dict[int, str]) -> None:
        """Refuse the events after which there must be a row, and that have none."""
        for row, event in enumerate(events):
            if event is not None and event.after is None and event.op in ROW_OPERATIONS:
                refused[row] = f"it has the operation {event.op!r}, and no row after it"
                events[row] = None

    def _array(self, events: list[_Event | None], refused: dict[int, str]) -> pa.Array:
        rest = [_NOTHING if event is None else event for event in events]
        ops, befores, afters, sources, transactions, times, schemas, positioned = (
            (list(part) for part in zip(*rest, strict=True)) if rest else ([],) * 8
        )
        # A row in flattened form may say no operation.
        afters = [after if op is None or op in ROW_OPERATIONS else None for op, after in zip(ops, afters, strict=True)]
        made = {
            "value": self._rows.array(afters, schemas, "after", refused),
            # An event stands by the row after the change, whatever was before: that row may be of an older table.
            "before": self._rows.array(befores, schemas, "before", {}),
            "op": pa.array(ops, pa.string()),
        }
        refuse_unsent(made["value"], refused)
        held = [_NO_SOURCE if source is None else source for source in sources]
        of_source = (
            dict(zip(SOURCE_FIELDS, zip(*map(attrgetter(*SOURCE_FIELDS), held), strict=True), strict=True))
            if held
            else {name: () for name in SOURCE_FIELDS}
        )
        made |= columns_of_source(of_source, ops, positioned, times, [source is not None for source in sources])
        made["transaction"] = transactions_of(transactions)
        absent = np.array([event is None for event in events], bool)
        absent[list(refused)] = True
        arrays = [made[field.name].cast(field.type) for field in self._column]
        return pa.StructArray.from_arrays(arrays, fields=list(self._column), mask=pa.array(absent))


_NOTHING = _Event(None)


class _Wrapped(msgspec.Struct, forbid_unknown_fields=True):
    """Connect's JSON with its schema part."""

    schema: msgspec.Raw
    payload: msgspec.Raw


_read_wrapped = msgspec.json.Decoder(_Wrapped).decode
_read_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_read_source = msgspec.json.Decoder(_Source | None).decode
_read_envelope = msgspec.json.Decoder(_Envelope).decode


class _EventReader:
    """Reads the texts of records."""

    def __init__(self, rows: _DeclaredRows) -> None:
        self._rows = rows
        parts = [
            ("op", str | None, None),
            ("source", _Source | None, None),
            ("transaction", _Transaction | None, None),
            ("ts_ms", _Number, None),
        ]
        whole = [("before", rows.strict | None, None), ("after", rows.strict | None, None), *parts]
        self._read_event = msgspec.json.Decoder(msgspec.defstruct("Event", whole, gc=False)).decode
        self._event_parts = attrgetter("op", "before", "after", "source", "transaction", "ts_ms")
        self._row_readers = [msgspec.json.Decoder(rows.strict | None).decode]
        if rows.loose is not rows.strict:
            self._row_readers.append(msgspec.json.Decoder(rows.loose | None).decode)
        self._flat = False
        """Whether rows came in flattened form, so that envelopes are not to be expected."""
        self._opening, self._schema = b"", _NO_SCHEMA
        """The bytes before the payload of the last record with a schema part, which are those of most others too."""

    def forget_schemas(self) -> None:
        """Bound what is kept of schema parts. Only between batches: their numbers are given anew."""
        if self._rows.forget_schemas():
            self._opening, self._schema = b"", _NO_SCHEMA

    # --- values

    def events(
        self, texts: list[bytes | None], headers: pa.Array | None, refused: dict[int, str]
    ) -> list[_Event | None]:
        """The events; None for a tombstone, and for a row that is added to ``refused``."""
        if not refused and not self._flat and (fast := self._all_envelopes(texts)) is not None:
            for row, event in enumerate(fast):
                if event is not None and self._is_doubtful(event):
                    fast[row] = self._event(texts, headers, row, refused)
            return fast
        return [self._event(texts, headers, row, refused) for row in range(len(texts))]

    def _is_doubtful(self, event: _Event) -> bool:
        """Whether what was read as an envelope may be a row of another table, or one with columns of these names."""
        if event.after is None:
            return event.before is None or event.op in ROW_OPERATIONS
        return self._rows.is_bare(event.after)

    def _event(
        self, texts: list[bytes | None], headers: pa.Array | None, row: int, refused: dict[int, str]
    ) -> _Event | None:
        text = texts[row]
        if text is None or row in refused:
            return None
        try:
            return self._one(text, _Headers(headers, row))
        except _UNREADABLE as error:
            refused[row] = str(error)
            return None

    def _all_envelopes(self, texts: list[bytes | None]) -> list[_Event | None] | None:
        """The events, if all are envelopes of one schema part, and have rows as they are declared; else None."""
        read, parts = self._read_event, self._event_parts
        opening, length, schema = self._opening, len(self._opening), self._schema
        made: list[_Event | None] = []
        try:
            if not opening:
                held = [None if text is None else parts(read(text)) for text in texts]
            else:
                held = [None if text is None else parts(read(_inside(text, opening, length))) for text in texts]
        except (*REFUSED, _RefusedError):
            return None
        for each in held:
            if each is None:
                made.append(None)
            elif each[0] in OPERATIONS and each[3] is not None:
                made.append(_Event._make((*each, schema, True)))
            else:
                return None
        return made

    def _one(self, text: bytes, headers: _Headers) -> _Event:
        payload, schema = self._unwrapped(text)
        if payload == b"null":
            return _NOTHING
        fields = _read_fields(payload)
        return self._of_fields(payload, fields, schema, headers)

    def _of_fields(self, payload: bytes, fields: Mapping[str, Any], schema: int, headers: _Headers) -> _Event:
        if "specversion" in fields and ("data" in fields or "data_base64" in fields):
            return self._cloud_event(fields, schema, headers)
        # A table may have columns of any name: what a flattened row says of its change comes first.
        if fields.keys() & _OF_CHANGE or (not fields.keys() >= _OF_ENVELOPE and headers.of_row().keys() & _OF_CHANGE):
            return self._flattened(payload, fields, schema, headers)
        if "op" in fields and fields.keys() & {"before", "after", "source"}:
            return self._envelope(payload, fields, schema)
        if fields.keys() & {"before", "after"} and (said := headers.of_cloud()):
            return self._envelope_of_cloud(fields, schema, said)
        if (op := _changes_no_row(fields, self._rows.names)) is not None:
            return _Event(op)
        if fields.keys() & self._rows.names:
            return self._flattened(payload, fields, schema, headers)
        raise _RefusedError(_NO_FIELDS)

    def _envelope(self, payload: bytes, fields: Mapping[str, Any], schema: int) -> _Event:
        held = _read_envelope(payload)
        if held.op not in OPERATIONS:
            raise _RefusedError(UNKNOWN_OPERATION.format(held.op))
        before, after = self._before(fields.get("before")), self._after(fields.get("after"), held.op)
        self._flat = False
        return _Event(held.op, before, after, held.source, held.transaction, held.ts_ms, schema)

    def _flattened(self, payload: bytes, fields: Mapping[str, Any], schema: int, headers: _Headers) -> _Event:
        said = {
            **headers.of_row(),
            **{name: _scalar(raw) for name, raw in fields.items() if name.startswith("__")},
        }
        said = {name[2:]: text for name, text in said.items()}
        said |= {name.removeprefix("source_"): text for name, text in said.items() if name.startswith("source_")}
        deleted, op = said.get("deleted"), said.get("op")
        if op is not None and op not in OPERATIONS:
            raise _RefusedError(UNKNOWN_OPERATION.format(op))
        source = _Source(**{name: text for name, text in said.items() if name in SOURCE_FIELDS})
        source.connector = source.connector or connector_of(source.lsn, source.sequence, source.file)
        self._flat = True
        # Without it the only sign of a deletion is a tombstone, which has no position: it could not be ordered.
        has_position = deleted is not None
        if (deleted or "").casefold() == "true" or op == DELETED:
            before = self._before(payload)
            return _Event(DELETED, before, None, source, schema=schema, has_position=has_position)
        return _Event(op, None, self._row(payload), source, schema=schema, has_position=has_position)

    def _cloud_event(self, fields: Mapping[str, Any], around: int, headers: _Headers) -> _Event:
        if "data" not in fields:
            raise _RefusedError("it is a CloudEvent with data in base64, and JSON is wanted")
        data, schema = self._unwrapped(bytes(fields["data"]))
        schema = schema or around
        if data == b"null":
            return _NOTHING
        inside = _read_fields(data)
        said = {name.removeprefix(_CLOUD): _scalar(raw) for name, raw in fields.items() if name.startswith(_CLOUD)}
        if "op" not in inside and inside.keys() & {"before", "after"}:
            return self._envelope_of_cloud(inside, schema, said)
        return self._of_fields(data, inside, schema, headers)

    def _envelope_of_cloud(self, fields: Mapping[str, Any], schema: int, said: Mapping[str, str | None]) -> _Event:
        source = _Source(**{name: said.get(name.replace("_", "").lower()) for name in SOURCE_FIELDS})
        transaction = (
            _Transaction(said.get("txid"), said.get("txtotalorder"), said.get("txdatacollectionorder"))
            if "txtotalorder" in said
            else None
        )
        given = fields.get("after")
        op = said.get("op") or (DELETED if given is None or bytes(given) == b"null" else "u")
        if op not in OPERATIONS:
            raise _RefusedError(UNKNOWN_OPERATION.format(op))
        before, after = self._before(fields.get("before")), self._after(given, op)
        return _Event(op, before, after, source, transaction, said.get("tsms"), schema)

    # --- keys

    def rows(self, texts: list[bytes | None], refused: dict[int, str]) -> tuple[list[Any], list[int]]:
        """The rows that the texts are, and the numbers of their schema parts."""
        rows, schemas = [], []
        for row, text in enumerate(texts):
            held, schema = None, self._schema
            if text is not None and row not in refused:
                try:
                    payload, schema = self._unwrapped(text)
                    held = self._row(payload)
                    if held is None:
                        refused[row] = "it is null"
                except _UNREADABLE as error:
                    refused[row] = str(error)
            rows.append(held)
            schemas.append(schema)
        return rows, schemas

    # --- parts

    def _unwrapped(self, text: bytes) -> tuple[bytes, int]:
        """What is within Connect's schema part, and the part's number; the text itself if there is no such part."""
        if self._opening and text.startswith(self._opening) and text.endswith(b"}"):
            inside = text[len(self._opening) : -1]
            try:
                msgspec.json.decode(inside, type=msgspec.Raw)
            except REFUSED:
                pass
            else:
                return inside, self._schema
        if b'"payload"' not in text:
            return text, _NO_SCHEMA
        try:
            wrapped = _read_wrapped(text)
        except REFUSED:
            return text, _NO_SCHEMA
        schema, payload = bytes(wrapped.schema), bytes(wrapped.payload)
        if payload[:1] not in (b"{", b"n"):
            return text, _NO_SCHEMA
        if schema == b"null":
            return payload, _NO_SCHEMA
        number = self._rows.schema_number(schema)
        opening = b'{"schema":%b,"payload":' % schema
        if text == b"%b%b}" % (opening, payload):
            self._opening, self._schema = opening, number
        return payload, number

    def _before(self, raw: Any) -> Any:
        """The row before a change; None also if it does not fit."""
        try:
            return self._row(raw)
        except _UNREADABLE:
            return None

    def _after(self, raw: Any, op: str | None) -> Any:
        """The row after a change of a row, which has one of its fields; None after any other."""
        if op not in ROW_OPERATIONS:
            return None
        row = self._row(raw, "after")
        if row is not None and self._rows.is_bare(row):
            text = bytes(raw)
            text = _plain_document(msgspec.json.decode(text, type=str)) if text[:1] == b'"' else text
            if not _read_fields(text).keys() & self._rows.names:
                raise _RefusedError(f"the row after it: {_NO_FIELDS}")
        return row

    def _row(self, raw: Any, part: str = "") -> Any:
        """A row of its JSON, or of a text of MongoDB that is one; None if there is none. ``part``: of an envelope."""
        text = b"null" if raw is None else bytes(raw)
        if text[:1] == b'"':
            text = _plain_document(msgspec.json.decode(text, type=str))
        for reader in self._row_readers[:-1]:
            try:
                return reader(text)
            except REFUSED:
                continue
        try:
            return self._row_readers[-1](text)
        except msgspec.DecodeError as error:
            raise _RefusedError(str(error).replace("`$", f"`$.{part}") if part else str(error)) from None


_OF_CHANGE = frozenset({"__op", "__deleted"})
_OF_ENVELOPE = frozenset({"op", "before", "after", "source"})


def _changes_no_row(fields: Mapping[str, Any], declared: Set[str]) -> str | None:
    """What an event of these fields is, if it is none of a row, which has ``declared`` fields."""
    names = fields.keys()
    # Of the other events only that of a transaction has a field that a table often has: its id.
    if {"status", "id"} <= names and names & {"event_count", "data_collections"} and "status" not in declared:
        return TRANSACTION if _scalar(fields["status"]) in ("BEGIN", "END") else None
    if names & declared:
        return None
    if "source" in names and names & {"tableChanges", "ddl"}:
        return SCHEMA_CHANGE
    return HEARTBEAT if names and names <= {"ts_ms", "ts_us", "ts_ns"} else None


def _inside(text: bytes, opening: bytes, length: int) -> bytes:
    if not text.startswith(opening):
        raise _RefusedError
    return text[length:-1] if text[-1:] == b"}" else b""


class _Headers:
    """The headers of a record, which are looked at only if its value does not say all."""

    def __init__(self, headers: pa.Array | None, row: int) -> None:
        self._headers, self._row = headers, row
        self._texts: dict[str, str | None] | None = None

    def of_row(self) -> dict[str, str | None]:
        """What a flattened row has in headers in place of fields."""
        return {name: text for name, text in self._all().items() if name.startswith("__")}

    def of_cloud(self) -> dict[str, str | None]:
        """The attributes of a CloudEvent in binary mode, by their names in Debezium; empty if it is none."""
        held = self._all()
        if "ce_specversion" not in held:
            return {}
        start = f"ce_{_CLOUD}"
        return {"": None, **{name.removeprefix(start): text for name, text in held.items() if name.startswith(start)}}

    def _all(self) -> dict[str, str | None]:
        if self._texts is None:
            held = None if self._headers is None else self._headers[self._row].as_py()
            self._texts = {str(header["key"]): _header_text(header["value"]) for header in held or ()}
        return self._texts


def _header_text(value: bytes | None) -> str | None:
    if value is None:
        return None
    text = value.decode("utf-8", "replace")
    try:
        wrapped = _read_wrapped(value)
        return _scalar(wrapped.payload)
    except REFUSED:
        return _scalar(value) if text.startswith('"') else None if text == "null" else text


def _scalar(raw: Any) -> str | None:
    """A text, number or truth value in JSON as text; None for all else."""
    given = msgspec.json.decode(bytes(raw))
    return text_of(given) if isinstance(given, str | int | float) else None


@lru_cache(maxsize=1)
def _mongo_words() -> Mapping[str, Callable[[Any], Any]]:
    return {
        "$oid": str,
        "$numberLong": int,
        "$numberInt": int,
        "$numberDecimal": str,
        "$numberDouble": _mongo_double,
        "$symbol": str,
        "$uuid": str,
        "$date": _mongo_date,
    }


def _mongo_double(given: Any) -> Any:
    if given in ("NaN", "Infinity", "-Infinity"):
        return given
    number = float(given)
    if not math.isfinite(number):
        raise ValueError(f"{str(given)[:_SHOWN_CHARACTERS]} is beyond a double")
    return number


def _mongo_date(given: Any) -> Any:
    if isinstance(given, str):
        return given
    millis = int(given["$numberLong"]) if isinstance(given, dict) else int(given)
    first, last = YEARS_1_TO_9999
    if not first * 1_000 <= millis < (last + 1) * 1_000:
        raise ValueError("the year is not 1 to 9999")
    return pc.strftime(pa.scalar(millis, pa.timestamp("ms")), format="%Y-%m-%dT%H:%M:%SZ").as_py()


def _plain_document(text: str) -> bytes:
    """A document of MongoDB's extended JSON as plain JSON. Raises _RefusedError."""
    try:
        return msgspec.json.encode(_plain(msgspec.json.decode(text)))
    except (ValueError, TypeError, KeyError, ArithmeticError, pa.ArrowException, *REFUSED) as error:
        raise _RefusedError(
            f"its row is a text that is no document of MongoDB: {str(error)[:_SHOWN_CHARACTERS]}"
        ) from None


def _plain(given: Any) -> Any:
    if isinstance(given, list):
        return [_plain(each) for each in given]
    if not isinstance(given, dict):
        return given
    if len(given) == 1 and (turn := _mongo_words().get(next(iter(given)))) is not None:
        return turn(next(iter(given.values())))
    if "$binary" in given:
        held = given["$binary"]
        return held.get("base64") if isinstance(held, dict) else held
    return {name: _plain(each) for name, each in given.items()}
