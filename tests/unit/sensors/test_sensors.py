from __future__ import annotations

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from uuid import uuid4

import pytest
from airflow.providers.standard.operators.empty import EmptyOperator
from airflow.sdk import DAG
from airflow.sdk.exceptions import AirflowFailException, DownstreamTasksSkipped, TaskDeferred

from headrace.blocks import BlockHandle, BlockInfo, OffsetRange, ReceiverId, TopicPartition
from headrace.clock import ManualClock
from headrace.hooks import ledger as ledger_hook
from headrace.hooks.ledger import register
from headrace.ledger import Ledger
from headrace.runs.readiness import InputsNotReceivedError, blocks_ready
from headrace.runs.receiver_job import receiving
from headrace.sensors.blocks_ready import BlocksReadySensor
from headrace.sensors.kafka_receiver import KafkaReceiverSensor
from headrace.stream import ConsoleOutput, KafkaInput, Stream
from headrace.stream_context import StreamContext
from headrace.testing.records import TOPIC_ID
from headrace.timetables.micro_batch import from_ms
from headrace.triggers import base as triggers
from headrace.triggers.blocks_ready import BlocksReadyTrigger
from headrace.triggers.first_receiver import FirstReceiverTrigger, NoReceiverError

T = 1_700_000_000_000


@pytest.fixture(autouse=True)
def deferrable(monkeypatch):
    """As the embedded stack and compose have it."""
    monkeypatch.setenv("AIRFLOW__OPERATORS__DEFAULT_DEFERRABLE", "True")


@pytest.fixture
def stream(tmp_path) -> Stream:
    return Stream(
        name="flights",
        inputs=KafkaInput(bootstrap_servers="localhost:9", topics="flights", receivers=2),
        outputs=ConsoleOutput(),
        batch_interval="10 s",
        storage=str(tmp_path / "storage"),
        ledger=f"sqlite:///{tmp_path}/ledger.db",
        spark={"master": "local[3]"},
    )


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(T)


@pytest.fixture
def ledger(stream, clock, monkeypatch):
    with Ledger.open(stream.ledger, clock=clock) as opened:
        # Sensors open the ledger themselves; they are to see the same clock.
        monkeypatch.setattr(ledger_hook, "_open", lambda url, environ: Ledger.open(url, environ=environ, clock=clock))
        monkeypatch.setattr(triggers, "FIRST_LOOK_SECONDS", 0.0)
        register(opened, stream)
        yield opened


class Job:
    def __init__(self, ledger: Ledger, receivers: int) -> None:
        self.ledger = ledger
        self.lease = ledger.jobs.acquire("flights", holder="test", lease_ms=30_000)
        self.leases = [
            ledger.receivers.register(self.lease, ReceiverId("flights", "records", n), host="h", lease_ms=20_000)
            for n in range(receivers)
        ]

    def run(self, sealed: int = 0) -> Job:
        self.ledger.jobs.update(self.lease, state="running")
        for lease in self.leases:
            self.ledger.receivers.heartbeat(lease, sealed_through_ms=sealed)
        return self


def fail(ledger: Ledger, job: Job, error: str) -> None:
    partition = TopicPartition("flights", TOPIC_ID, 0)
    ledger.topics.observe(job.lease, "records", "flights", TOPIC_ID, 1)
    ledger.positions.ensure_all(job.lease, "records", {partition: 0})
    ledger.positions.assign(job.lease, "records", {partition: 0})
    ledger.positions.fail(job.leases[0], partition, error)


def context(logical_date: datetime | None = None, **run):
    run = SimpleNamespace(**{
        "logical_date": logical_date, "run_after": datetime.now(UTC), "data_interval_end": None, "run_id": "run",
        "conf": {}, "clear_number": 0, "run_type": "scheduled", "start_date": None, **run,
    })  # fmt: skip
    return {"dag_run": run, "ti": SimpleNamespace(id=uuid4())}


