"""A batch that takes over the batch times before it that nobody ran; and what a window keeps in the log."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from headrace.batch.allocation import Allocation, allocate
from headrace.batch.checkpoint import write_checkpoint
from headrace.batch.cleanup import clean_up
from headrace.batch.manifest import Manifest
from headrace.ledger import BatchState
from headrace.ledger.errors import AllocationConflictError
from headrace.spark.batch_plan import plan_outputs
from headrace.stream import ConsoleOutput, Window
from headrace.stream_context import StreamContext

from .conftest import START_MS, Receiving

T1, T2, T3, T4 = (START_MS + 10_000 * number for number in range(1, 5))


@pytest.fixture
def coalescing(receiving: Receiving) -> Receiving:
    """Ten records in each of T1, T2 and T3, which have ended."""
    for _ in range(3):
        receiving.store(10)
        receiving.clock.advance(10_000)
    return receiving


def take(receiving: Receiving, batch_time_ms: int) -> Allocation:
    return allocate(receiving.context, batch_time_ms, takes_over=True)


def manifest_of(allocation: Allocation) -> Manifest:
    return Manifest.load(allocation.batch.manifest_uri, sha256=allocation.batch.manifest_sha256)


def test_the_first_batch_after_a_down_time_takes_all_before_it(coalescing: Receiving) -> None:
    taken = take(coalescing, T3)
    assert (taken.batch.absorbed, taken.batch.records) == ((T1, T2), 30)
    assert [(row.from_offset, row.until_offset) for row in taken.inputs] == [(0, 30)]
    assert manifest_of(taken).records == 30
    assert coalescing.ledger.blocks.unclaimed("shop") == []
    # A run for one of these finds that, and takes nothing.
    absorbed = take(coalescing, T1)
    assert (absorbed.fresh, absorbed.batch.state, absorbed.batch.absorbed_by_ms) == (False, BatchState.ABSORBED, T3)
    assert absorbed.inputs == ()


def test_claimed_times_stay_as_they_are(coalescing: Receiving) -> None:
    assert take(coalescing, T1).batch.records == 10
    assert take(coalescing, T3).batch.absorbed == (T2,)
    coalescing.clock.advance(10_000)
    assert take(coalescing, T4).batch.absorbed == ()


def test_a_window_holds_whole_batches_and_each_record_once(coalescing: Receiving) -> None:
    """As docs/stream.md says: T3 took T2 over, and stands in a window with all of its records."""
    output = ConsoleOutput(window=Window(length="20 s"))
    coalescing.stream = coalescing.stream.model_copy(update={"outputs": (output,)})
    read = {}
    for at_ms in (T1, T3, T4):
        if at_ms == T4:
            coalescing.clock.advance(10_000)
        take(coalescing, at_ms)
        (plan,) = plan_outputs(StreamContext(coalescing.stream, coalescing.ledger), at_ms, ["console"])
        read[at_ms] = [Manifest.load(origin.manifest_uri).records for origin in plan.origins]
    assert read == {T1: [10], T3: [20], T4: [20, 0]}


def test_a_batch_that_takes_nothing_over_has_its_own_time_alone(coalescing: Receiving) -> None:
    taken = allocate(coalescing.context, T3)
    assert (taken.batch.records, taken.batch.absorbed) == (10, ())


def test_times_before_another_batch_are_left_to_a_batch_of_their_own(coalescing: Receiving) -> None:
    """With them the ranges of T3 would hold the records of T2."""
    allocate(coalescing.context, T2)
    taken = take(coalescing, T3)
    assert taken.batch.absorbed == ()
    assert [(row.from_offset, row.until_offset) for row in taken.inputs] == [(20, 30)]
    assert take(coalescing, T1).batch.records == 10


def test_a_time_that_is_claimed_meanwhile_is_left_out(coalescing: Receiving, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks_of = coalescing.ledger.allocations.blocks_of
    claimed: list[int] = []

    def claim_one_meanwhile(*key: Any, **absorb: Any) -> Any:
        if not claimed:
            claimed.append(T1)
            coalescing.ledger.allocations.allocate("shop", T1, manifest_uri="m", manifest_sha256="0", blocks_expected=1)
        return blocks_of(*key, **absorb)

    monkeypatch.setattr(coalescing.ledger.allocations, "blocks_of", claim_one_meanwhile)
    taken = take(coalescing, T3)
    assert (taken.batch.absorbed, manifest_of(taken).records) == ((T2,), 20)


def test_quarrels_end(coalescing: Receiving, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AllocationConflictError("claimed")

    monkeypatch.setattr(coalescing.ledger.allocations, "allocate", refuse)
    with pytest.raises(AllocationConflictError):
        take(coalescing, T3)


def manifests(receiving: Receiving) -> list[str]:
    return receiving.storage.below("shop").paths("manifests")


def test_an_allocator_that_was_overtaken_harms_no_manifest_and_takes_its_own_away(
    coalescing: Receiving, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocate_in_ledger = coalescing.ledger.allocations.allocate
    calls: list[int] = []

    def overtaken(*key: Any, **arguments: Any) -> Any:
        if not calls:
            # This one has read T1 as unclaimed and written its manifest; now T1 is claimed, and the other's is written.
            calls.append(1)
            allocate_in_ledger("shop", T1, manifest_uri="m", manifest_sha256="0", blocks_expected=1)
            overtaking = take(coalescing, T3)
            assert manifest_of(overtaking).records == 20
        return allocate_in_ledger(*key, **arguments)

    monkeypatch.setattr(coalescing.ledger.allocations, "allocate", overtaken)
    taken = take(coalescing, T3)
    assert (taken.batch.absorbed, manifest_of(taken).records) == ((T2,), 20)
    (left,) = manifests(coalescing)
    assert taken.batch.manifest_uri == f"{coalescing.stream.folder_url}/{left}"


def test_a_crash_while_another_allocates_leaves_the_manifest_that_counts(
    coalescing: Receiving, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocate_in_ledger = coalescing.ledger.allocations.allocate

    def crash(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(coalescing.ledger.allocations, "allocate", crash)
        take(coalescing, T3)
    allocate_in_ledger("shop", T1, manifest_uri="m", manifest_sha256="0", blocks_expected=1)

    def overtaken(*key: Any, **arguments: Any) -> Any:
        # This one found another's file, and has written its own. It dies when the other's has come to count.
        (mine,) = {f"{coalescing.stream.folder_url}/{path}" for path in manifests(coalescing)} - {plain}
        assert arguments["manifest_uri"] == mine
        allocate_in_ledger(*key, **(arguments | {"manifest_uri": plain, "manifest_sha256": sha256}))
        raise KeyboardInterrupt

    plain = f"{coalescing.stream.folder_url}/manifests/{T3}.json"
    sha256 = hashlib.sha256(coalescing.storage.read(f"shop/manifests/{T3}.json")).hexdigest()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(coalescing.ledger.allocations, "allocate", overtaken)
        take(coalescing, T3)
    again = take(coalescing, T3)
    assert again.batch.manifest_uri == plain
    assert manifest_of(again).records == 30


def test_a_time_that_is_absorbed_while_it_is_allocated_leaves_no_manifest(
    coalescing: Receiving, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocate_in_ledger = coalescing.ledger.allocations.allocate

    def absorbed(*key: Any, **arguments: Any) -> Any:
        monkeypatch.setattr(coalescing.ledger.allocations, "allocate", allocate_in_ledger)
        take(coalescing, T3)
        return allocate_in_ledger(*key, **arguments)

    monkeypatch.setattr(coalescing.ledger.allocations, "allocate", absorbed)
    assert take(coalescing, T1).batch.state is BatchState.ABSORBED
    assert manifests(coalescing) == [f"manifests/{T3}.json"]
    assert manifest_of(take(coalescing, T3)).records == 30


def test_what_a_window_reaches_back_to_stays_while_batches_are_caught_up(
    receiving: Receiving, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiving.store(10)
    receiving.clock.advance(10_000)
    receiving.new_segment()
    receiving.store(10)
    receiving.new_segment()
    # Two hours later: T1 is caught up, T2 and the empty times after it are not.
    receiving.clock.advance(7_200_000)
    take(receiving, T1)
    receiving.complete(T1)
    write_checkpoint(receiving.context, T1)
    stream = receiving.stream
    windowed = type("Windowed", (), {"__getattr__": lambda _, name: getattr(stream, name)})()
    windowed.window_ms, windowed.remember_ms = 20_000, 30_000

    def removed() -> int:
        return clean_up(receiving.context_of(windowed)).segments

    assert removed() == 0
    take(receiving, T2)
    assert removed() == 0
    receiving.complete(T2)
    write_checkpoint(receiving.context, T2)
    # The next one, T3, is an empty time; its window begins at T1.
    assert removed() == 0
    for time_ms in (T3, T4):
        take(receiving, time_ms)
        receiving.complete(time_ms)
        write_checkpoint(receiving.context, time_ms)
    # The next one's window begins at T3: T1 is out of it by an interval and more.
    assert removed() == 1
    # Without windows nothing holds the log for batches that take none of it.
    assert clean_up(receiving.context_of(stream)).segments == 1
