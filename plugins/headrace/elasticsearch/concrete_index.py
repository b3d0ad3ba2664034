"""Checks that an index's name stands for one concrete index, in which ids are unique (rule 7).

A replay after a rollover gave two documents with one id. So aliases that roll over are refused, and also data streams,
which always roll over, and aliases with a routing, since by another name the same ids are in other shards. An index
template can turn a missing name into a data stream at the first write, so the check is repeated after the last write.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from headrace.clock import Clock
from headrace.elasticsearch.errors import TargetChangedError, UnsuitableTargetError
from headrace.elasticsearch.options import IndexingOptions
from headrace.elasticsearch.retry_budget import RetryBudget, request_with_retries
from headrace.elasticsearch.search_server import ask_server
from headrace.elasticsearch.transport import Transport
from headrace.elasticsearch.verdicts import Reason, refusal

_ONE_INDEX = "Write to one concrete index; use one index per period, and headrace's document ids, instead of rollover."

DESCRIPTION = (
    "error",
    "*.aliases",
    "*.data_stream",
    # Every index has it, so none is left out of the answer.
    "*.settings.index.provided_name",
    "*.settings.index.uuid",
    "*.settings.index.lifecycle.rollover_alias",
    "*.settings.index.plugins.index_state_management.rollover_alias",
)
"""The fields that `single_index` needs of the server's answer to ``GET /<name>``, as its ``filter_path``."""


@dataclass(frozen=True, slots=True)
class ConcreteIndex:
    """One index. ``uuid`` distinguishes it from other indices with the same name, before or later; None if unknown."""

    name: str
    uuid: str | None


def describe_indices(transport: Transport, retry_budget: RetryBudget, name: str) -> dict[str, dict[str, Any]] | None:
    """The indices behind the name, with the fields of `DESCRIPTION`; None if there are none yet.

    Raises ElasticsearchRefusedError, and the errors of ``request_with_retries``.
    """
    path = f"/{quote(name, safe='')}?filter_path={','.join(DESCRIPTION)}"
    response = request_with_retries(transport, retry_budget, "GET", path)
    if response.status == 404:
        return None
    parsed = response.json()
    if response.status == 200 and isinstance(parsed, dict):
        return parsed
    raise refusal(response.status, Reason(*response.error()), name)


def single_index(name: str, indices: Mapping[str, dict[str, Any]] | None) -> ConcreteIndex | None:
    """The concrete index behind the name, by Elasticsearch's description of its indices; None if there is none yet.

    Raises UnsuitableTargetError: the name is a data stream, an alias of several indices, or an alias that rolls over or
    has a routing.
    """
    if indices is None:
        return None
    if any("data_stream" in described for described in indices.values()):
        raise UnsuitableTargetError(f"{name!r} is a data stream, in which an id can be there twice.", remedy=_ONE_INDEX)
    concrete = sorted(indices)
    if len(concrete) != 1:
        raise UnsuitableTargetError(
            f"{name!r} is an alias of {len(concrete)} indices ({', '.join(concrete[:5])}).", remedy=_ONE_INDEX
        )
    if concrete[0] != name and _rolls_over(name, indices[concrete[0]]):
        raise UnsuitableTargetError(f"{name!r} is an alias that rolls over (now {concrete[0]!r}).", remedy=_ONE_INDEX)
    if routing := indices[concrete[0]].get("aliases", {}).get(name, {}).get("index_routing"):
        raise UnsuitableTargetError(
            f"{name!r} is an alias of {concrete[0]!r} that has a routing of its own ({routing!r}). An id is unique for "
            "one routing only: by the index's name, or another alias, it could be there a second time.",
            remedy="Take the routing out of the alias, and look for ids that are in several shards; or write to "
            "another index.",
        )
    return ConcreteIndex(concrete[0], indices[concrete[0]].get("settings", {}).get("index", {}).get("uuid"))


def check_known(options: IndexingOptions, now: ConcreteIndex | None) -> None:
    """Raise TargetChangedError if the name of the options' index stands for none of the known indices now.

    Where a UUID is not known, the index's name decides.
    """
    known = [ConcreteIndex(*each) for each in options.known_indices]
    if not known or any(_is_same(each, now) for each in known):
        return
    name, before = options.index, known[0].name
    alias = f"an alias of {before!r}" if before != name else "that index"
    if now is None:
        what = f"There is no index or alias {name!r} any more. It was {alias} when earlier batches were written."
        restore = f"Make it an alias of {before!r} again" if before != name else "Restore it"
    elif now.name == before:
        what = (
            f"Index {before!r} is not the one to which earlier batches were written: it was deleted and created again, "
            "restored from a snapshot, or is in another cluster."
        )
        restore = "Correct the connection or restore the index"
    else:
        kind = "an index" if now.name == name else f"an alias of {now.name!r}"
        what = f"{name!r} is {kind} now. It was {alias} when earlier batches were written."
        restore = f"Point it to {before!r} again" if before != name else f"Let {name!r} be the index again"
    command = ["headrace aliases accept", options.stream_name, options.output_id]
    command += [f"--replay {options.replay}"] * bool(options.replay) + ["--create"] * (now is None)
    raise TargetChangedError(
        f"{what} Nothing of the batch was sent.",
        remedy=f"{restore}. If the change is meant, accept it: `{' '.join(command)}`. The next try then writes there.",
    )


def _is_same(known: ConcreteIndex, now: ConcreteIndex | None) -> bool:
    return now is not None and known.name == now.name and (None in (known.uuid, now.uuid) or known.uuid == now.uuid)


def _rolls_over(alias: str, described: dict[str, Any]) -> bool:
    held = described.get("aliases", {}).get(alias, {})
    settings = described.get("settings", {}).get("index", {})
    # Elasticsearch's lifecycle, OpenSearch's state management.
    managers = (settings.get("lifecycle"), settings.get("plugins", {}).get("index_state_management"))
    rolled = any(isinstance(manager, dict) and manager.get("rollover_alias") == alias for manager in managers)
    return bool(held.get("is_write_index")) or rolled


class TargetIndex:
    """The index of a write. Spark's workers ask about it before and after each write, so by the small transport."""

    def __init__(self, transport: Transport, options: IndexingOptions, *, clock: Clock) -> None:
        self._transport = transport
        self._options = options
        self._clock = clock

    def check_server(self, where: str) -> None:
        """Raise ElasticsearchRefusedError if the server is none that headrace supports."""
        ask_server(self._transport, self._retry_budget(), where)

    def concrete(self) -> ConcreteIndex | None:
        """The concrete index behind the name; None if it does not exist yet.

        Raises:
            UnsuitableTargetError: see `single_index`.
            ElasticsearchRefusedError: the request is not allowed.
            ElasticsearchUnavailableError: there was no answer within ``max_retry_seconds``.
        """
        name = self._options.index
        return single_index(name, describe_indices(self._transport, self._retry_budget(), name))

    def refresh(self) -> None:
        """Make the indexed documents visible to searches."""
        path = f"/{quote(self._options.index, safe='')}/_refresh"
        response = request_with_retries(self._transport, self._retry_budget(), "POST", path)
        if response.status not in (200, 404):
            raise refusal(response.status, Reason(*response.error()), self._options.index)

    def _retry_budget(self) -> RetryBudget:
        return RetryBudget(
            f"Asking about index {self._options.index!r}",
            max_seconds=self._options.max_retry_seconds,
            clock=self._clock,
            cancelled=threading.Event(),
        )
