"""Ledgers that were lost soon after something rare, on a stream whose every step is given."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import insert
from tests.unit.batch.conftest import PARTITION, START_MS, T1, T2, Receiving

from headrace.batch import cleanup
from headrace.batch.allocation import allocate
from headrace.batch.checkpoint import checkpoint_now
from headrace.batch.cleanup import clean_up
from headrace.batch.recover import Recovered, recover
from headrace.fsck.coverage import check_coverage
from headrace.ledger import Ledger
from headrace.ledger.states import BatchState
from headrace.ledger.tables import GapRow, gaps
from headrace.stream import Limits

T4 = START_MS + 40_000


@pytest.fixture
def lost(receiving: Receiving, tmp_path: Path) -> Any:
    """Loses the ledger. Returns the rebuilt one, and what was done."""
    opened = []

    def lose() -> tuple[Ledger, Recovered]:
        receiving.writer.close(receiving.accepted)
        ledger = Ledger.open(f"sqlite:///{tmp_path}/new.db", clock=receiving.clock)
        opened.append(ledger)
        return ledger, recover("shop", ledger, receiving.storage.below("shop"), definition=receiving.stream, force=True)

    yield lose
    for ledger in opened:
        ledger.close()


def batches(ledger: Ledger) -> dict[int, tuple[BatchState, list[tuple[int, int]]]]:
    return {
        row.batch_time_ms: (
            row.state,
            [(each.from_offset, each.until_offset) for each in ledger.batches.inputs("shop", row.batch_time_ms)],
        )
        for row in ledger.batches.page("shop", 100)
    }


class KilledError(BaseException):
    """The worker is killed."""


@pytest.mark.parametrize("checkpointed", [True, False])
@pytest.mark.parametrize("more", [True, False])
def test_the_manifest_of_a_time_taken_over_later_does_not_count(
    receiving: Receiving, lost: Any, monkeypatch: pytest.MonkeyPatch, more: bool, checkpointed: bool
) -> None:
    receiving.store(10)
    receiving.clock.advance(10_000)
    if checkpointed:
        checkpoint_now(receiving.context, T1)

    def killed(*_args: Any, **_options: Any) -> None:
        raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(receiving.ledger.allocations, "allocate", killed)
        with pytest.raises(KilledError):
            allocate(receiving.context, T1, takes_over=True)
    if more:
        receiving.store(10)
    receiving.clock.advance(10_000)
    allocate(receiving.context, T2, takes_over=True)
    before = batches(receiving.ledger)
    ledger, recovered = lost()
    assert batches(ledger) == before == {
        T1: (BatchState.ABSORBED, []), T2: (BatchState.ALLOCATED, [(0, 20 if more else 10)]),
    }  # fmt: skip
    assert any("took its records over" in notice for notice in recovered.notices)
    assert check_coverage(ledger.snapshots.take("shop"))[0] == []


def test_a_late_block_follows_the_batch_sealed_before_it(receiving: Receiving, lost: Any) -> None:
    checkpoint_now(receiving.context, START_MS)
    receiving.store(10)
    receiving.clock.advance(45_000)
    allocate(receiving.context, T4, takes_over=True)
    # Cut at 25 s, and stored after that batch's allocation.
    receiving.store(10, cut_time_ms=START_MS + 25_000)
    before = [(waiting.batch_time_ms, waiting.records) for waiting in receiving.ledger.blocks.unclaimed("shop")]
    assert before == [(START_MS + 50_000, 10)]
    ledger, _ = lost()
    assert [(waiting.batch_time_ms, waiting.records) for waiting in ledger.blocks.unclaimed("shop")] == before


@pytest.mark.parametrize("with_gap", [False, True])
def test_a_partition_whose_batches_were_removed_keeps_its_place(
    receiving: Receiving, lost: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_gap: bool
) -> None:
    """Its batches left the history; its position stays, in the ledger and after a rebuild."""
    monkeypatch.setattr(cleanup, "SLACK_BATCHES", 0)
    limits = Limits(history=timedelta(seconds=60))
    receiving.stream = receiving.stream.model_copy(update={"limits": limits, "remember": timedelta(seconds=20)})
    receiving.store(1_000)
    if with_gap:
        gap = GapRow(1, "shop", "clicks", PARTITION, 0, 100, "deleted in Kafka", None, START_MS)
        with receiving.ledger.positions._database.engine.begin() as connection:
            connection.execute(insert(gaps).values(gap.to_columns()))
    for number in range(1, 25):
        for path in receiving.writer.close(receiving.accepted):
            receiving.ledger.segments.closed(receiving.lease, path)
        receiving.new_segment()
        receiving.clock.advance(10_000)
        time_ms = START_MS + number * 10_000
        allocate(receiving.context, time_ms)
        receiving.complete(time_ms)
        checkpoint_now(receiving.context, time_ms)
        clean_up(receiving.context)
    (position,) = receiving.ledger.positions.all("shop")
    assert (position.next_offset, position.removed_until_offset) == (1_000, 1_000)
    # The next block was not durable: zeros, which may have held anything.
    receiving.store(1)
    receiving.writer.close(receiving.accepted)
    (segment,) = receiving.segments()
    path = tmp_path / "storage" / segment
    path.write_bytes(bytes(path.stat().st_size))
    ledger, _ = lost()
    (found,) = ledger.positions.all("shop")
    assert (found.partition, found.next_offset) == (PARTITION, 1_000)


def test_a_batch_repeated_in_vain_does_not_stop_a_rebuild(receiving: Receiving, lost: Any) -> None:
    """Its log was deleted when it had completed, between segments that are still needed."""
    receiving.ledger.streams.register(
        "shop", receiving.stream.to_json(), batch_interval_ms=10_000, block_interval_ms=200, max_concurrent_batches=2
    )
    for _ in range(3):
        receiving.store(10)
        for path in receiving.writer.close(receiving.accepted):
            receiving.ledger.segments.closed(receiving.lease, path)
        receiving.new_segment()
        receiving.clock.advance(10_000)
    for time_ms in (T1, T2):
        allocate(receiving.context, time_ms)
    receiving.complete(T2)
    checkpoint_now(receiving.context, T2)
    receiving.clock.advance(60_000)
    assert clean_up(receiving.context).segments == 1
    run: dict[str, Any] = {"holder": "a person", "way": "connect", "lease_ms": 1_000}
    receiving.ledger.attempts.fail(receiving.ledger.attempts.begin("shop", T2, **run, force=True), "Kafka is away")
    checkpoint_now(receiving.context, T2)
    before = batches(receiving.ledger)
    ledger, recovered = lost()
    assert batches(ledger) == before
    assert before[T2][0] is BatchState.FAILED
    assert not [notice for notice in recovered.notices if "missing" in notice]
