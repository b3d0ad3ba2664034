"""Reads the texts of change events: each record shows by itself which form it has.

It is an envelope (before, after, op, source), with Connect's schema part around it or not; a row in flattened form,
with ``__op`` and ``__deleted`` in fields or headers; either of them within a CloudEvent; or an event that changes no
row (a heartbeat, a change of the schema, the end of a transaction, a truncate, a message).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa

from headrace.formats.change_events import (
    DELETED,
    HEARTBEAT,
    OF_CHANGE,
    OPERATIONS,
    ROW_OPERATIONS,
    SCHEMA_CHANGE,
    TRANSACTION,
)
from headrace.spark.records.events.declared_rows import NO_SCHEMA, OF_DOCUMENTS, DeclaredRows
from headrace.spark.records.events.event_columns import connector_of, text_of
from headrace.spark.records.events.mongo_documents import plain_document
from headrace.spark.records.json_objects import REFUSED, ElementsBound

UNKNOWN_OPERATION = "it has the operation {!r}, which headrace does not know"
_NO_FIELDS = "it has neither an operation nor a field of the row"
_CLOUD = "iodebezium"

_UNREADABLE = (*REFUSED, ValueError, TypeError, KeyError, ArithmeticError)
"""What a record may be refused by. Whatever a value holds, it is that record's fault and not the batch's."""

_Number = int | str | None


class Source(msgspec.Struct, gc=False):
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


SOURCE_FIELDS = Source.__struct_fields__
NO_SOURCE = Source()


class _Transaction(msgspec.Struct, gc=False):
    id: str | None = None
    total_order: _Number = None
    data_collection_order: _Number = None


class ChangeEvent(NamedTuple):
    """A change event, of whichever form. ``before`` and ``after`` are rows as msgspec has read them."""

    op: str | None
    before: Any = None
    after: Any = None
    source: Any = None
    transaction: Any = None
    ts_ms: Any = None
    schema: int = NO_SCHEMA
    has_position: bool = True


class _Envelope(msgspec.Struct, gc=False):
    """The part of an envelope that has no rows."""

    op: str | None = None
    source: Source | None = None
    transaction: _Transaction | None = None
    ts_ms: _Number = None


NOTHING = ChangeEvent(None)


class _Wrapped(msgspec.Struct, forbid_unknown_fields=True):
    """Connect's JSON with its schema part."""

    schema: msgspec.Raw
    payload: msgspec.Raw


_read_wrapped = msgspec.json.Decoder(_Wrapped).decode
_read_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_read_envelope = msgspec.json.Decoder(_Envelope).decode


