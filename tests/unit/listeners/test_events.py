"""What listeners get of a stream's life: batches, outputs, receivers, and what headrace adds to Spark's events.

The ledger that tests and demos seed has batch events that listeners can get.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.seeded_ledger import SITUATIONS, seed
from tests.unit.ledger.conftest import INTERVAL_MS, NOW_MS

from headrace.ledger import Ledger
from headrace.ledger.states import EventKind, JobState
from headrace.ledger.tables import EventRow
from headrace.listeners import BatchInfo, StreamEvent, StreamListener
from headrace.listeners.bus import METHODS, ListenerBus, overridden, translate

from .conftest import STREAM, WAIT_SECONDS, Recorder, World, gaps

T1, T2, T3 = (NOW_MS + INTERVAL_MS * number for number in (1, 2, 3))
RUN: dict[str, Any] = {"holder": "task", "way": "connect", "lease_ms": 5_000}
Listen = Callable[[Callable[[], object]], Recorder]


@pytest.fixture
def listen(start: Callable[..., ListenerBus]) -> Listen:
    """Runs something, and returns a listener that has got all of it."""

    def listen(happening: Callable[[], object]) -> Recorder:
        recorder = Recorder()
        bus = start(recorder=recorder)
        happening()
        bus.stop(WAIT_SECONDS)
        return recorder

    return listen


two_outputs = pytest.mark.parametrize("world", [{"outputs": ["index", "files"]}], indirect=True, ids=["two"])


def of(recorder: Recorder, method: str) -> list[Any]:
    return [event for called, event in recorder.calls if called == method]


def run(world: World, batch_time_ms: int) -> None:
    """Run a batch of one output: it begins 5 ms after its allocation, and takes 7 ms."""
    world.allocate(batch_time_ms)
    world.clock.advance(5)
    attempt = world.ledger.attempts.begin(STREAM, batch_time_ms, **RUN)
    world.clock.advance(7)
    world.ledger.attempts.record_output(attempt, "index", {"indexed": 10, "duration_seconds": 0.006})
    world.ledger.attempts.complete(attempt)


def receive(world: World, *numbers: int) -> None:
    for number in numbers:
        world.add({0: (10 * number, 10 * number + 10)})
        world.clock.advance(INTERVAL_MS)


def test_batches_are_reported_at_each_stage_with_their_delays(world: World, listen: Listen) -> None:
    """The stages are submitted, started and completed."""
    receive(world, 0, 1, 2)

    def happening() -> None:
        for batch_time_ms in (T1, T2, T3):
            run(world, batch_time_ms)

    recorder = listen(happening)
    story = ["on_batch_submitted", "on_batch_started", "on_output_operation_started", "on_output_operation_completed"]
    assert recorder.methods == [*story, "on_batch_completed"] * 3
    submitted = [event.batch for event in of(recorder, "on_batch_submitted")]
    started = [event.batch for event in of(recorder, "on_batch_started")]
    completed = [event.batch for event in of(recorder, "on_batch_completed")]
    assert all(event.succeeded for event in of(recorder, "on_batch_completed"))
    assert [event.failure_reason for event in of(recorder, "on_output_operation_completed")] == [None] * 3
    for batches in (submitted, started, completed):
        assert [batch.batch_time_ms for batch in batches] == [T1, T2, T3]
        assert {(batch.records, batch.blocks, batch.payload_bytes, batch.interval_ms) for batch in batches} == {
            (10, 1, 100, INTERVAL_MS)
        }
    assert all(batch.scheduling_delay_ms is batch.total_delay_ms is None for batch in submitted)
    assert all(batch.processing_time_ms is None and batch.scheduling_delay_ms is not None for batch in started)
    late = 3 * INTERVAL_MS
    for number, batch in enumerate(completed):
        assert batch.submitted_at_ms == T1 - INTERVAL_MS + late + 12 * number
        assert batch.scheduling_delay_ms == batch.submitted_at_ms + 5 - batch.batch_time_ms
        assert batch.processing_time_ms == 7
        assert batch.total_delay_ms == batch.scheduling_delay_ms + batch.processing_time_ms
        assert batch.outputs == {"index": {"indexed": 10, "duration_seconds": 0.006}}


def test_the_event_of_a_batch_has_the_times_that_it_took_over(world: World, listen: Listen) -> None:
    receive(world, 0, 1)
    recorder = listen(lambda: (world.allocate(T2, absorb=[T1], blocks_expected=2), world.complete(T2)))
    for method in ("on_batch_submitted", "on_batch_started", "on_batch_completed"):
        (event,) = of(recorder, method)
        assert (event.batch.batch_time_ms, event.batch.absorbed_ms, event.batch.records) == (T2, (T1,), 20)


@two_outputs
def test_each_output_is_reported_as_started_and_completed(world: World, listen: Listen) -> None:
    receive(world, 0)

    def happening() -> None:
        world.allocate(T1)
        for output in ("files", "index"):
            attempt = world.ledger.attempts.begin(STREAM, T1, outputs=[output], **RUN)
            world.ledger.attempts.record_output(attempt, output, {"written": 10, "duration_seconds": 0.25})
            world.ledger.attempts.complete(attempt)

    recorder = listen(happening)
    assert [event.output_id for event in of(recorder, "on_output_operation_started")] == ["files", "index"]
    done = of(recorder, "on_output_operation_completed")
    assert [(event.output_id, event.failure_reason, event.duration_ms, event.attempt) for event in done] == [
        ("files", None, 250, 1),
        ("index", None, 250, 2),
    ]
    # The second attempt continues the batch.
    assert len(of(recorder, "on_batch_started")) == len(of(recorder, "on_batch_completed")) == 1


@two_outputs
def test_a_batch_with_a_failed_output_completes_with_its_reason(world: World, listen: Listen) -> None:
    receive(world, 0)

    def happening() -> None:
        world.allocate(T1)
        attempt = world.ledger.attempts.begin(STREAM, T1, **RUN)
        world.ledger.attempts.record_output(attempt, "index", {"indexed": 10})
        world.ledger.attempts.fail(attempt, "files: the folder is full; done: index", {"files": "the folder is full"})

    recorder = listen(happening)
    (completed,) = of(recorder, "on_batch_completed")
    assert not completed.succeeded
    assert (completed.batch.failures, completed.batch.outputs) == (
        {"files": "the folder is full"},
        {"index": {"indexed": 10}},
    )
    reasons = {event.output_id: event.failure_reason for event in of(recorder, "on_output_operation_completed")}
    assert reasons == {"index": None, "files": "the folder is full"}


@two_outputs
def test_a_batch_with_several_failed_outputs_has_each_reason(world: World, listen: Listen) -> None:
    """It is completed nevertheless."""
    receive(world, 0)
    failures = {"index": "the index is read-only", "files": "the folder is full"}

    def happening() -> None:
        world.allocate(T1)
        attempt = world.ledger.attempts.begin(STREAM, T1, **RUN)
        world.ledger.attempts.fail(attempt, "both", failures)

    recorder = listen(happening)
    (completed,) = of(recorder, "on_batch_completed")
    assert completed.batch.failures == failures
    events = of(recorder, "on_output_operation_completed")
    assert {event.output_id: event.failure_reason for event in events} == failures
    rows = world.ledger.attempts.outputs(STREAM, T1)
    assert {row.output_id: row.error for row in rows} == failures


@two_outputs
def test_a_batch_is_completed_when_its_last_attempt_ends(world: World, listen: Listen) -> None:
    receive(world, 0)

    def happening() -> None:
        world.allocate(T1)
        attempts = {
            output: world.ledger.attempts.begin(STREAM, T1, outputs=[output], **RUN) for output in ("index", "files")
        }
        world.ledger.attempts.fail(attempts["index"], "read-only")
        world.ledger.attempts.record_output(attempts["files"], "files", {})
        world.ledger.attempts.complete(attempts["files"])

    recorder = listen(happening)
    assert recorder.methods[-3:] == [
        "on_output_operation_completed", "on_output_operation_completed", "on_batch_completed"
    ]  # fmt: skip
    (completed,) = of(recorder, "on_batch_completed")
    assert (completed.batch.failures, completed.batch.outputs) == ({"index": "read-only"}, {"files": {}})


def test_a_failed_batch_run_again_starts_and_completes_again(world: World, listen: Listen) -> None:
    receive(world, 0)

    def happening() -> None:
        world.allocate(T1)
        world.ledger.attempts.fail(world.ledger.attempts.begin(STREAM, T1, **RUN), "no")
        world.clock.advance(50)
        world.complete(T1)

    recorder = listen(happening)
    assert [event.batch.attempt for event in of(recorder, "on_batch_started")] == [1, 2]
    assert [event.succeeded for event in of(recorder, "on_batch_completed")] == [False, True]
    assert of(recorder, "on_batch_completed")[1].batch.failures == {}


def test_receivers_are_reported_as_they_start_fail_and_stop(world: World, listen: Listen) -> None:
    error = {"receiver": str(world.receiver.receiver_id), "error": "the broker is gone", "starts": 1}

    def happening() -> None:
        world.ledger.events.append(STREAM, EventKind.RECEIVER_ERROR, error)
        world.ledger.receivers.release(world.receiver, "failed", error="no disk")
        world.ledger.receivers.release(world.lease(index=0))
        world.ledger.events.append(STREAM, EventKind.RECEIVER_ERROR, {"input": "kafka", "error": "no topic"})

    recorder = listen(happening)
    story = ["on_receiver_error", "on_receiver_stopped", "on_receiver_started", "on_receiver_stopped"]
    assert recorder.methods == [*story, "on_receiver_error"]
    error_event, failed, started, stopped, of_input = recorder.events
    assert (error_event.receiver, error_event.error) == ("flights/kafka/0", "the broker is gone")  # type: ignore[attr-defined]
    assert (failed.epoch, failed.error) == (1, "no disk")  # type: ignore[attr-defined]
    assert (started.epoch, started.host, started.restarts) == (2, "here", 1)  # type: ignore[attr-defined]
    assert (stopped.epoch, stopped.error) == (2, None)  # type: ignore[attr-defined]
    assert (of_input.receiver, of_input.input_id) == (None, "kafka")  # type: ignore[attr-defined]


def test_receivers_lost_with_their_job_are_reported_as_stopped(world: World, listen: Listen) -> None:
    listen(lambda: None)
    world.ledger.jobs.release(world.job, JobState.FAILED, "the JVM is gone")
    events = [translate(row) for row in world.ledger.events.page(STREAM)]
    (stopped,) = [call.event for call in events if call is not None and call.method == "on_receiver_stopped"]
    assert stopped.error == "its job (epoch 1) failed"  # type: ignore[attr-defined]


def test_the_start_of_streaming_is_reported(world: World, listen: Listen) -> None:
    def happening() -> None:
        world.ledger.jobs.update(world.job, state=JobState.RUNNING)
        world.ledger.jobs.update(world.job, state=JobState.STOPPING)

    recorder = listen(happening)
    assert recorder.methods == ["on_streaming_started"]
    assert recorder.events[0].job_epoch == 1  # type: ignore[attr-defined]


def test_blocks_gaps_dead_letters_and_pauses_are_reported(world: World, listen: Listen) -> None:
    reasons = {"undecodable": 2, "mapper_parsing_exception": 1}
    who = {"receiver": "flights/kafka/0", "epoch": 1}

    def happening() -> None:
        world.add({1: (0, 10)})
        gaps(world, 0)
        world.clock.advance(INTERVAL_MS)
        world.allocate(T1)
        attempt = world.ledger.attempts.begin(STREAM, T1, **RUN)
        counts = {"dead_lettered": 3, "dead_letter_reasons": reasons}
        world.ledger.attempts.record_output(attempt, "index", counts)
        paused = {**who, "cause": "disk_low", "reason": "the disk has 1 GB left"}
        world.ledger.events.append(STREAM, EventKind.RECEIVING_PAUSED, paused)
        world.ledger.events.append(STREAM, EventKind.RECEIVING_RESUMED, {**who, "seconds": 1.5})

    recorder = listen(happening)
    (block,) = of(recorder, "on_block_added")
    assert (block.receiver, block.batch_time_ms, block.records, block.payload_bytes) == ("flights/kafka/0", T1, 10, 100)
    (gap,) = of(recorder, "on_gap")
    assert (gap.topic, gap.partition, gap.from_offset, gap.until_offset, gap.reason) == ("departures", 0, 0, 1, "lost")
    (letters,) = of(recorder, "on_dead_letters")
    assert (letters.output_id, letters.records, letters.reasons) == ("index", 3, reasons)
    assert letters.exceeded is None
    assert recorder.methods[-2:] == ["on_receiving_paused", "on_receiving_resumed"]
    assert of(recorder, "on_receiving_paused")[0].cause == "disk_low"
    assert of(recorder, "on_receiving_resumed")[0].paused_seconds == 1.5


@two_outputs
def test_dead_letters_beyond_the_limit_name_the_failing_output(world: World, listen: Listen) -> None:
    receive(world, 0)
    counts = {"dead_lettered": 9, "dead_letter_reasons": {"rejected": 9}, "dead_letter_limit_exceeded": "more than 5"}

    def happening() -> None:
        world.allocate(T1)
        attempt = world.ledger.attempts.begin(STREAM, T1, **RUN)
        world.ledger.attempts.fail(attempt, "both", {"files": "too many"}, {"files": counts})

    (letters,) = of(listen(happening), "on_dead_letters")
    assert (letters.output_id, letters.attempt, letters.records, letters.reasons, letters.exceeded) == (
        "files", 1, 9, {"rejected": 9}, "more than 5"
    )  # fmt: skip


def test_a_replay_has_no_events_for_listeners(world: World, listen: Listen) -> None:
    receive(world, 0)
    run(world, T1)
    copy = {"target": "v2", "definition": '{"outputs": [{"id": "index"}]}', "outputs": ["index"]}

    def happening() -> None:
        for _ in range(2):
            attempt = world.ledger.replays.begin(STREAM, T1, **RUN, **copy)
            world.ledger.attempts.record_output(attempt, "index", {"dead_lettered": 1})
            world.ledger.attempts.complete(attempt)
        attempt = world.ledger.replays.begin(STREAM, T1, **RUN, **copy)
        world.ledger.attempts.fail(attempt, "no", counts={"index": {"dead_lettered": 1}})

    assert listen(happening).calls == []


def test_an_event_of_another_version_is_left_out(world: World, listen: Listen) -> None:
    def happening() -> None:
        world.ledger.events.append(STREAM, EventKind.RECEIVING_PAUSED, {"why": "unknown"})
        gaps(world, 0)

    assert listen(happening).methods == ["on_gap"]
    assert translate(EventRow(1, STREAM, 2, "a_kind_of_the_future", None, {})) is None


def test_each_method_of_a_listener_for_events_gets_some() -> None:
    methods = {name for name in vars(StreamListener) if name.startswith("on_")}
    assert methods == set(METHODS)
    assert overridden(StreamListener()) == frozenset()
    assert overridden(Recorder()) == methods


def test_an_event_cannot_be_changed() -> None:
    event = StreamEvent(event_id=1, at_ms=2, stream=STREAM)
    with pytest.raises(AttributeError):
        event.event_id = 2  # type: ignore[misc]
    with pytest.raises(AttributeError):
        BatchInfo(1, 1, 1, 1, 1, 1, 1).attempt = 2  # type: ignore[misc]


def test_every_seeded_event_of_a_batch_can_be_translated(tmp_path: Path) -> None:
    with Ledger.open(f"sqlite:///{tmp_path}/ledger.db") as ledger:
        names = seed(ledger, streams=len(SITUATIONS), batches=5)
        rows = [row for name in names for row in ledger.events.page(name, limit=1000)]
    calls = [call for row in rows if row.batch_time_ms is not None and (call := translate(row)) is not None]
    assert {call.method for call in calls} >= {"on_batch_submitted", "on_batch_started", "on_batch_completed"}
