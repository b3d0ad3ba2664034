"""Log, ledger and receiver positions together, against a list in memory.

Whatever is produced, cut, refused by the disk, crashed at any point, restarted, moved between receivers or tried again
by a zombie: every offset is in exactly one of the ledger's blocks, and its record is read back from the log.
By timestamp, each is moreover in the interval of its partition's running maximum.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.support.ledger_rules import broken_rules

from headrace.blocks import ReceiverId, TopicPartition
from headrace.clock import ManualClock
from headrace.kafka.records import RecordChunk
from headrace.ledger import Ledger
from headrace.ledger.errors import LeaseLostError, LedgerUnavailableError
from headrace.receiver.block_generator import GeneratedBlock
from headrace.receiver.block_store import BlockStore, StoreCounts
from headrace.receiver.event_times import EventTimes
from headrace.receiver.kafka_source import KafkaReceiver
from headrace.receiver.pausing import Pausing
from headrace.receiver.receiver import StoreFailedError
from headrace.stream import Limits
from headrace.stream_context import StreamContext
from headrace.testing.fake_kafka import FakeConsumer, FakeEntry, FakeKafka
from headrace.wal.reader import read_block
from headrace.wal.storage import LocalStorage
from headrace.wal.writer import SegmentSettings, WriteAheadLogWriter

PARTITIONS = 3
RECEIVERS = 2
INTERVAL_MS = 1_000


class CrashError(BaseException):
    """The process dies here."""


class Disk:
    """A local storage whose next ``failures`` appends fail, half of them after the bytes were written."""

    def __init__(self, storage: Any, faults: SimpleNamespace) -> None:
        self._storage = storage
        self._faults = faults

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    def below(self, path: str) -> Disk:
        return Disk(self._storage.below(path), self._faults)

    def create_segment(self, path: str) -> Any:
        file = self._storage.create_segment(path)
        append = file.append

        def faulty(parts: Any, *, sync: bool = True) -> None:
            if self._faults.failures:
                self._faults.failures -= 1
                if self._faults.failures % 2:
                    append(parts, sync=sync)
                raise OSError("no space left on device")
            append(parts, sync=sync)

        return SimpleNamespace(append=faulty, close=file.close)


@dataclass
class Process:
    """One life of a receiver: a lease, a consumer, a writer, and what it has read and not stored."""

    lease: Any
    kafka: KafkaReceiver
    store: BlockStore
    crash: SimpleNamespace
    times: EventTimes | None
    buffer: list[RecordChunk] = field(default_factory=list)


class LogLedgerAndPositions(RuleBasedStateMachine):
    template: Path
    batch_by = "arrival"

    def __init__(self) -> None:
        super().__init__()
        # Thousands of syncs that no power cut will follow: in memory where the system has such a folder.
        memory = Path("/dev/shm")
        self.folder = Path(tempfile.mkdtemp(prefix="headrace-model-", dir=memory if memory.is_dir() else None))
        shutil.copy(self.template, self.folder / "ledger.db")
        self.clock = ManualClock(1_000_000)
        self.ledger = Ledger.open(f"sqlite:///{self.folder}/ledger.db", create=False, clock=self.clock)
        self.ledger.streams.register(
            "air",
            '{"outputs": [{"id": "o"}]}',
            batch_interval_ms=INTERVAL_MS,
            block_interval_ms=200,
            batch_by=self.batch_by,
        )
        self.job = self.ledger.jobs.acquire("air", holder="model", lease_ms=10**9)
        self.kafka = FakeKafka()
        topic_id = self.kafka.create("a", PARTITIONS)
        self.ledger.topics.observe(self.job, "records", [("a", topic_id, PARTITIONS)])
        self.partitions = [TopicPartition("a", topic_id, number) for number in range(PARTITIONS)]
        self.ledger.positions.ensure_all(self.job, "records", dict.fromkeys(self.partitions, 0))
        self.faults = SimpleNamespace(failures=0)
        self.storage = LocalStorage(str(self.folder / "log"))
        self.alive: list[Process | None] = [None] * RECEIVERS
        self.zombies: list[Process] = []
        self.produced = 0

    def teardown(self) -> None:
        try:
            self.faults.failures = 0
            for index in range(RECEIVERS):
                self.restart(index)
            for _ in range(4):
                for index in range(RECEIVERS):
                    self.heartbeat(index)
                    self.read(index)
                    self.store(index, None)
            self.everything_is_there()
            assert broken_rules(self.ledger, "air") == []
            if self.batch_by == "timestamp":
                self.records_are_in_the_interval_of_the_running_maximum()
        finally:
            self.ledger.close()
            shutil.rmtree(self.folder)

    # -- what happens ----------------------------------------------------------------------------------------------

    @initialize()
    def begin(self) -> None:
        self.ledger.positions.assign(
            self.job, "records", {partition: number % RECEIVERS for number, partition in enumerate(self.partitions)}
        )
        for index in range(RECEIVERS):
            self.restart(index)

    @rule(
        partition=st.integers(0, PARTITIONS - 1),
        kinds=st.lists(st.sampled_from("dddc"), min_size=1, max_size=6),
        age_ms=st.integers(0, 4_000),
        step_ms=st.integers(-300, 600),
    )
    def produce(self, partition: int, kinds: list[str], age_ms: int, step_ms: int) -> None:
        for number, kind in enumerate(kinds):
            self.produced += 1
            timestamp_ms = self.clock.now_ms() - max(0, age_ms - number * step_ms)
            entry = FakeEntry(b"%d" % self.produced, timestamp_ms=timestamp_ms)
            self.kafka.produce("a", partition, entry if kind == "d" else FakeEntry(None, kind="control"))

    @rule(index=st.integers(0, RECEIVERS - 1))
    def read(self, index: int) -> None:
        process = self.alive[index]
        if process is not None:
            self._fetch(process)

    @rule(
        index=st.integers(0, RECEIVERS - 1),
        crash=st.sampled_from([None, None, None, "before log", "before ledger", "after ledger", "answer lost"]),
        cuts=st.integers(1, 4),
    )
    def store(self, index: int, crash: str | None, cuts: int = 1) -> None:
        """So many blocks wait, and are stored together."""
        process = self.alive[index]
        if process is not None:
            self._store(index, process, crash, cuts)

    @rule(failures=st.integers(1, 5))
    def break_disk(self, failures: int) -> None:
        self.faults.failures = failures

    @rule(index=st.integers(0, RECEIVERS - 1))
    def restart(self, index: int) -> None:
        """The old process goes on as a zombie, with all that it had read."""
        previous = self.alive[index]
        if previous is not None:
            self.zombies.append(previous)
        self.alive[index] = self._begin(index)
        self.heartbeat(index)

    @rule(partition=st.integers(0, PARTITIONS - 1), index=st.integers(0, RECEIVERS - 1))
    def move(self, partition: int, index: int) -> None:
        self.ledger.positions.assign(self.job, "records", {self.partitions[partition]: index})

    @rule(index=st.integers(0, RECEIVERS - 1))
    def heartbeat(self, index: int) -> None:
        """Follow the orders, as the supervisor does: drain, release, begin."""
        process = self.alive[index]
        if process is None:
            return
        orders = self.ledger.receivers.heartbeat(process.lease, sealed_through_ms=0)
        for partition in orders.revoked:
            process.kafka.unassign(partition)
            if process.times is not None:
                process.times.forget(partition)
        if orders.revoked:
            if not self._store(index, process, None):
                return
            self.ledger.positions.release(process.lease, orders.revoked)
        for partition, assigned in orders.assigned.items():
            if partition not in process.kafka.partitions:
                process.kafka.assign(partition, assigned.next_offset)
                if process.times is not None:
                    process.times.begin(partition, assigned.watermark_ms)

    @rule(data=st.data())
    def zombie_writes(self, data: st.DataObject) -> None:
        if not self.zombies:
            return
        zombie = data.draw(st.sampled_from(self.zombies))
        self._fetch(zombie)
        self.faults.failures = 0
        if zombie.buffer:
            with pytest.raises(LeaseLostError):
                zombie.store.store(cut(zombie.buffer, 2, self.clock.now_ms()))

    @rule(milliseconds=st.integers(0, 3_000))
    def time_passes(self, milliseconds: int) -> None:
        self.clock.advance(milliseconds)

    @rule()
    def seal(self) -> None:
        now_ms = self.clock.now_ms()
        self.ledger.allocations.seal("air", now_ms - now_ms % 1_000)

    # -- what must hold --------------------------------------------------------------------------------------------

    @invariant()
    def blocks_meet(self) -> None:
        """The accepted ranges of a partition are one stretch from 0 to its position, and batch times never go back."""
        at = dict.fromkeys(self.partitions, 0)
        last_batch = dict.fromkeys(self.partitions, 0)
        for block in self._blocks():
            for covered in block.info.ranges:
                assert covered.from_offset >= at[covered.partition], "an overlap"
                missed = self._entries(covered.partition)[at[covered.partition] : covered.from_offset]
                assert all(entry.kind == "control" for entry in missed), "a hole with records in it"
                at[covered.partition] = covered.until_offset
                assert block.batch_time_ms >= last_batch[covered.partition]
                last_batch[covered.partition] = block.batch_time_ms
        for row in self.ledger.positions.all("air"):
            assert row.next_offset >= at[row.partition]

    def everything_is_there(self) -> None:
        records: dict[TopicPartition, list[tuple[int, bytes]]] = {partition: [] for partition in self.partitions}
        for block in self._blocks():
            header, batch = read_block(self.storage.below("log"), block.info.handle)
            assert header.ranges == block.info.ranges
            for row in batch.to_pylist():
                records[self.partitions[row["partition"]]].append((row["offset"], row["value"]))
        for partition in self.partitions:
            expected = [
                (offset, entry.value) for offset, entry in enumerate(self._entries(partition)) if entry.kind == "data"
            ]
            assert records[partition] == expected

    def records_are_in_the_interval_of_the_running_maximum(self) -> None:
        starts: dict[tuple[TopicPartition, int], int] = {}
        for partition in self.partitions:
            maximum = 0
            for offset, entry in enumerate(self._entries(partition)):
                maximum = max(maximum, entry.timestamp_ms or 0)
                starts[partition, offset] = maximum // INTERVAL_MS * INTERVAL_MS
        for block in self._blocks():
            _, batch = read_block(self.storage.below("log"), block.info.handle)
            rows = zip(batch.column("partition").to_pylist(), batch.column("offset").to_pylist(), strict=True)
            assert {starts[self.partitions[number], offset] for number, offset in rows} == {block.info.event_time_ms}
            assert block.batch_time_ms > (block.info.event_time_ms or 0)

    # -- helpers ---------------------------------------------------------------------------------------------------

    def _blocks(self) -> list[Any]:
        times = [unclaimed.batch_time_ms for unclaimed in self.ledger.blocks.unclaimed("air", limit=10_000)]
        blocks = [block for time_ms in times for block in self.ledger.allocations.blocks_of("air", time_ms)]
        return sorted(blocks, key=lambda block: block.block_id)

    def _entries(self, partition: TopicPartition) -> list[FakeEntry]:
        return self.kafka.logs["a", partition.partition].entries

    def _begin(self, index: int) -> Process:
        receiver_id = ReceiverId("air", "records", index)
        lease = self.ledger.receivers.register(
            self.ledger.receivers.schedule(self.job, receiver_id), host="here", lease_ms=10**9
        )
        next_offsets: dict[TopicPartition, int] = {}
        writer = WriteAheadLogWriter(
            Disk(self.storage, self.faults),
            "log",
            receiver_id,
            lease.epoch,
            segments=SegmentSettings(4_000),
            clock=self.clock,
            positions=lambda: next_offsets,
        )
        kafka = KafkaReceiver({}, clock=self.clock, consumer_factory=lambda config: FakeConsumer(self.kafka, config))
        crash = SimpleNamespace(point=None)
        stream: Any = SimpleNamespace(name="air", limits=Limits())
        context = StreamContext(stream, _crashing_ledger(self.ledger, crash), storage=self.storage, clock=self.clock)
        store = BlockStore(
            context,
            lease,
            writer=_crashing_writer(writer, crash),
            source=kafka,
            pausing=Pausing(context, lease),
            counts=StoreCounts(),
            next_offsets=next_offsets,
            wait=lambda _: None,
            not_to_store=lambda _: (),
            beat=lambda: False,
        )
        times = EventTimes(INTERVAL_MS, self.clock.now_ms) if self.batch_by == "timestamp" else None
        return Process(lease, kafka, store, crash, times)

    def _fetch(self, process: Process) -> None:
        for event in process.kafka.fetch(0):
            assert isinstance(event, RecordChunk)
            process.buffer += [event] if process.times is None else process.times.split(event)

    def _store(self, index: int, process: Process, crash: str | None, cuts: int = 1) -> bool:
        """Whether the process lives on."""
        if not process.buffer:
            return True
        process.crash.point = crash
        try:
            process.store.store(cut(process.buffer, cuts, self.clock.now_ms()))
        except (CrashError, StoreFailedError):
            process.crash.point = None
            self.zombies.append(process)
            self.alive[index] = None
            self.restart(index)
            return False
        process.crash.point = None
        process.buffer = []
        return True


def cut(chunks: list[RecordChunk], cuts: int, now_ms: int) -> list[GeneratedBlock[RecordChunk]]:
    """Cut the chunks into up to so many blocks, one after the other."""
    size = max(1, -(-len(chunks) // cuts))
    parts = [tuple(chunks[at : at + size]) for at in range(0, len(chunks), size)]
    return [GeneratedBlock(now_ms, part, sum(chunk.nbytes for chunk in part)) for part in parts]


def _crashing(step: Callable[..., Any], crash: SimpleNamespace, before: str, after: str | None) -> Callable[..., Any]:
    def crashing(*args: Any, **options: Any) -> Any:
        if crash.point == before:
            raise CrashError
        result = step(*args, **options)
        if after is not None and crash.point == after:
            raise CrashError
        if after is not None and crash.point == "answer lost":
            crash.point = None
            raise LedgerUnavailableError("The connection broke before the answer came.")
        return result

    return crashing


def _crashing_ledger(ledger: Ledger, crash: SimpleNamespace) -> Any:
    return SimpleNamespace(
        blocks=SimpleNamespace(add_all=_crashing(ledger.blocks.add_all, crash, "before ledger", "after ledger")),
        positions=ledger.positions,
        segments=ledger.segments,
    )


def _crashing_writer(writer: WriteAheadLogWriter, crash: SimpleNamespace) -> Any:
    return SimpleNamespace(
        write_all=_crashing(writer.write_all, crash, "before log", None),
        close=writer.close,
        roll_if_due=writer.roll_if_due,
    )


@pytest.fixture(scope="module", autouse=True)
def template(tmp_path_factory: pytest.TempPathFactory) -> None:
    """An empty ledger is migrated once and copied for each example."""
    path = tmp_path_factory.mktemp("template") / "ledger.db"
    Ledger.open(f"sqlite:///{path}").close()
    LogLedgerAndPositions.template = path


class ByTimestamp(LogLedgerAndPositions):
    batch_by = "timestamp"


TestModel = LogLedgerAndPositions.TestCase
TestModelByTimestamp = ByTimestamp.TestCase
TestModel.settings = TestModelByTimestamp.settings = settings(
    max_examples=settings().max_examples // 3,
    stateful_step_count=30,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
