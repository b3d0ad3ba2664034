"""Chooses executors for receivers, as Spark's ReceiverSchedulingPolicy: preferred hosts first, then the least loaded.

The choice is a preference: the cluster may place a receiver elsewhere when none of its executors has a free slot.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from headrace.blocks import ReceiverId


@dataclass(frozen=True, slots=True, order=True)
class Executor:
    """An executor on a host."""

    host: str
    executor_id: str

    def __str__(self) -> str:
        return f"executor {self.executor_id} on {self.host}"


Location = Executor | str
"""An executor, or a host without a known executor."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a receiver runs: on ``running_on``, or, while that is None, soon on one of ``scheduled``."""

    scheduled: tuple[Location, ...] = ()
    running_on: Executor | None = None

    def weights(self) -> dict[Executor, Fraction]:
        """Return the load on each executor: 1 where the receiver runs, else the probability that it will run there."""
        if self.running_on is not None:
            return {self.running_on: Fraction(1)}
        share = Fraction(1, max(1, len(self.scheduled)))
        return {each: share for each in self.scheduled if isinstance(each, Executor)}


def schedule_receivers(
    receivers: Sequence[tuple[ReceiverId, str | None]], executors: Collection[Executor]
) -> dict[ReceiverId, tuple[Location, ...]]:
    """Return candidates for all receivers, before any of them runs.

    ``receivers`` are pairs of a receiver and its preferred host or None. Each receiver gets at least one location, and
    each executor is a candidate of some receiver. Without executors there are no candidates.
    """
    if not executors:
        return {receiver: () for receiver, _ in receivers}
    candidates: dict[ReceiverId, list[Location]] = {receiver: [] for receiver, _ in receivers}
    loads = dict.fromkeys(sorted(executors), 0)

    def take_least_loaded(receiver: ReceiverId, among: Iterable[Executor]) -> None:
        least = min(among, key=lambda each: loads[each])
        loads[least] += 1
        candidates[receiver].append(least)

    for receiver, host in receivers:
        on_host = [each for each in loads if each.host == host]
        if on_host:
            take_least_loaded(receiver, on_host)
        elif host is not None:
            # The host has no executor, or none yet.
            candidates[receiver].append(host)
    for receiver, locations in candidates.items():
        if not locations:
            take_least_loaded(receiver, loads)
    for idle in [each for each, load in loads.items() if load == 0]:
        if candidates:
            min(candidates.values(), key=len).append(idle)
    return {receiver: tuple(locations) for receiver, locations in candidates.items()}


def reschedule_receiver(
    preferred_host: str | None, others: Mapping[ReceiverId, Placement], executors: Collection[Executor]
) -> tuple[Location, ...]:
    """Return candidates for one receiver that restarts beside the ``others``: its preferred host, and the executors
    with the least load.
    """
    if not executors:
        return ()
    weights = dict.fromkeys(executors, Fraction(0))
    for placement in others.values():
        for executor, weight in placement.weights().items():
            # Skip executors that are gone.
            if executor in weights:
                weights[executor] += weight
    least = min(weights.values())
    preferred = () if preferred_host is None else (preferred_host,)
    return (*preferred, *sorted(each for each in executors if weights[each] == least))
