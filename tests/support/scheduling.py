"""How xdist's workers share the files of tests with servers."""

from __future__ import annotations

from typing import Any

from xdist.scheduler import LoadFileScheduling

# Each starts an Airflow of its own, which takes a third of a core while it only waits.
_WITH_AIRFLOW = ("the stack", "the toys", "tests/system/", "tests/integration/devstack/test_stack.py")
_AIRFLOWS_AT_ONCE = 2
# Files that share servers of their own: a worker takes them at once, and first of all, since they take longest.
_TOGETHER = {
    "the stack": tuple(f"tests/system/test_{name}.py" for name in ("celery", "down_time", "stream", "word_count")),
    "the toys": ("tests/integration/airflow/",),
    "the cluster": ("tests/integration/spark/cluster/",),
}


# Airflow's configuration, as {"section.key": value}, for an Airflow that lives for many tests. A loop of an idle
# scheduler takes 35 ms of a processor: four of them in a second took a seventh of all that the tests took.
SPARING = {"scheduler.scheduler_idle_sleep_time": "1"}


class FilesAndTheStack(LoadFileScheduling):
    """Two units with an Airflow run at once while others are left: more would make each other late on two cores."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return next((scope for scope, files in _TOGETHER.items() if file.startswith(files)), file)

    def _assign_work_unit(self, node: Any) -> None:
        if first := next((scope for scope in _TOGETHER if scope in self.workqueue), None):
            self.workqueue.move_to_end(first, last=False)
        units = [(scope, tests) for units in self.assigned_work.values() for scope, tests in units.items()]
        running = [scope for scope, tests in units if scope.startswith(_WITH_AIRFLOW) and not all(tests.values())]
        if len(running) >= _AIRFLOWS_AT_ONCE:
            other = next((scope for scope in self.workqueue if not scope.startswith(_WITH_AIRFLOW)), None)
            if other is not None:
                self.workqueue.move_to_end(other, last=False)
        super()._assign_work_unit(node)
