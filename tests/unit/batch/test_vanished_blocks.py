"""What a power failure takes from a log that is not synced: read from Kafka again, or given up and recorded."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Literal

import pytest
from tests.support.faulty_files import FaultyFiles
from tests.unit.batch.conftest import PARTITION, T1, Receiving, take

from headrace.fsck.stream_check import check_stream
from headrace.ledger.batches.tables import BatchOrigin
from headrace.ledger.events import VANISHED
from headrace.spark.attempts.batch_plan import load_manifests, without_vanished
from headrace.stream_context import StreamContext
from headrace.wal.reader import read_block
from headrace.wal.storage import LocalStorage
from headrace.wal.writer import SegmentSettings, WriteAheadLogWriter

# Of small blocks; some of them are in a segment that has ended, and so was synced.
SEGMENT_BYTES, RECORDS = 9_000, 2


class Unsynced(Receiving):
    """A stream whose blocks are not synced, on a disk whose power can be cut."""

    def __init__(self, folder: Path) -> None:
        self.files = FaultyFiles()
        super().__init__(folder)

    def new_segment(self) -> None:
        self.storage = LocalStorage(self.stream.storage.url, calls=self.files)
        super().new_segment()
        self.writer = WriteAheadLogWriter(
            self.storage,
            "shop/log",
            self.receiver,
            self.lease.epoch,
            clock=self.clock,
            accepted=lambda segment: [block.info for block in self.ledger.blocks.of_segment("shop", segment)],
            segments=SegmentSettings(SEGMENT_BYTES, sync_blocks=False),
        )

    def delivered(self, delivery: Literal["exactly_once", "at_least_once", "at_most_once"]) -> StreamContext:
        stream = self.stream.model_copy(update={"delivery": delivery})
        self.ledger.streams.register(
            "shop", stream.to_json(), batch_interval_ms=10_000, block_interval_ms=self.stream.block_interval_ms
        )
        return self.context_of(stream)

    def origin(self, context: StreamContext) -> BatchOrigin:
        return without_vanished(context, self.ledger.batches.origins("shop", [T1]))[T1]

    def offsets_read(self, origin: BatchOrigin) -> list[int]:
        (manifest,) = load_manifests([origin])
        log = self.storage.below("shop/log")
        return [
            offset
            for handle, *_ in manifest.blocks("clicks")
            for offset in read_block(log, handle)[1].column("offset").to_pylist()
        ]


@pytest.fixture
def receiving(tmp_path: Path) -> Unsynced:
    return Unsynced(tmp_path)


def lose_power(receiving: Unsynced, seed: int) -> int:
    """The host ends while a batch of blocks is in the log, and starts again with a receiver of the next epoch. Returns
    the number of records that were received."""
    for _ in range(5 + seed % 4):
        receiving.store(RECORDS)
    receiving.clock.advance(10_000)
    take(receiving, T1)
    receiving.files.cut_power(Random(seed))
    receiving.new_segment()
    return receiving.position


def test_a_block_is_not_synced_and_the_end_of_its_segment_is(receiving: Unsynced) -> None:
    receiving.store(1)
    before = len(receiving.files.calls)
    for _ in range(3):
        receiving.store(1)
    assert "fdatasync" not in {call for call, *_ in receiving.files.calls[before:]}
    receiving.writer.close(None)
    assert "fdatasync" in {call for call, *_ in receiving.files.calls[before:]}
    receiving.files.cut_power(Random(0))
    receiving.new_segment()
    receiving.clock.advance(10_000)
    take(receiving, T1)
    assert receiving.offsets_read(receiving.origin(receiving.delivered("at_most_once"))) == [0, 1, 2, 3]


@pytest.mark.parametrize("seed", range(12))
def test_at_most_once_vanished_blocks_are_a_gap(receiving: Unsynced, seed: int) -> None:
    """The rest of the batch is read once."""
    context = receiving.delivered("at_most_once")
    received = lose_power(receiving, seed)
    origin = receiving.origin(context)
    read = receiving.offsets_read(origin)
    # A second attempt finds the same, and records nothing again.
    assert receiving.origin(context) == origin
    gaps = receiving.ledger.gaps.page("shop")
    lost = [offset for gap in gaps for offset in range(gap.from_offset, gap.until_offset)]
    assert sorted(read + lost) == list(range(received))
    assert {(gap.reason, gap.partition, gap.batch_time_ms) for gap in gaps} <= {(VANISHED, PARTITION, T1)}
    assert origin.source == "log"
    report = check_stream(receiving.ledger, "shop", kafka=False)
    assert report.findings == []
    assert sum("batches leave it out" in note for note in report.notes) == len(origin.vanished)


def test_some_power_cuts_take_blocks_and_some_do_not(tmp_path: Path) -> None:
    """Otherwise the tests beside this one show nothing."""
    vanished = set()
    for seed in range(12):
        (folder := tmp_path / str(seed)).mkdir()
        receiving = Unsynced(folder)
        lose_power(receiving, seed)
        vanished.add(len(receiving.origin(receiving.delivered("at_most_once")).vanished))
        receiving.ledger.close()
    assert vanished == {0, 1, 2, 3}


@pytest.mark.parametrize("seed", range(12))
def test_at_least_once_a_batch_without_a_block_rereads_kafka(receiving: Unsynced, seed: int) -> None:
    lose_power(receiving, seed)
    lacks = bool(receiving.origin(receiving.delivered("at_most_once")).vanished)
    receiving.ledger.gaps.page("shop")
    origin = receiving.origin(receiving.delivered("at_least_once"))
    assert (origin.source, origin.vanished) == ("kafka" if lacks else "log", frozenset())


def test_blocks_of_a_live_receiver_are_not_checked(receiving: Unsynced, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel has its bytes; reading them in the driver would cost as much as the batch."""
    receiving.store(RECORDS)
    receiving.clock.advance(10_000)
    take(receiving, T1)
    monkeypatch.setattr("headrace.spark.attempts.batch_plan.read_block", lambda *_: pytest.fail("it is read"))
    assert receiving.origin(receiving.delivered("at_most_once")).vanished == frozenset()
    receiving.new_segment()
    with pytest.raises(pytest.fail.Exception):
        receiving.origin(receiving.delivered("at_most_once"))
    assert receiving.origin(receiving.delivered("exactly_once")).vanished == frozenset()
