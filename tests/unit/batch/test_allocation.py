"""A batch takes the blocks of its time once and for good, and those of earlier times that no run took. Log and ledger
are real.
"""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from headrace.batch.allocation import Allocation, allocate, make_manifest
from headrace.batch.checkpoint import write_checkpoint
from headrace.batch.cleanup import clean_up
from headrace.batch.manifest import Manifest, ManifestError
from headrace.clock import ManualClock
from headrace.ledger import BatchState
from headrace.ledger.errors import AllocationConflictError, BatchTimeError
from headrace.receiver.health import slow_runs
from headrace.spark.attempts.batch_plan import plan_outputs
from headrace.stream import ConsoleOutput, Window
from headrace.stream_context import StreamContext
from headrace.wal.errors import StorageError
from headrace.wal.reader import read_block
from headrace.wal.storage import open_storage

from .conftest import START_MS, T1, T2, Receiving, take


def offsets(receiving: Receiving, manifest: Manifest) -> list[int]:
    log = open_storage(manifest.log_root)
    return [
        offset
        for handle, _, _ in manifest.blocks("clicks")
        for offset in read_block(log, handle)[1].column("offset").to_pylist()
    ]


def test_a_batch_takes_exactly_its_times_blocks_and_keeps_them(receiving: Receiving) -> None:
    receiving.store(3)
    receiving.clock.advance(9_999)
    receiving.store(2)
    receiving.clock.advance(1)
    receiving.store(4)
    first = take(receiving, T1)
    assert (first.fresh, first.batch.records, first.batch.blocks) == (True, 5, 2)
    assert [(i.from_offset, i.until_offset) for i in first.inputs] == [(0, 5)]
    receiving.clock.advance(10_000)
    receiving.store(1, cut_time_ms=T1 - 1)
    again = take(receiving, T1)
    assert not again.fresh
    assert again.batch == first.batch
    manifest = Manifest.load(first.batch.manifest_uri)
    assert offsets(receiving, manifest) == [0, 1, 2, 3, 4]
    assert offsets(receiving, Manifest.load(take(receiving, T2).batch.manifest_uri)) == [5, 6, 7, 8, 9]


def test_a_late_block_goes_to_the_next_open_batch(receiving: Receiving) -> None:
    receiving.clock.advance(10_000)
    take(receiving, T1)
    late = receiving.store(1, cut_time_ms=T1 - 1)
    assert late.batch_time_ms == T2


def test_allocation_does_not_depend_on_the_order_of_runs(receiving: Receiving) -> None:
    receiving.store(2)
    receiving.clock.advance(10_000)
    receiving.store(3)
    receiving.clock.advance(10_000)
    assert take(receiving, T2).batch.records == 3
    assert take(receiving, T1).batch.records == 2


def test_a_time_that_has_come_by_one_clock_alone_is_refused(receiving: Receiving) -> None:
    """It has come by the ledger's clock, and not by the allocator's own."""
    receiving.store(2)
    host = ManualClock(START_MS)
    receiving.clock.advance(600_000)
    late_ms = receiving.clock.now_ms() // 10_000 * 10_000
    context = StreamContext(receiving.stream, receiving.ledger, storage=receiving.context.storage, clock=host)
    with pytest.raises(BatchTimeError, match=r"by the ledger's clock alone.*Nothing is allocated"):
        allocate(context, late_ms)
    with pytest.raises(BatchTimeError, match="alone"):
        allocate(context, late_ms, known_ms=(START_MS + 10_000,))
    assert receiving.ledger.streams.get("shop").sealed_until_ms == 0
    # The host's clock is the wrong one if Airflow's agrees with the ledger's.
    assert allocate(context, late_ms, known_ms=(late_ms,)).fresh
    assert allocate(context, late_ms).batch.batch_time_ms == late_ms, "an allocated batch is not taken again"


def test_an_empty_batch_is_an_allocation(receiving: Receiving) -> None:
    receiving.clock.advance(10_000)
    empty = take(receiving, T1)
    assert (empty.batch.records, empty.inputs) == (0, ())
    assert Manifest.load(empty.batch.manifest_uri).blocks("clicks") == []


@pytest.mark.parametrize("time", [T1 + 1, START_MS + 60_000])
def test_what_is_no_batch_time_or_has_not_come_is_refused(receiving: Receiving, time: int) -> None:
    with pytest.raises(BatchTimeError):
        take(receiving, time)


