"""Whatever is written and whatever happens to it afterwards: no reader returns a record that was not written, and none
misses one in silence."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.faulty_storage import EVERYTHING, FaultyStorage, WriteFault
from tests.support.memory_storage import MemoryStorage
from tests.support.records import make_block
from tests.unit.wal.torn_tails import repair

from headrace.blocks import BlockHandle, ReceiverId
from headrace.clock import ManualClock
from headrace.wal.errors import DamagedFrameError, LogVersionError, PayloadError, WalError, WriteFailedError
from headrace.wal.frame import Codec, decode, encode
from headrace.wal.reader import read_block
from headrace.wal.recovery import LogScan, scan_log
from headrace.wal.scan import RecoveryMode, ScannedFrame, scan_segment
from headrace.wal.writer import SegmentSettings, WriteAheadLogWriter

RECEIVER = ReceiverId("flights", "kafka", 0)
SEGMENT = "kafka-0/0000000001-000000-1700000000000.wal"
Key = tuple[int, int]


@dataclass
class Written:
    """A log and what its writers were told."""

    storage: FaultyStorage
    durable: dict[Key, tuple[BlockHandle, pa.RecordBatch]] = field(default_factory=dict)
    failed: dict[Key, pa.RecordBatch] = field(default_factory=dict)

    def check_truth(self, frames: list[ScannedFrame]) -> None:
        """Every frame is one that was written, in order and once."""
        keys = [(f.header.epoch, f.header.sequence) for f in frames]
        assert keys == sorted(set(keys))
        for key, frame in zip(keys, frames, strict=True):
            expected = self.durable[key][1] if key in self.durable else self.failed[key]
            assert frame.batch().equals(expected)

    def check_nothing_missed(self, frames: list[ScannedFrame], scan: LogScan) -> None:
        """Every block that is not there is behind something that was reported."""
        there = {(f.header.epoch, f.header.sequence) for f in frames}
        reported = [(tail.segment, tail.offset) for tail in scan.torn_tails]
        reported += [(damage.segment, damage.offset) for damage in scan.damage]
        for key, (handle, _) in self.durable.items():
            if key not in there:
                is_reported = any(
                    segment == handle.segment and at < handle.offset + handle.length for segment, at in reported
                )
                assert is_reported or handle.segment in scan.open


@st.composite
def logs(draw: st.DrawFn) -> Written:
    """Blocks written by one to three epochs, with some writes failing at some byte."""
    log = Written(FaultyStorage(MemoryStorage()))
    clock = ManualClock(1_700_000_000_000)
    offset = 0
    for epoch in range(1, draw(st.integers(1, 3)) + 1):
        segments = SegmentSettings(draw(st.sampled_from([1, 6000, 1 << 20])))
        writer = WriteAheadLogWriter(log.storage, "", RECEIVER, epoch, clock=clock, segments=segments)
        accepted = None
        for _ in range(draw(st.integers(0, 5))):
            clock.advance(1)
            batch, ranges = make_block([b"v%d" % offset] * draw(st.integers(0, 20)), from_offset=offset)
            fails = draw(st.sampled_from([None, None, None, 0, 50, 700, 2000, EVERYTHING]))
            if fails is not None:
                log.storage.write_faults.append(WriteFault(fails))
            sequence = writer.next_sequence
            try:
                frame = writer.write(batch, ranges, cut_time_ms=0, last_accepted_sequence=accepted)
            except WriteFailedError:
                log.failed[epoch, sequence] = batch
            else:
                assert frame.sequence == sequence
                log.durable[epoch, sequence] = frame.handle, batch
                accepted = sequence
                offset += batch.num_rows
            log.storage.write_faults.clear()
        if draw(st.booleans()):
            writer.close(accepted)
    return log


def damage(log: Written, data: st.DataObject) -> None:
    """A flipped bit, a cut, zeros or garbage, somewhere."""
    segments = [path for path in log.storage.paths() if log.storage.size(path)]
    if not segments:
        return
    path = data.draw(st.sampled_from(segments))
    size = log.storage.size(path)
    starts = [0] + [h.offset for h, _ in log.durable.values() if h.segment == path and h.offset < size]
    at = data.draw(st.one_of(st.integers(0, size - 1), st.sampled_from(starts)))
    kind = data.draw(st.sampled_from(["flip", "cut", "zero", "garbage"]))
    if kind == "flip":
        log.storage.flip_bit(path, at * 8 + data.draw(st.integers(0, 7)))
    elif kind == "cut":
        log.storage.cut(path, at)
    elif kind == "zero":
        log.storage.zero(path, at, data.draw(st.integers(1, size)))
    else:
        log.storage.overwrite(path, at, data.draw(st.binary(min_size=1, max_size=100)))


@given(logs())
def test_an_undamaged_log_is_read_whole(log: Written) -> None:
    scan = scan_log(log.storage)
    frames = list(scan)
    log.check_truth(frames)
    assert {(f.header.epoch, f.header.sequence) for f in frames} >= set(log.durable)
    assert scan.damage == []
    for handle, batch in log.durable.values():
        assert read_block(log.storage, handle)[1].equals(batch)


@given(logs())
def test_verdicts_are_right_where_there_are_any(log: Written) -> None:
    for settled in scan_log(log.storage).settled():
        key = settled.frame.header.epoch, settled.frame.header.sequence
        assert settled.accepted in (None, key in log.durable)
    undecided = Counter(s.frame.header.epoch for s in scan_log(log.storage).settled() if s.accepted is None)
    assert all(count == 1 for count in undecided.values())


@given(logs(), st.data())
def test_a_damaged_log_says_so(log: Written, data: st.DataObject) -> None:
    damage(log, data)
    scan = scan_log(log.storage)
    frames: list[ScannedFrame] = []
    try:
        frames.extend(scan)
    except WalError as error:
        assert isinstance(error, DamagedFrameError)
        log.check_truth(frames)
    else:
        log.check_truth(frames)
        log.check_nothing_missed(frames, scan)
        # Only where no later segment has a header that could vouch for it.
        headless = {tail.segment for tail in scan.torn_tails if tail.offset == 0}
        headless |= {path for path in log.storage.paths() if not log.storage.size(path)}
        for path in scan.open:
            assert {later for later in log.storage.paths("kafka-0") if later > path} <= headless


@given(logs(), st.data())
def test_handles_of_a_damaged_log_give_the_block_or_an_error(log: Written, data: st.DataObject) -> None:
    damage(log, data)
    for handle, batch in log.durable.values():
        try:
            _, got = read_block(log.storage, handle)
        except WalError:
            continue
        assert got.equals(batch)


@given(logs(), st.data())
def test_skipping_saves_what_is_whole_and_reports_the_rest(log: Written, data: st.DataObject) -> None:
    for _ in range(data.draw(st.integers(1, 3))):
        damage(log, data)
    scan = scan_log(log.storage, mode=RecoveryMode.SKIP_ANY_CORRUPTED_RECORDS)
    try:
        frames = list(scan)
    except LogVersionError:
        # The damage has made of a version number the next one: that is refused in every mode.
        return
    log.check_truth(frames)
    log.check_nothing_missed(frames, scan)


@given(logs(), st.data())
def test_repair_loses_nothing_that_could_be_read(log: Written, data: st.DataObject) -> None:
    damage(log, data)
    segments = [path for path in log.storage.paths() if path.endswith(".wal")]
    if not segments:
        return
    try:
        before = [f.handle for f in scan_segment(log.storage, segments[-1], newest=True)]
        repair(log.storage, segments[-1])
    except DamagedFrameError:
        return
    if log.storage.exists(segments[-1]):
        scan = scan_segment(log.storage, segments[-1], newest=True)
        assert [f.handle for f in scan] == before
        assert scan.torn_tail is None
    else:
        assert before == []


@given(st.binary(max_size=2000), st.sampled_from(list(RecoveryMode)), st.booleans())
def test_garbage_is_never_a_block(garbage: bytes, mode: RecoveryMode, with_magic: bool) -> None:
    storage = MemoryStorage()
    storage.write_atomically(SEGMENT, (b"HRWL\x01\x02\x00\x00" if with_magic else b"") + garbage)
    for newest in (True, False):
        try:
            assert list(scan_segment(storage, SEGMENT, newest=newest, mode=mode)) == []
        except WalError as error:
            assert isinstance(error, DamagedFrameError)


@given(st.binary(max_size=500))
def test_a_payload_of_garbage_is_an_error(garbage: bytes) -> None:
    with pytest.raises(PayloadError):
        decode(garbage)


@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "key": st.none() | st.binary(max_size=30),
                "value": st.none() | st.binary(max_size=30),
                "headers": st.none()
                | st.lists(st.fixed_dictionaries({"key": st.text(), "value": st.none() | st.binary(max_size=9)})),
            }
        ),
        max_size=20,
    ),
    st.sampled_from(["zstd", "lz4"]),
)
def test_any_records_round_trip(records: list[dict[str, Any]], codec: Codec) -> None:
    columns = {name: [record[name] for record in records] for name in ("key", "value", "headers")}
    batch, _ = make_block(columns["value"], keys=columns["key"], headers=columns["headers"])
    assert decode(encode(batch, codec)).equals(batch)
