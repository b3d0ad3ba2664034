"""Generates a random log as several writers leave it, with a record of what they wrote."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import pyarrow as pa
from tests.support.faulty_storage import EVERYTHING, FaultyStorage, WriteFault
from tests.support.memory_storage import MemoryStorage
from tests.support.records import make_block

from headrace.blocks import BlockInfo, ReceiverId, TopicPartition
from headrace.clock import ManualClock
from headrace.wal.errors import WriteFailedError
from headrace.wal.writer import SegmentSettings, WriteAheadLogWriter, WrittenFrame

Key = tuple[int, int, int]


@dataclass
class WrittenLog:
    """``storage`` holds the log. ``accepted`` are the blocks that the ledger accepted, ``batches`` every block that a
    writer tried to write, both by (receiver index, epoch, sequence)."""

    storage: MemoryStorage = field(default_factory=MemoryStorage)
    accepted: dict[Key, BlockInfo] = field(default_factory=dict)
    batches: dict[Key, pa.RecordBatch] = field(default_factory=dict)

    def accepted_in(self, segment: str) -> list[BlockInfo]:
        """The blocks in a segment that the ledger has accepted."""
        return [each for each in self.accepted.values() if each.handle.segment == segment]

    @property
    def expected(self) -> set[str]:
        """The segments that the ledger has."""
        return {each.handle.segment for each in self.accepted.values()}


def write_log(random: Random) -> WrittenLog:
    """Write what one or two receivers leave in one to three epochs each: writes fail at any byte, the ledger refuses
    some blocks, writers are killed or close, replaced writers continue, and cleanup has deleted a segment."""
    log = WrittenLog()
    clock = ManualClock(1_700_000_000_000)
    for index in range(random.choice((1, 1, 2))):
        receiver = _Receiver(log, ReceiverId("flights", "kafka", index), clock, random)
        for epoch in range(1, random.randint(1, 3) + 1):
            receiver.live(epoch)
    for path in sorted(log.expected)[: random.choice((0, 0, 0, 1))]:
        log.storage.delete(path)
        log.accepted = {key: block for key, block in log.accepted.items() if block.handle.segment != path}
    return log


class _Receiver:
    """One receiver, through all its epochs."""

    def __init__(self, log: WrittenLog, receiver: ReceiverId, clock: ManualClock, random: Random) -> None:
        self._log = log
        self._id = receiver
        self._clock = clock
        self._random = random
        self._storage = FaultyStorage(log.storage)
        self._positions = dict.fromkeys(range(random.choice((1, 1, 3))), 0)
        self._left: list[tuple[int, WriteAheadLogWriter]] = []

    def live(self, epoch: int) -> None:
        """Write one epoch. At its end the writer closes its segment or is left as it is."""
        self._clock.advance(1)
        writer = WriteAheadLogWriter(
            self._storage,
            "",
            self._id,
            epoch,
            clock=self._clock,
            segments=SegmentSettings(self._random.choice((1, 6000, 1 << 20))),
            positions=lambda: {_partition(number): offset for number, offset in self._positions.items()},
            accepted=self._log.accepted_in,
        )
        accepted = None
        for _ in range(self._random.randint(0, 6)):
            self._clock.advance(self._random.choice((1, 1, 1, 61_000)))
            is_taken = self._random.random() < 0.9
            frame = self._write(writer, epoch, accepted, is_taken=is_taken)
            accepted = frame.sequence if frame is not None and is_taken else accepted
        if self._left and self._random.random() < 0.3:
            # A replaced writer continues to write, but the ledger accepts none of its blocks.
            of_epoch, zombie = self._left[-1]
            self._write(zombie, of_epoch, None, is_taken=False)
        if self._random.random() < 0.4:
            writer.close(self._random.choice((accepted, None)))
        else:
            self._left.append((epoch, writer))

    def _write(
        self, writer: WriteAheadLogWriter, epoch: int, accepted: int | None, *, is_taken: bool
    ) -> WrittenFrame | None:
        random = self._random
        number = random.choice(list(self._positions))
        start = self._positions[number]
        values = [random.randbytes(random.choice((0, 3, 40, 300))) for _ in range(random.randint(1, 12))]
        batch, ranges = make_block(values, partition=number, from_offset=start)
        if random.random() < 0.2:
            self._storage.write_faults.append(WriteFault(random.choice((0, 50, 700, 2000, EVERYTHING))))
        key = (self._id.index, epoch, writer.next_sequence)
        self._log.batches[key] = batch
        try:
            frame = writer.write(batch, ranges, cut_time_ms=0, last_accepted_sequence=accepted)
        except WriteFailedError:
            return None
        finally:
            self._storage.write_faults.clear()
        if is_taken:
            self._positions[number] = start + len(values)
            self._log.accepted[key] = BlockInfo(
                self._id, epoch, frame.sequence, 0, frame.handle, ranges, len(values), frame.payload_bytes
            )
        return frame


def _partition(number: int) -> TopicPartition:
    return make_block([], partition=number)[1][0].partition
