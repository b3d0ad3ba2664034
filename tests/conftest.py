"""What every test gets, wherever it stands. A test of one file imports nothing for the others: what serves ledgers or
properties is loaded with them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.archive_spark import JVM_OPTIONS

if TYPE_CHECKING:
    from xdist.scheduler import LoadFileScheduling

# Set, it has every child process compile its imports again: 3 s instead of 1 s for each start of pyspark.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Every JVM below the tests has them, Airflow's tasks' too. They live for minutes and see little data: Spark's took
# a third less with them. What the second compiler and more collectors make faster, they make faster too late.
os.environ.setdefault("JDK_JAVA_OPTIONS", JVM_OPTIONS)
# Made by `make`. Where it does not fit, the JVM says so on its standard output, which some tests read.
if (_ARCHIVE := Path(sys.prefix) / "spark.jsa").exists() and _ARCHIVE.stat().st_size:
    os.environ.setdefault("SPARK_SUBMIT_OPTS", f"-XX:SharedArchiveFile={_ARCHIVE} -Xlog:disable -Xlog:all=error:stderr")


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Load the profile of properties before a module's decorators take its values."""
    if isinstance(collector, pytest.Module) and b"hypothesis" in collector.path.read_bytes():
        _load_profile()


def pytest_collection_finish(session: pytest.Session) -> None:
    if "hypothesis" not in sys.modules:
        # Its plugin imports it for the summary.
        session.config.pluginmanager.unregister(name="hypothesispytest")
    elif not _load_profile.cache_info().currsize:
        raise pytest.UsageError("Hypothesis was imported before its profile was loaded: name it in the tests' modules.")


@cache
def _load_profile() -> None:
    from hypothesis import HealthCheck, settings

    # No deadline, and no check of how fast examples are made: neither may depend on the machine.
    any_speed: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
    settings.register_profile("quick", max_examples=30, **any_speed)
    settings.register_profile("thorough", max_examples=1000, **any_speed)
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


@pytest.fixture(scope="module", autouse=True)
def _statements_compiled_once() -> Iterator[None]:
    if "headrace.ledger.database" not in sys.modules:
        yield
        return
    from headrace.ledger import engines, postgres_engine

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engines, "create_engine", _create_engine())
        patch.setattr(postgres_engine, "create_engine", _create_engine())
        yield


@pytest.fixture(autouse=True)
def _secrets_of_this_test_only() -> Iterator[None]:
    """A process hides the secrets of all connections that it has read. Another test's "a token" is no secret here."""
    known = set(sys.modules["headrace.secrets"]._known) if "headrace.secrets" in sys.modules else set()
    yield
    if "headrace.secrets" in sys.modules:
        sys.modules["headrace.secrets"]._known.intersection_update(known)


@cache
def _create_engine() -> Callable[..., Any]:
    from sqlalchemy import create_engine

    return partial(create_engine, execution_options={"compiled_cache": _Statements()})


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    """With `--dist loadfile` a worker takes whole files, and all files that share the system tests' stack at once."""
    if config.getvalue("dist") != "loadfile":
        return None
    from tests.support.scheduling import FilesAndTheStack

    return FilesAndTheStack(config, log)
