"""Moves an alias from one index to another in one atomic request."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote

from headrace.clock import Clock
from headrace.elasticsearch.errors import UnsuitableTargetError
from headrace.elasticsearch.options import IndexingOptions
from headrace.elasticsearch.retrying import RetryBudget, request_with_retries
from headrace.elasticsearch.targets import TargetIndex
from headrace.elasticsearch.transport import Response, Transport
from headrace.elasticsearch.verdicts import Reason, refusal

# An alias's properties, which are kept when it moves.
_PROPERTIES = ("filter", "index_routing", "search_routing", "is_hidden")


@dataclass(frozen=True, slots=True)
class AliasMove:
    """``alias`` points to the index ``old`` and is to point to ``new``. The two are equal if it already does."""

    alias: str
    old: str
    new: str


class IndexAlias:
    """The alias that the options name as their index."""

    def __init__(self, transport: Transport, options: IndexingOptions, *, clock: Clock) -> None:
        self._transport = transport
        self._options = options
        self._clock = clock

    def plan(self, new: str) -> AliasMove:
        """Return the move that makes the alias point to the index ``new``.

        Raises:
            UnsuitableTargetError: the alias does not exist, is an index itself, or does not point to exactly one
                concrete index; or ``new`` is not the name of a concrete index.
            ElasticsearchRefusedError: the request is not allowed.
            ElasticsearchUnavailableError: there was no answer within ``max_retry_seconds``.
        """
        alias = self._options.index
        old = self._concrete(alias)
        if old is None:
            raise UnsuitableTargetError(
                f"There is neither an index nor an alias {alias!r}.",
                remedy=f"Nothing reads through it yet: make {alias!r} an alias of {new!r}.",
            )
        if old == alias:
            raise UnsuitableTargetError(
                f"{alias!r} is an index itself, not an alias of one.",
                remedy="Let the stream write through an alias: copy the index under another name while the stream is "
                f"stopped (_clone), delete {alias!r}, and make that name an alias of the copy.",
            )
        if self._concrete(new) != new:
            raise UnsuitableTargetError(
                f"{new!r} is not the name of an index.", remedy="Name the concrete index that the replay has written."
            )
        return AliasMove(alias, old, new)

    def move(self, move: AliasMove) -> None:
        """Point the alias to the new index; its filter, routing and hidden flag are kept.

        Raises:
            UnsuitableTargetError: the alias does not point to the old index any more.
            ElasticsearchRefusedError: the request is not allowed.
            ElasticsearchUnavailableError: there was no answer; the alias may have been moved.
        """
        kept = self._properties(move)
        actions = [
            {"remove": {"index": move.old, "alias": move.alias, "must_exist": True}},
            {"add": {"index": move.new, "alias": move.alias, **kept}},
        ]
        response = self._request("POST", "/_aliases", json.dumps({"actions": actions}).encode())
        # After a lost answer the request is sent again. The alias to remove is then gone already, which is no error.
        if response.status != 200 and self._concrete(move.alias) != move.new:
            raise refusal(response.status, Reason(*response.error()), move.alias)

    def _properties(self, move: AliasMove) -> dict[str, Any]:
        response = self._request("GET", f"/{quote(move.old, safe='')}/_alias/{quote(move.alias, safe='')}")
        if response.status == 404:
            raise UnsuitableTargetError(
                f"{move.alias!r} does not mean {move.old!r} any more.", remedy="See who has moved it."
            )
        if response.status != 200:
            raise refusal(response.status, Reason(*response.error()), move.alias)
        found = response.json()[move.old]["aliases"][move.alias]
        return {name: found[name] for name in _PROPERTIES if name in found}

    def _request(self, method: str, path: str, body: bytes | None = None) -> Response:
        retry_budget = RetryBudget(
            f"Moving the alias {self._options.index!r}",
            max_seconds=self._options.max_retry_seconds,
            clock=self._clock,
            cancelled=threading.Event(),
        )
        return request_with_retries(self._transport, retry_budget, method, path, body)

    def _concrete(self, name: str) -> str | None:
        options = replace(self._options, index=name)
        found = TargetIndex(self._transport, options, clock=self._clock).concrete()
        return None if found is None else found.name
