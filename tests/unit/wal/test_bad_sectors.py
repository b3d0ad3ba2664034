"""A scan of a log on a disk that cannot read all of its sectors."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.support.faulty_files import FaultyFiles
from tests.unit.wal.small_segments import (
    ABSOLUTE,
    PASSING,
    SKIP,
    open_writer,
    write,
)

from headrace.blocks import BlockInfo
from headrace.wal import scan as log_scanner
from headrace.wal.errors import StorageError
from headrace.wal.reader import read_block
from headrace.wal.recovery import scan_log
from headrace.wal.scan import RecoveryMode
from headrace.wal.storage import LocalStorage


def spoiled(folder: Path, sizes: Sequence[int]) -> tuple[FaultyFiles, LocalStorage, list[BlockInfo]]:
    """A log of one segment, of which nothing is bad yet."""
    files = FaultyFiles()
    storage = LocalStorage(str(folder), calls=files)
    return files, storage, write(open_writer(storage), sizes)


def test_an_unreadable_sector_is_a_disk_error_and_no_damage(tmp_path: Path) -> None:
    """What cannot be read may be there: nothing is cut, and nothing taken for lost where damage is an error."""
    files, storage, blocks = spoiled(tmp_path, [100, 100])
    for mode in (RecoveryMode.TOLERATE_CORRUPTED_TAIL_RECORDS, ABSOLUTE):
        files.spoil("*.wal", blocks[1].handle.offset, blocks[1].handle.offset + 1)
        with pytest.raises(StorageError, match="Input/output error"):
            list(scan_log(storage, mode=mode))
    with pytest.raises(StorageError, match="Input/output error"):
        read_block(storage, blocks[1].handle)
    files.heal()
    assert [f.handle for f in scan_log(storage)] == [block.handle for block in blocks]


@pytest.mark.parametrize("times", [1, log_scanner.READ_TRIES])
def test_an_error_that_passes_is_no_damage_when_skipping(tmp_path: Path, times: int) -> None:
    """Damage is passed over in this mode."""
    files, storage, blocks = spoiled(tmp_path, [100, 100])
    for mode in PASSING:
        # The first looks of all; then that at the first sector, so often but once.
        files.fail("pread", errno.EIO, path="*.wal", after=1, times=times)
        scan = scan_log(storage, mode=mode)
        assert [f.handle for f in scan] == [block.handle for block in blocks]
        assert (scan.damage, scan.torn_tails) == ([], [])


def test_a_bad_sector_costs_only_the_blocks_on_it(tmp_path: Path) -> None:
    """Damage is passed over in this mode."""
    files, storage, blocks = spoiled(tmp_path, [100, 20_000, 100, 20_000, 100])
    place = blocks[1].handle
    files.spoil("*.wal", place.offset + 9_000, place.offset + 9_001)
    scan = scan_log(storage, mode=SKIP)
    assert [f.handle for f in scan] == [block.handle for block in blocks if block.handle != place]
    ((segment, offset, ranges),) = [(damaged.segment, damaged.offset, damaged.ranges) for damaged in scan.damage]
    assert (segment, offset, ranges) == (place.segment, place.offset, blocks[1].ranges)
    scan = scan_log(storage, mode=RecoveryMode.POINT_IN_TIME_RECOVERY)
    assert [f.handle for f in scan] == [blocks[0].handle]
    assert [damaged.offset for damaged in scan.damage] == [place.offset]


def test_a_bad_first_sector_costs_a_segment_only_its_header(tmp_path: Path) -> None:
    """No block behind it is lost."""
    files, storage, blocks = spoiled(tmp_path, [10_000, 100])
    files.spoil("*.wal", 0, 1)
    scan = scan_log(storage, accepted=lambda _: blocks, mode=SKIP)
    assert [f.handle for f in scan] == [blocks[1].handle]
    assert [damaged.ranges for damaged in scan.damage] == [blocks[0].ranges]
