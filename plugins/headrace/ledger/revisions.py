"""Stores the definitions that a stream has had, each with its revision.

An attempt at a batch and a receiver job name the revision that they began with, so they keep it when another definition
is registered. The same content always has the same revision.
"""

from __future__ import annotations

import dataclasses

from sqlalchemy import Connection, func, insert, select

from headrace.ledger.database import LockedStream
from headrace.ledger.errors import RevisionNotFoundError
from headrace.ledger.tables import Declared, StreamRow, stream_revisions


def keep_revision(connection: Connection, stream: str, declared: Declared, now_ms: int) -> tuple[int, bool]:
    """Return the revision of this content, and whether it is new. The stream's row must exist and be locked."""
    known = select(stream_revisions.c.revision).where(
        stream_revisions.c.stream == stream, stream_revisions.c.digest == declared.digest
    )
    found = connection.execute(known).scalar_one_or_none()
    if found is not None:
        return int(found), False
    newest = select(func.max(stream_revisions.c.revision)).where(stream_revisions.c.stream == stream)
    revision = (connection.execute(newest).scalar_one() or 0) + 1
    insert_revision(connection, stream, revision, declared, now_ms)
    return revision, True


def insert_revision(connection: Connection, stream: str, revision: int, declared: Declared, now_ms: int) -> None:
    """Store a definition with this revision."""
    key = {"stream": stream, "revision": revision, "digest": declared.digest, "created_at_ms": now_ms}
    connection.execute(insert(stream_revisions).values(**key, **declared.columns()))


def require_revision(connection: Connection, stream: StreamRow, revision: int) -> StreamRow:
    """Return the stream's row as this revision defines it.

    Raises:
        RevisionNotFoundError: the stream has no such revision.
    """
    query = select(stream_revisions).where(
        stream_revisions.c.stream == stream.name, stream_revisions.c.revision == revision
    )
    row = connection.execute(query).one_or_none()
    if row is None:
        raise RevisionNotFoundError(
            f"The ledger has no revision {revision} of stream {stream.name!r}.",
            remedy="It was rebuilt since, or is another ledger: run the task again, which registers its definition.",
        )
    return as_declared(stream, Declared.of(row), revision)


def as_declared(stream: StreamRow, declared: Declared, revision: int) -> StreamRow:
    """Return the stream's row with this definition in place of its own."""
    return dataclasses.replace(stream, **declared.columns(), revision=revision)


def at_revision(connection: Connection, locked: LockedStream, revision: int | None) -> LockedStream:
    """Return the locked stream as this revision defines it; None means the newest.

    Order and slots are the stricter of this and the newest definition, since attempts with both run at the same time.

    Raises:
        RevisionNotFoundError: the stream has no such revision.
    """
    now = locked.row
    if revision is None or revision == now.revision:
        return locked
    row = require_revision(connection, now, revision)
    row = dataclasses.replace(
        row,
        ordered=now.ordered or row.ordered,
        max_concurrent_batches=min(now.max_concurrent_batches, row.max_concurrent_batches),
    )
    return dataclasses.replace(locked, row=row)
