"""When a run does a step of a batch, by what was done before."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.batch.run_request import RunIdentity, RunRequest
from headrace.ledger.states import AttemptState
from headrace.runs.batch_run import steps_to_run

COMPLETED, FAILED, RUNNING = AttemptState.COMPLETED, AttemptState.FAILED, AttemptState.RUNNING


@dataclass
class Batch:
    """What the ledger tells of a batch with the outputs a and b."""

    attempts: list = field(default_factory=list)
    history: list = field(default_factory=list)

    def tried(self, *outputs, run="run", clear=0, started="monday", state=COMPLETED, **attributes) -> Batch:
        number = len(self.attempts) + 1
        reported = RunIdentity(run, clear, started).attributes
        self.attempts.append(Attempt(number, {**reported, **attributes}))
        self.history += [Row(output, number, state) for output in outputs]
        return self

    def ends(self, output, state=COMPLETED) -> None:
        """The newest attempt at the output comes to that."""
        next(row for row in reversed(self.history) if row.output_id == output).state = state

    def left(self, *steps, clear_number=0, started="monday", **request) -> str:
        to_run = steps_to_run(
            steps or ("a", "b"),
            request=RunRequest(RunIdentity("run", clear_number, started), **request),
            needed=("state", "a") if "state" in steps else ("a", "b"),
            attempts=self.attempts,
            history=self.history,
        )
        return " ".join(to_run.steps)


@dataclass
class Attempt:
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


def test_a_backfill_whose_runs_were_deleted_comes_again_by_the_same_ids():
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


def test_what_a_repair_completed_is_no_work_of_the_batchs_own_run():
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
