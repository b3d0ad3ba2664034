"""Factories that make a stream's DAGs, in one line: ``receiver, batches = stream_dags(stream)``.

Airflow parses only those files of its DAGs folder that contain the words "airflow" and "dag" (unless
``core.dag_discovery_safe_mode`` is off), so a file with only that line needs a comment that contains "airflow".
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from headrace.dags.factories import again_dag, batch_dag, received_schedule, receiver_dag, repair_dag, replay_dag

if TYPE_CHECKING:
    from airflow.sdk import DAG

    from headrace.stream import Stream

__all__ = ["again_dag", "batch_dag", "received_schedule", "receiver_dag", "repair_dag", "replay_dag", "stream_dags"]


def stream_dags(
    stream: Stream,
    *,
    start_date: datetime | None = None,
    catch_up: bool | timedelta | None = None,
    single_task: bool = False,
    default_args: Mapping[str, Any] | None = None,
) -> tuple[DAG, DAG]:
    """The receiver DAG and the batch DAG of a stream. Also makes its repair DAG; see ``batch_dag``.

    :param default_args: for the tasks of all three DAGs, such as ``{"queue": "headrace"}``.
    """
    given = dict(default_args or {})
    receiver = receiver_dag(stream, default_args=given)
    batches = batch_dag(
        stream, start_date=start_date, catch_up=catch_up, single_task=single_task, repair=False, default_args=given
    )
    repair_dag(stream, batch_dag_id=batches.dag_id, default_args=given)
    return receiver, batches
