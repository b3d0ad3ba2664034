"""The tracker with a real ledger and receivers in threads, over a Kafka in memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from headrace.batching.allocation import allocate
from headrace.blocks import ReceiverId
from headrace.hooks.readiness import blocks_ready
from headrace.ledger import EventKind, Ledger, PartitionState, ReceiverState
from headrace.ledger.errors import LedgerUnavailableError
from headrace.ledger.rows import JobLease
from headrace.receiving.discovery import Discovery, Known
from headrace.receiving.errors import KeyVersionsError
from headrace.receiving.kafka_receiver import KafkaReceiver
from headrace.receiving.key_versions import check_key_versions
from headrace.receiving.partitioning import Partitioning
from headrace.receiving.placed_receiver import PlacedReceiver
from headrace.receiving.receiver_task import ReceiverTask
from headrace.receiving.supervisor import ReceiverSupervisor
from headrace.receiving.topic_watch import SeenTopic
from headrace.receiving.tracker import ReceiverTracker, TrackerEnd, TrackerReport
from headrace.stream import ElasticsearchOutput, KeyIds, Limits, Stream
from headrace.stream.limits import Backpressure
from headrace.testing.fake_kafka import FakeKafka, FakeTopicIds
from headrace.wal.storage import open_storage

MakeStream = Callable[..., Stream]
OpenLedger = Callable[[Stream], tuple[Ledger, JobLease]]


def eventually(condition: Callable[[], bool], seconds: float = 25.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "did not happen in time"
        time.sleep(0.02)


class FakeDiscoverer:
    def __init__(self, kafka: FakeKafka) -> None:
        self.kafka = kafka
        self.foreign: tuple[str, ...] = ()
        self.missing: tuple[str, ...] = ()

    def discover(self, known: Known) -> Discovery:
        with self.kafka.lock:
            topics = tuple(
                SeenTopic(topic, topic_id, self.kafka.partitions(topic))
                for topic, topic_id in sorted(self.kafka.topic_ids.items())
            )
        keys = [(seen.topic, seen.topic_id, number) for seen in topics for number in range(seen.partitions)]
        return Discovery(topics, self.missing, {key: 0 for key in keys if key not in known.partitions}, self.foreign)


class Handle:
    """A receiver in a thread that a test can end as a crash would: without a word to the ledger."""

    def __init__(self, run: Callable[[threading.Event], Any]) -> None:
        self.stop = threading.Event()
        self.crashed = False
        self.thread = threading.Thread(target=run, args=(self.stop,), daemon=True)
        self.thread.start()

    def done(self) -> bool:
        return self.crashed or not self.thread.is_alive()

    def error(self) -> str | None:
        return "killed" if self.crashed else None

    def cancel(self) -> None:
        self.stop.set()


class Launcher:
    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.handles: dict[int, list[Handle]] = {}
        self.broken = False
        self.storage: Callable[[], Any] = lambda: open_storage(setting.stream.folder_url)

    def start(self, task: ReceiverTask) -> Handle:
        if self.broken:
            raise RuntimeError("no executor")
        setting = self.setting
        supervisor = ReceiverSupervisor(
            setting.stream,
            task.receiver_id,
            setting.ledger,
            self.storage(),
            task.job_lease,
            lease_ms=task.lease_ms,
            kafka_factory=lambda: KafkaReceiver(
                {}, on_lost_offsets=setting.stream.inputs[0].on_lost_offsets, consumer_factory=setting.kafka.consumer
            ),
            topic_ids=FakeTopicIds(setting.kafka),
        )
        handle = Handle(supervisor.run)
        self.handles.setdefault(task.receiver_id.index, []).append(handle)
        return handle


class Setting:
    def __init__(self, stream: Stream, ledger: Ledger, job: JobLease, kafka: FakeKafka) -> None:
        self.stream, self.ledger, self.job, self.kafka = stream, ledger, job, kafka
        self.launcher = Launcher(self)
        self.discoverer = FakeDiscoverer(kafka)
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
            self.stream,
            self.ledger,
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
            for row in self.ledger.positions.list("air")
            if row.state is not PartitionState.ENDED
        }

    def loads(self) -> list[int]:
        owners = list(self.owners().values())
        return [owners.count(index) for index in range(self.stream.inputs[0].receivers)]

    def positions(self) -> int:
        return sum(row.next_offset for row in self.ledger.positions.list("air"))

    def troubles(self) -> list[str]:
        job = self.ledger.jobs.current("air")
        return [] if job is None else list(job.attributes.get("troubles", []))

    def errors(self) -> str:
        events = self.ledger.events.list("air", kinds=[EventKind.RECEIVER_ERROR])
        return " ".join(str(event.payload.get("error")) for event in events)


@pytest.fixture
def setting(make_stream: MakeStream, open_ledger: OpenLedger, fake_kafka: FakeKafka) -> Any:
    stream = make_stream(receivers=2)
    fake_kafka.create("flights", 4)
    made = Setting(stream, *open_ledger(stream), fake_kafka)
    yield made
    if made.thread.is_alive():
        made.end()


def test_partitions_are_shared_and_read_and_a_stop_drains(setting: Setting) -> None:
    setting.begin()
    eventually(lambda: setting.loads() == [2, 2])
    for partition in range(4):
        setting.kafka.produce("flights", partition, b"a", b"b")
    eventually(lambda: setting.positions() == 8)
    report = setting.end()
    assert report.end is TrackerEnd.STOPPED
    assert {row.state for row in setting.ledger.receivers.list("air")} == {ReceiverState.STOPPED}


def test_a_stop_in_the_ledger_is_heard(setting: Setting) -> None:
    setting.begin()
    eventually(lambda: setting.loads() == [2, 2])
    setting.ledger.jobs.request_stop("air", "maintenance")
    setting.thread.join(30)
    assert setting.report == TrackerReport(TrackerEnd.STOPPED, "maintenance")


@pytest.mark.parametrize("batch_by", ["arrival", "timestamp"])
def test_by_what_its_receivers_receive_is_noted_before_one_starts(
    setting: Setting, make_stream: MakeStream, batch_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The definition may be changed under it: then only the job itself knows."""
    setting = setting.again(make_stream(receivers=2, batch_by=batch_by))
    noted: list[object] = []
    start = setting.launcher.start

    def look_and_start(task: ReceiverTask) -> Handle:
        job = setting.ledger.jobs.current("air")
        assert job is not None
        noted.append(job.attributes.get("batch_by"))
        return start(task)

    monkeypatch.setattr(setting.launcher, "start", look_and_start)
    setting.begin()
    eventually(lambda: len(noted) == 2)
    setting.end()
    assert noted == [batch_by, batch_by]


