"""A segment read in order: blocks of any size, and segments that grow while they are read."""

from __future__ import annotations

import pytest
from tests.support.faulty_storage import FaultyStorage
from tests.support.memory_storage import MemoryStorage
from tests.support.records import make_block
from tests.unit.wal.small_segments import (
    CODEC_MAGIC,
    PATH,
    RECEIVER,
    fetch_at_a_time,
    lay_out,
    open_writer,
    opening,
    value_of,
    write,
)

from headrace.blocks import OffsetRange
from headrace.wal.frame import Codec, FrameHeader
from headrace.wal.recovery import scan_log
from headrace.wal.scan import RecoveryMode, scan_segment


@pytest.mark.parametrize("mode", list(RecoveryMode))
def test_an_empty_log_has_no_blocks(mode: RecoveryMode) -> None:
    storage = MemoryStorage()
    assert list(scan_log(storage, mode=mode)) == []
    storage.write_atomically(PATH, b"")
    scan = scan_segment(storage, PATH, newest=True, mode=mode)
    assert list(scan) == []
    assert (scan.opening, scan.ending, scan.torn_tail) == (None, None, None)


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_many_small_blocks(monkeypatch: pytest.MonkeyPatch, codec: Codec) -> None:
    """Many times what is fetched at a time."""
    fetch_at_a_time(monkeypatch, 5_000)
    storage = MemoryStorage()
    sizes = [at % 7 for at in range(400)]
    blocks = write(open_writer(storage, codec), sizes)
    assert CODEC_MAGIC[codec] in storage.read(PATH), "they are compressed as they were to be"
    assert [(f.handle, f.batch()["value"][0].as_py()) for f in scan_log(storage)] == [
        (each.handle, value_of(at, size)) for at, (each, size) in enumerate(zip(blocks, sizes, strict=True))
    ]


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
@pytest.mark.parametrize("window_bytes", [1, 64, 5000, 1 << 20])
def test_blocks_of_any_size_are_read_across_windows(
    monkeypatch: pytest.MonkeyPatch, codec: Codec, window_bytes: int
) -> None:
    """Smaller, larger and much larger than what is fetched at a time."""
    fetch_at_a_time(monkeypatch, window_bytes)
    storage = MemoryStorage()
    sizes = [0, 3, 50, 20_000, 1, 300_000, 17]
    blocks = write(open_writer(storage, codec), sizes)
    assert CODEC_MAGIC[codec] in storage.read(PATH), "they are compressed as they were to be"
    assert [(f.handle, f.batch()["value"][0].as_py()) for f in scan_log(storage)] == [
        (each.handle, value_of(at, size)) for at, (each, size) in enumerate(zip(blocks, sizes, strict=True))
    ]


def test_frames_that_end_where_a_window_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """At its last byte, one before and one after, in the prefix and in the header of the next, at the file's end."""
    storage = MemoryStorage()
    blocks = write(open_writer(storage), [10, 2000, 40, 7])
    for end in (*(block.handle.offset for block in blocks), storage.size(PATH)):
        for nudge in (-41, -40, -39, -8, -1, 0, 1, 8, 39, 40, 41):
            fetch_at_a_time(monkeypatch, end + nudge)
            scan = scan_log(storage)
            assert [f.handle for f in scan] == [b.handle for b in blocks]
            assert (scan.torn_tails, scan.damage) == ([], [])


@pytest.mark.parametrize("shown", ["nothing", "half a prefix", "a prefix", "a header", "all but a byte"])
def test_a_segment_being_written_is_read_as_far_as_it_goes(shown: str) -> None:
    """What is not whole yet is a tail for now; read again it is there."""
    storage = MemoryStorage()
    first, second = write(open_writer(storage), [500, 500])
    whole = storage.read(PATH)
    header_end = second.handle.offset + second.handle.length - second.payload_bytes
    length = {
        "nothing": second.handle.offset,
        "half a prefix": second.handle.offset + 20,
        "a prefix": second.handle.offset + 40,
        "a header": header_end,
        "all but a byte": len(whole) - 1,
    }[shown]
    growing = MemoryStorage()
    growing.write_atomically(PATH, whole[:length])
    scan = scan_segment(growing, PATH, newest=True)
    assert [f.handle for f in scan] == [first.handle]
    assert scan.is_open
    assert scan.valid_bytes == second.handle.offset
    assert (scan.torn_tail is None) == (shown == "nothing")
    growing.write_atomically(PATH, whole)
    scan = scan_segment(growing, PATH, newest=True)
    assert [f.handle for f in scan] == [first.handle, second.handle]
    assert scan.torn_tail is None


def test_a_reader_beside_the_writer_sees_each_written_block_once(storage: FaultyStorage) -> None:
    writer = open_writer(storage)
    for at in range(5):
        batch, ranges = make_block([b"x"], from_offset=at)
        writer.write(batch, ranges, cut_time_ms=0, last_accepted_sequence=None)
        scan = scan_log(storage)
        assert len(list(scan)) == at + 1
        assert (scan.torn_tails, scan.damage, len(scan.open)) == ([], [], 1)


def test_offsets_and_sequences_go_up_to_the_highest() -> None:
    highest = (1 << 63) - 1
    tp = make_block([])[1][0].partition
    ranges = (OffsetRange(tp, highest - 1, highest, 1),)
    header = FrameHeader(RECEIVER, 1, highest, highest - 1, highest, ranges, 1, 0, event_time_ms=highest)
    storage, _ = lay_out([opening(), header])
    assert [f.header for f in scan_segment(storage, PATH, newest=True)] == [header]