class TestReceiving:
    def ask(self, ledger):
        return receiving(ledger, "flights", receivers=2, max_silence_ms=5000)

    def test_no_job(self, ledger):
        assert not self.ask(ledger).ok

    def test_a_job_that_starts(self, ledger):
        Job(ledger, 2)
        assert "starting" in self.ask(ledger).reason

    def test_not_all_receivers(self, ledger):
        Job(ledger, 1).run()
        assert self.ask(ledger).reason == "1 of 2 receivers have started"

    def test_all_of_them(self, ledger):
        Job(ledger, 2).run()
        assert self.ask(ledger).ok

    def test_a_silent_receiver(self, ledger, clock):
        Job(ledger, 2).run()
        clock.advance(6000)
        assert "silent for 6000 ms" in self.ask(ledger).reason

    def test_a_dead_job(self, ledger, clock):
        Job(ledger, 2).run()
        clock.advance(31_000)
        assert "not alive" in self.ask(ledger).reason

    def test_a_failed_receiver_tells_its_error(self, ledger):
        job = Job(ledger, 2).run()
        ledger.receivers.release(job.leases[0], "failed", "topic is gone")
        assert "topic is gone" in self.ask(ledger).reason

    def test_a_paused_receiver_tells_why(self, ledger):
        job = Job(ledger, 2).run()
        ledger.receivers.heartbeat(job.leases[1], sealed_through_ms=0, paused_reason="the log has 9 of 8 GB")
        assert self.ask(ledger).reason == "receiver flights/records/1 is paused: the log has 9 of 8 GB"
        ledger.receivers.heartbeat(job.leases[1], sealed_through_ms=0)
        assert self.ask(ledger).ok

    def test_a_failed_partition_tells_its_error(self, ledger):
        job = Job(ledger, 2).run()
        fail(ledger, job, "Kafka no longer has offset 0")
        found = self.ask(ledger)
        assert not found.ok
        assert "1 partition(s) are stopped by an error: flights-0 at offset 0: Kafka no longer has" in found.reason

    def test_a_failed_partition_of_a_topic_that_is_no_longer_declared_is_missed_by_nobody(self, ledger, stream):
        fail(ledger, Job(ledger, 2).run(), "the topic was deleted")
        other = KafkaInput(bootstrap_servers="localhost:9", topics="others", receivers=2)
        register(ledger, stream.model_copy(update={"inputs": (other,)}))
        assert self.ask(ledger).ok


class TestBlocksReady:
    def ask(self, ledger, grace_ms=10_000):
        return blocks_ready(ledger, "flights", batch_time_ms=T, grace_ms=grace_ms)

    def test_a_stopped_stream_is_waited_for_by_nobody(self, ledger, clock):
        ledger.streams.set_desired_state("flights", "stopped")
        assert self.ask(ledger).reason == "no receiver is alive to wait for"

    def test_before_the_interval_is_over(self, stream, ledger, clock):
        found = blocks_ready(ledger, "flights", batch_time_ms=T + 10_000, grace_ms=0)
        assert not found.ready
        assert found.reason == "the batch's interval ends in 10000 ms"

    def test_every_live_receiver_has_to_be_sealed(self, ledger, clock):
        job = Job(ledger, 2).run(sealed=T - 1)
        found = self.ask(ledger)
        assert (found.ready, found.reason) == (False, "waiting for flights/records/0, flights/records/1")
        ledger.receivers.heartbeat(job.leases[0], sealed_through_ms=T)
        assert self.ask(ledger).reason == "waiting for flights/records/1"
        ledger.receivers.heartbeat(job.leases[1], sealed_through_ms=T)
        assert self.ask(ledger).ready

    def test_a_paused_one_is_told(self, ledger):
        job = Job(ledger, 1).run()
        ledger.receivers.heartbeat(job.leases[0], sealed_through_ms=T - 1, paused_reason="the disk is full")
        assert self.ask(ledger).reason == "waiting for flights/records/0 (paused: the disk is full)"

    def test_the_wait_is_bounded(self, ledger, clock):
        Job(ledger, 2).run(sealed=T - 1)
        clock.advance(10_000)
        found = self.ask(ledger)
        assert (found.ready, found.complete) == (True, False)

    def test_an_allocated_batch_waits_for_nobody(self, stream, ledger, clock):
        from headrace.batch.allocation import allocate

        Job(ledger, 2).run(sealed=T - 1)
        allocate(StreamContext(stream, ledger), T)
        assert self.ask(ledger).reason == "the batch is allocated already"


