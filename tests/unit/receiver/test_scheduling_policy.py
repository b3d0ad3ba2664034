"""Where receivers are placed, by Spark's ReceiverSchedulingPolicySuite."""

from __future__ import annotations

from collections import Counter

import pytest

from headrace.blocks import ReceiverId
from headrace.receiver.placement import Executor, Placement, reschedule_receiver, schedule_receivers


def receiver(index: int) -> ReceiverId:
    return ReceiverId("air", "records", index)


def executors(hosts: int, each: int = 1) -> list[Executor]:
    return [Executor(f"host{host}", str(number)) for host in range(hosts) for number in range(each)]


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

    def test_one_that_is_neither_running_nor_scheduled_weighs_nothing(self) -> None:
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
