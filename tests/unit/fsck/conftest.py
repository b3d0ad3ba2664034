"""A stream with a real log, ledger, manifests and checkpoints, and what harms each of them."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.support.ledger_rules import broken_rules

from headrace.batch.allocation import allocate
from headrace.batch.checkpoint import write_checkpoint
from headrace.batch.cleanup import Cleaned, clean_up
from headrace.blocks import BlockInfo, OffsetRange, ReceiverId, TopicPartition
from headrace.clock import ManualClock
from headrace.fsck.coverage import check_coverage
from headrace.fsck.findings import Report
from headrace.fsck.stream_check import check_ledger, check_stream
from headrace.ledger import Ledger
from headrace.ledger.batches.tables import Attempt, BatchRow
from headrace.ledger.receiving.tables import AddedBlock
from headrace.stream import ConsoleOutput, KafkaInput, Stream
from headrace.stream_context import StreamContext
from headrace.wal.frame import RECORD_SCHEMA
from headrace.wal.storage import open_storage
from headrace.wal.writer import WriteAheadLogWriter

START_MS = 1_700_000_000_000
INTERVAL_MS = 10_000
STREAM, INPUT = "shop", "clicks"
TIMES = [START_MS + INTERVAL_MS * number for number in range(1, 100)]
LEASE_MS = 3_600_000


class Shop:
    """A stream that receives two partitions by one receiver; its batches run when they are told to."""

    def __init__(self, folder: Path, **definition: Any) -> None:
        self.clock = ManualClock(START_MS)
        fields: dict[str, Any] = {
            "name": STREAM,
            "inputs": KafkaInput(id=INPUT, bootstrap_servers="127.0.0.1:1", topics=INPUT),
            "outputs": ConsoleOutput(),
            "batch_interval": "10 s",
            "storage": folder / "storage",
            "ledger": f"sqlite:///{folder}/ledger.db",
        }
        self.stream = Stream(**(fields | definition))
        self.storage = open_storage(self.stream.storage.url)
        self.folder = self.storage.below(STREAM)
        self.ledger = Ledger.open(self.stream.ledger, clock=self.clock)
        self.register()
        self.receiver = ReceiverId(STREAM, INPUT, 0)
        self.topic_id, self.incarnation, self.partitions = "id-1", 1, 2
        self.positions: dict[int, int] = {}
        self.key: bytes | None = None
        """The key of the next records."""
        self.new_job()

    def register(self) -> None:
        self.ledger.streams.register(
            STREAM,
            self.stream.to_json(),
            batch_interval_ms=self.stream.batch_interval_ms,
            block_interval_ms=self.stream.block_interval_ms,
            ordered=self.stream.is_ordered,
        )

    def new_job(self) -> None:
        self.job = self.ledger.jobs.acquire(STREAM, holder="driver", lease_ms=LEASE_MS)
        self.observe()
        self.new_epoch()

    def observe(self) -> None:
        """Look at the topic as it is, and give its partitions to the receiver."""
        self.ledger.topics.observe(self.job, INPUT, [("clicks", self.topic_id, self.partitions)])
        for number in range(self.partitions):
            self.positions.setdefault(number, 0)
            self.ledger.positions.ensure_all(self.job, INPUT, {self.partition(number): 0})
            self.ledger.positions.assign(self.job, INPUT, {self.partition(number): 0})

    def new_epoch(self) -> None:
        """Go on in a new instance of the receiver, and a new segment."""
        self.lease = self.ledger.receivers.register(
            self.ledger.receivers.schedule(self.job, self.receiver), host="here", lease_ms=LEASE_MS
        )
        self.writer = WriteAheadLogWriter(
            self.storage, f"{STREAM}/log", self.receiver, self.lease.epoch, clock=self.clock
        )
        self.accepted: int | None = None

    def partition(self, number: int = 0) -> TopicPartition:
        return TopicPartition("clicks", self.topic_id, number, self.incarnation)

    def write(self, sizes: dict[int, int], *, skip: int = 0) -> BlockInfo:
        """A block in the log of so many records of each partition, and ``skip`` offsets without a record behind
        them."""
        ranges = tuple(
            OffsetRange(self.partition(number), self.positions[number], self.positions[number] + size + skip, size)
            for number, size in sizes.items()
        )
        offsets = [(r.partition.partition, r.from_offset + index) for r in ranges for index in range(r.records)]
        columns: dict[str, list[Any]] = {
            "key": [self.key] * len(offsets),
            "value": [b"%d" % offset for _, offset in offsets],
            "topic": ["clicks"] * len(offsets),
            "partition": [number for number, _ in offsets],
            "offset": [offset for _, offset in offsets],
            "timestamp": [START_MS] * len(offsets),
            "timestampType": [0] * len(offsets),
            "headers": [None] * len(offsets),
            "incarnation": [self.incarnation] * len(offsets),
        }
        batch = pa.RecordBatch.from_pydict({name: columns[name] for name in RECORD_SCHEMA.names}, RECORD_SCHEMA)
        cut_ms = self.clock.now_ms()
        written = self.writer.write(batch, ranges, cut_time_ms=cut_ms, last_accepted_sequence=self.accepted)
        return BlockInfo(
            receiver=self.receiver,
            epoch=self.lease.epoch,
            sequence=written.sequence,
            cut_time_ms=cut_ms,
            handle=written.handle,
            ranges=ranges,
            records=len(offsets),
            payload_bytes=written.payload_bytes,
        )

    def store(self, sizes: dict[int, int] | None = None, *, skip: int = 0) -> AddedBlock:
        info = self.write({0: 3, 1: 2} if sizes is None else sizes, skip=skip)
        added = self.ledger.blocks.add(self.lease, info)
        self.accepted = info.sequence
        self.positions |= {r.partition.partition: r.until_offset for r in info.ranges}
        return added

    def advance(self, number: int, offsets: int, gap: str | None = None) -> None:
        start = self.positions[number]
        self.ledger.positions.advance(self.lease, self.partition(number), start, start + offsets, gap=gap)
        self.positions[number] += offsets

    @property
    def context(self) -> StreamContext:
        return StreamContext(self.stream, self.ledger, storage=self.folder, clock=self.clock)

    def allocate(self, time_ms: int) -> BatchRow:
        return allocate(self.context, time_ms).batch

    def begin(self, time_ms: int, *, force: bool = False) -> Attempt:
        return self.ledger.attempts.begin(STREAM, time_ms, holder="task", way="connect", lease_ms=60_000, force=force)

    def complete(self, time_ms: int, *, force: bool = False) -> None:
        attempt = self.begin(time_ms, force=force)
        for output in attempt.outputs:
            self.ledger.attempts.record_output(attempt, output, {"printed": 1})
        self.ledger.attempts.complete(attempt)

    def begin_replay(self, time_ms: int) -> Attempt:
        return self.ledger.replays.begin(
            STREAM, time_ms, target="copy", definition='{"outputs": [{"id": "a"}]}', outputs=["a"],
            holder="task", way="connect", lease_ms=1000,
        )  # fmt: skip

    def replay(self, time_ms: int) -> None:
        attempt = self.begin_replay(time_ms)
        self.ledger.attempts.record_output(attempt, "a", {})
        self.ledger.attempts.complete(attempt)

    def checkpoint(self, time_ms: int) -> None:
        # Checkpoints are named by the millisecond.
        self.clock.advance(1)
        write_checkpoint(self.context, time_ms)

    def run(self, time_ms: int) -> None:
        self.allocate(time_ms)
        self.complete(time_ms)
        self.checkpoint(time_ms)

    def clean(self) -> Cleaned:
        return clean_up(self.context)

    def recreate(self) -> None:
        """The topic is deleted and created again."""
        old = [self.partition(number) for number in range(self.partitions)]
        self.topic_id, self.incarnation = f"id-{self.incarnation + 1}", self.incarnation + 1
        self.ledger.positions.set_state(self.job, INPUT, old, "ended")
        self.ledger.positions.request_release(self.job, INPUT, old)
        self.ledger.positions.release(self.lease, old)
        self.positions = {}
        self.observe()

    @property
    def ledger_file(self) -> Path:
        return Path(self.stream.ledger.removeprefix("sqlite:///"))

    def sql(self, statement: str) -> None:
        """Change the ledger behind its back; no constraint between tables holds it up."""
        with closing(sqlite3.connect(self.ledger_file)) as connection, connection:
            connection.execute(statement)

    def copy_row(self, table: str, where: str, **changes: object) -> None:
        """Add a row that is like another one."""
        with closing(sqlite3.connect(self.ledger_file)) as connection, connection:
            rows = connection.execute(f"SELECT * FROM {table} WHERE {where}")
            row = dict(zip((column[0] for column in rows.description), rows.fetchone(), strict=True)) | changes
            names, marks = ", ".join(row), ", ".join("?" * len(row))
            connection.execute(f"INSERT INTO {table} ({names}) VALUES ({marks})", list(row.values()))

    def check(self, *, kafka: bool = False) -> Report:
        return check_stream(self.ledger, STREAM, kafka=kafka)

    def check_ledger(self) -> list[str]:
        """What the ledger alone contradicts, quickly."""
        snapshot = self.ledger.snapshots.take(STREAM)
        findings = [*check_coverage(snapshot)[0], *check_ledger(snapshot)]
        return [f"{f.problem}: {f.subject}: {f.detail}" for f in findings] + list(
            map(str, broken_rules(self.ledger, STREAM))
        )

    def problems(self) -> list[tuple[str, str]]:
        """The problems and their subjects."""
        return [(finding.problem.value, finding.subject) for finding in self.check().findings]

    def log_path(self, segment: str) -> Path:
        return Path(self.stream.storage.url.removeprefix("file://")) / STREAM / "log" / segment

    def segments(self) -> list[str]:
        return [path for path in self.folder.paths("log")]


@pytest.fixture(scope="session")
def empty_ledger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated ledger, to be copied: migrations take longer than a test."""
    path = tmp_path_factory.mktemp("ledger") / "ledger.db"
    Ledger.open(f"sqlite:///{path}").close()
    return path


@pytest.fixture
def make_shop(tmp_path: Path, empty_ledger: Path) -> Iterator[Callable[..., Shop]]:
    made: list[Shop] = []

    def make(**definition: Any) -> Shop:
        folder = tmp_path / str(len(made))
        folder.mkdir()
        shutil.copy(empty_ledger, folder / "ledger.db")
        shop = Shop(folder, **definition)
        made.append(shop)
        return shop

    yield make
    for shop in made:
        shop.ledger.close()


@pytest.fixture
def shop(make_shop: Callable[..., Shop]) -> Shop:
    """One with a batch that is done, one that has failed, one that waits, and blocks that no batch has taken."""
    shop = make_shop()
    shop.store()
    shop.clock.advance(INTERVAL_MS)
    shop.store()
    shop.new_epoch()
    shop.clock.advance(INTERVAL_MS)
    shop.store()
    shop.store({0: 4})
    shop.clock.advance(INTERVAL_MS)
    shop.store()
    shop.run(TIMES[0])
    shop.allocate(TIMES[1])
    shop.ledger.attempts.fail(shop.begin(TIMES[1]), "no disk")
    shop.allocate(TIMES[2])
    return shop
