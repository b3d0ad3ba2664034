"""A segment read in order: blocks of any size, frames that do not belong, segments that grow while they are read."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from headrace.blocks import BlockHandle, BlockInfo, OffsetRange, ReceiverId, TopicPartition
from headrace.clock import ManualClock
from headrace.testing.faulty_files import FaultyFiles
from headrace.testing.faulty_storage import FaultyStorage
from headrace.testing.memory_storage import MemoryStorage
from headrace.testing.records import make_block
from headrace.wal import frame, window
from headrace.wal.errors import DamagedFrameError, StorageError, TornTailError
from headrace.wal.headers import AnyHeader, FrameHeader, SegmentEnd, SegmentHeader
from headrace.wal.local_storage import LocalStorage
from headrace.wal.log_scan import scan_log
from headrace.wal.lost_ranges import KnownOfSegment
from headrace.wal.payload import Codec, encode
from headrace.wal.reader import read_block
from headrace.wal.scan import RecoveryMode, scan_segment
from headrace.wal.segments import SegmentName
from headrace.wal.writer import WriteAheadLogWriter

RECEIVER = ReceiverId("flights", "kafka", 0)
PATH = SegmentName("kafka", 0, 1, 0, 1_700_000_000_000).path
OTHER = SegmentName("kafka", 0, 1, 1, 1_700_000_000_000).path
SKIP = RecoveryMode.SKIP_ANY_CORRUPTED_RECORDS
ABSOLUTE = RecoveryMode.ABSOLUTE_CONSISTENCY
PASSING = [mode for mode in RecoveryMode if mode.passes_over]
# What a compressed buffer begins with.
CODEC_MAGIC: dict[Codec, bytes] = {"zstd": bytes.fromhex("28b52ffd"), "lz4": bytes.fromhex("04224d18")}


def open_writer(storage: MemoryStorage | FaultyStorage | LocalStorage, codec: Codec = "zstd") -> WriteAheadLogWriter:
    return WriteAheadLogWriter(storage, "", RECEIVER, 1, clock=ManualClock(1_700_000_000_000), codec=codec)


def value_of(at: int, size: int) -> bytes:
    """The value of a block that `write` writes."""
    return Random(at).randbytes(size)


def write(writer: WriteAheadLogWriter, sizes: Sequence[int]) -> list[BlockInfo]:
    blocks = []
    for at, size in enumerate(sizes):
        batch, ranges = make_block([value_of(at, size)], from_offset=at)
        frame = writer.write(batch, ranges, cut_time_ms=0, last_accepted_sequence=None)
        blocks.append(BlockInfo(RECEIVER, 1, frame.sequence, 0, frame.handle, ranges, 1, frame.payload_bytes))
    return blocks


def opening() -> SegmentHeader:
    return SegmentHeader(RECEIVER, 1, 0, 1_700_000_000_000, 0, None, {}, ())


def block(sequence: int) -> FrameHeader:
    return FrameHeader(RECEIVER, 1, sequence, None, 0, make_block([b"x"], from_offset=sequence)[1], 1, 0)


def ending() -> SegmentEnd:
    return SegmentEnd(RECEIVER, 1, 1, 1, None, 1_700_000_000_001)


def lay_out(headers: Sequence[AnyHeader], path: str = PATH) -> tuple[MemoryStorage, list[int]]:
    """A segment of these frames, each at its own place, and where they start."""
    data, starts = b"", []
    payload = encode(make_block([b"x"])[0])
    for header in headers:
        starts.append(len(data))
        given = payload if isinstance(header, FrameHeader) else None
        head, body = frame.build(header, given, segment=frame.segment_id(path), offset=len(data))
        data += head + (b"" if body is None else body.to_pybytes())
    storage = MemoryStorage()
    storage.write_atomically(path, data)
    return storage, starts


@pytest.mark.parametrize("mode", list(RecoveryMode))
def test_an_empty_log_has_no_blocks(mode: RecoveryMode) -> None:
    storage = MemoryStorage()
    assert list(scan_log(storage, mode=mode)) == []
    storage.write_atomically(PATH, b"")
    scan = scan_segment(storage, PATH, newest=True, mode=mode)
    assert list(scan) == []
    assert (scan.opening, scan.ending, scan.torn_tail) == (None, None, None)


def fetch_at_a_time(monkeypatch: pytest.MonkeyPatch, window_bytes: int) -> None:
    """Have scans read so many bytes ahead: the default is bound to its parameter, not looked up by its name."""
    assert window.Window.__init__.__kwdefaults__ is not None
    monkeypatch.setitem(window.Window.__init__.__kwdefaults__, "read_ahead", window_bytes)


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_many_small_blocks(codec: Codec) -> None:
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
    for end in (*(each.handle.offset for each in blocks), storage.size(PATH)):
        for nudge in (-41, -40, -39, -8, -1, 0, 1, 8, 39, 40, 41):
            fetch_at_a_time(monkeypatch, end + nudge)
            scan = scan_log(storage)
            assert [f.handle for f in scan] == [b.handle for b in blocks]
            assert (scan.torn_tails, scan.damage) == ([], [])


def test_a_search_finds_the_next_frame_wherever_its_chunks_end(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = MemoryStorage()
    first, second, third = write(open_writer(storage), [500, 700, 30])
    data = bytearray(storage.files[first.handle.segment])
    data[second.handle.offset + 20] ^= 1
    storage.write_atomically(PATH, bytes(data))
    for search_bytes in range(8, 40):
        monkeypatch.setattr(window, "SEARCH_BYTES", search_bytes)
        scan = scan_segment(storage, PATH, newest=True, mode=SKIP)
        assert [f.handle for f in scan] == [first.handle, third.handle]


def test_values_full_of_magics_do_not_slow_a_search_down() -> None:
    """Of three million places that begin like a frame none is looked at twice."""
    storage = MemoryStorage()
    write(open_writer(storage), [30, 30])
    reads = 0
    filler = frame.MAGIC * 3_000_000
    storage.files[PATH] += filler

    class Counted(MemoryStorage):
        def open(self, path: str):  # type: ignore[no-untyped-def]
            file = super().open(path)
            plain = file.read_at

            def read_at(offset: int, length: int):  # type: ignore[no-untyped-def]
                nonlocal reads
                reads += 1
                return plain(offset, length)

            file.read_at = read_at  # type: ignore[method-assign]
            return file

    scan = scan_segment(Counted(storage.files), PATH, newest=True)
    assert len(list(scan)) == 2
    assert scan.torn_tail is not None
    assert scan.torn_tail.length == len(filler)
    assert reads < 20


@pytest.mark.parametrize(
    ("headers", "wrong", "reason"),
    [
        ([block(0), block(1)], 0, "a segment has one header"),
        ([ending()], 0, "a segment has one header"),
        ([opening(), block(0), opening(), block(1)], 2, "a segment has one header"),
        ([opening(), block(0), ending(), block(1)], 3, "follow the segment's end frame"),
        ([opening(), block(0), ending(), ending()], 3, "follow the segment's end frame"),
        ([opening(), block(1), block(0), block(2)], 2, "sequence 0 comes after 1"),
        ([opening(), block(0), block(0), block(1)], 2, "sequence 0 comes after 0"),
        ([opening(), block(0), replace(block(1), epoch=2), block(1)], 2, "epoch 2"),
    ],
)
def test_a_frame_where_it_does_not_belong_is_damage(headers: list[AnyHeader], wrong: int, reason: str) -> None:
    """Each frame is whole and at its place; it is the order that no writer has written."""
    storage, starts = lay_out(headers)
    with pytest.raises(DamagedFrameError, match=reason) as damage:
        list(scan_segment(storage, PATH, newest=False, durable_length=storage.size(PATH)))
    assert damage.value.offset == starts[wrong]


def test_a_frame_of_an_unknown_kind_is_damage_and_not_passed_over() -> None:
    storage, starts = lay_out([opening(), block(0), block(1)])
    data = bytearray(storage.read(PATH))
    data[starts[1] + 5] = 9
    storage.write_atomically(PATH, bytes(data))
    with pytest.raises(DamagedFrameError, match="no frame of kind 9"):
        list(scan_segment(storage, PATH, newest=True))


def test_a_block_with_other_records_than_its_header_says_is_damage() -> None:
    """Every checksum holds: it is the writer that has written fewer than it said."""
    ranges = make_block([b"x", b"y"])[1]
    storage, (_, start) = lay_out([opening(), replace(block(0), ranges=ranges, records=2)])
    handle = BlockHandle(PATH, start, storage.size(PATH) - start)
    (scanned,) = scan_segment(storage, PATH, newest=True)
    for read in (lambda: read_block(storage, handle), scanned.batch):
        with pytest.raises(DamagedFrameError, match="the payload has 1 records, its header says 2") as damage:
            read()
        assert (damage.value.segment, damage.value.offset, damage.value.ranges) == (PATH, start, ranges)


@pytest.mark.parametrize("length", [1, 20_000, 0xFFFFFFFF])
@pytest.mark.parametrize("at", [24, 28])
@pytest.mark.parametrize("place", ["middle", "end"])
def test_a_bad_length_is_damage_in_the_middle_and_a_torn_tail_at_the_end(length: int, at: int, place: str) -> None:
    storage = MemoryStorage()
    blocks = write(open_writer(storage), [100, 100, 100])
    bad = blocks[1 if place == "middle" else 2].handle
    data = bytearray(storage.read(PATH))
    data[bad.offset + at : bad.offset + at + 4] = length.to_bytes(4, "little")
    storage.write_atomically(PATH, bytes(data))
    if place == "end":
        scan = scan_segment(storage, PATH, newest=True)
        assert len(list(scan)) == 2
        assert scan.torn_tail is not None
        with pytest.raises(TornTailError):
            list(scan_segment(storage, PATH, newest=True, mode=ABSOLUTE))
    else:
        with pytest.raises(DamagedFrameError):
            list(scan_segment(storage, PATH, newest=True))
        scan = scan_segment(storage, PATH, newest=True, mode=SKIP)
        assert [f.header.sequence for f in scan] == [0, 2]
    # With the ledger it is damage wherever it stands.
    with pytest.raises(DamagedFrameError) as damage:
        list(scan_segment(storage, PATH, newest=True, known=KnownOfSegment(accepted=blocks)))
    assert damage.value.ranges == blocks[1 if place == "middle" else 2].ranges


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_a_payload_that_does_not_match_its_checksum_is_never_decoded(codec: Codec) -> None:
    storage = MemoryStorage()
    first, second, _ = write(open_writer(storage, codec), [1000, 1000, 1000])
    end = second.handle.offset + second.handle.length
    for at in (end - 1, end - 500, end - 999):
        data = bytearray(storage.read(PATH))
        data[at] ^= 0x40
        damaged = MemoryStorage()
        damaged.write_atomically(PATH, bytes(data))
        with pytest.raises(DamagedFrameError, match="checksum"):
            read_block(damaged, second.handle)
        with pytest.raises(DamagedFrameError, match="checksum"):
            list(scan_segment(damaged, PATH, newest=True))
        assert read_block(damaged, first.handle)[0].sequence == 0


def test_damage_over_two_blocks_loses_both_and_joins_nothing() -> None:
    """From within the payload of the second to within the header of the third, whose lengths are gone."""
    storage = MemoryStorage()
    blocks = write(open_writer(storage), [500] * 5)
    second, third = blocks[1].handle, blocks[2].handle
    data = bytearray(storage.read(PATH))
    data[third.offset - 100 : third.offset + 60] = bytes(160)
    storage.write_atomically(PATH, bytes(data))
    scan = scan_segment(storage, PATH, newest=True, mode=SKIP)
    assert [f.header.sequence for f in scan] == [0, 3, 4]
    # The second's own header tells of the second, its neighbours of the third: none is missing in the account.
    assert [(each.offset, each.ranges, each.exact) for each in scan.damage] == [
        (second.offset, blocks[1].ranges, True),
        (third.offset, blocks[2].ranges, False),
    ]
    scan = scan_segment(storage, PATH, newest=True, mode=SKIP, known=KnownOfSegment(accepted=blocks))
    assert len(list(scan)) == 3
    assert [(each.ranges, each.exact) for each in scan.damage] == [(blocks[1].ranges, True), (blocks[2].ranges, True)]


def test_a_segment_cut_short_says_what_is_lost_by_the_segment_that_follows() -> None:
    storage = MemoryStorage()
    positions: dict[TopicPartition, int] = {}
    clock = ManualClock(1_700_000_000_000)
    writer = WriteAheadLogWriter(storage, "", RECEIVER, 1, clock=clock, positions=lambda: positions)
    handles: list[tuple[BlockHandle, tuple[OffsetRange, ...]]] = []
    for at in range(4):
        if at == 3:
            clock.advance(60_000)
        batch, ranges = make_block([b"x"] * 5, from_offset=5 * at)
        handles.append((writer.write(batch, ranges, cut_time_ms=0, last_accepted_sequence=None).handle, ranges))
        positions[ranges[0].partition] = 5 * at + 5
    first, _ = handles[1]
    storage.truncate(first.segment, first.offset)
    with pytest.raises(DamagedFrameError, match=r"the file ends here.*flights-0\[5, 15\)") as damage:
        list(scan_log(storage))
    assert (damage.value.offset, damage.value.exact) == (first.offset, False)


def test_offsets_that_were_inferred_as_lost_are_not_told_twice() -> None:
    """Two blocks of one partition lose their headers, and one of another stands whole between them."""
    storage = MemoryStorage()
    writer = open_writer(storage)
    handles = []
    for partition, start in ((0, 0), (0, 10), (1, 0), (0, 20)):
        batch, ranges = make_block([b"x"] * 10, partition=partition, from_offset=start)
        handles.append(writer.write(batch, ranges, cut_time_ms=0, last_accepted_sequence=None).handle)
    data = bytearray(storage.read(PATH))
    for damaged in (handles[1], handles[3]):
        data[damaged.offset + 50] ^= 1
    storage.write_atomically(PATH, bytes(data))
    first = ranges[0].partition
    known = KnownOfSegment(positions_after={first: 30})
    length = storage.size(PATH)
    scan = scan_segment(storage, PATH, newest=False, durable_length=length, known=known, mode=SKIP)
    assert [f.handle for f in scan] == [handles[0], handles[2]]
    # Where the first damage ends cannot be told, so all up to the next segment is put down to it.
    assert [each.ranges for each in scan.damage] == [(OffsetRange(first, 10, 30, 20),), None]


def test_stale_bytes_behind_the_blocks_are_no_blocks() -> None:
    """Of a file that stood on these sectors before: its frames are whole, in order, and of another place."""
    storage, _ = lay_out([opening(), block(0), block(1)])
    other, starts = lay_out([opening(), *(block(at) for at in range(9))], OTHER)
    here = storage.read(PATH)
    assert len(here) in starts, "a frame of the other begins where this one's end"
    storage.write_atomically(PATH, here + other.read(OTHER)[len(here) :])
    scan = scan_segment(storage, PATH, newest=True)
    assert [f.header.sequence for f in scan] == [0, 1]
    assert scan.torn_tail is not None
    assert (scan.torn_tail.offset, scan.torn_tail.ranges) == (len(here), None)


@pytest.mark.parametrize("shown", ["nothing", "half a prefix", "a prefix", "a header", "all but a byte"])
def test_a_segment_that_is_being_written_is_read_as_far_as_it_goes(shown: str) -> None:
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


def test_a_reader_beside_the_writer_sees_each_block_once_it_is_written(storage: FaultyStorage) -> None:
    writer = open_writer(storage)
    for at in range(5):
        batch, ranges = make_block([b"x"], from_offset=at)
        writer.write(batch, ranges, cut_time_ms=0, last_accepted_sequence=None)
        scan = scan_log(storage)
        assert len(list(scan)) == at + 1
        assert (scan.torn_tails, scan.damage, len(scan.open)) == ([], [], 1)


def spoiled(folder: Path, sizes: Sequence[int]) -> tuple[FaultyFiles, LocalStorage, list[BlockInfo]]:
    """A log of one segment, of which nothing is bad yet."""
    files = FaultyFiles()
    storage = LocalStorage(str(folder), calls=files)
    return files, storage, write(open_writer(storage), sizes)


def test_an_unreadable_sector_is_an_error_of_the_disk_and_no_damage(tmp_path: Path) -> None:
    """What cannot be read may be there: nothing is cut, and nothing taken for lost where damage is an error."""
    files, storage, blocks = spoiled(tmp_path, [100, 100])
    for mode in (RecoveryMode.TOLERATE_CORRUPTED_TAIL_RECORDS, ABSOLUTE):
        files.spoil("*.wal", blocks[1].handle.offset, blocks[1].handle.offset + 1)
        with pytest.raises(StorageError, match="Input/output error"):
            list(scan_log(storage, mode=mode))
    with pytest.raises(StorageError, match="Input/output error"):
        read_block(storage, blocks[1].handle)
    files.heal()
    assert [f.handle for f in scan_log(storage)] == [each.handle for each in blocks]


@pytest.mark.parametrize("times", [1, window.READ_TRIES])
def test_an_error_that_passes_is_no_damage_where_damage_is_passed_over(tmp_path: Path, times: int) -> None:
    files, storage, blocks = spoiled(tmp_path, [100, 100])
    for mode in PASSING:
        # The first looks of all; then that at the first sector, so often but once.
        files.fail("pread", errno.EIO, path="*.wal", after=1, times=times)
        scan = scan_log(storage, mode=mode)
        assert [f.handle for f in scan] == [each.handle for each in blocks]
        assert (scan.damage, scan.torn_tails) == ([], [])


def test_a_bad_sector_costs_the_blocks_that_stand_on_it_where_damage_is_passed_over(tmp_path: Path) -> None:
    files, storage, blocks = spoiled(tmp_path, [100, 20_000, 100, 20_000, 100])
    place = blocks[1].handle
    files.spoil("*.wal", place.offset + 9_000, place.offset + 9_001)
    scan = scan_log(storage, mode=SKIP)
    assert [f.handle for f in scan] == [each.handle for each in blocks if each.handle != place]
    ((segment, offset, ranges),) = [(each.segment, each.offset, each.ranges) for each in scan.damage]
    assert (segment, offset, ranges) == (place.segment, place.offset, blocks[1].ranges)
    scan = scan_log(storage, mode=RecoveryMode.POINT_IN_TIME_RECOVERY)
    assert [f.handle for f in scan] == [blocks[0].handle]
    assert [each.offset for each in scan.damage] == [place.offset]


def test_a_bad_first_sector_costs_a_segment_its_header_and_no_block_behind_it(tmp_path: Path) -> None:
    files, storage, blocks = spoiled(tmp_path, [10_000, 100])
    files.spoil("*.wal", 0, 1)
    scan = scan_log(storage, accepted=lambda _: blocks, mode=SKIP)
    assert [f.handle for f in scan] == [blocks[1].handle]
    assert [each.ranges for each in scan.damage] == [blocks[0].ranges]


def test_offsets_and_sequences_go_up_to_the_highest() -> None:
    highest = (1 << 63) - 1
    tp = make_block([])[1][0].partition
    ranges = (OffsetRange(tp, highest - 1, highest, 1),)
    header = FrameHeader(RECEIVER, 1, highest, highest - 1, highest, ranges, 1, 0, event_time_ms=highest)
    storage, _ = lay_out([opening(), header])
    assert [f.header for f in scan_segment(storage, PATH, newest=True)] == [header]


def test_a_first_write_that_lost_its_first_page_is_a_torn_tail_to_who_has_the_ledger() -> None:
    """Header and first block of a segment are one write; a power cut may leave any page of it."""
    storage = MemoryStorage()
    (only,) = write(open_writer(storage), [5000])
    data = bytearray(storage.read(PATH))
    data[: only.handle.offset - 5] = bytes(only.handle.offset - 5)
    storage.write_atomically(PATH, bytes(data))
    with pytest.raises(DamagedFrameError):
        list(scan_segment(storage, PATH, newest=True))
    scan = scan_segment(storage, PATH, newest=True, known=KnownOfSegment(accepted=()))
    assert list(scan) == []
    assert scan.torn_tail is not None
    with pytest.raises(DamagedFrameError):
        list(scan_segment(storage, PATH, newest=True, known=KnownOfSegment(accepted=[only])))