class TestInputsNotReceived:
    """The batch time is T+10 s, the end of the stream's first interval; a batch waits for a minute."""

    END = T + 10_000

    @pytest.fixture
    def job(self, ledger, clock) -> Job:
        job = Job(ledger, 2).run(sealed=T)
        clock.advance(10_000)
        return self.beat(job)

    def beat(self, job: Job) -> Job:
        job.ledger.jobs.renew(job.lease)
        for lease in job.leases:
            job.ledger.receivers.heartbeat(lease, sealed_through_ms=job.ledger.now_ms())
        return job

    def note(self, job: Job, asked_ms: int, error: str | None, topics: dict | None = None) -> None:
        health = {"records": {"asked_ms": asked_ms, "error": error, "topics": topics or {}}}
        job.ledger.jobs.renew(job.lease, attributes={"inputs": health})

    def ask(self, ledger, since_ms: int = 0):
        return blocks_ready(ledger, "flights", batch_time_ms=self.END, grace_ms=10_000, waiting_since_ms=since_ms)

    def test_a_batch_of_an_input_that_was_never_asked_waits_and_fails(self, ledger, clock, job):
        self.note(job, 0, "Kafka at kafka:9092 cannot be asked: refused.")
        found = self.ask(ledger)
        assert (found.ready, found.failed, found.troubled) == (False, False, True)
        assert found.reason == (
            "nothing is known of this batch: input records is not received: Kafka at kafka:9092 cannot be asked: "
            "refused (ever since the stream began); the task fails unless that is over in 60.0 s"
        )
        for _ in range(6):
            clock.advance(10_000)
            self.beat(job)
        assert self.ask(ledger).failed
        assert not self.ask(ledger, since_ms=self.END + 1_000).failed, "a run that began late has its time, too"
        self.note(job, ledger.now_ms(), None)
        assert self.ask(ledger).ready

    def test_so_does_that_of_a_missing_topic(self, ledger, job):
        self.note(job, self.END, None, {"flihgts": {"asked_ms": 0, "error": "it does not exist at kafka:9092"}})
        assert (
            "topic flihgts of input records is not received: it does not exist at kafka:9092" in self.ask(ledger).reason
        )

    def test_one_of_which_a_part_was_received_goes_on_and_says_so(self, ledger, job):
        self.note(job, T + 1, "refused")
        found = self.ask(ledger)
        assert (found.ready, found.complete) == (True, False)
        assert "but input records is not received: refused (since 2023-11-14T22:13:20Z)" in found.reason

    def test_records_that_were_received_are_not_held_back(self, ledger, clock, job):
        self.note(job, 0, "refused")
        partition = TopicPartition("flights", TOPIC_ID, 0)
        ledger.topics.observe(job.lease, "records", "flights", TOPIC_ID, 1)
        ledger.positions.ensure_all(job.lease, "records", {partition: 0})
        ledger.positions.assign(job.lease, "records", {partition: 0})
        ranges, handle = (OffsetRange(partition, 0, 1, 1),), BlockHandle("0.wal", 0, 1)
        block = BlockInfo(job.leases[0].receiver_id, 1, 0, clock.now_ms(), handle, ranges, 1, 1)
        at_ms = ledger.blocks.add(job.leases[0], block).batch_time_ms
        clock.advance(10_000)
        self.beat(job)
        assert not self.ask(ledger).ready, "this time has none"
        found = blocks_ready(ledger, "flights", batch_time_ms=at_ms, grace_ms=0)
        assert (found.ready, found.complete) == (True, False)

    def test_without_a_receiver_a_batch_waits_unless_the_stream_is_stopped(self, ledger, clock):
        clock.advance(10_000)
        assert "the stream has no receiver job yet" in self.ask(ledger).reason
        clock.advance(60_000)
        assert self.ask(ledger).failed
        ledger.jobs.acquire("flights", holder="test", lease_ms=30_000)
        assert not self.ask(ledger).failed, "a job that starts has its own limit"
        ledger.streams.set_desired_state("flights", "stopped")
        assert self.ask(ledger).ready

    def test_a_batch_from_before_the_stream_is_empty(self, ledger):
        assert blocks_ready(ledger, "flights", batch_time_ms=T - 10_000, grace_ms=0).ready

    def test_the_sensor_fails_for_good_and_by_timestamp_is_tried_again(self, stream, ledger):
        event = {"reason": "nothing is known of this batch", "complete": True, "failed": True}
        with pytest.raises(AirflowFailException, match="Nothing is known of this batch"):
            BlocksReadySensor(task_id="await", stream=stream).found({}, event)
        timed = stream.model_copy(update={"batch_by": "timestamp"})
        with pytest.raises(InputsNotReceivedError):
            BlocksReadySensor(task_id="await", stream=timed).found({}, event)

    def test_a_sensor_that_does_not_defer_fails_as_well(self, stream, ledger, clock):
        sensor = BlocksReadySensor(task_id="await", stream=stream, deferrable=False)
        asking = context(from_ms(T))
        clock.advance(10_000)
        assert sensor.poke(asking) is False
        clock.advance(60_000)
        with pytest.raises(AirflowFailException, match="has no receiver job yet"):
            sensor.poke(asking)

    def test_the_receivers_sensor_says_what_is_not_received(self, ledger, clock, job):
        self.note(job, 0, "Kafka at kafka:9092 cannot be asked: refused.")
        found = receiving(ledger, "flights", receivers=2, max_silence_ms=60_000)
        assert not found.ok
        assert "kafka:9092" in found.reason


