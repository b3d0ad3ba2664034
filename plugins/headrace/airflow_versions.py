"""What differs between the versions of Airflow that headrace runs in, 3.2.1 and later.

In Airflow 3.2

- there are no retry policies: `RetriedByPolicy` has their effect;
- the object `stats` sends metrics, not the module of that name;
- ``SparkSubmitOperator`` of the Spark provider before 6.2 has no ``durable`` (operators/wal_spark_submit.py);
- a trigger has no ``asset_state_store``: a new triggerer may send an event again for records that wait, and its run
  finds nothing to do (triggers/records_received.py).

headrace uses these interfaces, which Airflow does not declare as public. For each: where, what for, and what replaces
it if Airflow changes it.

- ``SparkSubmitHook._resolve_connection``, ``_build_spark_submit_command``, ``_connection``, ``_conf``, ``_env``,
  ``_env_vars``, ``_yarn_queue``, ``_deploy_mode``, ``_principal``, ``_keytab`` (Spark provider;
  hooks/spark_submit.py): the command without secrets on it, and a master without an Airflow connection. Replacement:
  spark-submit's command made by headrace, of the stream's settings and the connection's fields.
- ``SparkSubmitOperator._get_hook``, ``_hook`` (Spark provider; operators/wal_spark_submit.py): an attempt's own hook,
  and its end. Replacement: `StreamSparkSubmitHook` called without the provider's ``execute``.
- ``airflow.api_fastapi.core_api.security.get_user``, ``bearer_scheme`` and ``airflow.api_fastapi.app.get_auth_manager``
  (ui/api/airflow_server.py): who asks, and what the user may do. Replacement: Airflow's own API within the process
  (``/auth/…``), as for triggering and clearing runs.
- ``airflow.models`` (``DagModel``, ``DagTag``, ``DagRun``, ``ParseImportError``, ``SerializedDagModel``,
  ``Connection``) and ``airflow.utils.session.create_session`` (ui/api/airflow_server.py, cli/airflow_commands.py): the
  declared streams, the states of their DAGs, connections by id. Replacement: the same from Airflow's REST API, with one
  request for each DAG; for connections ``airflow connections get``.
- ``airflow.configuration.AIRFLOW_HOME`` (dags/declaration.py): the folder below which a DAG file is named.
  Replacement: ``conf.get("core", "dags_folder")``.
- ``airflow.sdk.execution_time.task_runner.SUPERVISOR_COMMS`` and the prefix of the modules of DAG files
  (dags/declaration.py): whether the DAG processor parses, and which file. Replacement: none; two files that declare one
  stream are then found when the second one is served.
- ``airflow.sdk.execution_time.task_runner.RuntimeTaskInstance.get_task_states`` (triggers/ledger.py): whether a
  cancelled trigger's task is still deferred, as the standard provider's triggers ask it. Replacement: none; a receiver
  job is then stopped and started again when another triggerer takes its trigger over.
- ``airflow.cli.cli_config`` (cli/airflow_commands.py): the classes of a provider's commands. Replacement: the command
  ``headrace`` with the connections in environment variables.
- ``airflow.sdk.observability.stats`` (operators/wal_spark_submit.py): the numbers of attempts in Airflow's metrics.
  Replacement: ``/headrace/metrics``, which has them from the ledger.
- ``BaseOperator.resume_execution`` (`RetriedByPolicy`, in Airflow 3.2 only): a failure after a deferral. Replacement:
  none is needed once 3.2 is no longer supported.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import wraps
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from airflow.sdk.exceptions import (
    AirflowFailException,
    AirflowRescheduleException,
    AirflowSensorTimeout,
    AirflowSkipException,
    AirflowTaskTimeout,
    DagRunTriggerException,
    DownstreamTasksSkipped,
)
from airflow.sdk.observability import stats as _stats

if TYPE_CHECKING:
    from airflow.sdk import Context

__all__ = [
    "HAS_RETRY_POLICIES",
    "AsksItsPolicy",
    "RetriedByPolicy",
    "RetryAction",
    "RetryDecision",
    "RetryPolicy",
    "policy_of",
    "stats",
]

HAS_RETRY_POLICIES = find_spec("airflow.sdk.definitions.retry_policy") is not None
"""Whether Airflow itself asks a task's retry policy: since 3.3."""

stats: Any = _stats if hasattr(_stats, "incr") else _stats.Stats
"""Sends metrics, by ``incr`` and ``timing``."""

# What Airflow handles otherwise than as a failure, or never retries.
_NOT_FAILURES = (
    AirflowFailException,
    AirflowRescheduleException,
    AirflowSensorTimeout,
    AirflowSkipException,
    DagRunTriggerException,
    DownstreamTasksSkipped,
)

if TYPE_CHECKING or HAS_RETRY_POLICIES:
    from airflow.sdk import RetryAction, RetryDecision, RetryPolicy
else:

    class RetryAction(Enum):
        """As in Airflow 3.3."""

        RETRY = "retry"
        FAIL = "fail"
        DEFAULT = "default"

    @dataclass(frozen=True)
    class RetryDecision:
        """As in Airflow 3.3, without a delay of its own."""

        action: RetryAction = RetryAction.DEFAULT
        reason: str | None = None

        @classmethod
        def fail(cls, reason: str | None = None) -> RetryDecision:
            """Do not retry."""
            return cls(RetryAction.FAIL, reason)

        @classmethod
        def default(cls) -> RetryDecision:
            """Retry as the task says."""
            return cls()

    class RetryPolicy:
        """As in Airflow 3.3."""


def policy_of(task: Any) -> RetryPolicy | None:
    """The retry policy of a task, or of its DAG's ``default_args``: an operator of Airflow 3.2 does not take it."""
    policy: RetryPolicy | None = getattr(task, "retry_policy", None)
    if policy is None and task.has_dag():
        policy = task.dag.default_args.get("retry_policy")
    return policy


class AsksItsPolicy:
    """Applies a retry policy where Airflow has none. Mixed into operators.

    Airflow 3.2 retries after any failure but an AirflowFailException. So a task whose policy decides to fail raises
    that, with the failure as its cause.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "execute" in cls.__dict__:
            cls.execute = _without_a_futile_retry(cls.__dict__["execute"])  # type: ignore[attr-defined]

    def resume_execution(self, next_method: str, next_kwargs: dict[str, Any] | None, context: Context) -> Any:
        """Called by Airflow after a deferral."""
        return _without_a_futile_retry(_resume)(self, context, next_method, next_kwargs)


if TYPE_CHECKING or HAS_RETRY_POLICIES:

    class RetriedByPolicy:
        """Mixed into operators that have a retry policy."""
else:
    RetriedByPolicy = AsksItsPolicy


def _resume(task: Any, context: Context, next_method: str, next_kwargs: dict[str, Any] | None) -> Any:
    return super(AsksItsPolicy, task).resume_execution(next_method, next_kwargs, context)


def _without_a_futile_retry(execute: Any) -> Any:
    """``execute``, a function of a task, a context and more, which raises AirflowFailException if the task's policy
    decides to fail."""

    @wraps(execute)
    def decided(task: Any, context: Context, *args: Any, **kwargs: Any) -> Any:
        try:
            return execute(task, context, *args, **kwargs)
        except _NOT_FAILURES:
            raise
        except (Exception, AirflowTaskTimeout) as error:
            policy = policy_of(task)
            if policy is None:
                raise
            instance = context["ti"]
            decision = policy.evaluate(error, instance.try_number, instance.max_tries, context)
            if decision.action is not RetryAction.FAIL:
                raise
            raise AirflowFailException(f"{error} ({decision.reason})") from error

    return decided