def test_nothing_is_allocated_if_the_manifest_cannot_be_written(receiving: Receiving) -> None:
    receiving.store(3)
    receiving.clock.advance(10_000)
    folder = receiving.storage.below("shop")
    folder.write_atomically("manifests", b"a file where the folder should be")
    with pytest.raises((StorageError, OSError)):
        take(receiving, T1)
    assert receiving.ledger.batches.find("shop", T1) is None
    folder.delete("manifests")
    receiving.store(1, cut_time_ms=T1 - 1)
    assert take(receiving, T1).batch.records == 3


def test_a_crash_between_seal_and_allocation_loses_nothing(receiving: Receiving) -> None:
    receiving.store(3)
    receiving.clock.advance(10_000)
    receiving.ledger.allocations.seal("shop", T1)
    receiving.store(1, cut_time_ms=T1 - 1)
    assert take(receiving, T1).batch.records == 3


def test_an_allocator_that_was_overtaken_leaves_the_manifest(receiving: Receiving) -> None:
    receiving.store(3)
    receiving.clock.advance(10_000)
    first = take(receiving, T1)
    # It had looked for the batch before the other allocated it, and reads the blocks after they were folded.
    find = receiving.ledger.batches.find
    answers = iter([None])
    receiving.ledger.batches.find = lambda *key: next(answers, find(*key))  # type: ignore[method-assign]
    receiving.ledger.allocations.blocks_of = lambda *_, **__: []  # type: ignore[method-assign]
    assert take(receiving, T1).batch == first.batch
    manifest = Manifest.load(first.batch.manifest_uri, sha256=first.batch.manifest_sha256)
    assert offsets(receiving, manifest) == [0, 1, 2]


def test_what_a_crashed_allocation_left_is_replaced(receiving: Receiving) -> None:
    receiving.clock.advance(10_000)
    make_manifest(receiving.stream.model_copy(update={"inputs": ()}), T1, []).write(
        receiving.storage.below("shop"), replace=False
    )
    batch = take(receiving, T1).batch
    assert "clicks" in Manifest.load(batch.manifest_uri, sha256=batch.manifest_sha256).inputs


@pytest.mark.parametrize("harm", ["missing", "damaged"])
def test_a_manifest_that_was_lost_is_written_again_as_it_was(receiving: Receiving, harm: str) -> None:
    receiving.store(3)
    receiving.clock.advance(10_000)
    batch = take(receiving, T1).batch
    folder, path = receiving.storage.below("shop"), f"manifests/{T1}.json"
    whole = folder.read(path)

    def break_it() -> None:
        if harm == "missing":
            folder.delete(path)
        else:
            folder.write_atomically(path, whole[:-5])
        with pytest.raises(ManifestError) as refused:
            Manifest.load(batch.manifest_uri, sha256=batch.manifest_sha256)
        assert "allocate_blocks" in str(refused.value.remedy)

    break_it()
    take(receiving, T1)
    assert folder.read(path) == whole
    # Only the same: not what is drawn up after its blocks' rows have gone.
    break_it()
    receiving.ledger.allocations.blocks_of = lambda *_, **__: []  # type: ignore[method-assign]
    assert take(receiving, T1).batch == batch
    assert not folder.exists(path) or folder.read(path) == whole[:-5]


T3, T4 = START_MS + 30_000, START_MS + 40_000


@pytest.fixture
def coalescing(receiving: Receiving) -> Receiving:
    """Ten records in each of T1, T2 and T3, which have ended."""
    for _ in range(3):
        receiving.store(10)
        receiving.clock.advance(10_000)
    return receiving


def take_over(receiving: Receiving, batch_time_ms: int) -> Allocation:
    return allocate(receiving.context, batch_time_ms, takes_over=True)


def manifest_of(allocation: Allocation) -> Manifest:
    return Manifest.load(allocation.batch.manifest_uri, sha256=allocation.batch.manifest_sha256)


