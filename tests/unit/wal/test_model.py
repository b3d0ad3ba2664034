"""Log, ledger and receiver positions together against a list in memory, on a disk whose power is cut.

Writes and syncs fail, receivers crash between log and ledger, go on as zombies, lose what they had not synced; batches
are allocated and completed, their segments cleaned, and the ledger is lost. Always: what the ledger accepted and no
cleanup took is read back as it was written, positions are where the model has them, and the log alone proves what was
accepted, but for the blocks of the last write of each writer's life.
"""

from __future__ import annotations

import errno
import shutil
import tempfile
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.support.faulty_files import FaultyFiles
from tests.support.ledger_rules import broken_rules
from tests.support.records import TOPIC_ID, make_block

from headrace.blocks import BlockInfo, OffsetRange, ReceiverId, TopicPartition
from headrace.clock import ManualClock
from headrace.ledger import Ledger
from headrace.ledger.errors import LeaseLostError
from headrace.ledger.receiving.tables import ReceiverLease
from headrace.wal.errors import WriteFailedError
from headrace.wal.reader import read_block
from headrace.wal.recovery import scan_log
from headrace.wal.scan import RecoveryMode
from headrace.wal.storage import LocalStorage
from headrace.wal.writer import NewBlock, SegmentSettings, WriteAheadLogWriter

STREAM = "air"
RECEIVERS = 2
PARTITIONS = [TopicPartition("flights", TOPIC_ID, number, 1) for number in range(3)]
OWNERS = [0, 0, 1]
EVER_MS = 10**9
INTERVAL_MS = 1_000


@dataclass
class Life:
    """A receiver from its registration to its end."""

    lease: ReceiverLease
    writer: WriteAheadLogWriter
    accepted: int | None = None


