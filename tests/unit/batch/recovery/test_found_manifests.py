from __future__ import annotations

import hashlib
import tracemalloc
from collections.abc import Callable
from pathlib import Path

from headrace.batch.found_files import FoundManifests, listed_spans, read_manifests
from headrace.batch.manifest import Manifest, ManifestBlock
from headrace.blocks import BlockHandle, OffsetRange, TopicPartition
from headrace.ledger.batches.tables import BatchInputRow
from headrace.wal.log_storage import LogStorage
from headrace.wal.storage import open_storage

PARTITIONS = [TopicPartition("flights", "id-0", number) for number in range(4)]
OLD, NEW = "kafka/0/e1-0000-1.seg", "kafka/0/e1-0001-2.seg"


def block(segment: str, at: int, *ranges: tuple[int, int, int]) -> ManifestBlock:
    """A block at offset ``at`` with ``ranges`` as (partition, start, until)."""
    taken = tuple(OffsetRange(PARTITIONS[number], start, until, until - start) for number, start, until in ranges)
    return ManifestBlock(BlockHandle(segment, at, 100), sum(block_range.records for block_range in taken), 1_000, taken)


def write(folder: LogStorage, batch_time_ms: int, *blocks: ManifestBlock) -> None:
    Manifest("flights", batch_time_ms, 10_000, {"kafka": blocks}, folder.url).write(folder)


def read(folder: LogStorage, *segments: str) -> FoundManifests:
    return read_manifests(folder, segments, is_removed=lambda time_ms: time_ms < 10_000, progress=lambda _: None)


def test_a_manifest_keeps_its_ranges_and_the_blocks_in_the_log(tmp_path: Path) -> None:
    folder = open_storage(str(tmp_path))
    write(folder, 0, block(OLD, 0, (0, 0, 5)))
    blocks = [
        block(NEW, 7, (0, 30, 40), (1, 0, 10)), block(OLD, 0, (0, 10, 20)), block(OLD, 1, (0, 20, 25)),
        block(NEW, 3, (0, 40, 41)),
    ]  # fmt: skip
    write(folder, 10_000, *blocks)
    (of_time,) = read(folder, NEW).by_time.values()
    (found,) = of_time
    data = (tmp_path / found.path).read_bytes()
    assert (found.batch_time_ms, found.sha256) == (10_000, hashlib.sha256(data).hexdigest())
    assert (found.blocks, found.records, found.payload_bytes) == (4, 36, 4_000)
    key = ("flights", 10_000, "kafka")
    assert found.inputs == (
        BatchInputRow(*key, PARTITIONS[0], 10, 41, 26, 4), BatchInputRow(*key, PARTITIONS[1], 0, 10, 10, 1),
    )  # fmt: skip
    places = [("kafka", partition) for partition in PARTITIONS]
    assert found.spans == ((places[0], (10, 25)), (places[0], (30, 41)), (places[1], (0, 10)))
    assert found.in_log == (BlockHandle(NEW, 7, 100), BlockHandle(NEW, 3, 100))
    assert set(found.segments) == {OLD, NEW}


def test_spans_of_all_manifests_are_joined(tmp_path: Path) -> None:
    folder = open_storage(str(tmp_path))
    for batch_time_ms, start in [(20_000, 10), (10_000, 0), (40_000, 30)]:
        write(folder, batch_time_ms, block(OLD, start, (0, start, start + 10)))
    assert listed_spans(read(folder).by_time) == {("kafka", PARTITIONS[0]): [(0, 20), (30, 40)]}


def test_a_manifest_without_segments_takes_a_tenth_of_its_memory(tmp_path: Path) -> None:
    folder = open_storage(str(tmp_path))
    for time in range(1, 41):
        ranges = [(number, time * 50_000, time * 50_000) for number in range(4)]
        blocks = [
            block(OLD, at, *((number, start + at * 300, until + at * 300 + 300) for number, start, until in ranges))
            for at in range(50)
        ]
        write(folder, time * 10_000, *blocks)

    def memory(make: Callable[[], object]) -> int:
        make()  # Without what is imported and cached once.
        tracemalloc.start()
        made = make()
        size = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert made
        return size

    paths = list((tmp_path / "manifests").iterdir())
    whole = memory(lambda: [Manifest.from_bytes(path.read_bytes(), str(path)) for path in paths])
    assert memory(lambda: read(folder)) < whole / 10
