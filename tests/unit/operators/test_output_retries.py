from __future__ import annotations

import pytest
from airflow.sdk.exceptions import AirflowFailException, TaskDeferred

from headrace.operators.output_retries import OutputRetries
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


def test_to_defer_is_no_error(patient, make_task):
    with pytest.raises(TaskDeferred), retries(patient, make_task, 9).honoured(lambda: ("once",)):
        raise TaskDeferred(trigger=None, method_name="m")
