"""The samples that a receiver job adds: when they are due, and what is unknown in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from headrace.blocks import ReceiverId
from headrace.clock import ManualClock
from headrace.ledger import Ledger
from headrace.ledger.errors import LedgerUnavailableError
from headrace.ledger.tables import JobLease, SampleRow
from headrace.receiver.health import numbers
from headrace.receiver.tracker import Sampler
from headrace.stream import Stream
from headrace.stream_context import StreamContext

NOW_MS = 1_700_000_000_000
KNOWN: dict[str, Any] = {"total_lag": 40, "lag_unknown": 0, "lag_seconds": 2.5, "rate": 12.5, "queued_bytes": 7}


class Sampled:
    """A stream of two receivers, and its sampler."""

    def __init__(self, stream: Stream, ledger: Ledger, job: JobLease, clock: ManualClock) -> None:
        self.ledger, self.clock = ledger, clock
        self.sampler = Sampler(StreamContext(stream, ledger, clock=clock))
        self._leases = [
            ledger.receivers.register(
                ledger.receivers.schedule(job, ReceiverId("air", "records", index)), host="here", lease_ms=30_000
            )
            for index in range(2)
        ]

    def beat(self, index: int, paused: str | None = None, **stats: Any) -> None:
        lease = self._leases[index]
        self.ledger.receivers.heartbeat(lease, sealed_through_ms=0, stats={**KNOWN, **stats}, paused_reason=paused)

    def sample(self) -> None:
        self.sampler.sample(self.ledger.receivers.all("air"), self.clock.now_ms())

    @property
    def samples(self) -> list[SampleRow]:
        return self.ledger.samples.between("air", 0, self.clock.now_ms() + 1, points=100)


@pytest.fixture
def sampled(make_stream: Callable[..., Stream]) -> Iterator[Sampled]:
    stream, clock = make_stream(), ManualClock(NOW_MS)
    with Ledger.open(stream.ledger, clock=clock) as ledger:
        ledger.streams.register("air", stream.to_json(), batch_interval_ms=1_000, block_interval_ms=20)
        job = ledger.jobs.acquire("air", holder="test", lease_ms=600_000)
        yield Sampled(stream, ledger, job, clock)


def test_a_sample_is_due_every_ten_seconds(sampled: Sampled) -> None:
    for _ in range(45):
        sampled.sample()
        sampled.clock.advance(500)
    assert [sample.at_ms - NOW_MS for sample in sampled.samples] == [0, 10_000, 20_000]


def test_a_sample_has_the_numbers_of_all_receivers_together(sampled: Sampled) -> None:
    sampled.beat(0)
    sampled.beat(1, paused="the disk is full", total_lag=2, lag_seconds=9.5)
    sampled.sample()
    assert sampled.samples == [SampleRow("air", NOW_MS, 25.0, 42, 9.5, 14, True, 0)]


def test_a_lag_of_which_a_part_is_unknown_is_unknown(sampled: Sampled) -> None:
    sampled.beat(0)
    sampled.beat(1, total_lag=2, lag_unknown=1, lag_seconds=None)
    sampled.sample()
    (sample,) = sampled.samples
    assert (sample.lag, sample.lag_seconds, sample.input_rate) == (None, None, 25.0)


def test_a_receiver_without_a_known_lag_adds_none(sampled: Sampled) -> None:
    sampled.beat(0, total_lag=None, lag_unknown=2, lag_seconds=None)
    sampled.beat(1, total_lag=3)
    now = sampled.clock.now_ms()
    both = sampled.ledger.receivers.all("air")
    assert (numbers(both, now).lag, numbers(both, now).lag_unknown) == (3, 2)
    assert numbers(both[:1], now).lag is None


def test_receivers_not_alive_or_without_a_report_are_left_out(sampled: Sampled) -> None:
    sampled.beat(0)
    sampled.sample()
    sampled.clock.advance(30_000)
    sampled.sample()
    assert [(sample.lag, sample.input_rate) for sample in sampled.samples] == [(40, 12.5), (None, 0.0)]


def test_a_ledger_that_is_away_costs_one_sample(sampled: Sampled, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(_: SampleRow) -> None:
        raise LedgerUnavailableError("it does not answer")

    with monkeypatch.context() as patched:
        patched.setattr(sampled.ledger.samples, "add", away)
        with pytest.raises(LedgerUnavailableError):
            sampled.sample()
    sampled.clock.advance(9_500)
    sampled.sample()
    assert sampled.samples == []
    sampled.clock.advance(500)
    sampled.sample()
    assert [sample.at_ms - NOW_MS for sample in sampled.samples] == [10_000]
