"""The rate limiter, and the rate estimate by Spark's PIDRateEstimatorSuite."""

from __future__ import annotations

import itertools
import random

import pytest

from headrace.clock import ManualClock
from headrace.receiver.rates import PidRateEstimator, RateLimiter
from headrace.stream.model import StreamDefinitionError
from headrace.stream.settings import Backpressure, Limits


class TestRateLimiter:
    def test_initializes_even_without_a_max_rate(self) -> None:
        limiter = RateLimiter(None, ManualClock())
        assert limiter.grant(5_000) == 5_000
        assert limiter.delay() == 0
        limiter.update(105)
        assert limiter.rate == 105

    def test_updates_when_below_the_max_rate(self) -> None:
        limiter = RateLimiter(110, ManualClock())
        limiter.update(105)
        assert limiter.rate == 105
        limiter.update(-1)
        limiter.update(0)
        assert limiter.rate == 105, "what is no rate changes nothing"
        limiter.update(None)
        assert limiter.rate == 110

    def test_stays_below_the_max_rate_despite_large_updates(self) -> None:
        limiter = RateLimiter(100, ManualClock())
        limiter.update(105)
        assert limiter.rate == 100

    def test_begins_with_the_initial_rate_below_the_max_rate(self) -> None:
        assert RateLimiter(None, ManualClock(), initial_rate=70).rate == 70
        assert RateLimiter(50, ManualClock(), initial_rate=70).rate == 50
        limiter = RateLimiter(100, ManualClock(), initial_rate=70)
        limiter.update(90)
        assert limiter.rate == 90
        limiter.update(None)
        assert limiter.rate == 70, "there is no estimate"
        with pytest.raises(ValueError, match="positive"):
            RateLimiter(None, ManualClock(), initial_rate=0)

    def test_a_rate_that_is_set_counts_from_then_on(self) -> None:
        clock = ManualClock()
        limiter = RateLimiter(None, clock)
        limiter.spend(1_000_000)
        limiter.update(100)
        taken = 0
        for _ in range(100):
            clock.advance(100)
            granted = limiter.grant(10_000)
            limiter.spend(granted)
            taken += granted
        assert taken == pytest.approx(1_000, rel=0.01)
        limiter.update(None)
        assert limiter.grant(5_000) == 5_000

    def test_the_rate_holds_over_time_with_small_bursts(self) -> None:
        clock = ManualClock()
        limiter = RateLimiter(1_000, clock)
        taken = 0
        for _ in range(100):
            clock.advance(100)
            granted = limiter.grant(10_000)
            limiter.spend(granted)
            taken += granted
        assert taken == pytest.approx(10_000, rel=0.01)
        clock.advance(60_000)
        assert limiter.grant(10_000) == 200

    def test_an_overdraft_is_paid_back(self) -> None:
        clock = ManualClock()
        limiter = RateLimiter(100, clock)
        limiter.spend(101)
        assert limiter.grant(1) == 0
        assert limiter.delay() == pytest.approx(1.01)
        clock.advance(1_100)
        assert limiter.grant(1) == 1


TICKS = 40
# As Spark's: a tick a second with its records, and how long each batch took.
TIMES_MS = [tick * 1_000 for tick in range(1, TICKS + 1)]


def estimator(
    proportional: float = 1.0, integral: float = 0.0, derivative: float = 0.0, min_rate: float = 10.0
) -> PidRateEstimator:
    settings = Backpressure(proportional=proportional, integral=integral, derivative=derivative, min_rate=min_rate)
    return PidRateEstimator(20, settings)


def compute(pid: PidRateEstimator, time_ms: int, records: int, processing_ms: int, waited_ms: int) -> float | None:
    return pid.compute(time_ms, records, processing_delay_ms=processing_ms, scheduling_delay_ms=waited_ms)


def test_the_factors_are_those_of_the_stream() -> None:
    """Twice as much of the error counts with twice the factor."""
    rates = []
    for factor in (0.5, 1.0):
        pid = estimator(proportional=factor, min_rate=1.0)
        compute(pid, 1_000, 1_000, 100, 0)
        rates.append(compute(pid, 2_000, 100, 100, 0))
    assert rates == [10_000 - 0.5 * 9_000, 1_000]


def test_an_estimator_that_is_not_there_is_refused() -> None:
    """There is the one, and it is asked for by giving its factors."""
    assert Limits().backpressure is None
    assert Limits(backpressure=Backpressure()).backpressure == Backpressure(min_rate=100.0)
    with pytest.raises(StreamDefinitionError, match="estimator"):
        Limits.model_validate({"backpressure": {"estimator": "constant"}})


@pytest.mark.parametrize(
    "wrong", [{"proportional": -1.0}, {"integral": -1.0}, {"derivative": -1.0}, {"min_rate": 0.0}, {"min_rate": -1.0}]
)
def test_factors_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(StreamDefinitionError):
        Backpressure(**wrong)
    Backpressure(proportional=0.0, integral=0.0, derivative=0.0, min_rate=0.1)


@pytest.mark.parametrize("interval_ms", [0, -1])
def test_an_interval_out_of_range_is_refused(interval_ms: int) -> None:
    with pytest.raises(ValueError, match="above 0"):
        PidRateEstimator(interval_ms)


def test_a_rate_taken_over_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="above 0"):
        PidRateEstimator(20, latest_rate=0.0)


def test_the_first_estimate_is_none() -> None:
    assert compute(estimator(), 0, 10, 10, 0) is None


def test_the_second_estimate_is_not_none() -> None:
    pid = estimator()
    compute(pid, 0, 10, 10, 0)
    # 1,000 records a second.
    assert compute(pid, 10, 10, 10, 0) == 1_000


