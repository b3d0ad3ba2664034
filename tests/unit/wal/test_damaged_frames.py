"""A scan of segments with frames that do not belong, bad lengths, wrong checksums and lost ends."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.support.memory_storage import MemoryStorage
from tests.support.records import make_block
from tests.unit.wal.small_segments import (
    ABSOLUTE,
    OTHER,
    PATH,
    RECEIVER,
    SKIP,
    block,
    ending,
    lay_out,
    open_writer,
    opening,
    write,
)

from headrace.blocks import BlockHandle, OffsetRange, TopicPartition
from headrace.clock import ManualClock
from headrace.wal import frame
from headrace.wal import scan as log_scanner
from headrace.wal.errors import DamagedFrameError, TornTailError
from headrace.wal.frame import AnyHeader, Codec
from headrace.wal.reader import read_block
from headrace.wal.recovery import scan_log
from headrace.wal.scan import KnownOfSegment, scan_segment
from headrace.wal.writer import WriteAheadLogWriter


def test_a_search_finds_the_next_frame_wherever_its_chunks_end(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = MemoryStorage()
    first, second, third = write(open_writer(storage), [500, 700, 30])
    data = bytearray(storage.files[first.handle.segment])
    data[second.handle.offset + 20] ^= 1
    storage.write_atomically(PATH, bytes(data))
    for search_bytes in range(8, 40):
        monkeypatch.setattr(log_scanner, "SEARCH_BYTES", search_bytes)
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


def test_a_frame_of_an_unknown_kind_is_damage_and_not_skipped() -> None:
    storage, starts = lay_out([opening(), block(0), block(1)])
    data = bytearray(storage.read(PATH))
    data[starts[1] + 5] = 9
    storage.write_atomically(PATH, bytes(data))
    with pytest.raises(DamagedFrameError, match="no frame of kind 9"):
        list(scan_segment(storage, PATH, newest=True))


def test_a_block_with_other_records_than_its_header_is_damage() -> None:
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
def test_a_bad_length_is_damage_in_the_middle_and_a_tail_at_end(length: int, at: int, place: str) -> None:
    """At the end it is a torn tail."""
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
def test_a_payload_that_fails_its_checksum_is_never_decoded(codec: Codec) -> None:
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
    assert [(damaged.offset, damaged.ranges, damaged.exact) for damaged in scan.damage] == [
        (second.offset, blocks[1].ranges, True),
        (third.offset, blocks[2].ranges, False),
    ]
    scan = scan_segment(storage, PATH, newest=True, mode=SKIP, known=KnownOfSegment(accepted=blocks))
    assert len(list(scan)) == 3
    assert [(damaged.ranges, damaged.exact) for damaged in scan.damage] == [
        (blocks[1].ranges, True),
        (blocks[2].ranges, True),
    ]


def test_a_segment_cut_short_says_what_is_lost_by_the_next_one() -> None:
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


def test_offsets_inferred_as_lost_are_not_reported_twice() -> None:
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


def test_a_first_write_without_its_first_page_is_a_torn_tail() -> None:
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
