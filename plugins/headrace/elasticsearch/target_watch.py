"""Watches that a batch's documents go to the indices that were found before, while its tasks write."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import TypeVar

from headrace.clock import SystemClock
from headrace.elasticsearch.errors import TargetChangedError, UnsuitableTargetError
from headrace.elasticsearch.open_target import OpenTarget
from headrace.elasticsearch.options import IndexingOptions
from headrace.elasticsearch.retry_budget import RetryBudget
from headrace.elasticsearch.search_server import ask_server
from headrace.elasticsearch.target import ConcreteIndex, Target
from headrace.elasticsearch.transport import Cluster, ElasticsearchTransport, Transport

_Answer = TypeVar("_Answer")
_NAMES_SHOWN = 5

logger = logging.getLogger(__name__)


class TargetWatch:
    """The targets of a write as they are before and after the tasks, for the calling process.

    The questions raise UnsuitableTargetError (see `single_index`), ElasticsearchRefusedError if they are not allowed,
    and ElasticsearchUnavailableError if there was no answer within ``max_retry_seconds``.
    """

    def __init__(self, options: IndexingOptions) -> None:
        self._options = options
        self._cluster = Cluster.of(options)
        self._targets = options.watched

    def check_before(self) -> tuple[Target, ...]:
        """The targets with what their names stand for, for the tasks.

        Refuses a server that is not supported, an index in which ids are not unique, and one that is not the index of
        the output's earlier batches (`Target.check_known`). Of an output whose rows name their indices, one that was
        deleted may be created again.
        """
        targets = []
        changed: dict[str, TargetChangedError] = {}
        with closing(open_transport(self._options, 1, self._cluster)) as transport:
            where = ", ".join(map(str, self._cluster.nodes))
            ask_server(transport, self._retry_budget(self._options.target), where)
            for target in self._targets:
                before = self._concrete(transport, target)
                if self._options.names is not None and _was_index(target, before):
                    if before is None or not any(each.may_be(before) for each in target.known):
                        # By a retention, perhaps. A late record of a day that is gone must not stop the stream.
                        logger.warning(
                            "index %r of earlier batches was deleted since; rows of this batch name it again",
                            target.name,
                        )
                else:
                    try:
                        target.check_known(before)
                    except TargetChangedError as error:
                        changed[target.name] = error
                if before is not None and before.name == target.dead_letter_index:
                    raise UnsuitableTargetError(
                        f"{target.name!r} is an alias of {before.name!r}, the index of its own dead letters.",
                        remedy="Name another dead_letter_index.",
                    )
                targets.append(target.found(before))
        _raise_changed(changed)
        check_creation([target.name for target in targets if target.concrete is None], self._options)
        _check_aliases(targets)
        _check_one_name_each(targets)
        self._targets = tuple(targets)
        return self._targets

    def check_after(self) -> tuple[Target, ...]:
        """The targets with their indices. Raises UnsuitableTargetError too if one is not the index from before."""
        after = self._ask(self._concrete)
        for target, now in zip(self._targets, after, strict=True):
            before = target.concrete
            if before is None or now == before:
                continue
            if now is not None and now.name == before.name:
                what = f"{before.name!r} was deleted and created again; its earlier documents are gone"
            else:
                moved_to = None if now is None else now.name
                what = (
                    f"{target.name!r} was moved from {before.name!r} to {moved_to!r}; some of its documents "
                    "may be in both"
                )
            raise UnsuitableTargetError(
                f"While the batch was written {what}.",
                remedy="Write to one concrete index, and run the batch again.",
            )
        return tuple(replace(target, concrete=now) for target, now in zip(self._targets, after, strict=True))

    def refresh(self) -> None:
        """Make the documents visible to searches."""
        self._ask(lambda transport, target: OpenTarget(transport, target).refresh(self._retry_budget(target)))

    def now(self) -> tuple[ConcreteIndex | None, ...]:
        """The concrete index behind each name at present; None if there is none."""
        return tuple(self._ask(self._concrete))

    def _concrete(self, transport: Transport, target: Target) -> ConcreteIndex | None:
        return OpenTarget(transport, target).concrete(self._retry_budget(target))

    def _ask(self, question: Callable[[Transport, Target], _Answer]) -> list[_Answer]:
        with closing(open_transport(self._options, 1, self._cluster)) as transport:
            return [question(transport, target) for target in self._targets]

    def _retry_budget(self, target: Target) -> RetryBudget:
        return RetryBudget(
            f"Asking about index {target.name!r}",
            max_seconds=self._options.max_retry_seconds,
            clock=SystemClock(),
            cancelled=threading.Event(),
        )


def _raise_changed(changed: Mapping[str, TargetChangedError]) -> None:
    """Raise the error of the first of these names, which are another index than before; it names all others too."""
    if changed:
        (_, first), *others = changed.items()
        if not others:
            raise first
        named = ", ".join(repr(name) for name, _ in others)
        raise TargetChangedError(
            f"{first.what} Of the rows' other indices these have changed too: {named}.",
            remedy=f"{first.remedy} Do the same for each of the others, by its --index.",
        )


def check_creation(missing: Sequence[str], options: IndexingOptions) -> None:
    """Raise UnsuitableTargetError if there are missing indices, and the output may not create them."""
    if missing and not options.create_index:
        named = ", ".join(map(repr, missing[:_NAMES_SHOWN])) + (", …" if len(missing) > _NAMES_SHOWN else "")
        raise UnsuitableTargetError(
            f"There is no index {named}, and the output has create_index=False. Nothing was sent.",
            remedy="Create what is missing, or let the output create it: create_index=True.",
        )


def _check_aliases(targets: Sequence[Target]) -> None:
    no_aliases = [target for target in targets if target.require_alias and _is_no_alias(target)]
    if no_aliases:
        named = ", ".join(repr(target.name) for target in no_aliases[:_NAMES_SHOWN])
        raise UnsuitableTargetError(
            f"{named}{', …' if len(no_aliases) > _NAMES_SHOWN else ''}: no alias has this name, and the output has "
            "require_alias=True. Nothing was sent.",
            remedy="Create the alias, of one index; or leave out require_alias.",
        )


def _is_no_alias(target: Target) -> bool:
    return target.concrete is None or target.concrete.name == target.name


def _was_index(target: Target, now: ConcreteIndex | None) -> bool:
    """Whether the name was an index of that name in earlier batches, and is none or such a one now."""
    names = {each.name for each in target.known}
    return names == {target.name} and (now is None or now.name == target.name)


def _check_one_name_each(targets: Sequence[Target]) -> None:
    """Raise UnsuitableTargetError if two names stand for one index: a document of each could have one id there."""
    indices = Counter(target.concrete for target in targets if target.concrete is not None)
    for index, number in indices.items():
        if number > 1:
            names = sorted(target.name for target in targets if target.concrete == index)
            raise UnsuitableTargetError(
                f"{' and '.join(map(repr, names[:_NAMES_SHOWN]))} are names of one index, {index.name!r}. Rows of the "
                "batch that differ in them may have the same id there. Nothing of the batch was sent.",
                remedy="Let each name be an index of its own, or an alias of one.",
            )


def open_transport(
    options: IndexingOptions, connections: int, cluster: Cluster | None = None
) -> ElasticsearchTransport:
    """A transport to the cluster of a write."""
    return ElasticsearchTransport(
        cluster or Cluster.of(options), connections=connections, timeout_seconds=options.request_timeout_seconds
    )
