"""Two processes that want the same: the database decides, and exactly one gets it."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any

import pytest
from sqlalchemy import update
from tests.unit.ledger.race import run

from headrace.blocks import BlockHandle, BlockInfo, OffsetRange, ReceiverId, TopicPartition
from headrace.ledger import AttemptState, BatchState, EventKind, Ledger
from headrace.ledger.errors import LeaseLostError, PositionConflictError
from headrace.ledger.receiving.tables import ReceiverLease, positions, receivers
from headrace.ledger.tables import streams

ROUNDS = 40


# A racing process is forked from one that has imported the ledger, and has opened none: the import takes longer than
# the race.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["headrace.ledger"])


def race(url: str, *runners: tuple[Any, ...]) -> list[Any]:
    """Run (scenario, arguments…) in a process each, started together; their results in order."""
    with ExitStack() as stack:
        connections, processes = [], []
        for scenario, *arguments in runners:
            connection, its_end = PROCESSES.Pipe()
            process = PROCESSES.Process(target=run, args=(its_end, url, scenario, tuple(arguments)), daemon=True)
            process.start()
            its_end.close()
            stack.callback(process.join)
            stack.callback(process.kill)
            connections.append(stack.enter_context(connection))
            processes.append(process)
        assert [receive(connection) for connection in connections] == ["ready"] * len(runners)
        for number, connection in enumerate(connections):
            connection.send(f"runner-{number}")
        results = [receive(connection) for connection in connections]
        for process in processes:
            process.join(30)
        assert [process.exitcode for process in processes] == [0] * len(processes)
        return results


def receive(connection: Connection) -> Any:
    """What the process sends next. Raises EOFError if it has ended."""
    assert connection.poll(120), "a process of the race hangs"
    return connection.recv()


@pytest.fixture
def live(ledger_url: str) -> Iterator[Ledger]:
    """A ledger by the database's own clock, as the racing processes have it."""
    with Ledger.open(ledger_url) as ledger:
        yield ledger


def receiver(
    ledger: Ledger, interval_ms: int = 1000, outputs: tuple[str, ...] = ("index",)
) -> tuple[ReceiverLease, TopicPartition]:
    (first,) = several(ledger, 1, interval_ms, outputs)
    return first


def several(
    ledger: Ledger, count: int, interval_ms: int, outputs: tuple[str, ...] = ("index",)
) -> list[tuple[ReceiverLease, TopicPartition]]:
    """So many receivers, with a partition each."""
    definition = '{"outputs": [{"id": "index"}], "limits": {"max_concurrent_batches": 1000}}'
    ledger.streams.register(
        "flights", definition, batch_interval_ms=interval_ms, block_interval_ms=200, outputs=outputs
    )
    job = ledger.jobs.acquire("flights", holder="driver", lease_ms=60_000)
    (topic,) = ledger.topics.observe(job, "kafka", [("departures", "id-1", count)])
    partitions = [TopicPartition("departures", "id-1", number, topic.incarnation) for number in range(count)]
    ledger.positions.ensure_all(job, "kafka", dict.fromkeys(partitions, 0))
    ledger.positions.assign(job, "kafka", {tp: tp.partition for tp in partitions})
    scheduled = [ledger.receivers.schedule(job, ReceiverId("flights", "kafka", number)) for number in range(count)]
    leases = [ledger.receivers.register(one, host="here", lease_ms=60_000) for one in scheduled]
    return list(zip(leases, partitions, strict=True))


def test_of_two_that_add_the_same_range_one_wins(live: Ledger) -> None:
    lease, tp = receiver(live)
    first, second = race(live.url, ("add_same", lease, tp, ROUNDS), ("add_same", lease, tp, ROUNDS))
    # One that is refused its range may find the next ones taken too, but none is taken twice, and none skipped.
    won = sorted(first + second)
    assert won == list(range(len(won)))
    assert won
    (position,) = live.positions.all("flights")
    assert position.next_offset == 10 * len(won)


def test_of_two_that_allocate_a_batch_one_manifest_stands(live: Ledger) -> None:
    lease, tp = receiver(live, interval_ms=10)
    race(live.url, ("add_many", lease, tp, ROUNDS))
    times = [row.batch_time_ms for row in live.blocks.unclaimed("flights")]
    first, second = race(live.url, ("allocate", "flights", times), ("allocate", "flights", times))
    assert first == second
    taken = [block for _, _, ids in first for block in ids]
    assert sorted(taken) == sorted(set(taken))
    assert len(taken) == ROUNDS
    assert live.blocks.unclaimed("flights") == []


