"""How many executors follow from batches' processing times: Spark's cases, with numbers of our own."""

from __future__ import annotations

import random
from typing import Any

import pytest

from headrace.receiver.placement import ExecutorPolicy, least_executors
from headrace.stream import ExecutorAllocation

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
    found = [ours.new_executors(ratio_of(ours, each)) for each in (1_999, 2_000)]
    assert found == [0, 1]
    assert [ours.may_release(ratio_of(ours, each)) for each in (1_800, 1_801)] == [True, False]


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
