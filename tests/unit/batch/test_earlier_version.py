"""What the headrace before this one left: a ledger of schema 0002, checkpoints of version 1, its log and manifests.

`earlier/version_1.tar.gz` was written by that version: a `Life` of 85 steps by seed 9.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest

from headrace.batch.allocation import allocate
from headrace.batch.checkpoint import (
    READABLE,
    CheckpointVersionError,
    checkpoint_paths,
    find_newest,
    read_newest,
)
from headrace.batch.checkpointing import checkpoint_now
from headrace.batch.history import HistoryError, read_history
from headrace.batch.kept_state import read_kept
from headrace.batch.manifest import Manifest, ManifestError
from headrace.batch.recovery.recover import recover
from headrace.batch.sealed_document import seal, unseal
from headrace.clock import ManualClock, time_text
from headrace.ledger import BatchState, Ledger
from headrace.ledger.errors import SchemaError
from headrace.ledger.schema import HEAD
from headrace.stream import Stream
from headrace.stream_context import StreamContext
from headrace.wal.storage import LogStorage, open_storage

from .test_recovery import all_blocks, contents

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


def test_an_earlier_ledger_is_refused_until_it_is_migrated(earlier: Path) -> None:
    url = f"sqlite:///{earlier}/ledger.db"
    with pytest.raises(SchemaError, match=rf"is 0002, and this version of headrace needs {HEAD}.*ledger migrate"):
        Ledger.open(url)
    Ledger.migrate(url)
    with Ledger.open(url) as ledger:
        assert len(ledger.batches.page(NAME)) == 8
        assert ledger.receivers.all(NAME)[0].max_rate is None


def test_an_earlier_streams_work_goes_on_and_its_next_checkpoint_holds_all(
    earlier: Path, folder: LogStorage, clock: ManualClock
) -> None:
    Ledger.migrate(f"sqlite:///{earlier}/ledger.db")
    with Ledger.open(f"sqlite:///{earlier}/ledger.db", clock=clock) as ledger:
        stream = Stream.from_json(ledger.streams.get(NAME).definition)
        moved = stream.model_copy(
            update={"storage": stream.storage.model_copy(update={"url": str(earlier / "storage")})}
        )
        (waiting, *_) = ledger.blocks.unclaimed(NAME)
        assert allocate(StreamContext(moved, ledger), waiting.batch_time_ms).batch.records
        checkpoint_now(StreamContext(moved, ledger), waiting.batch_time_ms)
        kept = read_kept(folder)
        assert kept.checkpoint.version == 2
        assert {time_ms: batch.row for time_ms, batch in kept.batches.items()}.keys() == {
            row.batch_time_ms for row in ledger.batches.page(NAME)
        }


def test_a_ledger_is_rebuilt_from_a_checkpoint_of_the_version_before(
    earlier: Path, folder: LogStorage, clock: ManualClock
) -> None:
    assert read_newest(folder).version == 1
    Ledger.migrate(f"sqlite:///{earlier}/ledger.db")
    with (
        Ledger.open(f"sqlite:///{earlier}/ledger.db", clock=clock) as lost,
        Ledger.open(f"sqlite:///{earlier}/new.db", clock=clock) as ledger,
    ):
        report = recover(NAME, ledger, folder)
        expected, found = contents(lost), contents(ledger)
        for table in ("streams", "topics", "positions", "blocks", "batch_inputs", "unclaimed_times"):
            assert found[table] == expected[table], table
        # What was cleaned was in no checkpoint then. It counts as completed, and nobody runs it again.
        states = {row.batch_time_ms: row.state for row in lost.batches.page(NAME)}
        assert {row.batch_time_ms: row.state for row in ledger.batches.page(NAME)} == states
        cleaned = [row.batch_time_ms for row in lost.batches.page(NAME) if row.cleaned_at_ms is not None]
        assert cleaned
        for time_ms in cleaned:
            row = ledger.batches.get(NAME, time_ms)
            assert (row.state, row.cleaned_at_ms is not None) == (BatchState.COMPLETED, True)
            assert [notice for notice in report.notices if time_text(time_ms) in notice]
        assert all_blocks(ledger).keys() == all_blocks(lost).keys()
        # From then on the checkpoints are of this version.
        assert find_newest(folder).checkpoint.version == 2


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
