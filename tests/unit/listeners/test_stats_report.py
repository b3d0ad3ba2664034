"""The report of the last batches' delays in the job's log."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from headrace.listeners import BatchCompleted, BatchInfo, StatsReport


def completed(number: int, *, seconds: float = 0.0, **fields: Any) -> BatchCompleted:
    """The batch ``number``, which began after 1 s and took ``seconds``."""
    time_ms = 10_000 * number
    started_ms = time_ms + 1_000
    done_ms = started_ms + round(1_000 * seconds)
    batch = BatchInfo(
        batch_time_ms=time_ms, interval_ms=10_000, records=1, blocks=1, payload_bytes=1, late_records=0,
        submitted_at_ms=time_ms + 500, started_at_ms=started_ms, completed_at_ms=done_ms, **fields,
    )  # fmt: skip
    return BatchCompleted(event_id=number, at_ms=done_ms, stream="flights", batch=batch)


def test_the_quantiles_of_the_last_batches_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    report = StatsReport(batches=100, prefix="flights: ")
    with caplog.at_level(logging.INFO, "headrace.listeners.listener"):
        for number in range(101):
            report.on_batch_completed(completed(number, seconds=number))
    scheduling, processing, total = [record.getMessage() for record in caplog.records[-3:]]
    assert scheduling.startswith("flights: Scheduling delay of the last 100 batches: 0% 1.0 s, 5% 1.0 s")
    # Batches 1 to 100 are kept.
    assert processing.endswith("0% 1.0 s, 5% 6.0 s, 10% 11.0 s, 25% 26.0 s, 50% 51.0 s, 75% 76.0 s, 90% 91.0 s, "
                               "95% 96.0 s, 100% 100.0 s")  # fmt: skip
    assert total.startswith("flights: Total delay of the last 100 batches: 0% 2.0 s")


def test_a_batch_that_failed_or_comes_again_counts_once() -> None:
    report = StatsReport()
    report.on_batch_completed(completed(1, seconds=5, failures={"index": "no"}))
    assert report.lines() == []
    report.on_batch_completed(completed(1, seconds=2))
    report.on_batch_completed(completed(1, seconds=3))
    assert [line.partition(":")[0] for line in report.lines()] == [
        f"{name} of the last 1 batches" for name in ("Scheduling delay", "Processing time", "Total delay")
    ]
    assert "100% 3.0 s" in report.lines()[1]


def test_the_number_of_batches_is_positive() -> None:
    with pytest.raises(ValueError, match="1 or more, not 0"):
        StatsReport(batches=0)
