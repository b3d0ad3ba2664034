"""What checkpoints and results hold of a stream, and when they are written."""

from __future__ import annotations

from collections.abc import Collection
from datetime import timedelta
from typing import Any

import pytest

from headrace.batch.checkpoint import (
    KEEP,
    CheckpointError,
    CheckpointVersionError,
    checkpoint_paths,
    read_newest,
    write_checkpoint,
)
from headrace.batch.cleanup import clean_up
from headrace.batch.manifest import decode_document, encode_document
from headrace.batch.results import StoredResult, read_results, result_path, write_results
from headrace.ledger import BatchState
from headrace.ledger.batches.tables import Attempt, BatchRow
from headrace.ledger.errors import LedgerError
from headrace.wal.errors import StorageError
from headrace.wal.log_storage import LogStorage

from .conftest import START_MS, T1, T2, Receiving, take


def test_a_failed_batch_is_not_checkpointed_and_the_others_are(receiving: Receiving) -> None:
    receiving.store(3)
    receiving.clock.advance(20_000)
    take(receiving, T1)
    take(receiving, T2)
    attempt = receiving.ledger.attempts.begin("shop", T1, holder="test", way="connect", lease_ms=60_000)
    receiving.ledger.attempts.fail(attempt, "Elasticsearch was away")
    receiving.complete(T2)
    write_checkpoint(receiving.context, T1)
    assert receiving.ledger.batches.get("shop", T1).checkpointed_at_ms is None
    assert receiving.ledger.batches.get("shop", T2).checkpointed_at_ms is not None
    states = {time_ms: result.row.state for time_ms, result in results(receiving).items()}
    assert states == {T1: BatchState.FAILED, T2: BatchState.COMPLETED}


def results(receiving: Receiving) -> dict[int, StoredResult]:
    folder = receiving.storage.below("shop")
    found = read_results(folder, folder.paths("results"))
    assert found.damaged == {}
    return dict(found.by_time)


@pytest.mark.parametrize(
    ("seconds", "due"),
    [
        pytest.param([60, 70, 80, 110, 120, 130], [60, 120], id="at multiples of its interval"),
        pytest.param([50, 70, 90, 110, 130, 150], [50, 70, 130], id="in each interval, if no batch ends one"),
        pytest.param([10, 610, 620], [10, 610], id="at the first batch, and after a pause"),
        pytest.param([120, 130, 20, 30, 140], [120, 20, 140], id="when an old batch is run again"),
        pytest.param([60, 60], [60, 60], id="when the last batch is run again"),
    ],
)
def test_a_checkpoint_is_due(receiving: Receiving, seconds: list[int], due: list[int]) -> None:
    context = receiving.context_of(receiving.stream.model_copy(update={"checkpoint_interval": timedelta(minutes=1)}))
    minute_ms = START_MS - START_MS % 60_000
    receiving.clock.advance(3_600_000)
    written = [write_checkpoint(context, minute_ms + second * 1_000) for second in seconds]
    assert [second for second, checkpoint in zip(seconds, written, strict=True) if checkpoint is not None] == due


def test_two_checkpoints_stay_and_a_damaged_one_is_passed_over(receiving: Receiving) -> None:
    folder = receiving.storage.below("shop")
    with pytest.raises(CheckpointError, match="no checkpoint"):
        read_newest(folder)
    receiving.store(3)
    for step in range(1, KEEP + 4):
        receiving.clock.advance(10_000)
        write_checkpoint(receiving.context, START_MS + step * 10_000)
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

        def write_atomically(self, path: str, data: bytes, *, exclusive: bool = False) -> None:
            self.failures -= 1
            if self.failures >= 0:
                raise StorageError("the store is away")
            self._storage.write_atomically(path, data, exclusive=exclusive)

        def __getattr__(self, name: str) -> object:
            return getattr(self._storage, name)

    receiving.clock.advance(10_000)
    context = receiving.context
    folder = context.storage
    context.storage = Failing(folder, 2)  # type: ignore[assignment]
    assert write_checkpoint(context, T1)
    context.storage = Failing(folder, 3)  # type: ignore[assignment]
    with pytest.raises(StorageError):
        write_checkpoint(context, T1)


