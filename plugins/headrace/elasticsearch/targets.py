"""Checks that an index's name stands for one concrete index, in which ids are unique (rule 7).

A replay after a rollover gave two documents with one id. So aliases that roll over are refused, and also data streams,
which always roll over. An index template can turn a missing name into a data stream at the first write, so the check
is repeated after the last write.
"""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from headrace.clock import Clock
from headrace.elasticsearch.errors import UnsuitableTargetError
from headrace.elasticsearch.options import IndexingOptions
from headrace.elasticsearch.retrying import RetryBudget, request_with_retries
from headrace.elasticsearch.transport import Transport
from headrace.elasticsearch.verdicts import Reason, refusal

_ONE_INDEX = "Write to one concrete index; use one index per period, and headrace's document ids, instead of rollover."

# Every index has provided_name, so none is left out of the answer.
_WANTED = (
    "filter_path=error,*.aliases,*.data_stream,*.settings.index.provided_name,*.settings.index.uuid,"
    "*.settings.index.lifecycle.rollover_alias"
)


@dataclass(frozen=True, slots=True)
class ConcreteIndex:
    """One index. ``uuid`` distinguishes it from other indices with the same name, before or later; None if unknown."""

    name: str
    uuid: str | None


class TargetIndex:
    """The index that the options name, as Elasticsearch describes it."""

    def __init__(self, transport: Transport, options: IndexingOptions, *, clock: Clock) -> None:
        self._transport = transport
        self._options = options
        self._clock = clock

    def concrete(self) -> ConcreteIndex | None:
        """The concrete index behind the name; None if it does not exist yet.

        Raises:
            UnsuitableTargetError: the name is a data stream, an alias of several indices or one that rolls over.
            ElasticsearchRefusedError: the request is not allowed.
            ElasticsearchUnavailableError: there was no answer within ``max_retry_seconds``.
        """
        name = self._options.index
        indices = self._describe(name)
        if indices is None:
            return None
        if any("data_stream" in found for found in indices.values()):
            raise UnsuitableTargetError(
                f"{name!r} is a data stream, in which an id can be there twice.", remedy=_ONE_INDEX
            )
        concrete = sorted(indices)
        if len(concrete) != 1:
            raise UnsuitableTargetError(
                f"{name!r} is an alias of {len(concrete)} indices ({', '.join(concrete[:5])}).", remedy=_ONE_INDEX
            )
        if concrete[0] != name and self._rolls_over(indices[concrete[0]]):
            raise UnsuitableTargetError(
                f"{name!r} is an alias that rolls over (now {concrete[0]!r}).", remedy=_ONE_INDEX
            )
        return ConcreteIndex(concrete[0], indices[concrete[0]].get("settings", {}).get("index", {}).get("uuid"))

    def refresh(self) -> None:
        """Make the indexed documents visible to searches."""
        path = f"/{quote(self._options.index, safe='')}/_refresh"
        response = request_with_retries(self._transport, self._retry_budget(), "POST", path)
        if response.status not in (200, 404):
            raise refusal(response.status, Reason(*response.error()), self._options.index)

    def _rolls_over(self, found: dict[str, Any]) -> bool:
        alias = self._options.index
        held = found.get("aliases", {}).get(alias, {})
        lifecycle = found.get("settings", {}).get("index", {}).get("lifecycle", {})
        rolled = isinstance(lifecycle, dict) and lifecycle.get("rollover_alias") == alias
        return bool(held.get("is_write_index")) or rolled

    def _describe(self, name: str) -> dict[str, dict[str, Any]] | None:
        path = f"/{quote(name, safe='')}?{_WANTED}"
        response = request_with_retries(self._transport, self._retry_budget(), "GET", path)
        if response.status == 404:
            return None
        parsed = response.json()
        if response.status == 200 and isinstance(parsed, dict):
            return parsed
        raise refusal(response.status, Reason(*response.error()), name)

    def _retry_budget(self) -> RetryBudget:
        return RetryBudget(
            f"Asking about index {self._options.index!r}",
            max_seconds=self._options.max_retry_seconds,
            clock=self._clock,
            cancelled=threading.Event(),
            jitter=random.Random(),  # noqa: S311
        )
