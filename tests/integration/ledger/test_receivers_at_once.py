"""Receivers of one stream that add blocks at the same time, on Postgres: each block is added or refused by itself.

A receiver is stopped just before its transaction commits, so no test depends on how fast the machine is.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psycopg
import pytest
from sqlalchemy import Connection, create_engine, event, text

from headrace.blocks import BlockHandle, BlockInfo, OffsetRange, ReceiverId, TopicPartition
from headrace.ledger import EventKind, Ledger
from headrace.ledger.errors import LeaseLostError, LedgerUnavailableError, PositionConflictError
from headrace.ledger.postgres_engine import STATEMENT_TIMEOUT_MS, BoundedConnection
from headrace.ledger.receiving.tables import AddedBlock, ReceiverLease
from headrace.ledger.tables import JobLease

STREAM, RECEIVERS = "flights", 4
SECONDS = 60.0
PARTITIONS = [TopicPartition("departures", "id-1", number) for number in range(RECEIVERS)]


@dataclass
class Receivers:
    """The receivers of a stream with one partition each; every add is in a thread of its own."""

    ledger: Ledger
    job: JobLease
    leases: list[ReceiverLease]
    threads: ThreadPoolExecutor
    cut_time_ms: int
    stops: dict[threading.Thread, tuple[threading.Event, threading.Event]] = field(default_factory=dict)

    def stop(self, _connection: Connection) -> None:
        """Called before each commit: stop if this thread is to."""
        if threading.current_thread() in self.stops:
            here, go_on = self.stops.pop(threading.current_thread())
            here.set()
            assert go_on.wait(SECONDS)

    def block(self, index: int, number: int = 0, **changed: Any) -> BlockInfo:
        start = 10 * number
        values = {
            "receiver": self.leases[index].receiver_id, "epoch": self.leases[index].epoch, "sequence": number,
            "cut_time_ms": self.cut_time_ms, "handle": BlockHandle(f"segment-{index}", start, 10),
            "ranges": (OffsetRange(PARTITIONS[index], start, start + 10, 10),), "records": 10, "payload_bytes": 10,
        }  # fmt: skip
        return BlockInfo(**{**values, **changed})

    def add(self, index: int, number: int = 0, **changed: Any) -> Future[AddedBlock]:
        return self.threads.submit(self.ledger.blocks.add, self.leases[index], self.block(index, number, **changed))

    @contextmanager
    def stopped(self, index: int, number: int = 0) -> Iterator[Future[AddedBlock]]:
        """The add of a receiver whose transaction has done everything but its commit, until the block ends."""
        here, go_on = threading.Event(), threading.Event()

        def add() -> AddedBlock:
            self.stops[threading.current_thread()] = (here, go_on)
            return self.ledger.blocks.add(self.leases[index], self.block(index, number))

        adding = self.threads.submit(add)
        try:
            assert here.wait(SECONDS), adding
            yield adding
        finally:
            go_on.set()
            adding.exception(SECONDS)

    def await_waiting(self, count: int = 1) -> None:
        """Wait until so many transactions wait for a lock."""
        query = text("SELECT count(*) FROM pg_locks WHERE NOT granted AND locktype = 'advisory'")
        deadline = time.monotonic() + SECONDS
        while True:
            with self.ledger.blocks._database.read() as connection:
                waiting = connection.execute(query).scalar_one()
            if waiting == count:
                return
            assert time.monotonic() < deadline, f"{waiting} transactions wait, not {count}"

    def positions(self) -> list[int]:
        return [row.next_offset for row in self.ledger.positions.all(STREAM)]

    @property
    def end_ms(self) -> int:
        """The batch time of the blocks that are cut now."""
        return self.ledger.streams.get(STREAM).batch_time_after(self.cut_time_ms)


@pytest.fixture
def receivers(ledger_url: str) -> Iterator[Receivers]:
    with Ledger.open(ledger_url) as ledger, ThreadPoolExecutor(8) as threads:
        # An interval as long as a day: no test sees its end.
        ledger.streams.register(STREAM, "{}", batch_interval_ms=86_400_000, block_interval_ms=200)
        job = ledger.jobs.acquire(STREAM, holder="driver", lease_ms=600_000)
        ledger.topics.observe(job, "kafka", [("departures", "id-1", RECEIVERS)])
        ledger.positions.ensure_all(job, "kafka", dict.fromkeys(PARTITIONS, 0))
        ledger.positions.assign(job, "kafka", {partition: partition.partition for partition in PARTITIONS})
        scheduled = [ledger.receivers.schedule(job, ReceiverId(STREAM, "kafka", number)) for number in range(RECEIVERS)]
        leases = [ledger.receivers.register(one, host="here", lease_ms=600_000) for one in scheduled]
        receivers = Receivers(ledger, job, leases, threads, ledger.now_ms())
        event.listen(ledger.blocks._database.engine, "commit", receivers.stop)
        yield receivers
        event.remove(ledger.blocks._database.engine, "commit", receivers.stop)


def test_receivers_of_a_stream_do_not_wait_for_each_other(receivers: Receivers) -> None:
    with receivers.stopped(0) as first:
        for number in range(2):
            for index in (1, 2, 3):
                assert not receivers.add(index, number).result(SECONDS).duplicate
        assert not first.done()
        assert receivers.positions() == [0, 20, 20, 20]
    assert first.result().batch_time_ms
    assert receivers.positions() == [10, 20, 20, 20]
    (time_row,) = receivers.ledger.blocks.unclaimed(STREAM)
    assert (time_row.blocks, time_row.records, time_row.payload_bytes) == (7, 70, 70)
    waiting = receivers.ledger.blocks.waiting(STREAM, time_row.batch_time_ms)
    assert waiting is not None
    assert (waiting.batch_times, waiting.records) == (1, 70)


def test_a_refused_block_refuses_nobody_else(receivers: Receivers) -> None:
    with receivers.stopped(0) as first, receivers.stopped(1) as second:
        hole = receivers.add(2, ranges=(OffsetRange(PARTITIONS[2], 5, 10, 5),))
        assert isinstance(hole.exception(SECONDS), PositionConflictError)
        stale = receivers.threads.submit(
            receivers.ledger.blocks.add, receivers.leases[3], receivers.block(3, epoch=receivers.leases[3].epoch + 1)
        )
        assert isinstance(stale.exception(SECONDS), LeaseLostError)
        # What was refused is not used up.
        assert not receivers.add(2).result(SECONDS).duplicate
    assert first.result().block_id < second.result().block_id
    assert receivers.positions() == [10, 10, 10, 0]


def test_an_error_of_one_transaction_leaves_the_others(receivers: Receivers) -> None:
    end = text(
        "SELECT pg_terminate_backend(pid, 30000) FROM pg_stat_activity "
        "WHERE state = 'idle in transaction' AND datname = current_database()"
    )
    with receivers.stopped(0) as first:
        assert not receivers.add(1).result(SECONDS).duplicate
        engine = create_engine(receivers.ledger.blocks._database.engine.url)
        with engine.connect() as connection:
            assert connection.execute(end).scalars().all() == [True]
        engine.dispose()
    assert isinstance(first.exception(), LedgerUnavailableError)
    assert receivers.positions() == [0, 10, 0, 0]
    # As a receiver does after such an error: it asks for its own block.
    assert not receivers.add(0).result(SECONDS).duplicate
    assert receivers.positions() == [10, 10, 0, 0]


def test_a_receiver_finds_its_block_after_a_commits_lost_answer(
    receivers: Receivers, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit, lost = BoundedConnection.commit, threading.Event()

    def losing_its_answer(connection: BoundedConnection) -> None:
        # A new connection is set up by a transaction too.
        adds = connection.bound_seconds > STATEMENT_TIMEOUT_MS / 1000
        commit(connection)
        if adds and not lost.is_set():
            lost.set()
            connection.pgconn.finish()
            raise psycopg.OperationalError("the connection was lost")

    with receivers.stopped(1) as second:
        monkeypatch.setattr(BoundedConnection, "commit", losing_its_answer)
        assert isinstance(receivers.add(0).exception(SECONDS), LedgerUnavailableError)
        again = receivers.add(0).result(SECONDS)
    assert again.duplicate
    assert not second.result().duplicate
    assert receivers.positions() == [10, 10, 0, 0]
    stored = receivers.ledger.blocks.of_times(STREAM, [again.batch_time_ms])
    assert sorted(block.block_id for block in stored) == sorted([again.block_id, second.result().block_id])


def test_a_block_asked_for_while_being_added_is_waited_for(receivers: Receivers) -> None:
    with receivers.stopped(0) as first:
        again = receivers.add(0)
        receivers.await_waiting()
        assert not again.done()
    assert (again.result(SECONDS).block_id, again.result().duplicate) == (first.result().block_id, True)
    assert receivers.positions() == [10, 0, 0, 0]


def _sealed(receivers: Receivers, time_ms: int) -> None:
    """Seal a batch time, though it has not come."""
    database = receivers.ledger.blocks._database
    with database.write_stream(STREAM) as (connection, _):
        connection.execute(text("UPDATE streams SET sealed_until_ms = :time"), {"time": time_ms})


def test_sealing_waits_for_begun_blocks_and_later_blocks_for_it(receivers: Receivers) -> None:
    time_ms = receivers.end_ms
    with receivers.stopped(0) as first:
        sealing = receivers.threads.submit(_sealed, receivers, time_ms)
        receivers.await_waiting()
        # The queue is fair: otherwise receivers that take turns would keep a batch from being allocated for ever.
        second = receivers.add(1)
        receivers.await_waiting(2)
        assert not sealing.done()
        assert not second.done()
    sealing.result(SECONDS)
    assert first.result().batch_time_ms == time_ms
    assert second.result(SECONDS).batch_time_ms == time_ms + 86_400_000
    assert [block.block_id for block in receivers.ledger.allocations.blocks_of(STREAM, time_ms)] == [
        first.result().block_id
    ]


Change = Callable[[Receivers], object]


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda r: r.ledger.receivers.schedule(r.job, r.leases[0].receiver_id), id="a new epoch"),
        pytest.param(lambda r: r.ledger.jobs.release(r.job), id="the job's end"),
    ],
)
def test_fencing_waits_for_a_block_that_is_being_added(receivers: Receivers, change: Change) -> None:
    with receivers.stopped(0) as first:
        fencing = receivers.threads.submit(change, receivers)
        receivers.await_waiting()
        assert not fencing.done()
    fencing.result(SECONDS)
    assert first.result().block_id
    assert isinstance(receivers.add(0, 1).exception(SECONDS), LeaseLostError)


def test_events_of_blocks_are_read_without_a_gap(receivers: Receivers) -> None:
    page = receivers.ledger.events.page
    with receivers.stopped(0) as first:
        # Its event has a higher id, and is there before that of the first.
        second = receivers.add(1).result(SECONDS)
        reading = receivers.threads.submit(page, STREAM, kinds=[EventKind.BLOCK_ADDED])
        receivers.await_waiting()
        assert not reading.done()
        # What is not about blocks is added under the stream's own lock.
        assert receivers.threads.submit(page, STREAM, blocks=False).result(SECONDS)
    first.result()
    assert [row.payload["receiver"] for row in reading.result(SECONDS)] == ["flights/kafka/0", "flights/kafka/1"]
    assert second.block_id > first.result().block_id


@pytest.mark.parametrize("what", ["a heartbeat", "an advance", "a closed segment"])
def test_what_a_receiver_writes_of_its_own_does_not_wait_either(receivers: Receivers, what: str) -> None:
    lease, ledger = receivers.leases[1], receivers.ledger
    writes: dict[str, Callable[[], object]] = {
        "a heartbeat": lambda: ledger.receivers.heartbeat(lease, sealed_through_ms=1, drained={PARTITIONS[1]: 1}),
        "an advance": lambda: ledger.positions.advance(lease, PARTITIONS[1], 0, 5),
        "a closed segment": lambda: ledger.segments.closed(lease, "segment-1"),
    }
    with receivers.stopped(0) as first:
        receivers.threads.submit(writes[what]).result(SECONDS)
        assert not first.done()