def test_a_checkpoint_does_not_grow_with_the_batches(receiving: Receiving) -> None:
    sizes = []
    for step in range(1, 31):
        time_ms = START_MS + step * 10_000
        receiving.store(1)
        receiving.clock.advance(10_000)
        take(receiving, time_ms)
        if step % 3:
            receiving.complete(time_ms)
        written = write_checkpoint(receiving.context, time_ms)
        assert written is not None
        sizes.append(receiving.storage.below("shop").size(written.path))
    assert max(sizes) - min(sizes) < 200


def test_a_changed_batch_has_a_new_result_in_place_of_the_old(receiving: Receiving) -> None:
    folder = receiving.storage.below("shop")
    receiving.clock.advance(10_000)
    take(receiving, T1)
    # Of a batch that was never run to an end, its manifest holds all.
    assert (write_results(receiving.context), folder.paths("results")) == (0, [])
    receiving.complete(T1)
    assert write_results(receiving.context) == 1
    done = receiving.ledger.batches.get("shop", T1)
    assert folder.paths("results") == [result_path(T1, done.change)]
    assert results(receiving)[T1].row == done
    assert write_results(receiving.context) == 0
    attempt = receiving.ledger.attempts.begin("shop", T1, holder="again", way="connect", lease_ms=60_000, force=True)
    assert write_results(receiving.context) == 1
    assert results(receiving)[T1].row.state is BatchState.RUNNING
    receiving.ledger.attempts.fail(attempt, "boom")
    assert write_results(receiving.context) == 1
    (path,) = folder.paths("results")
    assert results(receiving)[T1].row.state is BatchState.FAILED
    # A writer that was late leaves an older file, which does not count.
    folder.write_atomically(result_path(T1, done.change), folder.read(path))
    assert results(receiving)[T1].row.state is BatchState.FAILED


def test_a_damaged_result_falls_back_to_an_older_one(receiving: Receiving) -> None:
    receiving.clock.advance(10_000)
    take(receiving, T1)
    receiving.complete(T1)
    write_results(receiving.context)
    folder, change = receiving.storage.below("shop"), receiving.ledger.batches.get("shop", T1).change
    torn = result_path(T1, change + 1)
    folder.write_atomically(torn, folder.read(result_path(T1, change))[:50])
    found = read_results(folder, folder.paths("results"))
    assert (list(found.by_time), list(found.damaged)) == ([T1], [torn])


