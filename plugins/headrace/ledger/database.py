"""A ledger's database: its URL, its schema, and its transactions, which lock at the beginning.

SQLite begins every write with BEGIN IMMEDIATE and syncs the disk at each commit. A deferred BEGIN would fail at once
with "database is locked" when it becomes a write, and would let two writers read the same state first. Writes begin in
turn (`headrace.ledger.engines`). On Postgres a write takes the stream's lock, then reads in new statements: a statement
that waited for the lock still sees the tables as they were before it waited.

On Postgres the receivers of a stream share its lock (`Database.write_receiver`): they write only what is their own, so
they do not wait for each other, and the server syncs the transactions that commit at the same time with one write.
Every other write excludes them all, and waits for those that have begun. The lock is an advisory one, not the row's:
its queue is fair, while receivers could share the lock of a row for ever before the allocation that waits for it.

If several processes open a new ledger at once, the first one creates the schema. Only `Ledger.migrate` changes an
existing ledger, since processes of an older headrace may be using it.

Passwords come from a connection or from libpq, never from the URL itself.
"""

from __future__ import annotations

import errno
import logging
import os
import sqlite3
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qs, urlsplit

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    CursorResult,
    Engine,
    Executable,
    Row,
    Select,
    Table,
    bindparam,
    cast,
    func,
    insert,
    literal,
    or_,
    select,
    text,
)
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import (
    ArgumentError,
    DBAPIError,
    IntegrityError,
    InterfaceError,
    OperationalError,
)
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from headrace import connections
from headrace.blocks import ReceiverId
from headrace.clock import Clock, SystemClock
from headrace.connections import CONNECTION_PREFIX, resolve
from headrace.ledger.batches.tables import batches
from headrace.ledger.engines import READS, begin_write, connect_file, thread_turn
from headrace.ledger.errors import (
    LedgerConflictError,
    LedgerError,
    LedgerFullError,
    LedgerLockedError,
    LedgerMissingError,
    LedgerUnavailableError,
    LedgerUrlError,
    SchemaError,
    StreamNotFoundError,
)
from headrace.ledger.model import Model
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
_DISK_FULL, _LOCK_TIMEOUT = "53100", "55P03"
_NO_SPACE = "No space left on device"
# How long `Database.write_refusals` waits, and at least for each stream's lock.
_REFUSED_SECONDS = 1.0
_SHORT_SECONDS = 0.02
# A commit of SQLite takes a few pages of 4 KiB.
_ROOM_BYTES = 64 << 10
# Postgres finds a full disk when it extends a file. A temporary table is gone with the transaction, and not logged.
_EXTEND = text(
    "CREATE TEMPORARY TABLE headrace_room ON COMMIT DROP AS SELECT repeat('x', 1000) FROM generate_series(1, 64)"
)


@dataclass(frozen=True, slots=True)
class LockedStream:
    """A stream's row under its lock, and the ledger's time once the lock was held.

    ``steps`` are those of the newest definition; ``row`` may have another (`at_revision`). ``claimed_ms`` is the first
    batch time after ``row.sealed_until_ms`` that has a batch; None, unless a seal was taken back
    (`ClockCorrections.reopen`).
    """

    row: StreamRow
    now_ms: int
    steps: tuple[str, ...]
    claimed_ms: int | None = None


