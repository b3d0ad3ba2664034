"""Which of the log's undecided frames count: what went on behind them tells."""

from __future__ import annotations

import pytest

from headrace.batch.accepted_blocks import accepted_blocks
from headrace.batch.checkpoint import SavedReceiver, SavedState
from headrace.batch.found_files import FolderContents, FoundFrame, LostPart
from headrace.batch.results import FoundResults
from headrace.blocks import BlockHandle, BlockInfo, OffsetRange, ReceiverId, TopicPartition
from headrace.ledger.receiving.tables import PositionRow
from headrace.ledger.states import PartitionState

ZERO, ONE = (TopicPartition("taps", "id", number) for number in (0, 1))
Ranges = dict[TopicPartition, tuple[int, int]]


def frame(
    epoch: int,
    ranges: Ranges,
    *,
    accepted: bool | None = None,
    cut_ms: int = 1_000,
    sequence: int = 0,
    index: int = 0,
    first: int | None = None,
) -> FoundFrame:
    info = BlockInfo(
        receiver=ReceiverId("shop", "clicks", index),
        epoch=epoch,
        sequence=sequence,
        cut_time_ms=cut_ms,
        handle=BlockHandle(f"clicks-{index}/{epoch:010d}-000000-1700000000000.wal", sequence * 100, 100),
        ranges=tuple(OffsetRange(partition, *span, 1) for partition, span in ranges.items()),
        records=1,
        payload_bytes=1,
    )
    return FoundFrame(info, accepted, first)


def decide(
    *frames: FoundFrame,
    checkpoint: dict[TopicPartition, int] | None = None,
    opened: dict[TopicPartition, int] | None = None,
    last_accepted: int = -1,
    lost: tuple[LostPart, ...] = (),
    listed: tuple[FoundFrame, ...] = (),
) -> tuple[list[int], list[int], int]:
    """The epochs of the blocks that count, of those among them that nothing confirms, and how many were refused.

    ``last_accepted``: the receiver's last accepted sequence of epoch 1 in the checkpoint.
    """
    now = (None, None, 0, PartitionState.ACTIVE, None, 0)
    saved = SavedState(
        positions={
            ("clicks", p): PositionRow("clicks", p, offset, 0, *now) for p, offset in (checkpoint or {}).items()
        },
        receivers=[SavedReceiver(ReceiverId("shop", "clicks", 0), 1, 1, last_accepted)],
    )
    contents = FolderContents(
        stream="shop",
        saved=saved,
        frames=frames,
        positions={("clicks", partition): [offset] for partition, offset in (opened or {}).items()},
        segments={},
        epochs={},
        manifests={},
        damaged_manifests={},
        results=FoundResults({}, {}),
        lost=lost,
        notices=(),
        last_sign_ms=0,
        lease_ms=0,
    )
    contents.__dict__["listed"] = frozenset(frame.info.handle for frame in listed)
    decided = accepted_blocks(contents)
    epochs = sorted(info.epoch for info in decided.blocks), sorted(info.epoch for info in decided.undecided)
    return *epochs, decided.refused


@pytest.mark.parametrize("order", [1, -1])
def test_each_block_is_decided_by_the_next_even_an_undecided_one(order: int) -> None:
    frames = [
        frame(8, {ZERO: (42, 46)}, accepted=True),
        frame(9, {ZERO: (46, 51)}),
        frame(10, {ZERO: (51, 55), ONE: (36, 38)}),
        frame(11, {ZERO: (55, 61)}),
    ]
    assert decide(*frames[::order]) == ([8, 9, 10, 11], [11], 0)


def test_the_last_one_counts_although_nothing_is_behind_it() -> None:
    """Its source may be a queue that was told that it is stored."""
    assert decide(frame(1, {ZERO: (0, 5)}, accepted=True), frame(2, {ZERO: (5, 9)})) == ([1, 2], [2], 0)


def test_the_last_block_does_not_count_if_it_was_read_again() -> None:
    again = frame(3, {ZERO: (5, 7)}, cut_ms=2_000)
    assert decide(frame(2, {ZERO: (5, 9)}), again) == ([3], [3], 1)
    assert decide(frame(2, {ZERO: (5, 9)}), frame(3, {ZERO: (5, 7)}, accepted=True)) == ([3], [], 1)


def test_a_segment_that_was_opened_after_the_block_decides_it() -> None:
    assert decide(frame(1, {ZERO: (0, 5)}), opened={ZERO: 5}) == ([1], [], 0)


def test_of_two_that_hold_the_same_offsets_the_later_one_counts() -> None:
    frames = [frame(1, {ZERO: (0, 5)}), frame(2, {ZERO: (0, 5)}), frame(3, {ZERO: (5, 6)})]
    assert decide(*frames) == ([2, 3], [3], 1)


def test_of_two_the_one_counts_from_whose_end_it_went_on() -> None:
    """Also where clocks say otherwise: 2 was dropped, since 3 began within it; 4 then lets 3 count."""
    frames = [
        frame(2, {ZERO: (0, 5)}, cut_ms=9_000, index=1),
        frame(3, {ZERO: (0, 3)}, cut_ms=8_000),
        frame(4, {ZERO: (3, 6)}, cut_ms=8_500),
        frame(5, {ZERO: (6, 9)}, cut_ms=8_600),
    ]
    assert decide(*frames) == ([3, 4, 5], [5], 1)


