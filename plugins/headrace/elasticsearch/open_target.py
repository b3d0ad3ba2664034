"""A target while it is written to: questions to the server about it, and what the answers have shown so far.

One task sends through one object for each target, from several threads at once. So what one request shows of an index,
such as that it takes documents, counts for the next ones.
"""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

from headrace.elasticsearch.errors import UnsuitableTargetError
from headrace.elasticsearch.misplaced import Misplaced
from headrace.elasticsearch.retry_budget import RetryBudget, request_with_retries
from headrace.elasticsearch.stored_source import StoredSource
from headrace.elasticsearch.target import ConcreteIndex, Target, describe_indices, single_index
from headrace.elasticsearch.transport import NoAnswerError, Transport
from headrace.elasticsearch.verdicts import Item, Reason, judge_item, refusal

# The only fields that are read from an answer. Every item has "status", so no item is left out of the list.
_ANSWER = (
    "filter_path=items.*._index,items.*._id,items.*.status,items.*.result,items.*.error.type,items.*.error.reason,"
    "items.*.error.caused_by.reason"
)
# How long Elasticsearch waits for a shard or a change of the mapping. By default it answers after a minute, as long as
# the client waits, and meanwhile nobody knows that a shard is missing.
_TIMEOUT = "timeout=10s"
_TRIES_ALONE = 3
_CONFLICT = 409


class OpenTarget:
    """A target over a transport. The questions raise the errors of ``request_with_retries``, and
    ElasticsearchRefusedError if the request is not allowed."""

    def __init__(self, transport: Transport, target: Target) -> None:
        self._transport = transport
        self.target = target
        self.stored = StoredSource(transport, target.name)
        self.passed = False
        """Whether the index has taken a document."""
        self.place = target.name
        """The concrete index that answers name."""
        self._places = {target.name}
        self._in_place = False
        self._tries_alone = _TRIES_ALONE if target.first_alone else 0
        self.not_one: str | None = None
        """Why the name does not stand for one index any more, if that was seen."""
        # An alias that is deleted meanwhile must not become an index of its name.
        required = "&require_alias=true" if target.through_alias else ""
        self.bulk_path = f"/{quote(target.name, safe='')}/_bulk?{_TIMEOUT}{required}&{_ANSWER}"
        self._witness: bytes | None = None

    # --- questions

    def concrete(self, retry_budget: RetryBudget) -> ConcreteIndex | None:
        """The concrete index behind the name; None if it does not exist yet.

        Raises UnsuitableTargetError too: see `single_index`.
        """
        return single_index(self.target.name, describe_indices(self._transport, retry_budget, self.target.name))

    def refresh(self, retry_budget: RetryBudget) -> None:
        """Make the indexed documents visible to searches."""
        response = request_with_retries(self._transport, retry_budget, "POST", self._path("_refresh"))
        if response.status not in (200, 404):
            raise refusal(response.status, Reason(*response.error()), self.target.name)

    def holds_documents(self, retry_budget: RetryBudget) -> bool:
        """Whether the index has a document that searches find."""
        path = self._path("_search?size=0&terminate_after=1&filter_path=hits.total.value")
        answer = request_with_retries(self._transport, retry_budget, "GET", path).json()
        return isinstance(answer, dict) and answer.get("hits", {}).get("total", {}).get("value", 0) > 0

    def witness_passes(self) -> bool:
        """Whether a document that the index has taken before is taken now too: a conflict says so."""
        if self._witness is None:
            return False
        try:
            items = bulk_items(self._transport.request("POST", self.bulk_path, self._witness).json(), 1)
        except NoAnswerError:
            return False
        return items is not None and (
            items[0]["status"] < 300 or judge_item(items[0]["status"], items[0]) is Item.CONFLICT
        )

    # --- what answers have shown

    @property
    def has_witness(self) -> bool:
        """Whether there is a document that the index has taken, to compare others with."""
        return self._witness is not None

    def note_witness(self, id_: str, document: bytes | None) -> None:
        """Keep a document that the index has taken, in a request that changes nothing."""
        if self._witness is None and document is not None:
            # No document has this sequence number. So the server prepares the write as any other, and does not do it.
            action = {"index": {"_id": id_, "if_seq_no": 2**53 - 1, "if_primary_term": 1}}
            self._witness = json.dumps(action).encode() + b"\n" + document + b"\n"

    def sends_alone(self) -> bool:
        """Whether the next document is to be sent alone: no answer has shown yet where documents go.

        After a few documents that the index refuses, requests have their size again.
        """
        if self._in_place or not self._tries_alone:
            return False
        self._tries_alone -= 1
        return True

    def note_created(self) -> None:
        """Documents were created in the place that answers name."""
        self._in_place = True

    def note_item(self, item: dict[str, Any]) -> None:
        """Note where a document went: an alias's index has another name than the one asked for."""
        self.place = item.get("_index", self.place)
        if item.get("result") in ("created", "updated") or item["status"] == _CONFLICT:
            self._in_place = True

    def misplaced(self, id_: str, item: dict[str, Any], retry_budget: RetryBudget) -> Misplaced | None:
        """The document, if the answer names another index or id than asked for; else None."""
        index, given_id = item.get("_index", self.place), item.get("_id", id_)
        if given_id == id_ and self._is_place(index, retry_budget):
            return None
        return Misplaced(id_, index, given_id, item.get("result"), conflicts=item["status"] == _CONFLICT)

    def _is_place(self, index: str, retry_budget: RetryBudget) -> bool:
        if index not in self._places:
            described = describe_indices(self._transport, retry_budget, self.target.name)
            try:
                single_index(self.target.name, described)
                self._places |= (described or {}).keys()
            except UnsuitableTargetError as error:
                self.not_one = error.what.rstrip(".")
        return index in self._places

    def _path(self, rest: str) -> str:
        return f"/{quote(self.target.name, safe='')}/{rest}"


def bulk_items(parsed: Any, number: int) -> list[dict[str, Any]] | None:
    """What a bulk answer says of each of ``number`` documents, in their order; None if it is no such answer."""
    entries = parsed.get("items") if isinstance(parsed, dict) else None
    if not isinstance(entries, list) or len(entries) != number:
        return None
    items = [next(iter(entry.values())) for entry in entries if isinstance(entry, dict) and len(entry) == 1]
    complete = all(isinstance(item, dict) and type(item.get("status")) is int for item in items)
    return items if complete and len(items) == number else None
