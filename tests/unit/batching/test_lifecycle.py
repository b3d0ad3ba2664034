"""A batch from its allocation to its cleanup, with the log and the ledger that it has in earnest."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import insert

from headrace.batching.allocation import Allocation, allocate, draw_up
from headrace.batching.checkpoint import KEEP, CheckpointError, checkpoint_paths, read_newest
from headrace.batching.checkpointing import write_checkpoint
from headrace.batching.cleanup import EVENTS_KEPT_MS, clean_up
from headrace.batching.history import FILED, file_batches, history_numbers
from headrace.batching.kept_state import read_kept
from headrace.batching.manifest import Manifest, ManifestError
from headrace.ledger import BatchState, EventKind
from headrace.ledger.errors import BatchTimeError
from headrace.ledger.rows import Attempt
from headrace.ledger.tables import batches as batches_table
from headrace.wal.errors import StorageError
from headrace.wal.local_storage import LocalStorage
from headrace.wal.reader import read_block
from headrace.wal.storage import LogStorage, open_storage

from .conftest import START_MS, Receiving

T1 = START_MS + 10_000
T2 = START_MS + 20_000


def take(receiving: Receiving, batch_time_ms: int) -> Allocation:
    return allocate(receiving.stream, receiving.ledger, receiving.storage, batch_time_ms)


def offsets(receiving: Receiving, manifest: Manifest) -> list[int]:
    log = open_storage(manifest.log_root)
    return [
        offset
        for handle, _, _ in manifest.blocks("clicks")
        for offset in read_block(log, handle)[1].column("offset").to_pylist()
    ]


def test_a_batch_takes_exactly_its_times_blocks_and_keeps_them(receiving: Receiving) -> None:
    receiving.store(3)
    receiving.clock.advance(9_999)
    receiving.store(2)
    receiving.clock.advance(1)
    receiving.store(4)
    first = take(receiving, T1)
    assert (first.fresh, first.batch.records, first.batch.blocks) == (True, 5, 2)
    assert [(i.from_offset, i.until_offset) for i in first.inputs] == [(0, 5)]
    receiving.clock.advance(10_000)
    receiving.store(1)
    again = take(receiving, T1)
    assert not again.fresh
    assert again.batch == first.batch
    manifest = Manifest.load(first.batch.manifest_uri)
    assert offsets(receiving, manifest) == [0, 1, 2, 3, 4]
    assert offsets(receiving, Manifest.load(take(receiving, T2).batch.manifest_uri)) == [5, 6, 7, 8]


def test_a_late_block_goes_to_the_next_open_batch(receiving: Receiving) -> None:
    receiving.clock.advance(10_000)
    take(receiving, T1)
    late = receiving.store(1)
    assert late.batch_time_ms == T2


def test_allocation_does_not_depend_on_the_order_of_runs(receiving: Receiving) -> None:
    receiving.store(2)
    receiving.clock.advance(10_000)
    receiving.store(3)
    receiving.clock.advance(10_000)
    assert take(receiving, T2).batch.records == 3
    assert take(receiving, T1).batch.records == 2


def test_an_empty_batch_is_an_allocation(receiving: Receiving) -> None:
    receiving.clock.advance(10_000)
    empty = take(receiving, T1)
    assert (empty.batch.records, empty.inputs) == (0, ())
    assert Manifest.load(empty.batch.manifest_uri).blocks("clicks") == []


@pytest.mark.parametrize("time", [T1 + 1, START_MS + 60_000])
def test_what_is_no_batch_time_or_has_not_come_is_refused(receiving: Receiving, time: int) -> None:
    with pytest.raises(BatchTimeError):
        take(receiving, time)


def test_nothing_is_allocated_when_the_manifest_cannot_be_written(receiving: Receiving) -> None:
    receiving.store(3)
    receiving.clock.advance(10_000)
    folder = receiving.storage.below("shop")
    folder.write_atomically("manifests", b"a file where the folder should be")
    with pytest.raises((StorageError, OSError)):
        take(receiving, T1)
    assert receiving.ledger.batches.find("shop", T1) is None
    folder.delete("manifests")
    receiving.store(1)
    assert take(receiving, T1).batch.records == 3


def test_a_crash_between_seal_and_allocation_loses_nothing(receiving: Receiving) -> None:
    receiving.store(3)
    receiving.clock.advance(10_000)
    receiving.ledger.batches.seal("shop", T1)
    receiving.store(1)
    assert take(receiving, T1).batch.records == 3


def test_an_allocator_that_was_overtaken_leaves_the_manifest(receiving: Receiving) -> None:
    receiving.store(3)
    receiving.clock.advance(10_000)
    first = take(receiving, T1)
    # It had looked for the batch before the other allocated it, and reads the blocks after they were folded.
    find = receiving.ledger.batches.find
    answers = iter([None])
    receiving.ledger.batches.find = lambda *key: next(answers, find(*key))  # type: ignore[method-assign]
    receiving.ledger.batches.blocks_of = lambda *_, **__: []  # type: ignore[method-assign]
    assert take(receiving, T1).batch == first.batch
    manifest = Manifest.load(first.batch.manifest_uri, sha256=first.batch.manifest_sha256)
    assert offsets(receiving, manifest) == [0, 1, 2]


def test_what_a_crashed_allocation_left_is_replaced(receiving: Receiving) -> None:
    receiving.clock.advance(10_000)
    draw_up(receiving.stream.model_copy(update={"inputs": ()}), T1, []).write(
        receiving.storage.below("shop"), replace=False
    )
    batch = take(receiving, T1).batch
    assert "clicks" in Manifest.load(batch.manifest_uri, sha256=batch.manifest_sha256).inputs


@pytest.mark.parametrize("harm", ["missing", "damaged"])
def test_a_manifest_that_was_lost_is_written_again_as_it_was(receiving: Receiving, harm: str) -> None:
    receiving.store(3)
    receiving.clock.advance(10_000)
    batch = take(receiving, T1).batch
    folder, path = receiving.storage.below("shop"), f"manifests/{T1}.json"
    whole = folder.read(path)

    def break_it() -> None:
        if harm == "missing":
            folder.delete(path)
        else:
            folder.write_atomically(path, whole[:-5])
        with pytest.raises(ManifestError) as refused:
            Manifest.load(batch.manifest_uri, sha256=batch.manifest_sha256)
        assert "allocate_blocks" in str(refused.value.remedy)

    break_it()
    take(receiving, T1)
    assert folder.read(path) == whole
    # Only the same: not what is drawn up after its blocks' rows have gone.
    break_it()
    receiving.ledger.batches.blocks_of = lambda *_, **__: []  # type: ignore[method-assign]
    assert take(receiving, T1).batch == batch
    assert not folder.exists(path) or folder.read(path) == whole[:-5]


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
        done = clean_up(receiving.stream, receiving.ledger, receiving.storage)
        return done.segments, done.blocks, done.batches

    assert clean() == (0, 0, 0)
    receiving.complete(T1)
    write_checkpoint(receiving.stream, receiving.ledger, receiving.storage, T1)
    assert clean() == (0, 0, 0), "the second batch needs the segment still"
    receiving.complete(T2)
    assert clean() == (0, 0, 0), "the second batch is not checkpointed"
    write_checkpoint(receiving.stream, receiving.ledger, receiving.storage, T2)
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
    write_checkpoint(receiving.stream, receiving.ledger, receiving.storage, T1)
    receiving.new_segment()
    receiving.clock.advance(10_000)
    assert clean_up(receiving.stream, receiving.ledger, receiving.storage).segments == 0
    receiving.clock.advance(1)
    assert clean_up(receiving.stream, receiving.ledger, receiving.storage).segments == 1


def test_a_failed_batch_is_not_checkpointed_and_the_others_are(receiving: Receiving) -> None:
    receiving.store(3)
    receiving.clock.advance(20_000)
    take(receiving, T1)
    take(receiving, T2)
    attempt = receiving.ledger.batches.begin_attempt("shop", T1, holder="test", way="connect", lease_ms=60_000)
    receiving.ledger.batches.fail_attempt(attempt, "Elasticsearch was away")
    receiving.complete(T2)
    write_checkpoint(receiving.stream, receiving.ledger, receiving.storage, T1)
    assert receiving.ledger.batches.get("shop", T1).checkpointed_at_ms is None
    assert receiving.ledger.batches.get("shop", T2).checkpointed_at_ms is not None


def test_a_checkpoint_is_due_at_multiples_of_its_interval(receiving: Receiving) -> None:
    stream = receiving.stream.model_copy(update={"checkpoint_interval": receiving.stream.batch_interval * 2})
    receiving.clock.advance(30_000)
    times = [START_MS + 10_000, START_MS + 20_000, START_MS + 30_000]
    written = [write_checkpoint(stream, receiving.ledger, receiving.storage, time) for time in times]
    assert [checkpoint is not None for checkpoint in written] == [time % 20_000 == 0 for time in times]


def test_ten_checkpoints_stay_and_a_damaged_one_is_passed_over(receiving: Receiving) -> None:
    folder = receiving.storage.below("shop")
    with pytest.raises(CheckpointError, match="no checkpoint"):
        read_newest(folder)
    receiving.store(3)
    for step in range(1, KEEP + 4):
        receiving.clock.advance(10_000)
        write_checkpoint(receiving.stream, receiving.ledger, receiving.storage, START_MS + step * 10_000)
    paths = checkpoint_paths(folder)
    assert len(paths) == KEEP
    newest = read_newest(folder)
    assert newest.path == paths[-1]
    (position,) = newest.state["positions"]
    assert position["next_offset"] == 3
    whole = folder.read(paths[-1])
    folder.write_atomically(paths[-1], whole[: len(whole) // 2])
    assert read_newest(folder).path == paths[-2]


def test_a_checkpoint_is_tried_three_times(receiving: Receiving) -> None:
    class Failing:
        def __init__(self, storage: LogStorage, failures: int) -> None:
            self._storage = storage
            self.failures = failures

        def below(self, path: str) -> Failing:
            self._storage = self._storage.below(path)
            return self

        def write_atomically(self, path: str, data: bytes, *, exclusive: bool = False) -> None:
            self.failures -= 1
            if self.failures >= 0:
                raise StorageError("the store is away")
            self._storage.write_atomically(path, data, exclusive=exclusive)

        def __getattr__(self, name: str) -> object:
            return getattr(self._storage, name)

    receiving.clock.advance(10_000)
    assert write_checkpoint(receiving.stream, receiving.ledger, Failing(receiving.storage, 2), T1)  # type: ignore[arg-type]
    with pytest.raises(StorageError):
        write_checkpoint(receiving.stream, receiving.ledger, Failing(receiving.storage, 3), T1)  # type: ignore[arg-type]


def insert_batches(receiving: Receiving, times: list[int], **fields: Any) -> None:
    row: dict[str, Any] = {"stream": "shop", "interval_ms": 10_000, "state": "completed", "revision": 1, "blocks": 1}
    row |= {"records": 1, "payload_bytes": 1, "late_records": 0, "built": False, "absorbed": [], "attempt": 0}
    row |= {"manifest_uri": "m", "manifest_sha256": "0", "allocated_at_ms": 1, **fields}
    with receiving.ledger.batches._database.write() as connection:
        connection.execute(insert(batches_table), [{**row, "batch_time_ms": time_ms} for time_ms in times])


def test_every_batch_that_is_not_over_is_in_the_checkpoint_however_many(
    receiving: Receiving, caplog: pytest.LogCaptureFixture
) -> None:
    count = 10_050
    times = [START_MS + number * 10_000 for number in range(1, count)]
    insert_batches(receiving, times, state="failed", error="boom")
    newest = START_MS + count * 10_000
    receiving.clock.advance(count * 10_000)
    take(receiving, newest)
    receiving.complete(newest)
    checkpoint = write_checkpoint(receiving.stream, receiving.ledger, receiving.storage, newest)
    assert checkpoint is not None
    assert [batch["batch_time_ms"] for batch in checkpoint.state["batches"]] == [*times, newest]
    assert receiving.ledger.batches.get("shop", newest).checkpointed_at_ms is not None
    assert "10050 batches are not over" in caplog.text


def test_a_checkpoint_does_not_grow_with_what_is_over(receiving: Receiving) -> None:
    folder, count = receiving.storage.below("shop"), 3 * FILED + 20
    times = [START_MS + number * 10_000 for number in range(1, count)]
    insert_batches(receiving, times, checkpointed_at_ms=1, checkpoint_uri="c")
    newest = START_MS + count * 10_000
    receiving.clock.advance(count * 10_000)
    take(receiving, newest)
    receiving.complete(newest)

    def checkpointed() -> list[int]:
        receiving.clock.advance(1)
        checkpoint = write_checkpoint(receiving.stream, receiving.ledger, receiving.storage, newest)
        assert checkpoint is not None
        assert checkpoint.state["history"]["files"] == len(history_numbers(folder))
        return [batch["batch_time_ms"] for batch in checkpoint.state["batches"]]

    # What is over went into files, oldest first; what is left is too little for one.
    assert checkpointed() == [*times[-19:], newest]
    assert len(history_numbers(folder)) == 3
    assert read_newest(folder).state["history"]["files"] == 3
    assert sorted(read_kept(folder).batches) == [*times, newest]
    # One that changes is in checkpoints again, and what they say of it counts.
    attempt = receiving.ledger.batches.begin_attempt(
        "shop", times[0], holder="again", way="connect", lease_ms=60_000, force=True
    )
    receiving.ledger.batches.fail_attempt(attempt, "boom")
    assert checkpointed() == [times[0], *times[-19:], newest]
    assert read_kept(folder).batches[times[0]].row.state is BatchState.FAILED
    assert read_kept(folder).batches[times[1]].row.state is BatchState.COMPLETED


def test_what_changes_while_it_is_filed_stays_in_the_checkpoints(receiving: Receiving) -> None:
    times = [START_MS + number * 10_000 for number in range(1, FILED + 1)]
    insert_batches(receiving, times, checkpointed_at_ms=1, checkpoint_uri="c")
    history = receiving.ledger.history
    begun = history.begin_filing("shop", FILED)
    assert begun is not None
    attempt = receiving.ledger.batches.begin_attempt(
        "shop", times[7], holder="again", way="connect", lease_ms=60_000, force=True
    )
    assert attempt.outputs
    history.end_filing("shop", begun[0])
    assert [batch.batch_time_ms for batch in history.unfiled("shop")] == [times[7]]


def test_a_checkpoint_tells_what_each_output_recorded(receiving: Receiving) -> None:
    steps: dict[str, Any] = {"batch_interval_ms": 10_000, "block_interval_ms": 200, "outputs": ("console", "files")}
    receiving.ledger.streams.register("shop", receiving.stream.to_json(), **steps)
    receiving.clock.advance(10_000)
    take(receiving, T1)
    batches = receiving.ledger.batches
    attempt = batches.begin_attempt("shop", T1, holder="test", way="connect", lease_ms=60_000)
    batches.record_output(attempt, "console", {"printed": 1})
    batches.fail_attempt(attempt, "disk full")
    receiving.ledger.runs.assign("shop", "manual", coalesces=False)
    checkpoint = write_checkpoint(receiving.stream, receiving.ledger, receiving.storage, T1)
    assert checkpoint is not None
    (batch,) = checkpoint.state["batches"]
    assert (batch["outputs"], batch["late_records"], batch["built"]) == ({"console": {"printed": 1}}, 0, False)
    (position,) = checkpoint.state["positions"]
    assert (position["watermark_ms"], position["starting_offset"]) == (0, 0)
    assert checkpoint.state["stream"]["zero_time_ms"] == START_MS
    assert checkpoint.state["runs"] == {"manual": T1}


def test_a_batch_that_is_run_again_meanwhile_waits_for_the_next_checkpoint_and_cleanup(
    receiving: Receiving, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches, cleanup = receiving.ledger.batches, receiving.ledger.cleanup
    run: dict[str, Any] = {"holder": "again", "way": "connect", "lease_ms": 60_000, "force": True}

    def end(attempt: Attempt) -> None:
        batches.record_output(attempt, "console", {})
        batches.complete_attempt(attempt)

    begun: list[Attempt] = []
    receiving.clock.advance(20_000)
    for time_ms in (T1, T2):
        take(receiving, time_ms)
        receiving.complete(time_ms)

    def begin_after(read: Any) -> Any:
        def then_begin(*key: Any, **options: Any) -> Any:
            answer = read(*key, **options)
            if not begun:
                begun.append(batches.begin_attempt("shop", T1, **run))
            return answer

        return then_begin

    with monkeypatch.context() as patch:
        patch.setattr(batches, "recorded", begin_after(batches.recorded))
        assert write_checkpoint(receiving.stream, receiving.ledger, receiving.storage, T1)
    assert [batches.get("shop", time_ms).checkpointed_at_ms is None for time_ms in (T1, T2)] == [True, False]
    end(begun.pop())
    write_checkpoint(receiving.stream, receiving.ledger, receiving.storage, T1)
    receiving.clock.advance(60_000)
    with monkeypatch.context() as patch:
        patch.setattr(cleanup, "cleanable_batches", begin_after(cleanup.cleanable_batches))
        assert clean_up(receiving.stream, receiving.ledger, receiving.storage).batches == 1
    end(begun.pop())
    write_checkpoint(receiving.stream, receiving.ledger, receiving.storage, T1)
    assert clean_up(receiving.stream, receiving.ledger, receiving.storage).batches == 1


def test_events_go_after_a_week(receiving: Receiving) -> None:
    events = receiving.ledger.events
    before = events.list("shop")
    assert before
    receiving.clock.advance(EVENTS_KEPT_MS)
    events.append("shop", EventKind.COMMIT_FAILED)
    assert clean_up(receiving.stream, receiving.ledger, receiving.storage).events == 0
    receiving.clock.advance(1)
    assert clean_up(receiving.stream, receiving.ledger, receiving.storage).events == len(before)
    assert [event.kind for event in events.list("shop")] == [EventKind.COMMIT_FAILED]


def test_what_a_crashed_allocation_left_goes_when_its_batch_is_cleaned(receiving: Receiving) -> None:
    receiving.clock.advance(10_000)
    folder = receiving.storage.below("shop")
    left = draw_up(receiving.stream.model_copy(update={"inputs": ()}), T1, [])
    left.write(folder)
    batch = take(receiving, T1).batch
    # The allocator deletes it, if it does not die before.
    left.write(folder)
    receiving.complete(T1)
    write_checkpoint(receiving.stream, receiving.ledger, receiving.storage, T1)
    assert len(folder.list("manifests")) == 2
    receiving.clock.advance(60_000)
    done = clean_up(receiving.stream, receiving.ledger, receiving.storage)
    assert (done.batches, done.leftovers) == (1, 1)
    Manifest.load(batch.manifest_uri, sha256=batch.manifest_sha256)


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
    assert clean_up(receiving.stream, receiving.ledger, receiving.storage).segments == 0
    # Those in the middle first: what is before and behind them stays.
    for time_ms in [*times[5:8], *times[:5], *times[8:]]:
        take(receiving, time_ms)
        assert clean_up(receiving.stream, receiving.ledger, receiving.storage).segments == 0
        receiving.complete(time_ms)
        assert clean_up(receiving.stream, receiving.ledger, receiving.storage).segments == 0
        write_checkpoint(receiving.stream, receiving.ledger, receiving.storage, time_ms)
        assert clean_up(receiving.stream, receiving.ledger, receiving.storage).segments == 1
        manifest = Manifest.load(receiving.ledger.batches.get("shop", time_ms).manifest_uri)
        assert [(r.from_offset, r.until_offset) for r in manifest.ranges("clicks")] == [
            (times.index(time_ms) * 2, times.index(time_ms) * 2 + 2)
        ]
    assert len(kept) == 12
    assert receiving.segments() == []


def test_of_two_checkpoints_after_one_batch_the_later_counts(receiving: Receiving) -> None:
    receiving.clock.advance(10_000)
    take(receiving, T1)
    folder = receiving.storage.below("shop")
    first = write_checkpoint(receiving.stream, receiving.ledger, receiving.storage, T1)
    receiving.complete(T1)
    receiving.clock.advance(1)
    second = write_checkpoint(receiving.stream, receiving.ledger, receiving.storage, T1)
    assert first is not None
    assert second is not None
    assert checkpoint_paths(folder) == [first.path, second.path]
    # One that was late, with an older state, does not take its place.
    first.write(folder)
    assert read_newest(folder).path == second.path
    assert read_kept(folder).batches[T1].row.state is BatchState.COMPLETED


@pytest.mark.parametrize("name", ["notes.json", "1700000010000-1700000010000.json.tmp", "17-x.json", "temp/1.json"])
def test_other_files_among_the_checkpoints_are_passed_over_and_stay(receiving: Receiving, name: str) -> None:
    folder = receiving.storage.below("shop")
    folder.write_atomically(f"checkpoints/{name}", b"anything")
    for step in range(1, KEEP + 3):
        receiving.clock.advance(10_000)
        written = write_checkpoint(receiving.stream, receiving.ledger, receiving.storage, START_MS + step * 10_000)
    assert written is not None
    assert read_newest(folder).path == written.path
    assert len(checkpoint_paths(folder)) == KEEP
    assert folder.exists(f"checkpoints/{name}")


def test_a_checkpoint_holds_no_address_of_a_process(receiving: Receiving) -> None:
    """A job's ports are its own: the next one, after a rebuild too, has others."""
    receiving.ledger.jobs.renew(receiving.job, attributes={"ui_url": "http://driver:4040", "connect_port": 15002})
    receiving.ledger.receivers.heartbeat(receiving.lease, sealed_through_ms=0, stats={"block_manager": "host:7077"})
    receiving.clock.advance(10_000)
    written = write_checkpoint(receiving.stream, receiving.ledger, receiving.storage, T1)
    assert written is not None
    text = receiving.storage.below("shop").read(written.path)
    assert [word for word in (b"4040", b"15002", b"7077", b'"here"') if word in text] == []


