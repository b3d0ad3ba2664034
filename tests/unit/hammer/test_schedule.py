"""Which faults are injected, and when: by the seed alone."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from tests.hammer.errors import HammerError
from tests.hammer.kinds import KINDS, LINKS, WORDS, Action, Target
from tests.hammer.schedule import ScheduleOptions, kinds_of, make_schedule


def test_the_same_seed_gives_the_same_schedule() -> None:
    options = ScheduleOptions(seed=7, minutes=60)
    assert make_schedule(options) == make_schedule(options)
    other = make_schedule(ScheduleOptions(seed=8, minutes=60))
    assert [fault.kind for fault in make_schedule(options)][:10] != [fault.kind for fault in other][:10]


def test_a_longer_run_begins_like_a_shorter_one() -> None:
    short = make_schedule(ScheduleOptions(seed=3, minutes=5))
    assert make_schedule(ScheduleOptions(seed=3, minutes=60))[: len(short)] == short


@pytest.mark.parametrize(
    "more", [{}, {"cluster": True}, {"network": True}, {"network": True, "brokers": 3}, {"host": True}]
)
def test_each_kind_comes_once_before_one_comes_twice(more: dict[str, Any]) -> None:
    options = ScheduleOptions(seed=1, minutes=120, **more)
    faults = make_schedule(options)
    kinds = kinds_of(options)
    dealt = [fault.kind for fault in faults]
    for start in range(0, len(dealt) - len(kinds), len(kinds)):
        assert Counter(dealt[start : start + len(kinds)]) == Counter(kinds)


def test_the_pace_is_the_mean_time_between_faults() -> None:
    faults = make_schedule(ScheduleOptions(seed=1, minutes=600, pace=30))
    assert 570 / 30 * 60 < len(faults) < 630 / 30 * 60
    assert [fault.at for fault in faults] == sorted(fault.at for fault in faults)
    assert faults[-1].at < 600 * 60


def test_what_is_held_is_held_within_its_bounds() -> None:
    for fault in make_schedule(ScheduleOptions(seed=5, minutes=600, cluster=True)):
        assert any(held.least <= fault.hold <= held.most for held in fault.kind.holds), fault
        assert bool(fault.hold) == (fault.kind.holds[0].most > 0)
        assert 0 <= fault.pick < 1


def test_zombies_outlive_their_leases() -> None:
    """A receiver's lease has 10 s, those of receiver jobs and of attempts at batches 30 s."""
    faults = make_schedule(ScheduleOptions(seed=5, minutes=600))
    for target, lease in ((Target.RECEIVER_TASK, 10), (Target.RECEIVER_DRIVER, 30), (Target.BATCH, 30)):
        holds = [fault.hold for fault in faults if fault.kind.target is target and fault.kind.action is Action.HANG]
        assert any(hold > lease + 2 for hold in holds)
        assert any(hold < lease for hold in holds)


def test_only_the_targets_that_are_wanted_are_hit() -> None:
    only = frozenset({Target.KAFKA, Target.DISK})
    faults = make_schedule(ScheduleOptions(seed=5, minutes=60, only=only))
    assert {fault.kind.target for fault in faults} == only


def test_everything_that_the_issue_names_is_hit() -> None:
    kinds = {(kind.target, kind.action) for kind in KINDS}
    processes = (Target.RECEIVER_TASK, Target.RECEIVER_DRIVER, Target.BATCH, Target.EXECUTOR)
    servers = (
        Target.SCHEDULER,
        Target.TRIGGERER,
        Target.API_SERVER,
        Target.KAFKA,
        Target.ELASTICSEARCH,
        Target.POSTGRES,
    )
    assert {(target, action) for target in (*processes, *servers) for action in (Action.KILL, Action.HANG)} <= kinds
    assert {(target, Action.RESTART) for target in servers} <= kinds
    assert (Target.DISK, Action.FILL) in kinds


def test_links_are_hit_by_each_network_fault_only_if_asked_for() -> None:
    faults = {
        Action.CUT,
        Action.RESET,
        Action.BLACKHOLE,
        Action.LOSE_ANSWERS,
        Action.DELAY,
        Action.TRICKLE,
        Action.FLAP,
    }
    for link in LINKS:
        options = ScheduleOptions(seed=5, minutes=60, network=True, only=frozenset({link}))
        assert {fault.kind.action for fault in make_schedule(options)} == faults
    assert not any(fault.kind.target.is_link for fault in make_schedule(ScheduleOptions(seed=5, minutes=60)))


def test_a_leader_is_hit_only_among_several_brokers() -> None:
    assert not any(kind.target is Target.LEADER for kind in kinds_of(ScheduleOptions(seed=5, minutes=60)))
    three = kinds_of(ScheduleOptions(seed=5, minutes=60, brokers=3))
    assert {kind.action for kind in three if kind.target is Target.LEADER} == {Action.KILL, Action.HANG}


def test_each_fault_that_must_be_seen_lasts_long_enough_at_times() -> None:
    for kind in KINDS:
        if kind.visible_after is not None:
            assert any(held.least > kind.visible_after for held in kind.holds)
            assert kind.target in WORDS


def test_a_hosts_faults_are_injected_only_if_a_run_asks_for_them() -> None:
    of_host = {Target.LEDGER_DISK, Target.SYNCS, Target.CLOCK}
    assert not of_host & {kind.target for kind in kinds_of(ScheduleOptions(seed=5, minutes=60))}
    assert of_host < {kind.target for kind in kinds_of(ScheduleOptions(seed=5, minutes=60, host=True))}
    for target in of_host:
        only = kinds_of(ScheduleOptions(seed=5, minutes=60, only=frozenset({target})))
        assert {kind.target for kind in only} == {target}
    clocks = kinds_of(ScheduleOptions(seed=5, minutes=60, host=True, cluster=True))
    assert Target.CLOCK not in {kind.target for kind in clocks}


def test_a_run_that_would_have_no_fault_is_refused() -> None:
    with pytest.raises(HammerError, match="Only leader"):
        make_schedule(ScheduleOptions(seed=5, minutes=60, only=frozenset({Target.LEADER})))
