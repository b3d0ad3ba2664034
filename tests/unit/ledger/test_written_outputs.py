"""Which batches an output holds, by its own records of success."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from headrace.ledger import BatchState

NOW_MS = 1_700_000_000_000
T1, T2, T3, T4, T5 = (NOW_MS + 1000 * number for number in range(1, 6))
RUN = {"holder": "task", "way": "connect", "lease_ms": 5_000}


@pytest.fixture
def world(build: Callable[..., Any]) -> Any:
    """T1 to T5 allocated; the stream writes an index and files."""
    world = build(outputs=("index", "files"))
    world.clock.advance(5500)
    for time_ms in (T1, T2, T3, T4, T5):
        world.allocate(time_ms)
    return world


def fail_after(world: Any, at: int, *outputs: str) -> None:
    """These outputs are written, then the attempt fails."""
    attempt = world.ledger.attempts.begin("flights", at, force=True, **RUN)
    for output in outputs:
        world.ledger.attempts.record_output(attempt, output, {})
    world.ledger.attempts.fail(attempt, "the disk is full")


def test_an_output_keeps_its_record_whatever_the_batch_became(world: Any) -> None:
    batches = world.ledger.batches
    world.complete(T1)
    fail_after(world, T2, "index")
    fail_after(world, T3, "files")
    fail_after(world, T4, "index")
    batches.abandon("flights", T4, "never")
    held = {T1: BatchState.COMPLETED, T2: BatchState.FAILED, T4: BatchState.ABANDONED}
    assert batches.written("flights", "index", T1, T5 + 1) == held
    assert batches.written("flights", "index", T2, T4) == {T2: BatchState.FAILED}
    # Run again it has no record of success until it is done, and what it wrote before stands all the same.
    fail_after(world, T1)
    assert batches.written("flights", "index", T1, T5 + 1)[T1] is BatchState.FAILED


def test_a_replays_output_is_found_by_its_definition_alone(world: Any) -> None:
    """It is not taken for what the stream wrote."""
    batches = world.ledger.batches
    definitions = [json.dumps({"outputs": [{"id": "index"}], "transform": name}) for name in ("first", "second")]
    for at, definition, succeeds in ((T1, definitions[0], True), (T2, definitions[0], True), (T2, definitions[1], True),
                                     (T1, definitions[1], False)):  # fmt: skip
        attempt = world.ledger.replays.begin(
            "flights", at, target="v2", definition=definition, outputs=["index"], **RUN
        )
        if succeeds:
            world.ledger.attempts.record_output(attempt, "index", {})
            world.ledger.attempts.complete(attempt)
        else:
            world.ledger.attempts.fail(attempt, "no")
    assert world.ledger.replays.written_by("flights", "v2", "index", T1, T5 + 1) == {
        T1: definitions[0],
        T2: definitions[1],
    }
    assert world.ledger.replays.written_by("flights", "v3", "index", T1, T5 + 1) == {}
    assert batches.written("flights", "index", T1, T5 + 1) == {}
