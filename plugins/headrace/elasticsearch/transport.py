"""Sends one HTTP request to an Elasticsearch cluster. It does not retry.

`Cluster` has the addresses and the credentials, from an Airflow connection or from plain URLs.

Spark starts new Python workers for each batch, so what they import delays every batch. The official client takes half a
second to import, because it also loads its asynchronous transports; urllib3 alone takes a tenth of that. Bodies are
sent as given: the official client would copy each of them twice. And it speaks only to servers of its own version.
"""

from __future__ import annotations

import base64
import binascii
import functools
import gzip
import json
import logging
import random
import ssl
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from email.utils import parsedate_to_datetime
from typing import Any, Protocol, Self
from urllib.parse import unquote, urlsplit

import urllib3
from urllib3.exceptions import HTTPError, ProtocolError

from headrace.connections import Connection, resolve
from headrace.elasticsearch.aws_signature import AWS_EXTRA, AwsIdentity, KeysUnavailableError, RequestSigner
from headrace.elasticsearch.deadline import BYTES_PER_SECOND, Deadline, watched
from headrace.elasticsearch.errors import ElasticsearchRefusedError, IndexingOptionsError
from headrace.elasticsearch.tls import (
    PLAINTEXT_REFUSED,
    FingerprintPool,
    TlsFault,
    TlsFiles,
    says_plaintext_at_tls,
    speaks_tls,
    tls_context,
    tls_fault,
)

logger = logging.getLogger(__name__)

DEFAULT_PORTS = {"http": 80, "https": 443}
"""Those of every URL: a search server behind an ingress or in a cloud listens there, and its own 9200 is named."""

ALLOWED_EXTRA = AWS_EXTRA | frozenset(
    {
        "api_key",
        "bearer_token",
        "cloud_id",
        "ca_certs",
        "verify_certs",
        "client_cert",
        "client_key",
        "ssl_assert_fingerprint",
        "http_compress",
        "path_prefix",
        "proxy",
    }
)
"""The keys that a connection's extra may have. Files (ca_certs, ...) must exist on the executors' hosts."""
# Of the hooks of Airflow's providers and of the official clients. headrace has its own, or has no use for them.
_LEFT_ASIDE = frozenset(
    {
        "timeout",
        "request_timeout",
        "max_retries",
        "retry_on_timeout",
        "retry_on_status",
        "fetch_size",
        "field_multi_value_leniency",
        "opaque_id",
        "connections_per_node",
        "pool_maxsize",
        "maxsize",
        "sniff_on_start",
        "sniff_on_connection_fail",
        "sniff_timeout",
        "sniffer_timeout",
        "ssl_show_warn",
    }
)


@dataclass(frozen=True, slots=True)
class Node:
    """One node's address."""

    scheme: str
    host: str
    port: int
    path_prefix: str = ""
    port_assumed: bool = field(default=False, compare=False)
    """Whether the address names no port, so that it is the one of every such URL."""

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
    proxy: str | None = field(default=None, repr=False)
    """The URL of an HTTP proxy, which may have a login in it."""
    aws: AwsIdentity | None = None
    """Who signs each request, instead of ``authorization``."""

    @classmethod
    def of(cls, settings: ClusterSettings, environ: Mapping[str, str] | None = None) -> Self:
        """The cluster of an output. Resolves the connection, if there is one, at the time of the call.

        ``environ``: where the connection is looked up; by default this process's environment.
        """
        if settings.connection:
            return cls.from_connection(resolve(settings.connection, environ))
        return cls(nodes=tuple(_node(host) for host in settings.hosts))

    @classmethod
    def from_connection(cls, connection: Connection) -> Self:
        """Build a cluster from an Airflow connection.

        Of type ``https`` (as a URI ``https://login:password@host`` is) it connects by TLS, as with ``schema`` https.

        Raises IndexingOptionsError if the connection has no host, more than one credential, an unknown or invalid
        setting, or asks for both http and https; ConnectionTypeError if it is of another type.
        """
        connection.check_type("elasticsearch", "opensearch", "https", "http")
        connection, extra = _taken(connection)
        aws = AwsIdentity.of(connection, extra)
        return cls(
            nodes=_nodes(connection, extra),
            authorization=None if aws else _authorization(connection, extra),
            verify_certs=_boolean(extra.get("verify_certs", True), "verify_certs", connection.id),
            ca_certs=extra.get("ca_certs"),
            client_cert=extra.get("client_cert"),
            client_key=extra.get("client_key"),
            ssl_assert_fingerprint=extra.get("ssl_assert_fingerprint"),
            http_compress=_boolean(extra.get("http_compress", False), "http_compress", connection.id),
            proxy=_proxy(connection, extra),
            aws=aws,
        )


