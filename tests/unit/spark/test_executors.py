"""What is requested of Spark about executors. A real cluster is in the integration test of executor allocation."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from headrace.spark.executors import live_executor_ids, release_executor, request_total_executors


class Sequence:
    """A Scala sequence, as py4j gives it."""

    def __init__(self, *items: str) -> None:
        self._items = list(items)

    def iterator(self) -> Sequence:
        return self

    def hasNext(self) -> bool:  # noqa: N802 - Scala's name
        return bool(self._items)

    def next(self) -> str:
        return self._items.pop(0)


class Context:
    """A Spark context with executors 1 to 3, of which the second is about to end. It records the requests."""

    def __init__(self, **conf: str) -> None:
        self._conf = conf
        self.calls: list[tuple[Any, ...]] = []
        backend = SimpleNamespace(
            isExecutorActive=lambda each: each != "2",
            decommissionExecutor=lambda *what: self._note("decommission", what[0], *what[2:]),
        )
        scala = SimpleNamespace(
            schedulerBackend=lambda: backend,
            getExecutorIds=lambda: Sequence("1", "2", "3"),
            killExecutor=lambda *what: self._note("kill", *what),
            requestTotalExecutors=lambda *what: self._note("request", *what),
        )
        info = SimpleNamespace(ExecutorDecommissionInfo=lambda *what: what)
        self._jsc = SimpleNamespace(sc=lambda: scala)
        self._jvm = SimpleNamespace(
            PythonUtils=SimpleNamespace(toScalaMap=lambda items: items),
            org=SimpleNamespace(apache=SimpleNamespace(spark=SimpleNamespace(scheduler=info))),
            **{"scala.None$": SimpleNamespace(**{"MODULE$": None})},
        )

    def getConf(self) -> dict[str, str]:  # noqa: N802 - Spark's name
        return self._conf

    def _note(self, *call: Any) -> bool:
        self.calls.append(call)
        return True


@pytest.fixture
def context() -> Any:
    return Context()


def test_executors_that_are_about_to_end_are_not_live(context: Any) -> None:
    assert live_executor_ids(context) == ["1", "3"]


def test_a_total_is_requested_without_preferred_hosts(context: Any) -> None:
    assert request_total_executors(context, 5)
    assert context.calls == [("request", 5, 0, {})]


def test_an_executor_is_killed(context: Any) -> None:
    assert release_executor(context, "3")
    assert context.calls == [("kill", "3")]


def test_an_executor_is_decommissioned_where_spark_is_set_so() -> None:
    context: Any = Context(**{"spark.decommission.enabled": "true"})
    assert release_executor(context, "3")
    # One less is requested, and no executor has asked for it.
    assert context.calls == [("decommission", "3", True, False)]
