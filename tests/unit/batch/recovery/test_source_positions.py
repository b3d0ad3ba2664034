"""A custom receiver whose ledger is lost: its source is read again from where it stood in the log."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from tests.unit.receiver.conftest import Running

from headrace.batch.checkpoint import checkpoint_now
from headrace.batch.recover import recover
from headrace.blocks import ReceiverId
from headrace.clock import SystemClock
from headrace.ledger import Ledger
from headrace.receiver.partitioning import Partitioning, ReceiverDiscoverer
from headrace.receiver.supervisor import receive
from headrace.stream import ConsoleOutput, ReceiverInput, Stream
from headrace.stream_context import StreamContext
from headrace.wal.reader import read_block


class LaterClock(SystemClock):
    """An hour later, so that nothing of the lost ledger can still run."""

    def now_ms(self) -> int:
        return super().now_ms() + 3_600_000


def counting_to(until: int, folder: Path, ledger_url: str) -> Stream:
    """A stream over the numbers from 0, in calls of ten, each with its position."""
    return Stream(
        name="numbers",
        inputs=ReceiverInput(
            id="lines",
            receiver="tests.unit.receiver.custom.custom_receivers:Counter",
            arguments={"until": until},
        ),
        outputs=ConsoleOutput(id="console"),
        batch_interval="1 s",
        block_interval="10 ms",
        storage=str(folder / "storage"),
        ledger=ledger_url,
    )


def receive_until(context: StreamContext, records: int) -> None:
    """Run the receiver until so many records were ever received; then stop it as its job does."""
    ledger, stream = context.ledger, context.stream
    ledger.streams.register(stream.name, stream.to_json(), batch_interval_ms=1_000, block_interval_ms=10)
    job = ledger.jobs.acquire(stream.name, holder="test", lease_ms=60_000)
    (source,) = stream.inputs
    assert isinstance(source, ReceiverInput)
    partitioning = Partitioning(context, source, job, grace_ms=10_000)
    partitioning.apply(ReceiverDiscoverer(source).discover(partitioning.known()))
    partitioning.rebalance([0], ledger.now_ms())
    receiver_id = ReceiverId(stream.name, "lines", 0)
    scheduled = context.ledger.receivers.schedule(job, receiver_id)
    running = Running(lambda stop: receive(context, scheduled, stop=stop))
    until = time.monotonic() + 120
    while next(iter(ledger.positions.all(stream.name))).next_offset < records:
        assert time.monotonic() < until, "did not happen in time"
        time.sleep(0.01)
    running.end()


def values_in(context: StreamContext) -> list[int]:
    found = []
    for waiting in context.ledger.blocks.unclaimed(context.name):
        for block in context.ledger.allocations.blocks_of(context.name, waiting.batch_time_ms):
            found += read_block(context.storage.below("log"), block.info.handle)[1].column("value").to_pylist()
    return sorted(map(int, found))


def lose_and_go_on(tmp_path: Path, before_loss: Callable[[StreamContext], object]) -> None:
    old_url, new_url = (f"sqlite:///{tmp_path}/{name}.db" for name in ("old", "new"))
    with Ledger.open(old_url) as lost:
        context = StreamContext(counting_to(40, tmp_path, old_url), lost)
        receive_until(context, 40)
        before_loss(context)
    with Ledger.open(new_url, clock=LaterClock()) as rebuilt:
        stream = counting_to(70, tmp_path, new_url)
        context = StreamContext(stream, rebuilt, clock=LaterClock())
        recover("numbers", rebuilt, context.storage, definition=stream)
        (row,) = rebuilt.positions.all("numbers")
        assert (row.next_offset, row.source_position) == (40, "40")
        receive_until(context, 70)
        assert values_in(context) == list(range(70))


def test_a_rebuilt_ledger_has_the_position_of_the_last_block(tmp_path: Path) -> None:
    lose_and_go_on(tmp_path, lambda _: None)


def test_a_rebuilt_ledger_has_the_position_of_the_checkpoint(tmp_path: Path) -> None:
    def checkpoint(context: StreamContext) -> None:
        checkpoint_now(context, context.ledger.now_ms() // 1_000 * 1_000)

    lose_and_go_on(tmp_path, checkpoint)
