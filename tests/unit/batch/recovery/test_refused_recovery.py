"""When a recovery is refused, and what a dry run says."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.unit.batch.life import LEASE_MS, NAME, Life

from headrace.batch.recover import LostLedgerError, RecoveryRefusedError, Step, recover, refuse_if_lost
from headrace.ledger import Ledger
from headrace.stream_context import StreamContext
from headrace.wal.storage import open_storage


def test_a_dry_run_says_what_it_would_do_and_does_nothing(live: Callable[..., Life], new_url: str) -> None:
    life = live(7)
    folder = life.storage.below(NAME)
    before = {path: folder.read(path) for path in folder.paths()}
    life.clock.advance(LEASE_MS + 1_000)
    with Ledger.open(new_url, clock=life.clock) as ledger:
        report = recover(NAME, ledger, folder, definition=life.stream, dry_run=True)
        assert ledger.rebuild.is_new(NAME)
        assert ledger.streams.all() == []
        assert set(report.steps) == {Step.LEDGER_REBUILT, Step.CHECKPOINT_WRITTEN}
        assert report.counts["batches"] == len(life.ledger.batches.page(NAME, 1000))
        assert {path: folder.read(path) for path in folder.paths()} == before
        done = recover(NAME, ledger, folder, definition=life.stream)
        assert done.counts == report.counts
        assert recover(NAME, ledger, folder, definition=life.stream).steps == {}


def test_a_recovery_is_refused_while_a_process_could_still_live(live: Callable[..., Life], new_url: str) -> None:
    life = live(8)
    life.checkpoint()
    with Ledger.open(new_url, clock=life.clock) as ledger:
        with pytest.raises(RecoveryRefusedError, match="could still live"):
            recover(NAME, ledger, life.storage.below(NAME), definition=life.stream)
        life.clock.advance(LEASE_MS - 1)
        with pytest.raises(RecoveryRefusedError, match=r"again in 1\.0 s"):
            recover(NAME, ledger, life.storage.below(NAME), definition=life.stream)
        assert ledger.streams.all() == []
        recover(NAME, ledger, life.storage.below(NAME), definition=life.stream, force=True)
        assert not ledger.rebuild.is_new(NAME)


def test_there_must_be_something_to_recover_from(tmp_path: Path, new_url: str) -> None:
    with Ledger.open(new_url) as ledger, pytest.raises(RecoveryRefusedError, match="holds no checkpoint"):
        recover(NAME, ledger, open_storage(str(tmp_path / "elsewhere")).below(NAME))


@pytest.mark.parametrize("has_checkpoint", [True, False])
def test_a_folder_that_was_renamed_is_refused(
    live: Callable[..., Life], new_url: str, tmp_path: Path, *, has_checkpoint: bool
) -> None:
    life = live(7)
    life.checkpoint()
    life.clock.advance(LEASE_MS + 1_000)
    other = tmp_path / "storage" / "other"
    (tmp_path / "storage" / NAME).rename(other)
    if not has_checkpoint:
        shutil.rmtree(other / "checkpoints")
    renamed = life.stream.model_copy(update={"name": "other"})
    with Ledger.open(new_url, clock=life.clock) as ledger:
        with pytest.raises(RecoveryRefusedError, match=f"holds the data of stream '{NAME}', not of 'other'"):
            recover("other", ledger, life.storage.below("other"), definition=renamed)
        assert ledger.streams.all() == []


def test_a_stream_is_not_begun_anew_beside_its_own_log(live: Callable[..., Life], new_url: str) -> None:
    life = live(4, steps=30)
    refuse_if_lost(life.context)
    with Ledger.open(new_url, clock=life.clock) as ledger:
        with pytest.raises(LostLedgerError, match="headrace streams recover shop --storage"):
            refuse_if_lost(life.context_in(ledger))
        other = life.stream.model_copy(update={"name": "another"})
        refuse_if_lost(StreamContext(other, ledger))
