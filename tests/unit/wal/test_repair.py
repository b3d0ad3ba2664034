"""A torn tail is cut off and kept; nothing else is touched."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from headrace.testing.faulty_storage import FaultyStorage, WriteFault
from headrace.testing.records import make_block
from headrace.wal.errors import DamagedFrameError, RepairRefusedError, WriteFailedError
from headrace.wal.log_scan import scan_log
from headrace.wal.repair import quarantine_path, repair_torn_tail
from headrace.wal.scan import scan_segment
from headrace.wal.writer import WriteAheadLogWriter

OpenWriter = Callable[..., WriteAheadLogWriter]


def write(writer: WriteAheadLogWriter, at: int) -> str:
    batch, ranges = make_block([b"x"], from_offset=at)
    return writer.write(batch, ranges, cut_time_ms=0, last_accepted_sequence=None).handle.segment


def test_a_torn_tail_is_cut_and_its_bytes_are_kept(storage: FaultyStorage, open_writer: OpenWriter) -> None:
    writer = open_writer()
    segment = write(writer, 0)
    length = storage.size(segment)
    storage.write_faults.append(WriteFault(99))
    with pytest.raises(WriteFailedError):
        write(writer, 1)
    torn = storage.read(segment)[length:]
    tail = repair_torn_tail(storage, segment)
    assert tail is not None
    assert (tail.offset, tail.length) == (length, 99)
    assert storage.size(segment) == length
    assert storage.read(quarantine_path(tail)) == torn
    scan = scan_segment(storage, segment, newest=True)
    assert len(list(scan)) == 1
    assert scan.torn_tail is None
    assert repair_torn_tail(storage, segment) is None


def test_a_segment_without_a_header_is_removed(storage: FaultyStorage, open_writer: OpenWriter) -> None:
    storage.write_faults.append(WriteFault(20))
    with pytest.raises(WriteFailedError):
        write(open_writer(), 0)
    (segment,) = storage.list()
    tail = repair_torn_tail(storage, segment)
    assert tail is not None
    assert storage.list() == [quarantine_path(tail)]


@pytest.mark.parametrize("sectors", [1, 2, 8])
def test_a_last_frame_with_lost_sectors_is_cut(storage: FaultyStorage, open_writer: OpenWriter, sectors: int) -> None:
    """A frame of several sectors of which a power cut has written some, not the first of them."""
    writer = open_writer()
    segment = write(writer, 0)
    length = storage.size(segment)
    batch, ranges = make_block([Random(1).randbytes(5000)], from_offset=1)
    writer.write(batch, ranges, cut_time_ms=0, last_accepted_sequence=None)
    storage.zero(segment, length + 600, 512 * sectors)
    tail = repair_torn_tail(storage, segment)
    assert tail is not None
    assert tail.offset == length
    assert len(list(scan_segment(storage, segment, newest=False, durable_length=length))) == 1


def test_damage_is_not_repaired(storage: FaultyStorage, open_writer: OpenWriter) -> None:
    writer = open_writer()
    segment = write(writer, 0)
    write(writer, 1)
    writer.close()
    storage.flip_bit(segment, 8000)
    before = storage.read(segment)
    with pytest.raises(DamagedFrameError):
        repair_torn_tail(storage, segment)
    assert storage.read(segment) == before


def test_what_a_writer_has_open_is_not_cut(storage: FaultyStorage) -> None:
    file = storage.create_segment("kafka-0/0000000001-000000-1700000000000.wal")
    file.append([b"an unfinished frame"])
    (segment,) = storage.list()
    with pytest.raises(RepairRefusedError, match="open in a writer"):
        repair_torn_tail(storage, segment)
    assert storage.read(segment) == b"an unfinished frame"
    file.close()
    assert repair_torn_tail(storage, segment) is not None


def test_a_repaired_log_goes_on(storage: FaultyStorage, open_writer: OpenWriter) -> None:
    writer = open_writer(1)
    segment = write(writer, 0)
    storage.write_faults.append(WriteFault(99))
    with pytest.raises(WriteFailedError):
        write(writer, 1)
    assert repair_torn_tail(storage, segment) is not None
    write(open_writer(2), 1)
    scan = scan_log(storage)
    assert [f.header.ranges[0].from_offset for f in scan] == [0, 1]
    assert scan.torn_tails == []
