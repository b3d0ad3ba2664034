"""Debezium's change events: the columns that are made of them, and what Connect's schemas say of a value.

It needs no library. Spark's tasks turn the values by it (``headrace.spark.records.events.change_events``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

TimeUnit = Literal["milliseconds", "microseconds", "nanoseconds"]
"""The unit of a number that is a time, where the event does not say it."""
DecimalTexts = Literal["base64", "number"]
"""What a text is in a decimal, where the event does not say it: the bytes of the unscaled number, or the number."""

PER_SECOND: Mapping[str, int] = {"milliseconds": 1_000, "microseconds": 1_000_000, "nanoseconds": 1_000_000_000}

ROW_OPERATIONS = frozenset("cur")
"""Operations after which there is a row: it was created, updated, or read by a snapshot."""
DELETED = "d"
TRUNCATED = "t"
MESSAGE = "m"
"""A message that an application wrote into the database's log (``pg_logical_emit_message``)."""
OPERATIONS = ROW_OPERATIONS | {DELETED, TRUNCATED, MESSAGE}
HEARTBEAT, SCHEMA_CHANGE, TRANSACTION = "heartbeat", "schema_change", "transaction"
"""What headrace names the other events that Debezium may send to the topic of a table."""

SOURCE = ("connector", "name", "db", "schema", "table", "snapshot", "txId")
"""The fields of the source that are kept, as texts."""

BESIDE = ("op", "position", "before", "changed_at", "source", "transaction")
"""The columns beside the row, in their order."""


def beside(row: str) -> str:
    """The DDL of the columns beside a row, whose own type in DDL is ``row``."""
    source = ", ".join(f"{name}: STRING" for name in SOURCE)
    return (
        f"op STRING, position BIGINT, before {row}, changed_at TIMESTAMP, source STRUCT<{source}>, "
        "transaction STRUCT<id: STRING, total_order: BIGINT, data_collection_order: BIGINT>"
    )


OF_CHANGE = frozenset({"__op", "__deleted"})
"""What a row in flattened form says of its change. A table may have columns such as op and after: these come first."""
_SOURCES = (
    *("version", "connector", "name", "ts_ms", "ts_us", "ts_ns", "snapshot", "db", "sequence", "schema", "table"),
    *("collection", "txId", "lsn", "xmin", "origin", "origin_lsn"),
    *("server_id", "gtid", "file", "pos", "row", "thread", "query"),
    *("ord", "h", "tord", "stxnid", "lsid", "txnNumber", "wallTime"),
    *("change_lsn", "commit_lsn", "event_serial_no"),
    *("scn", "commit_scn", "lcr_position", "rs_id", "ssn", "redo_thread", "redo_sql", "user_name", "row_id"),
    *("start_scn", "start_ts_ms", "commit_ts_ms"),
)
"""The fields of a source: of every one, of PostgreSQL, of MySQL, of MongoDB, of SQL Server and Db2, and of Oracle."""
_ADDED = OF_CHANGE | {f"__{name}" for name in (*_SOURCES, "total_order", "data_collection_order", "updateDescription")}
_ADDED_OF = ("__source_", "__transaction_", "__updateDescription_", "__before_", "__after_")


def is_envelope(columns: Mapping[str, Any]) -> bool:
    """Whether decoded events with these columns are envelopes. ``columns``: a tree of `headrace.stream.ddl.type_tree`.

    Both the definition and the tasks ask it: what the columns are taken for is what they are read as.
    """
    row = columns.get("after")
    parts = (row, columns.get("source", {}), columns.get("transaction", {}))
    return (
        columns.get("op") == "STRING"
        and all(isinstance(part, dict) for part in parts)
        and columns.get("before", row) == row
        and not columns.keys() & OF_CHANGE
    )