def test_batches_go_on_when_the_stream_is_by_timestamp_and_its_job_by_arrival(setting: Setting) -> None:
    setting.begin()
    eventually(lambda: setting.loads() == [2, 2])
    row = setting.ledger.streams.get("air")
    setting.ledger.streams.register(
        "air",
        setting.stream.model_copy(update={"batch_by": "timestamp"}).to_json(),
        batch_interval_ms=row.batch_interval_ms,
        block_interval_ms=row.block_interval_ms,
        batch_by="timestamp",
        allowed_lateness_ms=3_600_000,
    )

    def ready(batch_time_ms: int) -> bool:
        found = blocks_ready(setting.ledger, "air", batch_time_ms=batch_time_ms, grace_ms=60_000)
        assert not found.ready or "still receives by arrival" in found.reason
        return found.ready

    for _ in range(2):
        at_ms = row.batch_time_after(setting.ledger.now_ms())
        eventually(lambda at_ms=at_ms: ready(at_ms))  # type: ignore[misc]
    setting.end()
    setting.ledger.jobs.release(setting.job)
    at_ms = row.batch_time_after(setting.ledger.now_ms()) - row.batch_interval_ms
    assert not blocks_ready(setting.ledger, "air", batch_time_ms=at_ms, grace_ms=0).ready


def test_should_restart_receiver_after_stopping_it(setting: Setting) -> None:
    setting.begin()
    eventually(lambda: setting.loads() == [2, 2])
    setting.launcher.handles[0][0].stop.set()
    eventually(lambda: len(setting.launcher.handles[0]) == 2)
    setting.kafka.produce("flights", 0, b"a")
    eventually(lambda: setting.positions() == 1)


def test_a_dead_receivers_partitions_move_and_come_back(setting: Setting) -> None:
    """Its job says that it has ended, and nothing can be started: the other one takes over when the lease is over."""
    setting.begin()
    eventually(lambda: setting.loads() == [2, 2])
    setting.launcher.broken = True
    setting.launcher.handles[0][0].stop.set()
    eventually(lambda: setting.loads() == [0, 4])
    for partition in range(4):
        setting.kafka.produce("flights", partition, b"a")
    eventually(lambda: setting.positions() == 4)
    assert "no executor" in setting.errors()
    setting.launcher.broken = False
    eventually(lambda: setting.loads() == [2, 2])


