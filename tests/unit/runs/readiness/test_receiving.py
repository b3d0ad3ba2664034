from __future__ import annotations

from tests.unit.runs.readiness.conftest import Job, fail

from headrace.hooks.ledger import register
from headrace.runs.receiver_job import receiving
from headrace.stream import KafkaInput


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

    def test_a_failed_receiver_is_reported_with_its_error(self, ledger):
        job = Job(ledger, 2).run()
        ledger.receivers.release(job.leases[0], "failed", "topic is gone")
        assert "topic is gone" in self.ask(ledger).reason

    def test_a_paused_receiver_is_reported_with_the_reason(self, ledger):
        job = Job(ledger, 2).run()
        ledger.receivers.heartbeat(job.leases[1], sealed_through_ms=0, paused_reason="the log has 9 of 8 GB")
        assert self.ask(ledger).reason == "receiver flights/records/1 is paused: the log has 9 of 8 GB"
        ledger.receivers.heartbeat(job.leases[1], sealed_through_ms=0)
        assert self.ask(ledger).ok

    def test_a_failed_partition_is_reported_with_its_error(self, ledger):
        job = Job(ledger, 2).run()
        fail(ledger, job, "Kafka no longer has offset 0")
        readiness = self.ask(ledger)
        assert not readiness.ok
        assert "1 partition(s) are stopped by an error: flights-0 at offset 0: Kafka no longer has" in readiness.reason

    def test_a_failed_partition_of_an_undeclared_topic_is_ignored(self, ledger, stream):
        """The topic is no longer declared."""
        fail(ledger, Job(ledger, 2).run(), "the topic was deleted")
        other = KafkaInput(bootstrap_servers="localhost:9", topics="others", receivers=2)
        register(ledger, stream.model_copy(update={"inputs": (other,)}))
        assert self.ask(ledger).ok
