"""A stream, its ledger, a Kafka in memory, and whole receivers between them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
from confluent_kafka import KafkaError, KafkaException
from tests.unit.receiver.waiting import LIMIT_SECONDS

from headrace.blocks import ReceiverId, TopicPartition
from headrace.ledger import EventKind, Ledger
from headrace.ledger.receiving.tables import ReceiverRow
from headrace.ledger.tables import JobLease
from headrace.receiver.heartbeat import LEASE_MS
from headrace.receiver.kafka_source import KafkaReceiver
from headrace.receiver.supervisor import ReceiverClients, ReceiverReport, receive
from headrace.stream import ConsoleOutput, KafkaInput, Limits, Stream
from headrace.stream_context import StreamContext
from headrace.testing.fake_kafka import FakeEndOffsets, FakeKafka, FakeTopicIds
from headrace.wal.reader import read_block
from headrace.wal.storage import open_storage


class Running:
    """A receiver in a thread."""

    def __init__(self, receive: Callable[[threading.Event], ReceiverReport]) -> None:
        self.receive = receive
        self.stop = threading.Event()
        self.report: ReceiverReport | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        self.report = self.receive(self.stop)

    def end(self) -> ReceiverReport:
        self.stop.set()
        return self.join()

    def join(self) -> ReceiverReport:
        self.thread.join(LIMIT_SECONDS)
        assert self.report is not None
        return self.report


class Setting:
    """Receivers of one stream, whose topic's partitions are to be assigned."""

    def __init__(self, stream: Stream, ledger: Ledger, job: JobLease, kafka: FakeKafka) -> None:
        self.stream, self.ledger, self.job, self.kafka = stream, ledger, job, kafka
        self.ends = FakeEndOffsets(kafka)
        self.storage = open_storage(stream.folder_url)
        self.partitions: list[TopicPartition] = []

    def topic(self, partitions: int = 2) -> None:
        topic_id = self.kafka.create("flights", partitions)
        (row,) = self.ledger.topics.observe(self.job, "records", [("flights", topic_id, partitions)])
        self.partitions = [TopicPartition("flights", topic_id, n, row.incarnation) for n in range(partitions)]
        self.ledger.positions.ensure_all(self.job, "records", dict.fromkeys(self.partitions, 0))

    def assign(self, *indexes: int) -> None:
        self.ledger.positions.assign(self.job, "records", dict(zip(self.partitions, indexes, strict=True)))

    def start(self, index: int = 0, storage: Any = None, ledger: Any = None, lease_ms: int = LEASE_MS) -> Running:
        context = StreamContext(self.stream, ledger or self.ledger, storage=storage or self.storage)
        scheduled = self.ledger.receivers.schedule(self.job, ReceiverId("air", "records", index))
        return Running(lambda stop: receive(context, scheduled, lease_ms=lease_ms, stop=stop, clients=self.clients))

    def clients(self, context: StreamContext, source: KafkaInput) -> ReceiverClients:
        consumer = KafkaReceiver(
            {}, on_lost_offsets=source.on_lost_offsets, clock=context.clock, consumer_factory=self.kafka.consumer
        )
        return ReceiverClients(consumer, FakeTopicIds(self.kafka), self.ends)

    @contextmanager
    def running(self, index: int = 0, **options: Any) -> Iterator[Running]:
        running = self.start(index, **options)
        try:
            yield running
        finally:
            running.end()

    def positions(self) -> list[int]:
        rows = {row.partition: row.next_offset for row in self.ledger.positions.all("air")}
        return [rows[partition] for partition in self.partitions]

    def stored(self) -> list[tuple[int, int, bytes]]:
        """(partition, offset, value) of every accepted block, read back from the log."""
        values = []
        for unclaimed in self.ledger.blocks.unclaimed("air"):
            for block in self.ledger.allocations.blocks_of("air", unclaimed.batch_time_ms):
                _, batch = read_block(self.storage.below("log"), block.info.handle)
                values += [(row["partition"], row["offset"], row["value"]) for row in batch.to_pylist()]
        return sorted(values)

    def receiver(self) -> ReceiverRow:
        (row,) = self.ledger.receivers.all("air")
        return row

    def paused_for(self) -> str:
        """Why the receiver is paused, or the empty string."""
        rows = self.ledger.receivers.all("air")
        return (rows[0].paused_reason or "") if rows else ""

    def events(self, kind: EventKind) -> list[dict[str, Any]]:
        return [event.payload for event in self.ledger.events.page("air", kinds=[kind])]


MakeStream = Callable[..., Stream]
MakeSetting = Callable[[Stream], Setting]


def refuse_topic_ids(monkeypatch: pytest.MonkeyPatch, ends: FakeEndOffsets) -> None:
    """No topic may be described while ``ends`` refuses any."""
    ask = FakeTopicIds.ask
    denied = KafkaException(KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED, "from the test"))

    def refused(_: float) -> Any:
        raise denied

    monkeypatch.setattr(FakeTopicIds, "ask", lambda ids, topics: refused if ends.refused else ask(ids, topics))


@pytest.fixture
def fake_kafka() -> FakeKafka:
    return FakeKafka()


@pytest.fixture
def make_stream(tmp_path: Path) -> Callable[..., Stream]:
    def make(
        *, limits: Limits | None = None, batch_by: Literal["arrival", "timestamp"] = "arrival", **source: Any
    ) -> Stream:
        source.setdefault("topics", ("flights",))
        return Stream(
            name="air",
            inputs=(KafkaInput(bootstrap_servers="nowhere:9092", **source),),
            outputs=(ConsoleOutput(id="console"),),
            batch_interval="1 s",
            batch_by=batch_by,
            allowed_lateness="2 s",
            block_interval="20 ms",
            storage=str(tmp_path / "storage"),
            ledger=f"sqlite:///{tmp_path}/ledger.db",
            limits=limits or Limits(),
        )

    return make


@pytest.fixture
def open_ledger() -> Iterator[Callable[[Stream], tuple[Ledger, JobLease]]]:
    """Opens a stream's ledger, registers the stream and acquires its receiver job."""
    opened: list[Ledger] = []

    def make(stream: Stream) -> tuple[Ledger, JobLease]:
        ledger = Ledger.open(stream.ledger)
        opened.append(ledger)
        ledger.streams.register(
            stream.name,
            stream.model_dump_json(),
            batch_interval_ms=stream.batch_interval_ms,
            block_interval_ms=stream.block_interval_ms,
            batch_by=stream.batch_by,
            allowed_lateness_ms=stream.allowed_lateness_ms,
        )
        return ledger, ledger.jobs.acquire(stream.name, holder="test", lease_ms=60_000)

    yield make
    for ledger in opened:
        ledger.close()


@pytest.fixture
def make_setting(
    open_ledger: Callable[[Stream], tuple[Ledger, JobLease]], fake_kafka: FakeKafka
) -> Callable[[Stream], Setting]:
    """What a receiver of a stream runs in; see `Setting`."""
    return lambda stream: Setting(stream, *open_ledger(stream), fake_kafka)


@pytest.fixture
def setting(make_stream: MakeStream, make_setting: MakeSetting) -> Setting:
    """Of a stream with two receivers and a topic of two partitions, which are not assigned."""
    made = make_setting(make_stream(receivers=2))
    made.topic()
    return made
