"""What a listener hears of a stream: the ledger's events, in the order in which things happened."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headrace.clock import ManualClock
from headrace.ledger import EventKind, Ledger
from headrace.ledger.batches.tables import Attempt
from headrace.ledger.states import JobState
from headrace.ledger.tables import EventRow

from .conftest import INTERVAL_MS, NOW_MS, STREAM, World

T1, T2, T3 = (NOW_MS + INTERVAL_MS * number for number in (1, 2, 3))
OF_BATCHES = (
    EventKind.BATCH_ALLOCATED,
    EventKind.BATCH_STARTED,
    EventKind.OUTPUT_COMPLETED,
    EventKind.BATCH_COMPLETED,
    EventKind.BATCH_FAILED,
)
RUN: dict[str, Any] = {"holder": "task", "way": "connect", "lease_ms": 5_000}


def heard(world: World, *kinds: EventKind) -> list[EventRow]:
    return world.ledger.events.page(STREAM, kinds=kinds or None)


def received(world: World, times: int = 3) -> None:
    """A block of ten records for each of the first batch times."""
    for number in range(times):
        world.add({0: (10 * number, 10 * number + 10)})
        world.clock.advance(INTERVAL_MS)


def test_batches_are_reported_submitted_begun_and_completed(world: World) -> None:
    received(world)
    for time_ms in (T1, T2, T3):
        world.allocate(time_ms)
        world.clock.advance(5)
        attempt = world.ledger.attempts.begin(STREAM, time_ms, **RUN)
        world.clock.advance(7)
        world.ledger.attempts.record_output(attempt, "index", {"indexed": 10})
        world.ledger.attempts.complete(attempt)
    events = heard(world, *OF_BATCHES)
    story = [
        EventKind.BATCH_ALLOCATED, EventKind.BATCH_STARTED, EventKind.OUTPUT_COMPLETED, EventKind.BATCH_COMPLETED
    ]  # fmt: skip
    assert [(event.kind, event.batch_time_ms) for event in events] == [
        (kind, time_ms) for time_ms in (T1, T2, T3) for kind in story
    ]
    for allocated, started, _, completed in zip(*[iter(events)] * 4, strict=True):
        assert allocated.payload["records"] == completed.payload["records"] == 10
        # The scheduling delay and the processing delay.
        assert (started.at_ms - allocated.at_ms, completed.at_ms - started.at_ms) == (5, 7)
        assert completed.payload["outputs"] == {"index": {"indexed": 10}}


def test_receivers_are_reported_as_they_start_fail_and_stop(world: World) -> None:
    world.ledger.events.append(
        STREAM, EventKind.RECEIVER_ERROR, {"receiver": str(world.receiver.receiver_id), "error": "the broker is gone"}
    )
    world.ledger.receivers.release(world.receiver, "failed", error="no disk")
    world.ledger.receivers.release(world.lease(index=0))
    kinds = (
        EventKind.RECEIVER_STARTED, EventKind.RECEIVER_ERROR, EventKind.RECEIVER_FAILED, EventKind.RECEIVER_STOPPED
    )  # fmt: skip
    events = heard(world, *kinds)
    assert [event.kind for event in events] == [kinds[0], kinds[1], kinds[2], kinds[0], kinds[3]]
    assert {event.payload["receiver"] for event in events} == {"flights/kafka/0"}
    assert "the broker is gone" in str(events[1].payload)
    assert "no disk" in str(events[2].payload)


def test_each_output_is_reported_separately(build: Callable[..., World]) -> None:
    world = build(outputs=["index", "files"])
    received(world, 1)
    world.allocate(T1)
    attempt = world.ledger.attempts.begin(STREAM, T1, **RUN)
    world.ledger.attempts.record_output(attempt, "files", {"written": 10})
    assert heard(world, EventKind.BATCH_COMPLETED) == []
    world.ledger.attempts.record_output(attempt, "index", {"indexed": 9})
    world.ledger.attempts.complete(attempt)
    reported = [
        (event.payload["output"], event.payload["counts"]) for event in heard(world, EventKind.OUTPUT_COMPLETED)
    ]
    assert reported == [("files", {"written": 10}), ("index", {"indexed": 9})]
    (completed,) = heard(world, EventKind.BATCH_COMPLETED)
    assert completed.payload["outputs"] == {"index": {"indexed": 9}, "files": {"written": 10}}


def test_a_failure_is_reported_with_its_reason_and_by_its_output(build: Callable[..., World]) -> None:
    world = build(outputs=["index", "files"])
    received(world, 1)
    world.allocate(T1)
    for output in ("index", "files"):
        attempt = world.ledger.attempts.begin(STREAM, T1, outputs=[output], **RUN)
        world.ledger.attempts.fail(attempt, f"{output} is full")
    failed = heard(world, EventKind.OUTPUT_FAILED)
    assert [(event.payload["output"], event.payload["error"]) for event in failed] == [
        ("index", "index is full"),
        ("files", "files is full"),
    ]
    # Both tasks belong to one run, which has failed when both have ended.
    (event,) = heard(world, EventKind.BATCH_FAILED)
    failures = {"index": "index is full", "files": "files is full"}
    assert (event.payload["failures"], event.payload["ended_attempt"]) == (failures, 2)
    assert heard(world, EventKind.BATCH_COMPLETED, EventKind.OUTPUT_COMPLETED) == []
    assert world.ledger.batches.get(STREAM, T1).error == "files is full"


class Tasks:
    """The output tasks of one batch, and the events of its runs: "started" by the attempts that began one."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._attempts = world.ledger.attempts
        received(world, 1)
        world.allocate(T1)

    def begin(self, *outputs: str, **options: Any) -> Attempt:
        return self._attempts.begin(STREAM, T1, outputs=outputs, **RUN, **options)

    def fail(self, attempt: Attempt) -> None:
        self._attempts.fail(attempt, "no")

    def complete(self, attempt: Attempt) -> None:
        for output in attempt.outputs:
            self._attempts.record_output(attempt, output, {})
        self._attempts.complete(attempt)

    def end_run(self) -> None:
        self._attempts.end_run(STREAM, T1)

    def story(self) -> list[tuple[str, int | None]]:
        events = heard(self._world, EventKind.BATCH_STARTED, EventKind.BATCH_COMPLETED, EventKind.BATCH_FAILED)
        numbers = [event.payload.get("ended_attempt", event.payload["attempt"]) for event in events]
        pairs = zip(events, numbers, strict=True)
        return [
            (event.kind.removeprefix("batch_"), number) for event, number in pairs if not event.payload.get("continues")
        ]