def test_the_first_batch_after_a_down_time_takes_all_before_it(coalescing: Receiving) -> None:
    taken = take_over(coalescing, T3)
    assert (taken.batch.absorbed, taken.batch.records) == ((T1, T2), 30)
    assert [(row.from_offset, row.until_offset) for row in taken.inputs] == [(0, 30)]
    assert manifest_of(taken).records == 30
    assert coalescing.ledger.blocks.unclaimed("shop") == []
    # A run for one of these finds that, and takes nothing.
    absorbed = take_over(coalescing, T1)
    assert (absorbed.fresh, absorbed.batch.state, absorbed.batch.absorbed_by_ms) == (False, BatchState.ABSORBED, T3)
    assert absorbed.inputs == ()


def test_claimed_times_stay_as_they_are(coalescing: Receiving) -> None:
    assert take_over(coalescing, T1).batch.records == 10
    assert take_over(coalescing, T3).batch.absorbed == (T2,)
    coalescing.clock.advance(10_000)
    assert take_over(coalescing, T4).batch.absorbed == ()


def test_a_window_holds_whole_batches_and_each_record_once(coalescing: Receiving) -> None:
    """As docs/stream.md says: T3 took T2 over, and stands in a window with all of its records."""
    output = ConsoleOutput(window=Window(length="20 s"))
    coalescing.stream = coalescing.stream.model_copy(update={"outputs": (output,)})
    read = {}
    for at_ms in (T1, T3, T4):
        if at_ms == T4:
            coalescing.clock.advance(10_000)
        take_over(coalescing, at_ms)
        (plan,) = plan_outputs(StreamContext(coalescing.stream, coalescing.ledger), at_ms, ["console"])
        read[at_ms] = [Manifest.load(origin.manifest_uri).records for origin in plan.origins]
    assert read == {T1: [10], T3: [20], T4: [20, 0]}


def test_a_batch_that_takes_nothing_over_has_its_own_time_alone(coalescing: Receiving) -> None:
    taken = allocate(coalescing.context, T3)
    assert (taken.batch.records, taken.batch.absorbed) == (10, ())


def test_times_before_another_batch_are_left_to_a_batch_for_them(coalescing: Receiving) -> None:
    """With them the ranges of T3 would hold the records of T2."""
    allocate(coalescing.context, T2)
    taken = take_over(coalescing, T3)
    assert taken.batch.absorbed == ()
    assert [(row.from_offset, row.until_offset) for row in taken.inputs] == [(20, 30)]
    assert take_over(coalescing, T1).batch.records == 10


