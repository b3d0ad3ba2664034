"""When a run does a step of a batch, by what was done before."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.ledger.states import AttemptState, BatchState
from headrace.runs.batch_run import RunIdentity, RunRequest
from headrace.runs.steps_to_run import steps_to_run

COMPLETED, FAILED, RUNNING = AttemptState.COMPLETED, AttemptState.FAILED, AttemptState.RUNNING


@dataclass
class Batch:
    """What the ledger tells of a batch with the outputs a and b."""

    attempts: list = field(default_factory=list)
    records: dict = field(default_factory=dict)

    def tried(self, *outputs, run="run", clear=0, started="monday", state=COMPLETED, **attributes) -> Batch:
        number = len(self.attempts) + 1
        reported = RunIdentity(run, clear, started).attributes
        self.attempts.append(Attempt(number, outputs, state, {**reported, **attributes}))
        for output in outputs:
            self.records.pop(output, None)
            if state is not RUNNING:
                self.records[output] = Record(output, number, state)
        return self

    @property
    def state(self) -> BatchState:
        done = [record for record in self.records.values() if record.state is COMPLETED]
        return BatchState.COMPLETED if len(done) == 2 else BatchState.RUNNING

    def left(self, *steps, clear_number=0, started="monday", **request) -> str:
        found = steps_to_run(
            steps or ("a", "b"),
            request=RunRequest(RunIdentity("run", clear_number, started), **request),
            batch=self,
            attempts=self.attempts,
            records=self.records.values(),
        )
        return " ".join(found.steps)


@dataclass
class Attempt:
    number: int
    outputs: tuple
    state: AttemptState
    attributes: dict
    started_at_ms: int = 1000


@dataclass
class Record:
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
    batch.tried("a", clear=1, state=RUNNING, repeats=True)
    # The batch is complete no more, and b's task does its part all the same.
    assert batch.left("b", clear_number=1) == "b"
    batch.attempts[-1].state = COMPLETED
    batch.records["a"] = Record("a", 3, COMPLETED)
    assert batch.left("a", clear_number=1) == ""
    assert batch.left("b", clear_number=1) == "b"
    batch.tried("b", clear=1, repeats=True)
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
    batch.tried("a", "b", repeats=True)
    assert batch.left(is_backfill=True) == ""
    assert batch.left(is_backfill=True, clear_number=1) == "a b"


def test_a_backfill_whose_runs_were_deleted_comes_again_by_the_same_ids():
    batch = Batch().tried("a", "b", run="scheduled").tried("a", "b", repeats=True)
    assert batch.left(is_backfill=True) == ""
    assert batch.left(is_backfill=True, started="tuesday") == "a b"
    batch.tried("a", "b", started="tuesday", repeats=True)
    assert batch.left(is_backfill=True, started="tuesday") == ""


def test_clearing_gives_a_run_another_start():
    batch = Batch().tried("a", "b").tried("a", "b", clear=2, started="tuesday", repeats=True)
    assert batch.left(clear_number=2, started="tuesday") == ""
    assert batch.left(clear_number=3, started="wednesday") == "a b"


def test_a_retry_does_not_repeat_what_it_completed():
    batch = Batch().tried("a", "b", run="scheduled")
    batch.tried("a", "b", state=FAILED, repeats=True)
    batch.records["a"] = Record("a", 2, COMPLETED)
    assert batch.left(reprocess=True) == "b"


def test_what_was_run_ahead_is_the_first_work_of_the_batchs_own_run():
    batch = Batch().tried("a", "b", run="later", clear=4, ahead=False)
    assert batch.left() == ""
    assert batch.left(clear_number=1) == "a b"
    assert batch.left(reprocess=True) == "a b"


def test_what_a_backfill_ran_ahead_is_the_first_work_of_its_run_for_that_batch():
    batch = Batch().tried("a", "b", run="later", ahead=True)
    assert batch.left(is_backfill=True) == ""
    assert batch.left(is_backfill=True, clear_number=1) == "a b"


def test_what_a_scheduled_run_did_ahead_is_not_the_work_of_a_backfill():
    batch = Batch().tried("a", "b", run="later", ahead=False)
    assert batch.left(is_backfill=True) == "a b"


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
