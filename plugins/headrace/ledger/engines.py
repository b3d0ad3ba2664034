"""Opens the engine of a ledger's database: one for each process and database. Writes to a SQLite file begin in turn.

SQLite has no queue: a writer that finds the file locked polls it, less and less often. A process that writes all the
time unlocks the file for microseconds, and hundreds of its writes come before one of another process. So a write takes
a turn before it begins, and keeps it until it has begun: the process that writes all the time gets its next turn after
those that wait.

A turn is a lock on a file of its own. If a process closed the database's file, it would lose the locks that SQLite has
on it (https://sqlite.org/howtocorrupt.html, section 2.2). The threads of a process take turns by `thread_turn`, and so
they do for a stream's lock on Postgres: where many want it, another process would wait for all of them.
"""

from __future__ import annotations

import errno
import fcntl
import os
import sqlite3
import threading
import time
import weakref
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

from sqlalchemy import Connection, Engine, QueuePool, create_engine, event
from sqlalchemy.engine import URL
from sqlalchemy.exc import DisconnectionError

from headrace.ledger.errors import LedgerMissingError, LedgerUrlError
from headrace.ledger.model import dump_json

# How long a writer waits for another before it gives up. Writes take milliseconds, so this is far more than enough.
LOCK_TIMEOUT_MS = 30_000
# How often a writer polls for its turn, and for the unlocked file.
_POLL_SECONDS = 0.001
# SQLite's result code without what it adds to it, as in SQLITE_BUSY_RECOVERY.
_ERROR_BITS = 0xFF
# The number of threads of one process that can be in a transaction at once. Others wait for a connection, as long as
# for a lock.
POOL_SIZE = 5
POOL_OVERFLOW = 20
# A table that ledgers of all versions have, and Airflow's metadata database does not.
_OURS = "batch_attempts"
# The execution option of a transaction that only reads.
READS = "headrace_reads"

TURN_SECONDS = 2.0
"""How long a thread waits for its turn. Then it waits for the lock without one: the thread with the turn may be
suspended."""

# In a forked child, a thread that it does not have may hold one.
_turns: dict[Hashable, threading.Lock] = {}
os.register_at_fork(after_in_child=_turns.clear)


@contextmanager
def thread_turn(key: Hashable) -> Iterator[bool]:
    """Wait for the turn of this thread, at most `TURN_SECONDS`. Yields whether it has come; ``key`` names the lock."""
    lock = _turns.setdefault(key, threading.Lock())
    has_come = lock.acquire(timeout=TURN_SECONDS)
    try:
        yield has_come
    finally:
        if has_come:
            lock.release()


def begin_write(connection: sqlite3.Connection, path: Path, *, lock_timeout_ms: int = LOCK_TIMEOUT_MS) -> None:
    """Begin a transaction that writes, in turn with other processes and threads.

    Raises:
        sqlite3.OperationalError: another one wrote for longer than the timeout, or the file cannot be written.
    """
    deadline = time.monotonic() + lock_timeout_ms / 1000
    with _turn(path):
        # SQLite itself would poll less and less often, and the file would be idle in between.
        connection.execute("PRAGMA busy_timeout=0")
        try:
            while True:
                try:
                    connection.execute("BEGIN IMMEDIATE")
                    return
                except sqlite3.OperationalError as error:
                    if error.sqlite_errorcode & _ERROR_BITS != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                        raise
                time.sleep(_POLL_SECONDS)
        finally:
            connection.execute(f"PRAGMA busy_timeout={LOCK_TIMEOUT_MS}")


@contextmanager
def _turn(path: Path) -> Iterator[None]:
    """Wait for a turn, at most `TURN_SECONDS`. Without one, a write still begins once it finds the file unlocked.

    The threads of a process share its turn, since a process has one lock on a file.
    """
    deadline = time.monotonic() + TURN_SECONDS
    with thread_turn(path) as has_come:
        file = _lock_turn(path, deadline) if has_come else None
        try:
            yield
        finally:
            if file is not None:
                # This ends the lock, as the end of the process does.
                os.close(file)


