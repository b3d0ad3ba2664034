"""A torn tail is cut off and kept; nothing else is touched."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from tests.support.faulty_files import FaultyFiles
from tests.support.faulty_storage import FaultyStorage, WriteFault
from tests.support.records import make_block
from tests.unit.wal.torn_tails import repair

from headrace.wal.errors import DamagedFrameError, RepairRefusedError, StorageError, WriteFailedError
from headrace.wal.recovery import cut_is_reported, quarantine_path, scan_log, unreported_cuts
from headrace.wal.scan import scan_segment
from headrace.wal.storage import LocalStorage
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
    tail = repair(storage, segment)
    assert tail is not None
    assert (tail.offset, tail.length) == (length, 99)
    assert storage.size(segment) == length
    assert storage.read(quarantine_path(tail)) == torn
    scan = scan_segment(storage, segment, newest=True)
    assert len(list(scan)) == 1
    assert scan.torn_tail is None
    assert repair(storage, segment) is None


def test_a_cut_is_recorded_until_it_is_reported(storage: FaultyStorage, open_writer: OpenWriter) -> None:
    writer = open_writer()
    segment = write(writer, 0)
    storage.write_faults.append(WriteFault(99))
    with pytest.raises(WriteFailedError):
        write(writer, 1)
    assert unreported_cuts(storage, "kafka-0") == ()
    tail = repair(storage, segment)
    assert tail is not None
    assert tail.kept is not None
    for _ in range(2):
        # Nothing is left to be cut, and still to be told.
        assert repair(storage, segment) is None
        assert unreported_cuts(storage, "kafka-0") == (tail,)
    assert unreported_cuts(storage, "kafka-1") == ()
    cut_is_reported(storage, tail)
    assert unreported_cuts(storage, "kafka-0") == ()
    assert storage.exists(tail.kept)


@pytest.mark.parametrize("call", range(60))
def test_an_interrupted_repairs_cut_is_reported_once_by_the_next(tmp_path: Path, call: int) -> None:
    """It is so wherever the repair is interrupted."""
    files = FaultyFiles()
    storage = LocalStorage(tmp_path, calls=files)
    segment = "kafka-0/0000000001-000000-1700000000000.wal"
    file = storage.create_segment(segment)
    file.append([b"an unfinished frame"])
    file.close()
    # From this call on nothing works: as for a process that is killed there.
    files.fail("*", errno.EIO, after=call, times=1000)
    tail = None
    with contextlib.suppress(StorageError, OSError):
        tail = repair(storage, segment)
    files.heal()
    reported = unreported_cuts(storage, "kafka-0")
    is_cut = not storage.exists(segment) or storage.size(segment) == 0
    assert len(reported) == 1 if is_cut else tail is None
    again = repair(storage, segment) if storage.exists(segment) else None
    assert (again is None) == is_cut
    (left,) = unreported_cuts(storage, "kafka-0")
    assert left.kept is not None
    assert (left.segment, left.offset, left.length) == (segment, 0, 19)
    assert storage.read(left.kept) == b"an unfinished frame"


def test_a_cut_that_was_refused_is_not_reported(storage: FaultyStorage) -> None:
    file = storage.create_segment("kafka-0/0000000001-000000-1700000000000.wal")
    file.append([b"an unfinished frame"])
    with pytest.raises(RepairRefusedError):
        repair(storage, "kafka-0/0000000001-000000-1700000000000.wal")
    assert unreported_cuts(storage, "kafka-0") == ()
    file.close()


def test_a_segment_without_a_header_is_removed(storage: FaultyStorage, open_writer: OpenWriter) -> None:
    storage.write_faults.append(WriteFault(20))
    with pytest.raises(WriteFailedError):
        write(open_writer(), 0)
    (segment,) = storage.paths()
    tail = repair(storage, segment)
    assert tail is not None
    assert storage.paths("torn") == [quarantine_path(tail)]
    assert not storage.exists(segment)


@pytest.mark.parametrize("sectors", [1, 2, 8])
def test_a_last_frame_with_lost_sectors_is_cut(storage: FaultyStorage, open_writer: OpenWriter, sectors: int) -> None:
    """A frame of several sectors of which a power cut has written some, not the first of them."""
    writer = open_writer()
    segment = write(writer, 0)
    length = storage.size(segment)
    batch, ranges = make_block([Random(1).randbytes(5000)], from_offset=1)
    writer.write(batch, ranges, cut_time_ms=0, last_accepted_sequence=None)
    storage.zero(segment, length + 600, 512 * sectors)
    torn = storage.read(segment)[length:]
    tail = repair(storage, segment)
    assert tail is not None
    assert tail.offset == length
    assert storage.size(segment) == length
    assert storage.read(quarantine_path(tail)) == torn
    scan = scan_segment(storage, segment, newest=True)
    assert len(list(scan)) == 1
    assert scan.torn_tail is None


def test_damage_is_not_repaired(storage: FaultyStorage, open_writer: OpenWriter) -> None:
    writer = open_writer()
    segment = write(writer, 0)
    write(writer, 1)
    writer.close()
    storage.flip_bit(segment, 8000)
    before = storage.read(segment)
    with pytest.raises(DamagedFrameError):
        repair(storage, segment)
    assert storage.read(segment) == before


def test_what_a_writer_has_open_is_not_cut(storage: FaultyStorage) -> None:
    file = storage.create_segment("kafka-0/0000000001-000000-1700000000000.wal")
    file.append([b"an unfinished frame"])
    (segment,) = storage.paths()
    with pytest.raises(RepairRefusedError, match="open in a writer"):
        repair(storage, segment)
    assert storage.read(segment) == b"an unfinished frame"
    file.close()
    assert repair(storage, segment) is not None


def test_a_writer_keeps_only_its_own_segment_from_being_cut(storage: FaultyStorage, open_writer: OpenWriter) -> None:
    writer = open_writer(segment_bytes=1)
    left, written = write(writer, 0), write(writer, 1)
    storage.truncate(left, 100)
    with pytest.raises(RepairRefusedError, match="open in a writer"):
        storage.truncate(written, 100)
    writer.close()
    storage.truncate(written, 100)
    assert (storage.size(left), storage.size(written)) == (100, 100)


def test_a_repaired_log_goes_on(storage: FaultyStorage, open_writer: OpenWriter) -> None:
    writer = open_writer(1)
    segment = write(writer, 0)
    storage.write_faults.append(WriteFault(99))
    with pytest.raises(WriteFailedError):
        write(writer, 1)
    assert repair(storage, segment) is not None
    write(open_writer(2), 1)
    scan = scan_log(storage)
    assert [f.header.ranges[0].from_offset for f in scan] == [0, 1]
    assert scan.torn_tails == []
