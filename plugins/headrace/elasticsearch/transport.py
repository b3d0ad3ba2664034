"""Sends one HTTP request to Elasticsearch. It does not retry: ``retrying`` and ``bulk_sender`` do.

It uses the official client's transport (TLS, credentials, a pool of nodes that skips dead ones for a while) with its
retries turned off, so that nothing is retried by two layers. Bodies are sent as given: the client's NDJSON serializer
would copy each of them twice.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Protocol

import elastic_transport

from headrace.elasticsearch.cluster import Cluster
from headrace.elasticsearch.errors import ElasticsearchRefusedError


@dataclass(frozen=True, slots=True)
class Response:
    """An answer, whatever its status."""

    status: int
    body: bytes

    def json(self) -> Any:
        """The parsed body, or None if it is not JSON."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None

    def error(self) -> tuple[str, str]:
        """The type and the reason of an error answer; "unknown" and the body's beginning if it has no such form."""
        parsed = self.json()
        error = parsed.get("error") if isinstance(parsed, dict) else None
        if isinstance(error, dict):
            return str(error.get("type", "unknown")), str(error.get("reason", ""))
        text = error if isinstance(error, str) else self.body[:300].decode("utf-8", "replace")
        return "unknown", text


class NoAnswerError(Exception):
    """There was no answer: the node is unreachable or took too long. Whether it executed the request is unknown."""


class Transport(Protocol):
    """Sends one request; may be used from several threads."""

    def request(self, method: str, path: str, body: bytes | None = None) -> Response:
        """Return the answer, with any status. Raises NoAnswerError if there is none."""
        ...

    def close(self) -> None: ...


class _AsBytes(elastic_transport.Serializer):
    """Passes bodies through unchanged in both directions."""

    mimetype = "application/json"

    def dumps(self, data: Any) -> bytes:
        return bytes(data)

    def loads(self, data: bytes) -> Any:
        return data


_PASS_THROUGH = dict.fromkeys(
    ("application/json", "application/x-ndjson", "application/*", "text/*"),
    _AsBytes(),
)


class ElasticsearchTransport:
    """The transport to a real cluster."""

    def __init__(self, cluster: Cluster, *, connections: int, timeout_seconds: float) -> None:
        """``connections`` is per node, ``timeout_seconds`` for each whole request."""
        self._timeout_seconds = timeout_seconds
        self._where = ", ".join(map(str, cluster.nodes))
        self._transport = elastic_transport.Transport(
            cluster.node_configs(connections_per_node=connections, timeout_seconds=timeout_seconds),
            serializers=_PASS_THROUGH,
            max_retries=0,
            retry_on_status=(),
            retry_on_timeout=False,
        )

    def request(self, method: str, path: str, body: bytes | None = None) -> Response:
        headers = {"accept": "application/json"}
        if body is not None:
            headers["content-type"] = (
                "application/x-ndjson" if path.partition("?")[0].endswith("_bulk") else "application/json"
            )
        try:
            answer = self._transport.perform_request(method, path, body=body, headers=headers)
        except elastic_transport.TlsError as error:
            if "CERTIFICATE_VERIFY_FAILED" in str(error) or "ingerprint" in str(error) or "doesn't match" in str(error):
                raise ElasticsearchRefusedError(
                    f"Elasticsearch's certificate is not trusted: {error}.",
                    remedy="Give the authority's certificate as ca_certs in the connection's extra.",
                ) from error
            raise self._no_answer(error) from error
        except elastic_transport.TransportError as error:
            raise self._no_answer(error) from error
        return Response(answer.meta.status, answer.body or b"")

    def close(self) -> None:
        self._transport.close()

    def _no_answer(self, error: elastic_transport.TransportError) -> NoAnswerError:
        """The error with the address and the innermost cause, which the client's own text omits."""
        cause: BaseException = error.errors[0] if error.errors else error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        text = str(error) if str(cause) in str(error) else f"{error}: {cause}"
        return NoAnswerError(f"no answer from {self._where}: {text}")
