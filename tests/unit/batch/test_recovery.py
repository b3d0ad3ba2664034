"""A ledger that is lost is rebuilt as it was, whatever its stream had gone through."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from headrace.batch.allocation import restore_manifest
from headrace.batch.checkpoint import checkpoint_paths
from headrace.batch.checksummed_json import decode_document, encode_document
from headrace.batch.history_files import HistoryError, read_history
from headrace.batch.manifest import ManifestError
from headrace.batch.recovery.lost_ledger import LostLedgerError, refuse_if_lost
from headrace.batch.recovery.recover import RecoveryRefusedError, Step, recover
from headrace.batch.saved_state import read_saved_state
from headrace.blocks import BlockHandle
from headrace.fsck.coverage import Hole, check_coverage
from headrace.fsck.stream_check import check_stream
from headrace.ledger import BatchState, EventKind, Ledger
from headrace.ledger.errors import LeaseLostError
from headrace.ledger.models import (
    StoredBlock,
    batch_attempts,
    batch_inputs,
    batch_outputs,
    batch_runs,
    batches,
    blocks,
    gaps,
    positions,
    replay_definitions,
    replays,
    segments,
    streams,
    topics,
    unclaimed_times,
)
from headrace.stream import Limits, Stream
from headrace.stream_context import StreamContext
from headrace.wal.storage import open_storage

from .conftest import T1, T2, Receiving, take
from .life import LEASE_MS, NAME, Life

# What is not promised: who owns what, the ids and times that a ledger gives by itself, and the numbers of attempts.
NOT_PROMISED = {
    "streams": {"job_epoch"},
    "positions": {"receiver_index", "wanted_receiver_index", "leader_epoch", "epoch_end_offset"},
    "blocks": {"block_id", "segment_id", "added_at_ms"},
    "batches": {"attempt", "history", "cleaned_at_ms", "cleanup"},
    "batch_outputs": {"attempt", "recorded_at_ms", "code_version"},
    "batch_runs": {"at_ms"},
    "gaps": {"gap_id"},
    "replays": {"attempt"},
}
TABLES = (
    streams,
    topics,
    positions,
    blocks,
    unclaimed_times,
    batches,
    batch_inputs,
    batch_outputs,
    batch_runs,
    gaps,
    replays,
    replay_definitions,
)


def contents(ledger: Ledger) -> dict[str, list[str]]:
    """Every table's rows, without what is not promised."""
    found: dict[str, list[str]] = {}
    with ledger.streams._database.read() as connection:
        paths = dict(connection.execute(select(segments.c.segment_id, segments.c.path)).all())
        newest = newest_outputs(connection)
        attempts = select(batch_attempts.c.batch_time_ms, batch_attempts.c.number, batch_attempts.c.revision)
        revisions = {(row.batch_time_ms, row.number): row.revision for row in connection.execute(attempts)}
        for table in TABLES:
            rows = []
            for row in connection.execute(select(table)):
                fields = {k: v for k, v in row._mapping.items() if k not in NOT_PROMISED.get(table.name, ())}
                if table is blocks:
                    fields["segment"] = paths[row.segment_id]
                if table is batch_outputs:
                    fields["revision"] = revisions[row.batch_time_ms, row.attempt]
                if table is batch_outputs and (row.batch_time_ms, row.attempt, row.output_id) not in newest:
                    continue
                if fields.get("state") == "running":
                    # Whoever ran it is lost.
                    fields["state"] = "allocated"
                rows.append(str(sorted((name, str(value)) for name, value in fields.items())))
            found[table.name] = sorted(rows)
    return found


def newest_outputs(connection: Any) -> set[tuple[Any, ...]]:
    """Of each output of each batch what counts: its newest attempt's record of success."""
    newest: dict[tuple[Any, ...], Any] = {}
    query = select(batch_outputs).where(batch_outputs.c.target == "")
    for row in connection.execute(query.order_by(batch_outputs.c.attempt)):
        newest[row.batch_time_ms, row.output_id] = row
    return {(row.batch_time_ms, row.attempt, row.output_id) for row in newest.values() if row.state == "completed"}


@pytest.fixture
def lost_url(tmp_path: Path) -> str:
    """The ledger that gets lost."""
    return f"sqlite:///{tmp_path}/lost.db"


@pytest.fixture
def new_url(tmp_path: Path) -> str:
    """Where it is rebuilt."""
    return f"sqlite:///{tmp_path}/new.db"


@pytest.fixture
def live(tmp_path: Path, lost_url: str) -> Callable[..., Life]:
    """Lives some steps by a seed."""

    def live(seed: int, steps: int = 120, **options: Any) -> Life:
        life = Life(tmp_path, lost_url, seed, **options)
        for _ in range(steps):
            life.step()
        return life

    return live


