"""Damage: a torn tail is told from everything else, and everything else is an error that says what is lost."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.support.faulty_storage import FaultyStorage
from tests.support.records import make_block

from headrace.blocks import BlockHandle, BlockInfo, OffsetRange, ReceiverId
from headrace.wal import frame
from headrace.wal.errors import DamagedFrameError, FrameTooLongError, SegmentMissingError, TornTailError
from headrace.wal.reader import read_block
from headrace.wal.recovery import scan_log
from headrace.wal.scan import KnownOfSegment, RecoveryMode, scan_segment
from headrace.wal.writer import WriteAheadLogWriter

OpenWriter = Callable[..., WriteAheadLogWriter]
Ranges = tuple[OffsetRange, ...]
SKIP = RecoveryMode.SKIP_ANY_CORRUPTED_RECORDS


@pytest.fixture
def blocks(open_writer: OpenWriter) -> tuple[list[BlockHandle], list[Ranges]]:
    """Four blocks of ten records in one segment that is still open."""
    writer = open_writer()
    made = [make_block([b"%d" % i] * 10, from_offset=10 * i) for i in range(4)]
    handles = [writer.write(b, r, cut_time_ms=0, last_accepted_sequence=None).handle for b, r in made]
    return handles, [ranges for _, ranges in made]


Blocks = tuple[list[BlockHandle], list[Ranges]]


def sequences(storage: FaultyStorage, segment: str, mode: RecoveryMode = SKIP) -> list[int]:
    return [f.header.sequence for f in scan_segment(storage, segment, newest=True, mode=mode)]


def test_a_torn_tail_is_reported_at_every_length(storage: FaultyStorage, blocks: Blocks) -> None:
    handles, _ = blocks
    last = handles[-1]
    for length in range(last.offset + last.length - 1, last.offset, -97):
        storage.cut(last.segment, length)
        scan = scan_segment(storage, last.segment, newest=True)
        assert [f.header.sequence for f in scan] == [0, 1, 2]
        assert scan.valid_bytes == last.offset
        assert scan.torn_tail is not None
        assert (scan.torn_tail.offset, scan.torn_tail.length) == (last.offset, length - last.offset)
        with pytest.raises(DamagedFrameError):
            read_block(storage, last)


def test_a_torn_tail_with_a_whole_header_names_its_offsets(storage: FaultyStorage, blocks: Blocks) -> None:
    handles, ranges = blocks
    storage.cut(handles[-1].segment, handles[-1].offset + handles[-1].length - 1)
    scan = scan_segment(storage, handles[-1].segment, newest=True)
    list(scan)
    assert scan.torn_tail is not None
    assert scan.torn_tail.ranges == ranges[-1]
    assert "flights-0[30, 40)" in str(scan.torn_tail)


def test_zeros_at_the_end_are_a_torn_tail(storage: FaultyStorage, blocks: Blocks) -> None:
    last = blocks[0][-1]
    storage.zero(last.segment, last.offset, last.length)
    scan = scan_segment(storage, last.segment, newest=True)
    assert len(list(scan)) == 3
    assert scan.torn_tail is not None
    assert "zeros" in scan.torn_tail.reason


def test_a_torn_tail_is_an_error_where_none_can_be(storage: FaultyStorage, blocks: Blocks) -> None:
    last = blocks[0][-1]
    storage.cut(last.segment, last.offset + 50)
    with pytest.raises(TornTailError):
        list(scan_segment(storage, last.segment, newest=False))
    with pytest.raises(TornTailError):
        list(scan_segment(storage, last.segment, newest=True, mode=RecoveryMode.ABSOLUTE_CONSISTENCY))


def test_a_closed_segment_cut_between_two_frames_is_noticed(storage: FaultyStorage, blocks: Blocks) -> None:
    last = blocks[0][-1]
    storage.cut(last.segment, last.offset)
    with pytest.raises(TornTailError, match="without its end frame"):
        list(scan_segment(storage, last.segment, newest=False))
    with pytest.raises(DamagedFrameError, match="bytes were durable"):
        list(scan_segment(storage, last.segment, newest=True, durable_length=last.offset + last.length))


def test_a_newest_segment_cut_between_frames_is_noticed(
    storage: FaultyStorage, blocks: Blocks, receiver: ReceiverId
) -> None:
    """Nothing in it is damaged, and no log knows how long its newest segment was: who took its blocks does."""
    handles, ranges = blocks
    accepted = [BlockInfo(receiver, 1, at, 0, handle, ranges[at], 10, 0) for at, handle in enumerate(handles)]
    segment = handles[0].segment
    storage.cut(segment, handles[2].offset)
    assert scan_segment(storage, segment, newest=True).torn_tail is None
    scan = scan_segment(storage, segment, newest=True, known=KnownOfSegment(accepted=accepted))
    with pytest.raises(DamagedFrameError, match="the ledger has blocks up to") as damage:
        list(scan)
    assert (damage.value.offset, damage.value.exact) == (handles[2].offset, True)
    assert damage.value.ranges == ranges[2] + ranges[3]


def test_a_damaged_payload_names_segment_offset_and_ranges(storage: FaultyStorage, blocks: Blocks) -> None:
    handles, ranges = blocks
    second = handles[1]
    storage.flip_bit(second.segment, (second.offset + second.length - 10) * 8)
    for read in (
        lambda: list(scan_segment(storage, second.segment, newest=True)),
        lambda: [read_block(storage, second)],
    ):
        with pytest.raises(DamagedFrameError, match="checksum") as damage:
            read()
        error = damage.value
        assert (error.segment, error.offset, error.ranges, error.exact) == (
            second.segment,
            second.offset,
            ranges[1],
            True,
        )
        assert "flights-0[10, 20)" in str(error)
    assert sequences(storage, second.segment) == [0, 2, 3]


def test_a_damaged_header_infers_the_ranges_from_its_neighbours(storage: FaultyStorage, blocks: Blocks) -> None:
    handles, ranges = blocks
    third = handles[2]
    storage.flip_bit(third.segment, (third.offset + 45) * 8)
    scan = scan_segment(storage, third.segment, newest=True)
    with pytest.raises(DamagedFrameError, match="inferred from the frames around it") as damage:
        list(scan)
    assert (damage.value.ranges, damage.value.exact) == (ranges[2], False)
    assert sequences(storage, third.segment) == [0, 1, 3]


def test_damage_before_the_tail_is_no_torn_tail(storage: FaultyStorage, blocks: Blocks) -> None:
    """Zeros over one and a half blocks: something whole follows, so this is no crash's doing."""
    handles, _ = blocks
    storage.zero(handles[1].segment, handles[1].offset, handles[1].length + 60)
    with pytest.raises(DamagedFrameError) as damage:
        list(scan_segment(storage, handles[1].segment, newest=True))
    assert not isinstance(damage.value, TornTailError)
    assert damage.value.ranges is not None
    assert [(r.from_offset, r.until_offset) for r in damage.value.ranges] == [(10, 30)]


