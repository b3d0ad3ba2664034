"""What every test gets, wherever it stands."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from sqlalchemy import create_engine
from tests.archive_spark import JVM_OPTIONS
from xdist.scheduler import LoadFileScheduling

from headrace.ledger import engines, postgres_engine

# Set, it has every child process compile its imports again: 3 s instead of 1 s for each start of pyspark.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Every JVM below the tests has them, Airflow's tasks' too. They live for minutes and see little data: Spark's took
# a third less with them. What the second compiler and more collectors make faster, they make faster too late.
os.environ.setdefault("JDK_JAVA_OPTIONS", JVM_OPTIONS)
# Made by `make`. Where it does not fit, the JVM says so on its standard output, which some tests read.
if (_ARCHIVE := Path(sys.prefix) / "spark.jsa").exists() and _ARCHIVE.stat().st_size:
    os.environ.setdefault("SPARK_SUBMIT_OPTS", f"-XX:SharedArchiveFile={_ARCHIVE} -Xlog:disable -Xlog:all=error:stderr")

# No deadline, and no check of how fast examples are made: neither may depend on the machine.
_ANY_SPEED = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("quick", max_examples=30, **_ANY_SPEED)
settings.register_profile("thorough", max_examples=1000, **_ANY_SPEED)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


class _Statements(dict[Any, Any]):
    """SQLAlchemy's cache of compiled statements, for all engines of a kind instead of each by itself.

    An engine is made for each database, which is for each test, and compiling is a third of a ledger test's time.
    """

    def get(self, key: Any, default: Any = None) -> Any:
        return super().get(self._of_any_engine(key), default)

    def __setitem__(self, key: Any, compiled: Any) -> None:
        super().__setitem__(self._of_any_engine(key), compiled)

    @staticmethod
    def _of_any_engine(key: tuple[Any, ...]) -> tuple[Any, ...]:
        dialect, *statement = key
        return (dialect.name, *statement)


_create_engine = partial(create_engine, execution_options={"compiled_cache": _Statements()})


@pytest.fixture(scope="module", autouse=True)
def _statements_compiled_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engines, "create_engine", _create_engine)
        patch.setattr(postgres_engine, "create_engine", _create_engine)
        yield


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    """With `--dist loadfile` a worker takes whole files, and all files that share the system tests' stack at once."""
    return _FilesAndTheStack(config, log) if config.getvalue("dist") == "loadfile" else None


# Each starts an Airflow of its own, which takes a third of a core while it only waits.
_WITH_AIRFLOW = ("the stack", "tests/system/", "tests/integration/airflow/", "tests/integration/devstack/test_stack.py")
_AIRFLOWS_AT_ONCE = 2


class _FilesAndTheStack(LoadFileScheduling):
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
