"""The overviews of all streams say what the single repositories say of each, and cost the same for old streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event
from tests.support.seeded_ledger import SITUATIONS, seed

from headrace.blocks import ReceiverId, TopicPartition
from headrace.ledger import Ledger
from headrace.ledger.overviews import StreamOverview
from headrace.ledger.states import UNFINISHED, BatchState


@pytest.fixture(scope="module")
def seeded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ledger]:
    """A stream of each situation, one without anything, and one of whose partitions one has failed. Two have batches
    that had completed and are run again."""
    with Ledger.open(f"sqlite:///{tmp_path_factory.mktemp('overviews')}/ledger.db") as ledger:
        seed(ledger, streams=len(SITUATIONS), batches=40)
        for name in ("orders", "orders-3"):
            again = ledger.batches.page(name, 1, [BatchState.COMPLETED], oldest_first=True)[0].batch_time_ms
            ledger.attempts.begin(name, again, holder="h", way="connect", lease_ms=600_000, force=True)
        ledger.streams.register("new", '{"outputs": []}', batch_interval_ms=1_000, block_interval_ms=200)
        ledger.streams.register("broken", '{"outputs": []}', batch_interval_ms=1_000, block_interval_ms=200)
        job = ledger.jobs.acquire("broken", holder="job", lease_ms=600_000)
        (topic,) = ledger.topics.observe(job, "kafka", [("orders", "id", 1)])
        partition = TopicPartition("orders", "id", 0, topic.incarnation)
        ledger.positions.ensure_all(job, "kafka", {partition: 0})
        lease = ledger.receivers.register(
            ledger.receivers.schedule(job, ReceiverId("broken", "kafka", 0)), host="here", lease_ms=600_000
        )
        ledger.positions.assign(job, "kafka", {partition: 0})
        ledger.positions.fail(lease, partition, "offsets lost")
        ledger.receivers.heartbeat(lease, sealed_through_ms=0, stats={"failed": 1})
        yield ledger


def _one_by_one(ledger: Ledger, found: StreamOverview, points: int) -> StreamOverview:
    """The same by the repositories of each noun."""
    name = found.stream.name
    every = ledger.batches.page(name, 1_000, UNFINISHED, oldest_first=True)
    unfinished = next((each for each in every if each.steps is None), None)
    backfilled = next((each for each in every if each.steps is not None), None)
    recent = [row for row in ledger.batches.page(name, 1_000) if row.state is not BatchState.ABSORBED][:points]
    failed = [each for each in recent if each.state is BatchState.FAILED]
    judged = {each.batch_time_ms for each in (unfinished, backfilled, *failed) if each is not None}
    attempts = [each for time_ms in judged for each in ledger.attempts.of_batch(name, time_ms)]
    waiting = ledger.blocks.waiting(name, found.now_ms)
    jobs = ledger.jobs.page(name, 2)
    outputs = [output for batch in recent for output in ledger.attempts.outputs(name, batch.batch_time_ms)]
    return StreamOverview(
        stream=ledger.streams.get(name),
        now_ms=found.now_ms,
        job=ledger.jobs.current(name),
        job_before=jobs[1] if len(jobs) > 1 else None,
        failed=len([each for each in every if each.state is BatchState.FAILED and each.steps is None]),
        receivers=ledger.receivers.all(name),
        recent=recent,
        last_completed=next(iter(ledger.batches.page(name, 1, [BatchState.COMPLETED])), None),
        unfinished=unfinished,
        backfilled=backfilled,
        attempts=sorted(attempts, key=lambda each: (each.batch_time_ms, each.number)),
        events=[] if backfilled is None else ledger.events.of_batch(name, backfilled.batch_time_ms),
        waiting_ms=None if waiting is None else waiting.first_ms,
        failed_positions=[each for each in ledger.positions.all(name, live=True) if each.error],
        samples=ledger.samples.between(name, 0, found.now_ms + 1, points=10_000)[-points:],
        dead_letters=sum(each.counts.get("dead_lettered", 0) for each in outputs),
    )


# With two points, the last completed and the oldest unfinished batch of the failing stream are not among the newest.
@pytest.mark.parametrize("points", [2, 30, 100])
def test_an_overview_says_what_the_single_repositories_say(seeded: Ledger, points: int) -> None:
    overviews = seeded.overviews.of(seeded.streams.all(), points)
    assert [overview.stream.name for overview in overviews] == [row.name for row in seeded.streams.all()]
    for found in overviews:
        assert found == _one_by_one(seeded, found, points), found.stream.name


def test_of_no_stream_there_is_no_overview(seeded: Ledger) -> None:
    assert seeded.overviews.of([], 30) == []


@contextmanager
def counted(ledger: Ledger) -> Iterator[dict[str, int]]:
    """Counts statements, and the steps of SQLite's virtual machine: both are the same on every machine."""
    count = {"statements": 0, "steps": 0}
    engine = ledger.streams._database.engine

    def step() -> int:
        count["steps"] += 1
        return 0

    def statement(*_: Any) -> None:
        count["statements"] += 1

    def watch(connection: Any, *_: Any) -> None:
        connection.set_progress_handler(step, 1)

    listeners: list[tuple[str, Callable[..., None]]] = [("before_cursor_execute", statement), ("checkout", watch)]
    for name, listener in listeners:
        event.listen(engine, name, listener)
    try:
        yield count
    finally:
        for name, listener in listeners:
            event.remove(engine, name, listener)
        # Its connections have the handler.
        engine.dispose()


def _cost(path: Path, *, streams: int, batches: int) -> dict[str, int]:
    with Ledger.open(f"sqlite:///{path}") as ledger:
        seed(ledger, streams=streams, batches=batches)
        rows = ledger.streams.all()
        with counted(ledger) as count:
            ledger.overviews.of(rows, 30)
        return count


def test_the_number_of_statements_does_not_grow(tmp_path: Path) -> None:
    """It depends neither on the streams nor on the batches."""
    of_each_situation = _cost(tmp_path / "few.db", streams=len(SITUATIONS), batches=40)
    of_more = _cost(tmp_path / "more.db", streams=3 * len(SITUATIONS), batches=60)
    # BEGIN, edges, batches, samples, attempts, jobs, receivers, outputs.
    assert of_each_situation["statements"] == of_more["statements"] == 8


def test_reading_does_not_grow_with_the_number_of_batches(tmp_path: Path) -> None:
    young = _cost(tmp_path / "young.db", streams=3, batches=100)
    old = _cost(tmp_path / "old.db", streams=3, batches=1_500)
    # A count of the batches would add a step for each, and more.
    assert old["steps"] == pytest.approx(young["steps"], abs=500)
