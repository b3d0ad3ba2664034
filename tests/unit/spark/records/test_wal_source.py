"""Which blocks a task reads, and what the source does with a block that it cannot read."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.records import make_block

from headrace.blocks import ReceiverId
from headrace.errors import Failure
from headrace.spark.records.wal_source import (
    DamagedBlockError,
    ListedBlock,
    LogBlocks,
    UnknownVersionError,
    UnreadableBlockError,
    read_partition,
)
from headrace.wal import frame
from headrace.wal.local_copies import BlockCopies, CopySettings
from headrace.wal.storage import LocalStorage
from headrace.wal.writer import WriteAheadLogWriter


@pytest.mark.parametrize(
    ("what", "error", "failure"),
    [
        ("newer", UnknownVersionError, Failure.PASSING),
        ("damaged", DamagedBlockError, Failure.FINAL),
        ("gone", UnreadableBlockError, Failure.PASSING),
    ],
)
def test_a_block_that_cannot_be_read_says_whether_to_try_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, error: type[UnreadableBlockError], failure: Failure
) -> None:
    storage = LocalStorage(tmp_path)
    batch, ranges = make_block([b"value"])
    with monkeypatch.context() as patch:
        if what == "newer":
            patch.setattr(frame, "VERSION", 2)
        handle = (
            WriteAheadLogWriter(storage, "", ReceiverId("flights", "kafka", 0), 1)
            .write(batch, ranges, cut_time_ms=0, last_accepted_sequence=None)
            .handle
        )
    path = tmp_path / handle.segment
    if what == "damaged":
        path.write_bytes(path.read_bytes()[:-9] + bytes(9))
    elif what == "gone":
        path.unlink()
    with pytest.raises(UnreadableBlockError, match="cannot be read") as raised:
        list(read_partition(str(tmp_path), [ListedBlock(handle, 1, 1)]))
    assert type(raised.value) is error
    assert raised.value.failure is failure


RECORDS = (3, 1, 4, 1, 5, 9, 2, 6)


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> LogBlocks:
    folder = tmp_path_factory.mktemp("log")
    writer = WriteAheadLogWriter(LocalStorage(folder), "", ReceiverId("flights", "kafka", 0), 1)
    listed = []
    first = 0
    for number in RECORDS:
        batch, ranges = make_block([b"value"] * number, from_offset=first)
        accepted = writer.next_sequence - 1 if writer.next_sequence else None
        written = writer.write(batch, ranges, cut_time_ms=0, last_accepted_sequence=accepted)
        listed.append(ListedBlock(written.handle, number, written.payload_bytes))
        first += number
    return LogBlocks(tuple((str(folder), block) for block in listed))


@settings(deadline=None, max_examples=50)
@given(cuts=st.lists(st.integers(1, sum(RECORDS) - 1), unique=True))
def test_each_record_is_read_once_however_the_numbers_are_cut(blocks: LogBlocks, cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), sum(RECORDS)]
    read: list[int] = []
    for first, until in itertools.pairwise(edges):
        numbers = pa.record_batch([pa.array(range(first, until), pa.int64())], names=["id"])
        read += [offset for batch in blocks.read(iter([numbers])) for offset in batch.column("offset").to_pylist()]
    assert read == list(range(sum(RECORDS)))


def test_a_task_that_gets_no_number_reads_nothing(blocks: LogBlocks) -> None:
    none = pa.record_batch([pa.array([], pa.int64())], names=["id"])
    assert list(blocks.read(iter([none]))) == []
    assert list(blocks.read(iter([]))) == []


@pytest.mark.parametrize(("tasks", "planned"), [(1, 1), (2, 2), (100, 4)])
def test_a_task_has_half_a_megabyte_at_least(
    blocks: LogBlocks, tasks: int, planned: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Session:
        def range(self, *given: Any) -> Any:
            return given

    size = sum(block.payload_bytes for _, block in blocks.blocks)
    monkeypatch.setattr("headrace.spark.records.wal_source._MIN_TASK_BYTES", size // 4)
    session: Any = Session()
    assert blocks.numbered(session, tasks) == (0, sum(RECORDS), 1, planned)


def test_a_task_reports_what_it_read_from_copies(
    blocks: LogBlocks, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Spark gives a task its numbers in several Arrow batches; the counts are of all of them."""
    copied = LogBlocks(blocks.blocks, CopySettings(1 << 20, str(tmp_path)))
    ((log_root, first), *_) = copied.blocks
    segment = (Path(log_root) / first.handle.segment).read_bytes()
    copy = segment[first.handle.offset : first.handle.offset + first.handle.length]
    BlockCopies(log_root, CopySettings(1 << 20, str(tmp_path))).write(first.handle, [copy])
    cuts = [range(2), range(2, sum(RECORDS))]
    numbers = [pa.record_batch([pa.array(cut, pa.int64())], names=["id"]) for cut in cuts]
    read = [offset for batch in copied.read(iter(numbers)) for offset in batch.column("offset").to_pylist()]
    assert read == list(range(sum(RECORDS)))
    report = f"1 blocks ({len(copy)} bytes) read from local copies; from the log {len(RECORDS) - 1} without a copy"
    assert capfd.readouterr().err.count(report) == 1


def test_an_input_without_blocks_has_no_records(blocks: LogBlocks) -> None:
    assert LogBlocks.of([], "records").records == 0
    assert blocks.records == sum(RECORDS)