def test_a_time_that_is_claimed_meanwhile_is_left_out(coalescing: Receiving, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks_of = coalescing.ledger.allocations.blocks_of
    claimed: list[int] = []

    def claim_one_meanwhile(*key: Any, **absorb: Any) -> Any:
        if not claimed:
            claimed.append(T1)
            coalescing.ledger.allocations.allocate("shop", T1, manifest_uri="m", manifest_sha256="0", blocks_expected=1)
        return blocks_of(*key, **absorb)

    monkeypatch.setattr(coalescing.ledger.allocations, "blocks_of", claim_one_meanwhile)
    taken = take_over(coalescing, T3)
    assert (taken.batch.absorbed, manifest_of(taken).records) == ((T2,), 20)


def test_quarrels_end(coalescing: Receiving, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AllocationConflictError("claimed")

    monkeypatch.setattr(coalescing.ledger.allocations, "allocate", refuse)
    with pytest.raises(AllocationConflictError):
        take_over(coalescing, T3)


def manifests(receiving: Receiving) -> list[str]:
    return receiving.storage.below("shop").paths("manifests")


def test_an_overtaken_allocator_takes_only_its_own_manifest_away(
    coalescing: Receiving, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocate_in_ledger = coalescing.ledger.allocations.allocate
    calls: list[int] = []

    def overtaken(*key: Any, **arguments: Any) -> Any:
        if not calls:
            # This one has read T1 as unclaimed and written its manifest; now T1 is claimed, and the other's is written.
            calls.append(1)
            allocate_in_ledger("shop", T1, manifest_uri="m", manifest_sha256="0", blocks_expected=1)
            overtaking = take_over(coalescing, T3)
            assert manifest_of(overtaking).records == 20
        return allocate_in_ledger(*key, **arguments)

    monkeypatch.setattr(coalescing.ledger.allocations, "allocate", overtaken)
    taken = take_over(coalescing, T3)
    assert (taken.batch.absorbed, manifest_of(taken).records) == ((T2,), 20)
    (left,) = manifests(coalescing)
    assert taken.batch.manifest_uri == f"{coalescing.stream.folder_url}/{left}"


def test_a_crash_while_another_allocates_leaves_its_manifest(
    coalescing: Receiving, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocate_in_ledger = coalescing.ledger.allocations.allocate

    def crash(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(coalescing.ledger.allocations, "allocate", crash)
        take_over(coalescing, T3)
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
        take_over(coalescing, T3)
    again = take_over(coalescing, T3)
    assert again.batch.manifest_uri == plain
    assert manifest_of(again).records == 30


def test_a_time_absorbed_while_it_is_allocated_has_no_manifest(
    coalescing: Receiving, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocate_in_ledger = coalescing.ledger.allocations.allocate

    def absorbed(*key: Any, **arguments: Any) -> Any:
        monkeypatch.setattr(coalescing.ledger.allocations, "allocate", allocate_in_ledger)
        take_over(coalescing, T3)
        return allocate_in_ledger(*key, **arguments)

    monkeypatch.setattr(coalescing.ledger.allocations, "allocate", absorbed)
    assert take_over(coalescing, T1).batch.state is BatchState.ABSORBED
    assert manifests(coalescing) == [f"manifests/{T3}.json"]
    assert manifest_of(take_over(coalescing, T3)).records == 30


def test_what_a_window_reaches_back_to_stays_during_catching_up(
    receiving: Receiving, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiving.store(10)
    receiving.clock.advance(10_000)
    receiving.new_segment()
    receiving.store(10)
    receiving.new_segment()
    # Two hours later: T1 is caught up, T2 and the empty times after it are not.
    receiving.clock.advance(7_200_000)
    take_over(receiving, T1)
    receiving.complete(T1)
    write_checkpoint(receiving.context, T1)
    stream = receiving.stream
    windowed = type("Windowed", (), {"__getattr__": lambda _, name: getattr(stream, name)})()
    windowed.window_ms, windowed.remember_ms = 20_000, 30_000

    def removed() -> int:
        return clean_up(receiving.context_of(windowed)).segments

    assert removed() == 0
    take_over(receiving, T2)
    assert removed() == 0
    receiving.complete(T2)
    write_checkpoint(receiving.context, T2)
    # The next one, T3, is an empty time; its window begins at T1.
    assert removed() == 0
    for time_ms in (T3, T4):
        take_over(receiving, time_ms)
        receiving.complete(time_ms)
        write_checkpoint(receiving.context, time_ms)
    # The next one's window begins at T3: T1 is out of it by an interval and more.
    assert removed() == 1
    # Without windows nothing holds the log for batches that take none of it.
    assert clean_up(receiving.context_of(stream)).segments == 1


def run_each(receiving: Receiving, *, seconds: float, batches: int = 6) -> None:
    """One run after another, each as long, as a scheduler with one active run makes them."""
    for _ in range(batches):
        receiving.store(1)
        receiving.clock.advance(int(seconds * 1000))
        ended = receiving.clock.now_ms() // 10_000 * 10_000
        allocate(receiving.context, ended, takes_over=True)


def test_runs_longer_than_an_interval_are_reported_with_remedies(receiving: Receiving) -> None:
    run_each(receiving, seconds=25)
    report = slow_runs(receiving.ledger, "shop")
    assert report is not None
    assert (report.run_ms, report.interval_ms) == (25_000, 10_000)
    text = report.text(coalesces=True)
    assert "runs take 25.0 s and the batch interval is 10 s" in text
    assert "longer batch_interval" in text
    assert "single_task=True" in text


@pytest.mark.parametrize(("seconds", "batches"), [(25, 4), (10, 6)], ids=["too few batches", "in time"])
def test_runs_shorter_than_the_interval_are_not_reported(receiving: Receiving, seconds: float, batches: int) -> None:
    run_each(receiving, seconds=seconds, batches=batches)
    assert slow_runs(receiving.ledger, "shop") is None


def test_a_backlog_that_is_caught_up_is_none_of_them(receiving: Receiving) -> None:
    """Each batch is late, and each run shorter than the interval."""
    for _ in range(6):
        receiving.store(1)
        receiving.clock.advance(10_000)
    receiving.clock.advance(60_000)
    for number in range(6):
        receiving.clock.advance(5_000)
        at_ms = START_MS + 10_000 * (number + 1)
        allocate(receiving.context, at_ms)
    assert slow_runs(receiving.ledger, "shop") is None