def row_columns(columns: Sequence[tuple[str, str]], tree: Mapping[str, Any]) -> str:
    """The type in DDL of the rows within decoded events that have these columns (names and types).

    Events are envelopes, or rows in flattened form. ``tree``: as `is_envelope` takes it. Raises ValueError if they are
    neither.
    """
    if is_envelope(tree):
        return dict(columns)["after"]
    row = [(name, kind) for name, kind in columns if not _is_added(name)]
    if row and len(row) < len(columns):
        return ", ".join(f"`{name.replace('`', '``')}` {kind}" for name, kind in row)
    if tree.get("op") == tree.get("after") == "STRING":
        raise ValueError(
            "describes events whose row is a text, as MongoDB's documents are, which are read in JSON only: let "
            "Debezium write them with JsonConverter, and give a DebeziumDecoder fields in place of events"
        )
    if isinstance(tree.get("after"), dict) and tree.get("before", tree["after"]) != tree["after"]:
        raise ValueError(
            "describes no change events: before has other columns than after, or its types are written otherwise"
        )
    raise ValueError(
        "describes no change events: its columns are neither an envelope (op, before, after), nor a row with columns "
        "such as __deleted"
    )


def _is_added(name: str) -> bool:
    """Whether Debezium adds a field of this name to a row in flattened form, and the table has no such column."""
    return name in _ADDED or name.startswith(_ADDED_OF)


class Meaning(StrEnum):
    """What a value stands for, beyond its type in JSON."""

    DATE = "date"
    TIME_OF_DAY = "time of day"
    TIME = "time"
    LOCAL_TEXT = "time as text, with a Z that says nothing"
    DECIMAL = "decimal"
    GEOMETRY = "geometry"
    TEXT = "text"


@dataclass(frozen=True, slots=True)
class Said:
    """What a schema says of the values of a place. ``per_second``: of a time's number. ``scale``: of a decimal; None if
    each value has its own."""

    meaning: Meaning | None = None
    per_second: int = 0
    scale: int | None = None


def _times(meaning: Meaning, *names: tuple[str, int]) -> dict[str, Said]:
    return {name: Said(meaning, per_second) for name, per_second in names}


_CONNECT = "org.apache.kafka.connect.data"
_DECIMAL = f"{_CONNECT}.Decimal"
SEMANTIC_TYPES: Mapping[str, Said] = {
    "io.debezium.time.Date": Said(Meaning.DATE),
    f"{_CONNECT}.Date": Said(Meaning.DATE),
    **_times(
        Meaning.TIME_OF_DAY,
        ("io.debezium.time.Time", 1_000),
        ("io.debezium.time.MicroTime", 1_000_000),
        ("io.debezium.time.NanoTime", 1_000_000_000),
        (f"{_CONNECT}.Time", 1_000),
    ),
    **_times(
        Meaning.TIME,
        ("io.debezium.time.Timestamp", 1_000),
        ("io.debezium.time.MicroTimestamp", 1_000_000),
        ("io.debezium.time.NanoTimestamp", 1_000_000_000),
        (f"{_CONNECT}.Timestamp", 1_000),
    ),
    "io.debezium.time.IsoDate": Said(Meaning.LOCAL_TEXT),
    "io.debezium.time.IsoTime": Said(Meaning.LOCAL_TEXT),
    "io.debezium.time.IsoTimestamp": Said(Meaning.LOCAL_TEXT),
    _DECIMAL: Said(Meaning.DECIMAL, scale=0),
    "io.debezium.data.VariableScaleDecimal": Said(Meaning.DECIMAL),
    "io.debezium.data.geometry.Point": Said(Meaning.GEOMETRY),
    "io.debezium.data.geometry.Geometry": Said(Meaning.GEOMETRY),
    "io.debezium.data.geometry.Geography": Said(Meaning.GEOMETRY),
}
"""By the name of a schema. Values of all other names (zoned times, intervals, UUID, JSON, XML, enums, bits, vectors,
durations) are what they are in JSON."""
_TEXT = Said(Meaning.TEXT)
PLAIN = Said()
"""Of a value that a schema says no more of: a text in a decimal is a number."""


