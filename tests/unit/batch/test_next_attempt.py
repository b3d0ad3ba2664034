"""The next attempt: when a run does a step of a batch, by what was done before; when a host has no time for a range."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from tests.unit.batch.two_batches import LEASE_MS, TwoBatches

from headrace.batch.next_attempt import BatchProgress, NextAttempt, Wait, awaited_turn, processors_are_short
from headrace.batch.run_request import RunIdentity, RunRequest
from headrace.clock import time_text
from headrace.errors import REPAIR, TRY_NUMBER
from headrace.ledger.batches.tables import Attempt
from headrace.ledger.errors import AttemptFencedError, BatchRunningError
from headrace.ledger.states import AttemptState

COMPLETED, FAILED, RUNNING = AttemptState.COMPLETED, AttemptState.FAILED, AttemptState.RUNNING


@dataclass
class Batch:
    """What the ledger tells of a batch with the outputs a and b."""

    attempts: list = field(default_factory=list)
    history: list = field(default_factory=list)

    def tried(self, *outputs, run="run", clear=0, started="monday", state=COMPLETED, **attributes) -> Batch:
        number = len(self.attempts) + 1
        reported = RunIdentity(run, clear, started).attributes
        self.attempts.append(Made(number, {**reported, **attributes}))
        self.history += [Row(output, number, state) for output in outputs]
        return self

    def ends(self, output, state=COMPLETED) -> None:
        """The newest attempt at the output comes to that."""
        next(row for row in reversed(self.history) if row.output_id == output).state = state

    def left(self, *steps, clear_number=0, started="monday", **request) -> str:
        needed = ("state", "a") if "state" in steps else ("a", "b")
        asked = RunRequest(RunIdentity("run", clear_number, started), **request)
        left, _ = BatchProgress(needed, self.attempts, self.history).left_for(asked, steps or ("a", "b"))
        return " ".join(left)


@dataclass
class Made:
    number: int
    attributes: dict


@dataclass
class Row:
    output_id: str
    attempt: int
    state: AttemptState


def test_what_has_no_record_is_left():
    assert Batch().left() == "a b"
    assert Batch().tried("a").left() == "b"
    assert Batch().tried("a").tried("b", state=FAILED).left() == "b"


def test_a_step_that_any_run_has_done_is_done():
    assert Batch().tried("a", "b").left() == ""
    assert Batch().tried("a", "b", run="other").left() == ""
    assert Batch().tried("a", "b", run="other").left(clear_number=3) == ""


def test_a_run_that_was_cleared_does_again_what_it_completed():
    batch = Batch().tried("a").tried("b")
    assert batch.left("a", clear_number=1) == "a"
    batch.tried("a", clear=1, state=RUNNING)
    # The batch is complete no more, and b's task does its part all the same.
    assert batch.left("b", clear_number=1) == "b"
    batch.ends("a")
    assert batch.left("a", clear_number=1) == ""
    assert batch.left("b", clear_number=1) == "b"
    batch.tried("b", clear=1)
    assert batch.left(clear_number=1) == ""
    assert batch.left(clear_number=2) == "a b"


def test_of_a_batch_that_failed_a_cleared_run_does_what_is_left():
    batch = Batch().tried("a").tried("b", state=FAILED)
    assert batch.left(clear_number=1) == "b"
    assert batch.left(clear_number=1, is_backfill=True) == "b"
    assert batch.left(clear_number=1, reprocess=True) == "a b"


def test_a_backfill_does_a_completed_batch_again_once():
    batch = Batch().tried("a", "b", run="scheduled")
    assert batch.left(is_backfill=True) == "a b"
    batch.tried("a", "b")
    assert batch.left(is_backfill=True) == ""
    assert batch.left(is_backfill=True, clear_number=1) == "a b"


def test_a_backfill_may_come_again_by_the_ids_of_deleted_runs():
    batch = Batch().tried("a", "b", run="scheduled").tried("a", "b")
    assert batch.left(is_backfill=True) == ""
    assert batch.left(is_backfill=True, started="tuesday") == "a b"
    batch.tried("a", "b", started="tuesday")
    assert batch.left(is_backfill=True, started="tuesday") == ""


def test_clearing_gives_a_run_another_start():
    batch = Batch().tried("a", "b").tried("a", "b", clear=2, started="tuesday")
    assert batch.left(clear_number=2, started="tuesday") == ""
    assert batch.left(clear_number=3, started="wednesday") == "a b"


def test_a_retry_does_not_repeat_what_it_completed():
    batch = Batch().tried("a", "b", run="scheduled")
    batch.tried("a", "b", state=FAILED)
    batch.ends("a")
    assert batch.left(reprocess=True) == "b"


def test_the_batchs_own_run_leaves_what_a_repair_completed():
    batch = Batch().tried("a", state=FAILED).tried("b", state=FAILED).tried("a", "b", run="repair", repair=True)
    assert batch.left() == ""
    assert batch.left(clear_number=1) == ""
    assert batch.left(reprocess=True) == "a b"
    assert batch.left(is_backfill=True) == "a b"


def test_a_repetition_that_failed_leaves_what_is_left():
    batch = Batch().tried("a").tried("b").tried("a", clear=1).tried("b", clear=1, state=FAILED)
    assert batch.left(clear_number=1) == "b"
    assert batch.left(clear_number=2) == "b"


def test_a_run_may_ask_for_some():
    batch = Batch().tried("a", "b", run="scheduled")
    assert Batch().left(outputs=("b",)) == "b"
    assert batch.left(outputs=("b",)) == ""
    assert batch.left(outputs=("b",), reprocess=True) == "b"


def test_state_is_not_repeated_for_an_outputs_sake():
    assert Batch().left("state", "a", outputs=("a",)) == "state a"
    done = Batch().tried("state", "a", run="scheduled")
    assert done.left("state", "a", outputs=("a",), reprocess=True) == "a"
    assert done.left("state", "a", reprocess=True) == "state a"


def test_processors_are_short_also_while_a_range_is_new(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    for load, seconds, short in ((9.0, 3_600, True), (0.5, 3_600, False), (0.5, 10, True)):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        assert processors_are_short(time.monotonic() - seconds) is short


class Driver:
    """Runs batches without Airflow: all that it needs is below it."""

    def __init__(self, batches: TwoBatches, name: str = "driver", try_number: int = 0) -> None:
        self.batches, self.name = batches, name
        self.attributes = {**RunIdentity(name).attributes, TRY_NUMBER: try_number}

    def find(self, time_ms: int) -> NextAttempt | None:
        context = self.batches.context
        batch = context.ledger.batches.get(context.name, time_ms)
        found = NextAttempt.of_run(context, batch, RunRequest(RunIdentity(self.name)), context.stream.steps)
        return found and replace(found, attributes=self.attributes)

    def begin(self, time_ms: int) -> Attempt | Wait | None:
        found = self.find(time_ms)
        return found and (found.awaited() or found.begin(holder=self.name, way="connect", lease_ms=LEASE_MS))

    def end(self, attempt: Attempt) -> None:
        attempts = self.batches.ledger.attempts
        attempts.record_output(attempt, "console", {})
        attempts.complete(attempt)


@pytest.fixture(params=[True, False], ids=["ordered", "unordered"])
def batches(request: pytest.FixtureRequest, tmp_path: Path) -> TwoBatches:
    return TwoBatches(tmp_path, ordered=request.param)


def test_a_driver_without_airflow_runs_batch_after_batch(batches: TwoBatches) -> None:
    driver = Driver(batches)
    for time_ms in batches.times:
        attempt = driver.begin(time_ms)
        assert isinstance(attempt, Attempt)
        driver.end(attempt)
        assert driver.begin(time_ms) is None, "nothing is left"


def test_an_attempt_waits_for_its_turn_or_for_a_slot(batches: TwoBatches) -> None:
    first, second = batches.times
    driver = Driver(batches)
    attempt = driver.begin(first)
    awaited = driver.begin(second)
    assert isinstance(awaited, Wait)
    assert awaited.is_for_slot is not batches.context.stream.is_ordered
    assert (awaited.waiting_for, awaited.soon) == (f"batches {(first,)}", False)
    driver.end(attempt)
    assert isinstance(driver.begin(second), Attempt)


def test_a_repair_is_waited_for_in_place_and_waits_in_place(batches: TwoBatches) -> None:
    """It takes seconds, as long as a deferral."""
    first, second = batches.times
    attempt = batches.begin(first, **{REPAIR: True})
    awaited = Driver(batches).begin(second)
    assert isinstance(awaited, Wait) and awaited.soon
    batches.ledger.attempts.fail(attempt, "no")
    assert isinstance(Driver(batches).begin(first), Attempt)
    repair = Driver(batches, "repair")
    repair.attributes = {REPAIR: True}
    awaited = repair.begin(second)
    assert isinstance(awaited, Wait) and awaited.soon


def test_a_batch_that_another_run_holds_is_waited_for(batches: TwoBatches) -> None:
    first, _ = batches.times
    attempt = Driver(batches, "another run").begin(first)
    awaited = Driver(batches).begin(first)
    assert isinstance(awaited, Wait)
    assert "is being run by another run, attempt 1" in awaited.reason
    assert not awaited.is_for_slot
    batches.clock.advance(LEASE_MS + 1)
    assert isinstance(attempt, Attempt)
    assert isinstance(Driver(batches).begin(first), Attempt), "the other one is silent"


def test_an_attempt_that_just_came_first_is_waited_for(batches: TwoBatches) -> None:
    first, _ = batches.times
    one, other = Driver(batches, "one").find(first), Driver(batches, "other").find(first)
    assert (one.awaited(), other.awaited()) == (None, None)
    begun = {"way": "connect", "lease_ms": LEASE_MS}
    assert isinstance(one.begin(holder="one", **begun), Attempt)
    awaited = other.begin(holder="other", **begun)
    assert isinstance(awaited.otherwise, BatchRunningError)
    assert not awaited.is_for_slot


def test_a_later_try_fences_the_earlier_one_of_its_run(batches: TwoBatches) -> None:
    first, _ = batches.times
    earlier, later = (Driver(batches, try_number=number) for number in (1, 2))
    assert isinstance(earlier.begin(first), Attempt)
    assert isinstance(later.begin(first), Attempt)
    states = [row.state for row in batches.ledger.attempts.of_batch("shop", first)]
    assert states == [AttemptState.FENCED, AttemptState.RUNNING]
    with pytest.raises(AttemptFencedError, match="later try"):
        earlier.begin(first)


def test_a_turn_is_awaited_before_a_batch_is_allocated_too(batches: TwoBatches) -> None:
    first, second = batches.times
    awaited = awaited_turn(batches.ledger, "shop", second, unclaimed=True)
    assert awaited.reason == f"batch {time_text(first)} comes first, and is allocated"
    batches.complete(first)
    assert awaited_turn(batches.ledger, "shop", second, unclaimed=True) is None
