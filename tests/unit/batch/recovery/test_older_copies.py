"""A ledger that was restored from an older copy: no door writes into the stream's folder for it, and the remedy works
from that state."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from tests.unit.batch.life import INTERVAL_MS, NAME, Life
from tests.unit.batch.recovery.conftest import rebuild
from tests.unit.batch.recovery.ledger_contents import check_whole, contents

from headrace.batch.allocation import allocate, write_manifest
from headrace.batch.checkpoint import checkpoint_now, write_checkpoint
from headrace.batch.cleanup import clean_up
from headrace.batch.manifest import Manifest
from headrace.batch.recover import recover
from headrace.batch.set_back import LedgerSetBackError, refuse_if_set_back
from headrace.ledger import Ledger
from headrace.ledger.states import EventKind
from headrace.receiver.tracker import JobSignWriter
from headrace.stream_context import StreamContext
from headrace.stream_folder import MARK_PATH, read_mark
from headrace.wal.storage import open_storage

DOORS: dict[str, Callable[[StreamContext, int], object]] = {
    "allocation": allocate,
    "takeover": lambda context, time_ms: allocate(context, time_ms, takes_over=True),
    "result": write_checkpoint,
    "checkpoint": checkpoint_now,
    "cleanup": lambda context, _: clean_up(context),
    "attempt": lambda context, _: context.storage.mark.leave(attempt=1),
    "receiver job": lambda context, _: refuse_if_set_back(context),
    "recover": lambda context, _: recover(NAME, context.ledger, open_storage(context.storage.url)),
    "segment": lambda context, _: context.storage.below("log").create_segment("clicks-0/new.wal"),
    "repair": lambda context, _: context.storage.below("log").truncate("clicks-0/new.wal", 0),
    "object": lambda context, _: context.storage.write_atomically("state/new.json", b"{}", exclusive=True),
    "deletion": lambda context, _: context.storage.delete("checkpoints/new.json"),
}
"""What writes into a stream's folder."""


@pytest.fixture
def copy(tmp_path: Path, lost_url: str) -> Iterator[Callable[[Life], Ledger]]:
    """Makes a copy of the ledger as it is."""
    opened: list[Ledger] = []

    def make(life: Life) -> Ledger:
        file = tmp_path / f"copy-{len(opened)}.db"
        with closing(sqlite3.connect(lost_url.removeprefix("sqlite:///"))) as database:
            file.write_bytes(database.serialize())
        opened.append(Ledger.open(f"sqlite:///{file}", clock=life.clock))
        return opened[-1]

    yield make
    for ledger in opened:
        ledger.close()


def files(life: Life) -> dict[str, bytes]:
    folder = life.storage.below(NAME)
    return {path: folder.read(path) for path in folder.paths()}


def next_time(life: Life) -> int:
    """A batch time that has come, later than all batches."""
    life.clock.advance(INTERVAL_MS)
    return life.clock.now_ms() // INTERVAL_MS * INTERVAL_MS


def allocate_next(life: Life) -> int:
    for _ in range(9):
        life.store()
    return allocate(life.context, next_time(life)).batch.batch_time_ms


def sign(life: Life) -> None:
    """Blocks only, and then the job's sign of life."""
    for _ in range(9):
        life.store()
    writer = JobSignWriter(life.context, life.job)
    writer.write_if_due(life.clock.now_ms())
    assert writer._writing is not None
    writer._writing.result()
    writer.close()


def complete_next(life: Life) -> None:
    time_ms = allocate_next(life)
    life.run(time_ms, "yes")
    write_checkpoint(life.context, time_ms)


def clean_all(life: Life) -> None:
    life.clock.advance(7_200_000)
    assert clean_up(life.context).segments


SINCE: dict[str, Callable[[Life], object]] = {
    "blocks": sign,
    "an allocation": allocate_next,
    "a batch": complete_next,
    "a cleanup": clean_all,
}
"""By what alone a copy is behind."""


