"""Creates the engine of a ledger on Postgres. Every call ends in bounded time, whatever happens to the server.

A running server ends statements itself (``statement_timeout``, ``lock_timeout``). TCP detects a host that is gone
(keepalives, ``tcp_user_timeout``). Neither helps against a server that hangs: its kernel still acknowledges what is
sent to it. So the client limits its own waits too, and closes a connection whose answer is overdue.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Any

import psycopg
from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import URL, ExceptionContext

from headrace.ledger.model import dump_json

# The number of threads of one process that can be in a transaction at once; others wait for a connection.
POOL_SIZE = 5
POOL_OVERFLOW = 20
POOL_SECONDS = 30.0

# Ledger statements take milliseconds; the longest ones wait for another transaction's lock.
LOCK_TIMEOUT_MS = 20_000
STATEMENT_TIMEOUT_MS = 30_000
IDLE_IN_TRANSACTION_MS = 60_000
# Added to the client's bound, so that the server's own error, which says what was slow, comes first.
_ANSWER_SECONDS = 5.0
# For setting up a connection, and for checking whether a pooled one still answers.
_PING_SECONDS = 5.0

_BOUNDS = {
    "statement_timeout": STATEMENT_TIMEOUT_MS,
    "lock_timeout": LOCK_TIMEOUT_MS,
    "idle_in_transaction_session_timeout": IDLE_IN_TRANSACTION_MS,
}
# Selects the settings made for this connection, its role or its database: they are deliberate, and are kept.
_GIVEN = (
    "SELECT name, setting FROM pg_settings WHERE name = ANY(%s) "
    "AND source IN ('client', 'user', 'database', 'database user')"
)
# Defaults for libpq, which the URL can override. A dead host is detected within 16 s, and so is a connection that a
# firewall has forgotten: a block that waits for its answer is then stored by another one within 20 s.
_LIBPQ: dict[str, Any] = {
    "application_name": "headrace",
    "connect_timeout": 10,
    "keepalives": 1,
    "keepalives_idle": 10,
    "keepalives_interval": 3,
    "keepalives_count": 2,
    "tcp_user_timeout": 15_000,
}
# After a switchover the connection leads to a server that is now a standby.
_READ_ONLY = "25006"
_BOUND = "headrace_bound"


class BoundedConnection(psycopg.Connection[Any]):
    """A connection that limits every wait for the server to ``bound_seconds``; then it raises and closes."""

    bound_seconds = _PING_SECONDS

    def wait(self, gen: Generator[Any, Any, Any], *args: Any, **kwargs: Any) -> Any:
        """Run one exchange with the server. Raises OperationalError if it takes too long."""
        return super().wait(self._bounded(gen), *args, **kwargs)

    def _bounded(self, gen: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
        # psycopg resumes the generator whenever the socket is ready, and otherwise every 0.1 s.
        seconds = self.bound_seconds
        deadline = time.monotonic() + seconds
        try:
            wanted = next(gen)
            while True:
                wanted = gen.send((yield wanted))
                if time.monotonic() > deadline:
                    # The answer may still come, and would be taken as the answer to the next statement.
                    self.pgconn.finish()
                    raise psycopg.OperationalError(f"the server did not answer for {seconds:.0f} s")
        except StopIteration as end:
            return end.value


def postgres_engine(url: URL) -> Engine:
    """Create an engine with the settings that the ledger relies on. libpq options in ``url`` take precedence."""
    engine = create_engine(
        url,
        pool_size=POOL_SIZE,
        max_overflow=POOL_OVERFLOW,
        pool_timeout=POOL_SECONDS,
        # Costs one round trip per transaction; in return, no call fails after a server's restart.
        pool_pre_ping=True,
        hide_parameters=True,
        json_serializer=dump_json,
        connect_args={name: value for name, value in _LIBPQ.items() if name not in url.query},
    )

    @event.listens_for(engine, "do_connect")
    def on_do_connect(_dialect: Any, _record: Any, arguments: Any, parameters: Any) -> BoundedConnection:
        return BoundedConnection.connect(*arguments, **parameters)

    @event.listens_for(engine, "connect")
    def on_connect(connection: BoundedConnection, record: Any) -> None:
        record.info[_BOUND] = _set_up(connection)

    @event.listens_for(engine, "checkout")
    def on_checkout(connection: BoundedConnection, record: Any, _proxy: Any) -> None:
        connection.bound_seconds = record.info[_BOUND]

    @event.listens_for(engine, "checkin")
    def on_checkin(connection: BoundedConnection | None, _record: Any) -> None:
        if connection is not None:
            connection.bound_seconds = _PING_SECONDS

    @event.listens_for(engine, "handle_error")
    def on_error(context: ExceptionContext) -> None:
        if getattr(context.original_exception, "sqlstate", None) == _READ_ONLY:
            # The next call reconnects, and reaches the primary if its name points there by then.
            context.is_disconnect = True

    return engine


def _set_up(connection: BoundedConnection) -> float:
    """Set the session's bounds. Returns the seconds that the client waits for a statement."""
    with connection.cursor() as cursor:
        server = cursor.execute("SELECT pg_backend_pid()").fetchone()
        if server != (connection.info.backend_pid,):
            # A pooler is between, which gives a client numbers of its own. In transaction mode clients share a server's
            # session. psycopg numbers prepared statements, so that one would run another's.
            connection.prepare_threshold = None
        # The ledger promises durability, so a server or role that acknowledges before it syncs is overruled.
        cursor.execute(
            "SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off'"
        )
        given = dict(cursor.execute(_GIVEN, [list(_BOUNDS)]).fetchall())
        for name, value in _BOUNDS.items():
            if name not in given:
                cursor.execute(f"SET {name} = {value}")
    connection.commit()
    # 0 means no bound on the server; the client keeps one.
    statement_ms = int(given.get("statement_timeout", 0)) or STATEMENT_TIMEOUT_MS
    return statement_ms / 1000 + _ANSWER_SECONDS


def allow_seconds(connection: Connection, seconds: int) -> None:
    """Let each statement of this transaction take up to ``seconds``: a migration may rewrite a table."""
    connection.exec_driver_sql(f"SET LOCAL statement_timeout = {seconds * 1000}")
    driver: Any = connection.connection.driver_connection
    driver.bound_seconds = seconds + _ANSWER_SECONDS
