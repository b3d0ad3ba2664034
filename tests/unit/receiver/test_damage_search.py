"""How far damage is passed over: to the first offset that can be read, and never beyond one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.receiver.damage_search import DamageSearch

Batches = Sequence[tuple[int, bool]]
"""The number of offsets in each, and whether it is damaged."""


def search(batches: Batches, position: int = 0, *, bases: bool = True) -> tuple[DamageSearch, int]:
    """A search that has ended, and how many offsets it tried; ``bases``: the client tells where batches begin."""
    offsets = [(sum(n for n, _ in batches[:i]), damaged) for i, (n, damaged) in enumerate(batches) for _ in range(n)]
    found = DamageSearch(position, len(offsets))
    tries = 0
    while found.found is None and not found.hopeless:
        assert position <= found.at < len(offsets)
        base, damaged = offsets[found.at]
        found.was_damaged(base if bases else None) if damaged else found.was_readable()
        tries += 1
        assert tries <= 5 * len(offsets) + 10
    return found, tries


@pytest.mark.parametrize("bases", [True, False])
@pytest.mark.parametrize(
    ("batches", "readable"),
    [
        ([(10, True), (5, False), (25, True), (960, False)], 10),
        ([(500, True), (100, False), (600, True), (5_000, False)], 500),
        ([(3, True), (4, True), (1, False), (900, True), (1, False)], 7),
        ([(1, True), (1, False)], 1),
    ],
)
def test_records_between_damaged_batches_are_not_passed_over(batches: Batches, readable: int, bases: bool) -> None:
    assert search(batches, bases=bases)[0].found == readable


@given(st.lists(st.tuples(st.integers(1, 30), st.booleans()), max_size=12), st.integers(1, 40), st.data())
def test_the_first_readable_offset_is_found_wherever_the_damage_is(
    rest: list[tuple[int, bool]], first: int, data: st.DataObject
) -> None:
    batches = [(first, True), *rest, (1, False)]
    position = data.draw(st.integers(0, first - 1))
    readable = [damaged for n, damaged in batches for _ in range(n)].index(False)
    assert search(batches, position, bases=data.draw(st.booleans()))[0].found == readable


@given(st.integers(1, 5_000), st.integers(1, 5_000))
def test_the_end_of_one_batch_is_found_in_few_tries(damaged: int, rest: int) -> None:
    found, tries = search([(damaged, True), (rest, False)])
    assert found.found == damaged
    assert tries <= 3 * damaged.bit_length() + 8


@given(st.lists(st.integers(1, 2_000), min_size=1, max_size=10))
def test_damage_up_to_the_end_is_hopeless_and_soon_known_to_be(sizes: list[int]) -> None:
    found, tries = search([(size, True) for size in sizes])
    assert found.hopeless
    assert found.found is None
    assert tries <= 250


def test_where_the_end_cannot_be_read_records_before_it_are_found() -> None:
    assert search([(10, True), (5, False), (25, True)])[0].found == 10


def test_a_batch_that_fails_once_is_no_damaged_one() -> None:
    """As the network may have it; the first one has failed for minutes."""
    found = DamageSearch(0, 100)
    failed: set[int] = set()
    while found.found is None:
        damaged = found.at < 10 or found.at >= 30 or (found.at == 10 and not failed)
        failed.update({found.at} & {10})
        found.was_damaged(0 if found.at < 10 else 10) if damaged and found.at != 99 else found.was_readable()
    assert found.found == 10
