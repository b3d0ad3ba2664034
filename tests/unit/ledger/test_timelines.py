"""Pages of batches in each order, the points of a timeline, and numbers by state.

Samples: kept by time, thinned for long ranges, pruned by age.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headrace.ledger import BatchState, Ledger
from headrace.ledger.batches.tables import BatchRow
from headrace.ledger.tables import SampleRow
from headrace.ledger.timelines import BatchOrder, BatchSelection, Spread

from .conftest import NOW_MS, STREAM, World

T1, T2, T3, T4, T5, T6 = (NOW_MS + 1_000 * number for number in range(1, 7))
RECORDS = {T1: 10, T2: 40, T3: 10, T4: 20, T6: 30}


@pytest.fixture
def pages(build: Callable[..., World], ledger: Ledger) -> Ledger:
    """Six batch times. T6 has absorbed T5 and has not begun, T3 has failed, and T1, T2 and T4 were completed one after
    another, in 1, 2 and 4 s."""
    world = build()
    offset = 0
    for time_ms in (T1, T2, T3, T4, T6):
        world.add({0: (offset, offset + RECORDS[time_ms])})
        offset += RECORDS[time_ms]
        world.clock.advance(1_000 if time_ms != T4 else 2_000)
    for time_ms in (T1, T2, T3, T4):
        world.allocate(time_ms)
    world.allocate(T6, absorb=[T5])
    attempts = ledger.attempts
    for time_ms, seconds in ((T1, 1), (T2, 2), (T4, 4)):
        attempt = attempts.begin(STREAM, time_ms, holder="task", way="connect", lease_ms=60_000)
        world.clock.advance(1_000 * seconds)
        attempts.record_output(attempt, "index", {})
        attempts.complete(attempt)
    attempts.fail(attempts.begin(STREAM, T3, holder="task", way="connect", lease_ms=60_000), "no")
    return ledger


def times(rows: tuple[BatchRow, ...] | list[BatchRow]) -> list[int]:
    return [row.batch_time_ms for row in rows]


@pytest.mark.parametrize("limit", [1, 2, 10])
@pytest.mark.parametrize(
    ("order", "expected"),
    [
        (BatchOrder.NEWEST, [T6, T5, T4, T3, T2, T1]),
        (BatchOrder.OLDEST, [T1, T2, T3, T4, T5, T6]),
        # Equal values: the newest first. A batch without a value comes last.
        (BatchOrder.RECORDS, [T2, T6, T4, T3, T1, T5]),
        (BatchOrder.PROCESSING_TIME, [T4, T2, T1, T6, T5, T3]),
        (BatchOrder.TOTAL_DELAY, [T4, T2, T1, T6, T5, T3]),
    ],
)
def test_pages_follow_one_another_in_each_order(
    pages: Ledger, order: BatchOrder, expected: list[int], limit: int
) -> None:
    found: list[int] = []
    page = pages.batch_pages.page(STREAM, BatchSelection(), order, limit)
    while True:
        assert len(page.rows) <= limit
        found += times(page.rows)
        if page.after is None:
            break
        page = pages.batch_pages.page(STREAM, BatchSelection(), order, limit, page.after)
    assert found == expected
    assert page.window == (None if order.by_time else 6)


@pytest.mark.parametrize("order", [BatchOrder.NEWEST, BatchOrder.RECORDS])
def test_a_page_has_the_batches_of_some_states_and_of_a_range(pages: Ledger, order: BatchOrder) -> None:
    completed = BatchSelection((BatchState.COMPLETED, BatchState.FAILED), from_ms=T2, until_ms=T4)
    assert sorted(times(pages.batch_pages.page(STREAM, completed, order, 10).rows)) == [T2, T3]
    assert times(pages.batch_pages.page(STREAM, BatchSelection((BatchState.ABANDONED,)), order, 10).rows) == []


@pytest.mark.parametrize("order", BatchOrder)
def test_a_folded_page_has_absorbed_times_in_their_batch_alone(pages: Ledger, order: BatchOrder) -> None:
    rows = pages.batch_pages.page(STREAM, BatchSelection(folded=True), order, 10).rows
    assert sorted(times(rows)) == [T1, T2, T3, T4, T6]
    assert {row.batch_time_ms: row.first_time_ms for row in rows} == {T1: T1, T2: T2, T3: T3, T4: T4, T6: T5}


def test_points_skip_absorbed_batches_and_keep_the_longest_delay(pages: Ledger) -> None:
    """The longest delay of each part is kept."""
    every = pages.batch_pages.points(STREAM, T1, T6 + 1, points=5)
    assert (times(every.rows), every.whole) == ([T1, T2, T3, T4, T6], None)
    thinned = pages.batch_pages.points(STREAM, T1, T6 + 1_000, points=2)
    assert times(thinned.rows) == [T2, T4]


def test_thinned_points_have_the_numbers_of_all_batches(pages: Ledger) -> None:
    points = pages.batch_pages.points(STREAM, T1, T6 + 1_000, points=2)
    whole, (first, second) = points.whole, points.parts
    assert whole is not None
    assert (whole.batches, whole.records, whole.above_interval) == (5, sum(RECORDS.values()), 2)
    assert whole.processing_time == Spread(2_000, 4_000, 4_000)
    assert first.processing_time == Spread(1_000, 2_000, 2_000)
    assert second.processing_time == Spread(4_000, 4_000, 4_000)
    assert (first.batches, second.batches) == (3, 2)
    assert (first.from_ms, first.until_ms, second.until_ms) == (T1, second.from_ms, T6 + 1_000)


def test_a_spread_is_of_what_is_known_by_the_nearest_rank() -> None:
    assert Spread.of([]) is None
    assert Spread.of([None, 7]) == Spread(7, 7, 7)
    assert Spread.of([*range(100, 0, -1), None]) == Spread(50, 95, 100)


def test_batches_are_counted_by_state_and_gaps_together(pages: Ledger) -> None:
    assert pages.batch_pages.counts(STREAM) == {"completed": 3, "failed": 1, "allocated": 1, "absorbed": 1}
    assert pages.batch_pages.gaps(STREAM) == 0
    pages.batches.abandon(STREAM, T3, "poison")
    assert pages.batch_pages.gaps(STREAM) == 1


def _sample(index: int, **values: object) -> SampleRow:
    fields = {"input_rate": float(index), "lag": index, "lag_seconds": 0.0, "queue_bytes": 1, "log_bytes": 2}
    return SampleRow(**{"stream": STREAM, "at_ms": NOW_MS + index * 10_000, "paused": False, **fields, **values})


def test_samples_come_back_as_they_were_added(ledger: Ledger, build: Callable[..., World]) -> None:
    build()
    samples = [_sample(0), _sample(1, lag=None, lag_seconds=None, paused=True)]
    for sample in [*samples, samples[0]]:
        ledger.samples.add(sample)
    assert ledger.samples.between(STREAM, NOW_MS, NOW_MS + 10_001, points=10) == samples
    assert ledger.samples.between(STREAM, NOW_MS, NOW_MS + 10_000, points=10) == samples[:1]


def test_a_long_range_is_thinned_and_keeps_the_largest_lag(ledger: Ledger, build: Callable[..., World]) -> None:
    build()
    for index in range(100):
        ledger.samples.add(_sample(index, lag=9_999 if index == 41 else index, paused=index == 77))
    samples = ledger.samples.between(STREAM, NOW_MS, NOW_MS + 1_000_000, points=10)
    assert len(samples) == 10
    assert [sample.at_ms for sample in samples] == sorted(sample.at_ms for sample in samples)
    assert max(sample.lag or 0 for sample in samples) == 9_999
    assert sum(sample.paused for sample in samples) == 1
    assert samples[0].input_rate == 4.5


def test_pruning_deletes_only_old_samples(ledger: Ledger, build: Callable[..., World]) -> None:
    build()
    for index in range(10):
        ledger.samples.add(_sample(index))
    assert ledger.cleanup.prune_samples(STREAM, NOW_MS + 50_000, limit=3) == 3
    assert ledger.cleanup.prune_samples(STREAM, NOW_MS + 50_000) == 2
    assert ledger.cleanup.prune_samples(STREAM, NOW_MS + 50_000) == 0
    assert len(ledger.samples.between(STREAM, 0, NOW_MS * 2, points=10)) == 5
