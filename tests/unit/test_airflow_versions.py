"""In a version of Airflow without retry policies, a task that is not worth a retry fails at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk import DAG, BaseOperator
from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException, TaskDeferred
from airflow.serialization.serialized_objects import DagSerialization

from headrace.airflow_versions import HAS_RETRY_POLICIES, AsksItsPolicy, RetriedByPolicy
from headrace.errors import Failure, HeadraceError
from headrace.runs.retries import BatchRetryPolicy


class LostError(HeadraceError):
    failure = Failure.FINAL


class CodeError(HeadraceError):
    failure = Failure.CODE


class Raises(AsksItsPolicy, BaseOperator):
    def __init__(self, *, error: BaseException, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.error = error

    def execute(self, context: Any) -> None:
        raise self.error

    def resumed(self, context: Any, event: Any = None) -> None:
        raise self.error


class RaisesAgain(Raises):
    def execute(self, context: Any) -> None:
        super().execute(context)


def context(try_number: int = 1) -> Any:
    return {"ti": SimpleNamespace(try_number=try_number, max_tries=30, start_date=None)}


def task(error: BaseException, kind: type[Raises] = Raises) -> Raises:
    with DAG("d", schedule=None, default_args={"retry_policy": BatchRetryPolicy()}):
        return kind(task_id="t", error=error)


def run(error: BaseException, try_number: int = 1, kind: type[Raises] = Raises) -> None:
    # Not through Airflow's wrapper of execute, which warns outside of a task.
    kind.execute(task(error, kind), context(try_number))


@pytest.mark.parametrize("kind", [Raises, RaisesAgain])
def test_lost_data_fails_the_task_for_good_with_its_cause(kind: type[Raises]) -> None:
    lost = LostError("the block is gone")
    with pytest.raises(AirflowFailException, match=r"the block is gone .*a retry cannot succeed") as failed:
        run(lost, kind=kind)
    assert failed.value.__cause__ is lost


def test_a_failure_of_the_code_is_retried_once() -> None:
    with pytest.raises(CodeError):
        run(CodeError("of the user"))
    with pytest.raises(AirflowFailException):
        run(CodeError("of the user"), try_number=2)


def test_so_it_is_after_a_deferral() -> None:
    lost = task(LostError("the block is gone"))
    with pytest.raises(AirflowFailException):
        lost.resume_execution("resumed", {"event": {}}, context())


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("the broker is away"),
        AirflowSkipException("nothing to do"),
        TaskDeferred(trigger=None, method_name="resumed"),
    ],
)
def test_everything_else_is_airflows_to_handle(error: BaseException) -> None:
    with pytest.raises(type(error)):
        run(error, try_number=9)


def test_without_a_policy_nothing_is_decided() -> None:
    with pytest.raises(LostError):
        Raises.execute(Raises(task_id="alone", error=LostError("gone")), context())


def test_it_is_used_where_airflow_has_no_policies() -> None:
    assert (RetriedByPolicy is AsksItsPolicy) is not HAS_RETRY_POLICIES


def test_the_policy_is_no_new_version_of_the_dag_at_each_parse() -> None:
    first, second = (DagSerialization.serialize_dag(task(LostError("gone")).dag) for _ in range(2))
    assert first == second
    assert repr(BatchRetryPolicy(30)) == "BatchRetryPolicy(seconds=30)"
