"""The schedule: which faults, in which order, when. The same seed gives the same one."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tests.hammer.kinds import KINDS, Fault, Kind, Target

# A batch's process lives for some seconds; a fault may come at any time within them.
_AIM_SECONDS = 3.0
_FIRST_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class ScheduleOptions:
    """``pace`` is the mean number of seconds between two faults; ``only`` the targets to hit, all if empty."""

    seed: int
    minutes: float
    pace: float = 20.0
    cluster: bool = False
    only: frozenset[Target] = frozenset()


def make_schedule(options: ScheduleOptions) -> list[Fault]:
    """All faults of a run, in order.

    Every kind comes once before any comes twice, so a long run has all kinds about equally often.
    """
    chance = random.Random(options.seed)
    kinds = kinds_of(options.cluster, options.only)
    faults: list[Fault] = []
    deck: list[Kind] = []
    at = _FIRST_SECONDS
    while at < options.minutes * 60:
        if not deck:
            deck = list(kinds)
            chance.shuffle(deck)
        kind = deck.pop()
        held = chance.choice(kind.holds)
        faults.append(
            Fault(
                number=len(faults) + 1,
                at=round(at, 1),
                kind=kind,
                aim=round(chance.uniform(0, _AIM_SECONDS), 2),
                hold=round(chance.uniform(held.least, held.most), 1),
                pick=chance.random(),
            )
        )
        at += chance.uniform(0.5, 1.5) * options.pace
    return faults


def kinds_of(cluster: bool, only: Collection[Target] = ()) -> Sequence[Kind]:
    """The kinds of faults with these targets (all if empty), for one machine or for a cluster."""
    return [kind for kind in KINDS if (cluster or not kind.cluster_only) and (not only or kind.target in only)]
