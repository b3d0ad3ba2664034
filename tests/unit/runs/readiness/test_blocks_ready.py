from __future__ import annotations

from tests.unit.runs.readiness.conftest import Job, T

from headrace.runs.readiness import blocks_ready
from headrace.stream_context import StreamContext


class TestBlocksReady:
    def ask(self, ledger, grace_ms=10_000):
        return blocks_ready(ledger, "flights", batch_time_ms=T, grace_ms=grace_ms)

    def test_no_batch_waits_for_a_stopped_stream(self, ledger, clock):
        ledger.streams.set_desired_state("flights", "stopped")
        assert self.ask(ledger).reason == "no receiver is alive to wait for"

    def test_before_the_interval_is_over(self, stream, ledger, clock):
        readiness = blocks_ready(ledger, "flights", batch_time_ms=T + 10_000, grace_ms=0)
        assert not readiness.ready
        assert readiness.reason == "the batch's interval ends in 10000 ms"

    def test_every_live_receiver_has_to_be_sealed(self, ledger, clock):
        job = Job(ledger, 2).run(sealed=T - 1)
        readiness = self.ask(ledger)
        assert (readiness.ready, readiness.reason) == (False, "waiting for flights/records/0, flights/records/1")
        ledger.receivers.heartbeat(job.leases[0], sealed_through_ms=T)
        assert self.ask(ledger).reason == "waiting for flights/records/1"
        ledger.receivers.heartbeat(job.leases[1], sealed_through_ms=T)
        assert self.ask(ledger).ready

    def test_a_paused_receiver_is_reported(self, ledger):
        job = Job(ledger, 1).run()
        ledger.receivers.heartbeat(job.leases[0], sealed_through_ms=T - 1, paused_reason="the disk is full")
        assert self.ask(ledger).reason == "waiting for flights/records/0 (paused: the disk is full)"

    def test_the_wait_is_bounded(self, ledger, clock):
        Job(ledger, 2).run(sealed=T - 1)
        clock.advance(10_000)
        readiness = self.ask(ledger)
        assert (readiness.ready, readiness.complete) == (True, False)

    def test_an_allocated_batch_does_not_wait(self, stream, ledger, clock):
        from headrace.batch.allocation import allocate

        Job(ledger, 2).run(sealed=T - 1)
        allocate(StreamContext(stream, ledger), T)
        assert self.ask(ledger).reason == "the batch is allocated already"
