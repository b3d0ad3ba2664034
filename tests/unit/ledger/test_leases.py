"""The receiver job's lease, the receivers' leases and orders."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from headrace.blocks import ReceiverId
from headrace.ledger import DesiredState, EventKind, JobState, ReceiverState
from headrace.ledger.errors import (
    JobStoppingError,
    LeaseHeldError,
    LeaseLostError,
    LedgerError,
    ReceiverRefusedError,
    StreamChangedError,
)
from headrace.ledger.receiving.receivers import MAX_STACK_CHARACTERS
from headrace.ledger.receiving.tables import ScheduledReceiver

NOW_MS = 1_700_000_000_000


def register(ledger: Any, **changes: Any) -> Any:
    arguments = {"batch_interval_ms": 1000, "block_interval_ms": 200} | changes
    return ledger.streams.register("flights", arguments.pop("definition", "{}"), **arguments)


def test_a_stream_is_registered_once_and_revised_when_it_changes(ledger: Any) -> None:
    first = register(
        ledger, definition='{"outputs": [{"id": "a"}, {"id": "b"}], "limits": {"max_concurrent_batches": 3}}'
    )
    assert (first.revision, first.outputs, first.max_concurrent_batches) == (1, ("a", "b"), 3)
    assert (first.zero_time_ms, first.desired_state) == (NOW_MS, DesiredState.RUNNING)
    assert register(ledger, definition=first.definition) == first
    revised = register(ledger, definition='{"outputs": [{"id": "a"}]}', block_interval_ms=100)
    assert (revised.revision, revised.outputs, revised.max_concurrent_batches) == (2, ("a",), 1)
    assert [row.name for row in ledger.streams.all()] == ["flights"]


def test_the_batch_interval_is_fixed_once_there_are_blocks(world: Any) -> None:
    settings = {"definition": '{"outputs": [{"id": "index"}]}', "batch_interval_ms": 2000}
    assert register(world.ledger, **settings).revision == 2
    register(world.ledger, **settings | {"batch_interval_ms": 1000})
    world.add({0: (0, 1)})
    with pytest.raises(StreamChangedError, match="from 1000 to 2000 ms"):
        register(world.ledger, **settings)


def test_nonsense_is_not_registered(ledger: Any) -> None:
    for changes in ({"definition": "no"}, {"batch_interval_ms": 0}, {"max_concurrent_batches": 0}):
        with pytest.raises(LedgerError):
            register(ledger, **changes)


def test_what_a_person_wants_is_an_event_when_it_changes(ledger: Any) -> None:
    register(ledger)
    assert ledger.streams.set_desired_state("flights", "stopped").desired_state is DesiredState.STOPPED
    ledger.streams.set_desired_state("flights", DesiredState.STOPPED)
    assert len(ledger.events.page("flights", kinds=[EventKind.STREAM_STATE_CHANGED])) == 1


def test_a_live_job_keeps_others_out(world: Any) -> None:
    with pytest.raises(LeaseHeldError) as refused:
        world.ledger.jobs.acquire("flights", holder="second", lease_ms=1000)
    error = pickle.loads(pickle.dumps(refused.value))  # noqa: S301
    assert (error.holder, error.since_ms, error.until_ms) == ("driver", NOW_MS, NOW_MS + 10_000)
    assert "headrace streams stop" in str(error)
    assert error.remedy


def test_a_silent_job_is_taken_over_and_marked(world: Any) -> None:
    world.clock.advance(10_000)
    job = world.ledger.jobs.acquire("flights", holder="second", lease_ms=1000, versions={"python": "3.11"})
    assert job.epoch == 2
    current, before = world.ledger.jobs.page("flights")
    assert (current.holder, current.versions, current.state) == ("second", {"python": "3.11"}, JobState.STARTING)
    assert before.state is JobState.FAILED
    assert "no heartbeat for 10000 ms; second took over" in before.error
    assert [row.state for row in world.ledger.receivers.all("flights")] == [ReceiverState.LOST]
    for step in (lambda: world.ledger.jobs.renew(world.job), lambda: world.ledger.jobs.release(world.job, "stopped")):
        with pytest.raises(LeaseLostError):
            step()


def test_a_renewal_extends_the_lease_and_reports_a_stop_request(world: Any) -> None:
    jobs = world.ledger.jobs
    world.clock.advance(6000)
    status = jobs.renew(world.job, attributes={"pid": 7})
    assert (status.stop_requested, status.lease_until_ms) == (False, NOW_MS + 16_000)
    assert not jobs.update(world.job, state="running", attributes={"ui_url": "u"}).stop_requested
    asked = jobs.request_stop("flights", "maintenance")
    assert jobs.request_stop("flights", "again").stop_reason == asked.stop_reason == "maintenance"
    assert jobs.renew(world.job).stop_requested
    row = jobs.current("flights")
    assert (row.state, row.attributes) == (JobState.RUNNING, {"pid": 7, "ui_url": "u"})
    assert row.alive(NOW_MS + 15_999)
    assert not row.alive(NOW_MS + 16_000)


def test_a_job_starts_runs_stops_and_is_stopped(world: Any) -> None:
    jobs = world.ledger.jobs
    states = [jobs.current("flights").state]
    for state in (JobState.RUNNING, JobState.STOPPING):
        jobs.update(world.job, state=state)
        states.append(jobs.current("flights").state)
    jobs.release(world.job)
    states.append(jobs.current("flights").state)
    assert states == [JobState.STARTING, JobState.RUNNING, JobState.STOPPING, JobState.STOPPED]


def test_a_stop_before_the_first_job_has_no_effect(ledger: Any) -> None:
    register(ledger)
    assert ledger.jobs.request_stop("flights", "maintenance") is None
    first = ledger.jobs.acquire("flights", holder="driver", lease_ms=10_000)
    assert not ledger.jobs.renew(first).stop_requested


def test_a_released_job_is_over_and_the_next_begins_at_once(world: Any) -> None:
    jobs = world.ledger.jobs
    jobs.release(world.job, JobState.FAILED, error="boom")
    jobs.release(world.job, JobState.STOPPED)
    row = jobs.current("flights")
    assert (row.state, row.error, row.alive(NOW_MS)) == (JobState.FAILED, "boom", False)
    assert jobs.request_stop("flights", "late") is None
    assert jobs.acquire("flights", holder="next", lease_ms=1000).epoch == 2


def test_a_job_ends_by_release_only(world: Any) -> None:
    with pytest.raises(LedgerError):
        world.ledger.jobs.update(world.job, state="stopped")
    with pytest.raises(LedgerError):
        world.ledger.jobs.release(world.job, "running")


def test_a_receiver_hears_its_partitions(world: Any) -> None:
    world.add({0: (0, 10)})
    orders = world.ledger.receivers.heartbeat(world.receiver, sealed_through_ms=NOW_MS, stats={"rate": 5})
    assert {tp.partition: given.next_offset for tp, given in orders.assigned.items()} == {0: 10, 1: 0, 2: 0}
    assert (orders.revoked, orders.stop) == (frozenset(), False)
    assert (orders.now_ms, orders.lease_until_ms) == (NOW_MS, NOW_MS + 10_000)
    (row,) = world.ledger.receivers.all("flights")
    assert (row.stats, row.state, row.sealed_through_ms) == ({"rate": 5}, ReceiverState.RUNNING, NOW_MS)


def test_sealed_times_stay_sealed_and_stats_stay_until_replaced(world: Any) -> None:
    receivers = world.ledger.receivers
    receivers.heartbeat(world.receiver, sealed_through_ms=NOW_MS, stats={"rate": 5})
    receivers.heartbeat(world.receiver, sealed_through_ms=0, error="a hiccup")
    (row,) = receivers.all("flights")
    assert (row.sealed_through_ms, row.stats, row.last_error) == (NOW_MS, {"rate": 5}, "a hiccup")


def test_an_error_whose_text_cannot_be_stored_keeps_its_stack(world: Any) -> None:
    receivers, error = world.ledger.receivers, "caf\udce9.log has a line of more than 1 MiB"
    receivers.report_error(world.receiver, error, "Traceback")
    receivers.heartbeat(world.receiver, sealed_through_ms=NOW_MS, error=error)
    (row,) = receivers.all("flights")
    assert (row.last_error, row.last_error_stack) == (error.replace("\udce9", "\ufffd"), "Traceback")


def test_the_receivers_that_keep_a_batch_open(world: Any) -> None:
    receivers = world.ledger.receivers
    other = world.lease(1)
    receivers.heartbeat(world.receiver, sealed_through_ms=NOW_MS + 1000)
    receivers.heartbeat(other, sealed_through_ms=NOW_MS)
    assert [row.receiver_id.index for row in receivers.unsealed("flights", NOW_MS + 1000)] == [1]
    receivers.release(other, "stopped")
    assert receivers.unsealed("flights", NOW_MS + 1000) == []
    assert len(receivers.unsealed("flights", NOW_MS + 2000)) == 1
    world.clock.advance(10_000)
    assert receivers.unsealed("flights", NOW_MS + 2000) == []


def test_a_stop_reaches_the_receivers(world: Any) -> None:
    receivers = world.ledger.receivers
    assert not receivers.heartbeat(world.receiver, sealed_through_ms=0).stop
    world.ledger.jobs.request_stop("flights", "end")
    assert receivers.heartbeat(world.receiver, sealed_through_ms=0, state="stopping").stop


def test_no_receiver_starts_while_the_job_stops(world: Any) -> None:
    world.ledger.jobs.request_stop("flights", "maintenance")
    with pytest.raises(JobStoppingError, match="maintenance"):
        world.lease(1)


def test_no_receiver_starts_for_a_lost_job(world: Any) -> None:
    world.clock.advance(10_000)
    world.ledger.jobs.acquire("flights", holder="second", lease_ms=1000)
    with pytest.raises(LeaseLostError):
        world.lease(1)


def test_a_restarted_receiver_fences_the_one_before(world: Any) -> None:
    receivers = world.ledger.receivers
    newer = world.lease(0)
    for step in (
        lambda: receivers.heartbeat(world.receiver, sealed_through_ms=0),
        lambda: receivers.release(world.receiver, "stopped"),
    ):
        with pytest.raises(LeaseLostError):
            step()
    assert len(receivers.heartbeat(newer, sealed_through_ms=0).assigned) == 3
    (row,) = receivers.all("flights")
    assert (row.epoch, row.restarts) == (2, 1)


def test_a_receiver_ends_with_its_error(world: Any) -> None:
    receivers = world.ledger.receivers
    receivers.release(world.receiver, ReceiverState.FAILED, "boom")
    receivers.release(world.receiver, ReceiverState.FAILED, "boom")
    (row,) = receivers.all("flights")
    assert (row.state, row.last_error, row.alive(NOW_MS)) == (ReceiverState.FAILED, "boom", False)
    with pytest.raises(LeaseLostError):
        receivers.heartbeat(world.receiver, sealed_through_ms=0)
    kinds = [event.kind for event in world.ledger.events.latest("flights", limit=2)]
    assert kinds == [EventKind.RECEIVER_FAILED, EventKind.RECEIVER_STARTED]


def test_the_end_of_a_job_is_no_error_of_the_next_ones_receiver(world: Any) -> None:
    ledger = world.ledger
    ledger.jobs.release(world.job, "failed", "no executors")
    (row,) = ledger.receivers.all("flights")
    assert row.last_error == "its job (epoch 1) failed"
    job = ledger.jobs.acquire("flights", holder="next", lease_ms=10_000)
    lease = ledger.receivers.register(ledger.receivers.schedule(job, row.receiver_id), host="here", lease_ms=10_000)
    (row,) = ledger.receivers.all("flights")
    assert row.last_error is None
    # What happened in this job stays with its restarts.
    ledger.receivers.release(lease, "failed", "disk full")
    ledger.receivers.register(ledger.receivers.schedule(job, row.receiver_id), host="here", lease_ms=10_000)
    (row,) = ledger.receivers.all("flights")
    assert (row.last_error, row.restarts) == ("disk full", 1)


def test_a_scheduled_receiver_is_registered_by_one_task(world: Any) -> None:
    receivers = world.ledger.receivers
    receiver_id = ReceiverId("flights", "kafka", 1)
    scheduled = receivers.schedule(world.job, receiver_id)
    row = receivers.all("flights")[1]
    assert (row.state, row.host, row.epoch, row.alive(NOW_MS)) == (ReceiverState.SCHEDULED, None, 1, False)
    lease = receivers.register(scheduled, host="first", lease_ms=10_000)
    with pytest.raises(ReceiverRefusedError, match="has registered already, on first"):
        receivers.register(scheduled, host="second", lease_ms=10_000)
    receivers.heartbeat(lease, sealed_through_ms=0)
    row = receivers.all("flights")[1]
    assert (row.state, row.host, row.restarts) == (ReceiverState.RUNNING, "first", 0)
    (event,) = world.ledger.events.page("flights", kinds=[EventKind.RECEIVER_REFUSED])
    assert (event.payload["host"], event.payload["epoch"]) == ("second", 1)


def test_a_receiver_that_was_not_scheduled_is_refused(world: Any) -> None:
    receivers = world.ledger.receivers
    for epoch, index, why in ((1, 5, "has not scheduled it"), (7, 0, "has scheduled epoch 1 since")):
        stranger = ScheduledReceiver(ReceiverId("flights", "kafka", index), epoch, world.job)
        with pytest.raises(ReceiverRefusedError, match=why):
            receivers.register(stranger, host="here", lease_ms=10_000)
    receivers.heartbeat(world.receiver, sealed_through_ms=0)


def test_scheduling_fences_the_former_instance(world: Any) -> None:
    """It counts a restart only if that instance had registered."""
    receivers = world.ledger.receivers
    receiver_id = world.receiver.receiver_id
    never = receivers.schedule(world.job, receiver_id)
    with pytest.raises(LeaseLostError):
        receivers.heartbeat(world.receiver, sealed_through_ms=0)
    receivers.task_ended(never, "no free slot")
    receivers.register(receivers.schedule(world.job, receiver_id), host="here", lease_ms=10_000)
    (row,) = receivers.all("flights")
    assert (row.epoch, row.restarts, row.last_error) == (3, 1, "no free slot")


def test_the_end_of_a_task_ends_its_instance_and_no_later_one(world: Any) -> None:
    receivers = world.ledger.receivers
    receiver_id = world.receiver.receiver_id
    first = ScheduledReceiver(receiver_id, 1, world.job)
    receivers.runs_on(first, "3")
    receivers.task_ended(first, "its process was killed", "a stack")
    (row,) = receivers.all("flights")
    assert (row.state, row.executor_id, row.alive(NOW_MS)) == (ReceiverState.FAILED, "3", False)
    assert (row.last_error, row.last_error_at_ms, row.last_error_stack) == ("its process was killed", NOW_MS, "a stack")
    with pytest.raises(LeaseLostError):
        receivers.heartbeat(world.receiver, sealed_through_ms=0)
    later = receivers.register(receivers.schedule(world.job, receiver_id), host="here", lease_ms=10_000)
    receivers.task_ended(first, "too late")
    receivers.runs_on(first, "3")
    receivers.heartbeat(later, sealed_through_ms=0)
    (row,) = receivers.all("flights")
    assert (row.last_error, row.executor_id) == ("its process was killed", None)


def test_a_receivers_reported_error_keeps_its_stack(world: Any) -> None:
    receivers = world.ledger.receivers
    receivers.report_error(world.receiver, "boom", "x" * MAX_STACK_CHARACTERS + "line 7")
    world.clock.advance(700)
    receivers.heartbeat(world.receiver, sealed_through_ms=0, error="boom")
    (row,) = receivers.all("flights")
    assert (row.last_error, row.last_error_at_ms) == ("boom", NOW_MS + 700), "it lasts"
    assert (len(row.last_error_stack), row.last_error_stack[-6:]) == (MAX_STACK_CHARACTERS, "line 7")
    receivers.heartbeat(world.receiver, sealed_through_ms=0, error="another")
    (row,) = receivers.all("flights")
    assert (row.last_error, row.last_error_stack) == ("another", None)
    receivers.release(world.receiver, "failed", "the end", stack="its stack")
    (row,) = receivers.all("flights")
    assert (row.last_error, row.last_error_stack) == ("the end", "its stack")


def test_a_scheduled_receiver_is_lost_with_its_job(world: Any) -> None:
    receivers = world.ledger.receivers
    scheduled = receivers.schedule(world.job, world.receiver.receiver_id)
    world.ledger.jobs.release(world.job, "failed", "no executors")
    (row,) = receivers.all("flights")
    assert (row.state, row.last_error) == (ReceiverState.LOST, "its job (epoch 1) failed")
    with pytest.raises(LeaseLostError):
        receivers.register(scheduled, host="here", lease_ms=10_000)


def test_leases_pickle(world: Any) -> None:
    job, receiver = pickle.loads(pickle.dumps((world.job, world.receiver)))  # noqa: S301
    world.ledger.jobs.renew(job)
    assert receiver.receiver_id == ReceiverId("flights", "kafka", 0)
    world.ledger.receivers.heartbeat(receiver, sealed_through_ms=0)


def test_a_receiver_says_why_it_pauses(world: Any) -> None:
    receivers = world.ledger.receivers
    receivers.heartbeat(world.receiver, sealed_through_ms=NOW_MS, paused_reason="the disk is full")
    (row,) = receivers.all("flights")
    assert (row.paused_reason, row.alive(NOW_MS)) == ("the disk is full", True)
    receivers.heartbeat(world.receiver, sealed_through_ms=NOW_MS)
    assert receivers.all("flights")[0].paused_reason is None


@pytest.mark.parametrize("end", ["release", "register", "job"])
def test_what_has_ended_is_not_paused(world: Any, end: str) -> None:
    receivers = world.ledger.receivers
    receivers.heartbeat(world.receiver, sealed_through_ms=NOW_MS, paused_reason="the disk is full")
    if end == "release":
        receivers.release(world.receiver, ReceiverState.STOPPED)
    elif end == "register":
        world.lease(0)
    else:
        world.ledger.jobs.release(world.job, JobState.STOPPED)
    assert receivers.all("flights")[0].paused_reason is None


def test_a_receiver_hears_its_rate_and_its_successor_keeps_it(world: Any) -> None:
    receivers, me = world.ledger.receivers, world.receiver.receiver_id
    assert receivers.heartbeat(world.receiver, sealed_through_ms=NOW_MS).max_rate is None
    receivers.set_rate(world.job, {me: 120.5, ReceiverId("flights", "kafka", 7): 3.0})
    assert receivers.heartbeat(world.receiver, sealed_through_ms=NOW_MS).max_rate == 120.5
    assert [row.max_rate for row in receivers.all("flights")] == [120.5]
    assert receivers.heartbeat(world.lease(0), sealed_through_ms=NOW_MS).max_rate == 120.5
    receivers.set_rate(world.job, {me: None})
    assert receivers.all("flights")[0].max_rate is None


def test_only_the_present_job_sets_rates_and_only_real_ones(world: Any) -> None:
    receivers, me = world.ledger.receivers, world.receiver.receiver_id
    for rate in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(LedgerError):
            receivers.set_rate(world.job, {me: rate})
    with pytest.raises(LedgerError):
        receivers.set_rate(world.job, {ReceiverId("other", "kafka", 0): 1.0})
    world.clock.advance(10_000)
    world.ledger.jobs.acquire("flights", holder="second", lease_ms=1000)
    with pytest.raises(LeaseLostError):
        receivers.set_rate(world.job, {me: 5.0})
    assert receivers.all("flights")[0].max_rate is None
