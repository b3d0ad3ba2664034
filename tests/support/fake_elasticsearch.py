"""Elasticsearch in memory, with the requests that ``headrace.elasticsearch`` uses, and with faults on demand.

It implements ``headrace.elasticsearch.transport.Transport``. Its responses have the form and the texts of version 8.19.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import unquote

from headrace.elasticsearch.transport import NoAnswerError, Response

MAX_ID_BYTES = 512


@dataclass(frozen=True)
class Action:
    """One action of a bulk request."""

    verb: str
    id: str
    version: int | None
    version_type: str | None
    document: Any
    raw: bytes
    if_seq_no: int | None = None


@dataclass
class Stored:
    """One document; ``document`` is None for a deleted document whose version is kept."""

    version: int
    document: Any


ItemFault = Callable[[Action], tuple[int, str, str] | None]
"""Returns an item's (status, error type, reason), or None to carry out the action."""
Fault = Callable[[Sequence[Action]], Response | NoAnswerError | None]
"""Returns a response, or an error to raise, instead of carrying out the request; None to carry it out."""


@dataclass
class FakeElasticsearch:
    """Each bulk request uses up one of ``faults``; when there are none left, it calls ``standing_fault``.
    ``item_fault`` is called for every item."""

    indices: dict[str, dict[str, Stored]] = field(default_factory=dict)
    faults: deque[Fault] = field(default_factory=deque)
    standing_fault: Fault | None = None
    item_fault: ItemFault | None = None
    answer_lost: deque[bool] = field(default_factory=deque)
    """One entry for each of the next bulk requests; True: it is carried out, but its response is lost."""
    not_fetched: deque[set[str]] = field(default_factory=deque)
    """One entry for each of the next requests that fetch documents: the ids whose shard is not available."""
    not_read: dict[str, tuple[str, str]] = field(default_factory=dict)
    """The error (type, reason) in place of a document, by its id."""
    unreadable: set[str] = field(default_factory=set)
    """The ids of documents that make each request fail that fetches them."""
    descriptions: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Responses to GET /<name>; they take precedence over ``indices``."""
    bulks: list[tuple[str, list[Action]]] = field(default_factory=list)
    requests: list[tuple[str, str]] = field(default_factory=list)
    closed: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def request(self, method: str, path: str, body: bytes | None = None) -> Response:
        with self._lock:
            route, _, query = path.partition("?")
            self.requests.append((method, route))
            if route == "/":
                return replace(_answer(200, {"version": {"number": "9.2.1"}}), product="Elasticsearch")
            index, _, endpoint = route.strip("/").partition("/")
            index = unquote(index)
            if "_bulk" in (index, endpoint):
                return self._any_bulk(index, query, body or b"")
            if endpoint == "_mget":
                return self._mget(index, json.loads(body or b"{}")["ids"])
            if endpoint == "_search":
                return _answer(200, {"hits": {"total": {"value": len(self.documents(index))}}})
            if endpoint == "_refresh":
                return _answer(200 if index in self.indices else 404, {})
            return self._index(method, index)

    def close(self) -> None:
        self.closed = True

    def documents(self, index: str) -> dict[str, Any]:
        """The documents of an index by id."""
        held = self.indices.get(index, {})
        return {id_: stored.document for id_, stored in held.items() if stored.document is not None}

    def versions(self, index: str) -> dict[str, int]:
        """The versions of an index's documents by id."""
        return {id_: stored.version for id_, stored in self.indices.get(index, {}).items()}

    def _index(self, method: str, index: str) -> Response:
        if method == "PUT":
            self.indices.setdefault(index, {})
            return _answer(200, {"acknowledged": True})
        if index in self.descriptions:
            return _answer(200, self.descriptions[index])
        if index not in self.indices:
            return _error(404, "index_not_found_exception", f"no such index [{index}]")
        settings = {"index": {"provided_name": index, "uuid": f"uuid of {index}"}}
        return _answer(200, {index: {"aliases": {}, "settings": settings}})

    def _mget(self, index: str, ids: Sequence[str]) -> Response:
        if self.unreadable.intersection(ids):
            return _error(500, "stream_constraints_exception", "Document nesting depth (1001) exceeds the maximum")
        docs: list[dict[str, Any]] = []
        not_fetched = self.not_fetched.popleft() if self.not_fetched else set()
        for id_ in ids:
            if id_ in not_fetched:
                error = {"type": "no_shard_available_action_exception", "reason": "No shard available"}
                docs.append({"_id": id_, "error": error})
                continue
            if id_ in self.not_read:
                kind, reason = self.not_read[id_]
                docs.append({"_id": id_, "error": {"type": kind, "reason": reason}})
                continue
            stored = self.indices.get(index, {}).get(id_)
            if stored is None or stored.document is None:
                docs.append({"_id": id_, "found": False})
            else:
                docs.append({"_id": id_, "found": True, "_version": stored.version, "_source": stored.document})
        return _answer(200, {"docs": docs})

    def _bulk(self, index: str, body: bytes) -> Response:
        actions = parse_bulk(body)
        self.bulks.append((index, actions))
        fault = self.faults.popleft() if self.faults else self.standing_fault
        answer = fault(actions) if fault else None
        if isinstance(answer, NoAnswerError):
            raise answer
        if answer is not None:
            return answer
        for action in actions:
            if len(action.id.encode()) > MAX_ID_BYTES or (action.version or 0) < 0:
                return _error(400, "action_request_validation_exception", "Validation Failed: 1: ...;")
        items = [
            {action.verb: {"_index": index, "_id": action.id, **self._carry_out(index, action)}} for action in actions
        ]
        if self.answer_lost and self.answer_lost.popleft():
            raise NoAnswerError("timed out")
        return _answer(200, {"items": items})

    def _any_bulk(self, index: str, query: str, body: bytes) -> Response:
        if index == "_bulk":
            return self._delete(body)
        if "require_alias=true" in query and index in self.descriptions.get(index, {index: {}}):
            return self._without_alias(index, body)
        return self._bulk(index, body)

    def _delete(self, body: bytes) -> Response:
        """Deletions that name their indices."""
        items = []
        for line in body.splitlines():
            given = json.loads(line)["delete"]
            held = self.indices.get(given["_index"], {})
            status = 200 if held.pop(given["_id"], None) is not None else 404
            items.append({"delete": {"status": status}})
        return _answer(200, {"items": items})

    def _without_alias(self, index: str, body: bytes) -> Response:
        reason = f"no such index [{index}] and [require_alias] request flag is [true] and [{index}] is not an alias"
        error = _item_error(404, "index_not_found_exception", reason)
        items = [{action.verb: {"_index": index, "_id": action.id, **error}} for action in parse_bulk(body)]
        return _answer(200, {"items": items})

    def _carry_out(self, index: str, action: Action) -> dict[str, Any]:
        fault = self.item_fault(action) if self.item_fault else None
        if fault is not None:
            return _item_error(*fault)
        if action.verb != "delete" and not isinstance(action.document, dict):
            return _item_error(400, "document_parsing_exception", "failed to parse")
        held = self.indices.setdefault(index, {})
        there = held.get(action.id)
        asked_for = f"required seqNo [{action.if_seq_no}], but no document was found with it"
        conflict = _conflict(action, there) if action.if_seq_no is None else asked_for
        if conflict is not None:
            return _item_error(409, "version_conflict_engine_exception", f"[{action.id}]: version conflict, {conflict}")
        existed = there is not None and there.document is not None
        version = action.version if action.version is not None else (there.version + 1 if there else 1)
        held[action.id] = Stored(version, action.document)
        if action.verb == "delete":
            return {"status": 200 if existed else 404, "result": "deleted" if existed else "not_found"}
        return {"result": "updated" if existed else "created", "status": 200 if existed else 201}


