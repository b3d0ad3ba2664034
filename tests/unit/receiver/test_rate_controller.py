"""Rates from the batches of a real ledger whose clock a test holds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest

from headrace.blocks import BlockHandle, BlockInfo, OffsetRange, ReceiverId, TopicPartition
from headrace.clock import ManualClock
from headrace.ledger import Ledger
from headrace.ledger.batches.tables import Attempt
from headrace.ledger.errors import LedgerUnavailableError
from headrace.ledger.tables import JobLease
from headrace.receiver.rates import RateController, RateLimiter, ran_at_once, waited_ms
from headrace.stream import Limits, Stream
from headrace.stream.settings import Backpressure
from headrace.stream_context import StreamContext

NOW_MS = 1_700_000_000_000
SETTINGS = Backpressure(min_rate=10.0)
ON = Limits(backpressure=SETTINGS)


class Batches:
    """A stream of two receivers, each with a partition, and batches of it that take as long as a test says."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.clock = ManualClock(NOW_MS)
        self.ledger = Ledger.open(stream.ledger, clock=self.clock)
        self.ledger.streams.register(
            "air",
            stream.to_json(),
            batch_interval_ms=1_000,
            block_interval_ms=100,
            outputs=stream.steps,
            max_concurrent_batches=stream.limits.max_concurrent_batches,
            batch_by=stream.batch_by,
            allowed_lateness_ms=stream.allowed_lateness_ms,
        )
        self.job = self.ledger.jobs.acquire("air", holder="test", lease_ms=3_600_000)
        (row,) = self.ledger.topics.observe(self.job, "records", [("flights", "id-1", 2)])
        self.partitions = [TopicPartition("flights", "id-1", n, row.incarnation) for n in range(2)]
        self.ledger.positions.ensure_all(self.job, "records", dict.fromkeys(self.partitions, 0))
        self.ledger.positions.assign(self.job, "records", {p: n for n, p in enumerate(self.partitions)})
        self.ids = [ReceiverId("air", "records", index) for index in range(2)]
        self.leases = [
            self.ledger.receivers.register(
                self.ledger.receivers.schedule(self.job, receiver_id), host="here", lease_ms=3_600_000
            )
            for receiver_id in self.ids
        ]
        self.sequence = 0
        self.next_offsets = [0, 0]

    def controller(self, stream: Stream | None = None, job: JobLease | None = None) -> RateController:
        made = RateController(StreamContext(stream or self.stream, self.ledger, clock=self.clock), job or self.job)
        made.begin()
        return made

    def receive(self, *records: int, event_time_ms: int | None = None) -> int:
        """So many records of each receiver; their batch time, by when the interval has ended."""
        for lease, partition, count in zip(self.leases, self.partitions, records, strict=True):
            if not count:
                continue
            first = self.next_offsets[partition.partition]
            ranges = (OffsetRange(partition, first, first + count, count),)
            handle = BlockHandle(f"s-{lease.receiver_id.index}-{lease.epoch}", self.sequence * 100, 100)
            info = BlockInfo(
                lease.receiver_id, lease.epoch, self.sequence, self.clock.now_ms(), handle, ranges, count, count * 10,
                event_time_ms,
            )  # fmt: skip
            added = self.ledger.blocks.add(lease, info)
            self.next_offsets[partition.partition] = first + count
            self.sequence += 1
        time_ms = added.batch_time_ms
        self.clock.advance(max(0, time_ms - self.clock.now_ms()))
        return time_ms

    def run(self, time_ms: int, processing_ms: int) -> None:
        attempt = self.begin(time_ms)
        self.clock.advance(processing_ms)
        self.end(attempt)

    def begin(self, time_ms: int) -> Attempt:
        self.ledger.allocations.seal("air", time_ms)
        blocks = len(self.ledger.allocations.blocks_of("air", time_ms))
        self.ledger.allocations.allocate(
            "air", time_ms, manifest_uri="m", manifest_sha256="0" * 64, blocks_expected=blocks
        )
        return self.ledger.attempts.begin("air", time_ms, holder="test", way="connect", lease_ms=600_000)

    def end(self, attempt: Attempt) -> None:
        for output in attempt.outputs:
            self.ledger.attempts.record_output(attempt, output, {})
        self.ledger.attempts.complete(attempt)

    def rates(self) -> list[float | None]:
        rates = {row.receiver_id: row.max_rate for row in self.ledger.receivers.all("air")}
        return [rates[receiver_id] for receiver_id in self.ids]


