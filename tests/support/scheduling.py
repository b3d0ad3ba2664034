"""How xdist's workers share the files of tests with servers."""

from __future__ import annotations

from typing import Any

from xdist.scheduler import LoadFileScheduling

# Each starts an Airflow of its own, which takes a third of a core while it only waits.
_WITH_AIRFLOW = ("the stack", "the toys", "tests/system/", "tests/integration/devstack/test_stack.py")
_AIRFLOWS_AT_ONCE = 2
# The files that share one: a worker takes them at once. They are the longest, so they come first.
_STACK, _TOYS = "tests/system/test_{}.py", "tests/integration/airflow/test_{}.py"
_SHARING = {
    **{_STACK.format(name): "the stack" for name in ("down_time", "stream", "word_count")},
    # The first of them has a copy of the database that is made for the others.
    **{_TOYS.format(name): "the toys" for name in ("api_rights", "assets", "backfill", "outputs", "schedule")},
}


# Airflow's configuration, as {"section.key": value}, for an Airflow that lives for many tests. A loop of an idle
# scheduler takes 35 ms of a processor: four of them in a second took a seventh of all that the tests took.
SPARING = {"scheduler.scheduler_idle_sleep_time": "1"}


class FilesAndTheStack(LoadFileScheduling):
    """Files that share an Airflow are one unit, and the first to be taken. Two units with an Airflow run at once while
    others are left: more would make each other late on two cores."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return _SHARING.get(file, file)

    def _assign_work_unit(self, node: Any) -> None:
        for shared in sorted(set(_SHARING.values()) & self.workqueue.keys()):
            self.workqueue.move_to_end(shared, last=False)
        units = [(scope, tests) for units in self.assigned_work.values() for scope, tests in units.items()]
        running = [scope for scope, tests in units if scope.startswith(_WITH_AIRFLOW) and not all(tests.values())]
        if len(running) >= _AIRFLOWS_AT_ONCE:
            other = next((scope for scope in self.workqueue if not scope.startswith(_WITH_AIRFLOW)), None)
            if other is not None:
                self.workqueue.move_to_end(other, last=False)
        super()._assign_work_unit(node)