def test_a_damaged_segment_header_loses_no_block(storage: FaultyStorage, blocks: Blocks) -> None:
    handles, _ = blocks
    storage.zero(handles[0].segment, 0, 40)
    with pytest.raises(DamagedFrameError):
        list(scan_segment(storage, handles[0].segment, newest=True))
    assert sequences(storage, handles[0].segment) == [0, 1, 2, 3]
    assert read_block(storage, handles[0])[0].sequence == 0


def test_point_in_time_stops_before_the_damage_and_reports_it(storage: FaultyStorage, blocks: Blocks) -> None:
    handles, ranges = blocks
    storage.flip_bit(handles[1].segment, (handles[1].offset + handles[1].length - 1) * 8)
    scan = scan_segment(storage, handles[1].segment, newest=True, mode=RecoveryMode.POINT_IN_TIME_RECOVERY)
    assert [f.header.sequence for f in scan] == [0]
    assert [error.ranges for error in scan.damage] == [ranges[1]]


def test_a_frame_copied_elsewhere_is_not_read_twice(storage: FaultyStorage, blocks: Blocks) -> None:
    handles, _ = blocks
    first, second = handles[0], handles[1]
    data = storage.read(first.segment)
    copy = data[first.offset : first.offset + first.length]
    storage.overwrite(second.segment, second.offset, copy)
    with pytest.raises(DamagedFrameError, match="another place"):
        read_block(storage, second)
    assert 0 not in sequences(storage, first.segment)[1:]