class Database:
    """The ledger's database. Safe across threads; a forked child gets its own connections.

    ``clock`` replaces the database's clock, for tests.
    """

    def __init__(self, engine: Engine, *, clock: Clock | None = None) -> None:
        self.engine = engine
        self.dialect = engine.dialect.name
        self.is_sqlite = self.dialect == "sqlite"
        # SQLite runs on one machine, so its clock is the database's.
        self.clock = clock or (SystemClock() if self.is_sqlite else None)
        self._reader = engine.execution_options(**{READS: True})
        now = literal(0) if self.is_sqlite else _database_now()
        claimed = select(func.min(batches.c.batch_time_ms)).where(
            batches.c.stream == streams.c.name, batches.c.batch_time_ms > streams.c.sealed_until_ms
        )
        columns = (now.label("now_ms"), claimed.scalar_subquery().label("claimed_ms"))
        self._stream = select(streams, *columns).where(streams.c.name == bindparam("stream"))

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A transaction that only reads; it never waits for writers."""
        with _translated(self.engine.url), self._reader.begin() as connection:
            yield connection

    @contextmanager
    def snapshot(self) -> Iterator[Connection]:
        """A read-only transaction in which all statements see the same moment."""
        options = {READS: True} if self.is_sqlite else {READS: True, "isolation_level": "REPEATABLE READ"}
        with _translated(self.engine.url), self.engine.execution_options(**options).begin() as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A transaction that writes. It is durable when the block ends, and rolled back when it raises."""
        with _translated(self.engine.url), self.engine.begin() as connection:
            yield connection

    @contextmanager
    def write_stream(self, stream_name: str) -> Iterator[tuple[Connection, LockedStream]]:
        """A write transaction that holds the stream's lock from its start.

        Every event but those of blocks is added in such a transaction, so their ids ascend in the order of commits.

        Raises:
            StreamNotFoundError: there is no such stream.
        """
        with self.write() as connection:
            yield connection, self.lock_stream(connection, stream_name)

    @contextmanager
    def write_receiver(self, receiver: ReceiverId) -> Iterator[tuple[Connection, LockedStream]]:
        """A write transaction of one receiver. On Postgres it shares the stream's lock with those of other receivers.

        It may read what `write_stream` writes, and write what belongs to the receiver: its row, its positions, its
        segments and blocks. It adds no event but those of blocks (`Database.settled`).

        Raises:
            StreamNotFoundError: there is no such stream.
        """
        with self.write() as connection:
            yield connection, self.lock_stream(connection, receiver.stream, receiver)

    @contextmanager
    def settled(self, stream_name: str) -> Iterator[Connection]:
        """A transaction that reads the events of blocks in order: all with an id below one that it sees are there.

        Receivers that share the stream's lock may commit in another order than that of their events' ids. So on
        Postgres it waits for those that have begun.
        """
        with self.read() as connection:
            if not self.is_sqlite:
                _lock(connection, stream_name, None)
            yield connection

    def lock_stream(self, connection: Connection, stream_name: str, receiver: ReceiverId | None = None) -> LockedStream:
        """Take the stream's lock until the transaction ends; of ``receiver``, see `write_receiver`."""
        if not self.is_sqlite:
            _lock(connection, stream_name, receiver)
        row = connection.execute(self._stream, {"stream": stream_name}).one_or_none()
        if row is None:
            raise StreamNotFoundError(stream_name)
        stream_row = StreamRow.from_row(row)
        now_ms = self.clock.now_ms() if self.clock else row.now_ms
        return LockedStream(stream_row, now_ms, stream_row.outputs, row.claimed_ms)

    def write_refusals(self, stream_names: Sequence[str]) -> dict[str, LedgerUnavailableError]:
        """Why writes to these streams cannot begin, by stream; those to others can. Nothing is written.

        Waits for a second, for all streams together. A lock that can be taken is not enough: the disk must have room.
        """
        if not stream_names:
            return {}
        refusals: dict[str, LedgerUnavailableError] = {}
        try:
            if self.is_sqlite:
                self._begin_and_end()
                return {}
            self._extend()
            deadline = time.monotonic() + _REFUSED_SECONDS
            for name in stream_names:
                seconds = max(_SHORT_SECONDS, deadline - time.monotonic())
                try:
                    with self.write() as connection:
                        connection.execute(text(f"SET LOCAL lock_timeout = {int(1000 * seconds)}"))
                        self.lock_stream(connection, name)
                except LedgerLockedError as error:
                    refusals[name] = error
        except LedgerUnavailableError as error:
            # This concerns all of them.
            return dict.fromkeys(stream_names, error)
        return refusals

    def _extend(self) -> None:
        """Have Postgres extend a file. Raises LedgerUnavailableError."""
        try:
            with self.write() as connection:
                connection.execute(_EXTEND)
        except LedgerUnavailableError:
            raise
        except LedgerError as error:
            # The role may make no temporary tables; then only a real write finds a full disk.
            logger.debug("%s", error)

    def _begin_and_end(self) -> None:
        """Begin a write to the SQLite file, and end it. Raises LedgerUnavailableError."""
        path = Path(self.engine.url.database or "")
        # A connection of its own: those of the engine wait for a lock for longer.
        with _translated(self.engine.url), closing(connect_file(self.engine.url)) as connection:
            begin_write(connection, path, lock_timeout_ms=int(1000 * _REFUSED_SECONDS))
        # Only a write finds a quota.
        try:
            with tempfile.TemporaryFile(dir=path.parent) as file:
                file.write(bytes(_ROOM_BYTES))
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise _full(self.engine.url, error.strerror or str(error)) from error

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


