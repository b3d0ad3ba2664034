"""Batches that are older than the stream's history are removed, and everything else stays right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select, update
from tests.support.ledger_rules import broken_rules
from typer.testing import CliRunner

from headrace.batch import cleanup
from headrace.batch.allocation import allocate
from headrace.batch.build_from_kafka import build_from_kafka
from headrace.batch.checkpoint import KEEP, checkpoint_now, checkpoint_paths
from headrace.batch.cleanup import Removed, clean_up
from headrace.batch.recover import recover
from headrace.cli.main import app
from headrace.clock import time_text
from headrace.errors import Failure
from headrace.fsck.stream_check import check_stream
from headrace.ledger import BatchState, Ledger
from headrace.ledger.batches.tables import Attempt, batch_attempts, batch_inputs, batch_outputs, batches
from headrace.ledger.errors import BatchRemovedError
from headrace.ledger.receiving import cleanup as ledger_cleanup
from headrace.ledger.receiving.tables import positions, segments
from headrace.stream import ConsoleOutput, KafkaInput, Limits, Stream
from headrace.stream.model import StreamDefinitionError

from .conftest import PARTITION, START_MS, FakeOffsets, Receiving, take
from .life import LEASE_MS, NAME, Life
from .recovery.ledger_contents import contents

INTERVAL_MS = 10_000
HISTORY = timedelta(seconds=60)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """No slack."""
    monkeypatch.setattr(cleanup, "SLACK_BATCHES", 0)
    monkeypatch.setattr(ledger_cleanup, "CHUNK", 10)


@pytest.fixture
def receiving(tmp_path: Path) -> Iterator[Receiving]:
    source = Receiving(tmp_path)
    source.stream = source.stream.model_copy(update={"limits": Limits(history=HISTORY)})
    yield source
    source.ledger.close()


class Building:
    """A stream that began at offset 1,000. Kafka has one record for each second before it began."""

    def __init__(self, receiving: Receiving) -> None:
        self.receiving = receiving
        receiving.position = 1_000
        with receiving.ledger.streams._database.write() as connection:
            connection.execute(update(positions).values(next_offset=1_000, starting_offset=1_000))
        timestamps = {0: [START_MS - (1_000 - offset) * 1_000 for offset in range(1_000)]}
        self.offsets = FakeOffsets(timestamps, PARTITION.topic_id)

    def build(self, number: int) -> None:
        """Build a batch from Kafka, and take it to its end."""
        time_ms = START_MS + number * INTERVAL_MS
        batch = build_from_kafka(self.receiving.context, time_ms, offsets_of=lambda _: self.offsets).batch
        assert (batch.built, batch.records) == (True, 10)
        self.receiving.complete(time_ms)
        end(self.receiving, time_ms)

    def times(self) -> list[int]:
        """The times of the built batches that there are, oldest first."""
        page = self.receiving.ledger.batches.page("shop", 1_000, oldest_first=True)
        return [row.batch_time_ms for row in page if row.built]


@pytest.fixture
def built(receiving: Receiving) -> Building:
    return Building(receiving)


def run(receiving: Receiving, numbers: range) -> None:
    """Batches of one record each, each to its end."""
    for number in numbers:
        time_ms = START_MS + number * INTERVAL_MS
        receiving.new_segment()
        receiving.store(1)
        receiving.clock.advance(time_ms - receiving.clock.now_ms())
        take(receiving, time_ms)
        receiving.complete(time_ms)
        end(receiving, time_ms)


def end(receiving: Receiving, time_ms: int) -> None:
    stream = receiving.stream
    checkpoint_now(receiving.context_of(stream), time_ms)
    clean_up(receiving.context_of(stream))


def remove_before(receiving: Receiving, number: int) -> None:
    before_ms = START_MS + number * INTERVAL_MS
    while receiving.ledger.removal.remove_batches("shop", before_ms):
        pass
    assert times(receiving.ledger)[0] == before_ms


def times(ledger: Ledger, name: str = "shop") -> list[int]:
    return [row.batch_time_ms for row in ledger.batches.page(name, 1_000, oldest_first=True)]


def rows(ledger: Ledger, table: Any) -> int:
    with ledger.streams._database.read() as connection:
        return int(connection.execute(select(func.count()).select_from(table)).scalar_one())


def rebuilt_times(receiving: Receiving, folder: Path) -> list[int]:
    """The batch times in a ledger that is rebuilt from a last checkpoint."""
    checkpoint_now(receiving.context, receiving.clock.now_ms())
    with Ledger.open(f"sqlite:///{folder}/new.db", clock=receiving.clock) as ledger:
        storage = receiving.storage.below("shop")
        before = {path: storage.read(path) for path in storage.paths()}
        recover("shop", ledger, storage, definition=receiving.stream, force=True)
        assert findings(ledger) == []
        # The stream goes on with the ledger that it has: a rebuilt one takes the folder over.
        for path in {*storage.paths()} - before.keys():
            storage.delete(path)
        for path, data in before.items():
            storage.write_atomically(path, data)
        return times(ledger)


def findings(ledger: Ledger, name: str = "shop") -> list[Any]:
    report = check_stream(ledger, name, kafka=False)
    # A life makes topics anew while their partitions are read.
    return [*report.findings, *report.unchecked, *broken_rules(ledger, name, but=["topic_wrong"])]


def test_batches_older_than_the_history_go_with_their_files(receiving: Receiving) -> None:
    folder = receiving.storage.below("shop")
    for number in (1, 2, 30):
        folder.write_atomically(f"sent/kafka/orders/an-id/{START_MS + number * INTERVAL_MS}.json", b"{}")
        # Of attempts that were killed.
        folder.write_atomically(f"reports/{START_MS + number * INTERVAL_MS}-v2-1-elasticsearch.json.warning-7-8-1", b"")
    run(receiving, range(1, 31))
    kept = times(receiving.ledger)
    oldest_ms = receiving.clock.now_ms() - HISTORY // timedelta(milliseconds=1)
    assert oldest_ms - INTERVAL_MS <= kept[0] <= oldest_ms
    assert kept == list(range(kept[0], receiving.clock.now_ms() + 1, INTERVAL_MS))
    for table in (batch_attempts, batch_inputs, batch_outputs, batches):
        assert rows(receiving.ledger, table) == len(kept)
    # Files go when every checkpoint knows.
    assert len(kept) <= len(folder.paths("manifests")) <= len(kept) + KEEP + 1
    assert len(kept) <= len(folder.paths("results")) <= len(kept) + KEEP + 1
    assert [path.rpartition("/")[2] for path in folder.paths("sent")] == [f"{START_MS + 30 * INTERVAL_MS}.json"]
    (report,) = folder.paths("reports")
    assert report.startswith(f"reports/{START_MS + 30 * INTERVAL_MS}-")
    assert len(receiving.ledger.segments.page("shop", limit=1_000)) < 10
    row = receiving.ledger.streams.get("shop")
    assert (row.removed_from_ms, row.removed_until_ms) == (START_MS + INTERVAL_MS, kept[0] - INTERVAL_MS)
    assert findings(receiving.ledger) == []


def test_a_removed_time_is_neither_unclaimed_nor_allocated_again(receiving: Receiving) -> None:
    run(receiving, range(1, 16))
    removed_ms = START_MS + 2 * INTERVAL_MS
    assert receiving.ledger.blocks.unclaimed("shop") == []
    with pytest.raises(BatchRemovedError, match=rf"{time_text(removed_ms)} .* was removed.*cannot be run") as refused:
        take(receiving, removed_ms)
    assert refused.value.failure is Failure.FINAL
    with pytest.raises(BatchRemovedError):
        receiving.ledger.allocations.seal("shop", removed_ms)
    reported = CliRunner().invoke(
        app, ["batches", "show", "shop", str(removed_ms), "--ledger", receiving.stream.ledger]
    )
    assert "was removed" in reported.stdout
    # A time from before the first is not among them: it may be built from Kafka.
    assert take(receiving, START_MS - 5 * INTERVAL_MS).batch.records == 0
    assert findings(receiving.ledger) == []


def test_what_is_not_over_holds_what_comes_after_it(receiving: Receiving) -> None:
    stuck_ms = START_MS + 3 * INTERVAL_MS
    run(receiving, range(1, 3))
    receiving.new_segment()
    receiving.store(1)
    receiving.clock.advance(stuck_ms - receiving.clock.now_ms())
    take(receiving, stuck_ms)
    run(receiving, range(4, 19))
    assert times(receiving.ledger)[0] == stuck_ms
    receiving.ledger.batches.abandon("shop", stuck_ms, "never mind")
    run(receiving, range(19, 26))
    assert times(receiving.ledger)[0] > stuck_ms
    assert findings(receiving.ledger) == []


def test_an_unclaimed_time_holds_what_comes_after_it(receiving: Receiving) -> None:
    open_ms = START_MS + 3 * INTERVAL_MS
    run(receiving, range(1, 3))
    receiving.new_segment()
    receiving.store(1)
    receiving.clock.advance(open_ms - receiving.clock.now_ms())
    run(receiving, range(4, 19))
    assert times(receiving.ledger)[0] == open_ms + INTERVAL_MS
    assert [row.batch_time_ms for row in receiving.ledger.blocks.unclaimed("shop")] == [open_ms]
    assert take(receiving, open_ms).batch.records == 1


def test_a_batch_that_runs_again_is_not_removed(receiving: Receiving) -> None:
    with_slots = Limits(history=HISTORY, max_concurrent_batches=2)
    receiving.stream = receiving.stream.model_copy(update={"limits": with_slots})
    receiving.ledger.streams.register(
        "shop", receiving.stream.to_json(), batch_interval_ms=10_000, block_interval_ms=200, max_concurrent_batches=2
    )
    run(receiving, range(1, 9))
    again_ms = START_MS + 2 * INTERVAL_MS
    attempt = receiving.ledger.attempts.begin(
        "shop", again_ms, holder="test", way="connect", lease_ms=3_600_000, force=True
    )
    run(receiving, range(9, 19))
    assert attempt.number == 2
    assert times(receiving.ledger)[0] == again_ms


def repeat(receiving: Receiving, number: int, *, lease_ms: int = 1_000) -> Attempt:
    """Begin an attempt at a batch that has completed."""
    time_ms = START_MS + number * INTERVAL_MS
    return receiving.ledger.attempts.begin(
        "shop", time_ms, holder="a person", way="connect", lease_ms=lease_ms, force=True
    )


def test_manifests_and_results_alone_are_enough(receiving: Receiving, tmp_path: Path) -> None:
    """No checkpoint can be read, and cleanup has deleted every segment of a topic that is no longer received."""
    run(receiving, range(1, 6))
    receiving.writer.close(receiving.accepted)
    folder = receiving.storage.below("shop")
    for path in [*folder.paths("log"), *checkpoint_paths(folder)]:
        folder.delete(path)
    with Ledger.open(f"sqlite:///{tmp_path}/new.db", clock=receiving.clock) as ledger:
        recover("shop", ledger, folder, definition=receiving.stream, force=True)
        assert times(ledger) == times(receiving.ledger)
        assert [row.partition for row in ledger.positions.all("shop")] == [PARTITION]
        assert [(row.topic_id, row.incarnation, row.current) for row in ledger.topics.all("shop")] == [
            (PARTITION.topic_id, PARTITION.incarnation, True)
        ]
        assert findings(ledger) == []


def test_a_restored_segment_of_removed_batches_does_not_count(receiving: Receiving, tmp_path: Path) -> None:
    receiving.store(1)
    (path,) = receiving.segments()
    data = receiving.storage.read(path)
    run(receiving, range(1, 16))
    assert times(receiving.ledger)[0] > START_MS + INTERVAL_MS
    receiving.storage.write_atomically(path, data)
    assert rebuilt_times(receiving, tmp_path) == times(receiving.ledger)
    with Ledger.open(f"sqlite:///{tmp_path}/new.db") as rebuilt:
        assert rebuilt.blocks.unclaimed("shop") == []


@pytest.mark.parametrize("ending", ["failed", "killed"])
def test_an_old_batch_repeated_in_vain_does_not_stop_the_removal(
    receiving: Receiving, tmp_path: Path, ending: str
) -> None:
    run(receiving, range(1, 6))
    attempt = repeat(receiving, 2)
    if ending == "failed":
        receiving.ledger.attempts.fail(attempt, "Kafka no longer has [1, 2)")
    receiving.clock.advance(2_000)
    run(receiving, range(6, 9))
    row = receiving.ledger.batches.get("shop", START_MS + 2 * INTERVAL_MS)
    assert row.state is {"failed": BatchState.FAILED, "killed": BatchState.RUNNING}[ending]
    assert receiving.ledger.results.behind("shop") == []
    assert findings(receiving.ledger) == []
    assert rebuilt_times(receiving, tmp_path) == times(receiving.ledger)
    run(receiving, range(9, 16))
    assert times(receiving.ledger)[0] > row.batch_time_ms
    assert findings(receiving.ledger) == []


def test_a_batch_being_repeated_does_not_run_in_a_rebuilt_ledger(receiving: Receiving, tmp_path: Path) -> None:
    run(receiving, range(1, 6))
    repeat(receiving, 2)
    receiving.clock.advance(2_000)
    run(receiving, range(6, 9))
    time_ms, folder = START_MS + 2 * INTERVAL_MS, receiving.storage.below("shop")
    folder.delete(f"manifests/{time_ms}.json")
    with Ledger.open(f"sqlite:///{tmp_path}/new.db", clock=receiving.clock) as ledger:
        report = recover("shop", ledger, folder, definition=receiving.stream, force=True)
        assert any("its manifest" in notice and "is gone" in notice for notice in report.notices)
        assert ledger.batches.get("shop", time_ms).state is BatchState.ALLOCATED


def test_an_old_batch_repeated_in_vain_stays_so_in_a_rebuild(receiving: Receiving, tmp_path: Path) -> None:
    run(receiving, range(1, 6))
    receiving.ledger.attempts.fail(repeat(receiving, 2), "Kafka no longer has [1, 2)")
    run(receiving, range(6, 8))
    time_ms, folder = START_MS + 2 * INTERVAL_MS, receiving.storage.below("shop")
    # The newest checkpoint is damaged. The log says nothing of the batch: it was deleted when the batch had completed.
    path = checkpoint_paths(folder)[-1]
    folder.delete(path)
    folder.write_atomically(path, b"damaged")
    with Ledger.open(f"sqlite:///{tmp_path}/new.db", clock=receiving.clock) as ledger:
        recover("shop", ledger, folder, definition=receiving.stream, force=True)
        assert ledger.batches.get("shop", time_ms).state is BatchState.FAILED
        assert findings(ledger) == []


def test_a_batch_being_repeated_stays_until_the_attempt_ends(receiving: Receiving) -> None:
    with_slots = Limits(history=HISTORY, max_concurrent_batches=2)
    receiving.stream = receiving.stream.model_copy(update={"limits": with_slots})
    receiving.ledger.streams.register(
        "shop", receiving.stream.to_json(), batch_interval_ms=10_000, block_interval_ms=200, max_concurrent_batches=2
    )
    run(receiving, range(1, 6))
    attempt = repeat(receiving, 2, lease_ms=3_600_000)
    run(receiving, range(6, 16))
    time_ms = START_MS + 2 * INTERVAL_MS
    assert times(receiving.ledger)[0] == time_ms
    receiving.ledger.attempts.record_output(attempt, "console", {"printed": 1})
    assert receiving.ledger.attempts.complete(attempt).state is BatchState.COMPLETED


def test_the_last_batches_of_a_stream_that_has_stopped_stay(receiving: Receiving) -> None:
    run(receiving, range(1, 11))
    before = times(receiving.ledger)
    receiving.clock.advance(1_000_000_000)
    clean_up(receiving.context)
    left = times(receiving.ledger)
    assert left == before[-len(left) :]
    assert left[0] <= before[-1] - HISTORY // timedelta(milliseconds=1)


def test_a_backfill_from_kafka_goes_on_after_a_removal(built: Building) -> None:
    receiving = built.receiving
    run(receiving, range(1, 20))
    removed = receiving.ledger.streams.get("shop")
    assert removed.removed_until_ms > START_MS
    for number in range(-30, 0):
        built.build(number)
    assert built.times() == [START_MS + number * INTERVAL_MS for number in range(-30, 0)]
    after = receiving.ledger.streams.get("shop")
    assert (after.removed_from_ms, after.removed_until_ms) == (removed.removed_from_ms, removed.removed_until_ms)
    assert findings(receiving.ledger) == []


def test_batches_built_from_kafka_go_by_their_time_of_completion(built: Building, tmp_path: Path) -> None:
    """They are removed when they completed longer ago than the history reaches."""
    receiving = built.receiving
    run(receiving, range(1, 16))
    for number in range(-6, 0):
        built.build(number)
    run(receiving, range(16, 20))
    assert len(built.times()) == 6
    run(receiving, range(20, 36))
    assert built.times() == []
    assert receiving.ledger.streams.get("shop").removed_from_ms == START_MS - 6 * INTERVAL_MS
    kept = [path for path in receiving.storage.below("shop").paths("manifests") if int(path[10:23]) < START_MS]
    assert kept == []
    with pytest.raises(BatchRemovedError):
        built.build(-3)
    built.build(-7)
    assert rebuilt_times(receiving, tmp_path) == times(receiving.ledger)


def test_a_kept_built_batch_holds_only_built_ones_before_it(built: Building, tmp_path: Path) -> None:
    receiving = built.receiving
    run(receiving, range(1, 16))
    for number in (-1, -4, -3):
        built.build(number)
    run(receiving, range(16, 20))
    # The last one to complete: the batches on both sides of it are old before it is.
    built.build(-2)
    run(receiving, range(20, 25))
    assert built.times() == [START_MS + number * INTERVAL_MS for number in (-4, -3, -2)]
    row = receiving.ledger.streams.get("shop")
    assert row.removed_from_ms == START_MS - INTERVAL_MS
    assert row.removed_until_ms > START_MS + 15 * INTERVAL_MS
    built.build(-5)
    assert rebuilt_times(receiving, tmp_path) == times(receiving.ledger)


def test_a_built_batch_that_runs_again_is_not_removed(built: Building) -> None:
    receiving = built.receiving
    with_slots = Limits(history=HISTORY, max_concurrent_batches=2)
    receiving.stream = receiving.stream.model_copy(update={"limits": with_slots})
    receiving.ledger.streams.register(
        "shop", receiving.stream.to_json(), batch_interval_ms=10_000, block_interval_ms=200, max_concurrent_batches=2
    )
    run(receiving, range(1, 16))
    for number in (-1, -2):
        built.build(number)
    again_ms = START_MS - 2 * INTERVAL_MS
    receiving.ledger.replays.begin(
        "shop",
        again_ms,
        target="again",
        definition='{"outputs": [{"id": "console"}]}',
        outputs=["console"],
        holder="test",
        way="connect",
        lease_ms=3_600_000,
    )
    run(receiving, range(16, 28))
    assert built.times() == [again_ms]


def test_the_first_batch_to_be_removed_is_one_that_was_received(built: Building) -> None:
    receiving = built.receiving
    for number in range(-6, 0):
        built.build(number)
    run(receiving, range(1, 5))
    receiving.clock.advance(1_000_000)
    assert receiving.ledger.removal.remove_batches("shop", START_MS + 2 * INTERVAL_MS) == 1
    assert receiving.ledger.streams.get("shop").removed_from_ms == START_MS + INTERVAL_MS
    assert len(built.times()) == 6


def test_without_a_limit_everything_stays(receiving: Receiving) -> None:
    receiving.stream = receiving.stream.model_copy(update={"limits": Limits(history=None)})
    run(receiving, range(1, 16))
    assert len(times(receiving.ledger)) == 15


def test_one_run_removes_so_many_at_most(receiving: Receiving, monkeypatch: pytest.MonkeyPatch) -> None:
    limited = receiving.stream
    receiving.stream = limited.model_copy(update={"limits": Limits(history=None)})
    run(receiving, range(1, 31))
    monkeypatch.setattr(cleanup, "BATCHES_AT_ONCE", 5)
    cleaned = clean_up(receiving.context_of(limited))
    assert cleaned.removed.batches == 10
    assert len(times(receiving.ledger)) == 30 - cleaned.removed.batches


def test_rows_of_deleted_segments_are_removed_in_parts(receiving: Receiving, monkeypatch: pytest.MonkeyPatch) -> None:
    """They go even where no batch is removed."""
    remove = receiving.ledger.removal.remove_segments
    monkeypatch.setattr(receiving.ledger.removal, "remove_segments", partial(remove, limit=2))
    run(receiving, range(1, 11))
    # The stream has stopped, so that its batches stay.
    receiving.clock.advance(HISTORY // timedelta(milliseconds=1) + 1)
    removed = rows(receiving.ledger, segments) - receiving.ledger.segments.count("shop")
    monkeypatch.setattr(cleanup, "SEGMENTS_AT_ONCE", 4)
    cleaned = [clean_up(receiving.context).removed for _ in range(3)]
    assert (removed, cleaned) == (7, [Removed(segments=4), Removed(segments=3), Removed()])
    assert findings(receiving.ledger) == []


def test_a_history_shorter_than_what_the_log_keeps_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StreamDefinitionError, match=r"limits\.history.*shorter"):
        Stream(
            name="shop",
            inputs=KafkaInput(id="clicks", bootstrap_servers="127.0.0.1:1", topics="clicks"),
            outputs=ConsoleOutput(),
            batch_interval="10 s",
            remember="10 min",
            limits=Limits(history=timedelta(minutes=5)),
            storage=tmp_path,
            ledger=f"sqlite:///{tmp_path}/ledger.db",
        )


KINDS: dict[str, dict[str, Any]] = {
    "arrival": {"limits": Limits(max_concurrent_batches=3, history=HISTORY)},
    "coalescing": {"coalesce": True, "limits": Limits(history=HISTORY)},
    "timestamp": {"batch_by": "timestamp", "limits": Limits(history=HISTORY)},
}


@pytest.fixture
def live(tmp_path: Path) -> Callable[..., Life]:
    """Lives some steps by a seed, and completes what it can now and then: so that there is a history to remove."""

    def live(seed: int, **options: Any) -> Life:
        life = Life(tmp_path, f"sqlite:///{tmp_path}/lost.db", seed, **options)
        for number in range(100):
            life.step()
            if number % 10 == 0:
                for time_ms in life.times()[:1]:
                    allocate(life.context, time_ms)
                life.finish()
                life.restart()
                life.checkpoint()
                life.clean()
        return life

    return live


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(2))
def test_any_history_passes_fsck_and_is_rebuilt_as_it_was(
    live: Callable[..., Life], tmp_path: Path, kind: str, seed: int
) -> None:
    life = live(seed, **KINDS[kind])
    for _ in range(12):
        life.clock.advance(INTERVAL_MS)
        for time_ms in life.times():
            allocate(life.context, time_ms)
        life.finish()
        life.checkpoint()
        life.clean()
    row = life.ledger.streams.get(NAME)
    assert row.removed_until_ms > START_MS, "something was removed"
    assert findings(life.ledger, NAME) == []
    life.checkpoint()
    before = contents(life.ledger)
    life.clock.advance(LEASE_MS + 1_000)
    with Ledger.open(f"sqlite:///{tmp_path}/new.db", clock=life.clock) as ledger:
        recover(NAME, ledger, life.storage.below(NAME), definition=life.stream)
        assert contents(ledger) == before
        assert findings(ledger, NAME) == []
        with pytest.raises(BatchRemovedError):
            allocate(life.context_in(ledger), row.removed_until_ms)
