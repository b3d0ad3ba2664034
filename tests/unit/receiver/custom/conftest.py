"""A stream over a custom receiver, with a real log and a real ledger."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.receiver.conftest import Running
from tests.unit.receiver.custom.custom_receivers import Numbers
from tests.unit.receiver.waiting import eventually

from headrace.blocks import ReceiverId
from headrace.ledger import EventKind, Ledger
from headrace.ledger.tables import JobLease
from headrace.receiver.partitioning import Partitioning, ReceiverDiscoverer
from headrace.receiver.supervisor import receive
from headrace.stream import ConsoleOutput, Limits, ReceiverInput, Stream
from headrace.stream_context import StreamContext
from headrace.wal.reader import read_block

RECEIVERS = "tests.unit.receiver.custom.custom_receivers"


class CustomSetting:
    """The receivers of a stream named "air" with the input "lines"; `discover` gives each its partition."""

    def __init__(self, stream: Stream, ledger: Ledger, job: JobLease) -> None:
        self.ledger, self.job = ledger, job
        self.context = StreamContext(stream, ledger)
        (self.source,) = stream.inputs

    def discover(self, *live: int) -> None:
        """Do what the tracker does when these receivers are live."""
        partitioning = Partitioning(self.context, self.source, self.job, grace_ms=10_000)
        assert isinstance(self.source, ReceiverInput)
        partitioning.apply(ReceiverDiscoverer(self.source).discover(partitioning.known()))
        partitioning.rebalance(live, self.ledger.now_ms())

    def start(self, index: int = 0) -> Running:
        receiver_id = ReceiverId("air", "lines", index)
        scheduled = self.ledger.receivers.schedule(self.job, receiver_id)
        return Running(lambda stop: receive(self.context, scheduled, stop=stop))

    def receiver(self, starts: int = 1) -> Numbers:
        """The newest of so many receivers, once it has started."""
        eventually(lambda: len(Numbers.made) >= starts and Numbers.made[-1].started.is_set())
        return Numbers.made[-1]

    def receiver_of(self, index: int) -> Numbers:
        """The receiver with this index, once it has started."""
        eventually(lambda: any(numbers.started.is_set() and numbers.index == index for numbers in Numbers.made))
        return next(numbers for numbers in Numbers.made if numbers.started.is_set() and numbers.index == index)

    def stored(self) -> list[tuple[int, int, bytes]]:
        """(partition, offset, value) of every accepted block, read back from the log."""
        return [(row["partition"], row["offset"], row["value"]) for row in self.rows()]

    def rows(self) -> list[dict[str, Any]]:
        rows = []
        for unclaimed in self.ledger.blocks.unclaimed("air"):
            for block in self.ledger.allocations.blocks_of("air", unclaimed.batch_time_ms):
                _, batch = read_block(self.context.storage.below("log"), block.info.handle)
                rows += batch.to_pylist()
        return sorted(rows, key=lambda row: (row["partition"], row["offset"]))

    def values(self) -> list[bytes]:
        return [value for _, _, value in self.stored()]

    def errors(self) -> list[dict[str, Any]]:
        """The reported errors, oldest first."""
        return [event.payload for event in self.ledger.events.page("air", kinds=[EventKind.RECEIVER_ERROR])]

    def position(self) -> str | None:
        (row,) = self.ledger.positions.all("air")
        return row.source_position


MakeCustom = Callable[..., CustomSetting]


@pytest.fixture
def make_custom(tmp_path: Path, open_ledger: Callable[[Stream], tuple[Ledger, JobLease]]) -> Iterator[MakeCustom]:
    """Makes a setting of a receiver class, whose partitions are assigned."""

    def make(receiver: str = f"{RECEIVERS}:Numbers", *, limits: Limits | None = None, **fields: Any) -> CustomSetting:
        stream = Stream(
            name="air",
            inputs=ReceiverInput(id="lines", receiver=receiver, **fields),
            outputs=ConsoleOutput(id="console"),
            batch_interval="1 s",
            block_interval="20 ms",
            storage=str(tmp_path / "storage"),
            ledger=f"sqlite:///{tmp_path}/ledger.db",
            limits=limits or Limits(),
        )
        setting = CustomSetting(stream, *open_ledger(stream))
        setting.discover(*range(stream.inputs[0].receivers))
        return setting

    Numbers.made.clear()
    Numbers.on_start_error = None
    yield make
    Numbers.made.clear()
    Numbers.on_start_error = None