def test_a_block_counts_whole_or_not_at_all() -> None:
    frames = [frame(1, {ZERO: (0, 5), ONE: (0, 5)}), frame(2, {ONE: (0, 4)}, accepted=True, index=1)]
    assert decide(*frames, frame(3, {ZERO: (5, 8)})) == ([2, 3], [3], 1)


def test_the_checkpoint_knows_all_of_it_or_nothing() -> None:
    both = frame(1, {ZERO: (0, 5), ONE: (0, 5)})
    assert decide(both, checkpoint={ZERO: 5, ONE: 7}) == ([1], [], 0)
    assert decide(both, checkpoint={ZERO: 5, ONE: 0}) == ([], [], 1)
    assert decide(both, checkpoint={ZERO: 3, ONE: 0}) == ([], [], 1)
    assert decide(both, checkpoint={ZERO: 0, ONE: 0}) == ([1], [1], 0)
    assert decide(both, frame(2, {ZERO: (5, 6)}), checkpoint={ZERO: 0, ONE: 0}) == ([1, 2], [2], 0)


def test_an_unreplaced_block_counts_though_a_position_was_in_it() -> None:
    """A rebuild had set the position back, from 3 to 2: what was written since goes over 3."""
    frames = [
        frame(1, {ZERO: (0, 2)}, accepted=True),
        frame(1_002, {ZERO: (2, 5)}),
        frame(1_003, {ZERO: (5, 6)}, accepted=True),
    ]
    assert decide(*frames, opened={ZERO: 3}) == ([1, 1_002, 1_003], [], 0)


def test_a_block_added_between_the_checkpoint_s_two_looks_counts() -> None:
    """A checkpoint reads the positions first, and the receivers' last accepted sequences after them."""
    last = frame(1, {ZERO: (0, 5)}, sequence=3)
    assert decide(last, checkpoint={ZERO: 0}, last_accepted=3) == ([1], [], 0)
    assert decide(last, checkpoint={ZERO: 0}, last_accepted=2) == ([1], [1], 0)


def write(epoch: int, *ranges: Ranges, accepted: bool | None = None, cut_ms: int = 1_000) -> list[FoundFrame]:
    """The blocks of one write."""
    return [
        frame(epoch, each, accepted=accepted, cut_ms=cut_ms, sequence=number, first=0)
        for number, each in enumerate(ranges)
    ]


def test_all_blocks_of_the_last_write_are_undecided() -> None:
    """Its second block begins where its first one ends, and shows nothing about that."""
    assert decide(*write(1, {ZERO: (0, 5)}, {ZERO: (5, 9)}, {ONE: (0, 2)})) == ([1, 1, 1], [1, 1, 1], 0)


def test_a_block_behind_the_write_decides_all_of_it() -> None:
    blocks = write(1, {ZERO: (0, 5)}, {ONE: (0, 2)}, {ZERO: (5, 9)})
    assert decide(*blocks, frame(2, {ZERO: (9, 10)})) == ([1, 1, 1, 2], [2], 0)
    assert decide(*blocks, opened={ONE: 2}) == ([1, 1, 1], [], 0)


@pytest.mark.parametrize("again", [(0, 3), (0, 5), (0, 7), (0, 12)])
def test_a_write_is_replaced_whole(again: tuple[int, int]) -> None:
    """Nothing of it was accepted if any of its offsets were read again; the offsets behind are still in the source."""
    blocks = write(1, {ZERO: (0, 5)}, {ZERO: (5, 9)}, {ONE: (0, 2)})
    assert decide(*blocks, frame(2, {ZERO: again}, accepted=True)) == ([2], [], 3)
    assert decide(*blocks, frame(2, {ZERO: again}, cut_ms=2_000)) == ([2], [2], 3)


def test_the_checkpoint_knows_all_of_a_write_or_nothing() -> None:
    blocks = write(1, {ZERO: (0, 5)}, {ZERO: (5, 9)}, {ONE: (0, 2)})
    assert decide(*blocks, checkpoint={ZERO: 9, ONE: 2}) == ([1, 1, 1], [], 0)
    assert decide(*blocks, checkpoint={ZERO: 5, ONE: 0}) == ([], [], 3)
    assert decide(*blocks, checkpoint={ZERO: 9, ONE: 0}) == ([], [], 3)
    assert decide(*blocks, checkpoint={ZERO: 0, ONE: 0}) == ([1, 1, 1], [1, 1, 1], 0)
    assert decide(*blocks, checkpoint={ZERO: 0, ONE: 0}, last_accepted=2) == ([1, 1, 1], [], 0)


def test_a_manifest_with_one_block_of_a_write_decides_all_of_it() -> None:
    blocks = write(1, {ZERO: (0, 5)}, {ZERO: (5, 9)}, {ONE: (0, 2)})
    assert decide(*blocks, listed=(blocks[1],)) == ([1, 1, 1], [], 0)


def test_a_write_with_a_lost_block_is_read_again_from_kafka() -> None:
    first, middle, last = write(1, {ZERO: (0, 5)}, {ZERO: (5, 9)}, {ZERO: (9, 12)})
    lost = LostPart(middle.info.handle.segment, "damaged", middle.info.ranges)
    assert decide(first, last, lost=(lost,)) == ([], [], 2)
    # If the position went on behind it, it had been accepted.
    assert decide(first, last, frame(2, {ZERO: (12, 13)}, accepted=True), lost=(lost,)) == ([1, 1, 2], [], 0)