class ByTimestamp:
    """A stream by timestamp with two partitions, each of a receiver of its own; the batch time is T."""

    def __init__(self, ledger: Ledger, clock: ManualClock) -> None:
        self.ledger, self.clock = ledger, clock
        self.partitions = [TopicPartition("flights", TOPIC_ID, number) for number in range(2)]
        self.offsets = [0, 0]

    def run(self) -> ByTimestamp:
        self.job = Job(self.ledger, 2).run()
        self.ledger.topics.observe(self.job.lease, "records", "flights", TOPIC_ID, 2)
        self.ledger.positions.ensure_all(self.job.lease, "records", dict.fromkeys(self.partitions, 0))
        self.ledger.positions.assign(self.job.lease, "records", {tp: n for n, tp in enumerate(self.partitions)})
        return self

    def store(self, number: int, event_time_ms: int) -> None:
        lease, at = self.job.leases[number], self.offsets[number]
        block = BlockInfo(
            lease.receiver_id, lease.epoch, at, T, BlockHandle(f"{number}.wal", at, 1),
            (OffsetRange(self.partitions[number], at, at + 1, 1),), 1, 1, event_time_ms,
        )  # fmt: skip
        self.ledger.blocks.add(lease, block)
        self.offsets[number] += 1

    def drain(self, number: int) -> None:
        """Everything that Kafka has of it at this moment is stored."""
        claims = {self.partitions[number]: self.clock.now_ms()}
        self.ledger.receivers.heartbeat(self.job.leases[number], sealed_through_ms=0, drained=claims)

    def ask(self, batch_time_ms: int = T) -> tuple[bool, str]:
        found = blocks_ready(self.ledger, "flights", batch_time_ms=batch_time_ms, grace_ms=1)
        return found.ready, found.reason


