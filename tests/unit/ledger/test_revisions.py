"""Which definition an attempt goes by, while several are registered."""

from __future__ import annotations

import json

import pytest
from tests.unit.ledger.conftest import INTERVAL_MS, STREAM, World

from headrace.ledger import BatchState, EventKind, Ledger
from headrace.ledger.errors import BatchStateError, RevisionNotFoundError, SlotBusyError, StepsLostError

ONE = {"outputs": ["index"]}
BOTH = {"outputs": ["index", "files"]}
RUN = {"holder": "task", "way": "connect", "lease_ms": 5_000}


def register(ledger: Ledger, name: str, declared_at_ms: int | None = None, **options: object) -> int:
    """Register a definition of this name; its revision."""
    fields = {"batch_interval_ms": INTERVAL_MS, "block_interval_ms": 200} | ONE | options
    definition = json.dumps({"name": name})
    return ledger.streams.register(STREAM, definition, declared_at_ms=declared_at_ms, **fields).revision


@pytest.fixture
def batch_ms(world: World) -> int:
    world.add({0: (0, 10)})
    world.clock.advance(INTERVAL_MS)
    time_ms = world.clock.now_ms() // INTERVAL_MS * INTERVAL_MS
    world.allocate(time_ms)
    return time_ms


def test_the_same_content_has_the_same_revision_on_every_return(ledger: Ledger) -> None:
    assert [register(ledger, name) for name in "abababcab"] == [1, 2, 1, 2, 1, 2, 3, 1, 2]
    assert ledger.streams.get(STREAM).revision == 2
    assert [row.revision for row in ledger.streams.newest_revisions(STREAM, 9)] == [1, 2, 3]


def test_a_definition_of_older_code_leaves_the_newest_in_place(ledger: Ledger) -> None:
    """It gets a revision of its own."""
    register(ledger, "a", 1_000)
    register(ledger, "b", 2_000)
    for _ in range(3):
        assert register(ledger, "a", 1_000) == 1
        assert register(ledger, "b", 2_000) == 2
    # One that nobody had registered before it was old.
    assert register(ledger, "late", 1_500) == 3
    row = ledger.streams.get(STREAM)
    assert (row.revision, row.definition) == (2, '{"name": "b"}')
    payloads = [event.payload for event in ledger.events.page(STREAM, kinds=[EventKind.STREAM_REGISTERED])]
    assert payloads == [{"revision": n, "newest": newest} for n, newest in ((1, 1), (2, 2), (3, 2))]


def test_a_rollback_becomes_the_newest_by_its_old_revision(ledger: Ledger) -> None:
    register(ledger, "a", 1_000)
    register(ledger, "b", 2_000)
    assert register(ledger, "a", 3_000) == 1
    assert register(ledger, "b", 2_000) == 2
    assert ledger.streams.get(STREAM).revision == 1


def test_the_row_at_a_revision_is_as_it_declared(ledger: Ledger) -> None:
    register(ledger, "a", ordered=True)
    register(ledger, "b", **BOTH)
    row = ledger.streams.at_revision(STREAM, 1)
    assert (row.revision, row.definition, row.outputs, row.ordered) == (1, '{"name": "a"}', ("index",), True)
    assert ledger.streams.at_revision(STREAM, 2) == ledger.streams.get(STREAM)
    with pytest.raises(RevisionNotFoundError, match="no revision 3 of stream 'flights'"):
        ledger.streams.at_revision(STREAM, 3)