def rebuild(life: Life, new_url: str) -> Ledger:
    """Lose the ledger, and rebuild it once nothing of it lives."""
    life.clock.advance(LEASE_MS + 1_000)
    ledger = Ledger.open(new_url, clock=life.clock)
    recover(NAME, ledger, life.storage.below(NAME))
    return ledger


KINDS: dict[str, dict[str, Any]] = {
    "arrival": {},
    "coalescing": {"coalesce": True, "limits": Limits()},
    "timestamp": {"batch_by": "timestamp"},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_a_rebuilt_ledger_is_the_lost_one_table_by_table(
    live: Callable[..., Life], new_url: str, kind: str, seed: int
) -> None:
    life = live(seed, **KINDS[kind])
    # A deploy in the middle: what is written from here on is written by another definition.
    life.stream = life.stream.model_copy(update={"parameters": {"deployed": "again"}})
    life.register(life.ledger)
    for _ in range(30):
        life.step()
    life.finish()
    life.checkpoint()
    life.checkpoint()
    expected = contents(life.ledger)
    rebuilt = rebuild(life, new_url)
    found = contents(rebuilt)
    for table in expected:
        assert found[table] == expected[table], table
    assert check_stream(rebuilt, NAME, kafka=False).findings == []
    assert rebuilt.streams.at_revision(NAME, 2).definition == life.stream.to_json()
    # The blocks are in the order in which they were added, so that the same manifests can be drawn up of them.
    folder, rows = life.storage.below(NAME), rebuilt.batches.page(NAME, 1000)
    origins = rebuilt.batches.origins(NAME, [row.batch_time_ms for row in rows])
    for row in rows:
        if row.batch_time_ms in origins and origins[row.batch_time_ms].source == "log":
            folder.delete(f"manifests/{row.batch_time_ms}.json")
            assert restore_manifest(life.context_in(rebuilt), row)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(10, 12))
def test_what_no_checkpoint_saw_comes_back_from_the_log(
    live: Callable[..., Life], new_url: str, kind: str, seed: int
) -> None:
    """Without a checkpoint at the end: blocks, positions and allocations are there all the same, and once."""
    life = live(seed, **KINDS[kind])
    life.checkpoint()
    for _ in range(25):
        life.random.choice(
            [life.store] * 5 + [life.advance_clock, life.run_batch, life.restart, life.leave_undecided]
        )()
    before, rebuilt = life.ledger, rebuild(life, new_url)
    dropped = {
        (block.info.receiver, block.info.epoch, block.info.sequence): block
        for block in all_blocks(before).values()
        if block.info.handle not in all_blocks(rebuilt)
    }
    # A writer's last block, of which nothing tells that it was accepted: Kafka has it.
    newest: dict[Any, int] = {}
    for block in all_blocks(before).values():
        writer = (block.info.receiver, block.info.epoch)
        newest[writer] = max(newest.get(writer, -1), block.info.sequence)
    assert all(newest[receiver, epoch] == sequence for receiver, epoch, sequence in dropped)
    assert not any(before.batches.find(NAME, block.batch_time_ms) for block in dropped.values())
    assert all_blocks(rebuilt).keys() <= all_blocks(before).keys()
    assert contents(rebuilt)["batch_inputs"] == contents(before)["batch_inputs"]
    expected = {(row.input_id, row.partition): row.next_offset for row in before.positions.all(NAME)}
    for block in sorted(dropped.values(), key=lambda block: block.block_id, reverse=True):
        for r in block.info.ranges:
            expected[block.info.receiver.input_id, r.partition] = r.from_offset
    # Where only control records follow, they are read past again.
    positions = {(row.input_id, row.partition): row.next_offset for row in rebuilt.positions.all(NAME)}
    assert all(positions[place] <= expected[place] for place in positions)
    check_whole(rebuilt)
    # What was passed over before the checkpoint is; since then nothing was, and nothing is.
    assert set(holes(rebuilt)) <= set(holes(before))
    assert contents(rebuilt)["gaps"] == contents(before)["gaps"]
    for batch in before.batches.page(NAME, 1000):
        found = rebuilt.batches.get(NAME, batch.batch_time_ms)
        assert (found.records, found.blocks, found.manifest_sha256) == (
            batch.records,
            batch.blocks,
            batch.manifest_sha256,
        )
        assert found.state is batch.state or not batch.checkpointed_at_ms


