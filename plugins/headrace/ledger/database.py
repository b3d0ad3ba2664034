"""Runs the ledger's transactions: reads, and writes that take their locks at the beginning.

SQLite begins every write with BEGIN IMMEDIATE and syncs the disk at each commit. A deferred BEGIN would fail at once
with "database is locked" when it becomes a write, and would let two writers read the same state first. Postgres locks
the stream's row, then reads in new statements: a statement that waited for the lock still sees the tables as they were
before it waited.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    CursorResult,
    Engine,
    Row,
    Select,
    bindparam,
    cast,
    func,
    insert,
    literal,
    or_,
    select,
    text,
)
from sqlalchemy.exc import DBAPIError, IntegrityError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from headrace.clock import Clock, SystemClock
from headrace.ledger.engines import READS, connect_file
from headrace.ledger.errors import (
    LedgerConflictError,
    LedgerError,
    LedgerUnavailableError,
    StreamNotFoundError,
)
from headrace.ledger.tables import StreamRow, streams

# The number of values in one statement: far below the limits, 32,766 parameters in SQLite, 65,535 in Postgres.
CHUNK = 1_000
# The number of rows inserted at once. psycopg sends them under one wait, which `postgres_engine` bounds, and a rebuilt
# ledger may have millions. 5,000 blocks take half a second on a local server.
_ROWS = 5_000
# SQLite's limit for the depth of an expression is 1,000.
_CONDITIONS = 200
# Transient errors: a read-only transaction (25006), or a transaction that was idle (25P03) or took (25P04) too long.
_PASSING_SQLSTATES = frozenset({"25006", "25P03", "25P04"})


@dataclass(frozen=True, slots=True)
class LockedStream:
    """A stream's row under its lock, and the ledger's time once the lock was held.

    ``steps`` are those of the newest definition; ``row`` may have another (`at_revision`).
    """

    row: StreamRow
    now_ms: int
    steps: tuple[str, ...]


class Database:
    """The ledger's database. Safe across threads; a forked child gets its own connections.

    ``clock`` replaces the database's clock, for tests.
    """

    def __init__(self, engine: Engine, *, clock: Clock | None = None) -> None:
        self.engine = engine
        self.is_sqlite = engine.dialect.name == "sqlite"
        # SQLite runs on one machine, so its clock is the database's.
        self.clock = clock or (SystemClock() if self.is_sqlite else None)
        self._reader = engine.execution_options(**{READS: True})
        self._lock_stream = self._lock_statement()

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A transaction that only reads; it never waits for writers."""
        with _translated(), self._reader.begin() as connection:
            yield connection

    @contextmanager
    def snapshot(self) -> Iterator[Connection]:
        """A read-only transaction in which all statements see the same moment."""
        options = {READS: True} if self.is_sqlite else {READS: True, "isolation_level": "REPEATABLE READ"}
        with _translated(), self.engine.execution_options(**options).begin() as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A transaction that writes. It is durable when the block ends, and rolled back when it raises."""
        with _translated(), self.engine.begin() as connection:
            yield connection

    @contextmanager
    def write_stream(self, stream: str) -> Iterator[tuple[Connection, LockedStream]]:
        """A write transaction that holds the stream's lock from its start.

        Every event is added in such a transaction, so event ids ascend in the order of commits.

        Raises:
            StreamNotFoundError: there is no such stream.
        """
        with self.write() as connection:
            yield connection, self.lock_stream(connection, stream)

    def lock_stream(self, connection: Connection, stream: str) -> LockedStream:
        """Take the stream's lock until the transaction ends."""
        row = connection.execute(self._lock_stream, {"stream": stream}).one_or_none()
        if row is None:
            raise StreamNotFoundError(stream)
        found = StreamRow.from_row(row)
        return LockedStream(found, self.clock.now_ms() if self.clock else row.now_ms, found.outputs)

    def write_refusal(self, stream: str) -> str | None:
        """Why a write to the stream cannot begin within a second; None if it can. Nothing is written."""
        try:
            if self.is_sqlite:
                # A connection of its own: those of the engine wait for a lock for longer.
                with _translated(), closing(connect_file(self.engine.url, lock_timeout_ms=1_000)) as connection:
                    connection.execute("BEGIN IMMEDIATE")
            else:
                with self.write() as connection:
                    connection.execute(text("SET LOCAL lock_timeout = '1s'"))
                    self.lock_stream(connection, stream)
        except LedgerUnavailableError as error:
            return error.what
        return None

    def now_ms(self, connection: Connection | None = None) -> int:
        """Return the ledger's time, in milliseconds since the Unix epoch."""
        if self.clock:
            return self.clock.now_ms()
        if connection is not None:
            return int(connection.execute(select(_database_now())).scalar_one())
        with self.read() as own:
            return int(own.execute(select(_database_now())).scalar_one())

    def dispose(self) -> None:
        """Close the pooled connections."""
        self.engine.dispose()

    def _lock_statement(self) -> Select[Any]:
        named = select(streams).where(streams.c.name == bindparam("stream"))
        if self.is_sqlite:
            return named.add_columns(literal(0).label("now_ms"))
        # The outer select reads the clock after the row is locked, not before the wait. key_share: the lock does not
        # block foreign-key checks on the stream.
        locked = named.with_for_update(key_share=True).cte("locked")
        return select(locked, _database_now().label("now_ms"))


