"""Runs for batch times that hold records and that no run has claimed.

They arise where the schedule does not reach: the receiver was started before the batch DAG, catching up is bounded,
or a run was deleted. The blocks keep their batch time (a block gets it once), so it is the run that has to come.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from headrace.timetables.micro_batch import from_ms

if TYPE_CHECKING:
    from airflow.sdk import Context

log = logging.getLogger(__name__)

# A task should not create runs for an hour; the next batch's task goes on where this one stopped. In a stream whose
# batches run in order it finds nothing to go on with: this run does all that comes before it, so that those of the
# times beyond these are run without runs of their own.
MOST_AT_ONCE = 50


def ended_without_a_batch(context: Context, batch_times_ms: Iterable[int], interval_ms: int) -> list[int]:
    """Those of the batch times, which have no batch, whose run is over: it failed before it could allocate. Airflow
    gives their date no other run."""
    ti = context["ti"]
    found: list[int] = []
    for batch_time_ms in batch_times_ms:
        if len(found) == MOST_AT_ONCE:
            break
        asked: dict[str, Any] = {"dag_id": ti.dag_id, "logical_dates": [from_ms(batch_time_ms - interval_ms)]}
        if ti.get_dr_count(**asked) and not ti.get_dr_count(**asked, states=["queued", "running"]):
            found.append(batch_time_ms)
    return found


def claim(context: Context, batch_times_ms: Iterable[int], interval_ms: int) -> list[int]:
    """Trigger a run of this task's own DAG for each batch time that has none; the batch times triggered.

    A run of the schedule or of a backfill that waits in the queue has the same logical date, so it is seen here, and
    Airflow gives a logical date one run.
    """
    from airflow.sdk.execution_time import task_runner
    from airflow.sdk.execution_time.comms import TriggerDagRun

    ti = context["ti"]
    claimed: list[int] = []
    for batch_time_ms in batch_times_ms:
        if len(claimed) == MOST_AT_ONCE:
            break
        logical_date = from_ms(batch_time_ms - interval_ms)
        if ti.get_dr_count(dag_id=ti.dag_id, logical_dates=[logical_date]):
            continue
        task_runner.SUPERVISOR_COMMS.send(
            TriggerDagRun(
                dag_id=ti.dag_id,
                run_id=f"claimed__{from_ms(batch_time_ms).isoformat()}",
                logical_date=logical_date,
                # Airflow infers the data interval from run_after, not from the logical date.
                run_after=logical_date,
                note=f"The batch time held records that no run had claimed; found by {ti.run_id}.",
            )
        )
        claimed.append(batch_time_ms)
    return claimed
