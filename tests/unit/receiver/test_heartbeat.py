"""When a heartbeat is sent, what it reports, and the estimate of the ledger's clock."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.blocks import ReceiverId, TopicPartition
from headrace.clock import ManualClock
from headrace.ledger.errors import LedgerUnavailableError
from headrace.ledger.receiving_tables import ReceiverLease, ReceiverOrders
from headrace.receiver.block_store import StoreCounts
from headrace.receiver.heartbeat import HEARTBEAT_SECONDS, Heartbeat, LedgerClock, ReceiverStats
from headrace.receiver.kafka_source import KafkaReceiver
from headrace.receiver.lag import Lag
from headrace.receiver.record_source import FetchState, PartitionStatus, SourceError

PARTITION = TopicPartition("flights", "topic-id", 0)


class Setting:
    """A heartbeat whose ledger, source and generator say what the test sets."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.sealed_ms = 0
        self.reported_sealed_ms: list[int] = []
        self.failed: list[str] = []
        self.is_available = True
        self.statuses: list[PartitionStatus] = []
        self.answers: Iterator[bool | None] = iter(())
        self.errors: list[SourceError] = []
        self.reported: list[str] = []
        self.takes_errors = True
        ledger = SimpleNamespace(
            receivers=SimpleNamespace(heartbeat=self._beat, report_error=self._report),
            positions=SimpleNamespace(fail=lambda _lease, _partition, error: self.failed.append(error)),
        )
        commits = SimpleNamespace(last_error=None, open=0, allow_until=lambda _: None)
        source: Any = SimpleNamespace(
            client_error=None, commits=commits, status=lambda: self.statuses, take_errors=self._take_errors
        )
        stats: Any = SimpleNamespace(collect=lambda *_: {})
        generator: Any = SimpleNamespace(queued=(0, 0), sealed_through_ms=lambda: self.sealed_ms)
        pausing: Any = SimpleNamespace(poll=lambda: False, report=lambda: None, reason=None)
        ledger_clock: Any = SimpleNamespace(observe=lambda *_: None)
        context: Any = SimpleNamespace(
            ledger=ledger, clock=self.clock, stream=SimpleNamespace(batch_interval_ms=10_000)
        )
        self.heartbeat = Heartbeat(
            context,
            ReceiverLease(ReceiverId("air", "records", 0), 1, 1, 10_000, 10_000),
            source=source,
            generator=generator,
            stats=stats,
            pausing=pausing,
            end_offsets=None,
            ledger_clock=ledger_clock,
            recreated=lambda _: next(self.answers),
        )

    def _beat(self, *_: object, sealed_through_ms: int, **__: object) -> ReceiverOrders:
        if not self.is_available:
            raise LedgerUnavailableError("no answer")
        self.reported_sealed_ms.append(sealed_through_ms)
        return ReceiverOrders({}, frozenset(), False, 0, 0)

    def _take_errors(self) -> list[SourceError]:
        errors, self.errors = self.errors, []
        return errors

    def _report(self, _lease: object, error: str, _stack: object) -> None:
        if not self.takes_errors:
            raise LedgerUnavailableError("no answer")
        self.reported.append(error)


@pytest.fixture
def setting() -> Setting:
    return Setting()


def test_a_batch_does_not_wait_for_the_next_second_once_its_blocks_are_stored(setting: Setting) -> None:
    heartbeat = setting.heartbeat
    setting.sealed_ms = 49_700
    assert heartbeat.tick()
    setting.clock.advance(200)
    setting.sealed_ms = 49_900
    assert not heartbeat.tick(), "no batch waits for that"
    setting.clock.advance(200)
    setting.sealed_ms = 50_100
    assert heartbeat.tick()
    assert not heartbeat.tick(), "once for each batch time"
    setting.clock.advance(200)
    setting.sealed_ms = 50_300
    assert not heartbeat.tick()
    setting.clock.advance(int(HEARTBEAT_SECONDS * 1000))
    assert heartbeat.tick()
    assert setting.reported_sealed_ms == [49_700, 50_100, 50_300]


def test_a_ledger_that_does_not_answer_is_asked_once_a_second_though_a_batch_waits(setting: Setting) -> None:
    heartbeat = setting.heartbeat
    heartbeat.tick()
    setting.is_available = False
    setting.sealed_ms = 10_100
    assert not heartbeat.tick()
    setting.is_available = True
    assert not heartbeat.tick()
    setting.clock.advance(int(HEARTBEAT_SECONDS * 1000))
    assert heartbeat.tick()
    assert setting.reported_sealed_ms == [0, 10_100]


def test_a_stopped_partition_fails_in_the_ledger_once_its_topic_is_known_not_to_be_created_again(
    setting: Setting,
) -> None:
    setting.statuses = [PartitionStatus(PARTITION, 5, FetchState.FAILED, "offsets [5, 9) are gone")]
    # None: Kafka did not say. True: the tracker ends the partition.
    setting.answers = iter([None, True, False])

    def failures_after_a_beat() -> int:
        setting.clock.advance(int(HEARTBEAT_SECONDS * 1000))
        assert setting.heartbeat.beat_if_due()
        return len(setting.failed)

    assert [failures_after_a_beat() for _ in range(4)] == [0, 0, 1, 1]


def test_errors_of_a_source_are_kept_until_the_ledger_has_them(setting: Setting) -> None:
    setting.errors = [SourceError("first"), SourceError("second")]
    setting.takes_errors = False
    assert not setting.heartbeat.tick()
    setting.errors = [SourceError("third")]
    setting.takes_errors = True
    setting.clock.advance(int(HEARTBEAT_SECONDS * 1000))
    assert setting.heartbeat.tick()
    assert setting.reported == ["first", "second", "third"]


@pytest.fixture
def receiver() -> Any:
    """A receiver whose broker does not answer."""
    settings = {"bootstrap.servers": "127.0.0.1:1", "group.id": "g", "log_level": 0, "enable.auto.commit": False}
    receiver = KafkaReceiver(settings)
    yield receiver
    receiver.close()


@pytest.mark.parametrize(
    ("lags", "connected", "total", "unknown"),
    [
        ([], None, None, 0),
        ([], True, 0, 0),
        ([None, None], False, None, 2),
        ([5, None], False, 5, 1),
        ([5, 0], True, 5, 0),
    ],
)
def test_the_lag_is_not_0_unless_kafka_has_reported_it(
    receiver: KafkaReceiver, lags: list[int | None], connected: bool | None, total: int | None, unknown: int
) -> None:
    receiver.connected = connected
    lag_of = {TopicPartition("t", "id", number): Lag(records, None) for number, records in enumerate(lags)}
    watch: Any = SimpleNamespace(lags=lambda _: lag_of, unreadable_topics=lambda *_: [])
    pausing: Any = SimpleNamespace(disk=None, pauses=0, paused_seconds=0.0)
    recovery: Any = SimpleNamespace(torn_tails=[], damage=[])
    stats = ReceiverStats(
        receiver, StoreCounts(), watch, pausing=pausing, recovery=recovery, stored_positions=dict, now_ms=lambda: 0
    )
    reported = stats.collect(0.0, (0, 0))
    assert (reported["total_lag"], reported["lag_unknown"]) == (total, unknown)


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