class Repository:
    """The ledger's calls for one noun, over the shared database."""

    def __init__(self, database: Database) -> None:
        self._database = database


def chunks(values: Sequence[int]) -> Iterator[Sequence[int]]:
    """Yield the values in order, at most `CHUNK` at a time: databases limit a statement's parameters."""
    for start in range(0, len(values), CHUNK):
        yield values[start : start + CHUNK]


def insert_all(connection: Connection, table: Any, rows: Iterable[dict[str, Any]]) -> None:
    """Insert the rows, if there are any, within the caller's transaction."""
    remaining = iter(rows)
    while part := list(islice(remaining, _ROWS)):
        connection.execute(insert(table), part)


def any_of(connection: Connection, query: Select[Any], conditions: Sequence[ColumnElement[bool]]) -> list[Row[Any]]:
    """Return the rows of the query that meet one of the conditions, in no order. An index has to answer each one.

    Not for a list of keys: SQLite would read the whole table for it.
    """
    rows: list[Row[Any]] = []
    for start in range(0, len(conditions), _CONDITIONS):
        rows += connection.execute(query.where(or_(*conditions[start : start + _CONDITIONS])))
    return rows


def new_id(result: CursorResult[Any]) -> int:
    """Return the id that the database gave the row just inserted."""
    key = result.inserted_primary_key
    if key is None:
        raise LedgerConflictError("The database gave a new row no id.")
    return int(key[0])


def _database_now() -> Any:
    return cast(func.floor(func.extract("epoch", func.clock_timestamp()) * 1000), BigInteger)


@contextmanager
def _translated() -> Iterator[None]:
    """Translate the driver's errors to the ledger's. The engine hides parameters, and none holds a password."""
    try:
        yield
    except IntegrityError as error:
        raise LedgerConflictError(f"The ledger refused a row: {_first_line(error)}.") from error
    except (PoolTimeoutError, DBAPIError, sqlite3.Error) as error:
        if _is_unavailable(error):
            raise LedgerUnavailableError(
                f"The ledger's database failed: {_first_line(error)}.",
                remedy="Check that it runs, that the ledger's URL or connection has the right address, login and "
                "password, and that no other program holds it locked; the step can be repeated.",
            ) from error
        raise LedgerError(f"The ledger's database refused a statement: {_first_line(error)}.") from error


def _is_unavailable(error: Exception) -> bool:
    """Whether the same call may succeed later: the database does not answer, is shutting down, full, locked, or
    read-only since a switchover."""
    if isinstance(error, OperationalError | InterfaceError | PoolTimeoutError | sqlite3.OperationalError):
        return True
    if not isinstance(error, DBAPIError):
        return False
    # psycopg raises some of these as InternalError.
    return error.connection_invalidated or getattr(error.orig, "sqlstate", None) in _PASSING_SQLSTATES


def _first_line(error: Exception) -> str:
    cause = error.orig if isinstance(error, DBAPIError) else error
    lines = str(cause).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(cause).__name__


def read_version(connection: Connection) -> str | None:
    """Return the schema's revision, or None in an empty database."""
    if connection.dialect.name == "sqlite":
        exists = connection.exec_driver_sql("SELECT 1 FROM sqlite_master WHERE name = 'alembic_version'").scalar()
    else:
        exists = connection.exec_driver_sql("SELECT to_regclass('alembic_version')").scalar()
    if exists is None:
        return None
    return connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one_or_none()
