"""A batch written again to another place, while its own life goes on."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from headrace.blocks import BlockHandle
from headrace.clock import time_text
from headrace.ledger import AttemptState, BatchState, EventKind
from headrace.ledger.batches.tables import Attempt
from headrace.ledger.errors import (
    AttemptFencedError,
    BatchNotFoundError,
    BatchStateError,
    LedgerError,
    NotItsTurnError,
    ReplayOrderError,
)

NOW_MS = 1_700_000_000_000
T1, T2, T3 = NOW_MS + 1000, NOW_MS + 2000, NOW_MS + 3000
RUN = {"holder": "task", "way": "connect", "lease_ms": 5_000}
COPY = json.dumps({"outputs": [{"id": "index"}], "transform": "fixed"})


@pytest.fixture
def world(build: Callable[..., Any]) -> Any:
    """T1 and T2 completed, T3 allocated, and one slot."""
    world = build(outputs=("index", "files"))
    world.add({0: (0, 10)}, handle=BlockHandle("a", 0, 100))
    world.clock.advance(3500)
    for time_ms in (T1, T2, T3):
        world.allocate(time_ms)
    for time_ms in (T1, T2):
        world.complete(time_ms)
    return world


def replay(world: Any, at: int = T1, target: str = "v2", **options: Any) -> Attempt:
    begun = {"definition": COPY, "outputs": ["index"], **RUN} | options
    return world.ledger.replays.begin("flights", at, target=target, **begun)


def finish(world: Any, attempt: Attempt, version: str = "fixed") -> Any:
    for output in attempt.outputs:
        world.ledger.attempts.record_output(attempt, output, {"indexed": 10})
    return world.ledger.attempts.complete(attempt, code_version=version)


def test_a_replay_changes_nothing_of_the_batch(world: Any) -> None:
    batches = world.ledger.batches
    before, outputs = batches.get("flights", T1), world.ledger.attempts.outputs("flights", T1)
    attempt = replay(world, attributes={"run_id": "r"})
    assert pickle.loads(pickle.dumps(attempt)) == attempt  # noqa: S301
    assert (attempt.number, attempt.target, attempt.definition, attempt.source) == (2, "v2", COPY, "log")
    world.ledger.attempts.renew(attempt)
    finish(world, attempt)
    after = batches.get("flights", T1)
    assert after == replace(before, change=after.change)
    assert world.ledger.attempts.outputs("flights", T1) == outputs
    (copied,) = world.ledger.attempts.outputs("flights", T1, target="v2")
    assert (copied.counts, copied.code_version) == ({"indexed": 10}, "fixed")
    row = world.ledger.attempts.of_batch("flights", T1)[-1]
    assert (row.target, row.definition, row.attributes) == ("v2", COPY, {"run_id": "r"})
    assert row.claim() == attempt
    # The next attempt at the batch itself has a number of its own.
    assert world.ledger.attempts.begin("flights", T1, **RUN, force=True).number == 3
    kinds = [event.kind for event in world.ledger.events.of_batch("flights", T1)]
    assert kinds.count(EventKind.REPLAY_COMPLETED) == 1
    assert kinds.count(EventKind.BATCH_COMPLETED) == 1


def test_a_replay_that_deletes_by_key_runs_its_batches_in_order(world: Any) -> None:
    ordered = {"ordered": ["index"]}
    first = replay(world, T1, **ordered)
    with pytest.raises(NotItsTurnError, match=f"before {time_text(T2)} it has to complete {time_text(T1)}"):
        replay(world, T2, **ordered)
    world.ledger.attempts.fail(first, "Elasticsearch is away")
    with pytest.raises(NotItsTurnError):
        replay(world, T2, **ordered)
    finish(world, replay(world, T1, **ordered))
    finish(world, replay(world, T2, **ordered))
    # The newest may be repeated. Earlier ones would restore what it has deleted, also with a corrected transform.
    finish(world, replay(world, T2, **ordered))
    corrected = COPY.replace("fixed", "corrected")
    for definition in (COPY, corrected):
        with pytest.raises(ReplayOrderError, match=f"has replayed batch {time_text(T2)} before {time_text(T1)}"):
            replay(world, T1, definition=definition, **ordered)
    elsewhere = json.dumps({"outputs": [{"id": "index", "index": "another"}]})
    finish(world, replay(world, T1, definition=elsewhere, **ordered))
    finish(world, replay(world, T1, target="v3", **ordered))
    # Without deletions by key any order is right.
    replay(world, T1)


def test_an_ordered_output_of_a_replay_waits_for_no_other(world: Any) -> None:
    both = {"definition": json.dumps({"outputs": [{"id": "index"}, {"id": "files"}]})}
    replay(world, T1, outputs=["files"], **both)
    later = replay(world, T2, outputs=["index"], ordered=["index"], **both)
    replay(world, T2, outputs=["files"], **both)
    finish(world, later)
    replay(world, T3, outputs=["index"], ordered=["index"], **both)


def test_replays_hold_no_slots_and_fence_only_their_own(world: Any) -> None:
    first, other = replay(world), replay(world, target="v3")
    live = world.ledger.attempts.begin("flights", T3, **RUN)
    again = world.ledger.attempts.begin("flights", T3, **RUN)
    assert again.number == live.number + 1
    newer = replay(world, holder="second try")
    with pytest.raises(AttemptFencedError):
        world.ledger.attempts.record_output(first, "index", {})
    finish(world, newer)
    finish(world, other)
    for output in again.outputs:
        world.ledger.attempts.record_output(again, output, {})
    assert world.ledger.attempts.complete(again).state is BatchState.COMPLETED


def test_a_replay_of_several_outputs_completes_with_the_last(world: Any) -> None:
    definition = json.dumps({"outputs": [{"id": "index"}, {"id": "files"}]})

    def state() -> BatchState:
        (row,) = world.ledger.replays.between("flights", "v2", T1, T1 + 1)
        return row.state

    index = replay(world, definition=definition)
    files = replay(world, definition=definition, outputs=["files"])
    finish(world, index)
    assert state() is BatchState.RUNNING
    world.ledger.attempts.fail(files, "boom")
    assert state() is BatchState.FAILED
    finish(world, replay(world, definition=definition, outputs=["files"]), "newer")
    (row,) = world.ledger.replays.between("flights", "v2", 0, T3 * 2)
    assert (row.state, row.code_version, row.outputs, row.error) == (
        BatchState.COMPLETED,
        "newer",
        ("index", "files"),
        None,
    )
    with pytest.raises(BatchStateError, match="no output console"):
        replay(world, definition=definition, outputs=["console"])


def test_a_failed_replay_has_the_error_of_its_attempt(world: Any) -> None:
    definition = json.dumps({"outputs": [{"id": "index"}, {"id": "files"}]})
    attempt = replay(world, definition=definition, outputs=["index", "files"])
    world.ledger.attempts.fail(
        attempt, "index: no index; files: disk full", {"index": "no index", "files": "disk full"}
    )
    (row,) = world.ledger.replays.between("flights", "v2", T1, T1 + 1)
    assert row.error == "index: no index; files: disk full"


def test_a_definition_is_kept_once(world: Any) -> None:
    for at in (T1, T2, T3):
        finish(world, replay(world, at))
    changed = json.dumps({"outputs": [{"id": "index"}], "transform": "fixed again"})
    finish(world, replay(world, definition=changed))
    with world.ledger.streams._database.read() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM replay_definitions").scalar() == 2
    assert [row.definition for row in world.ledger.attempts.of_batch("flights", T1)] == [None, COPY, changed]


def changed(*outputs: str) -> str:
    return json.dumps({"outputs": [{"id": output, "index": "other"} for output in outputs]})


def test_what_another_definition_has_written_does_not_count(world: Any) -> None:
    both = json.dumps({"outputs": [{"id": "index"}, {"id": "files"}]})
    for at in (T1, T2):
        finish(world, replay(world, at, definition=both, outputs=["index", "files"]))
    finish(world, replay(world, definition=changed("index", "files")))
    (row,) = world.ledger.replays.between("flights", "v2", T1, T2)
    assert (row.state, row.completed_at_ms) == (BatchState.ALLOCATED, None)
    assert [row.output_id for row in world.ledger.attempts.outputs("flights", T1, target="v2")] == ["index"]
    finish(world, replay(world, definition=changed("index", "files"), outputs=["files"]))
    (row, other) = world.ledger.replays.between("flights", "v2", T1, T3)
    # The other batch has completed with the first definition only.
    assert [(each.state, each.revision) for each in (row, other)] == [
        (BatchState.COMPLETED, 2),
        (BatchState.COMPLETED, 1),
    ]
    # The first definition again is a third one: what the first has written does not count.
    finish(world, replay(world, T2, definition=both))
    (other,) = world.ledger.replays.between("flights", "v2", T2, T3)
    assert (other.state, other.revision) == (BatchState.ALLOCATED, 3)


def test_an_attempt_by_an_older_definition_completes_nothing(world: Any) -> None:
    both = json.dumps({"outputs": [{"id": "index"}, {"id": "files"}]})
    older = replay(world, definition=both, outputs=["files"])
    index = replay(world, definition=changed("index", "files"))
    finish(world, index)
    (row,) = world.ledger.replays.between("flights", "v2", T1, T2)
    assert row.state is BatchState.ALLOCATED
    finish(world, older)
    (row,) = world.ledger.replays.between("flights", "v2", T1, T2)
    assert (row.state, row.code_version) == (BatchState.ALLOCATED, "fixed")
    finish(world, replay(world, definition=changed("index", "files"), outputs=["files"]))
    assert world.ledger.replays.between("flights", "v2", T1, T2)[0].state is BatchState.COMPLETED


def test_an_older_definition_does_not_end_a_newer_ones_replay(world: Any) -> None:
    older = replay(world, definition=json.dumps({"outputs": [{"id": "index"}, {"id": "files"}]}), outputs=["files"])
    finish(world, replay(world, definition=changed("index")), "newer")
    world.ledger.attempts.fail(older, "late")
    (row,) = world.ledger.replays.between("flights", "v2", T1, T2)
    assert (row.state, row.code_version, row.error) == (BatchState.COMPLETED, "newer", None)
    kinds = [event.kind for event in world.ledger.events.of_batch("flights", T1)]
    assert (kinds.count(EventKind.REPLAY_COMPLETED), kinds.count(EventKind.REPLAY_FAILED)) == (1, 0)


def test_with_its_batch_a_replay_is_given_up(world: Any) -> None:
    batches = world.ledger.batches
    done, running = replay(world, T3, target="done"), replay(world, T3)
    finish(world, done)
    world.ledger.attempts.fail(replay(world, T3, target="failed"), "boom")
    batches.abandon("flights", T3, "poison")
    found = {name: world.ledger.replays.between("flights", name, T3, T3 + 1)[0] for name in ("done", "v2", "failed")}
    given_up = (BatchState.ABANDONED, "poison")
    assert {name: (row.state, row.error) for name, row in found.items()} == {
        "done": (BatchState.COMPLETED, None),
        "v2": given_up,
        "failed": given_up,
    }
    with pytest.raises(AttemptFencedError):
        world.ledger.attempts.fail(running, "late")


def test_what_cannot_be_replayed(world: Any) -> None:
    world.ledger.batches.abandon("flights", T3, "poison")
    with pytest.raises(BatchStateError, match="abandoned"):
        replay(world, T3)
    with pytest.raises(BatchNotFoundError):
        replay(world, T3 + 1000)
    with pytest.raises(LedgerError, match="has a name"):
        replay(world, target="")


def test_an_absorbed_batch_is_replayed_with_its_absorber(build: Callable[..., Any]) -> None:
    world = build()
    world.add({0: (0, 10)})
    world.clock.advance(2500)
    world.allocate(T2, absorb=[T1], blocks_expected=1)
    with pytest.raises(BatchStateError, match=f"Replay batch {time_text(T2)}"):
        replay(world, T1)


def test_the_log_stays_while_a_replay_reads_it(world: Any) -> None:
    world.ledger.receivers.release(world.receiver)
    cleanup = world.ledger.cleanup
    attempt = replay(world)
    assert cleanup.removable_segments("flights", T3 * 2) == []
    assert cleanup.claim_removal("flights", ["a"], T3 * 2) == []
    finish(world, attempt)
    dies = replay(world)
    assert cleanup.claim_removal("flights", ["a"], T3 * 2) == []
    world.clock.advance(6_000)
    assert [row.path for row in cleanup.claim_removal("flights", ["a"], T3 * 2)] == ["a"]
    assert world.ledger.attempts.of_batch("flights", T1)[-1].state is AttemptState.RUNNING
    assert dies.source == "log"
    assert replay(world).source == "kafka"
