"""A stream's life by a seed: what receivers, allocation, runs, checkpoints and cleanup do, in any order."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from headrace.batch.allocation import allocate
from headrace.batch.checkpoint import checkpoint_now
from headrace.batch.cleanup import clean_up
from headrace.blocks import BlockInfo, OffsetRange, ReceiverId, TopicPartition
from headrace.clock import ManualClock
from headrace.ledger import BatchState, Ledger, PartitionState, ReceiverState
from headrace.ledger.receiving.tables import ReceiverLease
from headrace.ledger.tables import Declared
from headrace.stream import ConsoleOutput, KafkaInput, Limits, Stream
from headrace.stream_context import StreamContext
from headrace.wal.frame import RECORD_SCHEMA
from headrace.wal.storage import open_storage
from headrace.wal.writer import NewBlock, WriteAheadLogWriter

START_MS = 1_700_000_000_000
INTERVAL_MS = 10_000
LEASE_MS = 3_600_000
NAME = "shop"
DEFINITION = '{"outputs": [{"id": "index"}, {"id": "files"}]}'
REPLAY = '{"outputs": [{"id": "again"}]}'
KINDS: dict[str, dict[str, Any]] = {
    "arrival": {},
    "coalescing": {"coalesce": True, "limits": Limits()},
    "timestamp": {"batch_by": "timestamp"},
}
"""The options of a `Life` for each kind of stream."""


@dataclass
class Receiver:
    """A receiver's instance, with its writer."""

    lease: ReceiverLease
    writer: WriteAheadLogWriter
    accepted: int | None = None
    owned: set[TopicPartition] = field(default_factory=set)


