"""What a writer finds of those before it."""

from __future__ import annotations

import builtins
from collections.abc import Callable

import pytest

from headrace.blocks import ReceiverId
from headrace.clock import ManualClock
from headrace.testing.faulty_storage import FaultyStorage, WriteFault
from headrace.testing.records import make_block
from headrace.wal.errors import WriteFailedError
from headrace.wal.writer import WriteAheadLogWriter, WrittenFrame

OpenWriter = Callable[..., WriteAheadLogWriter]


def write(writer: WriteAheadLogWriter, at: int = 0) -> WrittenFrame:
    batch, ranges = make_block([b"value"], from_offset=at)
    return writer.write(batch, ranges, cut_time_ms=at, last_accepted_sequence=None)


class CleanedMeanwhile(FaultyStorage):
    """Between the listing and the reading cleanup takes a file."""

    victim = ""

    def below(self, path: str) -> CleanedMeanwhile:
        return self

    def list(self, prefix: str = "") -> builtins.list[str]:
        listed = super().list(prefix)
        self.delete(self.victim)
        return listed


@pytest.mark.parametrize("victim", [0, 1])
def test_cleanup_may_take_a_segment_while_it_is_looked_for(
    storage: FaultyStorage, open_writer: OpenWriter, receiver: ReceiverId, clock: ManualClock, victim: int
) -> None:
    segments = [write(open_writer(epoch)).handle.segment for epoch in (1, 2)]
    racing = CleanedMeanwhile(storage)
    racing.victim = segments[victim]
    successor = WriteAheadLogWriter(racing, "", receiver, 3, clock=clock)
    left = [previous.segment for previous in successor.inheritance.segments]
    assert left == ([segments[1]] if victim == 0 else [segments[0]])
    write(successor, 1)


def test_what_a_crash_left_is_told_with_its_place(storage: FaultyStorage, open_writer: OpenWriter) -> None:
    crashed = open_writer(1)
    segment = write(crashed).handle.segment
    whole = storage.size(segment)
    storage.write_faults.append(WriteFault(77))
    with pytest.raises(WriteFailedError):
        write(crashed, 1)
    (tail,) = open_writer(2).inheritance.torn_tails
    assert (tail.segment, tail.offset, tail.length) == (segment, whole, 77)


def test_damage_is_told(storage: FaultyStorage, open_writer: OpenWriter) -> None:
    crashed = open_writer(1)
    first, _ = write(crashed, 0), write(crashed, 1)
    storage.flip_bit(first.handle.segment, 8 * (first.handle.offset + first.handle.length - 1))
    (damage,) = open_writer(2).inheritance.damage
    assert (damage.segment, damage.offset) == (first.handle.segment, first.handle.offset)