def _taken(connection: Connection) -> tuple[Connection, Mapping[str, Any]]:
    """The connection, and the settings of its extra that headrace takes, under headrace's names."""
    extra = dict(connection.extra)
    # As Airflow's OpenSearch provider has them.
    if "url_prefix" in extra:
        extra.setdefault("path_prefix", extra.pop("url_prefix"))
    if "use_ssl" in extra and _boolean(extra.pop("use_ssl"), "use_ssl", connection.id) and not connection.schema:
        connection = replace(connection, schema="https")
    if unknown := sorted(set(extra) - ALLOWED_EXTRA - _LEFT_ASIDE):
        # Not for each worker of Spark.
        import difflib

        near = [found[0] for name in unknown if (found := difflib.get_close_matches(name, ALLOWED_EXTRA, n=1))]
        raise IndexingOptionsError(
            f"The extra of connection {connection.id!r} has {', '.join(map(repr, unknown))}.",
            remedy=(f"Did you mean {', '.join(near)}? " if near else "")
            + f"It may have {', '.join(sorted(ALLOWED_EXTRA))}.",
        )
    if aside := sorted(set(extra) & _LEFT_ASIDE):
        _log_aside(connection.id, ", ".join(aside))
    return connection, {name: value for name, value in extra.items() if name not in _LEFT_ASIDE}


# Once in a process.
@functools.lru_cache(maxsize=256)
def _log_aside(connection_id: str, names: str) -> None:
    logger.info("%s of connection %r is left aside: headrace sets its own", names, connection_id)


def _nodes(connection: Connection, extra: Mapping[str, Any]) -> tuple[Node, ...]:
    if extra.get("cloud_id"):
        if connection.host:
            raise IndexingOptionsError(
                f"Connection {connection.id!r} has a host and a cloud_id.", remedy="Keep one: the id names the host."
            )
        return (_cloud_node(str(extra["cloud_id"]), connection.id),)
    if not connection.host:
        raise IndexingOptionsError(
            f"Connection {connection.id!r} has no host.",
            remedy="Give the host of the search server, or several separated by commas; or a cloud_id in the extra.",
        )
    scheme = _scheme(connection)
    prefix = str(extra.get("path_prefix") or "").rstrip("/")
    nodes = tuple(
        _node(host.strip(), default_scheme=scheme, default_port=connection.port, prefix=prefix)
        for host in connection.host.split(",")
    )
    if scheme == "https" and any(node.scheme != "https" for node in nodes):
        # Its credentials would go over the network in clear, although it asks for TLS.
        raise IndexingOptionsError(
            f"Connection {connection.id!r} asks for https, and one of its hosts for http.", remedy="Keep one."
        )
    return nodes


def _cloud_node(cloud_id: str, connection_id: str) -> Node:
    """The address in an id of Elastic Cloud: ``label:base64(domain[:port]$deployment$kibana)``."""
    try:
        domain, deployment, *_ = base64.b64decode(cloud_id.rpartition(":")[2], validate=True).decode().split("$")
        host, _, port = domain.partition(":")
        if host and deployment:
            return Node("https", f"{deployment}.{host}", int(port or 443))
    except (binascii.Error, ValueError):
        pass
    raise IndexingOptionsError(
        f"'cloud_id' in the extra of connection {connection_id!r} is not an id of Elastic Cloud.",
        remedy="Copy it from the deployment's page in Elastic Cloud.",
    )


def _proxy(connection: Connection, extra: Mapping[str, Any]) -> str | None:
    proxy = extra.get("proxy")
    if not proxy:
        return None
    parts = urlsplit(str(proxy))
    if parts.scheme not in ("http", "https") or not parts.hostname:
        # The text may hold a credential, so it is not repeated.
        raise IndexingOptionsError(
            f"'proxy' in the extra of connection {connection.id!r} is not an http or https URL.",
            remedy="Write it as http://proxy:3128.",
        )
    if extra.get("ssl_assert_fingerprint"):
        raise IndexingOptionsError(
            f"Connection {connection.id!r} has a proxy and ssl_assert_fingerprint.",
            remedy="Give the authority's certificate as ca_certs instead of the fingerprint.",
        )
    return str(proxy)


