"""A batch of several outputs: each is begun, recorded, failed and run again by itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from headrace.ledger import AttemptState, BatchState, EventKind
from headrace.ledger.batches.tables import Attempt, BatchRow
from headrace.ledger.errors import (
    AlreadyCompletedError,
    AttemptFencedError,
    BatchStateError,
    NotItsTurnError,
    OutputRenamedError,
    SlotBusyError,
    StepsLostError,
)
from headrace.ledger.states import STATE_STEP as LEDGER_STATE_STEP
from headrace.stream.state import STATE_STEP

NOW_MS = 1_700_000_000_000
T1, T2, T3 = NOW_MS + 1000, NOW_MS + 2000, NOW_MS + 3000
RUN = {"holder": "task", "way": "connect", "lease_ms": 5_000}
TWO = ("index", "files")


class Batches:
    """A stream whose batches T1 to T3 are allocated, and what is done to them."""

    def __init__(self, world: Any) -> None:
        self.world = world
        self.ledger = world.ledger
        self.batches = world.ledger.batches
        self.attempts = world.ledger.attempts
        world.add({0: (0, 10)})
        world.clock.advance(3500)
        for time_ms in (T1, T2, T3):
            world.allocate(time_ms)

    def begin(self, *outputs: str, at: int = T1, **options: Any) -> Attempt:
        return self.ledger.attempts.begin("flights", at, **(RUN | options), outputs=outputs or None)

    def finish(self, attempt: Attempt, version: str | None = None) -> BatchRow:
        for output in attempt.outputs:
            self.ledger.attempts.record_output(attempt, output, {"by": attempt.number})
        return self.ledger.attempts.complete(attempt, code_version=version)

    def state(self, at: int = T1) -> BatchState:
        return self.batches.get("flights", at).state

    def outputs(self, at: int = T1) -> dict[str, tuple[int, AttemptState]]:
        return {row.output_id: (row.attempt, row.state) for row in self.ledger.attempts.outputs("flights", at)}

    def events(self, kind: EventKind, at: int = T1) -> int:
        return [event.kind for event in self.ledger.events.of_batch("flights", at)].count(kind)

    def register(self, *steps: str, **options: Any) -> None:
        settings = {"batch_interval_ms": 1000, "block_interval_ms": 200, "outputs": steps} | options
        self.ledger.streams.register("flights", '{"changed": true}', **settings)


@pytest.fixture
def two(build: Callable[..., Any]) -> Batches:
    return Batches(build(outputs=TWO))


def test_outputs_run_side_by_side_and_the_last_ends_the_batch(two: Batches) -> None:
    index, files = two.begin("index"), two.begin("files")
    assert (index.number, files.number) == (1, 2)
    assert two.finish(index, "v1").state is BatchState.RUNNING
    two.world.clock.advance(10)
    batch = two.finish(files, "v2")
    assert (batch.state, batch.code_version, batch.steps) == (BatchState.COMPLETED, "v2", TWO)
    # As long as from the first one's beginning.
    assert batch.completed_at_ms - batch.started_at_ms == 10
    assert two.outputs() == {"index": (1, AttemptState.COMPLETED), "files": (2, AttemptState.COMPLETED)}
    assert {row.output_id: row.code_version for row in two.attempts.outputs("flights", T1)} == {
        "index": "v1",
        "files": "v2",
    }
    (completed,) = [e for e in two.ledger.events.of_batch("flights", T1) if e.kind == EventKind.BATCH_COMPLETED]
    assert completed.payload["outputs"] == {"index": {"by": 1}, "files": {"by": 2}}


def test_one_after_the_other_leaves_the_batch_to_the_next(two: Batches) -> None:
    assert two.finish(two.begin("index")).state is BatchState.ALLOCATED
    started_ms = two.batches.get("flights", T1).started_at_ms
    two.world.clock.advance(100)
    assert two.finish(two.begin("files")).started_at_ms == started_ms
    assert two.state() is BatchState.COMPLETED


def test_the_output_that_ends_last_hears_of_the_completion(two: Batches) -> None:
    """Both outputs have recorded before."""
    index, files = two.begin("index"), two.begin("files")
    for attempt in (index, files):
        two.attempts.record_output(attempt, attempt.outputs[0], {})
    assert two.attempts.complete(index).state is BatchState.RUNNING
    assert two.attempts.complete(files).state is BatchState.COMPLETED


def test_a_failed_output_is_run_again_alone(two: Batches) -> None:
    index, files = two.begin("index"), two.begin("files")
    assert two.attempts.fail(files, "disk full").state is BatchState.RUNNING
    failed = two.finish(index)
    assert (failed.state, failed.error) == (BatchState.FAILED, "disk full")
    assert two.outputs() == {"index": (1, AttemptState.COMPLETED), "files": (2, AttemptState.FAILED)}
    assert two.attempts.outputs("flights", T1)[0].error == "disk full"
    again = two.begin()
    assert again.outputs == ("files",)
    assert two.finish(again).error is None
    assert two.outputs() == {"index": (1, AttemptState.COMPLETED), "files": (3, AttemptState.COMPLETED)}


def test_an_attempt_that_fails_keeps_what_it_recorded(two: Batches) -> None:
    both = two.begin()
    two.attempts.record_output(both, "index", {"indexed": 10})
    assert two.attempts.fail(both, "boom").state is BatchState.FAILED
    assert two.begin().outputs == ("files",)


def test_an_output_with_a_record_is_not_run_again_unasked(two: Batches) -> None:
    two.finish(two.begin("index"))
    with pytest.raises(AlreadyCompletedError, match="recorded index") as refused:
        two.begin("index")
    assert refused.value.batch.state is BatchState.ALLOCATED
    assert two.begin("index", "files").outputs == ("files",)


def test_what_shares_an_output_is_fenced_and_nothing_else(two: Batches) -> None:
    index, files = two.begin("index"), two.begin("files")
    newer = two.begin("files", holder="second try")
    with pytest.raises(AttemptFencedError):
        two.attempts.record_output(files, "files", {})
    two.finish(index)
    assert two.finish(newer).state is BatchState.COMPLETED
    assert [row.state for row in two.attempts.of_batch("flights", T1)] == [
        AttemptState.COMPLETED,
        AttemptState.FENCED,
        AttemptState.COMPLETED,
    ]


def test_a_zombie_that_lost_one_output_keeps_the_others_record(two: Batches) -> None:
    zombie = two.begin()
    two.attempts.record_output(zombie, "index", {"by": 1})
    two.world.clock.advance(6_000)
    newer = two.begin()
    assert newer.outputs == ("files",)
    for step in (
        lambda: two.attempts.record_output(zombie, "files", {}),
        lambda: two.attempts.record_output(zombie, "index", {}),
        lambda: two.attempts.complete(zombie),
        lambda: two.attempts.fail(zombie, "late"),
        lambda: two.attempts.renew(zombie),
    ):
        with pytest.raises(AttemptFencedError):
            step()
    assert two.finish(newer).state is BatchState.COMPLETED


def test_an_output_is_never_held_by_an_attempt_that_has_ended(two: Batches) -> None:
    left = two.begin()
    with two.batches._database.write() as connection:
        connection.exec_driver_sql("UPDATE batch_attempts SET state = 'completed', ended_at_ms = 1")
    again = two.begin()
    assert (left.outputs, again.outputs) == (TWO, TWO)
    assert two.finish(again).state is BatchState.COMPLETED


def test_what_a_fenced_attempt_left_is_to_be_run(two: Batches) -> None:
    two.begin()
    assert two.finish(two.begin("files")).state is BatchState.ALLOCATED
    assert two.begin().outputs == ("index",)


def test_a_lost_attempt_does_not_hide_the_failure_of_another(two: Batches) -> None:
    two.begin("index")
    files = two.begin("files")
    two.world.clock.advance(6_000)
    assert two.attempts.fail(files, "boom").state is BatchState.FAILED


def test_a_lost_attempt_alone_is_running_still(two: Batches) -> None:
    index, files = two.begin("index"), two.begin("files")
    two.world.clock.advance(6_000)
    assert two.finish(files).state is BatchState.RUNNING
    # It was only slow.
    assert two.finish(index).state is BatchState.COMPLETED


def test_a_recorded_batch_whose_last_attempt_died_completes(two: Batches) -> None:
    two.finish(two.begin("index"))
    died = two.begin("files")
    two.attempts.record_output(died, "files", {})
    with pytest.raises(AlreadyCompletedError) as refused:
        two.begin("files")
    assert refused.value.batch.state is BatchState.COMPLETED
    assert two.events(EventKind.BATCH_COMPLETED) == 1
    # Had it not died, nothing would be different.
    assert two.attempts.complete(died).state is BatchState.COMPLETED
    assert two.events(EventKind.BATCH_COMPLETED) == 1


def test_an_output_run_by_force_has_no_record_until_it_is_done(two: Batches) -> None:
    two.finish(two.begin())
    again = two.begin("files", force=True)
    assert again.outputs == ("files",)
    batch = two.batches.get("flights", T1)
    assert (batch.state, batch.completed_at_ms) == (BatchState.RUNNING, None)
    assert two.outputs() == {"index": (1, AttemptState.COMPLETED)}
    two.attempts.fail(again, "boom")
    assert two.state() is BatchState.FAILED
    assert two.begin().outputs == ("files",)


def test_results_of_repeated_attempts_are_found(two: Batches) -> None:
    """By what their counts contain, each value once: of batches, or of replays too."""

    def record(at: int, place: Any, replay: str = "") -> None:
        named: dict[str, Any] = {"target": replay, "definition": "{}"}
        begun = (
            two.ledger.replays.begin("flights", at, outputs=["index"], **named, **RUN)
            if replay
            else two.begin("index", at=at, force=True)
        )
        two.attempts.record_output(begun, "index", {"place": place})
        two.attempts.complete(begun)

    def found(**options: Any) -> list[Any]:
        asked = {"until_ms": T3} | options
        return sorted(two.attempts.repeated_with("flights", "place", ['"name"'], **asked), key=str)

    large = {"name": "käse", "server": ["http://h:1"], "mark": 2**62}
    record(T1, {"name": "first"})
    assert found() == []
    for at, place in ((T1, large), (T1, large), (T1, {"other": 1}), (T2, {"name": "first"}), (T2, {"name": "late"})):
        record(at, place)
    record(T1, {"name": "replayed"}, replay="v2")
    assert found() == [large, {"name": "late"}]
    assert found(until_ms=T1) == [large]
    assert found(target="v2") == [{"name": "replayed"}]
    assert found(target=None) == [large, {"name": "late"}, {"name": "replayed"}]


def test_by_force_everything_is_taken(two: Batches) -> None:
    two.finish(two.begin())
    assert two.begin(force=True).outputs == TWO
    assert two.begin("index", force=True).outputs == ("index",)


def test_an_output_added_later_leaves_a_batch_completed(two: Batches) -> None:
    two.finish(two.begin())
    two.register(*TWO, "topic")
    with pytest.raises(AlreadyCompletedError):
        two.begin()
    # It can be written for it, by name, and its failure does not undo the others.
    added = two.begin("topic")
    assert two.state() is BatchState.COMPLETED
    assert two.attempts.fail(added, "boom").state is BatchState.COMPLETED
    assert two.outputs()["topic"] == (2, AttemptState.FAILED)
    # Nor does another output by force.
    assert two.finish(two.begin("files", force=True)).state is BatchState.COMPLETED
    assert two.finish(two.begin("topic")).steps == (*TWO, "topic")
    assert two.finish(two.begin(at=T2)).steps == (*TWO, "topic")


def test_an_output_added_while_a_batch_runs_is_not_required(two: Batches) -> None:
    attempt = two.begin()
    two.register(*TWO, "topic")
    done = two.finish(attempt)
    assert (done.state, done.steps) == (BatchState.COMPLETED, TWO)
    # One that was not begun before takes it with it.
    assert two.finish(two.begin(at=T2)).steps == (*TWO, "topic")


def test_the_first_attempt_settles_what_a_batch_requires(two: Batches) -> None:
    """It settles that even if it is at one output only."""
    index = two.begin("index")
    two.register(*TWO, "topic")
    assert two.finish(index).state is BatchState.ALLOCATED
    topic = two.begin("topic")
    two.attempts.fail(topic, "boom")
    assert two.finish(two.begin("files")).state is BatchState.COMPLETED


def test_an_attempt_at_all_that_is_missing_takes_an_added_output(two: Batches) -> None:
    both = two.begin()
    two.attempts.record_output(both, "index", {})
    two.attempts.fail(both, "boom")
    two.register(*TWO, "topic")
    added = two.begin()
    assert added.outputs == ("files", "topic")
    two.attempts.record_output(added, "files", {})
    assert two.attempts.fail(added, "topic is down").error == "topic is down"
    assert two.finish(two.begin()).steps == (*TWO, "topic")


def test_the_steps_of_a_completed_batch_never_become_fewer(two: Batches) -> None:
    two.finish(two.begin())
    two.register("topic")
    two.attempts.fail(two.begin("topic"), "boom")
    assert two.batches.get("flights", T1).steps == TWO
    assert two.finish(two.begin("topic")).steps == (*TWO, "topic")
    two.register(*TWO)
    half = two.attempts.fail(two.begin("index", force=True), "half written")
    assert (half.state, half.steps) == (BatchState.FAILED, (*TWO, "topic"))


def test_a_lost_state_is_no_output_with_another_name(two: Batches) -> None:
    two.register("state", *TWO)
    two.attempts.fail(two.begin("state"), "boom")
    two.register(*TWO)
    assert two.finish(two.begin()).state is BatchState.FAILED
    with pytest.raises(StepsLostError, match=r"Declare the stream's state again until") as lost:
        two.begin()
    assert "renamed_from" not in str(lost.value)


def test_a_lost_output_stays_required_until_it_is_written(two: Batches) -> None:
    two.attempts.fail(two.begin("files"), "boom")
    two.register("index")
    done = two.finish(two.begin())
    assert done.state is BatchState.FAILED
    assert "was not written to 'files', which the definition no longer has" in str(done.error)
    # Whatever is asked for: nothing ends as if the batch were done.
    for asked in ((), ("index",)):
        with pytest.raises(StepsLostError, match=r"renamed_from=.files.\..*abandon flights .* --output files"):
            two.begin(*asked)
    assert two.events(EventKind.BATCH_FAILED) == 1
    two.register(*TWO)
    assert two.finish(two.begin()).state is BatchState.COMPLETED


def test_an_output_lost_during_its_attempt_is_written_by_it(two: Batches) -> None:
    two.finish(two.begin("index"))
    files = two.begin("files")
    two.register("index")
    with pytest.raises(AlreadyCompletedError):
        two.begin("index")
    assert two.finish(files).state is BatchState.COMPLETED
    # Or not.
    two.register(*TWO)
    two.finish(two.begin("index", at=T2))
    files = two.begin("files", at=T2)
    two.register("index")
    assert two.attempts.fail(files, "boom").error == "boom"
    failed = two.attempts.settle("flights", T2)
    assert failed.state is BatchState.FAILED
    assert "'files', which the definition no longer has" in str(failed.error)


def test_a_lost_output_of_a_dead_attempt_is_named_at_settling(two: Batches) -> None:
    two.finish(two.begin("index"))
    two.begin("files")
    two.register("index")
    two.world.clock.advance(6_000)
    assert two.state() is BatchState.RUNNING
    assert "no longer has" in str(two.attempts.settle("flights", T1).error)
    assert two.state() is BatchState.FAILED


def renamed(two: Batches, **first_ids: str) -> None:
    """Declare outputs by their ids, each with its first one."""
    outputs = [
        {"id": output_id} | ({"renamed_from": first} if first != output_id else {})
        for output_id, first in first_ids.items()
    ]
    definition = json.dumps({"outputs": outputs, "limits": {"max_concurrent_batches": 3}})
    two.ledger.streams.register("flights", definition, batch_interval_ms=1000, block_interval_ms=200)


def test_a_renamed_output_keeps_its_records(two: Batches) -> None:
    renamed(two, index="index", files="files")
    two.finish(two.begin("index"))
    two.attempts.fail(two.begin("files"), "boom")
    running = two.begin("files", at=T2)
    renamed(two, search="index", folder="files")
    # What is written stays so, what failed is run again, and what runs is replaced: under the first id.
    assert two.begin().outputs == ("files",)
    two.begin("files", at=T2)
    with pytest.raises(AttemptFencedError):
        two.attempts.record_output(running, "files", {})
    # A second rename, a swap, and back to the first definition.
    for ids in ({"s2": "index", "folder": "files"}, {"files": "index", "index": "files"}, {n: n for n in TWO}):
        renamed(two, **ids)
        assert two.begin(at=T3, force=True).outputs == TWO


def test_a_rename_that_would_lose_the_records_is_refused(two: Batches) -> None:
    renamed(two, index="index", files="files")
    renamed(two, search="index", files="files")
    # By the second id, without the first one, and by an id that no output had.
    for ids in ({"s2": "search", "files": "files"}, {"search": "search", "files": "files"}):
        with pytest.raises(OutputRenamedError, match="Give it renamed_from='index'"):
            renamed(two, **ids)
    with pytest.raises(OutputRenamedError, match=r"which no output had.*one of files, index"):
        renamed(two, search="index", files="fiels")
    # A year later both ids are free: these are other outputs.
    renamed(two, files="files")
    renamed(two, search="search", files="files")
    assert two.ledger.streams.get("flights").outputs == ("search", "files")


def test_an_output_is_given_up_with_a_reason(two: Batches) -> None:
    two.finish(two.begin("index"))
    two.attempts.fail(two.begin("files"), "boom")
    two.register("index")
    with pytest.raises(BatchStateError, match="does not wait for an output 'index', but for files"):
        two.batches.abandon_output("flights", T1, "index", "why")
    batch = two.batches.abandon_output("flights", T1, "files", "the folder is gone", by="ann")
    assert (batch.state, batch.steps, batch.abandoned_steps) == (
        BatchState.COMPLETED,
        ("index",),
        {"files": "the folder is gone"},
    )
    assert two.batches.abandon_output("flights", T1, "files", "again") == batch
    (event,) = [e for e in two.ledger.events.of_batch("flights", T1) if e.kind == EventKind.OUTPUT_ABANDONED]
    assert event.payload == {"output": "files", "reason": "the folder is gone", "records": 10, "by": "ann"}


def test_a_batch_without_its_only_output_needs_the_streams(build: Callable[..., Any]) -> None:
    """Once it is given up, the batch needs the outputs that the stream has."""
    one = Batches(build(outputs=("files",)))
    one.attempts.fail(one.begin(), "boom")
    with pytest.raises(BatchStateError, match="needs no other output than 'files', and the stream has none"):
        one.batches.abandon_output("flights", T1, "files", "why")
    one.register("index")
    assert one.batches.abandon_output("flights", T1, "files", "why").state is BatchState.ALLOCATED
    # It stays required, as every other.
    one.register("topic")
    assert one.finish(one.begin()).state is BatchState.FAILED
    one.register("index")
    assert one.finish(one.begin()).steps == ("index", "topic")


def test_an_unknown_output_is_named(two: Batches) -> None:
    with pytest.raises(BatchStateError, match=r"no output 'topic'\. Its outputs are index, files"):
        two.begin("topic")
    with pytest.raises(BatchStateError, match="at least one output"):
        two.attempts.begin("flights", T1, **RUN, outputs=[])


def test_slots_count_batches(build: Callable[..., Any]) -> None:
    two = Batches(build(outputs=TWO, max_concurrent_batches=2))
    for at in (T1, T2):
        two.begin("index", at=at)
        two.begin("files", at=at)
    with pytest.raises(SlotBusyError) as refused:
        two.begin(at=T3)
    assert refused.value.busy == (T1, T2)


def test_an_ordered_stream_waits_for_every_output(build: Callable[..., Any]) -> None:
    two = Batches(build(outputs=TWO, ordered=True, max_concurrent_batches=4))
    two.finish(two.begin("index"))
    with pytest.raises(NotItsTurnError):
        two.begin("index", at=T2)
    two.begin("files")
    assert [(b.batch_time_ms, b.state, b.alive) for b in two.batches.earlier_unfinished("flights", T3)] == [
        (T1, BatchState.RUNNING, True),
        (T2, BatchState.ALLOCATED, False),
    ]


def test_earlier_batches_have_their_errors_and_unclaimed_times(build: Callable[..., Any]) -> None:
    two = Batches(build(outputs=TWO))
    two.attempts.fail(two.begin(at=T2), "boom")
    two.finish(two.begin(at=T1))
    later = two.world.add({0: (10, 20)}).batch_time_ms
    earlier = two.batches.earlier_unfinished("flights", later + 1000)
    assert [(b.batch_time_ms, b.state, b.error) for b in earlier] == [
        (T2, BatchState.FAILED, "boom"),
        (T3, BatchState.ALLOCATED, None),
        (later, None, None),
    ]
    assert two.batches.earlier_unfinished("flights", later + 1000, limit=1) == earlier[:1]
    assert two.batches.earlier_unfinished("flights", T2) == []


def test_a_completed_batch_is_run_again_out_of_order(build: Callable[..., Any]) -> None:
    """An ordered stream allows that, too."""
    two = Batches(build(outputs=TWO, ordered=True))
    for at in (T1, T2):
        two.finish(two.begin(at=at))
    two.attempts.fail(two.begin("files", at=T1, force=True), "boom")
    # T1 was finished once, and later batches are built on that: neither T2 again nor T3 waits for it.
    failed = two.batches.get("flights", T1)
    assert (failed.state, failed.error) == (BatchState.FAILED, "boom")
    two.finish(two.begin(at=T2, force=True))
    assert two.batches.earlier_unfinished("flights", T3) == []
    two.finish(two.begin(at=T3))
    # And it waits for none when it is tried once more.
    two.world.add({0: (10, 20)})
    assert two.finish(two.begin(at=T1)).state is BatchState.COMPLETED


def test_a_batch_that_completed_once_cannot_be_given_up(two: Batches) -> None:
    two.finish(two.begin())
    again = two.begin("files", force=True)
    for _ in range(2):
        with pytest.raises(BatchStateError, match="has completed before") as refused:
            two.batches.abandon("flights", T1, "poison")
        assert "Run it again" in str(refused.value.remedy)
    assert two.attempts.fail(again, "boom").state is BatchState.FAILED
    with pytest.raises(BatchStateError, match="has completed before"):
        two.batches.abandon("flights", T1, "poison")
    assert two.ledger.events.of_batch("flights", T1)[-1].kind == EventKind.BATCH_FAILED


def test_outputs_wait_for_the_state(build: Callable[..., Any]) -> None:
    assert LEDGER_STATE_STEP == STATE_STEP
    stateful = Batches(build(outputs=("state", "index"), ordered=True))
    with pytest.raises(NotItsTurnError, match="has not been updated"):
        stateful.begin("index")
    update = stateful.begin("state")
    with pytest.raises(NotItsTurnError):
        stateful.begin("index")
    stateful.finish(update)
    assert stateful.finish(stateful.begin("index")).state is BatchState.COMPLETED
    # In one attempt they are in order by themselves.
    assert stateful.begin(at=T2).outputs == ("state", "index")


def test_outputs_wait_for_a_state_that_is_updated_again(build: Callable[..., Any]) -> None:
    stateful = Batches(build(outputs=("state", "index"), ordered=True))
    stateful.finish(stateful.begin())
    again = stateful.begin("state", force=True)
    with pytest.raises(NotItsTurnError):
        stateful.begin("index", force=True)
    assert stateful.finish(again).state is BatchState.COMPLETED
    assert stateful.begin("index", force=True).outputs == ("index",)


def test_a_batch_that_was_given_up_is_not_settled_again(two: Batches) -> None:
    two.attempts.fail(two.begin(), "no")
    two.batches.abandon("flights", T1, "poison")
    assert two.attempts.settle("flights", T1).state is BatchState.ABANDONED
    assert two.state() is BatchState.ABANDONED


def test_an_abandoned_batch_fences_all_its_attempts(two: Batches) -> None:
    attempts = [two.begin("index"), two.begin("files")]
    two.batches.abandon("flights", T1, "poison")
    for attempt in attempts:
        with pytest.raises(AttemptFencedError):
            two.attempts.renew(attempt)


def test_a_fact_of_a_batch_holds_for_all_its_attempts(two: Batches) -> None:
    """Those of other outputs, and later ones; and it is a count, by which a rebuilt ledger knows it."""
    first, second = two.begin("index"), two.begin("files")
    assert two.attempts.pin(first, "readers", {"a": 1}) == {"a": 1}
    assert two.attempts.pin(second, "readers", {"a": 2, "b": 3}) == {"a": 1, "b": 3}
    assert two.attempts.pin(first, "readers", {"c": 4}) == {"c": 4}
    assert two.attempts.pinned("flights", T1, "readers") == {"a": 1, "b": 3, "c": 4}
    assert two.attempts.pinned("flights", T2, "readers") == {}
    for attempt in (first, second):
        two.finish(attempt)
    counted = two.begin("index", at=T2)
    two.ledger.attempts.record_output(counted, "index", {"readers": {"a": 7}})
    two.attempts.complete(counted)
    assert two.attempts.pinned("flights", T2, "readers") == {"a": 7}
    assert two.attempts.pin(two.begin("files", at=T2), "readers", {"a": 8}) == {"a": 7}


def test_results_that_decoded_their_records_say_how(build: Any) -> None:
    """A state has decoded what entered it. An output that was not due, or found no record, has decoded nothing."""
    given = Batches(build(outputs=("state", "index", "files"), ordered=True))

    def record(output: str, **counts: Any) -> None:
        attempt = given.begin(output, force=True)
        given.ledger.attempts.record_output(attempt, output, counts)
        given.attempts.complete(attempt)

    def decoded(**options: Any) -> Any:
        return given.attempts.decoded_by("flights", [T1, T2], "readers", **options)

    record("state", readers={"a": "of the state"})
    record("index", skipped="the window is not due")
    assert (decoded(), decoded(by_state=True)) == ({}, {T1: ({"a": "of the state"}, 1)})
    record("index", readers={"a": 1}, undecodable=0, batches=3)
    record("files", readers={"a": 2}, undecodable=0)
    assert decoded() == {T1: ({"a": 2}, 3)}
    given.begin("files", force=True)
    assert decoded() == {T1: ({"a": 2}, 3)}, "it runs again"


def test_the_change_that_a_fact_brings_is_an_event_once(two: Batches) -> None:
    """In the transaction of the fact: a process that ends between them would never tell of it."""
    first, second = two.begin("index"), two.begin("files")
    two.attempts.pin(first, "readers", {"a": 1}, changes={"a": {"of": "a"}})
    two.attempts.pin(second, "readers", {"a": 1, "b": 2}, changes={"a": {"of": "a"}, "b": {"of": "b"}})
    told = two.ledger.events.latest("flights", [EventKind.SCHEMA_CHANGED])
    assert sorted(event.payload["of"] for event in told if event.batch_time_ms == T1) == ["a", "b"]


def test_a_fenced_attempt_records_no_fact(two: Batches) -> None:
    former = two.begin("index")
    two.begin("index")
    with pytest.raises(AttemptFencedError):
        two.attempts.pin(former, "readers", {"a": 1})
