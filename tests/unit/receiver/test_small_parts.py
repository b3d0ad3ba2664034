"""The clock, the timer, the rate limiter and the assignment."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.clock import ManualClock
from headrace.receiver.block_generator import RecurringTimer
from headrace.receiver.heartbeat import LedgerClock
from headrace.receiver.partitioning import assign
from headrace.receiver.rates import RateLimiter


class TestLedgerClock:
    def test_the_ledgers_clock_is_asked_once_and_estimated_from_then_on(self) -> None:
        clock = ManualClock(1_000)
        asked = []
        ledger = LedgerClock(lambda: asked.append(1) or 50_000, clock)
        with pytest.raises(RuntimeError):
            ledger.now_ms()
        ledger.sample()
        clock.advance(250)
        assert ledger.now_ms() == 50_250
        assert len(asked) == 1

    def test_the_answer_counts_for_the_middle_of_its_round_trip(self) -> None:
        clock = ManualClock(0)

        def slow() -> int:
            clock.advance(100)
            return 50_000

        ledger = LedgerClock(slow, clock)
        ledger.sample()
        assert ledger.now_ms() == 50_050

    def test_the_best_round_trip_wins_and_time_never_goes_back(self) -> None:
        clock = ManualClock(0)
        answers = iter([(100, 52_000), (2, 50_100)])

        def read() -> int:
            took, answer = next(answers)
            clock.advance(took)
            return answer

        ledger = LedgerClock(read, clock)
        ledger.sample()
        first = ledger.now_ms()
        ledger.sample()
        assert ledger.now_ms() == first
        clock.advance(20_000)
        assert ledger.now_ms() == 50_100 + 1 + 20_000

    def test_it_follows_a_clock_that_was_ahead(self) -> None:
        clock, ahead_ms = ManualClock(0), [600_000]
        ledger = LedgerClock(lambda: 50_000 + ahead_ms[0], clock)
        ledger.sample()
        assert ledger.now_ms() == 650_000
        ahead_ms[0] = 0
        for _ in range(16):
            ledger.sample()
        assert ledger.now_ms() == 50_000


class TestRecurringTimer:
    def test_basic(self) -> None:
        clock = ManualClock(1_030)
        called: list[int] = []
        timer = RecurringTimer(clock, 100, called.append, "test")
        assert timer.start() == 1_100
        for _ in range(3):
            clock.advance(100)
        until = time.monotonic() + 5
        while len(called) < 3 and time.monotonic() < until:
            time.sleep(0.002)
        assert timer.stop() == 1_300
        assert called == [1_100, 1_200, 1_300]

    def test_callback_is_made_once_more_by_a_stop_that_does_not_interrupt(self) -> None:
        called: list[int] = []
        timer = RecurringTimer(ManualClock(0), 100, called.append, "test")
        timer.start()
        assert timer.stop(interrupt=False) == 100
        assert called == [100]


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


class TestAssignment:
    def test_even_and_interleaved(self) -> None:
        assert assign([("a", 0), ("a", 1), ("a", 2), ("a", 3)], [0, 1], {}) == {
            ("a", 0): 0,
            ("a", 1): 1,
            ("a", 2): 0,
            ("a", 3): 1,
        }

    def test_without_receivers_nothing(self) -> None:
        assert assign([1, 2], [], {}) == {}

    @given(
        st.sets(st.integers(0, 60)),
        st.sets(st.integers(0, 6), min_size=1),
        st.dictionaries(st.integers(0, 60), st.integers(0, 8)),
    )
    def test_even_and_with_fewest_moves(
        self, partitions: set[int], receivers: set[int], current: dict[int, int]
    ) -> None:
        result = assign(partitions, receivers, current)
        assert set(result) == partitions
        counts = sorted(list(result.values()).count(receiver) for receiver in receivers)
        assert counts[-1] - counts[0] <= 1
        stayed = sum(current.get(partition) == owner for partition, owner in result.items())
        held = sorted((sum(current.get(p) == r for p in partitions) for r in receivers), reverse=True)
        least, more = divmod(len(partitions), len(receivers))
        best = sum(min(count, least + (rank < more)) for rank, count in enumerate(held))
        assert stayed == best
        assert assign(partitions, receivers, result) == result
