"""Times and durations as text, times from text, and the estimate of the ledger's clock."""

from __future__ import annotations

import pytest

from headrace.clock import LedgerClock, ManualClock, parse_time, readable_seconds


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.25, "0.2 s"), (59, "59 s"), (60, "1 min"), (61, "1 min 1 s"), (7_300, "2 h 1 min"), (90_000, "1 d 1 h")],
)
def test_lengths_of_time_are_readable(seconds: float, text: str) -> None:
    assert readable_seconds(seconds) == text


@pytest.mark.parametrize(
    ("text", "time_ms"),
    [
        ("1970-01-01T00:00:01.234", 1_234),
        ("1970-01-01T00:00:01.234Z", 1_234),
        ("1970-01-01T02:00:01.234999+02:00", 1_234),
        ("1970-01-02", 86_400_000),
        ("1969-12-31T23:59:59.999999", -1),
    ],
)
def test_a_time_in_iso_8601_is_milliseconds_since_the_epoch(text: str, time_ms: int) -> None:
    assert parse_time(text) == time_ms


@pytest.mark.parametrize("text", ["", "yesterday", "0001-01-01T00:00:00+14:00"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"isoformat|calendar"):
        parse_time(text)


class TestLedgerClock:
    def test_the_ledgers_clock_is_asked_once_and_then_estimated(self) -> None:
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
