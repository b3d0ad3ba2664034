"""A batch takes the blocks of its time, once and for good, with the log and the ledger that it has in earnest."""

from __future__ import annotations

import pytest

from headrace.batch.allocation import make_manifest
from headrace.batch.manifest import Manifest, ManifestError
from headrace.ledger.errors import BatchTimeError
from headrace.wal.errors import StorageError
from headrace.wal.reader import read_block
from headrace.wal.storage import open_storage

from .conftest import START_MS, T1, T2, Receiving, take


def offsets(receiving: Receiving, manifest: Manifest) -> list[int]:
    log = open_storage(manifest.log_root)
    return [
        offset
        for handle, _, _ in manifest.blocks("clicks")
        for offset in read_block(log, handle)[1].column("offset").to_pylist()
    ]


def test_a_batch_takes_exactly_its_times_blocks_and_keeps_them(receiving: Receiving) -> None:
    receiving.store(3)
    receiving.clock.advance(9_999)
    receiving.store(2)
    receiving.clock.advance(1)
    receiving.store(4)
    first = take(receiving, T1)
    assert (first.fresh, first.batch.records, first.batch.blocks) == (True, 5, 2)
    assert [(i.from_offset, i.until_offset) for i in first.inputs] == [(0, 5)]
    receiving.clock.advance(10_000)
    receiving.store(1, cut_time_ms=T1 - 1)
    again = take(receiving, T1)
    assert not again.fresh
    assert again.batch == first.batch
    manifest = Manifest.load(first.batch.manifest_uri)
    assert offsets(receiving, manifest) == [0, 1, 2, 3, 4]
    assert offsets(receiving, Manifest.load(take(receiving, T2).batch.manifest_uri)) == [5, 6, 7, 8, 9]


def test_a_late_block_goes_to_the_next_open_batch(receiving: Receiving) -> None:
    receiving.clock.advance(10_000)
    take(receiving, T1)
    late = receiving.store(1, cut_time_ms=T1 - 1)
    assert late.batch_time_ms == T2


def test_allocation_does_not_depend_on_the_order_of_runs(receiving: Receiving) -> None:
    receiving.store(2)
    receiving.clock.advance(10_000)
    receiving.store(3)
    receiving.clock.advance(10_000)
    assert take(receiving, T2).batch.records == 3
    assert take(receiving, T1).batch.records == 2


def test_an_empty_batch_is_an_allocation(receiving: Receiving) -> None:
    receiving.clock.advance(10_000)
    empty = take(receiving, T1)
    assert (empty.batch.records, empty.inputs) == (0, ())
    assert Manifest.load(empty.batch.manifest_uri).blocks("clicks") == []


@pytest.mark.parametrize("time", [T1 + 1, START_MS + 60_000])
def test_what_is_no_batch_time_or_has_not_come_is_refused(receiving: Receiving, time: int) -> None:
    with pytest.raises(BatchTimeError):
        take(receiving, time)


def test_nothing_is_allocated_when_the_manifest_cannot_be_written(receiving: Receiving) -> None:
    receiving.store(3)
    receiving.clock.advance(10_000)
    folder = receiving.storage.below("shop")
    folder.write_atomically("manifests", b"a file where the folder should be")
    with pytest.raises((StorageError, OSError)):
        take(receiving, T1)
    assert receiving.ledger.batches.find("shop", T1) is None
    folder.delete("manifests")
    receiving.store(1, cut_time_ms=T1 - 1)
    assert take(receiving, T1).batch.records == 3


def test_a_crash_between_seal_and_allocation_loses_nothing(receiving: Receiving) -> None:
    receiving.store(3)
    receiving.clock.advance(10_000)
    receiving.ledger.allocations.seal("shop", T1)
    receiving.store(1, cut_time_ms=T1 - 1)
    assert take(receiving, T1).batch.records == 3


def test_an_allocator_that_was_overtaken_leaves_the_manifest(receiving: Receiving) -> None:
    receiving.store(3)
    receiving.clock.advance(10_000)
    first = take(receiving, T1)
    # It had looked for the batch before the other allocated it, and reads the blocks after they were folded.
    find = receiving.ledger.batches.find
    answers = iter([None])
    receiving.ledger.batches.find = lambda *key: next(answers, find(*key))  # type: ignore[method-assign]
    receiving.ledger.allocations.blocks_of = lambda *_, **__: []  # type: ignore[method-assign]
    assert take(receiving, T1).batch == first.batch
    manifest = Manifest.load(first.batch.manifest_uri, sha256=first.batch.manifest_sha256)
    assert offsets(receiving, manifest) == [0, 1, 2]


def test_what_a_crashed_allocation_left_is_replaced(receiving: Receiving) -> None:
    receiving.clock.advance(10_000)
    make_manifest(receiving.stream.model_copy(update={"inputs": ()}), T1, []).write(
        receiving.storage.below("shop"), replace=False
    )
    batch = take(receiving, T1).batch
    assert "clicks" in Manifest.load(batch.manifest_uri, sha256=batch.manifest_sha256).inputs


@pytest.mark.parametrize("harm", ["missing", "damaged"])
def test_a_manifest_that_was_lost_is_written_again_as_it_was(receiving: Receiving, harm: str) -> None:
    receiving.store(3)
    receiving.clock.advance(10_000)
    batch = take(receiving, T1).batch
    folder, path = receiving.storage.below("shop"), f"manifests/{T1}.json"
    whole = folder.read(path)

    def break_it() -> None:
        if harm == "missing":
            folder.delete(path)
        else:
            folder.write_atomically(path, whole[:-5])
        with pytest.raises(ManifestError) as refused:
            Manifest.load(batch.manifest_uri, sha256=batch.manifest_sha256)
        assert "allocate_blocks" in str(refused.value.remedy)

    break_it()
    take(receiving, T1)
    assert folder.read(path) == whole
    # Only the same: not what is drawn up after its blocks' rows have gone.
    break_it()
    receiving.ledger.allocations.blocks_of = lambda *_, **__: []  # type: ignore[method-assign]
    assert take(receiving, T1).batch == batch
    assert not folder.exists(path) or folder.read(path) == whole[:-5]