# In this order, so that there is no deadlock: a transaction waits for its receiver's lock with the stream's lock, and
# for the stream's lock with no other.
_LOCK_RECEIVER = select(
    func.pg_advisory_xact_lock_shared(bindparam("stream", type_=BigInteger)),
    func.pg_advisory_xact_lock(bindparam("receiver", type_=BigInteger)),
)
_LOCK_STREAM = select(func.pg_advisory_xact_lock(bindparam("stream", type_=BigInteger)))


def _lock(connection: Connection, stream_name: str, receiver: ReceiverId | None) -> None:
    if receiver is None:
        key = _lock_key(stream_name)
        with thread_turn(key):
            connection.execute(_LOCK_STREAM, {"stream": key})
    else:
        connection.execute(_LOCK_RECEIVER, {"stream": _lock_key(stream_name), "receiver": _lock_key(str(receiver))})


def _lock_key(name: str) -> int:
    """The number by which Postgres knows the lock. A stream's name has no slash, a receiver's has two."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8, person=b"headrace").digest(), signed=True)


logger = logging.getLogger(__name__)

_Row = TypeVar("_Row", bound=Model)


class Repository:
    """The ledger's calls for one noun, over the shared database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def _rows(self, model: type[_Row], query: Executable) -> list[_Row]:
        """Return the values of all rows of the query, in a transaction of its own."""
        with self._database.read() as connection:
            return model.rows(connection, query)


def chunks(values: Sequence[int]) -> Iterator[Sequence[int]]:
    """Yield the values in order, at most `CHUNK` at a time: databases limit a statement's parameters."""
    for start in range(0, len(values), CHUNK):
        yield values[start : start + CHUNK]


def insert_all(connection: Connection, table: Any, rows: Iterable[dict[str, Any]]) -> None:
    """Insert the rows, if there are any, within the caller's transaction."""
    remaining = iter(rows)
    while part := list(islice(remaining, _ROWS)):
        connection.execute(insert(table), part)


def insert_or_update(table: Table, dialect: str) -> Any:
    """Return an insert of this dialect, ``sqlite`` or ``postgresql``, that can update the row that is already there.

    Only the dialect in use is imported: each takes a twentieth of the time of a command that reads the ledger.
    """
    if dialect == "sqlite":
        from sqlalchemy.dialects import sqlite

        return sqlite.insert(table)
    from sqlalchemy.dialects import postgresql

    return postgresql.insert(table)


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
def _translated(url: URL) -> Iterator[None]:
    """Translate the driver's errors to the ledger's. The engine hides parameters, and none holds a password."""
    began = time.monotonic()
    try:
        yield
    except IntegrityError as error:
        raise LedgerConflictError(f"The ledger refused a row: {_first_line(error)}.") from error
    except (PoolTimeoutError, DBAPIError, sqlite3.Error) as error:
        if _is_unavailable(error):
            raise _unavailable(url, error, time.monotonic() - began) from error
        raise LedgerError(f"The ledger's database refused a statement: {_first_line(error)}.") from error


def _unavailable(url: URL, error: Exception, seconds: float) -> LedgerUnavailableError:
    """The error for a transaction that failed after so many seconds."""
    cause = error.orig if isinstance(error, DBAPIError) else error
    state = getattr(cause, "sqlstate", None)
    code = getattr(cause, "sqlite_errorcode", 0) & 0xFF
    # A new connection is refused by a text alone, when Postgres cannot write the files of its process.
    if code == sqlite3.SQLITE_FULL or state == _DISK_FULL or (not state and _NO_SPACE in str(cause)):
        return _full(url, _first_line(error))
    after = f" after {seconds:.0f} s" if seconds >= _REFUSED_SECONDS else ""
    what = f"The ledger's database failed{after}: {_first_line(error)}."
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED) or state == _LOCK_TIMEOUT:
        return LedgerLockedError(
            what,
            remedy="End what holds its lock, such as an open transaction in a database shell, or a backup.",
        )
    return LedgerUnavailableError(
        what,
        remedy="Check that it runs, that the ledger's URL or connection has the right address, login and "
        "password, and that no other program holds it locked; the step can be repeated.",
    )


