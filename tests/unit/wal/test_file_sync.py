"""Which call makes a file durable, by platform. macOS is simulated here: it has no fdatasync, and has F_FULLFSYNC."""

from __future__ import annotations

import errno
import fcntl
import os
import re
from pathlib import Path

import pytest

import headrace
from headrace.spark.outputs.parquet import Claim
from headrace.wal.storage import open_storage, sync_data, sync_file

FULL_SYNC = 51


class Calls:
    """The system's calls that sync, in order; `refusal` is what F_FULLFSYNC answers."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.refusal: int | None = None

    def fcntl(self, fd: int, command: int, *rest: object) -> int:
        assert command == FULL_SYNC
        self.made.append("F_FULLFSYNC")
        if self.refusal is not None:
            raise OSError(self.refusal, os.strerror(self.refusal))
        return 0

    def fsync(self, fd: int) -> None:
        self.made.append("fsync")

    def fdatasync(self, fd: int) -> None:
        self.made.append("fdatasync")


@pytest.fixture
def linux(monkeypatch: pytest.MonkeyPatch) -> Calls:
    calls = Calls()
    monkeypatch.delattr(fcntl, "F_FULLFSYNC", raising=False)
    monkeypatch.setattr(os, "fsync", calls.fsync)
    monkeypatch.setattr(os, "fdatasync", calls.fdatasync, raising=False)
    return calls


@pytest.fixture
def macos(linux: Calls, monkeypatch: pytest.MonkeyPatch) -> Calls:
    monkeypatch.delattr(os, "fdatasync")
    monkeypatch.setattr(fcntl, "F_FULLFSYNC", FULL_SYNC, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", linux.fcntl)
    return linux


def test_on_linux_fsync_and_fdatasync_reach_the_drive(linux: Calls) -> None:
    sync_file(0)
    sync_data(0)
    assert linux.made == ["fsync", "fdatasync"]


def test_on_macos_the_drive_is_asked_to_flush(macos: Calls) -> None:
    sync_file(0)
    sync_data(0)
    assert macos.made == ["F_FULLFSYNC", "F_FULLFSYNC"]


def test_elsewhere_without_fdatasync_it_is_fsync(linux: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "fdatasync")
    sync_data(0)
    assert linux.made == ["fsync"]


@pytest.mark.parametrize("refusal", [errno.ENOTSUP, errno.ENOTTY, errno.EINVAL])
def test_a_file_system_without_that_call_gets_fsync(macos: Calls, refusal: int) -> None:
    macos.refusal = refusal
    sync_file(0)
    assert macos.made == ["F_FULLFSYNC", "fsync"]


@pytest.mark.parametrize("failure", [errno.EIO, errno.ENOSPC])
def test_a_failed_flush_is_an_error_and_not_tried_again(macos: Calls, failure: int) -> None:
    """The pages may be gone: fsync would report success."""
    macos.refusal = failure
    for sync in (sync_file, sync_data):
        with pytest.raises(OSError, match=os.strerror(failure)):
            sync(0)
    assert "fsync" not in macos.made


def test_the_log_and_the_folders_of_outputs_are_written_by_it(macos: Calls, tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path / "storage"))
    segment = storage.create_segment("log/a.wal")
    segment.append([b"first"])
    opened = len(macos.made)
    segment.append([b"second"])
    segment.close()
    assert len(macos.made) == opened + 1
    storage.write_atomically("manifests/m", b"{}")
    Claim(str(tmp_path / "files" / "below"), "clicks", "files", "", 1000, 1, "0").take()
    assert set(macos.made) == {"F_FULLFSYNC"}


def test_nothing_else_of_the_package_syncs_a_file() -> None:
    package = Path(headrace.__file__).parent
    files = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if re.search(r"\bos\.f(data)?sync\(", path.read_text())
    }
    assert files == {"wal/storage.py"}