def test_a_block_added_beside_allocations_is_in_one_batch(live: Ledger) -> None:
    lease, tp = receiver(live, interval_ms=5)
    added, allocated = race(live.url, ("add_many", lease, tp, 3 * ROUNDS), ("chase", "flights", 4 * ROUNDS, 5))
    by_time: dict[int, list[int]] = {}
    for block_id, time_ms in added:
        by_time.setdefault(time_ms, []).append(block_id)
    claimed = {time_ms: ids for time_ms, *ids in allocated}
    for time_ms, ids in claimed.items():
        assert ids == by_time.get(time_ms, [])
        assert live.batches.get("flights", time_ms).blocks == len(ids)
    left = {row.batch_time_ms: row.blocks for row in live.blocks.unclaimed("flights")}
    assert left == {time_ms: len(ids) for time_ms, ids in by_time.items() if time_ms not in claimed}
    # The batches' ranges of the partition join without overlap, but for what was added before the first of them.
    reached = 0
    for time_ms in sorted({*claimed, *left}):
        reached += 10 * left.get(time_ms, 0)
        for taken in live.batches.inputs("flights", time_ms) if time_ms in claimed else ():
            assert taken.from_offset == reached
            reached = taken.until_offset


def test_a_block_added_during_allocations_is_in_one_batch_only(live: Ledger) -> None:
    """Many receivers add blocks, and each is in exactly one batch."""
    adders = [("add_many", lease, tp, ROUNDS // 2) for lease, tp in several(live, 4, interval_ms=20)]
    *added, first, second, events = race(
        live.url, *adders, *[("chase", "flights", ROUNDS, 20)] * 2, ("follow", "flights", 2 * ROUNDS)
    )
    # Both allocators got the same blocks for a time that both have.
    claimed = {time_ms: ids for time_ms, *ids in first} | {time_ms: ids for time_ms, *ids in second}
    assert all(claimed[time_ms] == ids for time_ms, *ids in first)
    by_time: dict[int, list[int]] = {}
    for block_id, time_ms in sorted(block for blocks in added for block in blocks):
        by_time.setdefault(time_ms, []).append(block_id)
    for time_ms, ids in claimed.items():
        assert ids == by_time.get(time_ms, [])
        assert live.batches.get("flights", time_ms).blocks == len(ids)
    left = {row.batch_time_ms: row.blocks for row in live.blocks.unclaimed("flights")}
    assert left == {time_ms: len(ids) for time_ms, ids in by_time.items() if time_ms not in claimed}
    for blocks in added:
        # A receiver's blocks are in the order of their batch times.
        assert blocks == sorted(blocks)
        assert [time_ms for _, time_ms in blocks] == sorted(time_ms for _, time_ms in blocks)
    # Who reads by id has got each event once, while others with lower ids were still being added.
    assert events == sorted(set(events))
    assert len(events) == 2 * ROUNDS


def test_of_two_jobs_one_gets_the_lease(live: Ledger) -> None:
    streams = [f"stream-{number}" for number in range(ROUNDS)]
    for stream in streams:
        live.streams.register(stream, "{}", batch_interval_ms=1000, block_interval_ms=200)
    first, second = race(live.url, ("acquire", streams), ("acquire", streams))
    assert sorted(first + second) == sorted(streams)
    for stream in streams:
        job = live.jobs.current(stream)
        assert job is not None
        assert (job.epoch, job.holder) == (1, "runner-0" if stream in first else "runner-1")


def test_of_two_attempts_the_newer_completes_the_batch(live: Ledger) -> None:
    receiver(live, interval_ms=10)
    last = live.now_ms() // 10 * 10
    times = [last - 10 * number for number in range(ROUNDS)]
    for time_ms in times:
        live.allocations.allocate("flights", time_ms, manifest_uri="m", manifest_sha256="0", blocks_expected=0)
    ended = race(live.url, ("attempt", "flights", times), ("attempt", "flights", times))
    completed = {(time_ms, number) for runner in ended for time_ms, number, done in runner if done}
    for time_ms in times:
        attempts = live.attempts.of_batch("flights", time_ms)
        assert [row.number for row in attempts] == [1, 2]
        assert attempts[1].state is AttemptState.COMPLETED
        # The first has completed before the second began, or was fenced by it.
        assert attempts[0].state is (AttemptState.COMPLETED if (time_ms, 1) in completed else AttemptState.FENCED)
        (output,) = live.attempts.outputs("flights", time_ms)
        assert (output.attempt, output.counts) == (2, {"by": attempts[1].holder})


def test_of_two_outputs_ending_at_once_the_last_ends_the_batch(live: Ledger) -> None:
    receiver(live, interval_ms=10, outputs=("index", "files"))
    last = live.now_ms() // 10 * 10
    times = [last - 10 * number for number in range(ROUNDS)]
    for time_ms in times:
        live.allocations.allocate("flights", time_ms, manifest_uri="m", manifest_sha256="0")
    outputs = {"runner-0": "index", "runner-1": "files"}
    ended = race(live.url, *[("write_output", "flights", times, outputs)] * 2)
    for time_ms, states in zip(times, zip(*ended, strict=True), strict=True):
        # One of them, and only one, heard that the batch had completed.
        assert sorted(states) in (["completed", "running"], ["allocated", "completed"])
        assert live.batches.get("flights", time_ms).state is BatchState.COMPLETED
        assert {row.output_id: row.counts["by"] for row in live.attempts.outputs("flights", time_ms)} == {
            output: runner for runner, output in outputs.items()
        }
        kinds = [event.kind for event in live.events.of_batch("flights", time_ms)]
        assert kinds.count(EventKind.BATCH_COMPLETED) == 1


def test_of_two_runs_that_ask_at_once_each_gets_its_time(live: Ledger) -> None:
    lease, tp = receiver(live, interval_ms=5)
    race(live.url, ("add_many", lease, tp, 3 * ROUNDS))
    times = [row.batch_time_ms for row in live.blocks.unclaimed("flights")]
    rounds = len(times) // 2
    first, second = race(live.url, *[("assign", "flights", rounds, 2)] * 2)
    assert first[:2] == second[:2]
    own = [*first, *second[2:]]
    assert sorted(own) == times[: len(own)]


def test_of_two_that_coalesce_each_time_is_taken_once(live: Ledger) -> None:
    lease, tp = receiver(live, interval_ms=5)
    race(live.url, ("add_many", lease, tp, 3 * ROUNDS))
    times = [row.batch_time_ms for row in live.blocks.unclaimed("flights")]
    first, second = race(live.url, *[("absorb", "flights", times[2::3])] * 2)
    taken = [time_ms for batch in first + second for time_ms in batch]
    assert sorted(taken) == [time_ms for time_ms in times if time_ms <= times[2::3][-1]]
    assert (
        sum(row.blocks for row in live.batches.page("flights", 1000))
        + sum(row.blocks for row in live.blocks.unclaimed("flights"))
        == 3 * ROUNDS
    )


def test_two_that_open_an_empty_database_migrate_it_once(fresh_url: str) -> None:
    assert race(fresh_url, *[("migrate", fresh_url)] * 3) == ["runner-0", "runner-1", "runner-2"]
    with Ledger.open(fresh_url, create=False) as ledger:
        assert len(ledger.streams.all()) == 3


def waiting_add(live: Ledger, lease: ReceiverLease, tp: TopicPartition, change: Any) -> Any:
    """The result of an add that begins while another transaction, making ``change``, holds the stream's lock."""
    info = BlockInfo(lease.receiver_id, lease.epoch, 0, 0, BlockHandle("a", 0, 1), (OffsetRange(tp, 0, 10, 10),), 10, 1)
    with ThreadPoolExecutor(1) as thread:
        with live.streams._database.write_stream("flights") as (connection, _):
            adding = thread.submit(live.blocks.add, lease, info)
            with pytest.raises(TimeoutError):
                adding.result(timeout=0.3)
            connection.execute(change)
        return adding.result(timeout=30)


def test_an_add_that_waited_sees_what_was_sealed_meanwhile(live: Ledger) -> None:
    lease, tp = receiver(live)
    sealed_ms = live.now_ms() // 1000 * 1000 + 60_000
    added = waiting_add(live, lease, tp, update(streams).values(sealed_until_ms=sealed_ms))
    assert added.batch_time_ms == sealed_ms + 1000


def test_an_add_that_waited_sees_that_it_was_fenced_meanwhile(live: Ledger) -> None:
    lease, tp = receiver(live)
    with pytest.raises(LeaseLostError):
        waiting_add(live, lease, tp, update(receivers).values(epoch=2))
    assert live.blocks.unclaimed("flights") == []


def test_an_add_that_waited_sees_that_its_partition_moved(live: Ledger) -> None:
    lease, tp = receiver(live)
    with pytest.raises(PositionConflictError):
        waiting_add(live, lease, tp, update(positions).values(next_offset=5))
    assert live.positions.all("flights")[0].next_offset == 5