def all_blocks(ledger: Ledger) -> dict[BlockHandle, StoredBlock]:
    with ledger.streams._database.read() as connection:
        times = connection.execute(select(blocks.c.batch_time_ms).distinct()).scalars().all()
    return {block.info.handle: block for time_ms in times for block in ledger.allocations.blocks_of(NAME, time_ms)}


def holes(ledger: Ledger) -> list[Hole]:
    """What is in no block, batch or gap."""
    return check_coverage(ledger.snapshots.take(NAME))[1]


def check_whole(ledger: Ledger) -> None:
    """Along each partition the blocks meet, or what lies between is no block's; and the position ends them."""
    ends: dict[Any, int] = {}
    for block in sorted(all_blocks(ledger).values(), key=lambda block: block.block_id):
        for r in block.info.ranges:
            place = (block.info.receiver.input_id, r.partition)
            assert ends.get(place, 0) <= r.from_offset
            ends[place] = r.until_offset
    for row in ledger.positions.all(NAME):
        assert row.next_offset >= ends.get((row.input_id, row.partition), 0)


def test_what_was_dropped_is_read_again_and_stored_once(live: Callable[..., Life], new_url: str) -> None:
    life = live(3)
    life.leave_undecided()
    life.ledger = rebuild(life, new_url)
    life.receivers.clear()
    life.start_job()
    for _ in range(40):
        life.step()
    life.checkpoint()
    expected = contents(life.ledger)
    # And once more: the second rebuild finds what the first one dropped, beside what was read instead.
    found = contents(rebuild(life, new_url.replace("new", "again")))
    for table in ("positions", "blocks", "batch_inputs", "unclaimed_times"):
        assert found[table] == expected[table], table


def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(live: Callable[..., Life], new_url: str) -> None:
    life = live(5)
    life.checkpoint()
    folder = life.storage.below(NAME)
    life.checkpoint()
    newest = checkpoint_paths(folder)[-1]
    folder.write_atomically(newest, folder.read(newest)[:-30])
    expected = contents(life.ledger)
    life.clock.advance(LEASE_MS + 1_000)
    with Ledger.open(new_url, clock=life.clock) as ledger:
        report = recover(NAME, ledger, folder)
        assert contents(ledger) == expected
    assert [notice for notice in report.notices if newest in notice]
    assert Step.CHECKPOINT_WRITTEN in report.steps


def test_without_any_checkpoint_its_definition_is_enough(live: Callable[..., Life], new_url: str) -> None:
    life = live(6)
    folder = life.storage.below(NAME)
    for path in [*checkpoint_paths(folder), *folder.paths("history")]:
        folder.delete(path)
    life.clock.advance(LEASE_MS + 1_000)
    with Ledger.open(new_url, clock=life.clock) as ledger:
        with pytest.raises(RecoveryRefusedError, match="--definition"):
            recover(NAME, ledger, folder)
        recover(NAME, ledger, folder, definition=life.stream)
        check_whole(ledger)
        assert all_blocks(ledger).keys() <= all_blocks(life.ledger).keys()
        assert contents(ledger)["batch_inputs"] == contents(life.ledger)["batch_inputs"]


def test_a_dry_run_says_what_it_would_do_and_does_nothing(live: Callable[..., Life], new_url: str) -> None:
    life = live(7)
    folder = life.storage.below(NAME)
    before = {path: folder.read(path) for path in folder.paths()}
    life.clock.advance(LEASE_MS + 1_000)
    with Ledger.open(new_url, clock=life.clock) as ledger:
        report = recover(NAME, ledger, folder, dry_run=True)
        assert ledger.rebuild.is_new(NAME)
        assert ledger.streams.all() == []
        assert set(report.steps) == {Step.LEDGER_REBUILT, Step.CHECKPOINT_WRITTEN}
        assert report.counts["batches"] == len(life.ledger.batches.page(NAME, 1000))
        assert {path: folder.read(path) for path in folder.paths()} == before
        done = recover(NAME, ledger, folder)
        assert done.counts == report.counts
        assert recover(NAME, ledger, folder).steps == {}


def test_it_is_refused_while_something_could_still_live(live: Callable[..., Life], new_url: str) -> None:
    life = live(8)
    life.checkpoint()
    with Ledger.open(new_url, clock=life.clock) as ledger:
        with pytest.raises(RecoveryRefusedError, match="could still live"):
            recover(NAME, ledger, life.storage.below(NAME))
        life.clock.advance(LEASE_MS - 1)
        with pytest.raises(RecoveryRefusedError, match="again in 1 seconds"):
            recover(NAME, ledger, life.storage.below(NAME))
        assert ledger.streams.all() == []
        recover(NAME, ledger, life.storage.below(NAME), force=True)
        assert not ledger.rebuild.is_new(NAME)


