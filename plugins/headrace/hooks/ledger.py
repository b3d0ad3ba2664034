"""The hook with which Airflow's tasks and triggers open the ledger: by URL, or by an Airflow connection.

Event loops call the ledger in thread pools (`in_thread`).
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar
from uuid import UUID

from airflow.sdk import get_current_context
from airflow.sdk.bases.hook import BaseHook

from headrace.connections import CONNECTION_PREFIX, variable_name
from headrace.secrets import without_secrets
from headrace.stream_context import StreamContext

if TYPE_CHECKING:
    from airflow.sdk import Connection

    from headrace.ledger import Ledger
    from headrace.stream import Stream


class LedgerHook(BaseHook):
    """Opens the ledger of a stream.

    :param ledger: the value of ``Stream.ledger``: a SQLAlchemy URL without a password, or ``connection:<conn_id>``.
    :param ledger_conn_id: the connection's id alone, instead of ``ledger``.

    A connection has the type ``headrace_ledger`` (or ``postgres``), with host, port, login, password, and the
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

    def get_conn(self, *, create: bool = True) -> Ledger:
        """Open the ledger. The caller closes it.

        Args:
            create: whether to create the ledger in an empty database; otherwise this raises a LedgerError there.

        Raises:
            SchemaError: it has another version's schema; ``headrace ledger migrate`` migrates an older one.
        """
        conn_id = self._connection_id()
        environ = _environ(self.get_connection(conn_id)) if conn_id else None
        return _open(self._ledger, environ=environ, create=create)

    async def aget_conn(self, *, create: bool = True) -> Ledger:
        """`get_conn` for an event loop, where a blocking look-up of the connection would deadlock."""
        conn_id = self._connection_id()
        environ = _environ(await self.aget_connection(conn_id)) if conn_id else None
        return await in_thread(self._ledger, _open, self._ledger, environ=environ, create=create)

    def _connection_id(self) -> str | None:
        if not self._ledger.startswith(CONNECTION_PREFIX):
            return None
        return self._ledger.removeprefix(CONNECTION_PREFIX)

    @contextmanager
    def opened(self) -> Iterator[Ledger]:
        """The ledger for the length of a ``with`` block."""
        ledger = self.get_conn()
        try:
            yield ledger
        finally:
            ledger.close()

    def test_connection(self) -> tuple[bool, str]:
        """Airflow's "Test" button: whether the ledger opens and answers. Creates neither a file nor a table."""
        try:
            with self.get_conn(create=False) as ledger:
                return True, f"The ledger holds {len(ledger.streams.all())} stream(s)."
        except Exception as error:  # the button shows any error
            return False, without_secrets(str(error))


def register(ledger: Ledger, stream: Stream) -> int:
    """Register the stream's definition, and return its revision. The same definition always has the same revision.

    If the calling code is of an older DAG version than the one that declared the stream's newest definition, its own
    revision is returned and the newest definition stays. A definition that requires a restart of the receiver job
    records an event.

    Raises:
        LostLedgerError: the ledger does not know the stream, but the stream's folder shows that another ledger did.
    """
    from headrace.ledger.errors import StreamNotFoundError
    from headrace.ledger.tables import Declared
    from headrace.receiver.health import record_outdated_definition

    try:
        ledger.streams.get(stream.name)
    except StreamNotFoundError:
        # Only then: recovery loads the receivers and Kafka's client, which takes 0.2 s.
        from headrace.batch.recover import refuse_if_lost

        refuse_if_lost(StreamContext(stream, ledger))
    row = ledger.streams.register(stream.name, **Declared.by(stream).columns(), declared_at_ms=_dag_version_ms())
    record_outdated_definition(ledger, stream.name, row.revision)
    return row.revision


def _dag_version_ms() -> int | None:
    """The creation time of the DAG version that this task runs, in milliseconds since the epoch; None outside a task.

    Airflow identifies DAG versions by UUIDs of version 7, which begin with the time. A task has no other value that
    orders the versions of its DAG. The factories put the definition's digest into the DAG's documentation, so that each
    definition has its own DAG version.
    """
    try:
        version = get_current_context()["ti"].dag_version_id
    except (RuntimeError, KeyError, AttributeError):
        return None
    return version.int >> 80 if isinstance(version, UUID) and version.version == 7 else None


def _open(url: str, *, environ: Mapping[str, str] | None, create: bool) -> Ledger:
    # Imported here so that parsing a DAG file does not load SQLAlchemy's engine and the migrations.
    from headrace.ledger import Ledger

    return Ledger.open(url, environ=environ, create=create)


def _environ(connection: Connection) -> dict[str, str]:
    """The connection as the environment variable that the core reads. It is passed for this one look-up only, and not
    set in the environment of Airflow's processes."""
    return {variable_name(connection.conn_id): connection.as_json()}


# A call to a database that hangs holds its thread for half a minute. In asyncio's own pool such calls would block all
# other users of the pool, and other ledgers. Here a ledger has at most ``THREADS`` threads; calls queued behind them
# have not begun, and are cancelled with the task that made them.
THREADS = 4
"""Threads for each ledger and process. A call takes a millisecond, so this is enough for a thousand triggers."""

P = ParamSpec("P")
T = TypeVar("T")

_pools: dict[str, ThreadPoolExecutor] = {}
_making = threading.Lock()
# A forked child has none of its parent's threads.
os.register_at_fork(after_in_child=_pools.clear)


async def in_thread(ledger: str, call: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """Like `asyncio.to_thread`, but in a thread of the pool of the ledger with this URL, which ``call`` blocks on."""
    context = contextvars.copy_context()
    run = partial(context.run, call, *arguments, **options)
    return await asyncio.get_running_loop().run_in_executor(_pool(ledger), run)


def _pool(ledger: str) -> ThreadPoolExecutor:
    with _making:
        pool = _pools.get(ledger)
        if pool is None:
            pool = _pools[ledger] = ThreadPoolExecutor(THREADS, thread_name_prefix="headrace-ledger")
        return pool
