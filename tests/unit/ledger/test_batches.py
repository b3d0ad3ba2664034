"""Sealing, allocation, attempts, and the ends of batches."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import select

from headrace.blocks import OffsetRange
from headrace.clock import time_text
from headrace.ledger import AttemptState, BatchState, EventKind
from headrace.ledger.database import Database
from headrace.ledger.errors import (
    AllocationConflictError,
    AlreadyCompletedError,
    AttemptFencedError,
    BatchNotFoundError,
    BatchStateError,
    BatchTimeError,
    NotItsTurnError,
    OutputsMissingError,
    SlotBusyError,
)
from headrace.ledger.tables import totals

NOW_MS = 1_700_000_000_000
T1, T2, T3 = NOW_MS + 1000, NOW_MS + 2000, NOW_MS + 3000
RUN = {"holder": "task", "way": "connect", "lease_ms": 5_000}


@pytest.fixture
def filled(world: Any) -> Any:
    """Blocks in T1 and T2, at a time when both have come."""
    world.add({0: (0, 10), 1: (0, 5)})
    world.add({0: (10, 20)})
    world.clock.advance(1000)
    world.add({0: (20, 30)})
    world.clock.advance(1500)
    return world


def test_sealing_moves_forward_only(world: Any) -> None:
    world.clock.advance(3000)
    assert world.ledger.allocations.seal("flights", T2) == T2
    assert world.ledger.allocations.seal("flights", T1) == T2
    assert world.ledger.streams.get("flights").sealed_until_ms == T2


def test_a_time_off_the_grid_or_in_the_future_is_refused(world: Any) -> None:
    with pytest.raises(BatchTimeError, match=f"next one is {time_text(T1)}"):
        world.ledger.allocations.seal("flights", NOW_MS + 1)
    # A scheduler's clock may be a little ahead of the ledger's.
    world.ledger.allocations.seal("flights", NOW_MS + 5000)
    with pytest.raises(BatchTimeError, match="is 6000 ms in the future"):
        world.ledger.allocations.seal("flights", NOW_MS + 6000)


def test_a_batch_takes_exactly_its_blocks(filled: Any) -> None:
    batch = filled.allocate(T1)
    assert (batch.state, batch.blocks, batch.records, batch.payload_bytes) == (BatchState.ALLOCATED, 2, 25, 250)
    assert (batch.interval_ms, batch.revision, batch.attempt, batch.code_version) == (1000, 1, 0, None)
    inputs = filled.ledger.batches.inputs("flights", T1)
    assert [
        (row.partition.partition, row.from_offset, row.until_offset, row.records, row.blocks) for row in inputs
    ] == [
        (0, 0, 20, 20, 2),
        (1, 0, 5, 5, 1),
    ]
    assert filled.allocate(T2).records == 10
    assert filled.ledger.batches.inputs("flights", T1) == inputs
    assert [(row.from_offset, row.until_offset) for row in filled.ledger.batches.inputs("flights", T2)] == [(20, 30)]
    (event,) = filled.ledger.events.of_batch("flights", T2)
    assert event.kind == EventKind.BATCH_ALLOCATED


def test_allocating_again_changes_nothing(filled: Any) -> None:
    first = filled.allocate(T1)
    assert filled.allocate(T1, manifest_uri="other", blocks_expected=99) == first
    assert len(filled.ledger.events.of_batch("flights", T1)) == 1


def test_order_of_allocation_does_not_matter(filled: Any) -> None:
    assert filled.allocate(T2).records == 10
    assert filled.allocate(T1).records == 25


def test_an_empty_batch_is_a_batch(world: Any) -> None:
    world.clock.advance(1000)
    assert world.allocate(T1).blocks == 0
    assert world.add({0: (0, 1)}, cut_time_ms=NOW_MS).batch_time_ms == T2
    assert world.complete(T1).state is BatchState.COMPLETED


def test_a_manifest_drawn_up_before_the_seal_is_refused(filled: Any) -> None:
    with pytest.raises(AllocationConflictError, match="has 2 blocks, its manifest 1"):
        filled.ledger.allocations.allocate("flights", T1, manifest_uri="m", manifest_sha256="0", blocks_expected=1)
    assert filled.ledger.batches.find("flights", T1) is None
    # Refused, the transaction left the time unsealed too.
    assert filled.ledger.streams.get("flights").sealed_until_ms == 0


def test_a_batch_absorbs_earlier_times_that_nobody_claimed(filled: Any) -> None:
    batch = filled.allocate(T2, absorb=[T1], blocks_expected=3)
    assert (batch.absorbed, batch.blocks, batch.records) == ((T1,), 3, 35)
    assert [block.batch_time_ms for block in filled.ledger.allocations.blocks_of("flights", T2)] == [T1, T1, T2]
    absorbed = filled.allocate(T1)
    assert (absorbed.state, absorbed.absorbed_by_ms, absorbed.blocks) == (BatchState.ABSORBED, T2, 0)
    assert filled.ledger.blocks.unclaimed("flights") == []
    with pytest.raises(BatchStateError, match="Run that one"):
        filled.ledger.attempts.begin("flights", T1, **RUN)


def test_a_claimed_or_later_time_is_not_absorbed(filled: Any) -> None:
    filled.allocate(T1)
    for times in ([T1], [T3]):
        with pytest.raises(AllocationConflictError):
            filled.allocate(T2, absorb=times, blocks_expected=3)


def test_batches_are_listed_by_state_newest_first(filled: Any) -> None:
    filled.allocate(T1)
    filled.allocate(T2)
    filled.complete(T1)
    batches = filled.ledger.batches
    assert [row.batch_time_ms for row in batches.page("flights")] == [T2, T1]
    assert [row.batch_time_ms for row in batches.page("flights", states=["completed"])] == [T1]
    both = batches.page("flights", states=[BatchState.COMPLETED, BatchState.ALLOCATED], oldest_first=True)
    assert [row.batch_time_ms for row in both] == [T1, T2]
    assert [row.batch_time_ms for row in batches.page("flights", limit=1)] == [T2]
    assert [row.batch_time_ms for row in batches.page("flights", before_ms=T2)] == [T1]


def test_an_offset_leads_to_its_batch(filled: Any) -> None:
    filled.allocate(T1)
    filled.allocate(T2)
    find = filled.ledger.batches.containing
    found = [find("flights", "kafka", filled.partitions[0], offset) for offset in (0, 19, 20, 30)]
    assert [row and row.batch_time_ms for row in found] == [T1, T1, T2, None]


def test_an_attempt_completes_when_every_output_has_reported(filled: Any) -> None:
    filled.allocate(T1)
    attempt = pickle.loads(pickle.dumps(filled.ledger.attempts.begin("flights", T1, **RUN)))  # noqa: S301
    assert (attempt.number, attempt.outputs) == (1, ("index",))
    with pytest.raises(OutputsMissingError, match="index"):
        filled.ledger.attempts.complete(attempt)
    with pytest.raises(BatchStateError, match="no output 'other'"):
        filled.ledger.attempts.record_output(attempt, "other", {})
    filled.ledger.attempts.record_output(attempt, "index", {"indexed": 1})
    filled.ledger.attempts.record_output(attempt, "index", {"indexed": 25})
    filled.clock.advance(10)
    batch = filled.ledger.attempts.complete(attempt)
    assert (batch.state, batch.completed_at_ms - batch.started_at_ms) == (BatchState.COMPLETED, 10)
    assert filled.ledger.attempts.complete(attempt) == batch
    (output,) = filled.ledger.attempts.outputs("flights", T1)
    assert (output.output_id, output.counts) == ("index", {"indexed": 25})
    kinds = [event.kind for event in filled.ledger.events.of_batch("flights", T1)]
    assert kinds == [
        EventKind.BATCH_ALLOCATED,
        EventKind.BATCH_STARTED,
        EventKind.OUTPUT_STARTED,
        EventKind.OUTPUT_COMPLETED,
        EventKind.OUTPUT_COMPLETED,
        EventKind.BATCH_COMPLETED,
    ]


def test_a_completed_batch_runs_again_only_by_force(filled: Any) -> None:
    filled.allocate(T1)
    filled.complete(T1)
    batches = filled.ledger.batches
    with pytest.raises(AlreadyCompletedError) as refused:
        filled.ledger.attempts.begin("flights", T1, **RUN)
    assert refused.value.batch.attempt == 1
    assert filled.ledger.attempts.begin("flights", T1, **RUN, force=True).number == 2
    assert batches.get("flights", T1).completed_at_ms is None


def test_a_newer_attempt_fences_the_older(filled: Any) -> None:
    filled.allocate(T1)
    old = filled.ledger.attempts.begin("flights", T1, **RUN)
    new = filled.ledger.attempts.begin("flights", T1, holder="second try", way="submit", lease_ms=5_000)
    for step in (
        lambda: filled.ledger.attempts.renew(old),
        lambda: filled.ledger.attempts.record_output(old, "index", {}),
        lambda: filled.ledger.attempts.complete(old),
        lambda: filled.ledger.attempts.fail(old, "late"),
    ):
        with pytest.raises(AttemptFencedError):
            step()
    with pytest.raises(OutputsMissingError):
        filled.ledger.attempts.complete(new)
    filled.ledger.attempts.record_output(new, "index", {"indexed": 25})
    filled.ledger.attempts.complete(new)
    states = [(row.number, row.way, row.state) for row in filled.ledger.attempts.of_batch("flights", T1)]
    assert states == [(1, "connect", AttemptState.FENCED), (2, "submit", AttemptState.COMPLETED)]


def test_a_failed_attempt_leaves_the_batch_to_the_next(filled: Any) -> None:
    filled.allocate(T1)
    batches = filled.ledger.batches
    failed = filled.ledger.attempts.fail(filled.ledger.attempts.begin("flights", T1, **RUN), "boom")
    assert (failed.state, failed.error) == (BatchState.FAILED, "boom")
    assert filled.complete(T1).attempt == 2
    assert batches.get("flights", T1).error is None


def test_renewal_extends_the_lease_and_adds_attributes(filled: Any) -> None:
    filled.allocate(T1)
    attempt = filled.ledger.attempts.begin("flights", T1, **RUN, attributes={"pid": 1})
    filled.clock.advance(4_000)
    assert filled.ledger.attempts.renew(attempt, attributes={"ui": "x"}) == filled.clock.now_ms() + 5_000
    (row,) = filled.ledger.attempts.of_batch("flights", T1)
    assert row.attributes == {"pid": 1, "ui": "x"}
    assert row.alive(filled.clock.now_ms())


def test_slots_are_held_by_live_leases(filled: Any) -> None:
    filled.allocate(T1)
    filled.allocate(T2)
    filled.ledger.attempts.begin("flights", T1, **RUN)
    with pytest.raises(SlotBusyError) as refused:
        filled.ledger.attempts.begin("flights", T2, **RUN)
    assert refused.value.busy == (T1,)
    filled.clock.advance(5_001)
    assert filled.ledger.attempts.begin("flights", T2, **RUN).number == 1


def test_a_range_run_again_takes_no_slot_from_due_batches(filled: Any) -> None:
    filled.allocate(T1)
    filled.allocate(T2)
    attempts = filled.ledger.attempts
    again = {"attributes": {"range": {}}, "force": True}
    first = attempts.begin("flights", T1, **RUN, **again)
    due = attempts.begin("flights", T2, **RUN)
    attempts.fail(first, "once more")
    attempts.begin("flights", T1, **RUN, **again)
    attempts.renew(due)


def test_more_slots_run_more_batches(build: Callable[..., Any]) -> None:
    world = build(max_concurrent_batches=2)
    world.clock.advance(3000)
    for time_ms in (T1, T2, T3):
        world.allocate(time_ms)
    world.ledger.attempts.begin("flights", T1, **RUN)
    world.ledger.attempts.begin("flights", T3, **RUN)
    with pytest.raises(SlotBusyError):
        world.ledger.attempts.begin("flights", T2, **RUN)


def test_an_ordered_stream_waits_for_batches_and_unclaimed_times(build: Callable[..., Any]) -> None:
    """It waits for the earlier ones of both."""
    world = build(ordered=True, max_concurrent_batches=4)
    world.add({0: (0, 1)})
    world.clock.advance(2000)
    world.allocate(T2)
    with pytest.raises(NotItsTurnError) as unclaimed:
        world.ledger.attempts.begin("flights", T2, **RUN)
    assert unclaimed.value.busy == (T1,)
    assert "abandon" not in str(unclaimed.value), "what nobody has claimed cannot be abandoned"
    world.allocate(T1)
    with pytest.raises(NotItsTurnError, match=f"`headrace batches abandon flights {time_text(T1)} --reason WHY`"):
        world.ledger.attempts.begin("flights", T2, **RUN)
    world.complete(T1)
    assert world.ledger.attempts.begin("flights", T2, **RUN).number == 1


def test_an_unknown_batch_is_named(world: Any) -> None:
    with pytest.raises(BatchNotFoundError, match=time_text(T1)):
        world.ledger.attempts.begin("flights", T1, **RUN)
    with pytest.raises(BatchNotFoundError):
        world.ledger.batches.get("flights", T1)


def test_only_a_completed_batch_is_checkpointed(filled: Any) -> None:
    before = filled.allocate(T1)
    batches = filled.ledger.batches
    batches.mark_checkpointed("flights", [before.filed("r/1", 1)])
    noted = batches.get("flights", T1)
    assert (noted.result, noted.checkpointed_at_ms) == (before.change, None)
    batch = filled.complete(T1, checkpoint=False)
    assert batch.change > before.change
    assert [row.batch_time_ms for row in filled.ledger.results.behind("flights")] == [T1]
    batches.mark_checkpointed("flights", [batch.filed("r/2", 7)])
    noted = batches.get("flights", T1)
    assert (noted.checkpoint_uri, noted.checkpointed_at_ms) == ("r/2", 7)
    assert noted == batch.filed("r/2", 7)
    # A writer that was late does not take its place.
    batches.mark_checkpointed("flights", [before.filed("r/1", 8)])
    assert batches.get("flights", T1) == noted
    assert filled.ledger.results.behind("flights") == []


def test_a_batch_changed_during_its_result_is_not_checkpointed(filled: Any) -> None:
    """The batch changed while its result was written."""
    filled.allocate(T1)
    filled.allocate(T2)
    batch, other = filled.complete(T1, checkpoint=False), filled.complete(T2, checkpoint=False)
    filled.ledger.attempts.begin("flights", T1, **RUN, force=True)
    batches = filled.ledger.batches
    batches.mark_checkpointed("flights", [batch.filed("r/1", 7), other.filed("r/2", 7)])
    noted = batches.get("flights", T1)
    assert (noted.result, noted.checkpointed_at_ms) == (batch.change, None)
    assert [row.batch_time_ms for row in filled.ledger.results.behind("flights")] == [T1]
    assert batches.get("flights", T2).checkpoint_uri == "r/2"
    kinds = [EventKind.BATCH_CHECKPOINTED]
    events = filled.ledger.events.page("flights", kinds=kinds)
    assert [(event.batch_time_ms, event.payload) for event in events] == [(T2, {"uri": "r/2"})]


def test_the_file_of_a_removed_batch_is_passed_over(filled: Any) -> None:
    filled.allocate(T1)
    batch = filled.complete(T1, checkpoint=False)
    gone = replace(batch, batch_time_ms=T2)
    filled.ledger.batches.mark_checkpointed("flights", [gone.filed("r/2", 7), batch.filed("r/1", 7)])
    assert filled.ledger.batches.get("flights", T1).checkpoint_uri == "r/1"


def test_the_files_of_many_batches_are_noted_in_one_transaction(filled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    filled.allocate(T1)
    filled.allocate(T2)
    held = [filled.complete(time_ms, checkpoint=False).filed("r", 7) for time_ms in (T1, T2)]
    database = filled.ledger.batches._database
    writes = []

    def counted(stream: str) -> Any:
        writes.append(stream)
        return Database.write_stream(database, stream)

    monkeypatch.setattr(database, "write_stream", counted)
    filled.ledger.batches.mark_checkpointed("flights", held)
    assert writes == ["flights"]


def test_an_abandoned_batch_is_a_gap(filled: Any) -> None:
    filled.allocate(T1)
    batches = filled.ledger.batches
    attempt = filled.ledger.attempts.begin("flights", T1, **RUN)
    assert batches.abandon("flights", T1, "poison").state is BatchState.ABANDONED
    assert batches.abandon("flights", T1, "again").error == "poison"
    with pytest.raises(AttemptFencedError):
        filled.ledger.attempts.renew(attempt)
    with pytest.raises(BatchStateError, match="poison"):
        filled.ledger.attempts.begin("flights", T1, **RUN, force=True)
    gaps = {(gap.partition.partition, gap.from_offset, gap.until_offset) for gap in filled.ledger.gaps.page("flights")}
    assert gaps == {(0, 0, 20), (1, 0, 5)}
    assert filled.ledger.gaps.page("flights")[0].batch_time_ms == T1


def test_an_abandoned_batch_with_vanished_blocks_is_one_gap(filled: Any) -> None:
    """Each offset counts once."""
    ledger, first = filled.ledger, OffsetRange(filled.partitions[0], 0, 10, 10)
    filled.allocate(T1)
    lost = [("kafka", first)]
    ledger.gaps.add_vanished("flights", T1, lost)
    ledger.batches.abandon("flights", T1, "poison")
    # A later batch may read the abandoned one again, for its state.
    ledger.gaps.add_vanished("flights", T1, lost)
    gaps = ledger.gaps.page("flights")
    assert {(gap.partition.partition, gap.from_offset, gap.until_offset) for gap in gaps} == {(0, 0, 20), (1, 0, 5)}
    assert len(gaps) == 2
    assert {gap.reason for gap in gaps} == {"batch abandoned: poison"}
    with ledger.batches._database.read() as connection:
        total = connection.execute(select(totals.c.value).where(totals.c.name == "gap_offsets")).scalar_one()
    assert total == 25


def test_nul_characters_in_errors_and_counts_are_replaced(filled: Any) -> None:
    ledger = filled.ledger
    filled.allocate(T1)
    attempt = ledger.attempts.begin("flights", T1, **RUN)
    # A backslash before "u0000" is no NUL, neither after a backslash nor after a NUL.
    counts = {"a\0": "\0\0", "path": r"C:\u0000", "both": "\0" + r"\u0000"}
    failed = ledger.attempts.fail(attempt, "a\0byte", {"index": "no\0"}, {"index": counts})
    (output,) = ledger.attempts.outputs("flights", T1)
    assert (failed.error, output.error) == ("a\ufffdbyte", "no\ufffd")
    assert output.counts == {"a\ufffd": "\ufffd\ufffd", "path": r"C:\u0000", "both": "\ufffd" + r"\u0000"}
    ledger.positions.fail(filled.receiver, filled.partitions[0], "a\0byte")
    assert {row.error for row in ledger.positions.all("flights")} == {"a\ufffdbyte", None}
    assert "a\ufffdbyte" in {event.payload.get("error") for event in ledger.events.page("flights")}


def test_lone_surrogates_in_errors_and_counts_are_replaced(filled: Any) -> None:
    """A value of JSON may have one, and the name of a file: str(path) has them for bytes that are no UTF-8."""
    ledger = filled.ledger
    filled.allocate(T1)
    attempt = ledger.attempts.begin("flights", T1, **RUN)
    failed = ledger.attempts.fail(attempt, "a\ud83d name", {"index": "no\udce9"}, {"index": {"a\ud83d": "\udce9 é"}})
    (output,) = ledger.attempts.outputs("flights", T1)
    assert (failed.error, output.error, output.counts) == ("a\ufffd name", "no\ufffd", {"a\ufffd": "\ufffd é"})
    ledger.receivers.report_error(filled.receiver, "caf\udce9", "in caf\udce9")
    (row,) = ledger.receivers.all("flights")
    assert (row.last_error, row.last_error_stack) == ("caf\ufffd", "in caf\ufffd")
    assert "caf\ufffd" in {event.payload.get("error") for event in ledger.events.page("flights")}


def test_secrets_in_errors_and_events_are_hidden(filled: Any) -> None:
    ledger = filled.ledger
    secret = "client_secret=S3CR3T"
    filled.allocate(T1)
    attempt = ledger.attempts.begin("flights", T1, **RUN)
    failed = ledger.attempts.fail(attempt, secret, {"index": secret}, {})
    (output,) = ledger.attempts.outputs("flights", T1)
    ledger.receivers.report_error(filled.receiver, secret, f"Traceback\n{secret}")
    (row,) = ledger.receivers.all("flights")
    ledger.positions.fail(filled.receiver, filled.partitions[0], secret)
    positions = [position.error for position in ledger.positions.all("flights")]
    stored = (failed.error, output.error, row.last_error, row.last_error_stack, positions)
    events = [event.payload for event in ledger.events.page("flights")]
    assert "S3CR3T" not in repr((stored, events))
    assert repr(stored).count("client_secret=***") == 5
    assert "client_secret=***" in repr(events)


def test_a_completed_batch_is_not_abandoned(filled: Any) -> None:
    filled.allocate(T1)
    filled.complete(T1)
    with pytest.raises(BatchStateError):
        filled.ledger.batches.abandon("flights", T1, "no")


def test_a_batch_takes_all_its_blocks_however_many(world: Any) -> None:
    count = 600
    for number in range(count):
        world.add({number % 3: (number // 3, number // 3 + 1)})
    (waiting,) = world.ledger.blocks.unclaimed("flights")
    assert waiting.blocks == count
    world.clock.advance(2_000)
    batch = world.allocate(waiting.batch_time_ms)
    assert (batch.blocks, batch.records) == (count, count)
    assert world.ledger.blocks.unclaimed("flights") == []
    stored = world.ledger.allocations.blocks_of("flights", waiting.batch_time_ms)
    assert [block.info.sequence for block in stored] == list(range(count))
