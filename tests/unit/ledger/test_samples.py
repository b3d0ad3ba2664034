"""Samples: kept by time, thinned for long ranges, pruned by age."""

from __future__ import annotations

from collections.abc import Callable

from headrace.ledger import Ledger
from headrace.ledger.tables import SampleRow

from .conftest import NOW_MS, STREAM, World


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
    found = ledger.samples.between(STREAM, NOW_MS, NOW_MS + 1_000_000, points=10)
    assert len(found) == 10
    assert [sample.at_ms for sample in found] == sorted(sample.at_ms for sample in found)
    assert max(sample.lag or 0 for sample in found) == 9_999
    assert sum(sample.paused for sample in found) == 1
    assert found[0].input_rate == 4.5


def test_pruning_deletes_only_old_samples(ledger: Ledger, build: Callable[..., World]) -> None:
    build()
    for index in range(10):
        ledger.samples.add(_sample(index))
    assert ledger.samples.prune(STREAM, NOW_MS + 50_000, limit=3) == 3
    assert ledger.samples.prune(STREAM, NOW_MS + 50_000) == 2
    assert ledger.samples.prune(STREAM, NOW_MS + 50_000) == 0
    assert len(ledger.samples.between(STREAM, 0, NOW_MS * 2, points=10)) == 5