@pytest.fixture
def make_batches(make_stream: Callable[..., Stream]) -> Iterator[Callable[..., Batches]]:
    made: list[Batches] = []

    def make(limits: Limits = ON, *, by_timestamp: bool = False, allowed_lateness_seconds: int = 1) -> Batches:
        stream = make_stream(receivers=2, limits=limits, batch_by="timestamp" if by_timestamp else "arrival")
        lateness = timedelta(seconds=allowed_lateness_seconds)
        made.append(Batches(stream.model_copy(update={"allowed_lateness": lateness})))
        return made[-1]

    yield make
    for batches in made:
        batches.ledger.close()


def test_rates_are_published_when_batches_have_completed(make_batches: Callable[..., Batches]) -> None:
    """The second one gives the first: each receiver's own records by the batch's time."""
    batches = make_batches()
    controller = batches.controller()
    first = batches.receive(100, 300)
    batches.run(first, 500)
    controller.follow()
    assert batches.rates() == [None, None]
    batches.clock.advance(1_000)
    second = batches.receive(100, 300)
    batches.run(second, 400)
    assert batches.rates() == [None, None]
    controller.follow()
    assert batches.rates() == [250.0, 750.0]


def test_with_an_initial_rate_the_first_batch_gives_an_estimate(make_batches: Callable[..., Batches]) -> None:
    batches = make_batches(Limits(backpressure=Backpressure(min_rate=10, initial_rate=50)))
    controller = batches.controller()
    batches.run(batches.receive(40, 0), 400)
    controller.follow()
    assert batches.rates() == [100.0, None], "the other receiver keeps its initial rate, which is not in the ledger"


def test_a_small_first_batch_does_not_lower_the_initial_rate(
    make_batches: Callable[..., Batches],
) -> None:
    """The first batch did not wait."""
    batches = make_batches(Limits(backpressure=Backpressure(min_rate=10, initial_rate=50)))
    controller = batches.controller()
    batches.run(batches.receive(20, 0), 900)
    controller.follow()
    assert batches.rates() == [None, None]


def test_a_receiver_without_records_keeps_its_rate(make_batches: Callable[..., Batches]) -> None:
    batches = make_batches()
    controller = batches.controller()
    for counts in ((100, 100), (100, 100), (0, 200)):
        batches.run(batches.receive(*counts), 500)
        controller.follow()
        batches.clock.advance(1_000)
    assert batches.rates() == [200.0, 400.0]


def test_no_rate_is_below_the_least(make_batches: Callable[..., Batches]) -> None:
    batches = make_batches()
    controller = batches.controller()
    for _ in range(2):
        batches.run(batches.receive(1, 1), 900)
        controller.follow()
        batches.clock.advance(1_000)
    assert batches.rates() == [10.0, 10.0]


@pytest.mark.parametrize("interval_seconds", [1, 5])
def test_a_backlog_makes_it_slower_than_batches_are(
    make_batches: Callable[..., Batches], interval_seconds: int
) -> None:
    """The second batch waits 3 s for the first: three intervals of 1 s, of which a fifth counts (the integral
    factor)."""
    batches = make_batches()
    interval = timedelta(seconds=interval_seconds)
    controller = batches.controller(batches.stream.model_copy(update={"batch_interval": interval}))
    first = batches.receive(100, 100)
    second = batches.receive(100, 100)
    assert second == first + 1_000
    batches.run(first, 3_000)
    batches.run(second, 500)
    controller.follow()
    assert batches.rates() == [pytest.approx(200 * (1 - 0.2 * 3 / interval_seconds))] * 2


def test_by_timestamp_records_that_come_late_are_no_backlog(make_batches: Callable[..., Batches]) -> None:
    """After ten minutes down: the batch times are long past, and each batch runs as soon as its records are there."""
    batches = make_batches(by_timestamp=True)
    controller = batches.controller()
    for second in range(4):
        batches.run(batches.receive(100, 100, event_time_ms=NOW_MS - 600_000 + second * 1_000), 500)
        controller.follow()
        batches.clock.advance(1_000)
    assert batches.rates() == [200.0, 200.0]


