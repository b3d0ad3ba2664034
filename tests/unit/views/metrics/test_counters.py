"""Counters only grow: over new instances of receivers, batches that are run again, and the removal of old batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.unit.views.metrics.scraping import Sample, counters, scrape, value

from headrace.blocks import BlockHandle, TopicPartition
from headrace.ledger import Ledger

NOW_MS = 1_700_000_000_000
T1, T2 = NOW_MS + 1000, NOW_MS + 2000
RUN = {"holder": "task", "way": "connect", "lease_ms": 5_000}
STATS = {"connected": True, "total_lag": 7, "lag_seconds": 1.5, "lag": {"departures": {"0": [7, None]}}}


class Watched:
    """A ledger whose counters are compared after each step."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.samples: dict[Sample, float] = {}
        self.look("at first")

    def look(self, step: str) -> dict[Sample, float]:
        before, self.samples = counters(self.samples), scrape(self._ledger)
        fell = {key for key, number in before.items() if self.samples.get(key, -1.0) < number}
        assert not fell, f"after {step}: {fell}"
        return self.samples

    def value(self, name: str, **labels: str) -> float:
        return value(self.samples, name, **labels)


@pytest.fixture
def watched(world: Any) -> Watched:
    return Watched(world.ledger)


def test_no_counter_falls_when_a_receiver_starts_again(world: Any, watched: Watched) -> None:
    totals = {"pauses": 2, "paused_seconds": 3.5, "log_write_le_0.005": 3, "log_write_sum": 0.012}
    world.add({0: (0, 10), 1: (0, 5)})
    heartbeat = world.ledger.receivers.heartbeat
    heartbeat(world.receiver, sealed_through_ms=0, stats={**STATS, "totals": totals})
    watched.look("a heartbeat")
    for instance in (2, 3):
        lease = world.lease(0)
        watched.look("a registration")
        world.add({0: (world.position(0), world.position(0) + 10)}, lease=lease)
        watched.look("a block")
        heartbeat(lease, sealed_through_ms=0, stats={**STATS, "totals": totals})
        watched.look("a heartbeat")
        assert watched.value("headrace_receiver_pauses_total") == 2 * instance
    assert watched.value("headrace_receiver_paused_seconds_total") == 10.5
    assert watched.value("headrace_log_write_seconds_count") == 9
    assert watched.value("headrace_log_write_seconds_bucket", le="0.0025") == 0
    assert watched.value("headrace_log_write_seconds_bucket", le="0.005") == 9
    assert watched.value("headrace_receiver_starts_total") == 3
    assert watched.value("headrace_received_blocks_total") == 3
    assert watched.value("headrace_received_bytes_total") == 350
    assert watched.value("headrace_received_records_total", partition="0") == 30
    assert watched.value("headrace_received_records_total", partition="1") == 5


def test_a_block_that_is_added_twice_counts_once(world: Any, watched: Watched) -> None:
    block = world.block({0: (0, 10)})
    for _ in range(2):
        world.ledger.blocks.add(world.receiver, block)
    watched.look("a block")
    assert watched.value("headrace_received_records_total", partition="0") == 10
    assert watched.value("headrace_received_blocks_total") == 1


def test_no_counter_falls_when_a_topic_is_created_again(world: Any, watched: Watched) -> None:
    world.add({0: (0, 10)})
    watched.look("a block")
    (topic,) = world.ledger.topics.observe(world.job, "kafka", [("departures", "id-2", 1)])
    ended = world.ledger.positions
    again = TopicPartition("departures", "id-2", 0, topic.incarnation)
    ended.ensure_all(world.job, "kafka", {again: 0})
    samples = watched.look("a topic that was created again")
    assert value(samples, "headrace_received_records_total", partition="0") == 10


def test_attempts_outputs_and_batches_are_counted_once_each(world: Any, watched: Watched) -> None:
    attempts = world.ledger.attempts
    world.add({0: (0, 10)})
    world.clock.advance(1500)
    world.allocate(T1)
    world.clock.advance(500)
    failed = attempts.begin("flights", T1, **RUN)
    attempts.fail(failed, "no")
    watched.look("a failure")
    assert watched.value("headrace_oldest_unfinished_batch_failed_attempts") == 1
    assert watched.value("headrace_batches_unfinished", state="failed") == 1
    world.clock.advance(1000)
    again = attempts.begin("flights", T1, **RUN)
    counts = {"rows": 10, "created": 7, "repeated": 1, "dead_lettered": 2, "requests": 1, "seconds": 0.5, "odd": 3}
    for _ in range(2):
        # The second record replaces the first: its rows are the same rows.
        attempts.record_output(again, "index", {**counts, "duration_seconds": 0.25})
    world.clock.advance(2500)
    attempts.complete(again)
    watched.look("a completion")
    assert watched.value("headrace_batch_attempts_total") == 2
    assert watched.value("headrace_batch_retries_total") == 1
    assert watched.value("headrace_batch_attempts_ended_total", result="failed") == 1
    assert watched.value("headrace_batch_attempts_ended_total", result="completed") == 1
    assert watched.value("headrace_output_writes_total", output="index") == 1
    assert watched.value("headrace_output_rows_total", result="created") == 7
    assert watched.value("headrace_output_rows_total", result="repeated") == 1
    assert watched.value("headrace_dead_letters_total") == 2
    assert watched.value("headrace_output_seconds_total") == 0.25
    assert watched.value("headrace_batches_completed_total") == 1
    assert watched.value("headrace_batch_records_total") == 10
    # Began at T1 + 2 s, ended at T1 + 4.5 s.
    assert watched.value("headrace_batch_total_delay_seconds_sum") == pytest.approx(4.5)
    assert watched.value("headrace_batch_total_delay_seconds_bucket", le="2.5") == 0
    assert watched.value("headrace_batch_total_delay_seconds_bucket", le="5.0") == 1
    assert watched.value("headrace_last_batch_total_delay_seconds") == pytest.approx(4.5)
    assert watched.value("headrace_oldest_unfinished_batch_age_seconds") == 0


