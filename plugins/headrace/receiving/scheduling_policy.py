"""On which executors receivers may start, as Spark's ReceiverSchedulingPolicy. Pure functions.

Preferred locations (hosts) come first and are shared evenly; the rest goes evenly to the least loaded executors.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Executor:
    """An executor by its host and id."""

    host: str
    executor_id: str


@dataclass(frozen=True, slots=True)
class ReceiverPlace:
    """Where another receiver is: running somewhere, or scheduled to one of some candidates."""

    running: Executor | None = None
    candidates: tuple[Executor, ...] = ()

    def weights(self) -> dict[Executor, float]:
        """A running receiver weighs 1, a scheduled one 1/number of candidates on each of them."""
        if self.running is not None:
            return {self.running: 1.0}
        return {executor: 1.0 / len(self.candidates) for executor in self.candidates}


def schedule_receivers(
    receivers: Sequence[int], executors: Collection[Executor], preferred: Mapping[int, str] | None = None
) -> dict[int, tuple[Executor, ...]]:
    """Candidates for all receivers at the start. ``preferred`` maps a receiver to the host that it wants.

    With more executors than receivers the idle ones become further candidates, evenly. Without executors every
    receiver gets an empty tuple.
    """
    preferred = preferred or {}
    scheduled: dict[int, list[Executor]] = {receiver: [] for receiver in receivers}
    load = dict.fromkeys(sorted(executors), 0)
    if not load:
        return dict.fromkeys(receivers, ())
    without_place = []
    for receiver in receivers:
        on_host = [executor for executor in load if executor.host == preferred.get(receiver)]
        if not on_host:
            without_place.append(receiver)
            continue
        chosen = min(on_host, key=lambda executor: load[executor])
        scheduled[receiver].append(chosen)
        load[chosen] += 1
    for receiver in without_place:
        chosen = min(load, key=lambda executor: load[executor])
        scheduled[receiver].append(chosen)
        load[chosen] += 1
    for executor in [each for each, receivers_there in load.items() if receivers_there == 0]:
        fewest = min(receivers, key=lambda receiver: len(scheduled[receiver]), default=None)
        if fewest is None:
            break
        scheduled[fewest].append(executor)
    return {receiver: tuple(candidates) for receiver, candidates in scheduled.items()}


def reschedule_receiver(
    executors: Collection[Executor], others: Collection[ReceiverPlace], preferred: str | None = None
) -> tuple[Executor, ...]:
    """Candidates for one receiver that has to start again: on its preferred host, and all idle executors, or else
    all that carry the least."""
    if not executors:
        return ()
    wanted = {executor for executor in executors if executor.host == preferred}
    weights = dict.fromkeys(sorted(executors), 0.0)
    for place in others:
        for executor, weight in place.weights().items():
            if executor in weights:
                weights[executor] += weight
    idle = [executor for executor, weight in weights.items() if weight == 0]
    least = min(weights.values())
    lightest = idle or [executor for executor, weight in weights.items() if weight == least]
    return tuple(sorted({*wanted, *lightest}))