def _scheme(connection: Connection) -> str | None:
    """http or https; None if the connection names neither."""
    by_type = connection.conn_type if connection.conn_type in ("http", "https") else None
    scheme = (connection.schema or by_type or "").lower() or None
    if scheme not in ("http", "https", None):
        raise IndexingOptionsError(
            f"The schema of connection {connection.id!r} is neither http nor https.",
            remedy="Set it to https. A path belongs into path_prefix in its extra.",
        )
    if by_type == "https" != scheme:
        raise IndexingOptionsError(
            f"Connection {connection.id!r} is of type https, and its schema is http.", remedy="Keep one."
        )
    return scheme


def _node(text: str, *, default_scheme: str | None = None, default_port: int | None = None, prefix: str = "") -> Node:
    """``default_scheme`` is None if nothing names one; then a host needs a port, and is asked by http."""
    named = "://" in text
    parts = urlsplit(text if named else f"{default_scheme or 'http'}://{text}")
    try:
        port = default_port if parts.port is None else parts.port
    except ValueError:
        port = 0
    if parts.scheme not in DEFAULT_PORTS or not parts.hostname or "@" in parts.netloc or port == 0:
        # The text may hold a credential, so it is not repeated.
        raise IndexingOptionsError(
            "One of the hosts is not an http or https URL, or holds credentials.",
            remedy="Write it as https://host:9200.",
        )
    if port is None and not named and default_scheme is None:
        raise IndexingOptionsError(
            f"The search server's host {parts.hostname!r} has neither a port nor http:// or https://.",
            remedy=f"Write the port, as {parts.hostname}:9200 (port 9200 is no longer assumed); or a URL, "
            "for which port 443 (https) or 80 (http) is the default.",
        )
    assumed = port is None
    return Node(
        parts.scheme, parts.hostname, port or DEFAULT_PORTS[parts.scheme], parts.path.rstrip("/") or prefix, assumed
    )


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


LONGEST_PAUSE_SECONDS = 30.0
"""The longest time for which a node that does not answer is left out."""


@dataclass(frozen=True, slots=True)
class Response:
    """An answer, whatever its status. ``product`` is its header X-Elastic-Product, which only Elasticsearch sends."""

    status: int
    body: bytes
    product: str | None = None
    retry_after_seconds: float | None = None
    """What the answer says of when to ask again."""
    seconds: float = 0.0
    """How long the request took."""

    def json(self) -> Any:
        """The parsed body, or None if it is not JSON, or nested too deep to be read."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):
            return None

    def error(self) -> tuple[str, str]:
        """The type and the reason of an error answer; "unknown" and the body's beginning if it has no such form."""
        return error_of(self.json(), self.body[:300].decode("utf-8", "replace"))


def error_of(parsed: Any, text: str) -> tuple[str, str]:
    """The type and the reason of an error, from the parsed answer; ("unknown", ``text``) if it has no such form."""
    error = parsed.get("error") if isinstance(parsed, dict) else None
    if not isinstance(error, dict):
        return "unknown", encodable(error if isinstance(error, str) else text)
    reason = str(error.get("reason", ""))
    # That of a search says only "all shards failed".
    causes = error.get("root_cause")
    root = causes[0] if isinstance(causes, list) and causes and isinstance(causes[0], dict) else {}
    deeper = str(root.get("reason", ""))
    return str(error.get("type", "unknown")), encodable(reason if deeper in reason else f"{reason}: {deeper}")


def encodable(text: str) -> str:
    """The text with lone surrogates replaced: a reason may quote a document's, and UTF-8 has no form of them. Spark's
    worker could not report an error with one."""
    return text if text.isascii() else text.encode(errors="replace").decode()


class NoAnswerError(Exception):
    """There was no answer: the node is unreachable or took too long. Whether it executed the request is unknown.

    ``seconds``: how long the answer was waited for.
    """

    def __init__(self, what: str, seconds: float = 0.0) -> None:
        super().__init__(what)
        self.seconds = seconds


class Transport(Protocol):
    """Sends one request; may be used from several threads."""

    def request(self, method: str, path: str, body: bytes | None = None) -> Response:
        """Return the answer, with any status. Raises NoAnswerError if there is none."""
        ...

    def close(self) -> None: ...


