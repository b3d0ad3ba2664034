from __future__ import annotations

import logging
import random
import threading

import pytest

from headrace.clock import SystemClock
from headrace.elasticsearch.errors import ElasticsearchUnavailableError
from headrace.elasticsearch.retry_budget import RetryBudget


class JumpingClock(SystemClock):
    """Time passes only while someone waits, and then at once."""

    def __init__(self) -> None:
        self.at = 0.0

    def monotonic(self) -> float:
        return self.at

    def wait(self, event: threading.Event, seconds: float) -> bool:
        self.at += seconds
        return event.is_set()


def test_a_long_wait_is_logged_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    clock = JumpingClock()
    retry_budget = RetryBudget(
        "index 'orders'", max_seconds=300, clock=clock, cancelled=threading.Event(), jitter=random.Random(1)
    )
    with caplog.at_level(logging.WARNING), pytest.raises(ElasticsearchUnavailableError):
        while True:
            retry_budget.wait("connection refused")
    reported = [record.getMessage() for record in caplog.records]
    assert 5 <= len(reported) <= 11
    assert all("index 'orders' has made no progress" in line and "connection refused" in line for line in reported)


def test_the_first_warning_comes_after_two_seconds(caplog: pytest.LogCaptureFixture) -> None:
    """It comes then however long the waits are."""
    for seed in range(1000):
        clock = JumpingClock()
        retry_budget = RetryBudget(
            "index 'orders'", max_seconds=12, clock=clock, cancelled=threading.Event(), jitter=random.Random(seed)
        )
        caplog.clear()
        with caplog.at_level(logging.WARNING), pytest.raises(ElasticsearchUnavailableError):
            while True:
                retry_budget.wait("connection refused")
        (reported,) = caplog.records
        assert "has made no progress for 2 s. Requests go on for another 10 s" in reported.getMessage()


def test_a_short_wait_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    retry_budget = RetryBudget("index 'orders'", max_seconds=300, clock=JumpingClock(), cancelled=threading.Event())
    with caplog.at_level(logging.WARNING):
        for _ in range(10):
            retry_budget.wait("429")
            retry_budget.progressed()
    assert not caplog.records


def test_a_429_without_a_throttle_is_a_failure_like_others() -> None:
    """But the time that the server names is waited for."""
    clock = JumpingClock()
    budget = RetryBudget("Asking", max_seconds=30, clock=clock, cancelled=threading.Event())
    budget.wait_throttled("429", at_least=17)
    assert 17 <= clock.at < 18
    budget.wait_throttled("429", at_least=100)
    assert clock.at == 30
    with pytest.raises(ElasticsearchUnavailableError, match=r"made no progress for 30 s .*: 429.*'max_retry_seconds'"):
        budget.wait_throttled("429")
