"""Which batch a DAG run is about."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from headrace.errors import HeadraceError
from headrace.timetables.micro_batch import MicroBatchTimetable, to_ms

log = logging.getLogger(__name__)


class NoBatchTimeError(HeadraceError):
    """The run tells no date from which a batch time follows."""


def batch_time_ms(context: Mapping[str, Any], batch_interval: timedelta) -> int:
    """The end of the interval that the run's logical date starts or falls into, in milliseconds since the epoch.

    The logical date counts and not the run's data interval: a run triggered by another DAG's
    ``TriggerDagRunOperator`` has the logical date that was asked for, but the data interval of the moment
    (airflow.api.common.trigger_dag infers it from ``run_after``). A run without logical date is about
    the interval in which it was to begin.
    """
    dag_run = context["dag_run"]
    asked: datetime | None = dag_run.logical_date or dag_run.run_after
    if asked is None:
        raise NoBatchTimeError(
            f"The DAG run {dag_run.run_id} has neither a logical date nor a run_after.",
            remedy="Trigger it with a logical date: the start of the batch's interval.",
        )
    interval = MicroBatchTimetable(batch_interval).containing(asked)
    told = dag_run.data_interval_end
    if told is not None and to_ms(told) != to_ms(interval.end):
        log.warning(
            "The run's data interval ends at %s, its logical date %s belongs to the batch %s: the latter counts.",
            told.isoformat(),
            asked.isoformat(),
            interval.end.isoformat(),
        )
    return to_ms(interval.end)