class TestBlocksReadyByTimestamp:
    @pytest.fixture
    def timed(self, stream, ledger, clock) -> ByTimestamp:
        # The interval before T is the stream's first.
        register(ledger, stream.model_copy(update={"batch_by": "timestamp", "allowed_lateness": timedelta(seconds=3)}))
        return ByTimestamp(ledger, clock)

    @pytest.fixture
    def clock(self) -> ManualClock:
        return ManualClock(T - 5_000)

    def test_partitions_have_to_pass_or_to_be_drained_when_the_lateness_is_over(self, timed, clock):
        timed.run()
        assert timed.ask() == (False, "the batch's interval ends in 5000 ms")
        timed.store(0, T - 10_000)
        clock.advance(6_000)
        timed.drain(0)
        assert timed.ask() == (
            False,
            "waiting for flights-0 (drained, late records are waited for until 3.0 s after the interval), "
            "flights-1 (nothing was read of it yet)",
        )
        timed.store(1, T)
        assert "flights-1" not in timed.ask()[1]
        clock.advance(2_000)
        assert not timed.ask()[0]
        timed.drain(0)
        assert timed.ask() == (True, "every active partition has passed the batch time or is drained")

    def test_while_nothing_lives_it_waits_for_a_minute_and_where_the_stream_is_stopped_as_long_as_it_takes(
        self, timed, ledger, clock
    ):
        assert not timed.ask()[0]
        timed.run()
        timed.store(0, T - 10_000)
        clock.advance(3_600_000)
        found = blocks_ready(ledger, "flights", batch_time_ms=T, grace_ms=1, waiting_since_ms=clock.now_ms() - 59_000)
        assert (found.ready, found.failed) == (False, False)
        clock.advance(1_000)
        found = blocks_ready(ledger, "flights", batch_time_ms=T, grace_ms=1, waiting_since_ms=clock.now_ms() - 60_000)
        assert found.failed
        ledger.streams.set_desired_state("flights", "stopped")
        assert timed.ask() == (
            False,
            "waiting for flights-0 (no receiver is alive to read it), flights-1 (no receiver is alive to read it)",
        )

    def test_one_that_is_behind_says_by_how_much(self, timed, clock):
        timed.run()
        timed.store(0, T - 10_000)
        clock.advance(15_000)
        timed.ledger.receivers.heartbeat(timed.job.leases[0], sealed_through_ms=0)
        assert "flights-0 (10.0 s behind)" in timed.ask()[1]

    def test_one_whose_receiver_is_paused_says_why(self, timed, clock):
        timed.run()
        clock.advance(6_000)
        timed.store(0, T)
        job = timed.job
        timed.ledger.receivers.heartbeat(job.leases[0], sealed_through_ms=0)
        timed.ledger.receivers.heartbeat(job.leases[1], sealed_through_ms=0, paused_reason="the disk is full")
        assert timed.ask() == (False, "waiting for flights-1 (its receiver is paused: the disk is full)")

    def test_a_failed_partition_holds_nothing_up(self, timed, clock):
        timed.run()
        timed.store(0, T - 10_000)
        timed.ledger.positions.fail(timed.job.leases[1], timed.partitions[1], "damaged")
        clock.advance(8_000)
        timed.drain(0)
        assert timed.ask()[0]

    def test_a_topic_that_is_no_longer_declared_holds_nothing_up(self, timed, stream, ledger, clock):
        timed.run()
        clock.advance(5_000)
        assert not timed.ask()[0]
        other = KafkaInput(bootstrap_servers="localhost:9", topics="others", receivers=2)
        register(ledger, stream.model_copy(update={"inputs": (other,), "batch_by": "timestamp"}))
        assert timed.ask()[0]

    def test_nothing_is_ready_before_a_receiver_has_looked_at_the_topic(self, timed, clock):
        clock.advance(5_000)
        waiting = (
            "waiting for the receiver job: it has not found any partition yet: the stream is not received: the stream"
        )
        # The topic may begin with records of a time from before the stream.
        for at_ms in (T, T - 10_000):
            ready, reason = timed.ask(at_ms)
            assert not ready
            assert reason.startswith(waiting)

    def test_what_is_sealed_waits_for_nothing(self, timed, clock):
        timed.run()
        clock.advance(15_000)
        timed.ledger.allocations.seal("flights", T + 10_000)
        assert timed.ask() == (True, "a later batch is allocated, so nothing can join this one any more")

    def test_of_many_partitions_some_are_named(self, timed, clock):
        timed.run()
        more = {TopicPartition("flights", TOPIC_ID, number): 0 for number in range(2, 8)}
        timed.ledger.positions.ensure_all(timed.job.lease, "records", more)
        clock.advance(5_000)
        assert timed.ask()[1].endswith("flights-4 (no receiver is alive to read it) and 3 more")