def test_an_attempt_keeps_the_definition_that_it_began_with(world: World, batch_ms: int) -> None:
    ledger = world.ledger
    old, new = register(ledger, "old", **BOTH), register(ledger, "new", **ONE)
    attempt = ledger.attempts.begin(STREAM, batch_ms, revision=old, **RUN)
    assert (attempt.revision, attempt.outputs) == (old, ("index", "files"))
    register(ledger, "newer")
    (row,) = ledger.attempts.of_batch(STREAM, batch_ms)
    assert row.claim() == attempt
    for output in attempt.outputs:
        ledger.attempts.record_output(attempt, output, {"n": 1})
    batch = ledger.attempts.complete(attempt)
    assert (batch.state, batch.steps) == (BatchState.COMPLETED, ("index", "files"))
    recorded = ledger.attempts.recorded(STREAM, [batch_ms])[batch_ms]
    assert {output: each.revision for output, each in recorded.items()} == {"index": old, "files": old}
    assert new != old


def test_a_dropped_output_keeps_its_batch_open_until_written(world: World, batch_ms: int) -> None:
    """Two tasks of one run write one output each; a deploy in between takes one output out."""
    ledger = world.ledger
    old = register(ledger, "old", **BOTH)
    first = ledger.attempts.begin(STREAM, batch_ms, outputs=["index"], revision=old, **RUN)
    register(ledger, "new", **ONE)
    ledger.attempts.record_output(first, "index", {})
    assert ledger.attempts.complete(first).state is not BatchState.COMPLETED
    second = ledger.attempts.begin(STREAM, batch_ms, outputs=["files"], revision=old, **RUN)
    ledger.attempts.record_output(second, "files", {})
    assert ledger.attempts.complete(second).state is BatchState.COMPLETED


def test_a_failed_run_still_needs_the_output_removed_since(world: World, batch_ms: int) -> None:
    ledger = world.ledger
    old = register(ledger, "old", **BOTH)
    attempt = ledger.attempts.begin(STREAM, batch_ms, revision=old, **RUN)
    ledger.attempts.record_output(attempt, "index", {})
    assert ledger.attempts.fail(attempt, "no disk").state is BatchState.FAILED
    new = register(ledger, "new", **ONE)
    with pytest.raises(StepsLostError):
        ledger.attempts.begin(STREAM, batch_ms, revision=new, **RUN)
    assert ledger.batches.get(STREAM, batch_ms).state is BatchState.FAILED
    # A task of the old DAG version can write it.
    last = ledger.attempts.begin(STREAM, batch_ms, revision=old, **RUN)
    ledger.attempts.record_output(last, "files", {})
    assert ledger.attempts.complete(last).state is BatchState.COMPLETED


def test_an_output_is_asked_of_the_attempts_definition_only(world: World, batch_ms: int) -> None:
    ledger = world.ledger
    old, new = register(ledger, "old", **ONE), register(ledger, "new", **BOTH)
    with pytest.raises(BatchStateError, match=r"no output 'files'\. Its outputs are index"):
        ledger.attempts.begin(STREAM, batch_ms, outputs=["files"], revision=old, **RUN)
    begun = ledger.attempts.begin(STREAM, batch_ms, outputs=["files"], revision=new, **RUN)
    assert begun.revision == new
    with pytest.raises(RevisionNotFoundError):
        ledger.attempts.begin(STREAM, batch_ms, revision=99, **RUN)


def test_slots_and_order_are_the_stricter_of_two_definitions(world: World, batch_ms: int) -> None:
    ledger = world.ledger
    register(ledger, "one", max_concurrent_batches=1)
    four = register(ledger, "four", max_concurrent_batches=4)
    ledger.attempts.begin(STREAM, batch_ms, revision=four, **RUN)
    world.clock.advance(INTERVAL_MS)
    world.allocate(batch_ms + INTERVAL_MS)
    register(ledger, "one", max_concurrent_batches=1)
    with pytest.raises(SlotBusyError):
        ledger.attempts.begin(STREAM, batch_ms + INTERVAL_MS, revision=four, **RUN)


def test_an_attempt_without_revision_is_by_the_newest_definition(world: World, batch_ms: int) -> None:
    register(world.ledger, "a")
    newest = register(world.ledger, "b")
    assert world.ledger.attempts.begin(STREAM, batch_ms, **RUN).revision == newest