class ElasticsearchTransport:
    """The transport to a real cluster. It uses the nodes in turn, and leaves one that does not answer out for a while.

    Raises IndexingOptionsError if a certificate's file cannot be read or a fingerprint is invalid.
    """

    def __init__(self, cluster: Cluster, *, connections: int, timeout_seconds: float) -> None:
        """``connections`` is per node. ``timeout_seconds`` is for each whole request: a large one that progresses may
        take longer (`headrace.elasticsearch.deadline`)."""
        self._nodes = _Nodes(
            [_NodePool(node, _pool(cluster, node, connections, timeout_seconds)) for node in cluster.nodes]
        )
        self._signer = RequestSigner(cluster.aws) if cluster.aws else None
        self._by_proxy = cluster.proxy is not None
        self._ca_certs = cluster.ca_certs
        self._timeout_seconds = timeout_seconds
        self._compress = cluster.http_compress
        self._headers = {"accept": "application/json", "user-agent": "headrace"}
        if cluster.authorization:
            self._headers["authorization"] = cluster.authorization
        if cluster.http_compress:
            self._headers["accept-encoding"] = "gzip"

    def request(self, method: str, path: str, body: bytes | None = None) -> Response:
        headers = dict(self._headers)
        if body is not None:
            bulk = path.partition("?")[0].endswith("_bulk")
            headers["content-type"] = "application/x-ndjson" if bulk else "application/json"
            if self._compress:
                headers["content-encoding"] = "gzip"
                body = gzip.compress(body)
        chosen = self._nodes.choose()
        node = chosen.node
        if self._signer is not None:
            try:
                headers |= self._signer.headers(method, f"{node}{path}", body)
            except KeysUnavailableError as error:
                raise NoAnswerError(f"nothing was sent to {node}: {error}") from error
        # A proxy needs the whole URL; through a tunnel it does not see the request.
        target = f"{node}{path}" if self._by_proxy and node.scheme == "http" else node.path_prefix + path
        started = time.monotonic()
        with Deadline(self._timeout_seconds, len(body or b"")) as deadline:
            try:
                answer, data = _answer(chosen.pool, deadline, method, target, body=body, headers=headers)
            except HTTPError as error:
                self._nodes.failed(chosen)
                raise self._no_answer(chosen, deadline, error, time.monotonic() - started) from error
        seconds = time.monotonic() - started
        if deadline.passed:
            # An answer without a length ends with its connection.
            self._nodes.failed(chosen)
            raise _too_slow(node, deadline, seconds)
        if node.scheme == "http" and says_plaintext_at_tls(answer.status, data):
            raise _refused(node, PLAINTEXT_REFUSED)
        if answer.status in _NODE_AWAY:
            self._nodes.failed(chosen)
        else:
            self._nodes.answered(chosen)
        return Response(
            answer.status,
            data,
            answer.headers.get("x-elastic-product"),
            _seconds_of(answer.headers.get("retry-after")),
            seconds,
        )

    def _no_answer(
        self, chosen: _NodePool, deadline: Deadline, error: HTTPError, seconds: float
    ) -> NoAnswerError | ElasticsearchRefusedError:
        if deadline.passed:
            return _too_slow(chosen.node, deadline, seconds)
        if (fault := self._tls_fault(chosen, error)) is not None:
            return _refused(chosen.node, fault)
        return NoAnswerError(f"no answer from {chosen.node}: {error}{_port_hint(chosen.node)}", seconds)

    def _tls_fault(self, chosen: _NodePool, error: HTTPError) -> TlsFault | None:
        """What is wrong with the use of TLS, where that is why there is no answer."""
        node = chosen.node
        if node.scheme == "https":
            return tls_fault(error, self._ca_certs)
        # Elasticsearch closes a connection on which it gets no TLS, and does not say why.
        if self._by_proxy or chosen.asked_for_tls or not isinstance(error, ProtocolError):
            return None
        chosen.asked_for_tls = True
        return PLAINTEXT_REFUSED if speaks_tls(node.host, node.port, min(5.0, self._timeout_seconds)) else None

    def close(self) -> None:
        self._nodes.close()


def _answer(
    pool: urllib3.HTTPConnectionPool,
    deadline: Deadline,
    method: str,
    target: str,
    *,
    body: bytes | None,
    headers: dict[str, str],
) -> tuple[urllib3.BaseHTTPResponse, bytes]:
    """The answer and its whole body. Raises HTTPError."""
    # No redirect is followed: it would send the credentials to another address.
    answer = pool.urlopen(
        method,
        target,
        body=body,
        headers=headers,
        retries=False,
        redirect=False,
        assert_same_host=False,
        preload_content=False,
    )
    parts = []
    for part in answer.stream(_PART_BYTES, decode_content=True):
        parts.append(part)
        deadline.progressed(len(part))
    return answer, b"".join(parts)


def _too_slow(node: Node, deadline: Deadline, seconds: float) -> NoAnswerError:
    return NoAnswerError(
        f"no answer from {node}: it had not ended after {deadline.seconds:.0f} s (request_timeout_seconds, and a "
        f"second for each {BYTES_PER_SECOND} bytes)",
        seconds,
    )