class TestBatchByChangedUnderALiveJob:
    """Batch tasks register a changed definition at once; a receiver job goes on as it began, until the next one."""

    def by(self, ledger: Ledger, stream: Stream, batch_by: str) -> None:
        changed = {"batch_by": batch_by, "allowed_lateness": timedelta(seconds=3)}
        register(ledger, stream.model_copy(update=changed))

    def begin(self, ledger: Ledger, clock: ManualClock, batch_by: str) -> ByTimestamp:
        """A receiver job, as a tracker begins one."""
        timed = ByTimestamp(ledger, clock).run()
        ledger.jobs.renew(timed.job.lease, attributes={"batch_by": batch_by})
        return timed

    def seal(self, timed: ByTimestamp, sealed: int) -> None:
        for lease in timed.job.leases:
            timed.ledger.receivers.heartbeat(lease, sealed_through_ms=sealed)

    def test_from_arrival_to_timestamp(self, stream, ledger, clock):
        timed = self.begin(ledger, clock, "arrival")
        self.by(ledger, stream, "timestamp")
        reported = (
            "; the stream is by timestamp, but its receiver job of epoch 1 still receives by arrival: "
            "`headrace streams stop` and `headrace streams start` restart it"
        )
        self.seal(timed, T - 1)
        assert timed.ask() == (False, "waiting for flights/records/0, flights/records/1" + reported)
        self.seal(timed, T)
        assert timed.ask() == (True, "all 2 live receiver(s) have stored their blocks" + reported)

    def test_from_timestamp_to_arrival(self, stream, ledger, clock):
        self.by(ledger, stream, "timestamp")
        timed = self.begin(ledger, clock, "timestamp")
        self.by(ledger, stream, "arrival")
        self.seal(timed, T)
        reported = "the stream is by arrival, but its receiver job of epoch 1 still receives by timestamp"
        ready, reason = timed.ask()
        # It may store older records yet, which would be late in a batch that is allocated now.
        assert not ready
        assert "flights-0 (nothing was read of it yet)" in reason
        assert reported in reason
        timed.store(0, T)
        timed.store(1, T)
        ready, reason = timed.ask()
        assert ready
        assert reported in reason

    @pytest.mark.parametrize(("before", "after"), [("arrival", "timestamp"), ("timestamp", "arrival")])
    def test_the_next_job_receives_as_the_stream_says(self, stream, ledger, clock, before, after):
        self.by(ledger, stream, before)
        timed = self.begin(ledger, clock, before)
        self.by(ledger, stream, after)
        ledger.jobs.release(timed.job.lease)
        expected = {
            "arrival": (
                True,
                "no receiver is alive to wait for",
            ),
            "timestamp": (
                False,
                "waiting for flights-0 (no receiver is alive to read it), flights-1 (no receiver is alive to read it)",
            ),
        }
        ready, reason = timed.ask()
        assert (ready, reason.partition(": the stream is not received")[0]) == expected[after]
        following = self.begin(ledger, clock, after)
        self.seal(following, T)
        assert following.ask()[0] == (after == "arrival")
        assert "still receives" not in following.ask()[1]

    def test_receivers_that_are_gone_receive_by_nothing(self, stream, ledger, clock):
        """The job's own lease outlives them a little; what comes next is by timestamp."""
        timed = self.begin(ledger, clock, "arrival")
        self.by(ledger, stream, "timestamp")
        clock.advance(21_000)
        assert ledger.jobs.current("flights").alive(ledger.now_ms())
        assert not timed.ask()[0]

    def test_a_job_that_noted_nothing_receives_as_the_stream_says(self, stream, ledger, clock):
        self.by(ledger, stream, "timestamp")
        timed = ByTimestamp(ledger, clock).run()
        self.seal(timed, T)
        assert not timed.ask()[0]