def test_a_batch_that_is_run_again_adds_attempts_and_no_delay(world: Any, watched: Watched) -> None:
    world.add({0: (0, 10)})
    world.clock.advance(1500)
    world.allocate(T1)
    world.complete(T1)
    watched.look("a completion")
    delays = watched.value("headrace_batch_total_delay_seconds_sum")
    world.clock.advance(3_600_000)
    world.complete(T1, force=True)
    watched.look("another run")
    assert watched.value("headrace_batches_completed_total") == 1
    assert watched.value("headrace_batch_total_delay_seconds_sum") == delays
    assert watched.value("headrace_batch_attempts_total") == 2


def test_dead_letters_above_the_limit_are_counted(world: Any, watched: Watched) -> None:
    """They are counted with the output that fails."""
    world.clock.advance(1500)
    world.allocate(T1)
    counts = {"dead_lettered": 9, "dead_letter_limit_exceeded": "more than 5"}
    for failures in (1, 2):
        attempt = world.ledger.attempts.begin("flights", T1, **RUN)
        world.ledger.attempts.fail(attempt, "too many", counts={"index": counts})
        watched.look("a failure")
        assert watched.value("headrace_dead_letters_total", output="index") == 9 * failures
        assert watched.value("headrace_dead_letter_limit_exceeded_total", output="index") == failures
    assert watched.value("headrace_output_writes_total", output="index") == 0


def test_a_batch_from_before_the_stream_began_adds_no_delay(world: Any, watched: Watched) -> None:
    world.allocate(NOW_MS - 86_400_000, inputs=[])
    world.complete(NOW_MS - 86_400_000)
    watched.look("a batch that was built from Kafka")
    assert watched.value("headrace_batches_completed_total") == 1
    for delay in ("scheduling_delay", "processing", "total_delay"):
        assert watched.value(f"headrace_batch_{delay}_seconds_count") == 0


def test_no_counter_falls_when_batches_and_blocks_are_removed(
    build: Callable[..., Any], ledger: Ledger, clock: Any
) -> None:
    world = build()
    watched = Watched(ledger)
    for number, segment in enumerate("aabb"):
        world.add({0: (number * 10, number * 10 + 10)}, handle=BlockHandle(segment, number * 100, 100))
        clock.advance(500)
    clock.advance(1000)
    for time_ms in (T1, T2):
        world.allocate(time_ms)
        world.complete(time_ms)
    watched.look("the batches")
    far = NOW_MS * 2
    ledger.segments.closed(world.receiver, "b")
    for segment in ledger.cleanup.claim_removal("flights", ["a", "b"], far):
        ledger.cleanup.fold_blocks("flights", segment.path)
        watched.look("the blocks' removal")
    for time_ms in (T1, T2):
        ledger.batches.mark_cleaned("flights", time_ms)
    assert ledger.removal.remove_batches("flights", far) == 2
    ledger.events.prune("flights", far)
    watched.look("the batches' removal")
    assert ledger.batches.page("flights", 10) == []
    assert watched.value("headrace_batches_completed_total") == 2
    assert watched.value("headrace_received_records_total", partition="0") == 40


def test_gaps_count_their_offsets(world: Any, watched: Watched) -> None:
    world.ledger.positions.advance(world.receiver, world.partitions[0], 0, 25, gap="retention")
    watched.look("a gap")
    assert watched.value("headrace_lost_offsets_total") == 25
    assert watched.value("headrace_received_offsets_total", partition="0") == 25
    assert watched.value("headrace_received_records_total", partition="0") == 0


def test_a_batch_that_is_run_again_is_not_late_by_its_time(world: Any, watched: Watched) -> None:
    world.add({0: (0, 10)})
    world.clock.advance(1500)
    world.allocate(T1)
    world.complete(T1)
    world.clock.advance(3_600_000)
    world.ledger.attempts.begin("flights", T1, force=True, **RUN)
    watched.look("another run")
    assert watched.value("headrace_batches_unfinished", state="running") == 1
    assert watched.value("headrace_oldest_unfinished_batch_age_seconds") == 0


def test_what_listeners_did_not_get_is_counted(world: Any, watched: Watched) -> None:
    slow = {"dropped": 89, "missed": 2, "failed": 3, "error": "on_gap: ValueError: no", "slow": "on_gap takes long"}
    unmade = {"error": "ModuleNotFoundError: no module named 'shop'"}
    world.ledger.jobs.renew(world.job, attributes={"listeners": {"webhook": slow, "broken": unmade}})
    watched.look("a status of the listeners")
    assert watched.value("headrace_listener_dropped_events_total", listener="webhook") == 89
    assert watched.value("headrace_listener_missed_events_total", listener="webhook") == 2
    assert watched.value("headrace_listener_failures_total", listener="webhook") == 3
    assert watched.value("headrace_listener_slow", listener="webhook") == 1
    assert watched.value("headrace_listener_failures_total", listener="broken") == 1
    assert watched.value("headrace_listener_slow", listener="broken") == 0
