"""The schedule: which faults, in which order, when. The same seed gives the same one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from tests.hammer.errors import HammerError
from tests.hammer.kinds import KINDS, Fault, Kind, Target

# A batch's process lives for some seconds; a fault may come at any time within them.
_AIM_SECONDS = 3.0
_FIRST_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class ScheduleOptions:
    """``pace`` is the mean number of seconds between two faults; ``only`` the targets to hit, all if empty.

    ``network`` adds the faults of the links, several ``brokers`` those of a leader, ``host`` those of a host, which
    ``only`` may name without it.
    """

    seed: int
    minutes: float
    pace: float = 20.0
    cluster: bool = False
    network: bool = False
    host: bool = False
    brokers: int = 1
    only: frozenset[Target] = frozenset()


def make_schedule(options: ScheduleOptions) -> list[Fault]:
    """All faults of a run, in order.

    Every kind comes once before any comes twice, so a long run has all kinds about equally often.

    Raises:
        HammerError: a run with these options has no faults.
    """
    chance = random.Random(options.seed)
    kinds = kinds_of(options)
    if not kinds:
        raise HammerError(f"Only {', '.join(sorted(options.only))}: a run with these options has no such faults.")
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


def kinds_of(options: ScheduleOptions) -> Sequence[Kind]:
    """The kinds of faults that a run with these options has."""
    return [kind for kind in KINDS if _possible(kind, options) and (not options.only or kind.target in options.only)]


def _possible(kind: Kind, options: ScheduleOptions) -> bool:
    if kind.target.is_link:
        return options.network
    if kind.target is Target.LEADER:
        return options.brokers > 1
    if kind.target is Target.CLOCK and options.cluster:
        # Its receivers are in executors, which the job does not start.
        return False
    if kind.target.is_of_host:
        return options.host or kind.target in options.only
    return options.cluster or not kind.cluster_only