class EventReader:
    """Reads the texts of records."""

    def __init__(self, rows: DeclaredRows) -> None:
        self._rows = rows
        parts = [
            ("op", str | None, None),
            ("source", Source | None, None),
            ("transaction", _Transaction | None, None),
            ("ts_ms", _Number, None),
        ]
        whole = [("before", rows.strict | None, None), ("after", rows.strict | None, None), *parts]
        self._read_event = msgspec.json.Decoder(msgspec.defstruct("Event", whole, gc=False)).decode
        self._event_parts = attrgetter("op", "before", "after", "source", "transaction", "ts_ms")
        self._row_readers = [msgspec.json.Decoder(rows.strict | None).decode]
        if rows.loose is not rows.strict:
            self._row_readers.append(msgspec.json.Decoder(rows.loose | None).decode)
        self._bound = ElementsBound(rows.kind)
        self._flat = False
        """Whether rows came in flattened form, so that envelopes are not to be expected."""
        self._opening, self._schema = b"", NO_SCHEMA
        """The bytes before the payload of the last record with a schema part, which are those of most others too."""

    def forget_schemas(self) -> None:
        """Bound what is kept of schema parts. Only between batches: their numbers are given anew."""
        if self._rows.forget_schemas():
            self._opening, self._schema = b"", NO_SCHEMA

    # --- values

    def events(
        self, texts: list[bytes | None], headers: pa.Array | None, refused: dict[int, str]
    ) -> list[ChangeEvent | None]:
        """The events; None for a tombstone, and for a row that is added to ``refused``."""
        if not refused and not self._flat and (fast := self._all_envelopes(texts)) is not None:
            for row, event in enumerate(fast):
                if event is not None and self._is_doubtful(event):
                    fast[row] = self._event(texts, headers, row, refused)
            return fast
        return [self._event(texts, headers, row, refused) for row in range(len(texts))]

    def _is_doubtful(self, event: ChangeEvent) -> bool:
        """Whether what was read as an envelope may be a row of another table, or one with columns of these names."""
        if event.after is None:
            return event.before is None or event.op in ROW_OPERATIONS
        return self._rows.is_bare(event.after)

    def _event(
        self, texts: list[bytes | None], headers: pa.Array | None, row: int, refused: dict[int, str]
    ) -> ChangeEvent | None:
        text = texts[row]
        if text is None or row in refused:
            return None
        try:
            return self._one(text, _Headers(headers, row))
        except _UNREADABLE as error:
            refused[row] = str(error)
            return None

    def _all_envelopes(self, texts: list[bytes | None]) -> list[ChangeEvent | None] | None:
        """The events, if all are envelopes of one schema part, and have rows as they are declared; else None."""
        read, parts = self._read_event, self._event_parts
        opening, length, schema = self._opening, len(self._opening), self._schema
        made: list[ChangeEvent | None] = []
        try:
            if not opening:
                held = [None if text is None else parts(read(text)) for text in texts]
            else:
                held = [None if text is None else parts(read(_inside(text, opening, length))) for text in texts]
        except (*REFUSED, ValueError):
            return None
        for each in held:
            if each is None:
                made.append(None)
            elif each[0] in OPERATIONS and each[3] is not None:
                made.append(ChangeEvent._make((*each, schema, True)))
            else:
                return None
        return made

    def _one(self, text: bytes, headers: _Headers) -> ChangeEvent:
        payload, schema = self._unwrapped(text)
        if payload == b"null":
            return NOTHING
        fields = _read_fields(payload)
        return self._of_fields(payload, fields, schema, headers)

    def _of_fields(self, payload: bytes, fields: Mapping[str, Any], schema: int, headers: _Headers) -> ChangeEvent:
        if "specversion" in fields and ("data" in fields or "data_base64" in fields):
            return self._cloud_event(fields, schema, headers)
        # A table may have columns of any name: what a flattened row says of its change comes first.
        if fields.keys() & OF_CHANGE or (not fields.keys() >= _OF_ENVELOPE and headers.of_row().keys() & OF_CHANGE):
            return self._flattened(payload, fields, schema, headers)
        if "op" in fields and fields.keys() & {"before", "after", "source"}:
            return self._envelope(payload, fields, schema)
        if fields.keys() & {"before", "after"} and (said := headers.of_cloud()):
            return self._envelope_of_cloud(fields, schema, said)
        if (op := _changes_no_row(fields, self._rows.names)) is not None:
            return ChangeEvent(op)
        if fields.keys() & self._rows.names:
            return self._flattened(payload, fields, schema, headers)
        raise ValueError(_NO_FIELDS)

    def _envelope(self, payload: bytes, fields: Mapping[str, Any], schema: int) -> ChangeEvent:
        held = _read_envelope(payload)
        if held.op not in OPERATIONS:
            raise ValueError(UNKNOWN_OPERATION.format(held.op))
        before, after = self._before(fields.get("before")), self._after(fields.get("after"), held.op)
        self._flat = False
        schema = OF_DOCUMENTS if _has_documents(fields) else schema
        return ChangeEvent(held.op, before, after, held.source, held.transaction, held.ts_ms, schema)

    def _flattened(self, payload: bytes, fields: Mapping[str, Any], schema: int, headers: _Headers) -> ChangeEvent:
        said = {
            **headers.of_row(),
            **{name: _scalar(raw) for name, raw in fields.items() if name.startswith("__")},
        }
        said = {name[2:]: text for name, text in said.items()}
        said |= {name.removeprefix("source_"): text for name, text in said.items() if name.startswith("source_")}
        deleted, op = said.get("deleted"), said.get("op")
        if op is not None and op not in OPERATIONS:
            raise ValueError(UNKNOWN_OPERATION.format(op))
        source = Source(**{name: text for name, text in said.items() if name in SOURCE_FIELDS})
        source.connector = source.connector or connector_of(source.lsn, source.sequence, source.file)
        self._flat = True
        # Without it the only sign of a deletion is a tombstone, which has no position: it could not be ordered.
        has_position = deleted is not None
        if (deleted or "").casefold() == "true" or op == DELETED:
            before = self._before(payload)
            return ChangeEvent(DELETED, before, None, source, schema=schema, has_position=has_position)
        return ChangeEvent(op, None, self._row(payload), source, schema=schema, has_position=has_position)

    def _cloud_event(self, fields: Mapping[str, Any], around: int, headers: _Headers) -> ChangeEvent:
        if "data" not in fields:
            raise ValueError("it is a CloudEvent with data in base64, and JSON is wanted")
        data, schema = self._unwrapped(bytes(fields["data"]))
        schema = schema or around
        if data == b"null":
            return NOTHING
        inside = _read_fields(data)
        said = {name.removeprefix(_CLOUD): _scalar(raw) for name, raw in fields.items() if name.startswith(_CLOUD)}
        if "op" not in inside and inside.keys() & {"before", "after"}:
            return self._envelope_of_cloud(inside, schema, said)
        return self._of_fields(data, inside, schema, headers)

    def _envelope_of_cloud(self, fields: Mapping[str, Any], schema: int, said: Mapping[str, str | None]) -> ChangeEvent:
        source = Source(**{name: said.get(name.replace("_", "").lower()) for name in SOURCE_FIELDS})
        transaction = (
            _Transaction(said.get("txid"), said.get("txtotalorder"), said.get("txdatacollectionorder"))
            if "txtotalorder" in said
            else None
        )
        given = fields.get("after")
        op = said.get("op") or (DELETED if given is None or bytes(given) == b"null" else "u")
        if op not in OPERATIONS:
            raise ValueError(UNKNOWN_OPERATION.format(op))
        before, after = self._before(fields.get("before")), self._after(given, op)
        schema = OF_DOCUMENTS if _has_documents(fields) else schema
        return ChangeEvent(op, before, after, source, transaction, said.get("tsms"), schema)

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
            return text, NO_SCHEMA
        try:
            wrapped = _read_wrapped(text)
        except REFUSED:
            return text, NO_SCHEMA
        schema, payload = bytes(wrapped.schema), bytes(wrapped.payload)
        if payload[:1] not in (b"{", b"n"):
            return text, NO_SCHEMA
        if schema == b"null":
            return payload, NO_SCHEMA
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
        is_bare = row is not None and self._rows.is_bare(row)
        if is_bare and not _read_fields(_document(raw)).keys() & self._rows.names:
            raise ValueError(f"the row after it: {_NO_FIELDS}")
        return row

    def _row(self, raw: Any, part: str = "") -> Any:
        """A row of its JSON, or of a text of MongoDB that is one; None if there is none. ``part``: of an envelope."""
        text = _document(raw)
        self._bound.check_text(text)
        for reader in self._row_readers[:-1]:
            try:
                return reader(text)
            except REFUSED:
                continue
        try:
            return self._row_readers[-1](text)
        except msgspec.DecodeError as error:
            raise ValueError(str(error).replace("`$", f"`$.{part}") if part else str(error)) from None


