"""When a heartbeat is sent, what it reports, and how far a receiver is behind."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.blocks import ReceiverId, TopicPartition
from headrace.clock import ManualClock
from headrace.ledger.errors import LedgerUnavailableError, PartitionNotAssignedError
from headrace.ledger.receiving.tables import ReceiverLease, ReceiverOrders
from headrace.receiver.block_store import StoreCounts
from headrace.receiver.heartbeat import HEARTBEAT_SECONDS, Heartbeat
from headrace.receiver.kafka_source import KafkaReceiver
from headrace.receiver.lag_watch import Lag, LagWatch
from headrace.receiver.partition_orders import PartitionOrders
from headrace.receiver.receiver_stats import ReceiverStats
from headrace.receiver.record_source import FetchState, PartitionStatus, SourceError
from headrace.testing.fake_kafka import FakeEndOffsets, FakeKafka

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
        self.owner = 0
        ledger = SimpleNamespace(
            receivers=SimpleNamespace(heartbeat=self._beat, report_error=self._report),
            positions=SimpleNamespace(fail=self._fail),
        )
        commits = SimpleNamespace(last_error=None, open=0, allow_until=lambda _: None)
        source: Any = SimpleNamespace(
            client_error=None, commits=commits, status=lambda: self.statuses, take_errors=self._take_errors
        )
        stats: Any = SimpleNamespace(collect=lambda *_: {})
        generator: Any = SimpleNamespace(queued=(0, 0), sealed_through_ms=lambda: self.sealed_ms)
        pausing: Any = SimpleNamespace(poll=lambda: False, report=lambda: None, reason=None)
        self.ledger_ahead_ms = 0
        self.stats: dict[str, object] = {}
        ledger_clock: Any = SimpleNamespace(
            observe=lambda *_: None, now_ms=lambda: self.clock.now_ms() + self.ledger_ahead_ms
        )
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

    def _beat(self, *_: object, sealed_through_ms: int, stats: dict[str, object], **__: object) -> ReceiverOrders:
        if not self.is_available:
            raise LedgerUnavailableError("no answer")
        self.stats = stats
        self.reported_sealed_ms.append(sealed_through_ms)
        return ReceiverOrders({}, frozenset(), False, 0, 0)

    def _fail(self, lease: ReceiverLease, partition: TopicPartition, error: str) -> None:
        if self.owner != lease.receiver_id.index:
            raise PartitionNotAssignedError(lease.receiver_id, partition, self.owner)
        self.failed.append(error)

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


def test_a_batch_does_not_wait_a_second_once_its_blocks_are_in(setting: Setting) -> None:
    """It does not wait for the next heartbeat's second."""
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


@pytest.mark.parametrize(("ledger_ahead_ms", "ahead"), [(0, 0), (-3_600_000, 3_600), (31_536_000_400, -31_536_000)])
def test_the_difference_of_the_clocks_is_reported(setting: Setting, ledger_ahead_ms: int, ahead: int) -> None:
    setting.ledger_ahead_ms = ledger_ahead_ms
    setting.heartbeat.tick()
    assert setting.stats["clock_ahead_seconds"] == ahead


def test_a_silent_ledger_is_asked_once_a_second(setting: Setting) -> None:
    """It is so even though a batch waits."""
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


def test_a_stopped_partition_fails_unless_its_topic_came_again(
    setting: Setting,
) -> None:
    """It fails once its topic is known not to be created again."""
    setting.statuses = [PartitionStatus(PARTITION, 5, FetchState.FAILED, "offsets [5, 9) are gone")]
    # None: Kafka did not say. True: the tracker ends the partition.
    setting.answers = iter([None, True, False])

    def failures_after_a_beat() -> int:
        setting.clock.advance(int(HEARTBEAT_SECONDS * 1000))
        assert setting.heartbeat.beat_if_due()
        return len(setting.failed)

    assert [failures_after_a_beat() for _ in range(4)] == [0, 0, 1, 1]


def test_a_stopped_partition_taken_by_force_ends_no_receiver(setting: Setting) -> None:
    setting.statuses = [PartitionStatus(PARTITION, 5, FetchState.FAILED, "offsets [5, 9) are gone")]
    setting.answers = iter([False, False])
    setting.owner = 1
    assert setting.heartbeat.tick()
    setting.owner = 0
    setting.clock.advance(int(HEARTBEAT_SECONDS * 1000))
    assert setting.heartbeat.tick()
    assert len(setting.failed) == 1, "it came back"


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
    watch: Any = SimpleNamespace(lags=lambda _: lag_of, unreadable_topics=lambda *_: [], open_transactions=list)
    pausing: Any = SimpleNamespace(disk=None, pauses=0, paused_seconds=0.0)
    recovery: Any = SimpleNamespace(torn_tails=[], damage=[])
    stats = ReceiverStats(
        receiver, StoreCounts(), watch, pausing=pausing, recovery=recovery, stored_positions=dict, now_ms=lambda: 0
    )
    reported = stats.collect(0.0, (0, 0))
    assert (reported["total_lag"], reported["lag_unknown"]) == (total, unknown)


T = 1_700_000_000_000
P = TopicPartition("flights", "id", 0)


class Watched:
    def __init__(self) -> None:
        self.kafka, self.clock = FakeKafka(), ManualClock(T)
        self.kafka.create("flights", 1)
        self.ends = FakeEndOffsets(self.kafka)
        self.watch = LagWatch(self.ends, lambda: [P], self.clock.now_ms, self.clock)

    def ask(self) -> None:
        """A question and its answer; then the next one is due."""
        self.watch.poll()
        self.watch.poll()
        self.clock.advance(2_000)

    def lag(self, position: int) -> Lag:
        return self.watch.lags({P: position})[P]

    def unreadable_topics(
        self, position: int, state: FetchState = FetchState.FETCHING, error: str | None = None
    ) -> list[dict]:
        lags = self.watch.lags({P: position})
        return self.watch.unreadable_topics(lags, [PartitionStatus(P, position, state, error)], None)


