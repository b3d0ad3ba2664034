"""Records of an input that is no Kafka input are read from the log or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.batch.allocation import write_manifest
from headrace.batch.manifest import Manifest, ManifestBlock
from headrace.blocks import BlockHandle, OffsetRange, TopicPartition
from headrace.errors import Failure
from headrace.spark.batch_frames import ReadAgainError, refuse_reading_again
from headrace.stream import ReceiverInput
from headrace.wal.storage import open_storage

LINES = ReceiverInput(id="lines", receiver="shop:Lines")


def manifest_of(folder: Path, blocks: tuple[ManifestBlock, ...]) -> str:
    storage = open_storage(str(folder))
    manifest = Manifest(
        stream="text",
        batch_time_ms=1_700_000_000_000,
        interval_ms=1_000,
        inputs={"lines": blocks},
        folder_url=str(folder),
    )
    return write_manifest(storage, manifest)[0].uri


def test_a_batch_whose_log_is_gone_is_refused_with_its_time_its_input_and_what_to_do(tmp_path: Path) -> None:
    partition = TopicPartition("lines", LINES.topic_id, 0)
    block = ManifestBlock(BlockHandle("lines/0/1", 0, 10), 3, 10, (OffsetRange(partition, 0, 3, 3),))
    with pytest.raises(ReadAgainError, match=r"2023-11-14.*input 'lines'.*raise the stream's remember") as refused:
        refuse_reading_again(LINES, [manifest_of(tmp_path, (block,))])
    assert refused.value.failure is Failure.FINAL


def test_a_batch_without_records_of_the_input_needs_nothing_of_it(tmp_path: Path) -> None:
    refuse_reading_again(LINES, [manifest_of(tmp_path, ())])
