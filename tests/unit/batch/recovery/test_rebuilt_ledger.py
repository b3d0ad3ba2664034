"""A ledger that is lost is rebuilt as it was, whatever its stream had gone through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.unit.batch.conftest import T1, T2, Receiving, take
from tests.unit.batch.life import KINDS, LEASE_MS, NAME, Life
from tests.unit.batch.recovery.conftest import rebuild
from tests.unit.batch.recovery.ledger_contents import all_blocks, check_whole, contents, holes

from headrace.batch.allocation import allocate, restore_manifest
from headrace.batch.checkpoint import checkpoint_paths, read_newest
from headrace.batch.recover import RecoveryRefusedError, Step, recover
from headrace.fsck.stream_check import check_stream
from headrace.ledger import BatchState, Ledger
from headrace.ledger.errors import LeaseLostError
from headrace.stream import Limits, Stream


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
    life.settle()
    life.finish()
    life.checkpoint()
    life.checkpoint()
    expected = contents(life.ledger)
    rebuilt = rebuild(life, new_url)
    rebuilt_contents = contents(rebuilt)
    for table in expected:
        assert rebuilt_contents[table] == expected[table], table
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
    assert all_blocks(before).keys() <= all_blocks(rebuilt).keys()
    # A writer's last block, which the ledger had not accepted: it is in the log, and nothing else has its offsets.
    added = [block for handle, block in all_blocks(rebuilt).items() if handle not in all_blocks(before)]
    newest: dict[Any, int] = {}
    for block in all_blocks(before).values():
        writer = (block.info.receiver, block.info.epoch)
        newest[writer] = max(newest.get(writer, -1), block.info.sequence)
    for block in added:
        assert block.info.sequence > newest.get((block.info.receiver, block.info.epoch), -1)
        assert not before.batches.find(NAME, block.batch_time_ms)
    assert contents(rebuilt)["batch_inputs"] == contents(before)["batch_inputs"]
    expected = {(row.input_id, row.partition): row.next_offset for row in before.positions.all(NAME)}
    for block in sorted(added, key=lambda block: block.block_id):
        for r in block.info.ranges:
            place = (block.info.receiver.input_id, r.partition)
            assert r.from_offset >= expected[place]
            expected[place] = r.until_offset
    # Where only control records follow, they are read past again.
    positions = {(row.input_id, row.partition): row.next_offset for row in rebuilt.positions.all(NAME)}
    assert all(positions[place] <= expected[place] for place in positions)
    check_whole(rebuilt)
    # What was passed over before the checkpoint is; since then nothing was, and nothing is.
    assert set(holes(rebuilt)) <= set(holes(before))
    assert contents(rebuilt)["gaps"] == contents(before)["gaps"]
    for batch in before.batches.page(NAME, 1000):
        answer = rebuilt.batches.get(NAME, batch.batch_time_ms)
        assert (answer.records, answer.blocks, answer.manifest_sha256) == (
            batch.records,
            batch.blocks,
            batch.manifest_sha256,
        )
        assert answer.state is batch.state or not batch.checkpointed_at_ms


def test_what_was_undecided_is_stored_once(live: Callable[..., Life], new_url: str) -> None:
    life = live(3)
    life.leave_undecided()
    life.ledger = rebuild(life, new_url)
    life.receivers.clear()
    life.start_job()
    for _ in range(40):
        life.step()
    life.checkpoint()
    expected = contents(life.ledger)
    # And once more: the second rebuild finds what the first one had to decide about, beside what was read since.
    rebuilt_contents = contents(rebuild(life, new_url.replace("new", "again")))
    for table in ("positions", "blocks", "batch_inputs", "unclaimed_times"):
        assert rebuilt_contents[table] == expected[table], table


def test_a_damaged_newest_checkpoint_falls_back_to_the_former(live: Callable[..., Life], new_url: str) -> None:
    life = live(5)
    life.finish()
    life.checkpoint()
    folder = life.storage.below(NAME)
    life.checkpoint()
    newest = checkpoint_paths(folder)[-1]
    folder.write_atomically(newest, folder.read(newest)[:-30])
    expected = contents(life.ledger)
    life.clock.advance(LEASE_MS + 1_000)
    with Ledger.open(new_url, clock=life.clock) as ledger:
        report = recover(NAME, ledger, folder, definition=life.stream)
        assert contents(ledger) == expected
    assert [notice for notice in report.notices if newest in notice]
    assert Step.CHECKPOINT_WRITTEN in report.steps


@pytest.mark.parametrize("harm", ["missing", "damaged"])
def test_without_a_readable_checkpoint_its_definition_is_enough(
    live: Callable[..., Life], new_url: str, harm: str
) -> None:
    life = live(6)
    folder = life.storage.below(NAME)
    for path in checkpoint_paths(folder):
        if harm == "damaged":
            folder.write_atomically(path, folder.read(path)[:-30])
        else:
            folder.delete(path)
    life.clock.advance(LEASE_MS + 1_000)
    with Ledger.open(new_url, clock=life.clock) as ledger:
        with pytest.raises(RecoveryRefusedError, match="--definition"):
            recover(NAME, ledger, folder)
        recover(NAME, ledger, folder, definition=life.stream)
        check_whole(ledger)
        assert all_blocks(ledger).keys() <= all_blocks(life.ledger).keys()
        assert contents(ledger)["batch_inputs"] == contents(life.ledger)["batch_inputs"]


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


def test_the_definition_comes_back_as_it_was_changed_last(live: Callable[..., Life], new_url: str) -> None:
    life = live(11, steps=20)
    life.stream = life.stream.model_copy(update={"limits": Limits(max_concurrent_batches=7, max_rate=5)})
    life.register(life.ledger)
    life.checkpoint()
    row = rebuild(life, new_url).streams.get(NAME)
    assert (Stream.from_json(row.definition), row.revision, row.max_concurrent_batches) == (life.stream, 2, 7)


def test_times_after_the_checkpoint_are_by_the_newest_definition(live: Callable[..., Life], new_url: str) -> None:
    """No checkpoint says which times the batch absorbed; the older definition, which batches name, would say none."""
    life = live(11, steps=20, coalesce=False)
    life.finish()
    life.stream = life.stream.model_copy(update={"coalesce": True})
    life.register(life.ledger)
    life.checkpoint()
    assert [each["revision"] for each in read_newest(life.storage.below(NAME)).state["revisions"]] == [1, 2]
    for waiting in (1, 2):
        while len(life.ledger.blocks.unclaimed(NAME)) < waiting:
            life.store()
        life.clock.advance(10_000)
    last = life.times()[-1]
    absorbed = allocate(life.context, last, takes_over=True).batch.absorbed
    assert absorbed
    assert rebuild(life, new_url).batches.get(NAME, last).absorbed == absorbed


def test_a_block_that_came_after_the_seal_keeps_its_later_time(
    live: Callable[..., Life], new_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = live(0, steps=0)
    add = life.ledger.blocks.add_all

    def add_late(*block: Any) -> Any:
        life.clock.advance(40_000)
        life.ledger.allocations.seal(NAME, life.clock.now_ms() // 10_000 * 10_000)
        return add(*block)

    with monkeypatch.context() as patch:
        patch.setattr(life.ledger.blocks, "add_all", add_late)
        while not all_blocks(life.ledger):
            life.store()
    for _ in range(10):
        life.store()
    life.checkpoint()
    expected = contents(life.ledger)
    late = min(all_blocks(life.ledger).values(), key=lambda block: block.block_id)
    assert late.batch_time_ms > life.ledger.streams.get(NAME).batch_time_after(late.info.cut_time_ms)
    rebuilt_contents = contents(rebuild(life, new_url))
    assert (rebuilt_contents["blocks"], rebuilt_contents["unclaimed_times"]) == (
        expected["blocks"],
        expected["unclaimed_times"],
    )


def test_a_block_too_late_for_its_batch_waits_for_the_next(receiving: Receiving, new_url: str) -> None:
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
