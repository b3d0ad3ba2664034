from __future__ import annotations

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
from airflow.sdk.exceptions import AirflowFailException, TaskDeferred

from headrace.blocks import ReceiverId, TopicPartition
from headrace.clock import ManualClock
from headrace.hooks import ledger as ledger_hook
from headrace.hooks.ledger import register
from headrace.hooks.readiness import blocks_ready
from headrace.hooks.receiver_job import receiving
from headrace.ledger import Ledger
from headrace.sensors.blocks_ready import BlocksReadySensor
from headrace.sensors.kafka_receiver import KafkaReceiverSensor
from headrace.stream import ConsoleOutput, KafkaInput, Stream
from headrace.testing.records import TOPIC_ID
from headrace.timetables.micro_batch import from_ms
from headrace.triggers import patience
from headrace.triggers.blocks_ready import BlocksReadyTrigger

T = 1_700_000_000_000


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
        monkeypatch.setattr(patience, "PATIENCE", 0.0)
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
    ledger.positions.ensure(job.lease, "records", partition, 0)
    ledger.positions.assign(job.lease, "records", {partition: 0})
    ledger.positions.fail(job.leases[0], partition, error)


def context(logical_date: datetime | None = None):
    run = SimpleNamespace(
        logical_date=logical_date, run_after=datetime.now(UTC), data_interval_end=None, run_id="run", conf={},
        clear_number=0, run_type="scheduled",
    )  # fmt: skip
    return {"dag_run": run}


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

    def test_without_a_live_receiver_there_is_nothing_to_wait_for(self, ledger, clock):
        assert self.ask(ledger).ready
        Job(ledger, 2).run()
        clock.advance(31_000)
        assert "nothing to wait for" in self.ask(ledger).reason

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

    def test_the_wait_is_bounded(self, ledger, clock):
        Job(ledger, 2).run(sealed=T - 1)
        clock.advance(10_000)
        found = self.ask(ledger)
        assert (found.ready, found.complete) == (True, False)

    def test_an_allocated_batch_waits_for_nobody(self, stream, ledger, clock):
        from headrace.batching.allocation import allocate
        from headrace.wal.storage import open_storage

        Job(ledger, 2).run(sealed=T - 1)
        allocate(stream, ledger, open_storage(stream.storage.url), T)
        assert self.ask(ledger).reason == "the batch is allocated already"


class TestSensors:
    def test_what_is_there_is_found_without_deferring(self, stream, ledger):
        sensor = BlocksReadySensor(task_id="await", stream=stream)
        assert sensor.execute(context(from_ms(T - 10_000))) is None

    def test_what_is_not_there_is_waited_for_in_the_triggerer(self, stream, ledger):
        Job(ledger, 2).run(sealed=T - 1)
        sensor = BlocksReadySensor(task_id="await", stream=stream, grace=timedelta(seconds=3), timeout=60)
        with pytest.raises(TaskDeferred) as deferred:
            sensor.execute(context(from_ms(T - 10_000)))
        trigger = deferred.value.trigger
        assert isinstance(trigger, BlocksReadyTrigger)
        assert trigger.parameters == {"batch_time_ms": T, "grace_ms": 3000}
        assert deferred.value.timeout == timedelta(seconds=60)

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
