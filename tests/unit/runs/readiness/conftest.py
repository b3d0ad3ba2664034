"""A stream on a ledger with a clock set by hand, and its receiver job, by arrival and by timestamp."""

from __future__ import annotations

import pytest
from tests.support.records import TOPIC_ID

from headrace.blocks import BlockHandle, BlockInfo, OffsetRange, ReceiverId, TopicPartition
from headrace.clock import ManualClock
from headrace.hooks.ledger import register
from headrace.ledger import Ledger
from headrace.runs.readiness import blocks_ready
from headrace.stream import ConsoleOutput, KafkaInput, Stream

T = 1_700_000_000_000


@pytest.fixture
def stream(tmp_path) -> Stream:
    return Stream(
        name="flights",
        inputs=KafkaInput(bootstrap_servers="localhost:9", topics="flights", receivers=2),
        outputs=ConsoleOutput(),
        batch_interval="10 s",
        storage=str(tmp_path / "storage"),
        ledger=f"sqlite:///{tmp_path}/ledger.db",
        spark={"master": "local[3]"},
    )


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(T)


@pytest.fixture
def ledger(stream, clock):
    with Ledger.open(stream.ledger, clock=clock) as opened:
        register(opened, stream)
        yield opened


class Job:
    def __init__(self, ledger: Ledger, receivers: int) -> None:
        self.ledger = ledger
        self.lease = ledger.jobs.acquire("flights", holder="test", lease_ms=30_000)
        self.leases = [
            ledger.receivers.register(
                ledger.receivers.schedule(self.lease, ReceiverId("flights", "records", n)), host="h", lease_ms=20_000
            )
            for n in range(receivers)
        ]

    def run(self, sealed: int = 0) -> Job:
        self.ledger.jobs.update(self.lease, state="running")
        for lease in self.leases:
            self.ledger.receivers.heartbeat(lease, sealed_through_ms=sealed)
        return self


def fail(ledger: Ledger, job: Job, error: str) -> None:
    partition = TopicPartition("flights", TOPIC_ID, 0)
    ledger.topics.observe(job.lease, "records", [("flights", TOPIC_ID, 1)])
    ledger.positions.ensure_all(job.lease, "records", {partition: 0})
    ledger.positions.assign(job.lease, "records", {partition: 0})
    ledger.positions.fail(job.leases[0], partition, error)


class ByTimestamp:
    """A stream by timestamp with two partitions, each of a receiver of its own; the batch time is T."""

    def __init__(self, ledger: Ledger, clock: ManualClock) -> None:
        self.ledger, self.clock = ledger, clock
        self.partitions = [TopicPartition("flights", TOPIC_ID, number) for number in range(2)]
        self.offsets = [0, 0]

    def run(self) -> ByTimestamp:
        self.job = Job(self.ledger, 2).run()
        self.ledger.topics.observe(self.job.lease, "records", [("flights", TOPIC_ID, 2)])
        self.ledger.positions.ensure_all(self.job.lease, "records", dict.fromkeys(self.partitions, 0))
        self.ledger.positions.assign(self.job.lease, "records", {tp: n for n, tp in enumerate(self.partitions)})
        return self

    def store(self, number: int, event_time_ms: int) -> None:
        lease, at = self.job.leases[number], self.offsets[number]
        block = BlockInfo(
            lease.receiver_id, lease.epoch, at, T, BlockHandle(f"{number}.wal", at, 1),
            (OffsetRange(self.partitions[number], at, at + 1, 1),), 1, 1, event_time_ms,
        )  # fmt: skip
        self.ledger.blocks.add(lease, block)
        self.offsets[number] += 1

    def drain(self, number: int) -> None:
        """Everything that Kafka has of it at this moment is stored."""
        claims = {self.partitions[number]: self.clock.now_ms()}
        self.ledger.receivers.heartbeat(self.job.leases[number], sealed_through_ms=0, drained=claims)

    def ask(self, batch_time_ms: int = T) -> tuple[bool, str]:
        readiness = blocks_ready(self.ledger, "flights", batch_time_ms=batch_time_ms, grace_ms=1)
        return readiness.ready, readiness.reason