class HungDisk:
    """Its syncs return when they are let."""

    def __init__(self, storage: Any, released: threading.Event) -> None:
        self._storage, self._released = storage, released

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    def below(self, path: str) -> HungDisk:
        return HungDisk(self._storage.below(path), self._released)

    def create_segment(self, path: str) -> Any:
        self._released.wait(60)
        return self._storage.create_segment(path)


def test_a_receiver_that_hangs_is_replaced_and_fenced(make_stream: MakeStream, setting: Setting) -> None:
    """Its thread lives, so nothing but its lapsed lease tells; it is the only one, so nobody takes its partitions."""
    setting.stream = make_stream(receivers=1)
    setting.hang_seconds = 1.0
    released = threading.Event()
    sound = setting.launcher.storage
    setting.launcher.storage = lambda: HungDisk(sound(), released)
    setting.begin()
    eventually(lambda: setting.loads() == [4])
    setting.launcher.storage = sound
    setting.kafka.produce("flights", 0, b"a")
    eventually(lambda: len(setting.launcher.handles[0]) == 2)
    eventually(lambda: setting.positions() == 1)
    assert "it hangs" in setting.errors()
    hung = setting.launcher.handles[0][0]
    assert not hung.done()
    released.set()
    eventually(hung.done)
    setting.kafka.produce("flights", 0, b"b")
    eventually(lambda: setting.positions() == 2)
    assert sum(each.records for each in setting.ledger.blocks.unclaimed("air")) == 2
    assert len(setting.launcher.handles[0]) == 2