def _seconds_of(retry_after: str | None) -> float | None:
    """The seconds of a header Retry-After, which may name a time instead; None if there is none, or it is neither."""
    if retry_after is None:
        return None
    text = retry_after.strip()
    # Not more digits than a number can have: float would raise.
    if text.isascii() and text.isdigit():
        return float(text[:12])
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None


def _refused(node: Node, fault: TlsFault) -> ElasticsearchRefusedError:
    return ElasticsearchRefusedError(f"The search server at {node} {fault.what}.", remedy=fault.remedy)


def _port_hint(node: Node) -> str:
    if not node.port_assumed:
        return ""
    return f" (port {node.port} is that of {node.scheme}, since the address names none; Elasticsearch's own is 9200)"


# What is read of an answer at once: little, so that an answer over a slow link is seen to progress.
_PART_BYTES = 4 * 1024

# Another node, or the same one later, may answer otherwise.
_NODE_AWAY = frozenset({502, 503, 504})


@dataclass(slots=True, eq=False)
class _NodePool:
    node: Node
    pool: urllib3.HTTPConnectionPool
    failures: int = 0
    """Failures since the last answer."""
    asked_for_tls: bool = False
    """Whether it was asked whether it speaks TLS, since it does not answer in plaintext."""
    left_out_until: float = 0.0


class _Nodes:
    """The nodes of a cluster. The n-th failure in a row, counted from 0, leaves a node out for min(30 s, 1 s * 2^n)."""

    def __init__(self, nodes: list[_NodePool]) -> None:
        # Not every task begins with the same node.
        self._nodes = random.sample(nodes, len(nodes))
        self._turn = 0
        self._lock = threading.Lock()

    def choose(self) -> _NodePool:
        """The next node that is not left out; if all are, the one whose time ends first."""
        if len(self._nodes) == 1:
            return self._nodes[0]
        with self._lock:
            now = time.monotonic()
            usable = [node for node in self._nodes if node.left_out_until <= now]
            if not usable:
                return min(self._nodes, key=lambda node: node.left_out_until)
            self._turn += 1
            return usable[self._turn % len(usable)]

    def failed(self, node: _NodePool) -> None:
        with self._lock:
            pause = min(LONGEST_PAUSE_SECONDS, 2.0 ** min(node.failures, 10))
            node.failures += 1
            node.left_out_until = time.monotonic() + pause

    def answered(self, node: _NodePool) -> None:
        if node.failures:
            with self._lock:
                node.failures, node.left_out_until = 0, 0.0

    def close(self) -> None:
        for node in self._nodes:
            node.pool.close()


def _pool(cluster: Cluster, node: Node, connections: int, timeout_seconds: float) -> urllib3.HTTPConnectionPool:
    common: dict[str, Any] = {
        "port": node.port,
        "timeout": urllib3.Timeout(total=timeout_seconds),
        "maxsize": connections,
        # A thread waits for a free connection; requests_in_flight limits the threads to as many.
        "block": True,
    }
    if node.scheme == "http":
        return watched(_through(cluster.proxy, node, common) or urllib3.HTTPConnectionPool(node.host, **common))
    files = TlsFiles(cluster.ca_certs, cluster.client_cert, cluster.client_key)
    fingerprint = cluster.ssl_assert_fingerprint

    def context() -> ssl.SSLContext:
        return tls_context(files, verify_certs=cluster.verify_certs, by_fingerprint=bool(fingerprint), where=node)

    if fingerprint:
        return watched(FingerprintPool(node.host, fingerprint, context(), context(), **common))
    common |= {"ssl_context": context(), "cert_reqs": "CERT_REQUIRED" if cluster.verify_certs else "CERT_NONE"}
    return watched(_through(cluster.proxy, node, common) or urllib3.HTTPSConnectionPool(node.host, **common))


def _through(proxy: str | None, node: Node, settings: dict[str, Any]) -> urllib3.HTTPConnectionPool | None:
    """The connections to a node through a proxy; None if there is none."""
    if proxy is None:
        return None
    parts = urlsplit(proxy)
    login = f"{unquote(parts.username)}:{unquote(parts.password or '')}" if parts.username else None
    manager = urllib3.ProxyManager(
        parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl(),
        proxy_headers=urllib3.make_headers(proxy_basic_auth=login) if login else None,
        **{name: value for name, value in settings.items() if name != "port"},
    )
    return manager.connection_from_host(node.host, node.port, node.scheme)
