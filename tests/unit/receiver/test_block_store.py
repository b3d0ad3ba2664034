"""What the block store makes of the ledger's answers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from headrace.blocks import TopicPartition
from headrace.clock import ManualClock
from headrace.ledger.errors import PositionConflictError
from headrace.receiver.block_store import BlockStore, StoreCounts

PARTITION = TopicPartition("flights", "topic-id", 0)


def make_store(next_offsets: dict[TopicPartition, int], *, position: int) -> BlockStore:
    """A store whose ledger has ``position`` for the partition and refuses to advance it from another."""

    def refuse(*_: object, **__: object) -> None:
        raise PositionConflictError(PARTITION, expected=position, got=5)

    ledger = SimpleNamespace(positions=SimpleNamespace(advance=refuse))
    unused: Any = None
    context: Any = SimpleNamespace(ledger=ledger, clock=ManualClock(0), storage=SimpleNamespace(url=""))
    return BlockStore(
        context,
        unused,
        writer=unused,
        source=unused,
        pausing=unused,
        counts=StoreCounts(),
        next_offsets=next_offsets,
        wait=lambda _: None,
        not_to_store=lambda _: (),
        beat=lambda: False,
    )


def test_an_advance_whose_first_answer_was_lost_counts_as_done() -> None:
    next_offsets = {PARTITION: 5}
    make_store(next_offsets, position=10).advance(PARTITION, 5, 10, None)
    assert next_offsets == {PARTITION: 10}


@pytest.mark.parametrize("position", [7, 12], ids=["within the advance", "after it"])
def test_an_advance_that_another_position_refuses_is_an_error(position: int) -> None:
    next_offsets = {PARTITION: 5}
    with pytest.raises(PositionConflictError):
        make_store(next_offsets, position=position).advance(PARTITION, 5, 10, None)
    assert next_offsets == {PARTITION: 5}
