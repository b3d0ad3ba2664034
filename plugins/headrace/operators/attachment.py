"""Which task waits for the end of a receiver job, and whether a person ended that task unnoticed by the job.

Airflow notifies a trigger of its task's end only once the trigger runs, about a second after the deferral. If a person
marks or clears the task before that, the next task that attaches to the job detects it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from airflow.sdk import Context

    from headrace.ledger.tables import JobRow

ATTACHED = "attached"
"""The attribute of a receiver job that names the task waiting for its end."""
_TASK = "attached_task"


def holder(context: Context) -> str:
    """The name of this task as the holder of a lease or an attempt; people read it."""
    ti = context["ti"]
    return f"airflow:{ti.dag_id}/{ti.run_id}/{ti.task_id}/{ti.try_number}"


def attachment(context: Context) -> dict[str, Any]:
    """The attributes that this task sets on the job while it waits for it."""
    ti = context["ti"]
    reported = {name: getattr(ti, name) for name in ("dag_id", "run_id", "task_id", "try_number", "max_tries")}
    return {ATTACHED: holder(context), _TASK: reported}


def ended_unnoticed(job: JobRow, context: Context) -> bool:
    """Whether the task that waited for this job was marked or cleared, and nobody asked the job to stop."""
    before = job.attributes.get(_TASK)
    if before is None or job.state.ended or job.stop_requested_at_ms is not None:
        return False
    ti = context["ti"]
    if any(getattr(ti, name) != before[name] for name in ("dag_id", "run_id", "task_id")):
        return _was_marked(before, ti)
    # Clearing a task gives it its retries again.
    return bool(ti.max_tries > before["max_tries"])


def _was_marked(before: Mapping[str, Any], ti: Any) -> bool:
    states = ti.get_task_states(dag_id=before["dag_id"], task_ids=[before["task_id"]], run_ids=[before["run_id"]])
    state = states.get(before["run_id"], {}).get(before["task_id"])
    # Without a person the task succeeds only when its job has stopped, and fails only when its tries are used up.
    return state in ("success", "skipped") or (state == "failed" and before["try_number"] <= before["max_tries"])
