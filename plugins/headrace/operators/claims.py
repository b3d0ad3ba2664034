"""Triggers runs for batch times that hold records and have no run.

Such batch times arise where the schedule does not reach: the receiver was started before the batch DAG, catching up is
bounded, or a run was deleted. A block keeps its batch time, so a run for that batch time is needed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from headrace.timetables.micro_batch import from_ms

if TYPE_CHECKING:
    from airflow.sdk import Context

log = logging.getLogger(__name__)

# Bounds the time that a task spends on creating runs; the next batch's task continues where this one stopped. In a
# stream whose batches run in order nothing is left for it: this run also does all earlier batches, so the batch times
# beyond this limit are run without runs of their own.
MOST_AT_ONCE = 50


def ended_without_a_batch(context: Context, batch_times_ms: Iterable[int], interval_ms: int) -> list[int]:
    """Return the given batch times (which have no batch) whose run is over: it failed before it could allocate. Airflow
    allows no other run for their logical date. At most ``MOST_AT_ONCE``."""
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
    """Trigger a run of this task's own DAG for each batch time that has none, ``MOST_AT_ONCE`` at most.

    A queued run of the schedule or of a backfill has the same logical date, so it is found here. Airflow allows one run
    for each logical date.

    Returns:
        The batch times that runs were triggered for.
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
