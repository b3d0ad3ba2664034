"""Parses a ledger's URL. Passwords come from a connection or from libpq, never from the URL itself."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from headrace.connections import CONNECTION_PREFIX, Connection, resolve
from headrace.ledger.errors import LedgerUrlError

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


def _of_connection(connection: Connection) -> URL:
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