def test_the_results_of_many_batches_are_written(receiving: Receiving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.batch.results._AT_ONCE", 4)
    times, mark = completed(receiving, 11), receiving.ledger.batches.mark_checkpointed
    marked: list[int] = []

    def counted(stream: str, held: Collection[BatchRow]) -> None:
        marked.append(len(held))
        mark(stream, held)

    monkeypatch.setattr(receiving.ledger.batches, "mark_checkpointed", counted)
    assert write_results(receiving.context) == len(times)
    assert marked == [4, 4, 3]
    assert sorted(results(receiving)) == times
    assert behind(receiving) == []


def completed(receiving: Receiving, number: int) -> list[int]:
    """So many batches that have completed, and have no result yet."""
    times = [START_MS + step * 10_000 for step in range(1, number + 1)]
    receiving.clock.advance(10_000 * number)
    for time_ms in times:
        take(receiving, time_ms)
        receiving.complete(time_ms)
    return times


def behind(receiving: Receiving) -> list[int]:
    return [row.batch_time_ms for row in receiving.ledger.results.behind("shop")]


def test_a_batch_writes_its_own_result_and_the_oldest_other_ones(
    receiving: Receiving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.batch.results._OTHERS", 3)
    times = completed(receiving, 8)
    write_checkpoint(receiving.context, times[6])
    assert behind(receiving) == [*times[3:6], times[7]]
    # The next batches write what is left, also if they have nothing of their own to write.
    write_checkpoint(receiving.context, times[6])
    write_checkpoint(receiving.context, times[6])
    assert behind(receiving) == []
    assert sorted(results(receiving)) == times


def test_results_of_a_range_of_times_are_written(receiving: Receiving) -> None:
    times = completed(receiving, 5)
    assert write_results(receiving.context, after_ms=times[1], until_ms=times[3]) == 2
    assert behind(receiving) == [times[0], times[1], times[4]]


class FailingFolder:
    """A storage in which writes to paths with ``part`` in them fail."""

    def __init__(self, storage: LogStorage, part: str) -> None:
        self._storage, self._part = storage, part

    def write_atomically(self, path: str, data: bytes, *, exclusive: bool = False) -> None:
        if self._part in path:
            raise StorageError("the store is away")
        self._storage.write_atomically(path, data, exclusive=exclusive)

    def __getattr__(self, name: str) -> object:
        return getattr(self._storage, name)


def test_a_result_that_cannot_be_written_holds_up_no_other(receiving: Receiving) -> None:
    times, context = completed(receiving, 4), receiving.context
    folder = context.storage
    context.storage = FailingFolder(folder, str(times[1]))  # type: ignore[assignment]
    with pytest.raises(StorageError, match="away"):
        write_results(context)
    assert behind(receiving) == [times[1]]
    context.storage = folder
    assert write_results(context) == 1


def test_results_whose_marking_was_cut_off_are_written_again(
    receiving: Receiving, monkeypatch: pytest.MonkeyPatch
) -> None:
    times, folder = completed(receiving, 3), receiving.storage.below("shop")
    write_results(receiving.context)
    run: dict[str, Any] = {"holder": "again", "way": "connect", "lease_ms": 60_000, "force": True}
    for time_ms in times:
        receiving.ledger.attempts.fail(receiving.ledger.attempts.begin("shop", time_ms, **run), "boom")
    with monkeypatch.context() as patch, pytest.raises(LedgerError):
        patch.setattr(receiving.ledger.batches, "mark_checkpointed", raising(LedgerError("the ledger is away")))
        write_results(receiving.context)
    # The older files stay until the newer ones are marked.
    assert len(folder.paths("results")) == 6
    assert behind(receiving) == times
    assert write_results(receiving.context) == 3
    assert len(folder.paths("results")) == 3
    assert {result.row.state for result in results(receiving).values()} == {BatchState.FAILED}


def raising(error: Exception) -> Any:
    def refuse(*_: object, **__: object) -> None:
        raise error

    return refuse


def test_a_result_has_what_each_output_recorded(receiving: Receiving) -> None:
    steps: dict[str, Any] = {"batch_interval_ms": 10_000, "block_interval_ms": 200, "outputs": ("console", "files")}
    receiving.ledger.streams.register("shop", receiving.stream.to_json(), **steps)
    receiving.clock.advance(10_000)
    take(receiving, T1)
    attempt = receiving.ledger.attempts.begin("shop", T1, holder="test", way="connect", lease_ms=60_000)
    receiving.ledger.attempts.record_output(attempt, "console", {"printed": 1})
    receiving.ledger.attempts.fail(attempt, "disk full")
    receiving.ledger.runs.assign("shop", "manual")
    checkpoint = write_checkpoint(receiving.context, T1)
    assert checkpoint is not None
    result = results(receiving)[T1]
    assert result.outputs == {"console": {"printed": 1}}
    assert (result.row.state, result.row.error) == (BatchState.FAILED, "disk full")
    assert (result.revisions, result.runs) == ({"console": 2}, ("manual",))
    (position,) = checkpoint.state["positions"]
    assert (position["watermark_ms"], position["starting_offset"]) == (0, 0)
    assert checkpoint.state["stream"]["zero_time_ms"] == START_MS
    assert checkpoint.state["runs"] == {}


def test_a_batch_run_again_waits_for_the_next_checkpoint(receiving: Receiving, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cleanup waits for that checkpoint as well."""
    batches, cleanup = receiving.ledger.batches, receiving.ledger.cleanup
    run: dict[str, Any] = {"holder": "again", "way": "connect", "lease_ms": 60_000, "force": True}

    def end(attempt: Attempt) -> None:
        receiving.ledger.attempts.record_output(attempt, "console", {})
        receiving.ledger.attempts.complete(attempt)

    begun: list[Attempt] = []
    receiving.clock.advance(20_000)
    for time_ms in (T1, T2):
        take(receiving, time_ms)
        receiving.complete(time_ms)

    def begin_after(read: Any) -> Any:
        def then_begin(*key: Any, **options: Any) -> Any:
            answer = read(*key, **options)
            if not begun:
                begun.append(receiving.ledger.attempts.begin("shop", T1, **run))
            return answer

        return then_begin

    with monkeypatch.context() as patch:
        patch.setattr(receiving.ledger.attempts, "recorded", begin_after(receiving.ledger.attempts.recorded))
        assert write_checkpoint(receiving.context, T1)
    assert [batches.get("shop", time_ms).checkpointed_at_ms is None for time_ms in (T1, T2)] == [True, False]
    end(begun.pop())
    write_checkpoint(receiving.context, T1)
    receiving.clock.advance(60_000)
    with monkeypatch.context() as patch:
        patch.setattr(cleanup, "cleanable_batches", begin_after(cleanup.cleanable_batches))
        assert clean_up(receiving.context).batches == 1
    end(begun.pop())
    write_checkpoint(receiving.context, T1)
    assert clean_up(receiving.context).batches == 1


def test_of_two_checkpoints_in_a_millisecond_the_last_is_newest(receiving: Receiving) -> None:
    receiving.clock.advance(20_000)
    take(receiving, T2)
    write_checkpoint(receiving.context, T2)
    second = write_checkpoint(receiving.context, T1)
    assert second is not None
    assert read_newest(receiving.storage.below("shop")).path == second.path


def test_of_two_checkpoints_after_one_batch_the_later_counts(receiving: Receiving) -> None:
    receiving.clock.advance(10_000)
    take(receiving, T1)
    folder = receiving.storage.below("shop")
    first = write_checkpoint(receiving.context, T1)
    receiving.complete(T1)
    receiving.clock.advance(1)
    second = write_checkpoint(receiving.context, T1)
    assert first is not None
    assert second is not None
    assert checkpoint_paths(folder) == [first.path, second.path]
    # One that was late, with an older state, does not take its place.
    first.write(folder)
    assert read_newest(folder).path == second.path


@pytest.mark.parametrize("version", [2, 4, 0, None, "3"])
def test_a_checkpoint_of_another_version_is_refused_not_skipped(receiving: Receiving, version: object) -> None:
    folder = receiving.context.storage
    receiving.clock.advance(10_000)
    assert write_checkpoint(receiving.context, T1)
    receiving.clock.advance(1)
    newest = write_checkpoint(receiving.context, T1)
    assert newest is not None
    folder.write_atomically(
        newest.path, encode_document({**decode_document(folder.read(newest.path)), "version": version})
    )
    with pytest.raises(CheckpointVersionError, match=rf"is of version {version}, .*or a newer one"):
        read_newest(folder)


@pytest.mark.parametrize("name", ["notes.json", "1700000010000-1700000010000.json.tmp", "17-x.json", "temp/1.json"])
def test_other_files_among_the_checkpoints_are_skipped_and_stay(receiving: Receiving, name: str) -> None:
    folder = receiving.storage.below("shop")
    folder.write_atomically(f"checkpoints/{name}", b"anything")
    for step in range(1, KEEP + 3):
        receiving.clock.advance(10_000)
        written = write_checkpoint(receiving.context, START_MS + step * 10_000)
    assert written is not None
    assert read_newest(folder).path == written.path
    assert len(checkpoint_paths(folder)) == KEEP
    assert folder.exists(f"checkpoints/{name}")


def test_a_checkpoint_holds_no_address_of_a_process(receiving: Receiving) -> None:
    """A job's ports are its own: the next one, after a rebuild too, has others."""
    receiving.ledger.jobs.renew(receiving.job, attributes={"ui_url": "http://driver:4040", "connect_port": 15002})
    receiving.ledger.receivers.heartbeat(receiving.lease, sealed_through_ms=0, stats={"block_manager": "host:7077"})
    receiving.clock.advance(10_000)
    written = write_checkpoint(receiving.context, T1)
    assert written is not None
    text = receiving.storage.below("shop").read(written.path)
    assert [word for word in (b"4040", b"15002", b"7077", b'"here"') if word in text] == []


def test_a_result_has_the_replays_of_its_batch(receiving: Receiving) -> None:
    receiving.clock.advance(10_000)
    take(receiving, T1)
    receiving.complete(T1)
    run: dict[str, Any] = {"holder": "test", "way": "connect", "lease_ms": 60_000}
    attempt = receiving.ledger.replays.begin("shop", T1, target="march", definition="{}", outputs=["again"], **run)
    receiving.ledger.attempts.record_output(attempt, "again", {"n": 1})
    receiving.ledger.attempts.complete(attempt)
    assert write_results(receiving.context) == 1
    (replay,) = results(receiving)[T1].replays
    assert (replay.target, replay.state, replay.recorded) == ("march", BatchState.COMPLETED, {"again": {"n": 1}})