def parse_bulk(body: bytes) -> list[Action]:
    """Parse the actions of a bulk body, split as Elasticsearch splits it: only at newlines."""
    if not body.endswith(b"\n"):
        raise ValueError("a bulk body ends with a newline")
    lines = iter(body[:-1].split(b"\n"))
    actions = []
    for line in lines:
        ((verb, meta),) = json.loads(line).items()
        raw = b"" if verb == "delete" else next(lines)
        try:
            document = json.loads(raw) if raw else None
        except ValueError:
            document = raw
        numbers = meta.get("version"), meta.get("version_type")
        actions.append(Action(verb, meta["_id"], *numbers, document, raw, meta.get("if_seq_no")))
    return actions


def _conflict(action: Action, there: Stored | None) -> str | None:
    if there is None:
        return None
    if action.verb == "create" and there.document is not None:
        return f"document already exists (current version [{there.version}])"
    if action.version is None:
        return None
    if action.version_type == "external" and there.version >= action.version:
        return f"current version [{there.version}] is higher or equal to the one provided [{action.version}]"
    if action.version_type == "external_gte" and there.version > action.version:
        return f"current version [{there.version}] is higher than the one provided [{action.version}]"
    return None


def error_response(status: int, kind: str, reason: str) -> Response:
    """An error response to a whole request."""
    return _error(status, kind, reason)


def _error(status: int, kind: str, reason: str) -> Response:
    return _answer(status, {"error": {"type": kind, "reason": reason}, "status": status})


def _item_error(status: int, kind: str, reason: str) -> dict[str, Any]:
    return {"status": status, "error": {"type": kind, "reason": reason}}


def _answer(status: int, body: Any) -> Response:
    return Response(status, json.dumps(body).encode())
