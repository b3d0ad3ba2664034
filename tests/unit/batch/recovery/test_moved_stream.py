"""A stream whose folder is on another disk, with a link in the old place, as docs/guides/change-a-stream.md says."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from tests.unit.batch.life import LEASE_MS, NAME, Life
from typer.testing import CliRunner

from headrace.batch.manifest import Manifest
from headrace.batch.recover import recover
from headrace.cli.main import app
from headrace.ledger import BatchState, Ledger
from headrace.stream import Storage
from headrace.wal.storage import open_storage


def test_a_folder_that_a_link_replaces_is_whole_and_goes_on(
    live: Callable[..., Life], lost_url: str, tmp_path: Path
) -> None:
    life = live(1)
    life.finish()
    life.clock.advance(LEASE_MS + 1_000)
    before = checked(lost_url)
    shutil.move(tmp_path / "storage", tmp_path / "moved")
    assert checked(lost_url) != before
    (tmp_path / "storage").symlink_to(tmp_path / "moved")
    assert checked(lost_url) == before
    # As new processes do.
    life.storage = open_storage(life.stream.storage.url)
    life.start_job()
    batches = len(life.ledger.batches.page(NAME, 1000))
    for _ in range(80):
        life.step()
    life.finish()
    assert len(life.ledger.batches.page(NAME, 1000)) > batches


def test_a_ledger_rebuilt_from_a_moved_folder_names_the_folder(
    live: Callable[..., Life], new_url: str, tmp_path: Path
) -> None:
    """The manifests of all batches are found below the new folder."""
    life = live(1)
    life.finish()
    life.checkpoint()
    life.clock.advance(LEASE_MS + 1_000)
    shutil.move(tmp_path / "storage", tmp_path / "moved")
    moved = life.stream.model_copy(update={"storage": Storage(url=str(tmp_path / "moved"))})
    with Ledger.open(new_url, clock=life.clock) as ledger:
        recover(NAME, ledger, open_storage(moved.folder_url), definition=moved)
        batches = [batch for batch in ledger.batches.page(NAME, 1000) if batch.state is not BatchState.ABSORBED]
        assert any(batch.state is BatchState.COMPLETED for batch in batches)
        for batch in batches:
            Manifest.load(batch.manifest_uri, sha256=batch.manifest_sha256)


def checked(ledger: str) -> str:
    """What ``streams fsck`` says. This life has topics that were created again, which it names too."""
    return CliRunner().invoke(app, ["streams", "fsck", NAME, "--ledger", ledger, "--no-kafka"]).output
