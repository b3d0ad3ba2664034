"""When a batch that its run left unfinished is tried again: what was interrupted at once, what failed after a pause."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.batch.two_batches import INTERVAL_MS, LEASE_MS, NOW_MS, TwoBatches

from headrace.batch.due_batches import NextTries, NextTry, due_batches
from headrace.clock import time_text
from headrace.errors import FAILURE, INTERRUPTED, REPAIR
from headrace.views.batches import batch_lines

KILLED = {INTERRUPTED: True}


class World(TwoBatches):
    def due(self) -> list[int]:
        found = due_batches(self.ledger, "shop", held_back=lambda _: False, has_own_run=lambda _: True)
        return [due.batch.batch_time_ms for due in found]

    def next_try(self, time_ms: int) -> NextTry | None:
        return NextTries(self.ledger, "shop").of(self.ledger.batches.get("shop", time_ms))


@pytest.fixture
def ordered(tmp_path: Path) -> World:
    return World(tmp_path, ordered=True)


@pytest.fixture
def unordered(tmp_path: Path) -> World:
    return World(tmp_path, ordered=False)


def test_what_failed_by_itself_waits_for_a_pause_that_doubles(ordered: World) -> None:
    first, _ = ordered.times
    pauses = []
    for number in range(4):
        ordered.fail(first, **({REPAIR: True} if number else {}))
        assert not ordered.due()
        at_ms = ordered.next_try(first).at_ms
        pauses.append(at_ms - ordered.clock.now_ms())
        ordered.clock.advance(pauses[-1])
        assert ordered.due() == [first]
    assert pauses == [INTERVAL_MS, 2 * INTERVAL_MS, 4 * INTERVAL_MS, 4 * INTERVAL_MS]


@pytest.mark.parametrize("world", ["ordered", "unordered"])
def test_what_was_interrupted_is_tried_again_at_once(world: str, request: pytest.FixtureRequest) -> None:
    rig: World = request.getfixturevalue(world)
    first, _ = rig.times
    rig.fail(first, **KILLED)
    assert rig.due() == [first]
    assert rig.next_try(first).text(rig.clock.now_ms()) == "now"


@pytest.mark.parametrize("world", ["ordered", "unordered"])
def test_an_attempt_that_is_silent_was_interrupted(world: str, request: pytest.FixtureRequest) -> None:
    """Its host was restarted, or its process is paused: nobody recorded an end."""
    rig: World = request.getfixturevalue(world)
    first, _ = rig.times
    rig.begin(first)
    assert (rig.due(), rig.next_try(first)) == ([], None)
    rig.clock.advance(LEASE_MS + 1)
    assert rig.due() == [first]


@pytest.mark.parametrize("world", ["ordered", "unordered"])
def test_a_batch_that_kills_its_process_each_time_backs_off(world: str, request: pytest.FixtureRequest) -> None:
    rig: World = request.getfixturevalue(world)
    first, _ = rig.times
    waited = []
    for _ in range(6):
        rig.fail(first, **KILLED, **{REPAIR: True})
        at_ms = rig.next_try(first).at_ms
        waited.append(at_ms - rig.clock.now_ms())
        rig.clock.advance(waited[-1])
    assert waited[:3] == [0, 0, 0]
    assert waited[3:5] == [2 * INTERVAL_MS, 4 * INTERVAL_MS]


def test_an_interruption_does_not_lengthen_a_failures_pause(ordered: World) -> None:
    first, _ = ordered.times
    for attributes in ({}, {**KILLED, REPAIR: True}, {**KILLED, REPAIR: True}, {REPAIR: True}):
        ordered.fail(first, **attributes)
    assert ordered.next_try(first).at_ms == ordered.clock.now_ms() + 2 * INTERVAL_MS


def test_in_any_order_a_failure_waits_for_its_output(unordered: World) -> None:
    first, second = unordered.times
    unordered.fail(first)
    assert (unordered.due(), unordered.next_try(first)) == (
        [],
        NextTry(event="output console is written for another batch"),
    )
    unordered.clock.advance(1)
    unordered.complete(second)
    assert unordered.due() == [first]


def test_a_failure_of_the_code_waits_for_a_change(unordered: World) -> None:
    first, _ = unordered.times
    attempt = unordered.begin(first, **{FAILURE: "code"})
    unordered.ledger.attempts.fail(attempt, "no such column")
    assert unordered.next_try(first) == NextTry(event="the definition or the code has changed")


def test_in_order_a_batch_waits_for_the_one_before_it(ordered: World) -> None:
    first, second = ordered.times
    ordered.fail(first)
    ordered.clock.advance(1)
    row = replace(ordered.ledger.batches.get("shop", second), started_at_ms=NOW_MS)
    assert NextTries(ordered.ledger, "shop").of(row) == NextTry(event=f"batch {time_text(first)} has completed")


def test_a_failed_attempt_does_not_wait_for_a_clock_once_ahead(ordered: World) -> None:
    first, _ = ordered.times
    ordered.clock.advance(365 * 86_400_000)
    ordered.fail(first)
    ordered.clock.set_back(365 * 86_400_000)
    assert ordered.due() == [first]


def test_a_list_of_batches_says_when_they_are_tried_again(ordered: World) -> None:
    first, second = ordered.times
    ordered.fail(first)
    lines = batch_lines(ordered.ledger, [ordered.ledger.batches.get("shop", time_ms) for time_ms in (first, second)])
    at_ms = ordered.clock.now_ms() + INTERVAL_MS
    assert [(line.next_try_ms, line.tried_again) for line in lines] == [(at_ms, f"at {time_text(at_ms)}"), (None, None)]
