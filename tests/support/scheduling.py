"""How xdist's workers share the files of tests with servers."""

from __future__ import annotations

from typing import Any

from xdist.scheduler import LoadFileScheduling

# Each starts an Airflow of its own, which takes a third of a core while it only waits.
_WITH_AIRFLOW = ("the stack", "tests/system/", "tests/integration/airflow/", "tests/integration/devstack/test_stack.py")
_AIRFLOWS_AT_ONCE = 2


class FilesAndTheStack(LoadFileScheduling):
    """Two files with an Airflow run at once while others are left: more would make each other late on two cores."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return "the stack" if file in ("tests/system/test_down_time.py", "tests/system/test_stream.py") else file

    def _assign_work_unit(self, node: Any) -> None:
        units = [(scope, tests) for units in self.assigned_work.values() for scope, tests in units.items()]
        running = [scope for scope, tests in units if scope.startswith(_WITH_AIRFLOW) and not all(tests.values())]
        if len(running) >= _AIRFLOWS_AT_ONCE:
            other = next((scope for scope in self.workqueue if not scope.startswith(_WITH_AIRFLOW)), None)
            if other is not None:
                self.workqueue.move_to_end(other, last=False)
        super()._assign_work_unit(node)