@pytest.mark.parametrize("since", SINCE)
def test_no_door_changes_a_file_for_an_older_copy(
    live: Callable[..., Life], copy: Callable[[Life], Ledger], new_url: str, since: str
) -> None:
    life = live(31, 60)
    life.finish()
    life.checkpoint()
    older = copy(life)
    SINCE[since](life)
    time_ms, before = next_time(life), files(life)
    for door, write in DOORS.items():
        with pytest.raises(LedgerSetBackError, match="headrace streams recover shop --storage"):
            write(life.context_in(older), time_ms)
        assert files(life) == before, door
    # The stream goes on with the ledger that it had, or with a rebuilt one, from that very state.
    complete_next(life)
    life.finish()
    life.checkpoint()
    expected = contents(life.ledger)
    rebuilt = rebuild(life, new_url)
    again = contents(rebuilt)
    if since != "a cleanup":
        assert again == expected
    assert set(expected["batch_inputs"]) <= set(again["batch_inputs"])
    check_whole(rebuilt)
    # No ledger of before writes there any more.
    after = files(life)
    for ledger in (older, life.ledger):
        for door, write in DOORS.items():
            with pytest.raises(LedgerSetBackError):
                write(life.context_in(ledger), time_ms)
            assert files(life) == after, door


def test_copies_restored_in_any_order_lose_and_double_nothing(
    live: Callable[..., Life], copy: Callable[[Life], Ledger], new_url: str
) -> None:
    life = live(32, 30)
    copies = [copy(life)]
    for _ in range(3):
        complete_next(life)
        copies.append(copy(life))
    complete_next(life)
    for number in (2, 0, 3, 1, 0):
        time_ms = next_time(life)
        for write in DOORS.values():
            with pytest.raises(LedgerSetBackError):
                write(life.context_in(copies[number]), time_ms)
    # The newest again.
    complete_next(life)
    life.finish()
    life.checkpoint()
    expected = contents(life.ledger)
    assert contents(rebuild(life, new_url)) == expected


def test_a_copy_that_grew_events_of_its_own_is_refused_too(
    live: Callable[..., Life], copy: Callable[[Life], Ledger]
) -> None:
    """Refused runs and registrations add events: soon the copy has the id that the mark names."""
    life = live(33, 30)
    older = copy(life)
    complete_next(life)
    mark = read_mark(life.storage.below(NAME))
    assert mark is not None
    while older.events.newest_id(NAME) <= mark.event_id:
        older.events.append(NAME, EventKind.RECEIVER_ERROR, {})
    with pytest.raises(LedgerSetBackError, match="which the ledger does not have"):
        allocate(life.context_in(older), next_time(life))


def test_a_result_of_another_ledger_is_not_overwritten(
    live: Callable[..., Life], copy: Callable[[Life], Ledger]
) -> None:
    """Both ran the batch, and nothing but the result shows it."""
    life = live(34, 30)
    life.finish()
    life.checkpoint()
    time_ms = allocate_next(life)
    older = copy(life)
    life.run(time_ms, "yes")
    write_checkpoint(life.context, time_ms)
    life.storage.below(NAME).delete(MARK_PATH)
    own, life.ledger = life.ledger, older
    life.clock.advance(5_000)
    life.run(time_ms, "yes")
    before = files(life)
    with pytest.raises(LedgerSetBackError, match=rf"results/{time_ms}-\d+\.json is ahead"):
        write_checkpoint(life.context, time_ms)
    assert files(life) == before
    # The ledger that wrote it may write it again: it was killed before it had marked the batch.
    life.ledger = own
    row = own.batches.get(NAME, time_ms)
    with own.streams._database.write() as connection:
        connection.exec_driver_sql(f"UPDATE batches SET result = 0 WHERE batch_time_ms = {time_ms}")
    life.clock.advance(1_000)
    write_checkpoint(life.context, time_ms)
    assert own.batches.get(NAME, time_ms).result == row.result


def test_no_manifest_is_put_beside_that_of_a_lost_batch(
    live: Callable[..., Life], copy: Callable[[Life], Ledger]
) -> None:
    """The batch has a manifest in the folder, but the ledger knows nothing of it."""
    life = live(35, 30)
    older = copy(life)
    time_ms = allocate_next(life)
    life.storage.below(NAME).delete(MARK_PATH)
    other = Manifest(NAME, time_ms, INTERVAL_MS, {"clicks": (), "orders": ()}, life.context.storage.url)
    before = files(life)
    with pytest.raises(LedgerSetBackError, match=r"it lists blocks that the ledger does not have"):
        write_manifest(life.context_in(older), other)
    assert files(life) == before


