"""Every sync of files and directories is needed: without any one of them, a power cut takes what was promised.

Each test leaves one sync out (`FaultyFiles.left_out`) and looks for a power cut that shows it; with all of them no cut
does. The list of syncs is read from the source, so a new one needs a promise here. The ledger's syncs are SQLite's and
Postgres's own: tests/unit/ledger/test_sqlite.py and tests/integration/ledger/test_opening.py pin their settings.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from tests.support.faulty_files import FaultyFiles, sync_sites

from headrace.wal import storage
from headrace.wal.storage import LocalStorage

CUTS = 30


class Disk:
    """A folder on a disk whose power can be cut, and what it has to hold after that."""

    def __init__(self, folder: Path, left_out: str | None) -> None:
        self.files = FaultyFiles()
        self.files.left_out = left_out
        self.folder = folder
        self.storage = LocalStorage(folder, calls=self.files)


def append(disk: Disk, _random: Random) -> bool:
    segment = disk.storage.create_segment("log/a")
    segment.append([b"first" * 200])
    segment.append([b"second" * 200])
    yield_power(disk, _random)
    return holds(disk, "log/a", b"first" * 200 + b"second" * 200)


def begin(disk: Disk, random: Random) -> bool:
    disk.storage.create_segment("log/a").append([b"first" * 200])
    yield_power(disk, random)
    return holds(disk, "log/a", b"first" * 200)


def write(disk: Disk, random: Random) -> bool:
    disk.storage.write_atomically("manifests/a", b"manifest" * 200)
    yield_power(disk, random)
    return holds(disk, "manifests/a", b"manifest" * 200)


def delete(disk: Disk, random: Random) -> bool:
    disk.storage.write_atomically("log/a", b"old")
    disk.storage.delete("log/a")
    yield_power(disk, random)
    return not (disk.folder / "log" / "a").exists()


def sync_what_another_wrote(disk: Disk, random: Random) -> bool:
    segment = disk.storage.create_segment("log/a")
    segment.append([b"first"])
    segment.append([b"killed before its sync" * 100], sync=False)
    disk.storage.sync("log/a")
    yield_power(disk, random)
    return holds(disk, "log/a", b"first" + b"killed before its sync" * 100)


def sync_a_new_file(disk: Disk, random: Random) -> bool:
    (disk.folder / "log").mkdir(parents=True)
    disk.files.close(disk.files.open(disk.folder / "log" / "a", storage._NEW_FILE))
    disk.storage.sync("log/a")
    yield_power(disk, random)
    return holds(disk, "log/a", b"")


def truncate(disk: Disk, random: Random) -> bool:
    segment = disk.storage.create_segment("log/a")
    segment.append([b"kept, and a torn tail"])
    segment.close()
    disk.storage.truncate("log/a", 4)
    yield_power(disk, random)
    return holds(disk, "log/a", b"kept")


PROMISES: dict[str, Callable[[Disk, Random], bool]] = {
    "LocalSegmentFile.append: fsync": begin,
    "LocalSegmentFile.append: directory": begin,
    "LocalSegmentFile.append: fdatasync": append,
    "LocalStorage._write_new: fsync": write,
    "LocalStorage.write_atomically: directory": write,
    "LocalStorage._make_directory: directory": write,
    "LocalStorage.delete: directory": delete,
    "LocalStorage.sync: fsync": sync_what_another_wrote,
    "LocalStorage.sync: directory": sync_a_new_file,
    "LocalStorage.truncate: fsync": truncate,
}
"""What shows that each sync is needed: whether a disk holds what was promised, after a power cut."""


def yield_power(disk: Disk, random: Random) -> None:
    disk.files.close_all()
    disk.files.cut_power(random)


def holds(disk: Disk, path: str, content: bytes) -> bool:
    file = disk.folder / path
    return file.is_file() and file.read_bytes() == content


def broken_by(promise: Callable[[Disk, Random], bool], folder: Path, left_out: str | None) -> list[int]:
    """The cuts, of `CUTS` random ones, after which the promise is broken."""
    return [seed for seed in range(CUTS) if not promise(Disk(folder / f"{seed}" / "storage", left_out), Random(seed))]


def test_every_sync_in_the_source_has_a_promise_that_needs_it() -> None:
    assert sorted(sync_sites()) == sorted(PROMISES)


@pytest.mark.parametrize("site", PROMISES)
def test_without_this_sync_a_power_cut_takes_what_was_promised(tmp_path: Path, site: str) -> None:
    for left_out in (None, site):
        (folder := tmp_path / str(left_out is None)).mkdir()
        for seed in range(CUTS):
            (folder / str(seed)).mkdir()
        broken = broken_by(PROMISES[site], folder, left_out)
        assert bool(broken) == (left_out is not None), f"{len(broken)} of {CUTS} power cuts"
