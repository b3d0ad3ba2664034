"""Watches that a batch's documents go to the index that was found before, while its tasks write."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

from headrace.clock import SystemClock
from headrace.elasticsearch.concrete_index import ConcreteIndex, TargetIndex, check_known
from headrace.elasticsearch.errors import UnsuitableTargetError
from headrace.elasticsearch.options import IndexingOptions
from headrace.elasticsearch.transport import Cluster

if TYPE_CHECKING:
    pass
from headrace.elasticsearch.transport import ElasticsearchTransport


class TargetWatch:
    """The index as it is before and after the tasks, for the calling process."""

    def __init__(self, options: IndexingOptions) -> None:
        self._options = options
        self._cluster = Cluster.of(options)
        self._before: ConcreteIndex | None = None
        self.uuid: str | None = None
        """The UUID of the index that `check_after` found."""

    def check_before(self) -> None:
        """Refuse a server that is not supported, an index in which ids are not unique, and one that is not the index of
        the output's earlier batches (`check_known`)."""
        with closing(open_transport(self._options, 1, self._cluster)) as transport:
            target = TargetIndex(transport, self._options, clock=SystemClock())
            target.check_server(", ".join(map(str, self._cluster.nodes)))
            self._before = target.concrete()
        check_known(self._options, self._before)
        letters = self._options.dead_letter_index
        if self._before is not None and self._before.name == letters:
            raise UnsuitableTargetError(
                f"{self._options.index!r} is an alias of {letters!r}, the index of its own dead letters.",
                remedy="Name another dead_letter_index.",
            )

    def options(self) -> IndexingOptions:
        """The options for the tasks, by what `check_before` has found."""
        through_alias = self._before is not None and self._before.name != self._options.index
        return replace(
            self._options,
            through_alias=through_alias,
            first_alone=self._before is None or not self._options.known_indices,
        )

    def check_after(self) -> str | None:
        """The concrete index. Raises UnsuitableTargetError if it is not the one from before."""
        before, now = self._before, self.now()
        self.uuid = None if now is None else now.uuid
        if before is not None and now != before:
            if now is not None and now.name == before.name:
                what = f"{before.name!r} was deleted and created again; its earlier documents are gone"
            else:
                after = None if now is None else now.name
                what = (
                    f"{self._options.index!r} was moved from {before.name!r} to {after!r}; some of its documents "
                    "may be in both"
                )
            raise UnsuitableTargetError(
                f"While the batch was written {what}.",
                remedy="Write to one concrete index, and run the batch again.",
            )
        return None if now is None else now.name

    def refresh(self) -> None:
        """Make the documents visible to searches."""
        with closing(open_transport(self._options, 1, self._cluster)) as transport:
            TargetIndex(transport, self._options, clock=SystemClock()).refresh()

    def now(self) -> ConcreteIndex | None:
        """The concrete index behind the name at present; None if there is none."""
        with closing(open_transport(self._options, 1, self._cluster)) as transport:
            return TargetIndex(transport, self._options, clock=SystemClock()).concrete()


def open_transport(
    options: IndexingOptions, connections: int, cluster: Cluster | None = None
) -> ElasticsearchTransport:
    return ElasticsearchTransport(
        cluster or Cluster.of(options), connections=connections, timeout_seconds=options.request_timeout_seconds
    )