def test_a_segment_that_cannot_be_deleted_goes_with_the_next_cleanup(
    receiving: Receiving, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        receiving.store(2)
        receiving.new_segment()
    receiving.clock.advance(10_000)
    take(receiving, T1)
    receiving.complete(T1)
    write_checkpoint(receiving.stream, receiving.ledger, receiving.storage, T1)
    receiving.clock.advance(60_000)
    _, second, third = receiving.segments()
    delete = LocalStorage.delete

    def refuse(storage: LocalStorage, path: str) -> bool:
        if second.endswith(path):
            raise StorageError("the disk says no")
        return delete(storage, path)

    with monkeypatch.context() as patch, pytest.raises(StorageError):
        patch.setattr(LocalStorage, "delete", refuse)
        clean_up(receiving.stream, receiving.ledger, receiving.storage)
    assert receiving.segments() == [second, third]
    done = clean_up(receiving.stream, receiving.ledger, receiving.storage)
    assert (done.segments, done.blocks, receiving.segments()) == (2, 2, [])


def test_what_was_filed_since_the_newest_checkpoint_counts(
    receiving: Receiving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash between the two: the file knows of a replay, and the checkpoint does not yet."""
    monkeypatch.setattr("headrace.batching.history.FILED", 1)
    receiving.clock.advance(10_000)
    take(receiving, T1)
    receiving.complete(T1)
    folder, batches = receiving.storage.below("shop"), receiving.ledger.batches
    write_checkpoint(receiving.stream, receiving.ledger, receiving.storage, T1)
    receiving.clock.advance(1)
    run: dict[str, Any] = {"holder": "test", "way": "connect", "lease_ms": 60_000}
    attempt = batches.begin_replay("shop", T1, target="march", definition="{}", outputs=["again"], **run)
    batches.record_output(attempt, "again", {"n": 1})
    batches.complete_attempt(attempt)
    assert file_batches("shop", receiving.ledger, folder) == 1
    (replay,) = read_kept(folder).batches[T1].replays
    assert (replay.target, replay.state, replay.recorded) == ("march", BatchState.COMPLETED, {"again": {"n": 1}})
