"""The ledger as Airflow's tasks and triggers open it: by URL, or by an Airflow connection."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from airflow.sdk.bases.hook import BaseHook

from headrace.errors import HeadraceError

if TYPE_CHECKING:
    from airflow.sdk import Connection

    from headrace.ledger import Ledger
    from headrace.stream import Stream

CONNECTION_PREFIX = "connection:"


class LedgerConnectionError(HeadraceError):
    """The Airflow connection does not say which database the ledger is in."""


class LedgerHook(BaseHook):
    """Opens the ledger of a stream.

    :param ledger: what ``Stream.ledger`` holds: a SQLAlchemy URL without a password, or ``connection:<conn_id>``.
    :param ledger_conn_id: the connection's id alone, in place of ``ledger``.

    A connection has the type ``headrace_ledger`` (or ``postgres``): host, port, login, password, and the
    database's name as schema. Without a host the schema is the absolute path of an SQLite file.
    """

    conn_name_attr = "ledger_conn_id"
    default_conn_name = "headrace_ledger_default"
    conn_type = "headrace_ledger"
    hook_name = "headrace ledger"

    def __init__(self, ledger: str | None = None, *, ledger_conn_id: str = default_conn_name, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.ledger_conn_id = ledger_conn_id
        self._ledger = ledger or f"{CONNECTION_PREFIX}{ledger_conn_id}"

    @classmethod
    def get_ui_field_behaviour(cls) -> dict[str, Any]:
        """The connection form's fields, as Airflow asks for them."""
        return {
            "hidden_fields": ["extra"],
            "relabeling": {"schema": "Database", "host": "Host (empty: SQLite)"},
            "placeholders": {"host": "db.example.com", "port": "5432", "schema": "headrace, or /data/ledger.db"},
        }

    def url(self) -> str:
        """The SQLAlchemy URL, with its password where the connection has one: never to be logged."""
        if not self._ledger.startswith(CONNECTION_PREFIX):
            return self._ledger
        return connection_url(self.get_connection(self._ledger.removeprefix(CONNECTION_PREFIX)))

    async def aurl(self) -> str:
        """`url` for an event loop, where a blocking look-up of the connection would be a deadlock."""
        if not self._ledger.startswith(CONNECTION_PREFIX):
            return self._ledger
        return connection_url(await self.aget_connection(self._ledger.removeprefix(CONNECTION_PREFIX)))

    def get_conn(self) -> Ledger:
        """The open ledger, migrated if need be; the caller closes it."""
        return _open(self.url())

    async def aget_conn(self) -> Ledger:
        """`get_conn` for an event loop; the caller closes it in a thread."""
        return await asyncio.to_thread(_open, await self.aurl())

    @contextmanager
    def opened(self) -> Iterator[Ledger]:
        """The ledger for the length of a ``with`` block."""
        ledger = self.get_conn()
        try:
            yield ledger
        finally:
            ledger.close()

    def test_connection(self) -> tuple[bool, str]:
        """Airflow's "Test" button: whether the ledger opens and answers."""
        try:
            with self.opened() as ledger:
                return True, f"The ledger holds {len(ledger.streams.list())} stream(s)."
        except Exception as error:  # the button shows whatever went wrong
            return False, str(error)


def register(ledger: Ledger, stream: Stream) -> None:
    """Tell the ledger of the stream, as it is declared now; the same declaration again changes nothing."""
    ledger.streams.register(
        stream.name,
        stream.to_json(),
        batch_interval_ms=stream.batch_interval_ms,
        block_interval_ms=stream.block_interval_ms,
        outputs=[output.id for output in stream.outputs],
        max_concurrent_batches=stream.limits.max_concurrent_batches,
    )


def connection_url(connection: Connection) -> str:
    """The SQLAlchemy URL of an Airflow connection.

    Only the fields named here are read, never the extra's at large: who edits connections is trusted less than who
    writes DAGs.
    """
    from sqlalchemy.engine import URL

    if not connection.schema:
        raise LedgerConnectionError(
            f"The connection {connection.conn_id!r} names no database.",
            remedy="Fill in its schema: the database's name, or without a host the path of an SQLite file.",
        )
    if not connection.host:
        path = connection.schema if connection.schema.startswith("/") else f"/{connection.schema}"
        return f"sqlite:///{path}"
    url = URL.create(
        "postgresql+psycopg",
        username=connection.login,
        password=connection.password,
        host=connection.host,
        port=connection.port,
        database=connection.schema,
    )
    return url.render_as_string(hide_password=False)


def _open(url: str) -> Ledger:
    # SQLAlchemy's engine and the migrations have no place in a DAG file's parsing.
    from headrace.ledger import Ledger

    return Ledger.open(url)
