"""Follows a stream's progress on the embedded stack, and reports why it makes none."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from examples.demo.errors import DemoError
from examples.demo.observing import Observer, Snapshot, try_to_look

if TYPE_CHECKING:
    from examples.demo.stack import DemoStack
    from examples.demo.view import View

_POLL_SECONDS = 0.5
# On a busy machine Spark alone needs one of these minutes.
_STALL_SECONDS = 180.0
_WORRY_SECONDS = 60.0
_LOG_LINES = 20


def unpause(stack: DemoStack, view: View, *dag_ids: str) -> None:
    """Let the DAGs run, through Airflow's REST API."""
    api = stack.airflow()
    for dag_id in dag_ids:
        api.wait_for_dag(dag_id)
        api.unpause(dag_id)
    view.say(f"unpaused {' and '.join(dag_ids)}")


def follow(
    stack: DemoStack, view: View, stream_name: str, observer: Observer, *, until: Callable[[Snapshot], bool]
) -> Snapshot:
    """Poll until the condition ``until`` holds, and return the last snapshot. After a minute without progress, show
    failed tasks.

    Raises:
        DemoError: there was no progress for three minutes, or a part of the stack has died.
    """
    progress: object = None
    moved = time.monotonic()
    reported = False
    while True:
        snapshot = try_to_look(observer)
        if snapshot is not None:
            view.stream(snapshot)
            if until(snapshot):
                return snapshot
            if snapshot.progress != progress:
                progress, moved, reported = snapshot.progress, time.monotonic(), False
        if dead := stack.failures():
            raise DemoError(f"A part of the stack has died. {'; '.join(dead)}")
        still = time.monotonic() - moved
        if still > _WORRY_SECONDS and not reported:
            reported = True
            ill = explain(stack, stream_name, states=("failed", "up_for_retry"))
            view.say(f"nothing has moved for {_WORRY_SECONDS:g} s. {ill}")
        if still > _STALL_SECONDS:
            raise DemoError(f"Nothing moved for {_STALL_SECONDS:g} s. {explain(stack, stream_name)}")
        time.sleep(_POLL_SECONDS)


def explain(
    stack: DemoStack, stream_name: str, *, states: Collection[str] = ("failed", "up_for_retry", "running", "deferred")
) -> str:
    """Airflow's import errors, and the end of the logs of tasks that are in one of these states."""
    api = stack.airflow()
    lines = [f"{file}: {trace}" for file, trace in api.import_errors().items()]
    for dag_id in (f"{stream_name}_receiver", f"{stream_name}_batches"):
        for run in api.runs(dag_id, limit=3):
            for task in api.task_instances(dag_id, run["dag_run_id"]):
                if task["state"] in states:
                    log = api.task_log(dag_id, run["dag_run_id"], task["task_id"], try_number=task["try_number"])
                    lines.append(f"{dag_id} {run['dag_run_id']} {task['task_id']} is {task['state']}:")
                    lines += [f"  {line}" for line in log.splitlines()[-_LOG_LINES:]]
    return "\n".join(lines) or "No task has failed."