def _lock_turn(path: Path, deadline: float) -> int | None:
    try:
        file = os.open(f"{path}-turn", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        return None
    while True:
        try:
            # A forked child does not inherit this lock, unlike one by flock.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN) or time.monotonic() > deadline:
                os.close(file)
                return None
        time.sleep(_POLL_SECONDS)


def require_file(path: Path, *, create: bool) -> None:
    """Require the ledger's file; with ``create``, make a missing one and its folder. Raises as `open_engine` does."""
    # A process that dies while it makes the ledger leaves an empty file. Opening it would write into it.
    if path.exists() and (create or path.stat().st_size):
        return
    if not create:
        raise LedgerMissingError(
            f"There is no ledger at {path}.",
            remedy="Unpause the stream's DAGs in Airflow: the first task creates it. If they are unpaused, the log of "
            "the task `receive` says what prevents it.",
        )
    try:
        # Only this user may access the ledger. SQLite gives its -wal and -shm files the mode of the file itself.
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.touch(mode=0o600)
    except OSError as error:
        raise LedgerUrlError(f"The ledger's file cannot be made: {error}.") from error


def connect_file(url: URL) -> sqlite3.Connection:
    """Connect to a SQLite ledger's file, which has to be there, without a transaction."""
    # mode=rw: a file that was deleted is an error, not a new and empty ledger.
    return sqlite3.connect(
        f"file:{quote(str(Path(url.database or '')))}?mode=rw",
        uri=True,
        timeout=LOCK_TIMEOUT_MS / 1000,
        check_same_thread=False,
        # The driver must not begin transactions.
        isolation_level=None,
    )


def sqlite_engine(url: URL) -> Engine:
    """Create the engine of the ledger in this file; opens nothing yet."""
    path = Path(url.database or "")
    engine = create_engine(
        url,
        creator=lambda: connect_file(url),
        # Opening a file costs more than a query, and the last one to close it checkpoints the whole WAL.
        poolclass=QueuePool,
        pool_size=POOL_SIZE,
        max_overflow=POOL_OVERFLOW,
        pool_timeout=LOCK_TIMEOUT_MS / 1000,
        hide_parameters=True,
        json_serializer=dump_json,
    )

    @event.listens_for(engine, "connect")
    def on_connect(connection: sqlite3.Connection, record: Any) -> None:
        _use_wal(connection, path)
        # In WAL mode anything less than FULL loses commits at a power cut.
        connection.execute("PRAGMA synchronous=FULL")
        # Has an effect only on macOS: the drive flushes its cache too (as in headrace.wal.storage).
        connection.execute("PRAGMA fullfsync=ON")
        connection.execute("PRAGMA foreign_keys=ON")
        connection.execute(f"PRAGMA busy_timeout={LOCK_TIMEOUT_MS}")
        record.info["file"] = _file_id(path)

    @event.listens_for(engine, "checkout")
    def on_checkout(_connection: Any, record: Any, _proxy: Any) -> None:
        # Writes into a deleted or replaced file would succeed, but be lost.
        if record.info.get("file") != _file_id(path):
            raise DisconnectionError(f"{path} is another file now")

    @event.listens_for(engine, "begin")
    def on_begin(connection: Connection) -> None:
        if connection.get_execution_options().get(READS, False):
            connection.exec_driver_sql("BEGIN")
        else:
            begin_write(cast(sqlite3.Connection, connection.connection.dbapi_connection), path)

    return engine


def _file_id(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _use_wal(connection: sqlite3.Connection, path: Path) -> None:
    """Switch the file to WAL mode. Retries, since SQLite's busy timeout does not cover two concurrent switches."""
    _refuse_others(connection, path)
    deadline = time.monotonic() + LOCK_TIMEOUT_MS / 1000
    while True:
        try:
            (mode,) = connection.execute("PRAGMA journal_mode=WAL").fetchone()
        except sqlite3.OperationalError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)
            continue
        if mode != "wal":
            raise LedgerUrlError(
                f"SQLite cannot keep {path} in WAL mode (it says {mode!r}), as on a network file system.",
                remedy="Put the ledger on a local disk, or use Postgres.",
            )
        return


def _refuse_others(connection: sqlite3.Connection, path: Path) -> None:
    """Refuse another program's database before it is changed: WAL mode would be permanent."""
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if tables and _OURS not in tables:
        raise LedgerUrlError(
            f"{path} is another program's database: it has tables, and none of a ledger's.",
            remedy="Give the ledger a file of its own.",
        )


_shared: weakref.WeakValueDictionary[URL, Engine] = weakref.WeakValueDictionary()
_sharing = threading.Lock()


def _after_fork() -> None:
    # A child shares its parent's sockets and file locks. It must neither use nor close them.
    global _sharing  # noqa: PLW0603  (another thread of the parent may have held it)
    _sharing = threading.Lock()
    for engine in list(_shared.values()):
        engine.dispose(close=False)


os.register_at_fork(after_in_child=_after_fork)


def open_engine(url: URL, *, create: bool) -> Engine:
    """Return the process's engine for the database. With ``create``, a missing SQLite file and its folder are made.

    Raises:
        LedgerMissingError: there is no such SQLite file, and ``create`` is false.
        LedgerUrlError: its folder cannot be made.
    """
    is_sqlite = url.get_backend_name() == "sqlite"
    if is_sqlite:
        require_file(Path(url.database or ""), create=create)
    with _sharing:
        engine = _shared.get(url)
        if engine is None and is_sqlite:
            engine = _shared[url] = sqlite_engine(url)
        elif engine is None:
            # Import psycopg only if the ledger is on Postgres.
            from headrace.ledger.postgres_engine import postgres_engine

            engine = _shared[url] = postgres_engine(url)
        return engine
