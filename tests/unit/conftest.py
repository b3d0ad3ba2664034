"""What makes the unit tests cheap: nothing waits for a disk, and a new ledger's schema is copied instead of migrated.

Both hold for this process only: what a test starts as a process of its own runs as in production. They are applied to
modules that ledgers are imported for: a file without them does not wait for that import.
"""

from __future__ import annotations

import os
import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from sqlalchemy import Connection


@pytest.fixture(scope="module", autouse=True)
def _no_waiting_for_the_disk() -> Iterator[None]:
    """Syncs are for power cuts. Tests of what is synced, when, and what a failed sync does replace these calls."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("fsync", "fdatasync"):
            if hasattr(os, name):
                patch.setattr(os, name, _check_descriptor)
        yield


@pytest.fixture(scope="module", autouse=True)
def _cheap_ledgers() -> Iterator[None]:
    """SQLite does not sync, and a new ledger gets the statements that the migrations come to, in 6 ms of CPU instead of
    46."""
    if "headrace.ledger.database" not in sys.modules:
        yield
        return
    from headrace.ledger import database

    with pytest.MonkeyPatch.context() as patch, _without_sync():
        patch.setattr(database, "upgrade", partial(_copy_or_upgrade, database.upgrade))
        yield


@pytest.fixture
def production_settings() -> Iterator[None]:
    """Ledgers that the test opens after this fixture sync as in production."""
    from sqlalchemy import Engine, event

    event.remove(Engine, "checkout", _use_no_sync)
    yield
    event.listen(Engine, "checkout", _use_no_sync)


@contextmanager
def _without_sync() -> Iterator[None]:
    from sqlalchemy import Engine, event

    event.listen(Engine, "checkout", _use_no_sync)
    yield
    event.remove(Engine, "checkout", _use_no_sync)


def _check_descriptor(descriptor: int) -> None:
    os.fstat(descriptor)


def _use_no_sync(connection: Any, record: Any, _proxy: Any) -> None:
    # At the checkout: the engine's own setting, FULL, is made after everybody else's at the connect.
    if isinstance(connection, sqlite3.Connection) and not record.info.get("no_sync"):
        connection.execute("PRAGMA synchronous=OFF")
        record.info["no_sync"] = True


def _copy_or_upgrade(upgrade: Callable[[Connection], None], connection: Connection) -> None:
    if connection.dialect.name != "sqlite" or _count_tables(connection):
        upgrade(connection)
        return
    for statement in _migrated(upgrade):
        connection.exec_driver_sql(statement)


def _count_tables(connection: Connection) -> int:
    return int(connection.exec_driver_sql("SELECT count(*) FROM sqlite_master").scalar_one())


@cache
def _migrated(upgrade: Callable[[Connection], None]) -> tuple[str, ...]:
    """What the migrations make of an empty database."""
    from sqlalchemy import create_engine

    from headrace.ledger import database

    with create_engine("sqlite://").begin() as connection:
        upgrade(connection)
        made = "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL AND name NOT LIKE 'sqlite_%' ORDER BY rowid"
        statements = connection.exec_driver_sql(made).scalars().all()
        version = database.read_version(connection)
    return (*statements, f"INSERT INTO alembic_version VALUES ('{version}')")
