"""A ledger, a clock that stands still, and a stream with one receiver. The integration leg overrides `ledger_url`."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from headrace.blocks import BlockHandle, BlockInfo, OffsetRange, ReceiverId, TopicPartition
from headrace.clock import ManualClock
from headrace.ledger import Ledger
from headrace.ledger.batches.tables import BatchRow
from headrace.ledger.receiving.tables import AddedBlock, ReceiverLease
from headrace.ledger.tables import JobLease

NOW_MS = 1_700_000_000_000
INTERVAL_MS = 1_000
STREAM = "flights"
INPUT = "kafka"
DEFINITION = '{"outputs": [{"id": "index"}], "limits": {"max_concurrent_batches": 1}}'


@pytest.fixture(scope="session")
def empty_ledger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty SQLite ledger, to be copied: making the schema takes longer than a test."""
    path = tmp_path_factory.mktemp("ledger") / "ledger.db"
    Ledger.open(f"sqlite:///{path}").close()
    return path


@pytest.fixture
def ledger_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    shutil.copy(request.getfixturevalue("empty_ledger"), tmp_path / "ledger.db")
    return f"sqlite:///{tmp_path}/ledger.db"


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(NOW_MS)


@pytest.fixture
def ledger(ledger_url: str, clock: ManualClock) -> Iterator[Ledger]:
    with Ledger.open(ledger_url, clock=clock) as ledger:
        yield ledger


@dataclass
class World:
    """A registered stream with a job, a topic of three partitions and one receiver that owns them."""

    ledger: Ledger
    clock: ManualClock
    job: JobLease
    partitions: tuple[TopicPartition, ...]
    receiver: ReceiverLease
    sequences: dict[tuple[int, int], int] = field(default_factory=dict)

    def lease(self, index: int = 1) -> ReceiverLease:
        """Register another receiver, or another instance of one."""
        receiver_id = ReceiverId(STREAM, INPUT, index)
        return self.ledger.receivers.register(
            self.ledger.receivers.schedule(self.job, receiver_id), host="here", lease_ms=10_000
        )

    def position(self, partition: int = 0) -> int:
        rows = self.ledger.positions.all(STREAM)
        return next(row.next_offset for row in rows if row.partition == self.partitions[partition])

    def block(
        self, offsets: Mapping[int, tuple[int, int]], *, lease: ReceiverLease | None = None, **overrides: Any
    ) -> BlockInfo:
        """The receiver's next block, of these offsets by partition."""
        lease = lease or self.receiver
        key = (lease.receiver_id.index, lease.epoch)
        sequence = overrides.pop("sequence", self.sequences.get(key, 0))
        self.sequences[key] = sequence + 1
        records = sum(until - start for start, until in offsets.values())
        fields: dict[str, Any] = {
            "receiver": lease.receiver_id,
            "epoch": lease.epoch,
            "sequence": sequence,
            "cut_time_ms": self.clock.now_ms(),
            "handle": BlockHandle(f"{key[0]}-{key[1]}-a", sequence * 100, 100),
            "ranges": tuple(
                OffsetRange(self.partitions[partition], start, until, until - start)
                for partition, (start, until) in offsets.items()
            ),
            "records": records,
            "payload_bytes": records * 10,
        }
        return BlockInfo(**(fields | overrides))

    def add(self, offsets: Mapping[int, tuple[int, int]], **overrides: Any) -> AddedBlock:
        """Add the receiver's next block."""
        epoch_ends = overrides.pop("epoch_ends", {})
        block = self.block(offsets, **overrides)
        return self.ledger.blocks.add(overrides.get("lease") or self.receiver, block, epoch_ends)

    def allocate(self, batch_time_ms: int, **overrides: Any) -> BatchRow:
        """Seal and allocate as the allocation task does."""
        self.ledger.allocations.seal(STREAM, batch_time_ms)
        arguments: dict[str, Any] = {"manifest_uri": f"m/{batch_time_ms}", "manifest_sha256": "0" * 64}
        arguments["blocks_expected"] = len(self.ledger.allocations.blocks_of(STREAM, batch_time_ms))
        return self.ledger.allocations.allocate(STREAM, batch_time_ms, **(arguments | overrides))

    def complete(self, batch_time_ms: int, *, checkpoint: bool = True, **overrides: Any) -> BatchRow:
        """Run a batch to its end."""
        batches = self.ledger.batches
        attempt = self.ledger.attempts.begin(
            STREAM, batch_time_ms, **({"holder": "task", "way": "connect", "lease_ms": 5_000} | overrides)
        )
        for output in attempt.outputs:
            self.ledger.attempts.record_output(attempt, output, {"indexed": 1})
        batch = self.ledger.attempts.complete(attempt)
        if not checkpoint:
            return batch
        batches.mark_checkpointed(STREAM, [batch.filed("r/1", self.ledger.now_ms())])
        return batches.get(STREAM, batch_time_ms)


@pytest.fixture
def build(ledger: Ledger, clock: ManualClock) -> Callable[..., World]:
    """Builds the world; options go to the stream's registration."""

    def build(partitions: int = 3, **options: Any) -> World:
        settings = {"batch_interval_ms": INTERVAL_MS, "block_interval_ms": 200} | options
        ledger.streams.register(STREAM, DEFINITION, **settings)
        job = ledger.jobs.acquire(STREAM, holder="driver", lease_ms=10_000)
        (topic,) = ledger.topics.observe(job, INPUT, [("departures", "id-1", partitions)])
        owned = tuple(TopicPartition("departures", "id-1", index, topic.incarnation) for index in range(partitions))
        ledger.positions.ensure_all(job, INPUT, dict.fromkeys(owned, 0))
        ledger.positions.assign(job, INPUT, dict.fromkeys(owned, 0))
        lease = ledger.receivers.register(
            ledger.receivers.schedule(job, ReceiverId(STREAM, INPUT, 0)), host="here", lease_ms=10_000
        )
        return World(ledger, clock, job, owned, lease)

    return build


@pytest.fixture
def world(build: Callable[..., World]) -> World:
    return build()


@pytest.fixture
def fresh_url(tmp_path: Path) -> str:
    """A database that nobody has opened yet."""
    return f"sqlite:///{tmp_path}/fresh.db"
