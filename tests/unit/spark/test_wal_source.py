"""Which blocks a task reads, and what the source does with a block that it cannot read."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from headrace.blocks import BlockHandle, ReceiverId
from headrace.errors import Failure
from headrace.spark.wal_source import (
    MIN_GROUP_BYTES,
    DamagedBlockError,
    ListedBlock,
    UnknownVersionError,
    UnreadableBlockError,
    group_blocks,
    read_partition,
)
from headrace.testing.records import make_block
from headrace.wal import frame
from headrace.wal.local_storage import LocalStorage
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


def block(segment: int, offset: int, size: int, unit: int = MIN_GROUP_BYTES) -> ListedBlock:
    """A block of ``size`` units; by default each of them is enough for a group."""
    return ListedBlock(BlockHandle(f"segment-{segment:03}", offset, size), 10, size * unit)


def test_no_blocks_make_no_group() -> None:
    assert group_blocks([], 4) == []


def test_equal_blocks_are_dealt_evenly_in_order() -> None:
    blocks = [block(0, index * 100, 100) for index in range(8)]
    groups = group_blocks(list(reversed(blocks)), 4)
    assert [len(group) for group in groups] == [2, 2, 2, 2]
    assert [listed for group in groups for listed in group] == blocks


def test_small_batches_are_one_group() -> None:
    assert len(group_blocks([block(0, index, 1000, unit=1) for index in range(20)], 4)) == 1


def test_one_huge_block_does_not_starve_the_others() -> None:
    groups = group_blocks([block(0, 0, 10_000), block(0, 1, 1), block(0, 2, 1)], 3)
    assert [len(group) for group in groups] == [1, 1, 1]


def test_blocks_of_no_bytes_are_still_dealt() -> None:
    assert sum(len(group) for group in group_blocks([block(0, index, 0) for index in range(3)], 2)) == 3


def test_less_than_one_group_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one group"):
        group_blocks([], 0)


@pytest.mark.parametrize("seed", range(20))
def test_every_block_is_in_exactly_one_group_and_groups_are_near_equal(seed: int) -> None:
    chance = random.Random(seed)
    blocks = [block(chance.randrange(5), index, chance.randrange(1, 1000)) for index in range(chance.randrange(1, 200))]
    wanted = chance.randrange(1, 9)
    groups = group_blocks(blocks, wanted)
    assert sorted(listed.handle for group in groups for listed in group) == sorted(b.handle for b in blocks)
    assert len(groups) == min(wanted, len(blocks))
    share = sum(b.payload_bytes for b in blocks) / len(groups)
    assert all(sum(b.payload_bytes for b in group) <= share + 2 * 1000 * MIN_GROUP_BYTES for group in groups)
