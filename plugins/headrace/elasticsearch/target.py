"""A place that documents are sent to: a name, the one concrete index behind it, and whose dead letters go where.

Ids are unique in one concrete index only (rule 7): a replay after a rollover gave two documents with one id. So aliases
that roll over are refused, and also data streams, which always roll over, and aliases with a routing, since by another
name the same ids are in other shards. An index template can turn a missing name into a data stream at the first write,
so the check is repeated after the last write (``target_watch``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self
from urllib.parse import quote

import numpy as np

from headrace.elasticsearch.errors import TargetChangedError, UnsuitableTargetError
from headrace.elasticsearch.retry_budget import RetryBudget, request_with_retries
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

    def may_be(self, other: ConcreteIndex | None) -> bool:
        """Whether both are one index. Where a UUID is not known, the name decides."""
        return other is not None and self.name == other.name and (None in (self.uuid, other.uuid) or self == other)


class IndexOutput(Protocol):
    """What an output says of its target."""

    @property
    def index_text(self) -> str: ...

    @property
    def dead_letters(self) -> str: ...

    @property
    def step(self) -> str: ...

    @property
    def require_alias(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose documents and dead letters they are: ``output_id`` is the output's step, ``replay`` the name of a replay,
    "" for the stream's own output."""

    stream_name: str = ""
    output_id: str = ""
    replay: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What is known of a place before rows are sent there. Spark pickles it for the tasks of the write."""

    name: str
    """One concrete index, or an alias of exactly one that does not roll over. Elasticsearch creates a missing one."""
    dead_letter_index: str
    owner: Owner = Owner()
    known: tuple[ConcreteIndex, ...] = ()
    """What the name may stand for: the indices of the output's earlier batches. None are known of an output without
    earlier batches there, which may create its index."""
    known_letters_index: str | None = None
    """The concrete index to which letters of earlier batches were written, if ``dead_letter_index`` is an alias."""
    concrete: ConcreteIndex | None = None
    """What the name stands for; None if it was not asked for, or does not exist yet."""
    first_alone: bool = False
    """Whether a task sends a document alone first, to see where it goes."""
    require_alias: bool = False
    """Whether the name has to be an alias, so that the server creates no index of this name."""
    is_one_of_several: bool = False
    """Whether rows of the output have an index each, and this is one of them."""

    @classmethod
    def of(
        cls,
        output: IndexOutput,
        stream_name: str,
        *,
        replay: str = "",
        known: tuple[ConcreteIndex, ...] = (),
        known_letters_index: str | None = None,
    ) -> Self:
        """The target of a stream's output."""
        return cls(
            name=output.index_text,
            dead_letter_index=output.dead_letters,
            owner=Owner(stream_name, output.step, replay),
            known=known,
            known_letters_index=known_letters_index,
            require_alias=output.require_alias,
        )

    @property
    def through_alias(self) -> bool:
        """Whether the name is an alias, so that the server must refuse to create an index of this name."""
        return self.require_alias or (self.concrete is not None and self.concrete.name != self.name)

    @property
    def letter_owner(self) -> tuple[str, ...]:
        """The parts of the ids of its dead letters that name stream, output and index, as far as they are known."""
        return tuple(part for part in (self.owner.stream_name, self.owner.output_id, self.name) if part)

    @property
    def letters(self) -> Target:
        """The place of its dead letters. Whether ids are unique there is checked before they are sent."""
        name = self.dead_letter_index
        return Target(name=name, dead_letter_index=name, owner=self.owner, first_alone=self.first_alone)

    def found(self, concrete: ConcreteIndex | None) -> Target:
        """The target with what its name stands for now, before a write."""
        return replace(self, concrete=concrete, first_alone=concrete is None or not self.known)

    def at(self, name: str, *, known: tuple[ConcreteIndex, ...] = ()) -> Target:
        """The index of this name, for an output whose rows have an index each."""
        return replace(self, name=name, known=known, is_one_of_several=True)

    def of_output(self, output_id: str) -> Target:
        """The same place for an output's former id."""
        return replace(self, owner=replace(self.owner, output_id=output_id))

    def check_known(self, now: ConcreteIndex | None) -> None:
        """Raise TargetChangedError if the name stands for none of the known indices now."""
        if not self.known or any(each.may_be(now) for each in self.known):
            return
        name, before = self.name, self.known[0].name
        alias = f"an alias of {before!r}" if before != name else "that index"
        if now is None:
            what = f"There is no index or alias {name!r} any more. It was {alias} when earlier batches were written."
            restore = f"Make it an alias of {before!r} again" if before != name else "Restore it"
        elif now.name == before:
            what = (
                f"Index {before!r} is not the one to which earlier batches were written: it was deleted and created "
                "again, restored from a snapshot, or is in another cluster."
            )
            restore = "Correct the connection or restore the index"
        else:
            kind = "an index" if now.name == name else f"an alias of {now.name!r}"
            what = f"{name!r} is {kind} now. It was {alias} when earlier batches were written."
            restore = f"Point it to {before!r} again" if before != name else f"Let {name!r} be the index again"
        owner = self.owner
        command = ["headrace aliases accept", owner.stream_name, owner.output_id]
        command += [f"--index {name}"] * self.is_one_of_several
        command += [f"--replay {owner.replay}"] * bool(owner.replay) + ["--create"] * (now is None)
        raise TargetChangedError(
            f"{what} Nothing of the batch was sent.",
            remedy=f"{restore}. If the change is meant, accept it: `{' '.join(command)}`. The next try then writes "
            "there.",
        )


@dataclass(frozen=True, slots=True)
class RowTargets:
    """The target of each row: ``whole``, or that of the row's number in ``codes`` (int64 array). -1: ``whole``, as that
    of a row without a name."""

    whole: Target
    several: tuple[Target, ...] = ()
    codes: Any | None = None

    def of(self, row: int) -> Target:
        code = -1 if self.codes is None else int(self.codes[row])
        return self.whole if code < 0 else self.several[code]

    def taken(self, rows: Any) -> RowTargets:
        """Those of some of the rows (ascending numbers)."""
        return self if self.codes is None else replace(self, codes=self.codes[rows])

    def groups(self, number: int) -> list[Any]:
        """The numbers of the rows of each target, of ``number`` rows."""
        if self.codes is None:
            return [np.arange(number)]
        return [np.flatnonzero(self.codes == code) for code in np.unique(self.codes)]

    def numbers(self) -> Any | None:
        """A number (int64 array) for each row's target, equal in all tasks; None if all have one."""
        if self.codes is None:
            return None
        digests = [hashlib.sha256(target.name.encode()).digest()[:8] for target in (*self.several, self.whole)]
        return np.array([int.from_bytes(digest, signed=True) for digest in digests], np.int64)[self.codes]


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


def _rolls_over(alias: str, described: dict[str, Any]) -> bool:
    held = described.get("aliases", {}).get(alias, {})
    settings = described.get("settings", {}).get("index", {})
    # Elasticsearch's lifecycle, OpenSearch's state management.
    managers = (settings.get("lifecycle"), settings.get("plugins", {}).get("index_state_management"))
    rolled = any(isinstance(manager, dict) and manager.get("rollover_alias") == alias for manager in managers)
    return bool(held.get("is_write_index")) or rolled
