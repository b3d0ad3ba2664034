from __future__ import annotations

import pytest
from airflow.sdk.exceptions import AirflowFailException, TaskDeferred

from headrace.failure import Failure
from headrace.operators.output_retries import CODE_RETRIES, OutputRetries
from headrace.operators.spark_attempt import BatchFailedError
from headrace.stream import ConsoleOutput


@pytest.fixture
def patient(stream):
    """The stream's own output says nothing of retries, `once` has none, `twice` has one."""
    outputs = (*stream.outputs, ConsoleOutput(id="once", retries=0), ConsoleOutput(id="twice", retries=1))
    return stream.model_copy(update={"outputs": outputs})


def retries(patient, make_task, try_number, *, default=None, max_tries=4) -> OutputRetries:
    task = make_task(try_number=try_number)
    task.max_tries = max_tries
    return OutputRetries(patient, task.context, default)


def test_each_output_is_tried_as_often_as_it_says(patient, make_task):
    ids = ("elasticsearch", "once", "twice")
    assert retries(patient, make_task, 1).still_tried(ids) == ids
    assert retries(patient, make_task, 2).still_tried(ids) == ("elasticsearch", "twice")
    assert retries(patient, make_task, 3).still_tried(ids) == ("elasticsearch",)
    assert retries(patient, make_task, 2, default=0).still_tried(ids) == ("twice",)


def test_clearing_gives_the_tries_anew(patient, make_task):
    # Airflow counts on: a task of four retries that was cleared after its second try may reach its seventh.
    assert retries(patient, make_task, 3, max_tries=6).still_tried(("once",)) == ("once",)


def test_a_try_that_a_dead_scheduler_lost_is_none_of_the_retries(patient, make_task):
    assert make_task().task.retries == 4
    last = retries(patient, make_task, 6, default=4)
    assert last.still_tried(("elasticsearch", "twice")) == ("elasticsearch",)
    with pytest.raises(AirflowFailException, match="used up"), last.honoured(lambda: ("elasticsearch",)):
        raise ValueError("the index is full")


def test_none_left_to_try_is_final(patient, make_task):
    with pytest.raises(AirflowFailException, match="once failed"):
        retries(patient, make_task, 2).still_tried(("once",))


def test_an_error_is_final_when_nothing_left_may_be_tried_again(patient, make_task):
    with (
        pytest.raises(AirflowFailException, match="the index is full"),
        retries(patient, make_task, 1).honoured(lambda: ("once",)),
    ):
        raise ValueError("the index is full")
    with pytest.raises(ValueError, match="full"), retries(patient, make_task, 1).honoured(lambda: ("once", "twice")):
        raise ValueError("the index is full")


def test_an_error_with_nothing_left_to_do_is_tried_again(patient, make_task):
    with pytest.raises(ValueError, match="died"), retries(patient, make_task, 1, default=0).honoured(lambda: ()):
        raise ValueError("died after its last record")


def failed(failure) -> BatchFailedError:
    error = BatchFailedError("it failed")
    error.failure = failure
    return error


@pytest.mark.parametrize(
    ("failure", "step", "code_failures", "again"),
    [
        (Failure.PASSING, "elasticsearch", 99, True),
        (Failure.PASSING, "once", 0, False),
        (Failure.CODE, "elasticsearch", CODE_RETRIES, True),
        (Failure.CODE, "elasticsearch", CODE_RETRIES + 1, False),
        # An output that says how often it is tried is tried so often.
        (Failure.CODE, "twice", CODE_RETRIES + 1, True),
        (Failure.FINAL, "elasticsearch", 0, False),
        (Failure.FINAL, "twice", 0, False),
    ],
)
def test_whose_fault_it_was_decides_about_the_next_try(  # noqa: PLR0917 - fixtures and parameters
    patient, make_task, failure, step, code_failures, again
):
    made = OutputRetries(patient, make_task().context, code_failures=lambda _: code_failures)
    with pytest.raises(BatchFailedError if again else AirflowFailException), made.honoured(lambda: (step,)):
        raise failed(failure)


def test_to_defer_is_no_error(patient, make_task):
    with pytest.raises(TaskDeferred), retries(patient, make_task, 9).honoured(lambda: ("once",)):
        raise TaskDeferred(trigger=None, method_name="m")