def _document(raw: Any) -> bytes:
    """The JSON of a row; of a text of MongoDB, that of its document. Raises ValueError."""
    text = b"null" if raw is None else bytes(raw)
    return plain_document(msgspec.json.decode(text, type=str)) if text[:1] == b'"' else text


_AROUND = ("payload", "data")


def rows_of(parsed: Any) -> Iterator[Any]:
    """All that may be rows in the JSON of an event, of whichever form."""
    if not isinstance(parsed, dict):
        return
    yield parsed
    yield from (parsed.get("before"), parsed.get("after"))
    for name in _AROUND:
        yield from rows_of(parsed.get(name))


_OF_ENVELOPE = frozenset({"op", "before", "after", "source"})
_OF_HEARTBEAT = frozenset({"ts_ms", "ts_us", "ts_ns"})
_OF_SCHEMA_CHANGE = _OF_HEARTBEAT | {"source", "databaseName", "schemaName", "ddl", "tableChanges"}
_OF_TRANSACTION = _OF_HEARTBEAT | {"status", "id", "event_count", "data_collections"}


def _has_documents(fields: Mapping[str, Any]) -> bool:
    """Whether the rows of an envelope are MongoDB's, which are texts."""
    given = (bytes(fields[part]) for part in ("after", "before") if part in fields)
    return next((text for text in given if text != b"null"), b"").startswith(b'"')


def _changes_no_row(fields: Mapping[str, Any], declared: Set[str]) -> str | None:
    """What an event of these fields is, if it is none of a row, which has ``declared`` fields."""
    names = fields.keys()
    # Of the other events only that of a transaction has a field that a table often has: its id.
    if (
        {"status", "id"} <= names
        and names & {"event_count", "data_collections"}
        and ("status" not in declared or _is_of(_OF_TRANSACTION, names, declared))
    ):
        return TRANSACTION if _scalar(fields["status"]) in ("BEGIN", "END") else None
    if (
        names & {"tableChanges", "ddl"}
        and bytes(fields.get("source", b""))[:1] == b"{"
        and _is_of(_OF_SCHEMA_CHANGE, names, declared)
    ):
        return SCHEMA_CHANGE
    return HEARTBEAT if names and names <= _OF_HEARTBEAT and _is_of(_OF_HEARTBEAT, names, declared) else None


def _is_of(kind: Set[str], names: Set[str], declared: Set[str]) -> bool:
    """Whether a value with fields of another event, a ``kind``, is no row. A row has all fields of its table: where the
    table has a field that is none of the event's, a value with only the event's is no row of it."""
    shared = names & declared
    return not shared or (shared <= kind and not declared <= kind)


def _inside(text: bytes, opening: bytes, length: int) -> bytes:
    if not text.startswith(opening):
        raise ValueError
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