def _full(url: URL, why: str) -> LedgerFullError:
    if url.get_backend_name() != "sqlite":
        return LedgerFullError(
            f"The disk of the ledger's database {url.database} on {url.host or 'this host'} is full: {why}.",
            remedy="Make room on the disk of the database server.",
        )
    try:
        disk = os.statvfs(Path(url.database or "").parent)
        free = f"{disk.f_bavail * disk.f_frsize:,} bytes are free"
    except OSError:
        free = "the free bytes are not known"
    return LedgerFullError(
        f"The disk of the ledger {url.database} is full: {why}, {free}.",
        remedy="Make room on that disk, or raise its quota.",
    )


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


# The newest migration's revision. It is here so that opening a ledger need not import Alembic (a test compares them).
HEAD = "0001"
# The advisory lock that serializes migrations of a Postgres database ("headrace" in ASCII, shortened).
_MIGRATION_LOCK = 0x6865616472
MIGRATION_SECONDS = 600
"""How long a migration's statement may take on Postgres: it may rewrite a table of a large ledger."""
MIGRATIONS = Path(__file__).with_name("migrations")


@dataclass(frozen=True, slots=True)
class Migration:
    """The result of `migrate_schema`: the schema's version before (None: there was no ledger) and after."""

    before: str | None
    after: str


def ensure_schema(database: Database, url: str, *, create: bool) -> None:
    """Check the schema; with ``create``, create it in an empty database. ``url`` is for error texts.

    Raises:
        SchemaError: the schema is older or newer than this version's.
        LedgerMissingError: there is none, and ``create`` is false.
    """
    with database.read() as connection:
        version = read_version(connection)
    if version == HEAD:
        return
    if version is not None:
        raise _another_version(version, url)
    if not create:
        raise LedgerMissingError(
            f"The database at {url} is empty: there is no ledger in it.",
            remedy=f"Unpause the stream's DAGs in Airflow: the first task creates it. Or run `{_command(url)}`.",
        )
    migrate_schema(database, only_empty=url)


def migrate_schema(database: Database, *, only_empty: str | None = None) -> Migration:
    """Migrate the schema to the head, in one transaction.

    Args:
        only_empty: the ledger's URL; if given, only an empty database may be changed.

    Raises:
        SchemaError: the schema is newer than this version knows, or must not be changed.
    """
    with database.write() as connection:
        if not database.is_sqlite:
            _allow_migration(connection)
            connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_MIGRATION_LOCK})")
        # Another process may have migrated it while this one waited.
        before = read_version(connection)
        if before is not None and before != HEAD and only_empty is not None:
            raise _another_version(before, only_empty)
        if before != HEAD:
            upgrade(connection)
    return Migration(before, HEAD)


def _another_version(version: str, url: str) -> SchemaError:
    what = f"The ledger's schema is {version}, and this version of headrace needs {HEAD}."
    if any(path.stem.split("_")[0] == version for path in (MIGRATIONS / "versions").glob("*.py")):
        return SchemaError(
            what,
            remedy="Stop what the older headrace runs on it (with its own `headrace streams stop NAME`), then run "
            f"`{_command(url)}`.",
        )
    return SchemaError(what, remedy="It was made by a newer headrace: use that version.")


def _command(url: str) -> str:
    return f"headrace ledger migrate --ledger {url}"


def _allow_migration(connection: Connection) -> None:
    from headrace.ledger.postgres_engine import allow_seconds

    allow_seconds(connection, MIGRATION_SECONDS)


def upgrade(connection: Connection) -> None:
    """Run the migrations that the schema lacks, inside the connection's transaction.

    Raises:
        SchemaError: the schema is a newer headrace's, or Alembic is not installed here.
    """
    try:
        from alembic import command
        from alembic.config import Config
        from alembic.util.exc import CommandError
    except ModuleNotFoundError as error:
        raise SchemaError(
            f"The ledger's schema cannot be brought to {HEAD} here: {error}.",
            remedy="Run `headrace ledger migrate` where headrace[airflow] or headrace[cli] is installed.",
        ) from None

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    try:
        command.upgrade(config, "head")
    except CommandError as error:
        raise SchemaError(
            f"The ledger's schema cannot be brought to {HEAD}: {error}.",
            remedy="It was made by a newer headrace: use that version.",
        ) from error