def test_by_timestamp_the_wait_for_late_records_is_no_backlog(make_batches: Callable[..., Batches]) -> None:
    batches = make_batches(by_timestamp=True, allowed_lateness_seconds=60)
    controller = batches.controller()
    times = [batches.receive(100, 100, event_time_ms=NOW_MS + second * 1_000) for second in range(4)]
    batches.clock.advance(times[0] + 60_000 - batches.clock.now_ms())
    for time_ms in times:
        batches.run(time_ms, 500)
        controller.follow()
        batches.clock.advance(500)
    assert batches.rates() == [200.0, 200.0]


def test_by_timestamp_a_backlog_of_batches_counts(make_batches: Callable[..., Batches]) -> None:
    batches = make_batches(by_timestamp=True)
    controller = batches.controller()
    times = [batches.receive(100, 100, event_time_ms=NOW_MS - 600_000 + second * 1_000) for second in range(2)]
    batches.run(times[0], 3_000)
    batches.run(times[1], 500)
    controller.follow()
    assert batches.rates() == [pytest.approx(200 * (1 - 0.2 * 3))] * 2


def test_what_a_run_costs_before_spark_begins_is_no_backlog(make_batches: Callable[..., Batches]) -> None:
    batches = make_batches()
    controller = batches.controller()
    for _ in range(2):
        time_ms = batches.receive(100, 100)
        batches.clock.advance(5_000)
        batches.run(time_ms, 500)
        controller.follow()
        batches.clock.advance(1_000)
    assert batches.rates() == [200.0, 200.0]


def test_a_batch_waits_for_as_many_as_run_at_once() -> None:
    class Row:
        def __init__(self, time_ms: int, started_ms: int, ended_ms: int) -> None:
            self.batch_time_ms, self.started_at_ms, self.completed_at_ms = time_ms, started_ms, ended_ms

    rows: Any = [Row(1_000, 1_000, 9_000), Row(2_000, 2_000, 6_000), Row(3_000, 6_100, 7_000)]
    assert waited_ms(rows[2], rows, 1, since_ms=3_000) == 3_100, "no longer than until it began"
    assert waited_ms(rows[2], rows, 2, since_ms=3_000) == 3_000
    assert waited_ms(rows[2], rows, 3, since_ms=3_000) == 0
    assert waited_ms(rows[0], rows, 1, since_ms=1_000) == 0


def test_batches_that_run_at_once_keep_up_together(make_batches: Callable[..., Batches]) -> None:
    """Each takes one and a half intervals and two run at once: in that time they get through twice the records."""
    batches = make_batches(Limits(backpressure=SETTINGS, max_concurrent_batches=2))
    controller = batches.controller()
    running: Attempt | None = None
    for _ in range(10):
        attempt = batches.begin(batches.receive(300, 600))
        if running is not None:
            batches.clock.advance(500)
            batches.end(running)
            controller.follow()
        running = attempt
    assert batches.rates() == [400.0, 800.0]


def test_a_rate_does_not_fall_while_no_batch_has_waited(make_batches: Callable[..., Batches]) -> None:
    """A batch of few records takes nearly as long as one of many."""
    batches = make_batches()
    controller = batches.controller()
    for records, processing_ms in ((450, 900), (450, 900), (40, 800), (40, 800)):
        batches.run(batches.receive(records, 50), processing_ms)
        controller.follow()
        batches.clock.advance(1_000)
    assert batches.rates() == [500.0, 62.5]
    first, second = batches.receive(450, 50), batches.receive(450, 50)
    batches.run(first, 1_500)
    controller.follow()
    assert batches.rates() == [500.0, 62.5]
    batches.run(second, 1_500)
    batches.clock.advance(1_000)
    controller.follow()
    rates = batches.rates()
    assert rates[0] == pytest.approx(300 * (1 - 0.2 * 1.5)), "from the rate that was in force"


def test_how_many_ran_at_once() -> None:
    class Row:
        def __init__(self, time_ms: int, started_ms: int | None, ended_ms: int | None) -> None:
            self.batch_time_ms, self.started_at_ms, self.completed_at_ms = time_ms, started_ms, ended_ms

    batch: Any = Row(3_000, 3_000, 5_000)
    before, after, running, ended, later = (
        Row(1_000, 1_000, 3_500),
        Row(4_000, 4_000, 6_000),
        Row(4_100, 4_500, None),
        Row(2_000, 2_000, 3_000),
        Row(5_000, 5_000, None),
    )
    for others, most in (
        ([], 1),
        ([batch, ended, later, Row(6_000, None, None)], 1),
        ([before, batch, after], 2),
        ([before, after, running], 3),
    ):
        assert ran_at_once(batch, others) == most  # type: ignore[arg-type]


