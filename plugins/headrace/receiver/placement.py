"""Decides on which executors a stream's receivers start, and when the job gets or loses executors.

As Spark's ReceiverSchedulingPolicy it takes preferred hosts first, then the least loaded. The choice is a preference:
the cluster may place a receiver elsewhere when none of its executors has a free slot.

The number of executors follows Spark's ExecutorAllocationManager for streaming: the measure is the ratio of the
batches' average processing time to the batch interval. Spark's own dynamic allocation waits for idle executors. That
does not fit: a batch comes every few seconds, so no executor is idle for long.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from headrace.blocks import ReceiverId
from headrace.stream import Stream
from headrace.stream.model import milliseconds
from headrace.stream.settings import ExecutorAllocation


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
        return {place: share for place in self.scheduled if isinstance(place, Executor)}


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
        least = min(among, key=lambda executor: loads[executor])
        loads[least] += 1
        candidates[receiver].append(least)

    for receiver, host in receivers:
        on_host = [executor for executor in loads if executor.host == host]
        if on_host:
            take_least_loaded(receiver, on_host)
        elif host is not None:
            # The host has no executor, or none yet.
            candidates[receiver].append(host)
    for receiver, locations in candidates.items():
        if not locations:
            take_least_loaded(receiver, loads)
    for idle in [executor for executor, load in loads.items() if load == 0]:
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
    return (*preferred, *sorted(executor for executor in executors if weights[executor] == least))


def least_executors(settings: ExecutorAllocation, receivers: int, slots_per_executor: int) -> int:
    """The number of executors that a receiver job keeps.

    It is the minimum of ``settings``, or more if those executors have no slot for a batch beside the receivers.
    """
    minimum = settings.minimum or max(1, receivers)
    return max(minimum, -(-(receivers + 1) // max(1, slots_per_executor)))


class ExecutorPolicy:
    """Collects the processing times of one scaling interval after the other, and computes what follows from them.

    ``least`` in its methods is a number of executors, by `least_executors`.
    """

    def __init__(
        self, settings: ExecutorAllocation, batch_interval_ms: int, *, chance: random.Random | None = None
    ) -> None:
        self._settings = settings
        self._batch_interval_ms = batch_interval_ms
        self._chance = chance or random.Random()  # noqa: S311 - no secret
        self._processing_ms: list[int] = []

    @property
    def scaling_interval_seconds(self) -> float:
        """The time between two decisions, in seconds."""
        return milliseconds(self._settings.scaling_interval) / 1000

    def add(self, processing_ms: Iterable[int]) -> None:
        """Add the processing times of completed batches, in milliseconds."""
        self._processing_ms += processing_ms

    def end_interval(self) -> float | None:
        """End the scaling interval. Returns its ratio, or None if no batch completed in it."""
        times, self._processing_ms = self._processing_ms, []
        if not times:
            return None
        # Whole milliseconds, as in Spark.
        return sum(times) // len(times) / self._batch_interval_ms

    def new_executors(self, ratio: float) -> int:
        """How many executors to add at this ratio; 0 if none."""
        if ratio < self._settings.scaling_up_ratio:
            return 0
        # Half is rounded up, as in Spark; Python's round() would make 2 of 2.5.
        return max(math.floor(ratio + 0.5), 1)

    def may_release(self, ratio: float) -> bool:
        """Whether one executor may be released at this ratio."""
        return ratio <= self._settings.scaling_down_ratio

    def total(self, live: int, new: int, least: int) -> int:
        """The total of executors to request in order to have ``new`` more than the ``live`` ones.

        Raises:
            ValueError: ``new`` is less than 1.
        """
        if new < 1:
            raise ValueError(f"{new} executors cannot be added")
        wanted = live + new
        if self._settings.maximum is not None:
            wanted = min(wanted, self._settings.maximum)
        return max(wanted, least)

    def executor_to_release(self, live: Sequence[str], with_receivers: Collection[str], least: int) -> str | None:
        """A random one of the ``live`` executors that runs no receiver; None if ``least`` or fewer are live, or if all
        of them run receivers."""
        if len(live) <= least:
            return None
        removable = [executor for executor in live if executor not in with_receivers]
        return self._chance.choice(removable) if removable else None


class ReceiverPlacement:
    """Keeps the plan made for all receivers when the first of them started, as Spark's tracker does.

    A receiver that restarts follows the plan while one of its planned executors lives; otherwise it is placed again
    beside the others. In a job of several streams, the receivers of a stream that starts beside others are placed one
    after the other, without a plan.
    """

    def __init__(self, stream: Stream) -> None:
        self._preferred: list[tuple[ReceiverId, str | None]] = []
        for source in stream.inputs:
            hosts = source.preferred_hosts
            for index in range(source.receivers):
                # One host for all receivers, or one for each.
                host = hosts[min(index, len(hosts) - 1)] if hosts else None
                self._preferred.append((ReceiverId(stream.name, source.id, index), host))
        self._plan: dict[ReceiverId, tuple[Location, ...]] = {}
        self._latest: dict[ReceiverId, tuple[Location, ...]] = {}

    def candidates(
        self,
        receiver: ReceiverId,
        executors: Collection[Executor],
        running: Callable[[], Mapping[ReceiverId, Executor | None]],
        of_other_streams: Mapping[ReceiverId, Placement] | None = None,
        *,
        ignore_plan: bool = False,
    ) -> tuple[Location, ...]:
        """Return where to start ``receiver``; empty (no preference) without executors.

        ``running`` returns the receivers that were started and have not ended, each with its executor, or None while it
        has none yet. It is called only when needed. ``of_other_streams``: receivers in the same job. ``ignore_plan``:
        choose by the present load alone.
        """
        if not executors:
            return ()
        if not self._plan and not of_other_streams:
            self._plan = schedule_receivers(self._preferred, executors)
        planned = () if ignore_plan else self._plan.get(receiver, ())
        places = tuple(place for place in planned if place in executors or isinstance(place, str))
        if not any(isinstance(place, Executor) for place in places):
            others = {
                other: Placement(self._latest.get(other, ()), executor)
                for other, executor in running().items()
                if other != receiver
            }
            beside = {**others, **(of_other_streams or {})}
            places = reschedule_receiver(dict(self._preferred).get(receiver), beside, executors)
        self._latest[receiver] = places
        return places
