"""One of two processes in a race."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection
from typing import Any

from headrace.blocks import BlockHandle, BlockInfo, OffsetRange, TopicPartition
from headrace.ledger import Ledger
from headrace.ledger.errors import AllocationConflictError, AttemptFencedError, LeaseHeldError, LedgerError
from headrace.ledger.receiving.tables import ReceiverLease
from headrace.ledger.states import BatchState, EventKind


def _block(ledger: Ledger, lease: ReceiverLease, tp: TopicPartition, number: int, segment: str) -> BlockInfo:
    start = number * 10
    return BlockInfo(
        receiver=lease.receiver_id,
        epoch=lease.epoch,
        sequence=number,
        cut_time_ms=ledger.now_ms(),
        handle=BlockHandle(segment, start, 10),
        ranges=(OffsetRange(tp, start, start + 10, 10),),
        records=10,
        payload_bytes=10,
    )


def add_same(ledger: Ledger, me: str, lease: ReceiverLease, tp: TopicPartition, rounds: int) -> list[int]:
    """Add the same ranges as the other, from a segment of one's own; which were taken."""
    won = []
    for number in range(rounds):
        try:
            ledger.blocks.add(lease, _block(ledger, lease, tp, number, f"{me}-{number}"))
        except LedgerError:
            continue
        won.append(number)
    return won


def add_many(ledger: Ledger, me: str, lease: ReceiverLease, tp: TopicPartition, rounds: int) -> list[list[int]]:
    """Add blocks as fast as one can; their ids and batch times."""
    added = []
    for number in range(rounds):
        result = ledger.blocks.add(lease, _block(ledger, lease, tp, number, f"a-{lease.receiver_id.index}"))
        added.append([result.block_id, result.batch_time_ms])
    return added


def allocate(ledger: Ledger, me: str, stream: str, times: list[int]) -> list[list[Any]]:
    """Seal and allocate each time as the allocation task does; whose manifest stands, and the blocks in it."""
    allocated = []
    for time_ms in times:
        ledger.allocations.seal(stream, time_ms)
        blocks = ledger.allocations.blocks_of(stream, time_ms)
        row = ledger.allocations.allocate(
            stream, time_ms, manifest_uri=me, manifest_sha256="0", blocks_expected=len(blocks)
        )
        allocated.append([row.manifest_uri, row.blocks, [block.block_id for block in blocks]])
    return allocated


def chase(ledger: Ledger, me: str, stream: str, rounds: int, interval_ms: int) -> list[list[Any]]:
    """Allocate one batch time after the other, as soon as each has come."""
    first = (ledger.now_ms() // interval_ms - 1) * interval_ms
    times = [first + number * interval_ms for number in range(rounds)]
    return [[time_ms, *allocate(ledger, me, stream, [time_ms])[0][2]] for time_ms in times]


def follow(ledger: Ledger, me: str, stream: str, count: int) -> list[int]:
    """Read the events of ``count`` blocks as a listener does, while they are added; their ids."""
    read: list[int] = []
    after_id = 0
    deadline = time.monotonic() + 100
    while len(read) < count and time.monotonic() < deadline:
        for row in ledger.events.page(stream, after_id):
            after_id = row.event_id
            if row.kind == EventKind.BLOCK_ADDED:
                read.append(row.event_id)
    return read


def acquire(ledger: Ledger, me: str, streams: list[str]) -> list[str]:
    """Acquire each stream's job; which were got."""
    got = []
    for stream in streams:
        try:
            ledger.jobs.acquire(stream, holder=me, lease_ms=60_000)
        except LeaseHeldError:
            continue
        got.append(stream)
    return got


def attempt(ledger: Ledger, me: str, stream: str, times: list[int]) -> list[list[int]]:
    """Begin each batch, and complete it unless fenced; batch time, attempt, whether it completed it."""
    ended = []
    for time_ms in times:
        mine = ledger.attempts.begin(stream, time_ms, holder=me, way="connect", lease_ms=60_000, force=True)
        try:
            ledger.attempts.record_output(mine, "index", {"by": me})
            ledger.attempts.complete(mine)
        except AttemptFencedError:
            ended.append([time_ms, mine.number, 0])
        else:
            ended.append([time_ms, mine.number, 1])
    return ended


def write_output(ledger: Ledger, me: str, stream: str, times: list[int], outputs: dict[str, str]) -> list[list[str]]:
    """Write one output of each batch, another for each process; the states that the batches had after it."""
    states = []
    for time_ms in times:
        begun = {"holder": me, "way": "connect", "lease_ms": 60_000, "outputs": [outputs[me]]}
        mine = ledger.attempts.begin(stream, time_ms, **begun)
        ledger.attempts.record_output(mine, outputs[me], {"by": me})
        states.append(ledger.attempts.complete(mine).state.value)
    return states


def assign(ledger: Ledger, me: str, stream: str, rounds: int, shared: int) -> list[int]:
    """Ask for the batch times of runs: the first ``shared`` runs are the other's too."""
    names = [f"run-{number}" if number < shared else f"{me}-{number}" for number in range(rounds)]
    return [ledger.runs.assign(stream, name) for name in names]


def absorb(ledger: Ledger, me: str, stream: str, times: list[int]) -> list[list[int]]:
    """Allocate each time with all unclaimed ones before it; the times that each batch took."""
    taken = []
    for time_ms in times:
        ledger.allocations.seal(stream, time_ms)
        while True:
            earlier = ledger.batches.absorbable(stream, time_ms)
            count = len(ledger.allocations.blocks_of(stream, time_ms, absorb=earlier))
            try:
                row = ledger.allocations.allocate(
                    stream,
                    time_ms,
                    manifest_uri=me,
                    manifest_sha256="0",
                    blocks_expected=count,
                    absorb=earlier,
                )
            except AllocationConflictError:
                continue
            break
        if row.manifest_uri == me and row.state is BatchState.ALLOCATED:
            taken.append([*row.absorbed, time_ms])
    return taken


def migrate(ledger: None, me: str, url: str) -> str:
    """Open a ledger that has no schema yet."""
    opened = Ledger.open(url)
    opened.streams.register(me, "{}", batch_interval_ms=1000, block_interval_ms=200)
    return me


def run(test: Connection, url: str, scenario: str, arguments: tuple[Any, ...]) -> None:
    """Send "ready", receive this process's name, run the scenario and send its results."""
    ledger = Ledger.open(url, create=False) if scenario != "migrate" else None
    if ledger is not None:
        ledger.now_ms()
    test.send("ready")
    me = test.recv()
    test.send(globals()[scenario](ledger, me, *arguments))
