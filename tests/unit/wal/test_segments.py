"""Names of segments sort in the order of writing, and nothing else passes for one."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from tests.support.faulty_storage import FaultyStorage
from tests.support.records import make_block

from headrace.blocks import ReceiverId
from headrace.clock import ManualClock
from headrace.wal.frame import SegmentName, receiver_directory, segments_in
from headrace.wal.writer import WriteAheadLogWriter


def test_a_name_taken_apart_is_the_name() -> None:
    name = SegmentName("clicks", 3, 12, 7, 1_700_000_000_000)
    assert name.path == "clicks-3/0000000012-000007-1700000000000.wal"
    assert SegmentName.parse(name.path) == name


def test_a_name_in_an_object_store_has_a_random_part() -> None:
    name = SegmentName("clicks", 3, 12, 7, 1_700_000_000_000, "0123456789abcdef")
    assert name.path == "clicks-3/0000000012-000007-1700000000000-0123456789abcdef.wal"
    assert SegmentName.parse(name.path) == name


@pytest.mark.parametrize("input_id", ["a-1", "a/b", "ä %", "..", "a-0/x"])
def test_any_input_has_a_directory_of_its_own(input_id: str) -> None:
    name = SegmentName(input_id, 0, 1, 0, 1_700_000_000_000)
    assert name.path.count("/") == 1
    assert SegmentName.parse(name.path) == name
    assert name.path.startswith(receiver_directory(ReceiverId("s", input_id, 0)) + "/")


@pytest.mark.parametrize(
    "path",
    [
        "",
        "kafka-0/",
        "kafka-0/0000000001-000000-1700000000000.wal.tmp",
        "kafka-0/0000000001-000000-1700000000000.torn",
        "kafka-0/000000001-000000-1700000000000.wal",
        "kafka-0/0000000001-000000.wal",
        "kafka-0/0000000001-00000x-1700000000000.wal",
        "kafka-0/0000000001-000000-1700000000000-.wal",
        "kafka-0/0000000001-000000-1700000000000-0123456789abcdeg.wal",
        "torn/kafka-0/0000000001-000000-1700000000000.wal-2283.torn",
        "torn/kafka-0/0000000001-000000-1700000000000.wal",
        "0000000001-000000-1700000000000.wal",
    ],
)
def test_what_is_no_segment_is_passed_by(path: str) -> None:
    assert SegmentName.parse(path) is None
    assert segments_in([path]) == []


def test_names_sort_in_order_of_writing_with_more_digits_too() -> None:
    """The numbers outgrow their digits."""
    names = [
        SegmentName("kafka", index, epoch, number, 1_700_000_000_000)
        for index in (0, 1, 10)
        for epoch in (1, 9, 10, 10**10, 10**11)
        for number in (0, 999_999, 1_000_000)
    ]
    shuffled = [name.path for name in names]
    Random(1).shuffle(shuffled)
    assert segments_in(shuffled) == names


def test_a_segment_is_named_by_writer_place_and_opening_time(
    storage: FaultyStorage, open_writer: Callable[..., WriteAheadLogWriter], clock: ManualClock
) -> None:
    writer = open_writer(7, segment_bytes=1)
    paths = []
    for at in range(3):
        clock.advance(1)
        batch, ranges = make_block([b"x"], from_offset=at)
        # The times of the records in it have no part in the name.
        paths.append(writer.write(batch, ranges, cut_time_ms=5, last_accepted_sequence=None).handle.segment)
    names = [SegmentName.parse(path) for path in paths]
    assert names == [SegmentName("kafka", 0, 7, at, 1_700_000_000_001 + at) for at in range(3)]
    assert storage.paths() == paths