def test_a_batch_that_is_run_again_changes_no_rate(make_batches: Callable[..., Batches]) -> None:
    batches = make_batches()
    controller = batches.controller()
    for _ in range(2):
        batches.run(batches.receive(100, 100), 500)
        controller.follow()
        batches.clock.advance(1_000)
    time_ms = batches.ledger.batches.page("air", 1)[0].batch_time_ms
    attempt = batches.ledger.attempts.begin("air", time_ms, holder="test", way="connect", lease_ms=600_000, force=True)
    batches.clock.advance(50_000)
    for output in attempt.outputs:
        batches.ledger.attempts.record_output(attempt, output, {})
    batches.ledger.attempts.complete(attempt)
    controller.follow()
    assert batches.rates() == [200.0, 200.0]


def test_the_next_tracker_goes_on_from_the_ledgers_rates(make_batches: Callable[..., Batches]) -> None:
    batches = make_batches()
    controller = batches.controller()
    for _ in range(2):
        batches.run(batches.receive(100, 100), 500)
        controller.follow()
        batches.clock.advance(1_000)
    batches.ledger.jobs.release(batches.job)
    job = batches.ledger.jobs.acquire("air", holder="next", lease_ms=3_600_000)
    batches.leases = [
        batches.ledger.receivers.register(
            batches.ledger.receivers.schedule(job, receiver_id), host="here", lease_ms=3_600_000
        )
        for receiver_id in batches.ids
    ]
    second = batches.controller(job=job)
    second.follow()
    assert batches.rates() == [200.0, 200.0]
    batches.clock.advance(1_000)
    batches.run(batches.receive(100, 100), 250)
    second.follow()
    assert batches.rates() == [400.0, 400.0], "its first batch counts"


def test_without_backpressure_an_earlier_rate_is_lifted(make_batches: Callable[..., Batches]) -> None:
    """No rate is set then."""
    batches = make_batches(Limits())
    controller = batches.controller()
    for _ in range(3):
        batches.run(batches.receive(100, 100), 500)
        controller.follow()
        batches.clock.advance(1_000)
    assert batches.rates() == [None, None]
    batches.ledger.receivers.set_rate(batches.job, {batches.ids[1]: 50.0})
    batches.controller()
    assert batches.rates() == [None, None]


def test_a_rate_that_could_not_be_set_is_set_later(
    make_batches: Callable[..., Batches], monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = make_batches()
    controller = batches.controller()
    for _ in range(2):
        batches.run(batches.receive(100, 100), 500)
        batches.clock.advance(1_000)

    def away(*_: Any) -> None:
        raise LedgerUnavailableError("it does not answer")

    with monkeypatch.context() as patch:
        patch.setattr(batches.ledger.receivers, "set_rate", away)
        with pytest.raises(LedgerUnavailableError):
            controller.follow()
    batches.clock.advance(1_000)
    controller.follow()
    assert batches.rates() == [200.0, 200.0]


def test_published_rates_reach_receivers(
    make_stream: Callable[..., Stream], make_setting: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = make_setting(make_stream())
    setting.topic(1)
    setting.assign(0)
    receiver = ReceiverId("air", "records", 0)

    def eventually(reached: int) -> None:
        until = time.monotonic() + 25
        while setting.positions() != [reached]:
            assert time.monotonic() < until, "did not happen in time"
            time.sleep(0.01)

    plain = RateLimiter.update
    rates: list[float | None] = []

    def update(self: RateLimiter, wanted: float | None) -> None:
        plain(self, wanted)
        rates.append(self.rate)

    monkeypatch.setattr(RateLimiter, "update", update)
    with setting.running():
        setting.kafka.produce("flights", 0, b"first")
        eventually(1)
        setting.ledger.receivers.set_rate(setting.job, {receiver: 500.0})
        # A heartbeat later it holds; what was read until then is no proof of it.
        until = time.monotonic() + 25
        while rates[-1:] != [500.0]:
            assert time.monotonic() < until, "the rate did not arrive in time"
            time.sleep(0.01)
        setting.kafka.produce("flights", 0, *[b"x"] * 1_000)
        begun = time.monotonic()
        eventually(1_001)
        assert time.monotonic() - begun > 1.5