@pytest.fixture
def watched() -> Watched:
    return Watched()


def test_nothing_is_known_before_the_first_answer(watched: Watched) -> None:
    assert watched.lag(0) == Lag(None, None)
    assert watched.unreadable_topics(0) == []


def test_the_lag_is_what_is_not_stored_and_says_since_when(watched: Watched) -> None:
    watched.kafka.produce("flights", 0, b"a", b"b", b"c")
    watched.ask()
    assert watched.lag(1) == Lag(2, None), "it was never seen to be up to date"
    assert watched.lag(3) == Lag(0, T)
    watched.kafka.produce("flights", 0, b"d")
    watched.ask()
    assert watched.lag(3) == Lag(1, T)
    watched.ask()
    assert watched.lag(4) == Lag(0, T + 4_000)


def test_a_topic_that_may_not_be_described_has_no_lag_of_0(watched: Watched) -> None:
    watched.ask()
    assert watched.lag(0).records == 0
    watched.ends.refused.add("flights")
    watched.ask()
    watched.ask()
    assert watched.lag(0).records is None
    assert watched.unreadable_topics(0) == [
        {
            "topic": "flights",
            "asked_ms": T,
            "error": "partition 0 cannot be asked about (TOPIC_AUTHORIZATION_FAILED: from the fake)",
        }
    ]
    watched.ends.refused.clear()
    watched.ask()
    assert watched.unreadable_topics(0) == []


def test_a_partition_is_unreadable_if_there_is_something_to_read(watched: Watched) -> None:
    watched.ask()
    assert watched.unreadable_topics(0, error="no access") == []
    watched.kafka.produce("flights", 0, b"a")
    watched.ask()
    assert watched.unreadable_topics(0, error="no access") == [
        {"topic": "flights", "asked_ms": T + 4_000, "error": "partition 0 cannot be read (no access)"}
    ]
    watched.clock.advance(10_000)
    assert watched.unreadable_topics(0, error="no access")[0]["asked_ms"] == T + 4_000
    assert watched.unreadable_topics(1) == []
    assert watched.unreadable_topics(0, FetchState.FAILED, "gone") == [], "that is its state in the ledger"


def test_the_lag_counts_what_waits_for_an_open_transaction() -> None:
    """The transaction is reported after a minute."""
    log, readable = FakeKafka(), FakeKafka()
    clock = ManualClock(T)
    for kafka in (log, readable):
        kafka.create("flights", 1)
        kafka.produce("flights", 0, b"a")
    ends = (FakeEndOffsets(log), FakeEndOffsets(readable))
    watch = LagWatch(ends[0], lambda: [P], clock.now_ms, clock, readable_ends=ends[1])

    def ask(seconds: int) -> None:
        watch.poll()
        watch.poll()
        clock.advance(seconds * 1_000)

    ask(2)
    assert watch.lags({P: 1})[P] == Lag(0, T)
    log.produce("flights", 0, b"open", b"b", b"c")
    ask(59)
    assert watch.lags({P: 1})[P] == Lag(3, T)
    assert watch.open_transactions() == [], "an ordinary transaction"
    ask(2)
    assert watch.open_transactions() == [
        {"topic": "flights", "partition": 0, "offset": 1, "since_ms": T + 2_000, "behind": 3}
    ]
    readable.produce("flights", 0, b"committed", b"b", b"c")
    ask(2)
    assert watch.open_transactions() == []
    assert watch.lags({P: 4})[P].records == 0


def test_a_transaction_that_ends_and_the_next_one_are_two(watched: Watched) -> None:
    """As Flink's sinks write: one is always open."""
    log = FakeKafka()
    log.create("flights", 1)
    watched.watch = LagWatch(
        FakeEndOffsets(log), lambda: [P], watched.clock.now_ms, watched.clock, readable_ends=watched.ends
    )
    for _ in range(5):
        log.produce("flights", 0, b"a")
        watched.ask()
        watched.clock.advance(50_000)
        watched.kafka.produce("flights", 0, b"a")
        log.produce("flights", 0, b"b")
        watched.ask()
        assert watched.watch.open_transactions() == []
        watched.kafka.produce("flights", 0, b"b")


def test_a_release_without_an_answer_comes_with_the_next_orders() -> None:
    """Otherwise the receiver would end, and with it what was read of its other partitions."""
    answers = iter([LedgerUnavailableError("away"), None])
    released: list[TopicPartition] = []

    def release(_lease: ReceiverLease, partitions: list[TopicPartition]) -> None:
        if (error := next(answers)) is not None:
            raise error
        released.extend(partitions)

    fakes: Any = {
        "source": SimpleNamespace(partitions={}, commits=SimpleNamespace(forget=lambda *_: None)),
        "generator": SimpleNamespace(after_push=lambda action: action()),
        "heartbeat": SimpleNamespace(forget_orders=lambda: None),
        "limiter": SimpleNamespace(update=lambda _: None),
    }
    context: Any = SimpleNamespace(ledger=SimpleNamespace(positions=SimpleNamespace(release=release)))
    lease = ReceiverLease(ReceiverId("air", "records", 0), 1, 1, 10_000, 10_000)
    orders = PartitionOrders(context, lease, **fakes, event_times=None, next_offsets={PARTITION: 7})
    revoking = ReceiverOrders({}, frozenset({PARTITION}), stop=False, lease_until_ms=10_000, now_ms=0)
    orders.follow(revoking, frozenset())
    assert released == []
    orders.follow(revoking, frozenset())
    assert released == [PARTITION]
