"""A tracker with a real ledger and receivers in threads, over a Kafka in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from headrace.ledger import EventKind, Ledger, PartitionState
from headrace.ledger.tables import JobLease
from headrace.receiver.kafka_source import KafkaReceiver
from headrace.receiver.supervisor import ReceiverClients, ReceiverTask, receive
from headrace.receiver.tracker import ReceiverTracker, TrackerReport
from headrace.stream import KafkaInput, Stream
from headrace.stream_context import StreamContext
from headrace.testing.fake_kafka import FakeDiscoverer, FakeEndOffsets, FakeKafka, FakeTopicIds
from headrace.wal.storage import open_storage

MakeStream = Callable[..., Stream]


class Handle:
    """A receiver in a thread that a test can end as a crash would: without a word to the ledger."""

    def __init__(self, run: Callable[[threading.Event], Any]) -> None:
        self.stop = threading.Event()
        self.crashed = False
        self.thread = threading.Thread(target=run, args=(self.stop,), daemon=True)
        self.thread.start()

    def done(self) -> bool:
        return self.crashed or not self.thread.is_alive()

    def running_on(self) -> None:
        """It is a thread."""

    def error(self) -> str | None:
        return "killed" if self.crashed else None

    def cancel(self) -> None:
        self.stop.set()


class Launcher:
    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.handles: dict[int, list[Handle]] = {}
        self.broken = False
        # What more than so many receivers leave no slot for.
        self.most_beside_batches = 100
        self.looks = 0
        self.storage: Callable[[], Any] = lambda: open_storage(setting.stream.folder_url)

    def running(self) -> int:
        return sum(not handle.done() for handles in self.handles.values() for handle in handles)

    def crowding(self) -> str | None:
        self.looks += 1
        return "receivers hold every slot" if self.running() > self.most_beside_batches else None

    def start(self, task: ReceiverTask) -> Handle:
        if self.broken or self.running() >= self.most_beside_batches:
            raise RuntimeError("no executor")
        setting = self.setting
        context = StreamContext(setting.stream, setting.ledger, storage=self.storage())

        def clients(_: StreamContext, source: KafkaInput) -> ReceiverClients:
            consumer = KafkaReceiver(
                {}, on_lost_offsets=source.on_lost_offsets, consumer_factory=setting.kafka.consumer
            )
            return ReceiverClients(consumer, FakeTopicIds(setting.kafka), setting.ends)

        def run(stop: threading.Event) -> None:
            receive(context, task.scheduled, lease_ms=task.lease_ms, stop=stop, clients=clients)

        handle = Handle(run)
        self.handles.setdefault(task.receiver_id.index, []).append(handle)
        return handle


class Setting:
    def __init__(self, stream: Stream, ledger: Ledger, job: JobLease, kafka: FakeKafka) -> None:
        self.stream, self.ledger, self.job, self.kafka = stream, ledger, job, kafka
        self.launcher = Launcher(self)
        self.discoverer = FakeDiscoverer(kafka)
        self.ends = FakeEndOffsets(kafka)
        self.hang_seconds = 60.0
        self.stop = threading.Event()
        self.report: TrackerReport | None = None
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)

    def again(self, stream: Stream | None = None) -> Setting:
        """The next job, of a stream that may be defined otherwise."""
        self.ledger.jobs.release(self.job)
        job = self.ledger.jobs.acquire("air", holder="next", lease_ms=60_000)
        return Setting(stream or self.stream, self.ledger, job, self.kafka)

    def _run(self) -> None:
        try:
            self._track()
        except Exception as error:
            self.error = error

    def _track(self) -> None:
        tracker = ReceiverTracker(
            StreamContext(self.stream, self.ledger),
            self.launcher,
            self.job,
            discoverer=lambda _: self.discoverer,
            receiver_lease_ms=4_000,
            restart_seconds=0.2,
            metadata_seconds=0.2,
            hang_seconds=self.hang_seconds,
        )
        self.report = tracker.run(self.stop)

    def begin(self) -> None:
        self.thread.start()

    def end(self) -> TrackerReport:
        self.stop.set()
        self.thread.join(40)
        assert self.report is not None
        return self.report

    def owners(self) -> dict[tuple[str, int], int | None]:
        return {
            (row.partition.topic, row.partition.partition): row.receiver_index
            for row in self.ledger.positions.all("air")
            if row.state is not PartitionState.ENDED
        }

    def loads(self) -> list[int]:
        owners = list(self.owners().values())
        return [owners.count(index) for index in range(self.stream.inputs[0].receivers)]

    def positions(self) -> int:
        return sum(row.next_offset for row in self.ledger.positions.all("air"))

    def troubles(self) -> list[str]:
        job = self.ledger.jobs.current("air")
        return [] if job is None else list(job.attributes.get("troubles", []))

    def errors(self) -> str:
        events = self.ledger.events.page("air", kinds=[EventKind.RECEIVER_ERROR])
        return " ".join(str(event.payload.get("error")) for event in events)
