"""What the headrace before this one left: checkpoints of version 1, its log and manifests.

`earlier/version_1.tar.gz` was written by that version: a `Life` of 85 steps by seed 9.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest

from headrace.batch.checkpoint import (
    READABLE,
    CheckpointVersionError,
    checkpoint_paths,
    read_newest,
)
from headrace.batch.history import HistoryError, read_history
from headrace.batch.manifest import Manifest, ManifestError
from headrace.batch.recovery.recover import recover
from headrace.batch.sealed_document import seal, unseal
from headrace.clock import ManualClock
from headrace.ledger import Ledger
from headrace.wal.storage import LogStorage, open_storage

NAME = "shop"
CLOCK_MS = 1_700_000_150_000


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    with tarfile.open(Path(__file__).with_name("earlier") / "version_1.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


@pytest.fixture
def folder(earlier: Path) -> LogStorage:
    return open_storage(str(earlier / "storage")).below(NAME)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(CLOCK_MS + 3_700_000)


def reseal(folder: LogStorage, path: str, **fields: object) -> None:
    folder.write_atomically(path, seal({**unseal(folder.read(path)), **fields}))


@pytest.mark.parametrize("version", [3, 0, None, "2"])
def test_a_checkpoint_of_a_newer_or_unknown_version_is_refused_and_not_passed_over(
    folder: LogStorage, version: object
) -> None:
    assert version not in READABLE
    reseal(folder, checkpoint_paths(folder)[-1], version=version)
    with pytest.raises(CheckpointVersionError, match=rf"is of version {version}, .*or a newer one"):
        read_newest(folder)


def test_a_manifest_and_a_file_of_the_history_of_a_newer_version_are_refused(
    earlier: Path, folder: LogStorage, clock: ManualClock
) -> None:
    path = folder.paths("manifests")[0]
    reseal(folder, path, version=9)
    with pytest.raises(ManifestError, match="is of version 9"):
        Manifest.load(f"{folder.url}/{path}")
    with (
        Ledger.open(f"sqlite:///{earlier}/new.db", clock=clock) as ledger,
        pytest.raises(ManifestError, match="version 9"),
    ):
        recover(NAME, ledger, folder)
    folder.write_atomically("history/0000000000007.json", seal({"version": 2, "stream": NAME, "batches": []}))
    with pytest.raises(HistoryError, match="is of version 2, this headrace reads 1"):
        read_history(folder, 7)


def test_the_fixture_is_what_it_says(earlier: Path) -> None:
    checkpoint = sorted((earlier / "storage" / NAME / "checkpoints").iterdir())[-1]
    document = json.loads(checkpoint.read_text().splitlines()[0])
    assert document["version"] == 1
    assert "history" not in document["state"]