def test_bytes_behind_the_end_frame_are_damage(storage: FaultyStorage, open_writer: OpenWriter) -> None:
    writer = open_writer()
    batch, ranges = make_block([b"x"])
    segment = writer.write(batch, ranges, cut_time_ms=0, last_accepted_sequence=None).handle.segment
    writer.close()
    length = storage.size(segment)
    storage.write_atomically(segment, storage.read(segment) + b"more")
    for durable_length in (None, length):
        with pytest.raises(DamagedFrameError, match="follow"):
            list(scan_segment(storage, segment, newest=True, durable_length=durable_length))


def test_a_value_that_holds_a_log_is_not_taken_for_one(storage: FaultyStorage, open_writer: OpenWriter) -> None:
    """A topic may carry anything, a segment of this very log too."""
    writer = open_writer(codec="lz4")
    batch, ranges = make_block([b"x"])
    handle = writer.write(batch, ranges, cut_time_ms=0, last_accepted_sequence=None).handle
    evil, evil_ranges = make_block([storage.read(handle.segment)], from_offset=1)
    last = writer.write(evil, evil_ranges, cut_time_ms=0, last_accepted_sequence=0).handle
    storage.flip_bit(last.segment, last.offset * 8)
    scan = scan_segment(storage, last.segment, newest=True)
    assert [f.header.sequence for f in scan] == [0]
    assert scan.torn_tail is not None


@pytest.mark.parametrize("length", [0xFFFFFFFF, frame.MAX_PAYLOAD_BYTES])
def test_a_garbage_length_allocates_nothing(storage: FaultyStorage, blocks: Blocks, length: int) -> None:
    last = blocks[0][-1]
    storage.overwrite(last.segment, last.offset + 28, struct.pack("<I", length))
    scan = scan_segment(storage, last.segment, newest=True)
    tracemalloc.start()
    try:
        assert len(list(scan)) == 3
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert scan.torn_tail is not None


@pytest.mark.parametrize(("offset", "length"), [(0, 1 << 40), (-1, 100), (0, 0), (0, frame.PREFIX_BYTES)])
def test_an_impossible_handle_is_refused(storage: FaultyStorage, blocks: Blocks, offset: int, length: int) -> None:
    with pytest.raises(FrameTooLongError):
        read_block(storage, BlockHandle(blocks[0][0].segment, offset, length))


def test_a_handle_that_is_off_is_an_error(storage: FaultyStorage, blocks: Blocks) -> None:
    first = blocks[0][0]
    for wrong in (
        replace(first, offset=first.offset + 1),
        replace(first, length=first.length - 1),
        replace(first, length=first.length + 1),
        replace(first, offset=0),
        replace(first, offset=1 << 40),
    ):
        with pytest.raises(DamagedFrameError):
            read_block(storage, wrong)


def test_a_missing_segment_is_named(storage: FaultyStorage, blocks: Blocks) -> None:
    first = blocks[0][0]
    storage.delete(first.segment)
    with pytest.raises(SegmentMissingError, match=first.segment):
        read_block(storage, first)
    with pytest.raises(SegmentMissingError, match=first.segment):
        list(scan_segment(storage, first.segment, newest=True))


def test_a_segment_missing_between_others_is_noticed(storage: FaultyStorage, open_writer: OpenWriter) -> None:
    writer = open_writer(segment_bytes=1)
    segments = []
    for i in range(4):
        batch, ranges = make_block([b"x"], from_offset=i)
        segments.append(writer.write(batch, ranges, cut_time_ms=0, last_accepted_sequence=None).handle.segment)
    storage.delete(segments[0])
    scan = scan_log(storage)
    assert [f.header.sequence for f in scan] == [1, 2, 3]
    assert [missing.segment for missing in scan.missing] == [segments[0]]
    storage.delete(segments[2])
    with pytest.raises(SegmentMissingError, match=segments[2]):
        list(scan_log(storage))
    assert len(list(scan_log(storage, deleted=lambda segment: segment == segments[2]))) == 2
    skipping = scan_log(storage, mode=SKIP)
    assert len(list(skipping)) == 2
    assert len(skipping.missing) == 2


def test_a_segment_cut_after_another_was_opened_is_noticed(storage: FaultyStorage, open_writer: OpenWriter) -> None:
    writer = open_writer(segment_bytes=1)
    handles = []
    for i in range(2):
        batch, ranges = make_block([b"x"], from_offset=i)
        handles.append(writer.write(batch, ranges, cut_time_ms=0, last_accepted_sequence=None).handle)
    storage.cut(handles[0].segment, handles[0].offset)
    with pytest.raises(DamagedFrameError, match="durable"):
        list(scan_log(storage))
