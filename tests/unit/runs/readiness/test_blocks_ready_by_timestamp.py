from __future__ import annotations

from datetime import timedelta

import pytest
from tests.support.records import TOPIC_ID
from tests.unit.runs.readiness.conftest import ByTimestamp, T

from headrace.blocks import TopicPartition
from headrace.clock import ManualClock
from headrace.hooks.ledger import register
from headrace.ledger import Ledger
from headrace.runs.readiness import blocks_ready
from headrace.stream import KafkaInput, Stream


class TestBlocksReadyByTimestamp:
    @pytest.fixture
    def timed(self, stream, ledger, clock) -> ByTimestamp:
        # The interval before T is the stream's first.
        register(ledger, stream.model_copy(update={"batch_by": "timestamp", "allowed_lateness": timedelta(seconds=3)}))
        return ByTimestamp(ledger, clock)

    @pytest.fixture
    def clock(self) -> ManualClock:
        return ManualClock(T - 5_000)

    def test_partitions_have_to_pass_or_be_drained_after_lateness(self, timed, clock):
        timed.run()
        assert timed.ask() == (False, "the batch's interval ends in 5000 ms")
        timed.store(0, T - 10_000)
        clock.advance(6_000)
        timed.drain(0)
        assert timed.ask() == (
            False,
            "waiting for flights-0 (read to its end; late records are accepted until 3.0 s after the interval), "
            "flights-1 (nothing was read from it yet)",
        )
        timed.store(1, T)
        assert "flights-1" not in timed.ask()[1]
        clock.advance(2_000)
        assert not timed.ask()[0]
        timed.drain(0)
        assert timed.ask() == (True, "every active partition has passed the batch time or was read to its end")

    def test_it_waits_for_a_minute_while_nothing_lives(self, timed, ledger, clock):
        """A stopped stream's batch waits as long as it takes."""
        assert not timed.ask()[0]
        timed.run()
        timed.store(0, T - 10_000)
        clock.advance(3_600_000)
        readiness = blocks_ready(
            ledger, "flights", batch_time_ms=T, grace_ms=1, waiting_since_ms=clock.now_ms() - 59_000
        )
        assert (readiness.ready, readiness.failed) == (False, False)
        clock.advance(1_000)
        readiness = blocks_ready(
            ledger, "flights", batch_time_ms=T, grace_ms=1, waiting_since_ms=clock.now_ms() - 60_000
        )
        assert readiness.failed
        ledger.streams.set_desired_state("flights", "stopped")
        assert timed.ask() == (
            False,
            "waiting for flights-0 (no receiver is alive to read it), flights-1 (no receiver is alive to read it)",
        )

    def test_a_partition_that_is_behind_is_reported_with_its_delay(self, timed, clock):
        timed.run()
        timed.store(0, T - 10_000)
        clock.advance(15_000)
        timed.ledger.receivers.heartbeat(timed.job.leases[0], sealed_through_ms=0)
        assert "flights-0 (10.0 s behind)" in timed.ask()[1]

    def test_a_partition_of_a_paused_receiver_is_reported_with_why(self, timed, clock):
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

    def test_nothing_is_ready_before_a_receiver_has_seen_the_topic(self, timed, clock):
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
        assert "flights-0 (nothing was read from it yet)" in reason
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
