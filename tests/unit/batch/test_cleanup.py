"""What no batch needs any more goes, and nothing else."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from headrace.batch.allocation import allocate, make_manifest
from headrace.batch.checkpoint import write_checkpoint
from headrace.batch.cleanup import EVENTS_KEPT_MS, PARTIAL_WRITE_SECONDS, clean_up
from headrace.batch.manifest import Manifest
from headrace.ledger import EventKind
from headrace.ledger.cleanup import Cleanup
from headrace.ledger.receiving_tables import SegmentRow
from headrace.wal.errors import StorageError
from headrace.wal.local_storage import LocalStorage

from .conftest import START_MS, T1, T2, Receiving, take


def test_the_log_goes_when_every_batch_in_the_segment_is_done_with(receiving: Receiving) -> None:
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


def test_what_a_crashed_allocation_left_goes_when_its_batch_is_cleaned(receiving: Receiving) -> None:
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


def test_what_killed_writers_left_incomplete_goes_after_a_day_once_an_hour(receiving: Receiving) -> None:
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


def test_a_segment_that_cannot_be_deleted_goes_with_the_next_cleanup(
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
