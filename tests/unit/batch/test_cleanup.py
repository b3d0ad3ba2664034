"""Cleanup deletes what no batch needs any more, files that the ledger does not know among it, and nothing else."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from tests.support.records import make_block

from headrace.batch.allocation import allocate, make_manifest
from headrace.batch.checkpoint import write_checkpoint
from headrace.batch.cleanup import EVENTS_KEPT_MS, PARTIAL_WRITE_SECONDS, clean_up
from headrace.batch.manifest import Manifest
from headrace.ledger import EventKind, ReceiverState
from headrace.ledger.receiving.cleanup import Cleanup
from headrace.ledger.receiving.tables import SegmentRow
from headrace.wal.errors import StorageError, WriteFailedError
from headrace.wal.recovery import scan_log
from headrace.wal.storage import LocalStorage

from .conftest import START_MS, T1, T2, Receiving, take


def test_a_segment_goes_when_all_of_its_batches_are_done_with(receiving: Receiving) -> None:
    receiving.store(3)
    receiving.clock.advance(10_000)
    receiving.store(2)
    receiving.new_segment()
    receiving.clock.advance(10_000)
    receiving.store(1)
    take(receiving, T1)
    take(receiving, T2)
    receiving.clock.advance(60_000)

    def clean() -> tuple[int, int, int]:
        done = clean_up(receiving.context)
        return done.segments, done.blocks, done.batches

    assert clean() == (0, 0, 0)
    receiving.complete(T1)
    write_checkpoint(receiving.context, T1)
    assert clean() == (0, 0, 0), "the second batch needs the segment still"
    receiving.complete(T2)
    assert clean() == (0, 0, 0), "the second batch is not checkpointed"
    write_checkpoint(receiving.context, T2)
    before = receiving.segments()
    assert clean() == (1, 2, 2)
    assert len(receiving.segments()) == len(before) - 1 == 1
    assert receiving.ledger.batches.get("shop", T1).cleaned_at_ms is not None
    assert clean() == (0, 0, 0)


def test_a_batch_within_the_remember_window_keeps_its_log(receiving: Receiving) -> None:
    receiving.store(3)
    receiving.clock.advance(10_000)
    take(receiving, T1)
    receiving.complete(T1)
    write_checkpoint(receiving.context, T1)
    receiving.new_segment()
    receiving.clock.advance(10_000)
    assert clean_up(receiving.context).segments == 0
    receiving.clock.advance(1)
    assert clean_up(receiving.context).segments == 1


def test_events_go_after_a_week(receiving: Receiving) -> None:
    events = receiving.ledger.events
    before = events.page("shop")
    assert before
    receiving.clock.advance(EVENTS_KEPT_MS)
    events.append("shop", EventKind.COMMIT_FAILED)
    assert clean_up(receiving.context).events == 0
    receiving.clock.advance(1)
    assert clean_up(receiving.context).events == len(before)
    assert [event.kind for event in events.page("shop")] == [EventKind.COMMIT_FAILED]


def test_files_of_a_crashed_allocation_go_when_its_batch_does(receiving: Receiving) -> None:
    receiving.clock.advance(10_000)
    folder = receiving.storage.below("shop")
    left = make_manifest(receiving.stream.model_copy(update={"inputs": ()}), T1, [])
    left.write(folder)
    batch = take(receiving, T1).batch
    # The allocator deletes it, if it does not die before.
    left.write(folder)
    receiving.complete(T1)
    write_checkpoint(receiving.context, T1)
    assert len(folder.paths("manifests")) == 2
    receiving.clock.advance(60_000)
    done = clean_up(receiving.context)
    assert (done.batches, done.leftovers) == (1, 1)
    Manifest.load(batch.manifest_uri, sha256=batch.manifest_sha256)


def test_files_that_killed_writers_left_go_after_a_day(receiving: Receiving) -> None:
    """They are looked for once an hour."""
    folder = receiving.storage.below("shop")
    manifests = Path(receiving.stream.storage.url.removeprefix("file://"), "shop", "manifests")

    def leave(name: str, age_seconds: float) -> Path:
        manifests.mkdir(exist_ok=True)
        file = manifests / name
        file.write_bytes(b"half")
        os.utime(file, (time.time() - age_seconds,) * 2)
        return file

    def clean() -> int:
        return clean_up(receiving.context).partial_writes

    receiving.clock.advance(10_000)
    take(receiving, T1)
    dead = leave(".batch.json.0123456789abcdef.tmp", PARTIAL_WRITE_SECONDS + 60)
    others = [
        leave(".batch.json.fedcba9876543210.tmp", PARTIAL_WRITE_SECONDS - 60),
        leave(".of-somebody-else.tmp", PARTIAL_WRITE_SECONDS + 60),
        leave("other.json", PARTIAL_WRITE_SECONDS + 60),
    ]
    assert clean() == 1
    assert not dead.exists()
    assert all(other.exists() for other in others)
    assert folder.paths("manifests")
    receiving.clock.advance(10_000)
    take(receiving, T2)
    leave(dead.name, PARTIAL_WRITE_SECONDS + 60)
    assert clean() == 0, "the folder was walked for a batch of the same hour"
    # A batch that took over the time before it begins the hour as well.
    receiving.clock.advance(3_599_000)
    early = receiving.store(1).batch_time_ms
    receiving.clock.advance(10_000)
    allocate(receiving.context, early + 10_000, takes_over=True)
    assert [batch.batch_time_ms for batch in receiving.ledger.batches.page("shop", 2)] == [early + 10_000, early]
    assert clean() == 1


def test_a_running_batch_keeps_its_log_while_later_ones_are_done(receiving: Receiving) -> None:
    """However long it runs, and also if its process has died."""
    for time_ms in (T1, T2):
        receiving.store(1)
        receiving.clock.advance(10_000)
        receiving.new_segment()
        take(receiving, time_ms)
    segments = receiving.segments()
    receiving.complete(T2)
    receiving.ledger.attempts.begin("shop", T1, holder="test", way="connect", lease_ms=3_600_000)
    write_checkpoint(receiving.context, T2)
    receiving.clock.advance(60_000)
    assert clean_up(receiving.context).segments == 1
    assert receiving.segments() == segments[:1]
    receiving.clock.advance(3_600_000)
    assert clean_up(receiving.context).segments == 0
    assert receiving.segments() == segments[:1]


def test_a_backlog_keeps_its_log_until_it_is_caught_up(receiving: Receiving) -> None:
    """However far batches fall behind, nothing that they need goes; when they are done, all of it does."""
    times = []
    for number in range(12):
        receiving.store(2)
        receiving.clock.advance(10_000)
        times.append(START_MS + (number + 1) * 10_000)
        receiving.new_segment()
    receiving.clock.advance(30 * 24 * 3_600_000)
    kept = receiving.segments()
    assert clean_up(receiving.context).segments == 0
    # Those in the middle first: what is before and behind them stays.
    for time_ms in [*times[5:8], *times[:5], *times[8:]]:
        take(receiving, time_ms)
        assert clean_up(receiving.context).segments == 0
        receiving.complete(time_ms)
        assert clean_up(receiving.context).segments == 0
        write_checkpoint(receiving.context, time_ms)
        assert clean_up(receiving.context).segments == 1
        manifest = Manifest.load(receiving.ledger.batches.get("shop", time_ms).manifest_uri)
        assert [(r.from_offset, r.until_offset) for r in manifest.ranges("clicks")] == [
            (times.index(time_ms) * 2, times.index(time_ms) * 2 + 2)
        ]
    assert len(kept) == 12
    assert receiving.segments() == []


def test_a_segment_that_cannot_be_deleted_goes_the_next_time(
    receiving: Receiving, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        receiving.store(2)
        receiving.new_segment()
    receiving.clock.advance(10_000)
    take(receiving, T1)
    receiving.complete(T1)
    write_checkpoint(receiving.context, T1)
    receiving.clock.advance(60_000)
    _, second, third = receiving.segments()
    delete = LocalStorage.delete

    def refuse(storage: LocalStorage, path: str) -> bool:
        if second.endswith(path):
            raise StorageError("the disk says no")
        return delete(storage, path)

    with monkeypatch.context() as patch, pytest.raises(StorageError):
        patch.setattr(LocalStorage, "delete", refuse)
        clean_up(receiving.context)
    assert receiving.segments() == [second, third]
    done = clean_up(receiving.context)
    assert (done.segments, done.blocks, receiving.segments()) == (2, 2, [])


def test_a_segment_that_an_attempt_begun_meanwhile_reads_stays(
    receiving: Receiving, monkeypatch: pytest.MonkeyPatch
) -> None:
    for batch_time_ms in (T1, T2):
        receiving.store(2)
        receiving.new_segment()
        receiving.clock.advance(10_000)
        take(receiving, batch_time_ms)
        receiving.complete(batch_time_ms)
        write_checkpoint(receiving.context, batch_time_ms)
    receiving.clock.advance(60_000)
    first, _ = receiving.segments()
    claim = Cleanup.claim_removal

    def begin_then_claim(cleanup: Cleanup, *args: Any, **options: Any) -> list[SegmentRow]:
        begun = {"holder": "again", "way": "connect", "lease_ms": 60_000}
        receiving.ledger.attempts.begin("shop", T1, force=True, **begun)
        return claim(cleanup, *args, **options)

    monkeypatch.setattr(Cleanup, "claim_removal", begin_then_claim)
    assert clean_up(receiving.context).segments == 1
    assert receiving.segments() == [first]


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
        patch.setattr("headrace.wal.storage._write_all", full)
        # Killed before it could take the file away.
        patch.setattr("headrace.wal.storage.LocalSegmentFile._give_back", lambda _: None)
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


def test_segments_the_ledger_knows_and_those_behind_them_stay(
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
