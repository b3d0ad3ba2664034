"""Which batch a DAG run is about."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from headrace.errors import HeadraceError
from headrace.failure import Failure
from headrace.timetables.micro_batch import MicroBatchTimetable, to_ms

if TYPE_CHECKING:
    from headrace.ledger import Ledger
    from headrace.stream import Stream

log = logging.getLogger(__name__)


class NoBatchTimeError(HeadraceError):
    """The run tells no date from which a batch time follows."""

    failure = Failure.FINAL


def batch_time_of_run(context: Mapping[str, Any], stream: Stream, ledger: Ledger) -> int:
    """The batch that the task's run is about, in milliseconds since the epoch; the same for all tasks of a run.

    A run without logical date (an asset event triggered it, or a person who gave none) is given a batch by the ledger,
    which has to know the stream.
    """
    run = context["dag_run"]
    if run.logical_date is None:
        return ledger.runs.assign(stream.name, run.run_id, coalesces=stream.coalesces)
    return batch_time_ms(context, stream.batch_interval)


def batch_time_ms(context: Mapping[str, Any], batch_interval: timedelta) -> int:
    """The end of the interval that the run's logical date starts or falls into, in milliseconds since the epoch.

    The logical date counts and not the run's data interval: a run triggered by another DAG's
    ``TriggerDagRunOperator`` has the logical date that was asked for, but the data interval of the moment
    (airflow.api.common.trigger_dag infers it from ``run_after``).

    Raises:
        NoBatchTimeError: the run has no logical date.
    """
    dag_run = context["dag_run"]
    asked: datetime | None = dag_run.logical_date
    if asked is None:
        raise NoBatchTimeError(
            f"The DAG run {dag_run.run_id} has no logical date.",
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
