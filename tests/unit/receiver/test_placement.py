"""Where receivers are placed (Spark's ReceiverSchedulingPolicySuite), and how many executors batches need."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from headrace.blocks import ReceiverId
from headrace.receiver.placement import (
    Executor,
    ExecutorPolicy,
    Placement,
    ReceiverPlacement,
    least_executors,
    reschedule_receiver,
    schedule_receivers,
)
from headrace.stream import ExecutorAllocation, Stream


def receiver(index: int) -> ReceiverId:
    return ReceiverId("air", "records", index)


def executors(hosts: int, per_host: int = 1) -> list[Executor]:
    return [Executor(f"host{host}", str(number)) for host in range(hosts) for number in range(per_host)]


ONE, TWO, THREE, FOUR, FIVE = (Executor(f"host{number}", str(number)) for number in range(1, 6))


class TestReschedule:
    def test_without_executors_nowhere(self) -> None:
        assert reschedule_receiver(None, {}, []) == ()
        assert reschedule_receiver("host1", {}, []) == ()

    def test_the_preferred_host_is_among_the_candidates(self) -> None:
        others = {receiver(1): Placement(running_on=ONE)}
        assert reschedule_receiver("host1", others, [ONE, TWO]) == ("host1", TWO)

    def test_all_idle_executors_if_there_are_any(self) -> None:
        others = {receiver(1): Placement(running_on=ONE), receiver(2): Placement(scheduled=(TWO, THREE))}
        assert reschedule_receiver(None, others, [ONE, TWO, THREE, FOUR, FIVE]) == (FOUR, FIVE)

    def test_all_of_the_least_weight_if_none_is_idle(self) -> None:
        others = {
            receiver(1): Placement(running_on=ONE),
            receiver(2): Placement(running_on=TWO),
            receiver(3): Placement(scheduled=(ONE, THREE, FOUR)),
            receiver(4): Placement(scheduled=(FOUR, FIVE)),
            receiver(5): Placement(scheduled=(THREE, FIVE)),
        }
        # One: 1 1/3, two: 1, three: 5/6, four: 5/6, five: 1.
        assert reschedule_receiver(None, others, [ONE, TWO, THREE, FOUR, FIVE]) == (THREE, FOUR)

    def test_one_neither_running_nor_scheduled_weighs_nothing(self) -> None:
        assert reschedule_receiver(None, {receiver(1): Placement()}, [ONE, TWO]) == (ONE, TWO)

    def test_an_executor_that_is_gone_is_no_candidate(self) -> None:
        """The lightest of all that is known is dead: it goes to the lightest that lives."""
        others = {
            receiver(1): Placement(running_on=ONE),
            receiver(2): Placement(scheduled=(ONE, TWO, THREE)),
            receiver(3): Placement(running_on=TWO),
            receiver(4): Placement(running_on=TWO),
        }
        assert reschedule_receiver(None, others, [ONE, TWO]) == (ONE,)

    def test_a_host_that_is_only_preferred_weighs_on_no_executor(self) -> None:
        others = {receiver(1): Placement(scheduled=("host1", TWO))}
        assert others[receiver(1)].weights() == {TWO: 0.5}
        assert reschedule_receiver(None, others, [ONE, TWO]) == (ONE,)


class TestSchedule:
    def test_evenly_when_there_are_more_receivers_than_executors(self) -> None:
        placed = schedule_receivers([(receiver(n), None) for n in range(6)], executors(3))
        # Two on each, and one candidate for each receiver.
        assert {len(locations) for locations in placed.values()} == {1}
        counts = Counter(location for locations in placed.values() for location in locations)
        assert counts == dict.fromkeys(executors(3), 2)

    def test_evenly_when_there_are_more_executors_than_receivers(self) -> None:
        placed = schedule_receivers([(receiver(n), None) for n in range(3)], executors(6))
        assert {len(locations) for locations in placed.values()} == {2}
        counts = Counter(location for locations in placed.values() for location in locations)
        assert counts == dict.fromkeys(executors(6), 1)

    def test_evenly_when_the_preferred_hosts_are_even(self) -> None:
        """Three without a preference, and three for each of two hosts, on three hosts of two executors."""
        wanted: list[tuple[ReceiverId, str | None]] = [(receiver(n), None) for n in range(3)]
        wanted += [(receiver(n), "host0") for n in range(3, 6)]
        wanted += [(receiver(n), "host1") for n in range(6, 9)]
        placed = schedule_receivers(wanted, executors(3, 2))
        counts = Counter(location for locations in placed.values() for location in locations)
        assert sorted(counts.values()) == [1, 1, 1, 2, 2, 2]
        assert set(counts) == set(executors(3, 2))
        for index, host in [*((n, "host0") for n in range(3, 6)), *((n, "host1") for n in range(6, 9))]:
            (location,) = placed[receiver(index)]
            assert isinstance(location, Executor)
            assert location.host == host

    def test_a_preferred_host_that_is_not_up_stays_a_candidate(self) -> None:
        placed = schedule_receivers([(receiver(0), "elsewhere"), (receiver(1), None)], executors(2))
        assert placed == {receiver(0): ("elsewhere", Executor("host1", "0")), receiver(1): (Executor("host0", "0"),)}

    @pytest.mark.parametrize("hosts", [0, 2])
    def test_no_receivers(self, hosts: int) -> None:
        assert schedule_receivers([], executors(hosts)) == {}

    def test_no_executors(self) -> None:
        placed = schedule_receivers([(receiver(0), None), (receiver(1), "host1")], [])
        assert placed == {receiver(0): (), receiver(1): ()}


FIRST, SECOND = ReceiverId("air", "records", 0), ReceiverId("air", "records", 1)


def test_each_receiver_goes_to_an_executor_of_its_own(make_stream: Callable[..., Stream]) -> None:
    placement = ReceiverPlacement(make_stream(receivers=2))
    assert placement.candidates(FIRST, [ONE, TWO], lambda: {}) == (ONE,)
    assert placement.candidates(SECOND, [ONE, TWO], lambda: {FIRST: None}) == (TWO,)


def test_a_restarting_receiver_goes_to_its_live_planned_executor(
    make_stream: Callable[..., Stream],
) -> None:
    placement = ReceiverPlacement(make_stream(receivers=2))
    placement.candidates(FIRST, [ONE, TWO], lambda: {})
    assert placement.candidates(SECOND, [ONE, TWO], lambda: {FIRST: ONE}) == (TWO,)
    assert placement.candidates(SECOND, [ONE, TWO, THREE], lambda: {FIRST: ONE}) == (TWO,)


def test_a_receiver_whose_executor_is_lost_goes_to_another(make_stream: Callable[..., Stream]) -> None:
    placement = ReceiverPlacement(make_stream(receivers=2))
    placement.candidates(FIRST, [ONE, TWO], lambda: {})
    placement.candidates(SECOND, [ONE, TWO], lambda: {FIRST: ONE})
    assert placement.candidates(SECOND, [ONE], lambda: {FIRST: ONE}) == (ONE,), "the only one that is left"
    assert placement.candidates(SECOND, [ONE, THREE], lambda: {FIRST: ONE}) == (THREE,), (
        "the one that came in its place"
    )


def test_a_starting_receiver_counts_on_its_scheduled_executor(make_stream: Callable[..., Stream]) -> None:
    placement = ReceiverPlacement(make_stream(receivers=2))
    placement.candidates(FIRST, [ONE, TWO], lambda: {})
    placement.candidates(SECOND, [ONE, TWO], lambda: {FIRST: ONE})
    # Both are lost at once, and the first was sent to three.
    assert placement.candidates(FIRST, [THREE], lambda: {}) == (THREE,)
    other = Executor("host4", "4")
    assert placement.candidates(SECOND, [THREE, other], lambda: {FIRST: None}) == (other,)


def test_preferred_hosts_are_one_for_all_or_one_for_each(make_stream: Callable[..., Stream]) -> None:
    executors = [ONE, TWO, Executor("host2", "4")]
    for hosts, wanted in ((("host2",), {"host2"}), (("host2", "host1"), {"host1", "host2"})):
        placement = ReceiverPlacement(make_stream(receivers=2, preferred_hosts=hosts))
        candidates = [placement.candidates(receiver_id, executors, lambda: {})[0] for receiver_id in (FIRST, SECOND)]
        assert {candidate.host for candidate in candidates if isinstance(candidate, Executor)} == wanted
        assert len(set(candidates)) == 2


def test_a_preferred_host_is_a_candidate_whatever_else_is(make_stream: Callable[..., Stream]) -> None:
    placement = ReceiverPlacement(make_stream(receivers=1, preferred_hosts=("elsewhere",)))
    for _ in range(2):
        candidates = placement.candidates(FIRST, [ONE], lambda: {})
        assert "elsewhere" in candidates


def test_without_executors_nowhere_in_particular(make_stream: Callable[..., Stream]) -> None:
    placement = ReceiverPlacement(make_stream(receivers=2))
    assert placement.candidates(FIRST, [], lambda: {}) == ()
    assert placement.candidates(FIRST, [ONE, TWO], lambda: {}) == (ONE,), "the plan is made when there are some"


INTERVAL_MS = 4_000


def policy(**settings: Any) -> ExecutorPolicy:
    return ExecutorPolicy(ExecutorAllocation(**settings), INTERVAL_MS)


def ratio_of(policy: ExecutorPolicy, *processing_ms: int) -> float:
    policy.add(processing_ms)
    ratio = policy.end_interval()
    assert ratio is not None
    return ratio


@pytest.mark.parametrize(
    ("processing_ms", "new", "may_release"),
    [
        (3_600, 1, False),  # exactly 0.9
        (3_601, 1, False),
        (3_599, 0, False),
        (4_000, 1, False),
        (5_999, 1, False),
        (6_000, 2, False),  # half is rounded up
        (10_000, 3, False),  # and not to the even number
        (28_000, 7, False),
        (1_201, 0, False),
        (1_200, 0, True),  # exactly 0.3
        (1_199, 0, True),
        (0, 0, True),
    ],
)
def test_the_ratio_of_processing_time_to_interval_decides(processing_ms: int, new: int, may_release: bool) -> None:
    ours = policy()
    ratio = ratio_of(ours, processing_ms)
    assert (ours.new_executors(ratio), ours.may_release(ratio)) == (new, may_release)


def test_the_users_ratios_decide() -> None:
    ours = policy(scaling_up_ratio=0.5, scaling_down_ratio=0.45)
    requested = [ours.new_executors(ratio_of(ours, processing_ms)) for processing_ms in (1_999, 2_000)]
    assert requested == [0, 1]
    assert [ours.may_release(ratio_of(ours, processing_ms)) for processing_ms in (1_800, 1_801)] == [True, False]


def test_the_average_of_one_scaling_interval_counts() -> None:
    ours = policy()
    assert ratio_of(ours, 8_000, 1_000, 3_000) == 1.0
    assert ours.end_interval() is None, "no batch completed"
    assert ratio_of(ours, 400) == 0.1, "earlier intervals are forgotten"
    assert ratio_of(ours, 3_600, 3_601) == 0.9, "whole milliseconds"


@pytest.mark.parametrize(
    ("settings", "receivers", "cases"),
    [
        ({}, 1, [(0, 1, 1), (3, 1, 4), (5, 4, 9)]),
        ({}, 3, [(0, 1, 3), (1, 1, 3), (2, 2, 4)]),
        ({"minimum": 4}, 1, [(0, 1, 4), (0, 6, 6), (3, 1, 4), (4, 1, 5)]),
        ({"minimum": 1}, 3, [(0, 1, 1), (1, 1, 2)]),
        ({"maximum": 5}, 1, [(0, 2, 2), (3, 9, 5), (5, 1, 5), (7, 1, 5)]),
        ({"minimum": 3, "maximum": 3}, 1, [(1, 1, 3), (3, 2, 3)]),
        ({"maximum": 2}, 3, [(1, 1, 3)]),  # as in Spark the least number is stronger
    ],
)
def test_what_is_requested_is_between_minimum_and_maximum(
    settings: dict[str, int], receivers: int, cases: list[tuple[int, int, int]]
) -> None:
    # Many slots for each executor: only minimum and receivers count.
    least = least_executors(ExecutorAllocation(**settings), receivers, 16)
    for live, new, total in cases:
        assert policy(**settings).total(live, new, least) == total, (live, new)


def test_nothing_is_requested_by_less_than_one_executor() -> None:
    with pytest.raises(ValueError, match="0 executors"):
        policy().total(3, 0, 1)


@pytest.mark.parametrize(
    ("live", "with_receivers", "least", "released"),
    [
        ([], [], 1, None),
        (["7"], [], 1, None),
        (["7"], ["7"], 1, None),
        (["7", "9"], ["7"], 1, "9"),
        (["7", "9"], ["9"], 1, "7"),
        (["7", "9"], ["7", "9"], 1, None),
        (["5", "7", "9"], ["5", "9"], 2, "7"),
        (["5", "7", "9"], ["5"], 3, None),
        (["5", "7"], ["5"], 3, None),
    ],
)
def test_only_an_executor_without_a_receiver_is_released(
    live: list[str], with_receivers: list[str], least: int, released: str | None
) -> None:
    assert policy().executor_to_release(live, with_receivers, least) == released


def test_which_executor_is_released_is_random() -> None:
    ours = ExecutorPolicy(ExecutorAllocation(), INTERVAL_MS, chance=random.Random(4))
    released = {ours.executor_to_release(["1", "2", "3", "4"], ["3"], 1) for _ in range(100)}
    assert released == {"1", "2", "4"}


@pytest.mark.parametrize(
    ("minimum", "receivers", "slots_per_executor", "least"),
    [
        (None, 1, 4, 1),
        (None, 3, 4, 3),
        (None, 3, 1, 4),  # three executors would be full of receivers
        (None, 1, 1, 2),
        (2, 7, 4, 2),
        (2, 8, 4, 3),
        (6, 1, 1, 6),
        (None, 2, 0, 3),  # no executor lives, so its slots are unknown
    ],
)
def test_the_executors_that_are_kept_have_a_slot_for_a_batch(
    minimum: int | None, receivers: int, slots_per_executor: int, least: int
) -> None:
    assert least_executors(ExecutorAllocation(minimum=minimum), receivers, slots_per_executor) == least
