"""Reads connections by id from the environment, in Airflow's own form but without Airflow.

Airflow looks for a connection ``kafka_default`` in ``AIRFLOW_CONN_KAFKA_DEFAULT``, as JSON or as a URI. The
processes that headrace starts (receiver job, batch) get the stream's connections this way, so that a secret is
never on a command line, in the ledger or in a Spark plan. A plain script can set the same variable itself. Executors on
other hosts get them in a file of the application (``headrace.spark.packaging``), which a variable names.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from headrace.errors import HeadraceError
from headrace.secrets import basic_login, remember, secrets_in

ENV_PREFIX = "AIRFLOW_CONN_"

FILE_VARIABLE = "HEADRACE_CONNECTIONS_FILE"
"""The environment variable that names a JSON file of further ``AIRFLOW_CONN_…`` variables and their values."""

ALLOWLIST_VARIABLE = "AIRFLOW__APACHE_KAFKA__CALLBACK_ALLOWLIST"
"""The environment variable of Airflow's option ``[apache_kafka] callback_allowlist``: the functions that a Kafka
connection may name. It travels with the connections."""

CONNECTION_PREFIX = "connection:"
"""The prefix of a ledger's URL that names a connection: ``connection:<its id>``."""


_lookups: list[Callable[[str], str | None]] = []


class ConnectionNotFoundError(HeadraceError):
    """No connection has this id."""


class ConnectionFormatError(HeadraceError):
    """The environment variable holds neither Airflow's JSON nor a URI."""


class ConnectionTypeError(HeadraceError):
    """The connection is of a type that leads to another kind of server."""


@dataclass(frozen=True)
class Connection:
    """A server's address and credentials. ``password`` and ``extra`` are not in ``repr``."""

    id: str
    conn_type: str
    host: str | None = None
    port: int | None = None
    login: str | None = None
    password: str | None = field(default=None, repr=False)
    schema: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def check_type(self, *types: str) -> None:
        """Refuse a connection of a type that is none of these; one without a type is accepted.

        Raises:
            ConnectionTypeError: it is of another type.
        """
        if self.conn_type not in ("", *types):
            raise ConnectionTypeError(
                f"Connection {self.id!r} is of type {self.conn_type!r}, and its server is to be of type {types[0]!r}.",
                remedy=f"Name another connection, or give this one a type of {', '.join(types)}.",
            )

    def to_json(self) -> str:
        """The connection as JSON, which `from_text` and Airflow read."""
        return json.dumps(
            {
                "conn_type": self.conn_type,
                "host": self.host,
                "port": self.port,
                "login": self.login,
                "password": self.password,
                "schema": self.schema,
                "extra": dict(self.extra),
            }
        )


def variable_name(conn_id: str) -> str:
    """The environment variable that holds this connection."""
    return ENV_PREFIX + conn_id.upper()


def look_up_by(find: Callable[[str], str | None]) -> None:
    """Let `resolve` also ask ``find`` for a connection's JSON or URI, which gives None if it has none with this id.

    For a process that has another source than the environment, such as `airflow headrace …`. Only the last one counts.
    """
    _lookups[:] = [find]


def export(conn_ids: Iterable[str]) -> None:
    """Put what `look_up_by` finds into this process's environment, for Spark's processes, which inherit it.

    A connection that is in the environment stays as it is. One that is nowhere is left out: who needs it says so.
    """
    for conn_id in conn_ids:
        name = variable_name(conn_id)
        if not variable_of(name) and (text := _looked_up(conn_id)):
            os.environ[name] = text


def _looked_up(conn_id: str) -> str | None:
    return next((text for find in _lookups if (text := find(conn_id))), None)


def resolve(conn_id: str, environ: Mapping[str, str] | None = None) -> Connection:
    """Look up the connection with this id.

    Raises:
        ConnectionNotFoundError: neither the environment, nor the file that it names, nor `look_up_by` has it.
        ConnectionFormatError: its text is neither JSON nor a URI.
    """
    name = variable_name(conn_id)
    text = variable_of(name, environ) or _looked_up(conn_id)
    if not text:
        raise ConnectionNotFoundError(
            f"Connection {conn_id!r} is not known to this process.",
            remedy=f"Define it in Airflow, or set {name} to Airflow's JSON or URI form of it.",
        )
    return from_text(conn_id, text)


def variable_of(name: str, environ: Mapping[str, str] | None = None) -> str | None:
    """The value of a variable that travels with the connections: from the environment, or the file that it names."""
    environ = os.environ if environ is None else environ
    return environ.get(name) or _of_file(environ.get(FILE_VARIABLE)).get(name)


def _of_file(path: str | None) -> Mapping[str, str]:
    try:
        connections: dict[str, str] = json.loads(Path(path).read_text(encoding="utf-8")) if path else {}
    except FileNotFoundError:
        # The driver does not have the file: its own environment has the connections.
        return {}
    return connections


def from_text(conn_id: str, text: str) -> Connection:
    """Parse Airflow's JSON (``{"conn_type": …}``) or URI (``type://login:password@host:port/schema?…``) form.

    Raises:
        ConnectionFormatError: it is neither.
    """
    try:
        found = _from_json(conn_id, text) if text.lstrip().startswith("{") else _from_uri(conn_id, text)
        remember([found.password, basic_login(found.login, found.password), *secrets_in(dict(found.extra))])
        return found
    except (ValueError, TypeError, AttributeError):
        # The text may hold a password: repeat neither it nor the parser's message, which quotes it.
        raise ConnectionFormatError(
            f"Connection {conn_id!r} in {variable_name(conn_id)} is neither Airflow's JSON nor its URI form.",
            remedy='Write it as {"conn_type": "…", "host": "…", "port": 1234, "extra": {…}}.',
        ) from None


def _from_json(conn_id: str, text: str) -> Connection:
    fields = json.loads(text)
    extra = fields.get("extra") or {}
    if isinstance(extra, str):
        extra = json.loads(extra)
    port = fields.get("port")
    return Connection(
        id=conn_id,
        conn_type=fields.get("conn_type") or "",
        host=fields.get("host") or None,
        port=None if port in (None, "") else int(port),
        login=fields.get("login") or None,
        password=fields.get("password") or None,
        schema=fields.get("schema") or None,
        extra=dict(extra),
    )


def _from_uri(conn_id: str, text: str) -> Connection:
    conn_type, separator, rest = text.partition("://")
    # As in Airflow: type://protocol://login:password@host. The protocol is then part of the host.
    protocol, second, after = rest.partition("://")
    if not second or not protocol.isalpha():
        protocol, after = "", rest
    parts = urlsplit(f"//{after}")
    if not separator or not conn_type:
        raise ValueError("no scheme")
    query: dict[str, Any] = dict(parse_qsl(parts.query))
    extra = query.pop("__extra__", None)
    if extra is not None:
        query = json.loads(extra)
    return Connection(
        id=conn_id,
        conn_type=conn_type.lower().replace("-", "_"),
        host=(f"{protocol}://" if protocol else "") + unquote(parts.hostname) if parts.hostname else None,
        port=parts.port,
        login=unquote(parts.username) if parts.username else None,
        password=unquote(parts.password) if parts.password else None,
        schema=unquote(parts.path.lstrip("/")) or None,
        extra=query,
    )