_SECRET_OPTIONS = {"password", "sslpassword", "passwd", "pwd"}
# The fields of a connection's extra that are passed to libpq: none names a password file or another server.
_LIBPQ_OPTIONS = frozenset(
    {
        *("sslmode", "sslcert", "sslkey", "sslrootcert", "sslcrl", "channel_binding"),
        *("connect_timeout", "tcp_user_timeout"),
        *("keepalives", "keepalives_idle", "keepalives_interval", "keepalives_count"),
        *("options", "application_name", "target_session_attrs", "service"),
    }
)
_POSTGRES_TYPES = {"postgres", "postgresql"}
_SQLITE_FORM = "sqlite:////absolute/path.db"
_POSTGRES_FORM = "postgresql+psycopg://user@host/db"
# The connection type that headrace adds to Airflow, for use without the Postgres provider. No host means a SQLite file.
_OWN_TYPE = "headrace_ledger"


def engine_url(url: str, environ: Mapping[str, str] | None = None) -> URL:
    """Return the SQLAlchemy URL of `sqlite:////…`, `postgresql+psycopg://user@host/db` or `connection:<id>`.

    A connection is looked up in ``environ``, by default this process's environment.

    Raises:
        LedgerUrlError: the URL has another form, a relative path, or a password. The text never contains the URL.
    """
    if url.startswith(CONNECTION_PREFIX):
        return _of_connection(resolve(url.removeprefix(CONNECTION_PREFIX), environ))
    _refuse_secrets(url)
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise LedgerUrlError(
            "The ledger's URL cannot be read.",
            remedy=f"Use {_SQLITE_FORM}, {_POSTGRES_FORM} or connection:<conn_id>.",
        ) from None
    backend = parsed.get_backend_name()
    if backend == "sqlite":
        return _sqlite(parsed.database)
    if backend == "postgresql":
        return parsed.set(drivername="postgresql+psycopg")
    raise LedgerUrlError(
        f"A ledger's URL does not begin with {parsed.drivername!r}.",
        remedy=f"Use {_POSTGRES_FORM}."
        if backend.startswith("postgres")
        else f"Use {_SQLITE_FORM} or {_POSTGRES_FORM}.",
    )


def _refuse_secrets(url: str) -> None:
    try:
        parts = urlsplit(url)
        secret = parts.password is not None or bool(_SECRET_OPTIONS & {key.lower() for key in parse_qs(parts.query)})
    except ValueError:
        secret = "@" in url
    if secret:
        raise LedgerUrlError(
            "The ledger's URL holds a password, and it would travel into task logs and process lists.",
            remedy="Name an Airflow connection (connection:<conn_id>), or leave the password to PGPASSFILE.",
        )


def _sqlite(database: str | None) -> URL:
    if not database or database == ":memory:" or not Path(database).is_absolute():
        raise LedgerUrlError(
            f"A SQLite ledger needs the absolute path of a file, got {database or ':memory:'!r}: "
            "receivers, tasks and triggers open it from different folders.",
            remedy=f"Use {_SQLITE_FORM} (four slashes).",
        )
    return URL.create("sqlite", database=database)


def _of_connection(connection: connections.Connection) -> URL:
    own_file = connection.conn_type == _OWN_TYPE and not connection.host
    if connection.conn_type == "sqlite" or own_file:
        return _sqlite(connection.host or connection.schema)
    if connection.conn_type in (*_POSTGRES_TYPES, _OWN_TYPE):
        # Airflow's connection form stores a field that was left empty as null.
        given = {key: value for key, value in connection.extra.items() if key in _LIBPQ_OPTIONS}
        options = {key: str(value) for key, value in given.items() if value not in (None, "")}
        return URL.create(
            "postgresql+psycopg",
            username=connection.login or None,
            password=connection.password or None,
            host=connection.host or None,
            port=connection.port,
            database=connection.schema or None,
            query=options,
        )
    raise LedgerUrlError(
        f"Connection {connection.id!r} is of type {connection.conn_type!r}; "
        f"a ledger needs {_OWN_TYPE}, postgres or sqlite.",
        remedy="Name another connection in the stream's ledger.",
    )