class TestSensors:
    def test_what_is_there_is_found_without_deferring(self, stream, ledger):
        Job(ledger, 2).run(sealed=T)
        sensor = BlocksReadySensor(task_id="await", stream=stream)
        assert sensor.execute(context(from_ms(T - 10_000))) is None

    def test_what_is_not_there_is_waited_for_in_the_triggerer(self, stream, ledger):
        Job(ledger, 2).run(sealed=T - 1)
        sensor = BlocksReadySensor(task_id="await", stream=stream, grace=timedelta(seconds=3), timeout=60)
        with pytest.raises(TaskDeferred) as deferred:
            sensor.execute(context(from_ms(T - 10_000)))
        trigger = deferred.value.trigger
        assert isinstance(trigger, BlocksReadyTrigger)
        assert trigger.parameters == {"batch_time_ms": T, "grace_ms": 3000, "waiting_since_ms": T}
        assert deferred.value.timeout == timedelta(seconds=60)

    def test_why_a_batch_waits_is_told_once_in_a_while(self, stream, ledger, capsys):
        Job(ledger, 2).run(sealed=T - 1)
        trigger = BlocksReadyTrigger.of(stream, T)
        assert trigger.look(ledger) is None
        assert trigger.look(ledger) is None
        assert capsys.readouterr().out.count("waiting for flights/records/0, flights/records/1") == 1

    def test_the_grace_is_the_streams(self, stream):
        assert BlocksReadyTrigger.of(stream, T).parameters["grace_ms"] == 10_000

    def test_a_run_that_asks_for_what_the_stream_has_not_is_refused_before_anything_runs(self, stream, ledger):
        asking = context(from_ms(T - 10_000))
        asking["dag_run"].conf = {"outputs": ["elsewhere"]}
        with pytest.raises(AirflowFailException, match="no output 'elsewhere', but console"):
            BlocksReadySensor(task_id="await", stream=stream).execute(asking)

    def test_the_end_of_patience_is_told(self, stream, ledger, capsys):
        sensor = BlocksReadySensor(task_id="await", stream=stream)
        sensor.found({}, {"reason": "flights/records/1 did not seal", "complete": False})
        assert "did not seal" in capsys.readouterr().out

    def test_a_stream_that_receives(self, stream, ledger):
        Job(ledger, 2).run()
        sensor = KafkaReceiverSensor(task_id="receiving", stream=stream)
        assert sensor.execute(context()) is None

    def test_a_stream_with_a_failed_partition_is_waited_for_and_its_error_logged(self, stream, ledger, capsys):
        fail(ledger, Job(ledger, 2).run(), "the topic was deleted")
        sensor = KafkaReceiverSensor(task_id="receiving", stream=stream)
        with pytest.raises(TaskDeferred):
            sensor.execute(context())
        assert "flights-0 at offset 0: the topic was deleted" in capsys.readouterr().out

    def test_without_deferring_it_pokes(self, stream, ledger):
        sensor = KafkaReceiverSensor(task_id="receiving", stream=stream, deferrable=False)
        assert sensor.poke(context()) is False
        Job(ledger, 2).run()
        assert sensor.poke(context()) is True


