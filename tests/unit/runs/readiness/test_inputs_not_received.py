from __future__ import annotations

import pytest
from tests.support.records import TOPIC_ID
from tests.unit.runs.readiness.conftest import Job, T

from headrace.blocks import BlockHandle, BlockInfo, OffsetRange, TopicPartition
from headrace.runs.readiness import blocks_ready
from headrace.runs.receiver_job import receiving


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

    def test_a_batch_of_an_input_never_asked_waits_and_fails(self, ledger, clock, job):
        self.note(job, 0, "Kafka at kafka:9092 cannot be asked: refused.")
        readiness = self.ask(ledger)
        assert (readiness.ready, readiness.failed, readiness.inputs_missing) == (False, False, True)
        assert readiness.reason == (
            "the batch's records are not known: input records is not received: Kafka at kafka:9092 cannot be asked: "
            "refused (not since the stream began); the task fails if this lasts another 60.0 s"
        )
        for _ in range(6):
            clock.advance(10_000)
            self.beat(job)
        assert self.ask(ledger).failed
        assert not self.ask(ledger, since_ms=self.END + 1_000).failed, "a run that began late has its time, too"
        self.note(job, ledger.now_ms(), None)
        assert self.ask(ledger).ready

    def test_a_batch_of_a_missing_topic_waits_and_fails(self, ledger, job):
        self.note(job, self.END, None, {"flihgts": {"asked_ms": 0, "error": "it does not exist at kafka:9092"}})
        assert (
            "topic flihgts of input records is not received: it does not exist at kafka:9092" in self.ask(ledger).reason
        )

    def test_a_batch_received_in_part_goes_on_and_reports_it(self, ledger, job):
        self.note(job, T + 1, "refused")
        readiness = self.ask(ledger)
        assert (readiness.ready, readiness.complete) == (True, False)
        assert "but input records is not received: refused (since 2023-11-14T22:13:20Z)" in readiness.reason

    def test_records_that_were_received_are_not_held_back(self, ledger, clock, job):
        self.note(job, 0, "refused")
        partition = TopicPartition("flights", TOPIC_ID, 0)
        ledger.topics.observe(job.lease, "records", [("flights", TOPIC_ID, 1)])
        ledger.positions.ensure_all(job.lease, "records", {partition: 0})
        ledger.positions.assign(job.lease, "records", {partition: 0})
        ranges, handle = (OffsetRange(partition, 0, 1, 1),), BlockHandle("0.wal", 0, 1)
        block = BlockInfo(job.leases[0].receiver_id, 1, 0, clock.now_ms(), handle, ranges, 1, 1)
        at_ms = ledger.blocks.add(job.leases[0], block).batch_time_ms
        clock.advance(10_000)
        self.beat(job)
        assert not self.ask(ledger).ready, "this time has none"
        readiness = blocks_ready(ledger, "flights", batch_time_ms=at_ms, grace_ms=0)
        assert (readiness.ready, readiness.complete) == (True, False)

    def test_a_batch_without_a_receiver_waits_unless_stopped(self, ledger, clock):
        """It does not wait if the stream is stopped."""
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

    def test_the_receivers_sensor_says_what_is_not_received(self, ledger, clock, job):
        self.note(job, 0, "Kafka at kafka:9092 cannot be asked: refused.")
        report = receiving(ledger, "flights", receivers=2, max_silence_ms=60_000)
        assert not report.ok
        assert "kafka:9092" in report.reason