def test_a_copy_restored_under_a_job_is_noticed_by_its_processes(
    live: Callable[..., Life], copy: Callable[[Life], Ledger]
) -> None:
    """The job itself notices it, and so does each of its receivers."""
    life = live(36, 30)
    older = copy(life)
    for _ in range(40):
        life.store()
    life.context.storage.mark.leave()
    writer = JobSignWriter(life.context_in(older), life.job)
    writer.write_if_due(life.clock.now_ms())
    assert writer._writing is not None
    assert isinstance(writer._writing.exception(), LedgerSetBackError)
    with pytest.raises(LedgerSetBackError):
        writer.write_if_due(life.clock.now_ms())
    # The job schedules its receivers again, so that the copy's epochs are the highest.
    life.storage.below(NAME).delete(MARK_PATH)
    for receiver_id in life.receivers:
        older.receivers.schedule(life.job, receiver_id)
    with pytest.raises(LedgerSetBackError, match="was accepted, and the ledger does not have it"):
        refuse_if_set_back(life.context_in(older))


def test_the_mark_outlives_the_pruning_of_events(live: Callable[..., Life]) -> None:
    """A stream stands still for weeks, then somebody cleans up."""
    life = live(37, 40)
    life.finish()
    life.checkpoint()
    life.clock.advance(30 * 24 * 3_600_000)
    for _ in range(3):
        clean_up(life.context)
        refuse_if_set_back(life.context)
    complete_next(life)


def test_a_stream_of_an_earlier_version_is_marked_after_a_look(
    live: Callable[..., Life], copy: Callable[[Life], Ledger]
) -> None:
    """The look is at the stream's files."""
    life = live(38, 30)
    complete_next(life)
    life.checkpoint()
    older = copy(life)
    life.restart_job()
    life.checkpoint()
    folder = life.storage.below(NAME)
    for damaged in (b"", b"[1]", b'{"event_id": 1', None):
        folder.delete(MARK_PATH)
        if damaged is not None:
            folder.write_atomically(MARK_PATH, damaged)
        with pytest.raises(LedgerSetBackError, match=r"it knows receiver job \d, and the ledger \d"):
            allocate(life.context_in(older), next_time(life))
    with life.ledger.streams._database.write() as connection:
        connection.exec_driver_sql("UPDATE batch_attempts SET number = number + 7000")
    allocate(life.context, next_time(life))
    mark = read_mark(folder)
    # Numbers of attempts that no file has yet.
    assert mark is not None
    assert mark.attempt == life.ledger.attempts.highest(NAME) > 7000


def test_a_stream_without_data_may_begin_with_an_empty_ledger(tmp_path: Path, lost_url: str, new_url: str) -> None:
    life = Life(tmp_path, lost_url, 1)
    life.context.storage.mark.leave()
    with Ledger.open(new_url, clock=life.clock) as ledger:
        life.register(ledger)
        refuse_if_set_back(life.context_in(ledger))
        life.storage.below(NAME).write_atomically("manifests/1.json", b"")
        with pytest.raises(LedgerSetBackError):
            refuse_if_set_back(life.context_in(ledger))


@pytest.mark.parametrize("losses", [1, 3])
def test_a_rebuilt_ledger_numbers_attempts_above_all_in_hundreds(
    live: Callable[..., Life], tmp_path: Path, losses: int
) -> None:
    life = live(39, 60)
    life.finish()
    life.checkpoint()
    used = 0
    for loss in range(losses):
        rebuilt = rebuild(life, f"sqlite:///{tmp_path}/rebuilt-{loss}.db")
        (batch,) = rebuilt.batches.page(NAME, 1)
        life.ledger = rebuilt
        attempt = rebuilt.attempts.begin(NAME, batch.batch_time_ms, holder="t", way="", lease_ms=1, force=True)
        # What `run_attempt` does before it writes. No result is left of it.
        life.context.storage.mark.leave(attempt=attempt.number)
        assert used < attempt.number <= 100 * (loss + 1) + 1
        used = attempt.number


def test_a_rebuilt_ledger_without_a_mark_is_above_the_unknown(live: Callable[..., Life], new_url: str) -> None:
    """Its numbers are above those that only the lost ledger could have known."""
    life = live(40, 60)
    life.finish()
    life.checkpoint()
    life.storage.below(NAME).delete(MARK_PATH)
    (batch,) = rebuild(life, new_url).batches.page(NAME, 1)
    assert batch.attempt > 100_000_000
