"""Creates the engines with the settings that the ledger relies on. Each process has one engine per database."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
import weakref
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sqlalchemy import Connection, Engine, QueuePool, create_engine, event
from sqlalchemy.engine import URL
from sqlalchemy.exc import DisconnectionError

from headrace.ledger.errors import LedgerMissingError, LedgerUrlError
from headrace.ledger.tables import dump_json

# How long a writer waits for another before it gives up. Writes take milliseconds, so this is far more than enough.
LOCK_TIMEOUT_MS = 30_000
# The number of threads of one process that can be in a transaction at once. Others wait for a connection, as long as
# for a lock.
POOL_SIZE = 5
POOL_OVERFLOW = 20
# A table that ledgers of all versions have, and Airflow's metadata database does not.
_OURS = "batch_attempts"
# The execution option of a transaction that only reads.
READS = "headrace_reads"

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
        _require_file(Path(url.database or ""), create=create)
    with _sharing:
        engine = _shared.get(url)
        if engine is None:
            engine = _sqlite_engine(url) if is_sqlite else _postgres_engine(url)
            _shared[url] = engine
        return engine


def _require_file(path: Path, *, create: bool) -> None:
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


def connect_file(url: URL, *, lock_timeout_ms: int = LOCK_TIMEOUT_MS) -> sqlite3.Connection:
    """Connect to a SQLite ledger's file, which has to be there, without a transaction."""
    # mode=rw: a file that was deleted is an error, not a new and empty ledger.
    return sqlite3.connect(
        f"file:{quote(str(Path(url.database or '')))}?mode=rw",
        uri=True,
        timeout=lock_timeout_ms / 1000,
        check_same_thread=False,
        # The driver must not begin transactions; on_begin does.
        isolation_level=None,
    )


def _sqlite_engine(url: URL) -> Engine:
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
        # Has an effect only on macOS: the drive flushes its cache too (as in headrace.wal.local_storage).
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
        reads = connection.get_execution_options().get(READS, False)
        connection.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")

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


def _postgres_engine(url: URL) -> Engine:
    # Import psycopg only if the ledger is on Postgres.
    from headrace.ledger.postgres_engine import postgres_engine

    return postgres_engine(url)