def test_there_must_be_something_to_recover_from(tmp_path: Path, new_url: str) -> None:
    with Ledger.open(new_url) as ledger, pytest.raises(RecoveryRefusedError, match="holds no checkpoint"):
        recover(NAME, ledger, open_storage(str(tmp_path / "elsewhere")).below(NAME))


def test_old_writers_and_attempts_stay_fenced(live: Callable[..., Life], new_url: str) -> None:
    life = live(9)
    life.finish()
    old = dict(life.receivers)
    attempts = {
        batch.batch_time_ms: [attempt.number for attempt in life.ledger.attempts.of_batch(NAME, batch.batch_time_ms)]
        for batch in life.ledger.batches.page(NAME, 1000)
    }
    life.ledger = rebuild(life, new_url)
    life.start_job()
    for receiver in old.values():
        with pytest.raises(LeaseLostError):
            life.ledger.receivers.heartbeat(receiver.lease, sealed_through_ms=0)
    for receiver_id, receiver in life.receivers.items():
        assert receiver.lease.epoch > old[receiver_id].lease.epoch + 100
    for batch in life.ledger.batches.page(NAME, 1000, [BatchState.COMPLETED]):
        begun = life.ledger.attempts.begin(
            NAME, batch.batch_time_ms, holder="new", way="connect", lease_ms=1, force=True
        )
        assert begun.number > max(attempts[batch.batch_time_ms])
        life.clock.advance(2)


def test_lost_checkpoints_are_written_from_the_ledger(live: Callable[..., Life]) -> None:
    life = live(1)
    life.finish()
    life.checkpoint()
    folder = life.storage.below(NAME)
    assert recover(NAME, life.ledger, folder).steps == {}
    for path in checkpoint_paths(folder):
        folder.delete(path)
    assert set(recover(NAME, life.ledger, folder, dry_run=True).steps) == {Step.CHECKPOINT_WRITTEN}
    assert checkpoint_paths(folder) == []
    assert set(recover(NAME, life.ledger, folder).steps) == {Step.CHECKPOINT_WRITTEN}
    kept = {time_ms: batch.row.state for time_ms, batch in read_saved_state(folder).batches.items()}
    assert kept == {row.batch_time_ms: row.state for row in life.ledger.batches.page(NAME, 1000)}
    assert life.ledger.events.page(NAME, kinds=[EventKind.CHECKPOINT_REWRITTEN])
    newest = checkpoint_paths(folder)[-1]
    folder.write_atomically(newest, b"{}")
    assert set(recover(NAME, life.ledger, folder).steps) == {Step.CHECKPOINT_WRITTEN}
    assert recover(NAME, life.ledger, folder).steps == {}


def test_manifests_and_history_files_of_another_version_are_refused(live: Callable[..., Life], new_url: str) -> None:
    life = live(1)
    life.finish()
    folder, path = life.context.storage, life.context.storage.paths("manifests")[0]
    folder.write_atomically(path, encode_document({**decode_document(folder.read(path)), "version": 9}))
    with Ledger.open(new_url, clock=life.clock) as ledger, pytest.raises(ManifestError, match="version 9"):
        recover(NAME, ledger, folder)
    folder.write_atomically(
        "history/0000000000007.json", encode_document({"version": 2, "stream": NAME, "batches": []})
    )
    with pytest.raises(HistoryError, match="is of version 2, this headrace reads 1"):
        read_history(folder, 7)


