"""A stream whose folder is on another disk, with a link in the old place, as docs/guides/change-a-stream.md says."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from tests.unit.batch.life import LEASE_MS, NAME, Life
from typer.testing import CliRunner

from headrace.cli.main import app
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


def checked(ledger: str) -> str:
    """What ``streams fsck`` says. This life has topics that were created again, which it names too."""
    return CliRunner().invoke(app, ["streams", "fsck", NAME, "--ledger", ledger, "--no-kafka"]).output