class Life:
    """`step` does something; `lose_nothing` writes a checkpoint of everything."""

    def __init__(self, folder: Path, ledger_url: str, seed: int, **options: Any) -> None:
        self.random = random.Random(seed)
        self.clock = ManualClock(START_MS)
        self.stream = Stream(
            name=NAME,
            inputs=[
                KafkaInput(id="clicks", bootstrap_servers="127.0.0.1:1", topics=("clicks", "taps"), receivers=2),
                KafkaInput(id="orders", bootstrap_servers="127.0.0.1:1", topics="orders"),
            ],
            outputs=[ConsoleOutput(id="index"), ConsoleOutput(id="files")],
            transform="operator:itemgetter",
            batch_interval="10 s",
            storage=folder / "storage",
            ledger="sqlite:////nowhere/ledger.db",
            **{"limits": Limits(max_concurrent_batches=3), **options},
        )
        self.storage = open_storage(self.stream.storage.url)
        self.ledger = Ledger.open(ledger_url, clock=self.clock)
        self.register(self.ledger)
        self.receivers: dict[ReceiverId, Receiver] = {}
        self.topic_ids = {("clicks", "clicks"): 1, ("clicks", "taps"): 1, ("orders", "orders"): 1}
        self.sizes = {key: 2 for key in self.topic_ids}
        self.written_until: dict[TopicPartition, int] = {}
        self.start_job()

    @property
    def context(self) -> StreamContext:
        return self.context_in(self.ledger)

    def context_in(self, ledger: Ledger) -> StreamContext:
        """``ledger``: another ledger, for example a rebuilt one."""
        return StreamContext(self.stream, ledger, storage=self.storage.below(NAME), clock=self.clock)

    def register(self, ledger: Ledger) -> None:
        ledger.streams.register(NAME, **Declared.by(self.stream).columns())

    def start_job(self) -> None:
        """A job with all receivers, after whatever there was."""
        self.job = self.ledger.jobs.acquire(NAME, holder="test", lease_ms=LEASE_MS)
        for index in (0, 1):
            self.start(ReceiverId(NAME, "clicks", index))
        self.start(ReceiverId(NAME, "orders", 0))
        for input_id, topic in self.topic_ids:
            self.see(input_id, topic)
        self.assign()

    def start(self, receiver_id: ReceiverId) -> None:
        """The receiver's next instance; what the one before it left stays in the log as it is."""
        lease = self.ledger.receivers.register(
            self.ledger.receivers.schedule(self.job, receiver_id), host="here", lease_ms=LEASE_MS
        )
        writer = WriteAheadLogWriter(self.storage, f"{NAME}/log", receiver_id, lease.epoch, clock=self.clock)
        self.receivers[receiver_id] = Receiver(lease, writer)

    def see(self, input_id: str, topic: str) -> None:
        number, size = self.topic_ids[input_id, topic], self.sizes[input_id, topic]
        (row,) = self.ledger.topics.observe(self.job, input_id, [(topic, f"{topic}-{number}", size)])
        self.ledger.positions.ensure_all(
            self.job,
            input_id,
            {
                TopicPartition(topic, row.topic_id, index, row.incarnation): self.random.choice((0, 7))
                for index in range(size)
            },
        )

    def assign(self) -> None:
        """Deal the partitions out; where another owns one, it is given back first."""
        dealt: dict[str, dict[TopicPartition, int]] = {}
        for row in self.ledger.positions.all(NAME):
            index = self.random.randrange(2) if row.input_id == "clicks" else 0
            owner = None if row.receiver_index is None else ReceiverId(NAME, row.input_id, row.receiver_index)
            if owner is not None and row.receiver_index != index:
                self.ledger.positions.release(self.receivers[owner].lease, row.partition)
            dealt.setdefault(row.input_id, {})[row.partition] = index
        for input_id, partitions in dealt.items():
            self.ledger.positions.assign(self.job, input_id, partitions)

    def step(self) -> None:
        """Anything that may come next."""
        kinds = (
            [self.store] * 12
            + [self.advance_clock] * 4
            + [self.run_batch] * 5
            + [self.leave_undecided, self.restart, self.reassign, self.skip, self.grow, self.recreate]
            + [self.checkpoint] * 2
            + [self.clean, self.replay, self.abandon, self.restart_job, self.fail_partition]
        )
        self.random.choice(kinds)()

    def store(self, *, add: bool = True, of: ReceiverId | None = None) -> None:
        """Blocks of some partitions of a receiver, one write into the log and, unless it dies meanwhile, into the
        ledger."""
        receiver_id = of or self.random.choice(list(self.receivers))
        receiver = self.receivers[receiver_id]
        owned = [
            row
            for row in self.ledger.positions.all(NAME, receiver_id.input_id)
            if row.receiver_index == receiver_id.index and row.state is PartitionState.ACTIVE
        ]
        if not owned:
            return
        at = {row.partition: row.next_offset for row in owned}
        now_ms = self.clock.now_ms()
        number = 1 if of else self.random.choice((1, 1, 2, 3))
        blocks = [self._block(at, now_ms, of_all=of is not None) for _ in range(number)]
        frames = receiver.writer.write_all(blocks, last_accepted_sequence=receiver.accepted)
        for block in blocks:
            for r in block.ranges:
                self.written_until[r.partition] = max(self.written_until.get(r.partition, 0), r.until_offset)
        if not add:
            return
        self.clock.advance(self.random.choice((0, 0, 0, 1, 3_000)))
        infos = [
            BlockInfo(
                receiver=receiver_id,
                epoch=receiver.lease.epoch,
                sequence=written.sequence,
                cut_time_ms=now_ms,
                handle=written.handle,
                ranges=block.ranges,
                records=block.records.num_rows,
                payload_bytes=written.payload_bytes,
                event_time_ms=block.event_time_ms,
            )
            for block, written in zip(blocks, frames, strict=True)
        ]
        self.ledger.blocks.add_all(receiver.lease, infos)
        receiver.accepted = infos[-1].sequence

    def settle(self) -> None:
        """Each receiver stores a block of all its partitions: what was left undecided has been read again."""
        for receiver_id in self.receivers:
            self.store(of=receiver_id)

    def _block(self, at: dict[TopicPartition, int], now_ms: int, *, of_all: bool = False) -> NewBlock:
        """A block of some of these partitions, or of all, whose offsets it moves."""
        taken = sorted(at) if of_all else sorted(self.random.sample(sorted(at), self.random.randint(1, len(at))))
        ranges = []
        for partition in taken:
            records, holes = self.random.randint(1, 4), self.random.choice((0, 0, 2))
            until = at[partition] + records + holes
            ranges.append(OffsetRange(partition, at[partition], until, records))
            at[partition] = until
        event_ms = None
        if self.stream.batch_by == "timestamp":
            event_ms = now_ms - self.random.choice((0, 0, 500, 15_000))
        return NewBlock(record_batch(ranges), tuple(ranges), now_ms, event_ms)

    def leave_undecided(self) -> None:
        """A receiver dies between log and ledger, or right after the ledger has accepted."""
        before = dict(self.receivers)
        self.store(add=self.random.random() < 0.5)
        for receiver_id in before:
            if self.random.random() < 0.5:
                self.start(receiver_id)

    def restart(self) -> None:
        receiver_id = self.random.choice(list(self.receivers))
        self.receivers[receiver_id].writer.close()
        self.ledger.receivers.release(self.receivers[receiver_id].lease, ReceiverState.STOPPED)
        self.start(receiver_id)

    def restart_job(self) -> None:
        self.ledger.jobs.release(self.job, "stopped")
        self.start_job()

    def reassign(self) -> None:
        self.assign()

    def advance_clock(self) -> None:
        self.clock.advance(self.random.choice((100, 2_000, 9_000, 10_000, 25_000)))

    def skip(self) -> None:
        """Control records, or what Kafka has lost."""
        row = self.random.choice(self.ledger.positions.all(NAME))
        if row.receiver_index is not None and row.state is PartitionState.ACTIVE:
            lease = self.receivers[ReceiverId(NAME, row.input_id, row.receiver_index)].lease
            gap = self.random.choice((None, "retention"))
            # The log may hold records from there on that the ledger has not accepted: these are no control records.
            if self.written_until.get(row.partition, 0) > row.next_offset:
                gap = "retention"
            self.ledger.positions.advance(lease, row.partition, row.next_offset, row.next_offset + 3, gap=gap)

    def fail_partition(self) -> None:
        row = self.random.choice(self.ledger.positions.all(NAME))
        state = self.random.choice((PartitionState.FAILED, PartitionState.ACTIVE, PartitionState.ACTIVE))
        self.ledger.positions.set_state(self.job, row.input_id, [row.partition], state, "it says so")

    def grow(self) -> None:
        key = self.random.choice(list(self.sizes))
        self.sizes[key] = min(self.sizes[key] + 1, 4)
        self.see(*key)
        self.assign()

    def recreate(self) -> None:
        key = self.random.choice(list(self.topic_ids))
        self.topic_ids[key] += 1
        self.sizes[key] = 2
        self.see(*key)
        self.assign()

    def times(self) -> list[int]:
        """The batch times that have come, that nobody has claimed or absorbed, and that were not removed."""
        now_ms, row = self.clock.now_ms(), self.ledger.streams.get(NAME)
        ended = range(START_MS + INTERVAL_MS, now_ms + 1, INTERVAL_MS)
        return [
            time_ms
            for time_ms in ended
            if not row.has_removed(time_ms) and self.ledger.batches.find(NAME, time_ms) is None
        ]

    def run_batch(self) -> None:
        """Allocate one of the oldest times, and get somewhere with it."""
        times = self.times()
        if not times:
            return
        time_ms = self.random.choice(times[:3])
        batch = allocate(self.context, time_ms).batch
        if batch.state is BatchState.ALLOCATED:
            self.run(time_ms, self.random.choice(("no", "yes", "yes", "yes", "half", "fail", "begin")))

    def run(self, time_ms: int, how: str) -> None:
        if how == "no":
            return
        try:
            attempt = self.ledger.attempts.begin(NAME, time_ms, holder="test", way="connect", lease_ms=1)
        except Exception as error:
            assert "slot" in type(error).__name__.lower() or "turn" in type(error).__name__.lower(), error
            return
        if how == "begin":
            return
        for output in attempt.outputs[: 1 if how == "half" else None]:
            if how != "fail":
                self.ledger.attempts.record_output(attempt, output, {"written": time_ms % 97}, code_version="v1")
        if how == "yes":
            self.ledger.attempts.complete(attempt, code_version="v1")
        else:
            self.ledger.attempts.fail(attempt, "boom")

    def finish(self) -> None:
        """Complete what can be, oldest first."""
        for batch in self.ledger.batches.page(NAME, 1000, oldest_first=True):
            if batch.state in (BatchState.ALLOCATED, BatchState.RUNNING, BatchState.FAILED):
                self.clock.advance(2)
                self.run(batch.batch_time_ms, "yes")

    def replay(self) -> None:
        done = self.ledger.batches.page(NAME, 20, [BatchState.COMPLETED])
        if not done:
            return
        time_ms = self.random.choice(done).batch_time_ms
        attempt = self.ledger.replays.begin(
            NAME,
            time_ms,
            target=self.random.choice(("march", "april")),
            definition=self.random.choice((REPLAY, REPLAY + " ")),
            outputs=["again"],
            holder="test",
            way="connect",
            lease_ms=1,
        )
        if self.random.random() < 0.8:
            self.ledger.attempts.record_output(attempt, "again", {"n": 1})
            self.ledger.attempts.complete(attempt)

    def abandon(self) -> None:
        for batch in self.ledger.batches.page(NAME, 50, [BatchState.FAILED])[:1]:
            time_ms = batch.batch_time_ms
            written = {row.output_id for row in self.ledger.attempts.outputs(NAME, time_ms) if row.error is None}
            if written and batch.steps is None:
                for step in set(batch.needs(self.stream.steps)) - written:
                    self.ledger.batches.abandon_output(NAME, time_ms, step, "its disk is gone")
            elif batch.steps is None:
                self.ledger.batches.abandon(NAME, time_ms, "never mind")

    def checkpoint(self) -> None:
        self.clock.advance(1)
        checkpoint_now(self.context, self.clock.now_ms() // 10_000 * 10_000)

    def clean(self) -> None:
        clean_up(self.context)


def record_batch(ranges: list[OffsetRange]) -> pa.RecordBatch:
    """As many records as the ranges have."""
    offsets = [(r.partition, r.from_offset + step) for r in ranges for step in range(r.records)]
    columns = {
        "key": [None] * len(offsets),
        "value": [b"%d" % offset for _, offset in offsets],
        "topic": [tp.topic for tp, _ in offsets],
        "partition": [tp.partition for tp, _ in offsets],
        "offset": [offset for _, offset in offsets],
        "timestamp": [START_MS] * len(offsets),
        "timestampType": [0] * len(offsets),
        "headers": [None] * len(offsets),
        "incarnation": [tp.incarnation for tp, _ in offsets],
    }
    return pa.RecordBatch.from_pydict({name: columns[name] for name in RECORD_SCHEMA.names}, RECORD_SCHEMA)