class TestTheBeginningOfARun:
    """The stream's first receiver, then the batch that the run takes."""

    def test_a_run_of_the_schedule_waits_for_the_first_receiver_and_makes_no_empty_batches(
        self, stream, ledger, clock, capsys
    ):
        sensor = BlocksReadySensor(task_id="await", stream=stream)
        with pytest.raises(TaskDeferred) as deferred:
            sensor.execute(context(from_ms(T - 10_000)))
        trigger = deferred.value.trigger
        assert isinstance(trigger, FirstReceiverTrigger)
        assert "has no receiver job yet" in capsys.readouterr().out
        # Two intervals later it begins, and a third has to end with it: what is before that is empty.
        clock.advance(20_500)
        job = Job(ledger, 2).run()
        assert trigger.look(ledger) is None
        clock.advance(10_000)
        began = trigger.look(ledger)
        for lease in job.leases:
            ledger.receivers.heartbeat(lease, sealed_through_ms=T + 30_000)
        assert sensor.receiver_began(context(from_ms(T - 10_000)), began) is None
        assert ledger.runs.find("flights", "run") == T + 30_000

    def test_it_waits_no_longer_than_it_may_and_then_says_why(self, stream, ledger, clock):
        sensor = BlocksReadySensor(task_id="await", stream=stream)
        with pytest.raises(TaskDeferred) as deferred:
            sensor.execute(context(from_ms(T - 10_000)))
        lease = ledger.jobs.acquire("flights", holder="test", lease_ms=30_000)
        ledger.jobs.release(lease, "failed", "no such master")
        clock.advance(300_000)
        event = deferred.value.trigger.look(ledger)
        with pytest.raises(NoReceiverError, match="ended before its receivers began: no such master"):
            sensor.receiver_began(context(from_ms(T - 10_000)), event)

    @pytest.mark.parametrize("run", [{"run_type": "manual"}, {"run_type": "backfill"}])
    def test_a_run_that_somebody_asked_for_does_not(self, stream, ledger, run):
        sensor = BlocksReadySensor(task_id="await", stream=stream)
        assert sensor.execute(context(from_ms(T - 20_000), **run)) is None

    def test_a_run_whose_time_was_taken_over_skips_its_other_tasks(self, stream, ledger, clock, capsys):
        Job(ledger, 2).run(sealed=T)
        with DAG("flights_batches", schedule=None):
            sensor = BlocksReadySensor(task_id="await", stream=stream)
            sensor >> EmptyOperator(task_id="allocate") >> EmptyOperator(task_id="cleanup").as_teardown()
        ledger.allocations.seal("flights", T)
        with pytest.raises(DownstreamTasksSkipped) as skipped:
            sensor.execute(context(from_ms(T - 20_000)))
        assert set(skipped.value.tasks) == {"allocate", "cleanup"}
        assert "Nothing to run: an earlier run has taken this batch time over" in capsys.readouterr().out

    def test_where_each_time_is_a_batch_those_before_the_first_receiver_are_none(self, stream, ledger, clock):
        exact = stream.model_copy(update={"coalesce": False})
        clock.advance(500)
        Job(ledger, 2).run(sealed=T)
        clock.advance(10_000)
        sensor = BlocksReadySensor(task_id="await", stream=exact)
        with pytest.raises(DownstreamTasksSkipped):
            sensor.execute(context(from_ms(T - 10_000)))
        with pytest.raises(TaskDeferred):
            sensor.execute(context(from_ms(T)))

    def test_without_deferring_it_waits_in_its_slot(self, stream, ledger, clock, monkeypatch):
        sensor = BlocksReadySensor(task_id="await", stream=stream, deferrable=False)
        monkeypatch.setattr("headrace.triggers.base.time.sleep", lambda _: clock.advance(100_000))
        with pytest.raises(NoReceiverError):
            sensor.execute(context(from_ms(T - 10_000)))