@pytest.mark.parametrize("harm", ["missing", "damaged"])
def test_lost_history_and_manifests_are_written_from_the_ledger(
    live: Callable[..., Life], new_url: str, harm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.batch.history_files.FILED", 2)
    life = live(2)
    life.finish()
    life.checkpoint()
    life.checkpoint()
    folder = life.storage.below(NAME)
    origins = life.ledger.batches.origins(NAME, [batch.batch_time_ms for batch in life.ledger.batches.uncleaned(NAME)])
    uncleaned = next(
        batch
        for batch in life.ledger.batches.uncleaned(NAME)
        if batch.blocks and batch.batch_time_ms in origins and origins[batch.batch_time_ms].source == "log"
    )
    manifest = f"manifests/{uncleaned.manifest_uri.rpartition('/')[2]}"

    def break_it(path: str) -> None:
        if harm == "missing":
            folder.delete(path)
        else:
            folder.write_atomically(path, folder.read(path)[:-4])

    life.clock.advance(LEASE_MS + 1_000)
    with Ledger.open(new_url, clock=life.clock) as ledger:
        break_it(folder.paths("history")[0])
        with pytest.raises(HistoryError, match="the checkpoint" if harm == "missing" else "is damaged"):
            recover(NAME, ledger, folder)
        break_it(manifest)
    report = recover(NAME, life.ledger, folder)
    assert set(report.steps) == {Step.HISTORY_WRITTEN, Step.MANIFESTS_WRITTEN, Step.CHECKPOINT_WRITTEN}
    assert recover(NAME, life.ledger, folder).steps == {}
    whole = folder.read(manifest)
    break_it(manifest)
    life.clock.advance(LEASE_MS + 1_000)
    with Ledger.open(new_url, clock=life.clock) as ledger, pytest.raises(ManifestError, match=harm):
        recover(NAME, ledger, folder)
    folder.write_atomically(manifest, whole)
    expected = contents(life.ledger)
    found = contents(rebuild(life, new_url))
    assert {name: rows for name, rows in found.items() if rows != expected[name]} == {}


def test_a_stream_is_not_begun_anew_beside_its_own_log(live: Callable[..., Life], new_url: str) -> None:
    life = live(4, steps=30)
    refuse_if_lost(life.context)
    with Ledger.open(new_url, clock=life.clock) as ledger:
        with pytest.raises(LostLedgerError, match="headrace streams recover shop --storage"):
            refuse_if_lost(life.context_in(ledger))
        other = life.stream.model_copy(update={"name": "another"})
        refuse_if_lost(StreamContext(other, ledger))


def test_the_definition_comes_back_as_it_was_changed_last(live: Callable[..., Life], new_url: str) -> None:
    life = live(11, steps=20)
    life.stream = life.stream.model_copy(update={"limits": Limits(max_concurrent_batches=7, max_rate=5)})
    life.register(life.ledger)
    life.checkpoint()
    row = rebuild(life, new_url).streams.get(NAME)
    assert (Stream.from_json(row.definition), row.revision, row.max_concurrent_batches) == (life.stream, 2, 7)


def test_manifests_of_overtaken_allocations_are_deleted(live: Callable[..., Life]) -> None:
    life = live(1)
    life.finish()
    life.checkpoint()
    folder = life.storage.below(NAME)
    manifests = folder.paths("manifests")
    (batch, *_) = life.ledger.batches.page(NAME, 1)
    left = f"manifests/{batch.batch_time_ms}-0123456789abcdef.json"
    unclaimed = f"manifests/{batch.batch_time_ms + 10_000_000}-0123456789abcdef.json"
    for path in (left, unclaimed):
        folder.write_atomically(path, b"whatever an allocation wrote")
    assert set(recover(NAME, life.ledger, folder, dry_run=True).steps) == {Step.MANIFESTS_DELETED}
    assert folder.exists(left)
    recover(NAME, life.ledger, folder)
    # One whose time nobody has claimed may be in the making.
    assert folder.paths("manifests") == sorted([*manifests, unclaimed])


def test_a_block_that_came_after_its_time_was_sealed_keeps_the_one_it_got(
    live: Callable[..., Life], new_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = live(0, steps=0)
    add = life.ledger.blocks.add

    def add_late(*block: Any) -> Any:
        life.clock.advance(40_000)
        life.ledger.allocations.seal(NAME, life.clock.now_ms() // 10_000 * 10_000)
        return add(*block)

    with monkeypatch.context() as patch:
        patch.setattr(life.ledger.blocks, "add", add_late)
        while not all_blocks(life.ledger):
            life.store()
    for _ in range(10):
        life.store()
    life.checkpoint()
    expected = contents(life.ledger)
    assert len(expected["unclaimed_times"]) == 1
    found = contents(rebuild(life, new_url))
    assert (found["blocks"], found["unclaimed_times"]) == (expected["blocks"], expected["unclaimed_times"])


def test_a_block_that_came_too_late_for_an_allocated_batch_waits_for_the_next_one(
    receiving: Receiving, new_url: str
) -> None:
    """No checkpoint says that it was late: the manifest of its own time does not list it."""
    receiving.store(1)
    receiving.clock.advance(10_000)
    take(receiving, T1)
    receiving.store(2, cut_time_ms=T1 - 1)
    receiving.writer.close(receiving.accepted)
    receiving.clock.advance(LEASE_MS + 1_000)
    with Ledger.open(new_url, clock=receiving.clock) as ledger:
        recover(NAME, ledger, receiving.storage.below(NAME), definition=receiving.stream)
        assert [(time.batch_time_ms, time.records) for time in ledger.blocks.unclaimed(NAME)] == [(T2, 2)]
        assert [block.info.records for block in ledger.allocations.blocks_of(NAME, T1)] == [1]
