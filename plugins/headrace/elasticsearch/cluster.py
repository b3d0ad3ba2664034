"""The addresses of an Elasticsearch cluster and its credentials, from an Airflow connection or from plain URLs."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, Self
from urllib.parse import urlsplit

from headrace.connections import Connection, resolve
from headrace.elasticsearch.errors import IndexingOptionsError

DEFAULT_PORT = 9200

ALLOWED_EXTRA = frozenset(
    {
        "api_key",
        "bearer_token",
        "ca_certs",
        "verify_certs",
        "client_cert",
        "client_key",
        "ssl_assert_fingerprint",
        "http_compress",
        "path_prefix",
    }
)
"""The keys that a connection's extra may have. Files (ca_certs, ...) must exist on the executors' hosts."""


@dataclass(frozen=True, slots=True)
class Node:
    """One node's address."""

    scheme: str
    host: str
    port: int
    path_prefix: str = ""

    def __str__(self) -> str:
        return f"{self.scheme}://{self.host}:{self.port}{self.path_prefix}"


class ClusterSettings(Protocol):
    """What an output, or the options of a write, say of the cluster: an Airflow connection's id, or the hosts' URLs."""

    @property
    def connection(self) -> str | None: ...

    @property
    def hosts(self) -> tuple[str, ...]: ...


@dataclass(frozen=True, slots=True)
class Cluster:
    """An Elasticsearch cluster and the credentials for it, which its repr does not show.

    Each process makes its own from the connection. It is never part of options, plans or tasks.
    """

    nodes: tuple[Node, ...]
    authorization: str | None = field(default=None, repr=False)
    """The value of the Authorization header."""
    verify_certs: bool = True
    ca_certs: str | None = None
    client_cert: str | None = None
    client_key: str | None = None
    ssl_assert_fingerprint: str | None = None
    http_compress: bool = False

    @classmethod
    def of(cls, settings: ClusterSettings, environ: Mapping[str, str] | None = None) -> Self:
        """The cluster of an output. Resolves the connection, if there is one, at the time of the call.

        ``environ``: where the connection is looked up; by default this process's environment.
        """
        if settings.connection:
            return cls.from_connection(resolve(settings.connection, environ))
        return cls(nodes=tuple(_node(host, default_scheme="http") for host in settings.hosts))

    @classmethod
    def from_connection(cls, connection: Connection) -> Self:
        """Build a cluster from an Airflow connection.

        Of type ``https`` (as a URI ``https://login:password@host`` is) it connects by TLS, as with ``schema`` https.

        Raises IndexingOptionsError if the connection has no host, more than one credential, an unknown or invalid
        setting, or asks for both http and https; ConnectionTypeError if it is of another type.
        """
        connection.check_type("elasticsearch", "https", "http")
        extra: Mapping[str, Any] = connection.extra or {}
        unknown = sorted(set(extra) - ALLOWED_EXTRA)
        if unknown:
            raise IndexingOptionsError(
                f"The extra of connection {connection.id!r} has {', '.join(map(repr, unknown))}.",
                remedy=f"It may have {', '.join(sorted(ALLOWED_EXTRA))}.",
            )
        if not connection.host:
            raise IndexingOptionsError(
                f"Connection {connection.id!r} has no host.",
                remedy="Give the host of Elasticsearch, or several separated by commas.",
            )
        scheme = _scheme(connection)
        prefix = str(extra.get("path_prefix") or "").rstrip("/")
        nodes = tuple(
            _node(host.strip(), default_scheme=scheme, default_port=connection.port or DEFAULT_PORT, prefix=prefix)
            for host in connection.host.split(",")
        )
        if scheme == "https" and any(node.scheme != "https" for node in nodes):
            # Its credentials would go over the network in clear, although it asks for TLS.
            raise IndexingOptionsError(
                f"Connection {connection.id!r} asks for https, and one of its hosts for http.", remedy="Keep one."
            )
        return cls(
            nodes=nodes,
            authorization=_authorization(connection, extra),
            verify_certs=_boolean(extra.get("verify_certs", True), "verify_certs", connection.id),
            ca_certs=extra.get("ca_certs"),
            client_cert=extra.get("client_cert"),
            client_key=extra.get("client_key"),
            ssl_assert_fingerprint=extra.get("ssl_assert_fingerprint"),
            http_compress=_boolean(extra.get("http_compress", False), "http_compress", connection.id),
        )


def _scheme(connection: Connection) -> str:
    by_type = connection.conn_type if connection.conn_type in ("http", "https") else None
    scheme = (connection.schema or by_type or "http").lower()
    if scheme not in ("http", "https"):
        raise IndexingOptionsError(
            f"The schema of connection {connection.id!r} is neither http nor https.",
            remedy="Set it to https. A path belongs into path_prefix in its extra.",
        )
    if by_type == "https" != scheme:
        raise IndexingOptionsError(
            f"Connection {connection.id!r} is of type https, and its schema is http.", remedy="Keep one."
        )
    return scheme


def _node(text: str, *, default_scheme: str, default_port: int = DEFAULT_PORT, prefix: str = "") -> Node:
    parts = urlsplit(text if "://" in text else f"{default_scheme}://{text}")
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
        # The text may hold a credential, so it is not repeated.
        raise IndexingOptionsError(
            "One of the hosts is not an http or https URL, or holds credentials.",
            remedy="Write it as https://host:9200.",
        )
    return Node(parts.scheme, parts.hostname, parts.port or default_port, parts.path.rstrip("/") or prefix)


def _authorization(connection: Connection, extra: Mapping[str, Any]) -> str | None:
    given = [name for name in ("api_key", "bearer_token") if extra.get(name)] + (["login"] if connection.login else [])
    if len(given) > 1:
        raise IndexingOptionsError(
            f"Connection {connection.id!r} has more than one credential: {', '.join(given)}.", remedy="Keep one."
        )
    if extra.get("api_key"):
        key = extra["api_key"]
        text = ":".join(key) if isinstance(key, list | tuple) else str(key)
        return f"ApiKey {_base64(text) if ':' in text else text}"
    if extra.get("bearer_token"):
        return f"Bearer {extra['bearer_token']}"
    if connection.login:
        return f"Basic {_base64(f'{connection.login}:{connection.password or str()}')}"
    return None


def _base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode("ascii")


def _boolean(value: object, name: str, connection_id: str) -> bool:
    if isinstance(value, bool):
        return value
    if str(value).lower() in ("true", "false"):
        return str(value).lower() == "true"
    raise IndexingOptionsError(f"{name!r} in the extra of connection {connection_id!r} is neither true nor false.")
