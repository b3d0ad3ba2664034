"""What cleanup does with files of the log that the ledger does not know."""

from __future__ import annotations

import pytest
from tests.support.records import make_block

from headrace.batch.allocation import allocate
from headrace.batch.checkpoint import write_checkpoint
from headrace.batch.cleanup import clean_up
from headrace.ledger import ReceiverState
from headrace.wal.errors import WriteFailedError
from headrace.wal.recovery import scan_log

from .conftest import START_MS, Receiving


def write(receiving: Receiving, accepted: int | None = None) -> str:
    """A block that the ledger never hears of; its segment."""
    batch, ranges = make_block([b"value"], from_offset=0)
    frame = receiving.writer.write(batch, ranges, cut_time_ms=0, last_accepted_sequence=accepted)
    return frame.handle.segment


def fail(receiving: Receiving, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes to a full disk: the file is there, and nothing in it."""

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch, pytest.raises(WriteFailedError):
        patch.setattr("headrace.wal.local_storage._write_all", full)
        # Killed before it could take the file away.
        patch.setattr("headrace.wal.local_storage.LocalSegmentFile._give_back", lambda _: None)
        write(receiving)


def sweep(receiving: Receiving) -> int:
    return clean_up(receiving.context).leftovers


def test_what_a_full_disk_left_goes_when_its_writer_is_fenced(
    receiving: Receiving, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        fail(receiving, monkeypatch)
    assert len(receiving.segments()) == 3
    assert sweep(receiving) == 0, "its writer lives"
    receiving.new_segment()
    receiving.store(2)
    assert sweep(receiving) == 3
    (left,) = receiving.segments()
    receiving.writer.close()
    log = receiving.storage.below("shop/log")
    assert [f"shop/log/{frame.handle.segment}" for frame in scan_log(log)] == [left]
    assert sweep(receiving) == 0


def test_a_writer_that_has_ended_is_fenced_too(receiving: Receiving, monkeypatch: pytest.MonkeyPatch) -> None:
    fail(receiving, monkeypatch)
    receiving.ledger.receivers.release(receiving.lease, ReceiverState.FAILED, "no space left")
    assert sweep(receiving) == 1


def test_a_block_that_was_refused_goes_with_its_file(receiving: Receiving) -> None:
    write(receiving)
    receiving.new_segment()
    assert sweep(receiving) == 1


def test_what_the_ledger_knows_stays_and_so_does_what_is_behind_it(
    receiving: Receiving, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiving.store(1)
    receiving.new_segment()
    fail(receiving, monkeypatch)
    receiving.new_segment()
    receiving.store(1)
    before = receiving.segments()
    assert sweep(receiving) == 0
    assert receiving.segments() == before
    # Once what is before it has gone the usual way.
    receiving.clock.advance(10_000)
    allocate(receiving.context, START_MS + 10_000)
    receiving.complete(START_MS + 10_000)
    write_checkpoint(receiving.context, START_MS + 10_000)
    receiving.clock.advance(60_000)
    done = clean_up(receiving.context)
    assert (done.segments, done.leftovers) == (1, 1)
    assert receiving.segments() == before[2:]


@pytest.mark.parametrize("reported_by", ["the next frame", "the end", "the next segment"])
def test_the_log_of_a_ledger_that_was_lost_is_not_touched(receiving: Receiving, reported_by: str) -> None:
    """Its files are of stale epochs, and the ledger knows none of them: it is rebuilt from them."""
    receiving.writer._segment_bytes = 1 if reported_by == "the next segment" else 1 << 20
    write(receiving)
    if reported_by == "the end":
        receiving.writer.close(0)
    else:
        write(receiving, accepted=0)
    for _ in range(3):
        receiving.new_segment()
        before = receiving.segments()
        assert sweep(receiving) == 0
        assert receiving.segments() == before


def test_damage_is_left_for_a_person(receiving: Receiving) -> None:
    segment = f"shop/log/{write(receiving)}"
    write(receiving, accepted=None)
    whole = bytearray(receiving.storage.read(segment))
    whole[len(whole) // 3] ^= 1
    receiving.storage.write_atomically(segment, bytes(whole))
    receiving.new_segment()
    assert sweep(receiving) == 0