@pytest.fixture
def tasks(build: Callable[..., World]) -> Tasks:
    return Tasks(build(outputs=["index", "files"]))


def test_a_failed_task_and_a_later_one_are_one_run(tasks: Tasks) -> None:
    tasks.fail(tasks.begin("index"))
    assert tasks.story() == [("started", 1)]
    tasks.complete(tasks.begin("files"))
    assert tasks.story() == [("started", 1), ("failed", 2)]
    tasks.complete(tasks.begin("index"))
    assert tasks.story()[2:] == [("started", 3), ("completed", 3)]


def test_each_run_of_two_failing_tasks_starts_and_fails_once(tasks: Tasks) -> None:
    for first in (1, 3, 5):
        tasks.fail(tasks.begin("index"))
        tasks.fail(tasks.begin("files"))
        assert tasks.story()[-2:] == [("started", first), ("failed", first + 1)]
    assert len(tasks.story()) == 6


def test_a_run_without_its_other_task_fails_when_the_next_begins(tasks: Tasks) -> None:
    """The other task never began."""
    tasks.fail(tasks.begin("index"))
    tasks.complete(tasks.begin("index"))
    assert tasks.story() == [("started", 1), ("failed", None), ("started", 2)]
    tasks.fail(tasks.begin("files"))
    assert tasks.story()[3:] == [("failed", 3)]


def test_a_run_whose_other_task_never_begins_fails_at_its_end(tasks: Tasks) -> None:
    tasks.fail(tasks.begin("index"))
    for _ in range(2):
        tasks.end_run()
        assert tasks.story() == [("started", 1), ("failed", None)]
    tasks.complete(tasks.begin("files"))
    tasks.complete(tasks.begin("index"))
    tasks.end_run()
    assert tasks.story()[2:] == [("started", 2), ("completed", 3)]


def test_a_task_retried_beside_another_belongs_to_the_same_run(tasks: Tasks) -> None:
    index, files = tasks.begin("index"), tasks.begin("files")
    tasks.fail(index)
    again = tasks.begin("index")
    tasks.complete(files)
    tasks.fail(again)
    assert tasks.story() == [("started", 1), ("failed", 3)]


def test_a_task_retried_before_the_others_end_is_in_the_same_run(tasks: Tasks) -> None:
    tasks.fail(tasks.begin("index"))
    files = tasks.begin("files")
    again = tasks.begin("index")
    tasks.complete(files)
    tasks.fail(again)
    assert tasks.story() == [("started", 1), ("failed", 3)]


def test_a_task_that_was_killed_starts_a_run_when_it_is_retried(tasks: Tasks, clock: ManualClock) -> None:
    tasks.begin("index")
    clock.advance(6_000)
    tasks.complete(tasks.begin("files"))
    assert tasks.story() == [("started", 1)]
    tasks.fail(tasks.begin("index"))
    assert tasks.story() == [("started", 1), ("started", 3), ("failed", 3)]


