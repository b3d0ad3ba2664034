"""Receivers that come back while executors come and go."""

from __future__ import annotations

from collections.abc import Callable

from headrace.blocks import ReceiverId
from headrace.receiver.placement import Executor, ReceiverPlacement
from headrace.stream import Stream

FIRST, SECOND = ReceiverId("air", "records", 0), ReceiverId("air", "records", 1)
ONE, TWO, THREE = Executor("host1", "1"), Executor("host2", "2"), Executor("host3", "3")


def test_each_receiver_goes_to_an_executor_of_its_own(make_stream: Callable[..., Stream]) -> None:
    placement = ReceiverPlacement(make_stream(receivers=2))
    assert placement.candidates(FIRST, [ONE, TWO], lambda: {}) == (ONE,)
    assert placement.candidates(SECOND, [ONE, TWO], lambda: {FIRST: None}) == (TWO,)


def test_a_receiver_that_restarts_goes_to_its_planned_executor_while_that_lives(
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


def test_a_receiver_that_is_starting_counts_on_its_scheduled_executor(make_stream: Callable[..., Stream]) -> None:
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
        found = [placement.candidates(each, executors, lambda: {})[0] for each in (FIRST, SECOND)]
        assert {each.host for each in found if isinstance(each, Executor)} == wanted
        assert len(set(found)) == 2


def test_a_preferred_host_is_a_candidate_whatever_else_is(make_stream: Callable[..., Stream]) -> None:
    placement = ReceiverPlacement(make_stream(receivers=1, preferred_hosts=("elsewhere",)))
    for _ in range(2):
        found = placement.candidates(FIRST, [ONE], lambda: {})
        assert "elsewhere" in found


def test_without_executors_nowhere_in_particular(make_stream: Callable[..., Stream]) -> None:
    placement = ReceiverPlacement(make_stream(receivers=2))
    assert placement.candidates(FIRST, [], lambda: {}) == ()
    assert placement.candidates(FIRST, [ONE, TWO], lambda: {}) == (ONE,), "the plan is made when there are some"