def test_the_first_estimate_after_a_rate_taken_over_is_not_none() -> None:
    pid = PidRateEstimator(20, Backpressure(derivative=1.0), latest_rate=500.0)
    assert compute(pid, 10, 10, 10, 0) == 1_000


def test_no_estimate_when_there_is_no_time_between_two_batches() -> None:
    pid = estimator()
    compute(pid, 0, 10, 10, 0)
    compute(pid, TIMES_MS[0], 10, 10, 0)
    assert compute(pid, TIMES_MS[0], 10, 10, 0) is None
    assert compute(pid, TIMES_MS[0] - 1, 10, 10, 0) is None


def test_no_estimate_when_there_were_no_records() -> None:
    pid = estimator()
    compute(pid, 0, 10, 10, 0)
    compute(pid, 10, 10, 10, 0)
    assert compute(pid, 20, 0, 10, 0) is None
    assert compute(pid, 30, 10, 10, 0) == 1_000, "it is not the time that was missing"


def test_no_estimate_when_processing_took_no_time() -> None:
    pid = estimator()
    compute(pid, 0, 10, 10, 0)
    compute(pid, 10, 10, 10, 0)
    assert compute(pid, 20, 10, 0, 0) is None
    assert compute(pid, 30, 10, 10, 0) == 1_000


def test_an_estimate_is_never_less_than_the_min_rate() -> None:
    pid = estimator(min_rate=5.0, integral=1.0, derivative=1.0)
    chance = random.Random(5)
    # Never more than 5 records in a second, and waited for long.
    rates = [compute(pid, time_ms, chance.randint(1, 5), 1_000, 20 * 5) for time_ms in TIMES_MS]
    assert rates[0] is None
    assert set(rates[1:]) == {5.0}


def test_a_change_of_the_error_counts_by_the_derivative() -> None:
    pid = estimator(derivative=0.1)
    compute(pid, 0, 1_000, 1_000, 0)
    # 500 too many; and from 0 to 500 within a second.
    assert compute(pid, 1_000, 500, 1_000, 0) == 1_000 - 500 - 0.1 * 500
    # 50 too many, but 450 fewer than before, in two seconds.
    assert compute(pid, 3_000, 400, 1_000, 0) == 450 - 50 + 0.1 * 450 / 2


def test_with_a_positive_error_only_the_rate_follows_processing() -> None:
    """The error is all there is: each rate is that of the batch just processed."""
    pid = estimator(integral=1.0)
    # More records each second, each processed in half a tick.
    records = [(tick + 1) * 100 for tick in range(TICKS)]
    rates = [compute(pid, time_ms, count, 500, 0) for time_ms, count in zip(TIMES_MS, records, strict=True)]
    assert rates == [None, *(count * 2.0 for count in records[1:])]


def test_with_some_error_only_the_rate_follows_processing() -> None:
    """What was wanted last was too much: it comes down to what is processed at once."""
    pid = estimator(integral=1.0)
    records = [(TICKS - tick) * 100 for tick in range(TICKS)]
    rates = [compute(pid, time_ms, count, 500, 0) for time_ms, count in zip(TIMES_MS, records, strict=True)]
    assert rates == [None, *(count * 2.0 for count in records[1:])]
    assert all(after < before for before, after in itertools.pairwise(rates[1:]))  # type: ignore[operator]


def test_with_an_accumulation_the_rate_stays_below_processing() -> None:
    """There is some error too."""
    pid = estimator(integral=0.01)
    chance = random.Random(7)
    records = [chance.randint(1_000, 10_000) for _ in range(TICKS)]
    waited_ms = [chance.randint(10, 50) for _ in range(TICKS)]
    rates = [
        compute(pid, time_ms, count, 500, waited)
        for time_ms, count, waited in zip(TIMES_MS, records, waited_ms, strict=True)
    ]
    assert rates[0] is None
    assert all(rate < count * 2 for rate, count in zip(rates[1:], records[1:], strict=True))  # type: ignore[operator]


@pytest.mark.parametrize(("interval_ms", "rate"), [(500, 600.0), (1_000, 800.0), (10_000, 980.0)])
def test_a_backlog_counts_by_how_many_intervals_it_waited(interval_ms: int, rate: float) -> None:
    pid = PidRateEstimator(interval_ms, Backpressure(integral=0.2), latest_rate=1_000.0)
    assert compute(pid, 1_000, 500, 500, 1_000) == pytest.approx(rate)


def test_the_backlog_goes_and_the_rate_settles_at_the_processing() -> None:
    """Three times as much comes as is processed, batch after batch; a rate holds for the intervals after it."""
    interval_ms, comes, processed = 1_000, 3_000.0, 1_000.0
    pid = PidRateEstimator(interval_ms, Backpressure())
    ended_ms, rates, waits = 0.0, [(0.0, comes)], []
    for number in range(1, 201):
        batch_time_ms = number * interval_ms
        rate = next(value for since_ms, value in reversed(rates) if since_ms <= batch_time_ms - interval_ms)
        records = min(comes, rate) * interval_ms / 1_000
        started_ms = max(float(batch_time_ms), ended_ms)
        ended_ms = started_ms + records * 1_000 / processed
        waits.append(started_ms - batch_time_ms)
        estimate = compute(pid, int(ended_ms), int(records), int(ended_ms - started_ms), int(waits[-1]))
        if estimate is not None:
            rates.append((ended_ms, estimate))
    assert max(waits) >= 2 * interval_ms, "there was a backlog"
    assert max(waits[-50:]) < interval_ms
    assert all(0.8 * processed < rate < 1.1 * processed for _, rate in rates[-50:])
