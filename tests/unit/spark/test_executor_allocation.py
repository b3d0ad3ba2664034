"""Executors by the batches of a real ledger, and what is requested of Spark. A real cluster is in the integration
test.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.batch.allocation import allocate
from headrace.clock import ManualClock
from headrace.ledger import EventKind, Ledger
from headrace.ledger.errors import LedgerUnavailableError
from headrace.spark.receiving import executor_allocation
from headrace.spark.receiving.executor_allocation import ExecutorAllocationManager
from headrace.spark.receiving.executors import (
    live_executor_ids,
    release_executor,
    request_total_executors,
)
from headrace.stream import ConsoleOutput, ExecutorAllocation, KafkaInput, Limits, SparkSettings, Stream
from headrace.stream_context import StreamContext


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
            isExecutorActive=lambda executor_id: executor_id != "2",
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


INTERVAL_MS = 2_000


class Cluster:
    """A cluster that does what it is asked, and a stream with one receiver on executor 1."""

    def __init__(self, folder: Path, limits: Limits, **settings: Any) -> None:
        self.clock = ManualClock(1_700_000_000_000)
        self.stream = Stream(
            name="clicks",
            inputs=KafkaInput(bootstrap_servers="localhost:9092", topics="clicks"),
            outputs=ConsoleOutput(),
            batch_interval="2 s",
            storage={"url": str(folder), "shared": True},
            ledger=f"sqlite:///{folder}/ledger.db",
            spark=SparkSettings(master="spark://host:7077", executors=ExecutorAllocation(**settings)),
            limits=limits,
        )
        self.ledger = Ledger.open(self.stream.ledger, clock=self.clock)
        self.ledger.streams.register(
            "clicks",
            self.stream.to_json(),
            batch_interval_ms=INTERVAL_MS,
            block_interval_ms=200,
            outputs=self.stream.steps,
            max_concurrent_batches=limits.max_concurrent_batches,
        )
        self.context = StreamContext(self.stream, self.ledger, clock=self.clock)
        self.live = ["1", "2", "3"]
        self.slots_per_executor = 2
        self.with_receivers: set[str] | None = {"1"}
        self.accepts = True
        self.calls: list[str] = []
        self.job = self.ledger.jobs.acquire("clicks", holder="test", lease_ms=600_000)
        self.manager = self.make_manager(self.context)
        self.manager.scale()

    def make_manager(self, context: StreamContext) -> ExecutorAllocationManager:
        settings = self.stream.spark.executors
        assert settings is not None
        spark = SimpleNamespace(sparkContext=None)
        application: Any = SimpleNamespace(spark=spark, task_slots=self.slots_per_executor * len(self.live))
        launcher: Any = self
        return ExecutorAllocationManager(context, settings, application, launcher, self.job)

    # -- the launcher

    def without_starts(self) -> AbstractContextManager[None]:
        return nullcontext()

    def executors_of_receivers(self) -> set[str] | None:
        return self.with_receivers

    # -- batches

    def next_time(self) -> int:
        sealed = self.ledger.streams.get("clicks").sealed_until_ms
        time_ms = sealed + INTERVAL_MS
        self.clock.advance(max(0, time_ms - self.clock.now_ms()))
        allocate(self.context, time_ms)
        return time_ms

    def begin(self, way: str = "connect") -> Any:
        time_ms = self.next_time()
        return self.ledger.attempts.begin("clicks", time_ms, holder="test", way=way, lease_ms=600_000)

    def end(self, attempt: Any) -> None:
        for output in attempt.outputs:
            self.ledger.attempts.record_output(attempt, output, {})
        self.ledger.attempts.complete(attempt)

    def batch(self, processing_ms: int, way: str = "connect") -> None:
        attempt = self.begin(way)
        self.clock.advance(processing_ms)
        self.end(attempt)

    def scale(self) -> list[str]:
        """What is requested of Spark after a scaling interval."""
        self.calls.clear()
        self.manager.scale()
        return self.calls

    def events(self) -> list[tuple[str, Any]]:
        kinds = [EventKind.EXECUTORS_REQUESTED, EventKind.EXECUTOR_RELEASED]
        return [(str(event.kind), event.payload) for event in self.ledger.events.page("clicks", kinds=kinds)]


@pytest.fixture
def make_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Cluster]]:
    made: list[Cluster] = []

    def request(_: Any, total: int) -> bool:
        made[-1].calls.append(f"request {total}")
        return made[-1].accepts

    def release(_: Any, executor: str) -> bool:
        made[-1].calls.append(f"release {executor}")
        made[-1].live.remove(executor)
        return True

    def make(limits: Limits | None = None, **settings: Any) -> Cluster:
        made.append(Cluster(tmp_path, limits or Limits(), **settings))
        return made[-1]

    monkeypatch.setattr(executor_allocation, "live_executor_ids", lambda _: list(made[-1].live))
    monkeypatch.setattr(executor_allocation, "task_slots", lambda _: made[-1].slots_per_executor * len(made[-1].live))
    monkeypatch.setattr(executor_allocation, "request_total_executors", request)
    monkeypatch.setattr(executor_allocation, "release_executor", release)
    yield make
    for cluster in made:
        cluster.ledger.close()


def test_executors_follow_the_batches(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster()
    cluster.batch(2_000)
    assert cluster.scale() == ["request 4"]
    assert cluster.scale() == [], "no batch has completed since"
    cluster.batch(6_000)
    cluster.batch(4_000)
    assert cluster.scale() == ["request 6"], "2.5 is rounded to 3"
    cluster.batch(1_799)
    cluster.batch(601)
    assert cluster.scale() == []
    cluster.live = ["1", "2"]
    cluster.batch(600)
    assert cluster.scale() == ["request 2", "release 2"]
    cluster.batch(100)
    assert cluster.scale() == [], "the last one runs the receiver"
    assert cluster.events() == [
        ("executors_requested", {"ratio": 1.0, "executors": 4, "live": 3}),
        ("executors_requested", {"ratio": 2.5, "executors": 6, "live": 3}),
        ("executor_released", {"ratio": 0.3, "executor": "2", "left": 1}),
    ]


def test_batches_from_before_the_start_do_not_count(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster()
    cluster.batch(9_000)
    cluster.manager = cluster.make_manager(cluster.context)
    assert cluster.scale() == cluster.scale() == []


def test_minimum_and_maximum_hold(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster(minimum=3, maximum=4)
    cluster.batch(100)
    assert cluster.scale() == []
    cluster.batch(20_000)
    assert cluster.scale() == ["request 4"]
    cluster.live.append("4")
    cluster.batch(20_000)
    assert cluster.scale() == ["request 4"]
    assert len(cluster.events()) == 1, "the second request changes nothing"


def test_a_slot_for_batches_stays_whatever_the_minimum_is(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster(minimum=1)
    cluster.slots_per_executor = 1
    cluster.live = ["1", "2"]
    cluster.batch(100)
    assert cluster.scale() == []


def test_no_receiver_is_released_while_its_place_is_unknown(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster()
    cluster.with_receivers = None
    cluster.batch(100)
    assert cluster.scale() == []


def test_a_batch_in_an_application_of_its_own_does_not_count(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster()
    cluster.batch(16_000, way="submit")
    assert cluster.scale() == []


def test_batches_that_run_at_one_time_share_the_executors(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster(Limits(max_concurrent_batches=2))
    cluster.clock.advance(10 * INTERVAL_MS)
    both = [cluster.begin(), cluster.begin()]
    cluster.clock.advance(4_000)
    for attempt in both:
        cluster.end(attempt)
    assert cluster.scale() == ["request 4"]


def test_a_batch_has_the_intervals_of_the_times_it_took_over_too(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster()
    now_ms = cluster.clock.now_ms()
    first, second, last = (now_ms + number * INTERVAL_MS for number in (1, 2, 3))
    cluster.clock.advance(3 * INTERVAL_MS)
    cluster.ledger.allocations.seal("clicks", last)
    cluster.ledger.allocations.allocate(
        "clicks", last, manifest_uri="m", manifest_sha256="0" * 64, blocks_expected=0, absorb=[first, second]
    )
    attempt = cluster.ledger.attempts.begin("clicks", last, holder="test", way="connect", lease_ms=600_000)
    cluster.clock.advance(6_000)
    cluster.end(attempt)
    assert cluster.scale() == ["request 4"], "the ratio is 1, not 3"


def test_a_cluster_manager_that_refuses_gives_no_event(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster()
    cluster.accepts = False
    cluster.batch(4_000)
    assert cluster.scale() == ["request 5"]
    cluster.batch(100)
    assert cluster.scale() == ["request 3"], "and nothing is released"
    assert cluster.events() == []


def test_batches_learn_how_many_task_slots_there_are_now(make_cluster: Callable[..., Cluster]) -> None:
    """Otherwise they would be split into as many tasks as at the start, and new executors would have nothing to do."""
    cluster = make_cluster()

    def recorded() -> tuple[Any, Any]:
        cluster.manager.record_slots()
        job = cluster.ledger.jobs.current("clicks")
        assert job is not None
        return job.attributes.get("task_slots"), job.attributes.get("batch_slots")

    assert recorded() == (None, None), "the driver records those of the start"
    cluster.live += ["4", "5"]
    assert recorded() == (10, 9)
    cluster.live = []
    assert recorded() == (0, 1)


def test_a_failure_does_not_end_it(make_cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = make_cluster(scaling_interval="10 ms")
    manager = cluster.make_manager(StreamContext(cluster.stream, cluster.ledger))
    looks = threading.Semaphore(0)
    errors: list[Exception] = [LedgerUnavailableError("it does not answer"), RuntimeError("the JVM says no")]

    def fail() -> None:
        looks.release()
        if errors:
            raise errors.pop()

    monkeypatch.setattr(manager, "scale", fail)
    with manager:
        for _ in range(3):
            assert looks.acquire(timeout=20)
    assert not errors