def test_a_receiver_does_not_hang_because_the_ledger_is_away(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    setting.hang_seconds = 3.0
    setting.begin()
    eventually(lambda: setting.loads() == [2, 2])

    def away(*_: Any, **__: Any) -> None:
        raise LedgerUnavailableError("it does not answer")

    with monkeypatch.context() as patch:
        patch.setattr(setting.ledger.jobs, "renew", away)
        patch.setattr(setting.ledger.receivers, "heartbeat", away)
        over = time.monotonic() + 6  # Longer than a receiver's lease, and than one may hang.
        eventually(lambda: time.monotonic() > over)
    setting.kafka.produce("flights", 0, b"a")
    eventually(lambda: setting.positions() == 1 and setting.loads() == [2, 2])
    assert [len(handles) for handles in setting.launcher.handles.values()] == [1, 1]


def test_when_a_receiver_is_taken_to_hang(setting: Setting) -> None:
    task = ReceiverTask("", ReceiverId("air", "records", 0), setting.job)
    handles: list[Handle] = []

    class Patient:
        def start(self, task: ReceiverTask) -> Handle:
            handles.append(Handle(lambda stop: stop.wait(30)))
            return handles[-1]

    placed = PlacedReceiver(task, Patient(), hang_seconds=60)
    assert placed.keep_going(0, heard=False) is None
    assert placed.keep_going(59, heard=False) is None, "it has its time to register"
    assert placed.keep_going(200, heard=True) is None
    assert placed.keep_going(259, heard=False) is None
    assert "it hangs" in (placed.keep_going(260, heard=False) or "")
    assert handles[0].stop.is_set()
    assert not placed.running
    placed.excuse(262)
    placed.keep_going(263, heard=False)
    assert len(handles) == 2
    placed.cancel()


def test_a_receiver_that_never_starts_is_tried_for_as_long_as_it_takes(setting: Setting) -> None:
    class Broken:
        def start(self, task: ReceiverTask) -> Handle:
            raise RuntimeError("the executor has no disk")

    placed = PlacedReceiver(ReceiverTask("", ReceiverId("air", "records", 0), setting.job), Broken())
    for minute in range(1_100):
        assert "starts again in" in (placed.keep_going(minute * 61.0, heard=False) or "")
    assert placed.starts == 1_100


def test_rates_are_set_while_receivers_run(setting: Setting, make_stream: MakeStream) -> None:
    """By the tracker's loop, from the second completed batch on; and the receivers' next instances keep them."""
    limits = Limits(backpressure=Backpressure(min_rate=7.0, integral=1_000.0))
    setting = setting.again(make_stream(receivers=2, limits=limits))
    setting.begin()
    eventually(lambda: setting.loads() == [2, 2])
    storage = open_storage(setting.stream.storage.url)
    for number in range(1, 4):
        for partition in range(4):
            setting.kafka.produce("flights", partition, b"x")
        eventually(lambda number=number: setting.positions() == 4 * number)  # type: ignore[misc]
        while (time_ms := setting.ledger.batches.next_unclaimed("air")) is not None:
            eventually(lambda time_ms=time_ms: setting.ledger.now_ms() >= time_ms)  # type: ignore[misc]
            allocate(setting.stream, setting.ledger, storage, time_ms)
            attempt = setting.ledger.batches.begin_attempt(
                "air", time_ms, holder="test", way="connect", lease_ms=60_000
            )
            begun_ms = setting.ledger.now_ms()
            # No batch takes no time.
            eventually(lambda begun_ms=begun_ms: setting.ledger.now_ms() > begun_ms + 20)  # type: ignore[misc]
            for output in attempt.outputs:
                setting.ledger.batches.record_output(attempt, output, {})
            setting.ledger.batches.complete_attempt(attempt)

    def rates() -> list[float | None]:
        return [row.max_rate for row in setting.ledger.receivers.list("air")]

    eventually(lambda: all(rate is not None and rate >= 7.0 for rate in rates()))
    setting.launcher.handles[0][0].stop.set()
    eventually(lambda: len(setting.launcher.handles[0]) == 2)
    eventually(lambda: setting.ledger.receivers.list("air")[0].epoch == 2)
    assert None not in rates()
    setting.end()


def test_new_topics_and_grown_ones_are_handed_out(setting: Setting) -> None:
    setting.begin()
    eventually(lambda: setting.loads() == [2, 2])
    setting.kafka.grow("flights", 6)
    setting.kafka.create("weather", 2)
    eventually(lambda: setting.loads() == [4, 4])
    setting.kafka.produce("flights", 5, b"a")
    setting.kafka.produce("weather", 1, b"b")
    eventually(lambda: setting.positions() == 2)


def test_a_topic_created_again_is_another_incarnation(setting: Setting) -> None:
    setting.begin()
    setting.kafka.produce("flights", 0, b"old", b"old")
    eventually(lambda: setting.positions() == 2)
    with setting.kafka.lock:
        setting.kafka.create("flights", 4)
        setting.kafka.produce("flights", 0, b"new", b"new", b"new")
    eventually(lambda: setting.positions() == 5)
    rows = [row for row in setting.ledger.positions.list("air") if row.partition.partition == 0]
    assert [(row.partition.incarnation, row.next_offset, row.state) for row in rows] == [
        (1, 2, PartitionState.ENDED),
        (2, 3, PartitionState.ACTIVE),
    ]
    assert len(setting.ledger.events.list("air", kinds=[EventKind.TOPIC_RECREATED])) == 1


def test_a_failed_partition_is_tried_again_by_the_next_job(setting: Setting, make_stream: MakeStream) -> None:
    for partition in range(4):
        setting.kafka.produce("flights", partition, b"a", b"b", b"c")
    setting.kafka.expire("flights", 1, 2)
    setting.begin()

    def states() -> list[PartitionState]:
        return [row.state for row in setting.ledger.positions.list("air")]

    failed = [PartitionState.ACTIVE, PartitionState.FAILED, PartitionState.ACTIVE, PartitionState.ACTIVE]
    eventually(lambda: states() == failed and setting.positions() == 9)
    setting.end()
    # The cause persists: it fails again, and says so again.
    second = setting.again()
    second.begin()
    eventually(lambda: len(setting.ledger.events.list("air", kinds=[EventKind.PARTITION_FAILED])) == 2)
    assert states() == failed
    second.end()
    third = second.again(make_stream(receivers=2, on_lost_offsets="reset"))
    third.begin()
    eventually(lambda: third.positions() == 12)
    assert set(states()) == {PartitionState.ACTIVE}
    assert [(gap.from_offset, gap.until_offset) for gap in setting.ledger.gaps.list("air")] == [(0, 2)]
    third.end()


KEYED = ElasticsearchOutput(hosts="http://nowhere:9200", index="air", document_ids=KeyIds())
VERSIONED = KEYED.model_copy(update={"document_ids": KeyIds(version_from="changed_at")})


@pytest.mark.parametrize("change", ["has grown from 4 to 6", "was created again"])
def test_a_stream_of_key_ids_stops_for_good_when_keys_may_have_moved(setting: Setting, change: str) -> None:
    setting.stream = setting.stream.model_copy(update={"outputs": (KEYED,)})
    setting.begin()
    eventually(lambda: setting.loads() == [2, 2])
    with setting.kafka.lock:
        setting.kafka.grow("flights", 6) if "grown" in change else setting.kafka.create("flights", 4)
        setting.kafka.produce("flights", 3, b"a")
    setting.thread.join(30)
    assert isinstance(setting.error, KeyVersionsError)
    assert change in str(setting.error)
    assert "version_from" in (setting.error.remedy or "")
    assert len(setting.ledger.positions.list("air")) == 4, "no new partition has a position to be received from"
    # The next job knows it from the ledger: no receiver starts.
    second = setting.again()
    second.begin()
    second.thread.join(30)
    assert isinstance(second.error, KeyVersionsError)
    assert second.launcher.handles == {}
    third = second.again(setting.stream.model_copy(update={"outputs": (VERSIONED,)}))
    third.begin()
    eventually(lambda: len(third.owners()) == (6 if "grown" in change else 4) and None not in third.owners().values())
    third.end()


def test_topics_of_one_name_in_two_inputs_move_no_keys(setting: Setting) -> None:
    stream = setting.stream.model_copy(update={"outputs": (KEYED,)})
    topics = setting.ledger.topics
    check_key_versions(stream, topics.observe_all(setting.job, "here", [("flights", "id-1", 1)]))
    there = topics.observe_all(setting.job, "there", [("flights", "id-2", 1)])
    assert there[0].incarnation == 2
    check_key_versions(stream, topics.list("air", "there"))


def test_a_topic_of_the_first_look_begins_as_one_of_it_when_it_is_understood_later(setting: Setting) -> None:
    """Where to begin in one topic is known at once, in the other one only at the next look."""
    partitioning = Partitioning(setting.stream, setting.stream.inputs[0], setting.ledger, setting.job, grace_ms=1)
    flights, weather = SeenTopic("flights", "id-1", 1), SeenTopic("weather", "id-2", 1)
    known = partitioning.known()
    assert not known.appeared("flights", "id-1")
    partitioning.apply(Discovery((flights, weather), starting={("flights", "id-1", 0): 7}))
    delays = SeenTopic("delays", "id-3", 1)
    partitioning.apply(Discovery((flights, weather, delays)))
    # The next job's too.
    for each in (
        partitioning,
        Partitioning(setting.stream, setting.stream.inputs[0], setting.ledger, setting.job, grace_ms=1),
    ):
        known = each.known()
        appeared = [known.appeared(seen.topic, seen.topic_id) for seen in (flights, weather, delays)]
        assert appeared == [True, False, True]
        assert known.appeared("weather", "another id")


def test_what_comes_after_a_first_look_at_nothing_has_appeared(setting: Setting) -> None:
    partitioning = Partitioning(setting.stream, setting.stream.inputs[0], setting.ledger, setting.job, grace_ms=1)
    partitioning.apply(Discovery((), missing=("flights",)))
    assert partitioning.known().appeared("flights", "id-1")
    partitioning.apply(Discovery((SeenTopic("flights", "id-1", 1),)))
    assert partitioning.known().appeared("flights", "id-1")


def test_a_foreign_member_and_a_missing_topic_are_told_once(setting: Setting) -> None:
    setting.discoverer.foreign = ("rogue at /10.0.0.9",)
    setting.discoverer.missing = ("absent",)
    setting.begin()
    eventually(lambda: "rogue" in setting.errors() and "absent" in setting.errors())
    eventually(lambda: len(setting.troubles()) == 2)
    eventually(lambda: setting.loads() == [2, 2])
    assert setting.errors().count("rogue") == 1
    assert "headrace-air-records" in setting.errors()
    setting.discoverer.missing = ()
    eventually(lambda: ["rogue" in trouble for trouble in setting.troubles()] == [True])


def test_a_tracker_that_lost_its_lease_ends_and_so_do_its_receivers(setting: Setting) -> None:
    setting.begin()
    eventually(lambda: setting.loads() == [2, 2])
    setting.ledger.jobs.release(setting.job, "failed", "taken")
    setting.ledger.jobs.acquire("air", holder="another", lease_ms=60_000)
    setting.thread.join(30)
    assert setting.report is not None
    assert setting.report.end is TrackerEnd.LOST
    eventually(lambda: all(handle.done() for handles in setting.launcher.handles.values() for handle in handles))


def test_a_topic_of_which_nothing_may_be_known_is_not_taken_for_deleted(setting: Setting) -> None:
    partitioning = Partitioning(setting.stream, setting.stream.inputs[0], setting.ledger, setting.job, grace_ms=0)
    seen = SeenTopic("flights", "id-1", 1)
    partitioning.apply(Discovery((seen,), starting={("flights", "id-1", 0): 7}))
    for _ in range(5):
        partitioning.apply(Discovery((), refused=frozenset({"flights"})))
    (row,) = setting.ledger.positions.list("air")
    assert row.state is PartitionState.ACTIVE
    for _ in range(5):
        partitioning.apply(Discovery((), missing=("flights",)))
    (row,) = setting.ledger.positions.list("air")
    assert row.state is PartitionState.ENDED
