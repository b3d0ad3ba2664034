"""What a newer headrace has written is refused, and neither cut off nor passed over."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import google_crc32c
import pytest
from tests.support.faulty_storage import FaultyStorage
from tests.support.records import make_block
from tests.unit.wal.torn_tails import repair

from headrace.blocks import BlockHandle
from headrace.wal import frame
from headrace.wal.errors import DamagedFrameError, LogVersionError
from headrace.wal.reader import read_block
from headrace.wal.recovery import scan_log
from headrace.wal.scan import RecoveryMode, scan_segment
from headrace.wal.writer import WriteAheadLogWriter

OpenWriter = Callable[..., WriteAheadLogWriter]
Change = Callable[[bytearray], None]
"""Changes the first bytes of a frame, from its prefix on."""


def version(number: int) -> Change:
    def change(data: bytearray) -> None:
        data[4] = number
        sign(data)

    return change


def kind(data: bytearray) -> None:
    data[5] = 9
    sign(data)


def reserved_bits(data: bytearray) -> None:
    data[6] = 1
    sign(data)


def header_that_lacks_a_field(data: bytearray) -> None:
    at = data.index(b'"epoch"')
    data[at : at + 7] = b'"Epoch"'
    sign(data)


def other_layout(data: bytearray) -> None:
    """Only the first 24 bytes are as they are here."""
    data[4] = 2
    data[24:40] = bytes(range(200, 216))


def sign(data: bytearray) -> None:
    (length,) = struct.unpack_from("<I", data, 24)
    crc = google_crc32c.extend(google_crc32c.value(bytes(data[:36])), bytes(data[40 : 40 + length]))
    struct.pack_into("<I", data, 36, int(crc))


NEWER = [version(2), version(255), kind, reserved_bits, header_that_lacks_a_field, other_layout]


def write(writer: WriteAheadLogWriter, at: int) -> BlockHandle:
    batch, ranges = make_block([b"value"], from_offset=at)
    return writer.write(batch, ranges, cut_time_ms=0, last_accepted_sequence=None).handle


def written(storage: FaultyStorage, open_writer: OpenWriter, place: str, change: Change) -> tuple[str, int]:
    """A log whose last segment has something newer in its ``place``; the segment, and where in it."""
    write(open_writer(1), 0)
    handles = [write(writer, at) for writer in [open_writer(2)] for at in (1, 2, 3)]
    offset = {"first": 0, "middle": handles[1].offset, "last": handles[2].offset}[place]
    data = bytearray(storage.read(handles[0].segment))
    changed = data[offset:]
    change(changed)
    storage.write_atomically(handles[0].segment, bytes(data[:offset] + changed))
    return handles[0].segment, offset


@pytest.mark.parametrize("place", ["first", "middle", "last"])
@pytest.mark.parametrize("change", NEWER)
@pytest.mark.parametrize("mode", RecoveryMode)
def test_no_mode_passes_over_it(
    storage: FaultyStorage, open_writer: OpenWriter, mode: RecoveryMode, change: Change, place: str
) -> None:
    segment, offset = written(storage, open_writer, place, change)
    for scan in (scan_log(storage, mode=mode), scan_segment(storage, segment, newest=True, mode=mode)):
        with pytest.raises(LogVersionError, match="reads version 1 of the log's format") as refused:
            list(scan)
        assert (refused.value.segment, refused.value.offset) == (segment, offset)
        assert refused.value.remedy is not None
        assert "or a newer one" in refused.value.remedy


@pytest.mark.parametrize("place", ["first", "middle", "last"])
@pytest.mark.parametrize("change", NEWER)
@pytest.mark.parametrize("torn", [0, 30])
def test_no_writer_takes_over_and_nothing_is_cut(
    storage: FaultyStorage, open_writer: OpenWriter, torn: int, change: Change, place: str
) -> None:
    segment, _ = written(storage, open_writer, place, change)
    if torn:
        # The newer one crashed in the middle of its last frame.
        storage.cut(segment, storage.size(segment) - torn)
    before = {path: storage.read(path) for path in storage.paths()}
    options: dict[str, Any]
    for options in ({}, {"accepted": lambda _segment: []}):
        with pytest.raises(LogVersionError):
            open_writer(3, **options)
    with pytest.raises(LogVersionError):
        repair(storage, segment)
    assert {path: storage.read(path) for path in storage.paths()} == before


@pytest.mark.parametrize("change", NEWER)
def test_a_block_of_it_is_not_called_damaged(storage: FaultyStorage, open_writer: OpenWriter, change: Change) -> None:
    segment, offset = written(storage, open_writer, "last", change)
    with pytest.raises(LogVersionError):
        read_block(storage, BlockHandle(segment, offset, storage.size(segment) - offset))


def test_what_stands_before_it_is_no_tail(storage: FaultyStorage, open_writer: OpenWriter) -> None:
    segment, offset = written(storage, open_writer, "last", version(2))
    data = storage.read(segment)
    # The frame before it is damaged.
    storage.write_atomically(segment, data[: offset - 20] + bytes(20) + data[offset:])
    scan = scan_segment(storage, segment, newest=True)
    with pytest.raises(DamagedFrameError):
        list(scan)
    assert scan.torn_tail is None
    with pytest.raises(LogVersionError):
        list(scan_segment(storage, segment, newest=True, mode=RecoveryMode.SKIP_ANY_CORRUPTED_RECORDS))


@pytest.mark.parametrize("bit", range(8))
@pytest.mark.parametrize("byte", [frame.VERSION_OFFSET, frame.VERSION_OFFSET + 1])
@pytest.mark.parametrize("place", ["middle", "last"])
def test_a_flipped_bit_is_damage_and_no_version(
    storage: FaultyStorage, open_writer: OpenWriter, place: str, byte: int, bit: int
) -> None:
    def flip(data: bytearray) -> None:
        data[byte] ^= 1 << bit

    segment, offset = written(storage, open_writer, place, flip)
    scan = scan_segment(storage, segment, newest=True)
    if place == "middle":
        with pytest.raises(DamagedFrameError):
            list(scan)
    else:
        assert len(list(scan)) == 2
        assert scan.torn_tail is not None
    with pytest.raises(DamagedFrameError):
        read_block(storage, BlockHandle(segment, offset, storage.size(segment) - offset))
