"""How a receiver job's listeners start: while users' code hangs, exits, or the ledger does not answer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from headrace.ledger.errors import LedgerUnavailableError
from headrace.listeners import job_listeners
from headrace.listeners.bus import STATUS
from headrace.listeners.job_listeners import JobListeners
from headrace.stream_context import StreamContext

from .conftest import STREAM, WAIT_SECONDS, GapRecorder, World, gaps, wait_until


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> GapRecorder:
    """The stream's only listener."""
    listener = GapRecorder()
    monkeypatch.setattr(job_listeners, "load_listeners", lambda _: ({"one": listener}, {}))
    return listener


@pytest.fixture
def started(world: World, context: StreamContext) -> Callable[..., JobListeners]:
    def start(*prepare: Callable[[], object]) -> JobListeners:
        listeners = JobListeners(context, world.job, *prepare)
        listeners.start()
        return listeners

    return start


def status(world: World) -> Any:
    job = world.ledger.jobs.current(STREAM)
    assert job is not None
    return job.attributes.get(STATUS)


def test_a_new_listener_gets_what_happens_while_it_is_made(
    world: World, started: Callable[..., JobListeners], listener: GapRecorder, gate: threading.Event
) -> None:
    gaps(world, 0)
    listeners = started(gate.wait)
    gaps(world, 1)
    gate.set()
    gaps(world, 2)
    listeners.stop(WAIT_SECONDS)
    assert listener.offsets == [1, 2]


def test_a_job_ends_without_listeners_that_are_not_made(
    world: World, started: Callable[..., JobListeners], listener: GapRecorder, gate: threading.Event
) -> None:
    listeners = started(gate.wait)
    gaps(world, 0)
    listeners.stop(0.01)
    gate.set()
    wait_until(lambda: not any(thread.name.startswith("headrace-listener") for thread in threading.enumerate()))
    assert listener.offsets == []


def test_listeners_slow_to_be_made_are_in_the_jobs_attributes(
    world: World,
    started: Callable[..., JobListeners],
    listener: GapRecorder,
    gate: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(job_listeners, "SLOW_SECONDS", 0.01)
    listeners = started(gate.wait)
    wait_until(lambda: status(world) is not None)
    assert status(world) == {"headrace.listeners": {"error": "not made after 0.01 s"}}
    gate.set()
    listeners.stop(WAIT_SECONDS)
    assert status(world) == {"one": {"dropped": 0, "missed": 0, "failed": 0}}


def test_an_exit_is_in_the_jobs_attributes(world: World, started: Callable[..., JobListeners]) -> None:
    def exits() -> None:
        raise SystemExit(3)

    started(exits).stop(WAIT_SECONDS)
    assert status(world) == {"headrace.listeners": {"error": "not started: SystemExit: 3"}}


def test_listeners_start_when_the_ledger_answers_again(
    world: World, started: Callable[..., JobListeners], listener: GapRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_cursors, failures = world.ledger.listener_cursors.open, [1, 2, 3]

    def flaky(*given: Any) -> Any:
        if failures:
            failures.pop()
            raise LedgerUnavailableError("it does not answer")
        return open_cursors(*given)

    monkeypatch.setattr(job_listeners, "RETRY_SECONDS", 0.001)
    monkeypatch.setattr(world.ledger.listener_cursors, "open", flaky)
    listeners = started()
    gaps(world, 0)
    listeners.stop(WAIT_SECONDS)
    assert listener.offsets == [0]
    assert failures == []
