"""The definitions that a stream has had, each under its revision.

An attempt at a batch and a receiver job name the revision that they began with, so that they go on with it when
somebody registers another one meanwhile. The same content has the same revision, however often it comes back.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from sqlalchemy import Connection, Row, func, insert, select

from headrace.ledger.database import LockedStream
from headrace.ledger.errors import RevisionNotFoundError
from headrace.ledger.rows import Declared, StreamRevision, StreamRow
from headrace.ledger.tables import stream_revisions


def keep_revision(connection: Connection, stream: str, declared: Declared, now_ms: int) -> tuple[int, bool]:
    """The revision of this content, and whether it is new. The stream's row exists, and is locked."""
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
    """Keep a definition under this number."""
    key = {"stream": stream, "revision": revision, "digest": declared.digest, "created_at_ms": now_ms}
    connection.execute(insert(stream_revisions).values(**key, **declared.columns()))


def require_revision(connection: Connection, stream: StreamRow, revision: int) -> StreamRow:
    """The stream's row as this revision defines it.

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


def revision_row(row: Row[Any]) -> StreamRevision:
    """A row of ``stream_revisions``."""
    declared = dataclasses.asdict(Declared.of(row))
    return StreamRevision(**declared, revision=row.revision, created_at_ms=row.created_at_ms)


def as_declared(stream: StreamRow, declared: Declared, revision: int) -> StreamRow:
    """The stream's row with this definition in the place of its own."""
    return dataclasses.replace(stream, **{**declared.columns(), "outputs": declared.outputs}, revision=revision)


def at_revision(connection: Connection, locked: LockedStream, revision: int | None) -> LockedStream:
    """The locked stream as this revision defines it; None: as it is defined now.

    Order and slots are the stricter of the two, since attempts by both definitions run beside each other.

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
