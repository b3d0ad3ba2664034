"""When the demo may stop waiting, and when not."""

from __future__ import annotations

from typing import Any

import pytest
from examples.demo.errors import DemoError, NotAnsweringError
from examples.demo.observing import Snapshot, try_to_look

from headrace.ledger.errors import LedgerUnavailableError
from headrace.ledger.states import BatchState


def settled(make_batch: Any, **changes: Any) -> Snapshot:
    fields: dict[str, Any] = {
        "to_produce": 100,
        "produced": 100,
        "received": 100,
        "indexed": 99,
        "dead_lettered": 1,
        "batches": [make_batch()],
    }
    return Snapshot(**{**fields, **changes})


def test_settled(make_batch: Any) -> None:
    snapshot = settled(make_batch)
    assert snapshot.processed
    assert snapshot.settled


@pytest.mark.parametrize(
    "changes",
    [
        {"produced": 99},
        {"received": 99},
        {"unclaimed": True},
        {"batches": []},
    ],
)
def test_not_settled(make_batch: Any, changes: dict[str, Any]) -> None:
    assert not settled(make_batch, **changes).settled


@pytest.mark.parametrize("field", ["completed_at_ms", "checkpointed_at_ms", "cleaned_at_ms"])
def test_not_settled_while_a_batch_is_not_done_with(make_batch: Any, field: str) -> None:
    other = make_batch(batch_time_ms=20_000, records=1, **{field: None})
    assert not settled(make_batch, to_produce=101, produced=101, received=101, indexed=100, batches=[other]).settled


def test_empty_batches_are_not_waited_for(make_batch: Any) -> None:
    empty = make_batch(
        batch_time_ms=20_000, records=0, state=BatchState.RUNNING, completed_at_ms=None, cleaned_at_ms=None
    )
    assert settled(make_batch, batches=[empty, make_batch()]).settled


@pytest.mark.parametrize("indexed", [0, 98, 150])
def test_what_is_in_the_index_is_not_waited_for(make_batch: Any, indexed: int) -> None:
    # Should documents be lost, the proof is to say so, not a wait without end.
    assert settled(make_batch, indexed=indexed).settled


def test_progress_changes_with_everything_that_moves(make_batch: Any) -> None:
    before = settled(make_batch).progress
    assert settled(make_batch).progress == before
    assert settled(make_batch, indexed=98).progress != before
    assert settled(make_batch, batches=[make_batch(cleaned_at_ms=None)]).progress != before
    assert settled(make_batch, batches=[make_batch(state=BatchState.RUNNING)]).progress != before


class Broken:
    """An observer that cannot look."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def look(self) -> Snapshot:
        raise self._error


@pytest.mark.parametrize("error", [LedgerUnavailableError("gone"), NotAnsweringError("503")])
def test_a_server_that_does_not_answer_just_now_is_no_snapshot(error: Exception) -> None:
    assert try_to_look(Broken(error)) is None  # type: ignore[arg-type]


def test_an_error_that_waiting_does_not_solve_is_raised() -> None:
    with pytest.raises(DemoError, match="refused"):
        try_to_look(Broken(DemoError("Kafka refused a record.")))  # type: ignore[arg-type]