class LogLedgerAndPositions(RuleBasedStateMachine):
    template: Path

    def __init__(self) -> None:
        super().__init__()
        # SQLite syncs, and no power cut reaches it: in memory where the system has such a folder.
        memory = Path("/dev/shm")
        self.folder = Path(tempfile.mkdtemp(prefix="headrace-log-", dir=memory if memory.is_dir() else None))
        self.clock = ManualClock(1_700_000_000_000)
        self.files = FaultyFiles()
        self.storage = LocalStorage(self.folder / "log", calls=self.files)
        self.ledger = self.new_ledger("first")
        self.job = self.ledger.jobs.acquire(STREAM, holder="model", lease_ms=EVER_MS)
        self.ledger.topics.observe(self.job, "records", [("flights", TOPIC_ID, len(PARTITIONS))])
        self.ledger.positions.ensure_all(self.job, "records", dict.fromkeys(PARTITIONS, 0))
        self.ledger.positions.assign(self.job, "records", dict(zip(PARTITIONS, OWNERS, strict=True)))
        self.lives: list[Life | None] = [None] * RECEIVERS
        self.zombies: list[Life] = []
        # The model: next offsets, the blocks that were accepted, and those whose file cleanup took.
        self.positions = dict.fromkeys(PARTITIONS, 0)
        self.blocks: list[BlockInfo] = []
        self.values: dict[tuple[int, int], bytes] = {}
        self.removed: set[str] = set()

    def new_ledger(self, name: str) -> Ledger:
        shutil.copy(self.template, self.folder / f"{name}.db")
        ledger = Ledger.open(f"sqlite:///{self.folder}/{name}.db", create=False, clock=self.clock)
        ledger.streams.register(
            STREAM, '{"outputs": [{"id": "o"}]}', batch_interval_ms=INTERVAL_MS, block_interval_ms=200
        )
        return ledger

    def teardown(self) -> None:
        try:
            self.files.heal()
            for index in range(RECEIVERS):
                self.restart(index)
                self.write(index, 0, [1], None, None)
            self.look_at_everything()
            self.ledger_is_lost()
            assert broken_rules(self.ledger, STREAM) == []
        finally:
            self.ledger.close()
            self.files.close_all()
            shutil.rmtree(self.folder)

    # -- what happens ----------------------------------------------------------------------------------------------

    @rule(
        index=st.integers(0, RECEIVERS - 1),
        partition=st.integers(0, 1),
        counts=st.lists(st.integers(1, 5), min_size=1, max_size=4),
        fault=st.sampled_from(
            [None, None, None, "writev", "fsync", "fdatasync", "open", "close", "ftruncate", "folder"]
        ),
        crash=st.sampled_from([None, None, None, "before ledger", "after ledger", "no answer"]),
    )
    def write(self, index: int, partition: int, counts: list[int], fault: str | None, crash: str | None) -> None:
        """One write of blocks of so many records."""
        life = self.lives[index] = self.lives[index] or self.begin(index)
        mine = [each for each, owner in zip(PARTITIONS, OWNERS, strict=True) if owner == index]
        if fault == "folder":
            self.files.fail("fsync", errno.EIO, path="log")
        elif fault is not None:
            self.files.fail(fault, errno.EIO, path="*.wal", written=100 * sum(counts))
        blocks = self.log(life, mine[partition % len(mine)], counts)
        self.files.heal()
        if not blocks:
            return
        if crash == "before ledger":
            self.dies(index)
            return
        assert not any(added.duplicate for added in self.ledger.blocks.add_all(life.lease, blocks))
        self.blocks += blocks
        for r in blocks[-1].ranges:
            self.positions[r.partition] = r.until_offset
        if crash is not None:
            # Nobody writes on who does not know what became of the last block.
            self.lives[index] = None
            if crash == "no answer":
                life.writer.close(None)
        else:
            life.accepted = blocks[-1].sequence

    @rule(partition=st.integers(0, len(PARTITIONS) - 1), offsets=st.integers(1, 5))
    def advance(self, partition: int, offsets: int) -> None:
        """Offsets without a record, as after an aborted transaction."""
        life = self.lives[OWNERS[partition]]
        if life is not None:
            tp = PARTITIONS[partition]
            self.ledger.positions.advance(life.lease, tp, self.positions[tp], self.positions[tp] + offsets)
            self.positions[tp] += offsets

    @rule(index=st.integers(0, RECEIVERS - 1))
    def restart(self, index: int) -> None:
        """The one before goes on as a zombie."""
        self.dies(index)
        self.lives[index] = self.begin(index)

    def begin(self, index: int) -> Life:
        receiver_id = ReceiverId(STREAM, "records", index)
        lease = self.ledger.receivers.register(
            self.ledger.receivers.schedule(self.job, receiver_id), host="here", lease_ms=EVER_MS
        )
        writer = WriteAheadLogWriter(
            self.storage,
            "",
            receiver_id,
            lease.epoch,
            segments=SegmentSettings(6_000),
            clock=self.clock,
            positions=lambda: {
                tp: self.positions[tp] for tp, owner in zip(PARTITIONS, OWNERS, strict=True) if owner == index
            },
            accepted=self._of,
        )
        assert writer.recovery.damage == ()
        return Life(lease, writer)

    @rule(index=st.integers(0, RECEIVERS - 1), knows=st.booleans())
    def stop(self, index: int, knows: bool) -> None:
        """A graceful end."""
        life = self.lives[index]
        if life is not None:
            for segment in life.writer.close(life.accepted if knows else None):
                self.ledger.segments.closed(life.lease, segment)
            self.lives[index] = None

    @rule(seed=st.integers(0, 2**32))
    def power_goes(self, seed: int) -> None:
        self.files.cut_power(Random(seed))
        self.lives = [None] * RECEIVERS
        self.zombies.clear()

    @rule(data=st.data())
    @precondition(lambda self: self.zombies)
    def zombie_writes(self, data: st.DataObject) -> None:
        life = data.draw(st.sampled_from(self.zombies))
        if self.lives[life.lease.receiver_id.index] is None:
            return  # Nobody has replaced it yet.
        mine = [tp for tp, owner in zip(PARTITIONS, OWNERS, strict=True) if owner == life.lease.receiver_id.index]
        blocks = self.log(life, mine[0], [2, 1])
        if blocks:
            with pytest.raises(LeaseLostError):
                self.ledger.blocks.add_all(life.lease, blocks)

    @rule(milliseconds=st.integers(100, 70_000))
    def time_passes(self, milliseconds: int) -> None:
        self.clock.advance(milliseconds)
        for life in self.lives:
            if life is not None:
                for segment in life.writer.roll_if_due(life.accepted):
                    self.ledger.segments.closed(life.lease, segment)

    @rule()
    def complete_batches(self) -> None:
        batches = self.ledger.batches
        for unclaimed in self.ledger.blocks.unclaimed(STREAM):
            time_ms = unclaimed.batch_time_ms
            if time_ms > self.clock.now_ms():
                continue
            self.ledger.allocations.seal(STREAM, time_ms)
            blocks = self.ledger.allocations.blocks_of(STREAM, time_ms)
            self.ledger.allocations.allocate(
                STREAM, time_ms, manifest_uri="m", manifest_sha256="0" * 64, blocks_expected=len(blocks)
            )
            attempt = self.ledger.attempts.begin(STREAM, time_ms, holder="model", way="connect", lease_ms=5_000)
            self.ledger.attempts.record_output(attempt, "o", {})
            self.ledger.attempts.complete(attempt)
            batches.mark_checkpointed(STREAM, [batches.get(STREAM, time_ms).filed("r", 1)])

    @rule()
    def clean_up(self) -> None:
        before_ms = self.clock.now_ms() + 1
        cleanup = self.ledger.cleanup
        found = [segment.path for segment in cleanup.removable_segments(STREAM, before_ms)]
        for segment in cleanup.claim_removal(STREAM, found, before_ms):
            assert self.storage.delete(segment.path)
            cleanup.fold_blocks(STREAM, segment.path)
            self.removed.add(segment.path)

    # -- what must hold --------------------------------------------------------------------------------------------

    @invariant()
    def positions_are_the_models(self) -> None:
        assert {row.partition: row.next_offset for row in self.ledger.positions.all(STREAM)} == self.positions

    @rule()
    def look_at_everything(self) -> None:
        """By handle, and in order: the log has what the ledger has, and proves it."""
        left = [block for block in self.blocks if block.handle.segment not in self.removed]
        in_ledger = [block for path in {b.handle.segment for b in left} for block in self._of(path)]
        assert Counter(b.handle for b in in_ledger) == Counter(b.handle for b in left)
        for block in left:
            self.check_block(block)
        accepted = {(b.receiver, b.epoch, b.sequence): b for b in left}
        segments = {block.handle.segment for block in left}
        with_ledger = scan_log(
            self.storage,
            deleted=lambda path: path in self.removed,
            accepted=self._of,
            expected=segments,
        )
        keys = [(f.header.receiver, f.header.epoch, f.header.sequence) for f in with_ledger]
        assert set(keys) >= set(accepted)
        assert with_ledger.damage == []

    @rule()
    def ledger_is_lost(self) -> None:
        """The log alone tells the blocks that a new ledger is to have, but for those that are undecided."""
        left = {(b.receiver, b.epoch, b.sequence): b for b in self.blocks if b.handle.segment not in self.removed}
        # A power cut may have torn the last segment of a writer that nobody has taken over from.
        scan = scan_log(
            self.storage, deleted=lambda path: path in self.removed, mode=RecoveryMode.SKIP_ANY_CORRUPTED_RECORDS
        )
        undecided: dict[tuple[ReceiverId, int], set[int]] = defaultdict(set)
        found: set[tuple[ReceiverId, int, int]] = set()
        for settled in scan.settled():
            header = settled.frame.header
            key = (header.receiver, header.epoch, header.sequence)
            if settled.accepted is None:
                undecided[header.receiver, header.epoch].add(header.first_sequence)
                left.pop(key, None)
                continue
            assert settled.accepted == (key in left)
            if settled.accepted:
                found.add(key)
                assert (header.ranges, settled.frame.handle) == (left[key].ranges, left[key].handle)
        assert all(len(writes) == 1 for writes in undecided.values())
        assert found == set(left)

    # -- how -------------------------------------------------------------------------------------------------------

    def check_block(self, block: BlockInfo) -> None:
        header, batch = read_block(self.storage, block.handle)
        assert header.ranges == block.ranges
        offsets = batch["offset"].to_pylist()
        number = block.ranges[0].partition.partition
        assert batch["value"].to_pylist() == [self.values[number, offset] for offset in offsets]

    def log(self, life: Life, partition: TopicPartition, counts: list[int]) -> list[BlockInfo]:
        """Blocks that are durable in the log by one write, and no more; none where the disk failed."""
        start, blocks = self.positions[partition], []
        for count in counts:
            values = [b"%d %d" % (partition.partition, start + place) * 40 for place in range(count)]
            self.values.update({(partition.partition, start + place): value for place, value in enumerate(values)})
            batch, _ = make_block(values, partition=partition.partition, from_offset=start)
            ranges = (OffsetRange(partition, start, start + count, count),)
            blocks.append(NewBlock(batch, ranges, self.clock.now_ms()))
            start += count
        try:
            frames = life.writer.write_all(blocks, last_accepted_sequence=life.accepted)
        except WriteFailedError:
            return []
        return [
            BlockInfo(
                life.lease.receiver_id,
                life.lease.epoch,
                frame.sequence,
                block.cut_time_ms,
                frame.handle,
                block.ranges,
                block.records.num_rows,
                frame.payload_bytes,
            )
            for block, frame in zip(blocks, frames, strict=True)
        ]

    def dies(self, index: int) -> None:
        life = self.lives[index]
        if life is not None:
            self.zombies.append(life)
        self.lives[index] = None

    def _of(self, path: str) -> list[BlockInfo]:
        return [block.info for block in self.ledger.blocks.of_segment(STREAM, path)]


@pytest.fixture(scope="module", autouse=True)
def template(tmp_path_factory: pytest.TempPathFactory) -> None:
    """An empty ledger is migrated once and copied for each example."""
    path = tmp_path_factory.mktemp("template") / "ledger.db"
    Ledger.open(f"sqlite:///{path}").close()
    LogLedgerAndPositions.template = path


TestModel = LogLedgerAndPositions.TestCase
TestModel.settings = settings(
    max_examples=settings().max_examples // 3,
    stateful_step_count=30,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
