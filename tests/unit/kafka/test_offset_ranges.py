"""Ranges are joined where they meet and dealt to tasks: every offset once, and no counted range in two pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.blocks import TopicPartition
from headrace.kafka.errors import OverlappingRangesError
from headrace.kafka.ranges import RangeRun, RecordedRange, deal

P0 = TopicPartition("clicks", "id", 0)
P1 = TopicPartition("clicks", "id", 1)


def test_ranges_that_meet_are_one_run_and_are_counted_singly() -> None:
    ranges = [RecordedRange(P1, 0, 4, 4), RecordedRange(P0, 5, 9, 3, 7), RecordedRange(P0, 0, 5, 5)]
    assert deal(ranges, 1) == [(RangeRun.of([ranges[2], ranges[1]]), RangeRun.of([ranges[0]]))]


def test_ranges_that_hold_nothing_are_read_only_between_others() -> None:
    empty_end = [RecordedRange(P0, 0, 5, 5), RecordedRange(P0, 5, 22, 0), RecordedRange(P0, 22, 25, 3)]
    assert deal([*empty_end, RecordedRange(P0, 25, 40, 0)], 1) == [(RangeRun.of(empty_end),)]
    assert deal([RecordedRange(P0, 5, 22, 0), RecordedRange(P1, 3, 3, None)], 4) == []
    assert deal([], 4) == []


def test_ranges_that_do_not_meet_are_runs_of_their_own() -> None:
    ranges = [RecordedRange(P0, 0, 5, 5), RecordedRange(P0, 6, 9, 3)]
    assert deal(ranges, 1) == [tuple(RangeRun.of([block_range]) for block_range in ranges)]


def test_an_offset_in_two_ranges_is_refused() -> None:
    with pytest.raises(OverlappingRangesError, match=r"clicks-0 \[0, 5\) and clicks-0 \[4, 9\) overlap"):
        deal([RecordedRange(P0, 4, 9, 5), RecordedRange(P0, 0, 5, 5)], 2)


def test_few_records_are_one_task_and_uncounted_ranges_are_split() -> None:
    assert len(deal([RecordedRange(P0, 0, 900, 900), RecordedRange(P1, 0, 900, 900)], 8)) == 1
    tasks = deal([RecordedRange(P0, 0, 1000, None)], 4, min_task_records=10)
    assert [run for task in tasks for run in task] == [
        RangeRun(P0, begin, (begin + 250,), (None,), (None,)) for begin in range(0, 1000, 250)
    ]


@st.composite
def recorded(draw: st.DrawFn) -> list[RecordedRange]:
    ranges = []
    for partition in (P0, P1):
        at = draw(st.integers(0, 5))
        for _ in range(draw(st.integers(0, 8))):
            at += draw(st.sampled_from([0, 0, 0, 7]))
            size = draw(st.integers(0, 50))
            ranges.append(RecordedRange(partition, at, at + size, draw(st.none() | st.integers(0, size))))
            at += size
    return draw(st.permutations(ranges))


@given(recorded(), st.integers(1, 6), st.integers(1, 40))
def test_every_offset_is_dealt_once_and_counted_ranges_whole(
    ranges: list[RecordedRange], tasks: int, least: int
) -> None:
    dealt = deal(ranges, tasks, min_task_records=least)
    assert len(dealt) <= tasks
    assert all(dealt)
    pieces = [block_range for task in dealt for run in task for block_range in run.ranges()]
    counted = [block_range for block_range in ranges if block_range.records]
    assert sorted((piece for piece in pieces if piece.records), key=str) == sorted(counted, key=str)
    uncounted = {
        (block_range.partition, at)
        for block_range in ranges
        if block_range.records is None
        for at in _offsets(block_range)
    }
    found = [(piece.partition, at) for piece in pieces if piece.records is None for at in _offsets(piece)]
    assert len(found) == len(set(found))
    assert set(found) == uncounted


def _offsets(each: RecordedRange) -> range:
    return range(each.from_offset, each.until_offset)
