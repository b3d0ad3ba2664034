"""A manifest lists a batch's blocks for good, and shows damage."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.batch.manifest import Manifest, ManifestBlock, ManifestError, encode_document, manifest_path
from headrace.blocks import BlockHandle, OffsetRange, TopicPartition
from headrace.kafka.ranges import RecordedRange
from headrace.wal.errors import StoredFileExistsError
from headrace.wal.storage import open_storage

P0 = TopicPartition("clicks", "id-1", 0)
P1 = TopicPartition("clicks", "id-2", 1, incarnation=2)


def block(segment: str, offset: int, *ranges: OffsetRange) -> ManifestBlock:
    return ManifestBlock(
        BlockHandle(segment, offset, 100), sum(r.records for r in ranges), 90, ranges or (OffsetRange(P0, 0, 3, 3),)
    )


def manifest(folder: str, **inputs: tuple[ManifestBlock, ...]) -> Manifest:
    return Manifest("shop", 1_700_000_010_000, 10_000, inputs, folder)


def test_written_and_loaded_it_is_the_same(tmp_path: Path) -> None:
    folder = f"{tmp_path}/shop"
    written = manifest(
        folder,
        clicks=(block("b", 7, OffsetRange(P0, 0, 3, 2), OffsetRange(P1, 5, 9, 4, leader_epoch=7)), block("a", 0)),
        views=(),
    )
    sha256 = written.write(open_storage(folder))
    loaded = Manifest.load(written.uri, sha256=sha256)
    assert loaded == written
    assert loaded.log_root == f"{folder}/log"
    assert loaded.records == 6
    assert [handle.segment for handle, _, _ in loaded.blocks("clicks")] == ["b", "a"]
    assert loaded.blocks("views") == loaded.blocks("unknown") == []


def test_another_manifest_is_not_overwritten_nor_taken_for_this(tmp_path: Path) -> None:
    folder = f"{tmp_path}/shop"
    storage = open_storage(folder)
    first, second = manifest(folder, clicks=(block("a", 0),)), manifest(folder, clicks=())
    sha256 = first.write(storage)
    assert first.write(storage) == sha256, "the same again is no conflict"
    with pytest.raises(StoredFileExistsError):
        second.write(storage)
    assert Manifest.load(first.uri, sha256=sha256) == first
    second.write(storage, replace=True)
    with pytest.raises(ManifestError, match="SHA-256"):
        Manifest.load(first.uri, sha256=sha256)


def test_ranges_are_those_of_the_blocks(tmp_path: Path) -> None:
    listed = manifest(str(tmp_path), clicks=(block("a", 0, OffsetRange(P0, 0, 3, 2, 7), OffsetRange(P1, 5, 9, 4)),))
    assert listed.ranges("clicks") == [RecordedRange(P0, 0, 3, 2, 7), RecordedRange(P1, 5, 9, 4)]
    assert listed.ranges("unknown") == []


def test_a_built_manifest_keeps_its_ranges_and_matches_no_other(tmp_path: Path) -> None:
    folder = f"{tmp_path}/shop"
    storage = open_storage(folder)
    empty = manifest(folder, clicks=(), views=())
    empty.write(storage)
    ranges = (RecordedRange(P0, 0, 3, None), RecordedRange(P1, 5, 9, None))
    written = dataclasses.replace(empty, built={"clicks": ranges})
    sha256 = written.write(storage)
    assert written.uri != empty.uri, "the ledger says which of the two counts"
    loaded = Manifest.load(written.uri, sha256=sha256)
    assert loaded == written
    assert loaded.ranges("clicks") == list(ranges)
    assert loaded.records == 7
    assert loaded.blocks("views") == []
    with pytest.raises(ManifestError, match="built from Kafka"):
        loaded.blocks("clicks")
    assert Manifest.load(empty.uri) == empty


def test_an_input_without_built_ranges_changes_no_manifest_byte() -> None:
    plain = manifest("/x", clicks=(block("a", 0),))
    assert b"ranges" not in plain.to_bytes()
    assert dataclasses.replace(plain, built={"clicks": ()}).to_bytes() == plain.to_bytes()


def test_a_missing_manifest_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="allocate_blocks"):
        Manifest.load(f"{tmp_path}/{manifest_path(10)}")


def test_another_version_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="version 99"):
        Manifest.from_bytes(encode_document({"version": 99}), "x/manifests/1.json")


@given(st.data())
def test_no_damage_goes_unseen(data: st.DataObject) -> None:
    good = manifest("/x", clicks=(block("a", 0), block("b", 9))).to_bytes()
    position = data.draw(st.integers(0, len(good) - 1))
    bit = data.draw(st.integers(0, 7))
    bad = bytearray(good)
    bad[position] ^= 1 << bit
    with pytest.raises(ManifestError, match="damaged"):
        Manifest.from_bytes(bytes(bad), "/x/manifests/1.json")
    with pytest.raises(ManifestError, match="damaged"):
        Manifest.from_bytes(good[:position], "/x/manifests/1.json")
