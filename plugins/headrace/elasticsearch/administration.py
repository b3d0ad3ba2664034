"""Questions and administration of a search server: indices, aliases, privileges, the letters that people read.

By the same transport as the writes, for every server that headrace supports: each official client refuses the servers
of the other product, and the one for Elasticsearch 9 a server 8.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Generator, Mapping
from fnmatch import fnmatchcase
from itertools import islice
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote

from headrace.clock import Clock, SystemClock
from headrace.elasticsearch.document_mapping import MappingBody, lacking
from headrace.elasticsearch.errors import ElasticsearchRefusedError, IndexNotWritableError, UnsuitableTargetError
from headrace.elasticsearch.mapping_conflicts import IndexMapping
from headrace.elasticsearch.retry_budget import RetryBudget, request_with_retries
from headrace.elasticsearch.search_server import SearchServer, ask_server
from headrace.elasticsearch.target import ConcreteIndex, describe_indices, single_index
from headrace.elasticsearch.transport import Cluster, ElasticsearchTransport, NoAnswerError, Response, Transport
from headrace.elasticsearch.verdicts import Reason, refusal

if TYPE_CHECKING:
    from headrace.stream.outputs import ElasticsearchOutput

# A conflict is settled by the document that is there, and letters of earlier attempts are found and withdrawn.
_DOCUMENT_PRIVILEGES = ("create_doc", "index", "read", "view_index_metadata")
_LETTER_PRIVILEGES = (*_DOCUMENT_PRIVILEGES, "delete")

# How long the server keeps a scroll between two pages.
_KEPT_OPEN = "2m"

# An alias's properties, which are kept when it moves.
_ALIAS_PROPERTIES = ("filter", "search_routing", "is_hidden")


class _ScrollLostError(Exception):
    """A scroll has expired, was lost with its node, or left out a shard."""


class Administration:
    """Asks a cluster. Every method raises:

    ElasticsearchRefusedError: the request is not allowed, or the server is none that headrace supports.
    ElasticsearchUnavailableError: there was no answer within ``max_retry_seconds``.
    """

    def __init__(
        self, transport: Transport, where: str, *, max_retry_seconds: float, clock: Clock | None = None
    ) -> None:
        """``where`` is the cluster's address, for error texts. The server is asked who it is before anything else; its
        answer is ``server``, None until then and if the user may not ask."""
        self._transport = transport
        self._where = where
        self.server: SearchServer | None = None
        self._max_retry_seconds = max_retry_seconds
        self._clock = clock or SystemClock()

    @classmethod
    def of(cls, cluster: Cluster, *, timeout_seconds: float, max_retry_seconds: float) -> Self:
        """``timeout_seconds`` is for each request, ``max_retry_seconds`` for trying again (0: not at all).

        Raises IndexingOptionsError if a certificate's file cannot be read or a fingerprint is invalid.
        """
        transport = ElasticsearchTransport(cluster, connections=1, timeout_seconds=timeout_seconds)
        return cls(transport, ", ".join(map(str, cluster.nodes)), max_retry_seconds=max_retry_seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._transport.close()

    def ask(
        self,
        purpose: str,
        index: str,
        method: str,
        path: str,
        body: bytes | Callable[[], bytes] | None = None,
        *,
        missing_is_none: bool = False,
        incomplete: Callable[[Any], str | None] = lambda _body: None,
    ) -> Any:
        """Send an idempotent request until it has an answer. Returns its parsed body.

        ``purpose`` and ``index`` are for error texts. ``missing_is_none``: return None if what is asked for
        does not exist (404). ``incomplete``: why the answer with this body is to be requested again; None if it is not.
        ``body`` is called for each of these requests if it is a function.
        """
        retry_budget = self._begin(purpose)
        while True:
            sent = body() if callable(body) else body
            response = request_with_retries(self._transport, retry_budget, method, path, sent)
            if response.status == 404 and missing_is_none:
                return None
            parsed = _parsed(response, index)
            if (why := incomplete(parsed)) is None:
                return parsed
            retry_budget.wait(why)

    def ids(self, purpose: str, index: str, search: dict[str, Any], limit: int | None = None) -> list[str]:
        """The ids of the documents that a search finds, in its order; none if there is no such index.

        All are read by one scroll. If it is lost, the search is started again.
        """
        retry_budget = self._begin(purpose)
        while True:
            try:
                with contextlib.closing(self._hits(index, search, retry_budget)) as hits:
                    return [hit["_id"] for hit in islice(hits, limit)]
            except (NoAnswerError, _ScrollLostError) as error:
                retry_budget.wait(str(error))

    def older_ids(self, purpose: str, index: str, version: int, most: int) -> Generator[list[str], None, None]:
        """Yield the ids of the documents with an older version, at most ``most`` at a time.

        If the scroll is lost, the search is started again: what was done with the ids must not be harmed by that.
        """
        retry_budget = self._begin(purpose)
        search = {"version": True, "sort": ["_doc"], "size": most}
        while True:
            try:
                with contextlib.closing(self._hits(index, search, retry_budget)) as hits:
                    while page := [hit for hit in islice(hits, most)]:
                        if older := [hit["_id"] for hit in page if hit["_version"] < version]:
                            yield older
                return
            except (NoAnswerError, _ScrollLostError) as error:
                retry_budget.wait(str(error))

    def _hits(
        self, index: str, search: dict[str, Any], retry_budget: RetryBudget
    ) -> Generator[dict[str, Any], None, None]:
        """Yield what a search finds, without the documents; nothing if there is no such index."""
        path = f"/{quote(index, safe='')}/_search?scroll={_KEPT_OPEN}&allow_partial_search_results=false"
        body = json.dumps({**search, "_source": False}).encode()
        response = request_with_retries(self._transport, retry_budget, "POST", path, body)
        if response.status != 404:
            yield from self._scroll(_parsed(response, index))

    def _scroll(self, answer: Any) -> Generator[dict[str, Any], None, None]:
        scroll_id = answer["_scroll_id"]
        try:
            while hits := answer["hits"]["hits"]:
                yield from hits
                # A page that was requested twice would be skipped once: so there is one try.
                body = json.dumps({"scroll": _KEPT_OPEN, "scroll_id": scroll_id}).encode()
                response = self._transport.request("POST", "/_search/scroll", body)
                answer = response.json()
                if response.status != 200 or not isinstance(answer, dict):
                    raise _ScrollLostError(f"{response.status} {Reason(*response.error())}")
                if failed := answer.get("_shards", {}).get("failed"):
                    raise _ScrollLostError(f"{failed} shards did not answer")
                scroll_id = answer["_scroll_id"]
        finally:
            with contextlib.suppress(NoAnswerError):
                self._transport.request("DELETE", "/_search/scroll", json.dumps({"scroll_id": scroll_id}).encode())

    def _begin(self, purpose: str) -> RetryBudget:
        retry_budget = RetryBudget(
            purpose, max_seconds=self._max_retry_seconds, clock=self._clock, cancelled=threading.Event()
        )
        if self.server is None:
            self.server = ask_server(self._transport, retry_budget, self._where)
        return retry_budget

    def concrete_index(self, name: str) -> ConcreteIndex | None:
        """The concrete index behind the name; None if it does not exist yet.

        Raises UnsuitableTargetError too: see `single_index`.
        """
        retry_budget = self._begin(f"Asking about index {name!r}")
        return single_index(name, describe_indices(self._transport, retry_budget, name))

    def index_mapping(self, name: str) -> IndexMapping:
        """The mapping of the index behind the name; of an index that does not exist yet, what templates give it.

        An index without a mapping and an index that no template is for have none: all its fields are new.
        """
        purpose, path = f"Asking about the mapping of index {name!r}", quote(name, safe="")
        fields = "*.mappings,*.settings.index.mapping"
        found = self.ask(purpose, name, "GET", f"/{path}?filter_path={fields}", missing_is_none=True)
        no_answer: tuple[str, dict[str, Any]] = name, {}
        exists = found is not None
        if exists:
            # Of an index without a mapping and such settings the answer is empty.
            concrete, template = next(iter(found.items()), no_answer)
        else:
            concrete = name
            simulated = self.ask(purpose, name, "POST", f"/_index_template/_simulate_index/{path}")
            # As in the server, older templates count only where no newer one is for the index.
            template = simulated.get("template") or self._of_legacy_templates(purpose, name)
        settings = template.get("settings", {}).get("index", {}).get("mapping", {})
        return IndexMapping(concrete, exists, template.get("mappings", {}), settings, self.server)

    def _of_legacy_templates(self, purpose: str, name: str) -> dict[str, Any]:
        """What the templates of the older kind, ``_template``, give a new index."""
        known = self.ask(purpose, name, "GET", "/_template")
        fitting = [
            each
            for each in known.values()
            if any(fnmatchcase(name, pattern) for pattern in each.get("index_patterns", ()))
        ]
        made: dict[str, Any] = {}
        for each in sorted(fitting, key=lambda template: template.get("order", 0)):
            _merge(made, {part: each.get(part, {}) for part in ("mappings", "settings")})
        return made

    def create(self, kind: MappingBody, name: str, body: dict[str, Any]) -> list[str] | None:
        """Create an index or a template of this name, if there is none. What exists is not changed.

        Returns None if it was created; else what the existing one lacks of the body, in words: nothing if it has all.

        Raises UnsuitableTargetError too: the name of the index stands for something else, see `single_index`.
        """
        path = kind.path(quote(name, safe=""))

        def lacks() -> list[str] | None:
            there = self.ask(f"Asking for {path}", name, "GET", path, missing_is_none=True)
            if there is None:
                return None
            if kind is MappingBody.MAPPING:
                single_index(name, there)
            return lacking(body, kind.held(there))

        if (differing := lacks()) is not None:
            return differing
        try:
            only_new = "" if kind is MappingBody.MAPPING else "?create=true"
            self.ask(f"Creating {path}", name, "PUT", f"{path}{only_new}", json.dumps(body).encode())
        except ElasticsearchRefusedError:
            # Another process may have been first; so may this one, if an answer was lost.
            if (differing := lacks()) is None:
                raise
            return differing
        return None

    def check_writable(self, output: ElasticsearchOutput) -> None:
        """Raise UnsuitableTargetError or IndexNotWritableError if the output could not write to its indices.

        Where records have an index each, only the privileges are asked for: a batch asks about its indices.
        """
        letters = self.concrete_index(output.dead_letters) if output.dead_letters else None
        if not output.names.is_plain:
            self._check_privileges(output)
            return
        index = output.index_text
        purpose = f"Asking about index {index!r}"
        own = self.concrete_index(index)
        if own is not None and letters is not None and own.name == letters.name:
            raise UnsuitableTargetError(
                f"{index!r} and {output.dead_letters!r} are names of one index, {own.name!r}: the output's dead "
                "letters would be among its documents.",
                remedy="Name another dead_letter_index.",
            )
        settings = self.ask(
            purpose,
            index,
            "GET",
            f"/{quote(index, safe='')}/_settings?filter_path=error,*.settings.index.blocks",
            missing_is_none=True,
        )
        for name, described in (settings or {}).items():
            blocks = described.get("settings", {}).get("index", {}).get("blocks", {})
            if on := sorted(block for block, value in blocks.items() if str(value).lower() == "true"):
                raise IndexNotWritableError(
                    f"Index {name} has the block {', '.join(on)}.",
                    remedy="Remove the block. The server sets read_only_allow_delete itself when a disk is full.",
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
        aliases = self.ask(purpose, alias, "GET", f"/{quote(old, safe='')}/_alias/{quote(alias, safe='')}")
        held = aliases[old]["aliases"][alias]
        kept = {name: held[name] for name in _ALIAS_PROPERTIES if name in held}
        actions: list[dict[str, Any]] = [
            # Elasticsearch refuses all of it if the alias was moved since.
            {"remove": {"index": old, "alias": alias, "must_exist": True}},
            {"add": {"index": new, "alias": alias, **kept}},
        ]
        self.ask(purpose, alias, "POST", "/_aliases", json.dumps({"actions": actions}).encode())
        return old

    def _check_privileges(self, output: ElasticsearchOutput) -> None:
        of_documents = [*_DOCUMENT_PRIVILEGES]
        if output.deletes_by_key:
            of_documents.append("delete")
        if output.refresh or output.truncates == "apply":
            of_documents.append("maintenance")
        asked = []
        # Of names that begin with a placeholder, nobody has the privileges but a superuser.
        if patterns := [pattern for pattern in output.names.patterns if not pattern.startswith("*")]:
            asked.append({"names": patterns, "privileges": of_documents})
        if output.dead_letters:
            asked.append({"names": [output.dead_letters], "privileges": list(_LETTER_PRIVILEGES)})
        if not asked:
            return
        try:
            purpose = f"Asking for the privileges on index {output.index_text!r}"
            body = json.dumps({"index": asked}).encode()
            answer = self.ask(purpose, output.index_text, "POST", "/_security/user/_has_privileges", body)
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


def _merge(made: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Add ``more`` to what is made; where both have a value, that of ``more`` counts."""
    for name, value in more.items():
        if isinstance(value, Mapping):
            _merge(made.setdefault(name, {}), value)
        else:
            made[name] = value


def _parsed(response: Response, index: str) -> Any:
    """The answer's body. Raises ElasticsearchRefusedError if it is an error."""
    parsed = response.json()
    if response.status >= 300 or not isinstance(parsed, dict):
        raise refusal(response.status, Reason(*response.error()), index)
    return parsed