def test_a_completed_batch_run_again_starts_and_ends_again(tasks: Tasks) -> None:
    tasks.complete(tasks.begin("index", "files"))
    tasks.fail(tasks.begin("index", force=True))
    assert tasks.story() == [("started", 1), ("completed", 1), ("started", 2), ("failed", 2)]


def test_an_output_added_later_starts_no_run_of_a_done_batch(tasks: Tasks, ledger: Ledger) -> None:
    tasks.complete(tasks.begin("index", "files"))
    settings = {"batch_interval_ms": INTERVAL_MS, "block_interval_ms": 200}
    ledger.streams.register(STREAM, '{"changed": true}', outputs=["index", "files", "copy"], **settings)
    tasks.complete(tasks.begin("copy"))
    assert tasks.story() == [("started", 1), ("completed", 1)]


def test_a_batch_that_is_built_anew_starts_anew(build: Callable[..., World]) -> None:
    world = build()
    attempts = world.ledger.attempts
    for inputs in (None, []):
        world.allocate(NOW_MS, inputs=inputs)
        attempts.fail(attempts.begin(STREAM, NOW_MS, **RUN), "no")
    assert [event.payload["continues"] for event in heard(world, EventKind.BATCH_STARTED)] == [False, False]
    assert len(heard(world, EventKind.BATCH_FAILED)) == 2


def test_batches_that_end_in_another_order_are_reported_in_it(build: Callable[..., World]) -> None:
    world = build(max_concurrent_batches=3)
    received(world)
    for time_ms in (T3, T1, T2):
        world.allocate(time_ms)
    begun = {time_ms: world.ledger.attempts.begin(STREAM, time_ms, **RUN) for time_ms in (T2, T3, T1)}
    for time_ms in (T1, T3, T2):
        world.ledger.attempts.record_output(begun[time_ms], "index", {})
        world.ledger.attempts.complete(begun[time_ms])
    by_kind = {
        kind: [event.batch_time_ms for event in heard(world, kind)]
        for kind in (EventKind.BATCH_ALLOCATED, EventKind.BATCH_STARTED, EventKind.BATCH_COMPLETED)
    }
    assert list(by_kind.values()) == [[T3, T1, T2], [T2, T3, T1], [T1, T3, T2]]
    for time_ms in (T1, T2, T3):
        kinds = [event.kind for event in world.ledger.events.of_batch(STREAM, time_ms)]
        assert kinds[0] == EventKind.BATCH_ALLOCATED
        assert kinds[-1] == EventKind.BATCH_COMPLETED


def test_a_stopped_stream_is_silent_after_its_last_events(world: World) -> None:
    received(world, 1)
    last = heard(world)[-1].event_id
    world.ledger.jobs.release(world.job, JobState.STOPPED)
    receiver, stopped = world.ledger.events.page(STREAM, last)
    assert (receiver.kind, stopped.kind) == (EventKind.RECEIVER_FAILED, EventKind.JOB_STOPPED)
    world.ledger.jobs.release(world.job, JobState.STOPPED)
    world.clock.advance(60_000)
    assert world.ledger.events.page(STREAM, stopped.event_id) == []


def test_a_listener_may_stop_the_stream(world: World) -> None:
    for event in heard(world, EventKind.JOB_STARTED):
        world.ledger.jobs.request_stop(STREAM, f"heard of epoch {event.payload['epoch']}")
    assert world.ledger.jobs.renew(world.job).stop_reason == "heard of epoch 1"
    assert [event.kind for event in heard(world)][-1] == EventKind.JOB_STOP_REQUESTED


def test_old_events_and_those_of_cleaned_blocks_go(world: World) -> None:
    received(world)
    for time_ms in (T1, T2, T3):
        world.allocate(time_ms)
        world.complete(time_ms)
    assert len(heard(world, EventKind.BLOCK_ADDED)) == 3
    world.ledger.jobs.release(world.job)
    ledger = world.ledger
    for segment in ledger.cleanup.removable_segments(STREAM, world.clock.now_ms() + 60_000):
        ledger.cleanup.claim_removal(STREAM, [segment.path], world.clock.now_ms() + 60_000)
        ledger.cleanup.fold_blocks(STREAM, segment.path)
    assert heard(world, EventKind.BLOCK_ADDED) == []
    assert len(heard(world, EventKind.BATCH_COMPLETED)) == 3
    world.clock.advance(60_000)
    while ledger.events.prune(STREAM, world.clock.now_ms(), limit=5):
        pass
    assert heard(world) == []
