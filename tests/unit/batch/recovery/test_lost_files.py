"""Checkpoints, results and manifests that are lost, damaged or of another version."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.unit.batch.conftest import T1, Receiving, take
from tests.unit.batch.life import LEASE_MS, NAME, Life
from tests.unit.batch.recovery.conftest import rebuild
from tests.unit.batch.recovery.ledger_contents import contents

from headrace.batch.checkpoint import checkpoint_now, checkpoint_paths, read_newest
from headrace.batch.cleanup import clean_up
from headrace.batch.manifest import ManifestError, decode_document, encode_document
from headrace.batch.recover import Step, recover
from headrace.batch.results import ResultError, read_result, read_results
from headrace.fsck.stream_check import check_stream
from headrace.ledger import BatchState, EventKind, Ledger


def test_lost_checkpoints_are_written_from_the_ledger(live: Callable[..., Life]) -> None:
    life = live(1)
    life.finish()
    life.checkpoint()
    folder = life.storage.below(NAME)
    assert recover(NAME, life.ledger, folder).steps == {}
    for path in checkpoint_paths(folder):
        folder.delete(path)
    assert set(recover(NAME, life.ledger, folder, dry_run=True).steps) == {Step.CHECKPOINT_WRITTEN}
    assert checkpoint_paths(folder) == []
    assert set(recover(NAME, life.ledger, folder).steps) == {Step.CHECKPOINT_WRITTEN}
    assert read_newest(folder).state["stream"]["sealed_until_ms"] == life.ledger.streams.get(NAME).sealed_until_ms
    assert life.ledger.events.page(NAME, kinds=[EventKind.CHECKPOINT_REWRITTEN])
    newest = checkpoint_paths(folder)[-1]
    folder.write_atomically(newest, b"{}")
    assert set(recover(NAME, life.ledger, folder).steps) == {Step.CHECKPOINT_WRITTEN}
    assert recover(NAME, life.ledger, folder).steps == {}


def test_manifests_and_results_of_another_version_are_refused(live: Callable[..., Life], new_url: str) -> None:
    life = live(1)
    life.finish()
    folder, path = life.context.storage, life.context.storage.paths("manifests")[0]
    folder.write_atomically(path, encode_document({**decode_document(folder.read(path)), "version": 9}))
    with Ledger.open(new_url, clock=life.clock) as ledger, pytest.raises(ManifestError, match="version 9"):
        recover(NAME, ledger, folder, definition=life.stream)
    path = folder.paths("results")[0]
    folder.write_atomically(path, encode_document({**decode_document(folder.read(path)), "version": 9}))
    with pytest.raises(ResultError, match="is of version 9, this headrace reads version 1"):
        read_result(folder, path)


@pytest.mark.parametrize("harm", ["missing", "damaged"])
def test_lost_results_and_manifests_are_written_from_the_ledger(
    live: Callable[..., Life], new_url: str, harm: str
) -> None:
    life = live(2)
    life.finish()
    life.checkpoint()
    life.checkpoint()
    folder = life.storage.below(NAME)
    origins = life.ledger.batches.origins(NAME, [batch.batch_time_ms for batch in life.ledger.batches.uncleaned(NAME)])
    uncleaned = next(
        batch
        for batch in life.ledger.batches.uncleaned(NAME)
        if batch.blocks and batch.batch_time_ms in origins and origins[batch.batch_time_ms].source == "log"
    )
    manifest = f"manifests/{uncleaned.manifest_uri.rpartition('/')[2]}"

    def break_it(path: str) -> None:
        if harm == "missing":
            folder.delete(path)
        else:
            folder.write_atomically(path, folder.read(path)[:-4])

    break_it(folder.paths("results")[0])
    break_it(manifest)
    report = recover(NAME, life.ledger, folder)
    assert set(report.steps) == {Step.RESULTS_WRITTEN, Step.MANIFESTS_WRITTEN, Step.CHECKPOINT_WRITTEN}
    assert recover(NAME, life.ledger, folder).steps == {}
    whole = folder.read(manifest)
    break_it(manifest)
    life.clock.advance(LEASE_MS + 1_000)
    with Ledger.open(new_url, clock=life.clock) as ledger, pytest.raises(ManifestError, match=harm):
        recover(NAME, ledger, folder, definition=life.stream)
    folder.write_atomically(manifest, whole)
    expected = contents(life.ledger)
    rebuilt_contents = contents(rebuild(life, new_url))
    assert {name: rows for name, rows in rebuilt_contents.items() if rows != expected[name]} == {}


def test_manifests_of_overtaken_allocations_are_deleted(live: Callable[..., Life]) -> None:
    life = live(1)
    life.finish()
    life.checkpoint()
    folder = life.storage.below(NAME)
    manifests = folder.paths("manifests")
    (batch, *_) = life.ledger.batches.page(NAME, 1)
    left = f"manifests/{batch.batch_time_ms}-0123456789abcdef.json"
    unclaimed = f"manifests/{batch.batch_time_ms + 10_000_000}-0123456789abcdef.json"
    for path in (left, unclaimed):
        folder.write_atomically(path, b"whatever an allocation wrote")
    assert set(recover(NAME, life.ledger, folder, dry_run=True).steps) == {Step.MANIFESTS_DELETED}
    assert folder.exists(left)
    recover(NAME, life.ledger, folder)
    # One whose time nobody has claimed may be in the making.
    assert folder.paths("manifests") == sorted([*manifests, unclaimed])


@pytest.mark.parametrize("is_cleaned", [True, False])
def test_a_damaged_result_is_refused_only_if_the_log_is_gone(
    receiving: Receiving, tmp_path: Path, is_cleaned: bool
) -> None:
    receiving.store(3)
    receiving.new_segment()
    receiving.clock.advance(60_000)
    take(receiving, T1)
    receiving.complete(T1)
    checkpoint_now(receiving.context, T1)
    folder = receiving.storage.below("shop")
    if is_cleaned:
        assert clean_up(receiving.context).segments == 1
    (path,) = folder.paths("results")
    folder.write_atomically(path, folder.read(path)[:-4])
    with Ledger.open(f"sqlite:///{tmp_path}/new.db", clock=receiving.clock) as ledger:
        if is_cleaned:
            with pytest.raises(ResultError, match=rf"{path} is damaged.*Restore the file from a copy"):
                recover("shop", ledger, folder, definition=receiving.stream, force=True)
            # As the error says.
            folder.delete(path)
            recover("shop", ledger, folder, definition=receiving.stream, force=True)
            assert ledger.batches.origins("shop", [T1])[T1].source == "kafka"
            return
        report = recover("shop", ledger, folder, definition=receiving.stream, force=True)
        assert [notice for notice in report.notices if path in notice and "counts as not run" in notice]
        assert ledger.batches.get("shop", T1).state is BatchState.ALLOCATED
        # Its next result takes the place of the damaged one.
        receiving.ledger = ledger
        receiving.complete(T1)
        checkpoint_now(receiving.context, T1)
        found = read_results(folder, folder.paths("results"))
        assert (found.by_time[T1].row.state, found.damaged) == (BatchState.COMPLETED, {})
        assert check_stream(ledger, "shop", kafka=False).findings == []