def said_of_places(schema: Any, place: str = "$") -> Iterator[tuple[str, Said]]:
    """What a schema in Connect's JSON says of each place, such as ``$.total`` or ``$.tags[]``."""
    if not isinstance(schema, dict):
        return
    yield place, _said(schema)
    kind = schema.get("type")
    if kind == "struct":
        fields = schema.get("fields")
        for field in fields if isinstance(fields, list) else ():
            if isinstance(field, dict):
                yield from said_of_places(field, f"{place}.{field.get('field')}")
    elif kind in ("array", "map"):
        yield from said_of_places(schema.get("items" if kind == "array" else "values"), f"{place}[]")


def _said(schema: Mapping[str, Any]) -> Said:
    name = schema.get("name")
    if name == _DECIMAL and schema.get("type") == "bytes":
        parameters = schema.get("parameters")
        scale = parameters.get("scale") if isinstance(parameters, dict) else None
        return Said(Meaning.DECIMAL, scale=int(str(scale))) if _is_whole(scale) else PLAIN
    otherwise = _TEXT if schema.get("type") == "string" else PLAIN
    return SEMANTIC_TYPES.get(name, otherwise) if isinstance(name, str) else otherwise


_MOST_SCALED = 1_000
_MOST_DIGITS = 20
"""Texts with more are no numbers of 64 bits, and Python refuses to read texts of some thousands."""


def _is_whole(scale: Any) -> bool:
    if isinstance(scale, str):
        return len(scale) <= _MOST_DIGITS and scale.removeprefix("-").isdecimal() and abs(int(scale)) < _MOST_SCALED
    return isinstance(scale, int) and not isinstance(scale, bool) and abs(scale) < _MOST_SCALED


_QUOTED = re.compile(r'"(\d+)"')
MYSQL_ROWS, MYSQL_BYTES, MYSQL_FILES = 1 << 11, 1 << 32, 1 << 20
_MOST = (1 << 63) - 1


def position(op: str | None, source: Mapping[str, Any]) -> int | None:
    """The source's position as a number that grows with every change of a row; None if there is none that does.

    PostgreSQL: the position in the write-ahead log (LSN). That of a snapshot's row is one less, as the first change
    after the snapshot may be at the very position of it. A change that was written before a snapshot and committed
    after it is below the snapshot's rows, and the pair ``sequence`` does not order them either. MySQL and MariaDB: the
    number of the binlog file, the position and the row in it. MongoDB: the seconds and the ordinal of the cluster's
    time, outside of transactions. In SQL Server and Oracle a position has more than 63 bits, or is that of several
    changes of a row.
    """
    given = _POSITIONS.get(str(source.get("connector")))
    number = None if given is None else given(op, source)
    return number if number is not None and 0 <= number <= _MOST else None


def _postgres(op: str | None, source: Mapping[str, Any]) -> int | None:
    # A row of an incremental snapshot has its position in the sequence only: the last commit, and the position.
    lsn = _number(source.get("lsn")) or _number((_QUOTED.findall(str(source.get("sequence"))) or [None])[-1])
    return None if not lsn else lsn - (op == "r")


def _mysql(_: str | None, source: Mapping[str, Any]) -> int | None:
    number = _number(str(source.get("file") or "").rpartition(".")[2])
    at, row = _number(source.get("pos")), 0 if source.get("row") is None else _number(source.get("row"))
    if number is None or at is None or row is None:
        return None
    fits = number < MYSQL_FILES and at < MYSQL_BYTES and row < MYSQL_ROWS
    return (number * MYSQL_BYTES + at) * MYSQL_ROWS + row if fits else None


def _mongodb(_: str | None, source: Mapping[str, Any]) -> int | None:
    at, ordinal = _number(source.get("ts_ms")), _number(source.get("ord"))
    if at is None or ordinal is None or source.get("txnNumber") is not None or ordinal >= 1 << 31:
        return None
    return at // 1_000 * (1 << 31) + ordinal


def _number(value: Any) -> int | None:
    """The whole number that is no less than 0, also of a text."""
    if isinstance(value, str):
        return int(value) if len(value) <= _MOST_DIGITS and value.isascii() and value.isdecimal() else None
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


_POSITIONS = {"postgresql": _postgres, "mysql": _mysql, "mariadb": _mysql, "mongodb": _mongodb}
