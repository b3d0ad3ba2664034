"""Questions and administration of Elasticsearch, through the official client: indices, aliases, privileges, letters.

Import this module inside functions: the client takes half a second to import, which no Spark worker that writes a batch
may spend (``transport``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from elastic_transport import NodeConfig, TlsError, TransportError
from elasticsearch import ApiError, Elasticsearch
from elasticsearch.helpers import ScanError

from headrace.clock import Clock, SystemClock
from headrace.elasticsearch.concrete_index import DESCRIPTION, ConcreteIndex, check_server, single_index
from headrace.elasticsearch.errors import (
    ElasticsearchRefusedError,
    IndexingOptionsError,
    IndexNotWritableError,
    UnsuitableTargetError,
)
from headrace.elasticsearch.retry_budget import RETRIED_STATUSES, RetryBudget
from headrace.elasticsearch.transport import UNTRUSTED, Cluster, ElasticsearchTransport, Transport, error_of
from headrace.elasticsearch.verdicts import Reason, refusal
from headrace.stream.outputs import ElasticsearchOutput

# A conflict is settled by the document that is there, and letters of earlier attempts are found and withdrawn.
_DOCUMENT_PRIVILEGES = ("create_doc", "index", "read", "view_index_metadata")
_LETTER_PRIVILEGES = (*_DOCUMENT_PRIVILEGES, "delete")

# A scroll expires after some minutes, or is lost with its node. The search is then started again.
_LOST_SCROLL = "search_context_missing_exception"

# An alias's properties, which are kept when it moves.
_ALIAS_PROPERTIES = ("filter", "search_routing", "is_hidden")


def official_client(cluster: Cluster, *, timeout_seconds: float) -> Elasticsearch:
    """The official client for the cluster of an output. It does not retry: `Administration` does.

    Raises IndexingOptionsError if a certificate's file cannot be read or a fingerprint is invalid.
    """
    try:
        return Elasticsearch(
            [
                NodeConfig(
                    scheme=node.scheme,
                    host=node.host,
                    port=node.port,
                    path_prefix=node.path_prefix,
                    headers={"authorization": cluster.authorization} if cluster.authorization else {},
                    request_timeout=timeout_seconds,
                    http_compress=cluster.http_compress,
                    **(_tls_settings(cluster) if node.scheme == "https" else {}),
                )
                for node in cluster.nodes
            ],
            request_timeout=timeout_seconds,
            max_retries=0,
            retry_on_status=(),
            retry_on_timeout=False,
        )
    except (OSError, ValueError) as error:
        raise IndexingOptionsError(
            f"A TLS setting of the connection to {', '.join(map(str, cluster.nodes))} cannot be used: {error}.",
            remedy="The files ca_certs, client_cert and client_key have to be on this host. A fingerprint is 64 "
            "hexadecimal digits.",
        ) from error


def _tls_settings(cluster: Cluster) -> dict[str, Any]:
    return {
        "verify_certs": cluster.verify_certs,
        "ca_certs": cluster.ca_certs,
        "client_cert": cluster.client_cert,
        "client_key": cluster.client_key,
        "ssl_assert_fingerprint": cluster.ssl_assert_fingerprint,
    }


class Administration:
    """Asks a cluster by the official client. Every method raises:

    ElasticsearchRefusedError: the request is not allowed, or the server is not Elasticsearch.
    ElasticsearchUnavailableError: there was no answer within ``max_retry_seconds``.
    """

    def __init__(
        self,
        client: Elasticsearch,
        *,
        max_retry_seconds: float,
        clock: Clock | None = None,
        transport: Transport | None = None,
    ) -> None:
        """``transport``: by it the server is asked who it is, before the first request; not at all without one."""
        self._client = client
        self._transport = transport
        self._is_checked = transport is None
        self._max_retry_seconds = max_retry_seconds
        self._clock = clock or SystemClock()

    @classmethod
    def of(cls, cluster: Cluster, *, timeout_seconds: float, max_retry_seconds: float) -> Self:
        """``timeout_seconds`` is for each request, ``max_retry_seconds`` for trying again (0: not at all)."""
        return cls(
            official_client(cluster, timeout_seconds=timeout_seconds),
            max_retry_seconds=max_retry_seconds,
            transport=ElasticsearchTransport(cluster, connections=1, timeout_seconds=timeout_seconds),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._client.close()
        if self._transport is not None:
            self._transport.close()

    def ask(
        self,
        purpose: str,
        index: str,
        request: Callable[[Elasticsearch], Any],
        *,
        missing_is_none: bool = False,
        incomplete: Callable[[Any], str | None] = lambda _body: None,
    ) -> Any:
        """Send an idempotent request until it has an answer. Returns its parsed body.

        ``purpose`` and ``index`` are for error texts. ``missing_is_none``: return None if what is asked for
        does not exist (404). ``incomplete``: why the answer with this body is to be requested again; None if it is not.
        """
        retry_budget = RetryBudget(
            purpose, max_seconds=self._max_retry_seconds, clock=self._clock, cancelled=threading.Event()
        )
        if not self._is_checked and self._transport is not None:
            check_server(self._transport, retry_budget, self._where)
            self._is_checked = True
        while True:
            try:
                answer = request(self._client)
                body = getattr(answer, "body", answer)
                if (why := incomplete(body)) is None:
                    return body
                retry_budget.wait(why)
            except ApiError as error:
                reason = _reason(error)
                lost_scroll = reason.type == _LOST_SCROLL
                if error.status_code == 404 and missing_is_none and not lost_scroll:
                    return None
                if error.status_code not in RETRIED_STATUSES and not lost_scroll:
                    raise refusal(error.status_code, reason, index) from error
                retry_budget.wait(f"{error.status_code} {reason}")
            except ScanError as error:
                retry_budget.wait(str(error))
            except TransportError as error:
                if isinstance(error, TlsError) and any(sign in str(error).lower() for sign in UNTRUSTED):
                    raise ElasticsearchRefusedError(
                        f"The certificate of Elasticsearch at {self._where} is not trusted: {error}.",
                        remedy="Give the authority's certificate as ca_certs in the connection's extra.",
                    ) from error
                retry_budget.wait(f"no answer from {self._where}: {_cause(error)}")

    def concrete_index(self, name: str) -> ConcreteIndex | None:
        """The concrete index behind the name; None if it does not exist yet.

        Raises UnsuitableTargetError too: see `single_index`.
        """
        described = self.ask(
            f"Asking about index {name!r}",
            name,
            lambda client: client.indices.get(index=name, filter_path=list(DESCRIPTION)),
            missing_is_none=True,
        )
        return single_index(name, described)

    def check_writable(self, output: ElasticsearchOutput) -> None:
        """Raise UnsuitableTargetError or IndexNotWritableError if the output could not write to its indices."""
        index = output.index
        purpose = f"Asking about index {index!r}"
        self.concrete_index(index)
        settings = self.ask(
            purpose,
            index,
            lambda client: client.indices.get_settings(index=index, filter_path=["*.settings.index.blocks"]),
            missing_is_none=True,
        )
        for name, described in (settings or {}).items():
            blocks = described.get("settings", {}).get("index", {}).get("blocks", {})
            if on := sorted(block for block, value in blocks.items() if str(value).lower() == "true"):
                raise IndexNotWritableError(
                    f"Index {name} has the block {', '.join(on)}.",
                    remedy="Remove the block. Elasticsearch sets read_only_allow_delete itself when a disk is full.",
                )
        self._check_privileges(output)

    def move_alias(self, alias: str, new: str) -> str:
        """Make the alias point to the index ``new`` instead of its index, in one request. Returns the old index.

        The alias's filter, search routing and hidden flag are kept. If the alias points to ``new`` already, nothing is
        sent.

        Raises UnsuitableTargetError too: the alias does not exist, is an index itself, or does not point to exactly one
        index; or ``new`` is not the name of an index.
        """
        concrete = self.concrete_index(alias)
        if concrete is None:
            raise UnsuitableTargetError(
                f"There is neither an index nor an alias {alias!r}.",
                remedy=f"Nothing reads through it yet: make {alias!r} an alias of {new!r}.",
            )
        old = concrete.name
        if old == alias:
            raise UnsuitableTargetError(
                f"{alias!r} is an index itself, not an alias of one.",
                remedy="Let the stream write through an alias: copy the index under another name while the stream is "
                f"stopped (_clone), delete {alias!r}, and make that name an alias of the copy.",
            )
        there = self.concrete_index(new)
        if there is None or there.name != new:
            raise UnsuitableTargetError(
                f"{new!r} is not the name of an index.", remedy="Name the concrete index that the replay has written."
            )
        if old == new:
            return old
        purpose = f"Moving the alias {alias!r}"
        aliases = self.ask(purpose, alias, lambda client: client.indices.get_alias(index=old, name=alias))
        held = aliases[old]["aliases"][alias]
        kept = {name: held[name] for name in _ALIAS_PROPERTIES if name in held}
        actions: list[dict[str, Any]] = [
            # Elasticsearch refuses all of it if the alias was moved since.
            {"remove": {"index": old, "alias": alias, "must_exist": True}},
            {"add": {"index": new, "alias": alias, **kept}},
        ]
        self.ask(purpose, alias, lambda client: client.indices.update_aliases(actions=actions))
        return old

    def _check_privileges(self, output: ElasticsearchOutput) -> None:
        of_documents = [*_DOCUMENT_PRIVILEGES]
        if output.tombstone_action == "delete":
            of_documents.append("delete")
        if output.refresh:
            of_documents.append("maintenance")
        asked = [
            {"names": [output.index], "privileges": of_documents},
            {"names": [output.dead_letters], "privileges": list(_LETTER_PRIVILEGES)},
        ]
        try:
            purpose = f"Asking for the privileges on index {output.index!r}"
            answer = self.ask(purpose, output.index, lambda client: client.security.has_privileges(index=asked))
        except ElasticsearchRefusedError:
            # A cluster without security does not have this API.
            return
        if not answer.get("has_all_requested", True):
            lacking = sorted(
                f"{privilege} on {index}"
                for index, privileges in answer.get("index", {}).items()
                for privilege, held in privileges.items()
                if not held
            )
            raise IndexNotWritableError(
                f"The user {answer.get('username')} lacks {', '.join(lacking)}.",
                remedy="Grant it these privileges.",
            )

    @property
    def _where(self) -> str:
        return ", ".join(node.base_url for node in self._client.transport.node_pool.all())


def _reason(error: ApiError) -> Reason:
    return Reason(*error_of(error.body, str(error.body)))


def _cause(error: TransportError) -> str:
    """The error with its innermost cause, which the client's own text omits."""
    cause: BaseException = error.errors[0] if error.errors else error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    return str(error) if str(cause) in str(error) else f"{error}: {cause}"
