"""Watches that a batch's documents go to the index that was found before, while its tasks write."""

from __future__ import annotations

import threading
from contextlib import closing

from headrace.clock import SystemClock
from headrace.elasticsearch.errors import UnsuitableTargetError
from headrace.elasticsearch.open_target import OpenTarget
from headrace.elasticsearch.options import IndexingOptions
from headrace.elasticsearch.retry_budget import RetryBudget
from headrace.elasticsearch.search_server import ask_server
from headrace.elasticsearch.target import ConcreteIndex, Target
from headrace.elasticsearch.transport import Cluster, ElasticsearchTransport


class TargetWatch:
    """The target of a write as it is before and after the tasks, for the calling process.

    The questions raise UnsuitableTargetError (see `single_index`), ElasticsearchRefusedError if they are not allowed,
    and ElasticsearchUnavailableError if there was no answer within ``max_retry_seconds``.
    """

    def __init__(self, options: IndexingOptions) -> None:
        self._options = options
        self._cluster = Cluster.of(options)
        self._target = options.target

    def check_before(self) -> Target:
        """The target with what its name stands for, for the tasks.

        Refuses a server that is not supported, an index in which ids are not unique, and one that is not the index of
        the output's earlier batches (`Target.check_known`).
        """
        target = self._target
        with closing(open_transport(self._options, 1, self._cluster)) as transport:
            ask_server(transport, self._retry_budget(), ", ".join(map(str, self._cluster.nodes)))
            before = OpenTarget(transport, target).concrete(self._retry_budget())
        target.check_known(before)
        if before is not None and before.name == target.dead_letter_index:
            raise UnsuitableTargetError(
                f"{target.name!r} is an alias of {before.name!r}, the index of its own dead letters.",
                remedy="Name another dead_letter_index.",
            )
        self._target = target.found(before)
        return self._target

    def check_after(self) -> ConcreteIndex | None:
        """The concrete index. Raises UnsuitableTargetError too if it is not the one from before."""
        before, now = self._target.concrete, self.now()
        if before is not None and now != before:
            if now is not None and now.name == before.name:
                what = f"{before.name!r} was deleted and created again; its earlier documents are gone"
            else:
                after = None if now is None else now.name
                what = (
                    f"{self._target.name!r} was moved from {before.name!r} to {after!r}; some of its documents "
                    "may be in both"
                )
            raise UnsuitableTargetError(
                f"While the batch was written {what}.",
                remedy="Write to one concrete index, and run the batch again.",
            )
        return now

    def refresh(self) -> None:
        """Make the documents visible to searches."""
        with closing(open_transport(self._options, 1, self._cluster)) as transport:
            OpenTarget(transport, self._target).refresh(self._retry_budget())

    def now(self) -> ConcreteIndex | None:
        """The concrete index behind the name at present; None if there is none."""
        with closing(open_transport(self._options, 1, self._cluster)) as transport:
            return OpenTarget(transport, self._target).concrete(self._retry_budget())

    def _retry_budget(self) -> RetryBudget:
        return RetryBudget(
            f"Asking about index {self._target.name!r}",
            max_seconds=self._options.max_retry_seconds,
            clock=SystemClock(),
            cancelled=threading.Event(),
        )


def open_transport(
    options: IndexingOptions, connections: int, cluster: Cluster | None = None
) -> ElasticsearchTransport:
    """A transport to the cluster of a write."""
    return ElasticsearchTransport(
        cluster or Cluster.of(options), connections=connections, timeout_seconds=options.request_timeout_seconds
    )
