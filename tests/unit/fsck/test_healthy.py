"""What headrace itself does to a ledger never looks like damage, in whatever order it is done, nor while it is done."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from headrace.ledger.batches.tables import Attempt
from headrace.ledger.errors import (
    AllocationConflictError,
    AlreadyCompletedError,
    AttemptFencedError,
    BatchStateError,
    LeaseHeldError,
    NotItsTurnError,
    SlotBusyError,
)
from headrace.ledger.snapshots import StreamSnapshot

from .conftest import INTERVAL_MS, STREAM, TIMES, Shop

REFUSED = (AlreadyCompletedError, BatchStateError, NotItsTurnError, SlotBusyError, AllocationConflictError)
SIZES = st.dictionaries(st.sampled_from((0, 1)), st.integers(0, 5), min_size=1)


class AnyOperations(RuleBasedStateMachine):
    """Receives, runs, fails, abandons, checkpoints and cleans as it likes."""

    folder: Path
    empty: Path
    coalesce: bool
    number = 0

    def __init__(self) -> None:
        super().__init__()
        type(self).number += 1
        folder = self.folder / str(self.number)
        folder.mkdir()
        shutil.copy(self.empty, folder / "ledger.db")
        self.shop = Shop(folder, coalesce=self.coalesce)
        self.attempts: list[Attempt] = []

    def teardown(self) -> None:
        report = self.shop.check()
        self.shop.ledger.close()
        shutil.rmtree(self.folder / str(self.number))
        assert (report.findings, report.unchecked) == ([], [])

    def a_time(self, back: int) -> int:
        """A batch time that has come."""
        now_ms = self.shop.clock.now_ms()
        return now_ms // INTERVAL_MS * INTERVAL_MS - back * INTERVAL_MS

    @rule(sizes=SIZES, skip=st.sampled_from((0, 0, 1)))
    def store(self, sizes: dict[int, int], skip: int) -> None:
        if any(sizes.values()):
            self.shop.store(sizes, skip=skip)

    @rule()
    def write_and_crash(self) -> None:
        self.shop.write({0: 2})
        self.shop.new_epoch()

    @rule(partition=st.sampled_from((0, 1)), offsets=st.integers(1, 3), gap=st.sampled_from((None, "retention")))
    def advance(self, partition: int, offsets: int, gap: str | None) -> None:
        self.shop.advance(partition, offsets, gap)

    @rule(ms=st.sampled_from((1, 3_000, INTERVAL_MS, 4 * INTERVAL_MS)))
    def wait(self, ms: int) -> None:
        self.shop.clock.advance(ms)

    @rule()
    def restart_receiver(self) -> None:
        self.shop.new_epoch()

    @rule(graceful=st.booleans())
    def restart_job(self, graceful: bool) -> None:
        if graceful:
            self.shop.ledger.jobs.release(self.shop.job)
        with contextlib.suppress(LeaseHeldError):
            self.shop.new_job()

    @precondition(lambda self: self.shop.incarnation < 3)
    @rule()
    def recreate_topic(self) -> None:
        self.shop.recreate()

    @rule(back=st.integers(0, 4))
    def allocate(self, back: int) -> None:
        with contextlib.suppress(*REFUSED):
            self.shop.allocate(self.a_time(back))

    @rule(back=st.integers(0, 4), force=st.booleans())
    def begin(self, back: int, force: bool) -> None:
        with contextlib.suppress(*REFUSED):
            time_ms = self.a_time(back)
            self.shop.allocate(time_ms)
            self.attempts.append(self.shop.begin(time_ms, force=force))

    @rule(well=st.booleans(), data=st.data())
    def end(self, well: bool, data: st.DataObject) -> None:
        if not self.attempts:
            return
        attempt = self.attempts.pop(data.draw(st.integers(0, len(self.attempts) - 1)))
        with contextlib.suppress(BatchStateError, AttemptFencedError):
            if not well:
                self.shop.ledger.attempts.fail(attempt, "as it happens")
                return
            for output in attempt.outputs:
                self.shop.ledger.attempts.record_output(attempt, output, {})
            self.shop.ledger.attempts.complete(attempt)

    @rule(back=st.integers(0, 4))
    def run(self, back: int) -> None:
        with contextlib.suppress(*REFUSED):
            self.shop.run(self.a_time(back))

    @rule(back=st.integers(0, 4))
    def abandon(self, back: int) -> None:
        with contextlib.suppress(*REFUSED):
            time_ms = self.a_time(back)
            self.shop.allocate(time_ms)
            self.shop.ledger.batches.abandon(STREAM, time_ms, "never mind")

    @rule(back=st.integers(0, 2))
    def checkpoint(self, back: int) -> None:
        self.shop.checkpoint(self.a_time(back))

    @rule()
    def clean(self) -> None:
        self.shop.clean()

    @rule(back=st.integers(0, 4))
    def replay(self, back: int) -> None:
        with contextlib.suppress(*REFUSED):
            time_ms = self.a_time(back)
            self.shop.allocate(time_ms)
            self.attempts.append(self.shop.begin_replay(time_ms))

    @invariant()
    def the_ledger_is_consistent(self) -> None:
        assert self.shop.check_ledger() == []


@pytest.mark.parametrize("coalesce", [False, True], ids=["each time by itself", "coalescing"])
def test_whatever_is_done_there_are_no_findings(tmp_path: Path, empty_ledger: Path, coalesce: bool) -> None:
    machine = type("Machine", (AnyOperations,), {"folder": tmp_path, "empty": empty_ledger, "coalesce": coalesce})
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine,
        settings=settings(
            max_examples=settings().max_examples // 10,
            stateful_step_count=25,
            phases=(Phase.explicit, Phase.generate),
            suppress_health_check=list(HealthCheck),
        ),
    )


# -- while it runs --------------------------------------------------------------------------------------------------


def between_the_looks(shop: Shop, monkeypatch: pytest.MonkeyPatch, happens: Callable[[], None]) -> None:
    """Have something happen after the ledger was read and before the files are."""
    take = shop.ledger.snapshots.take
    waiting = [happens]

    def take_then(stream: str) -> StreamSnapshot:
        taken = take(stream)
        if waiting:
            waiting.pop()()
        return taken

    monkeypatch.setattr(shop.ledger.snapshots, "take", take_then)


def test_what_is_received_meanwhile_is_no_finding(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    def receive() -> None:
        for _ in range(3):
            shop.store()
        shop.new_epoch()
        shop.store()

    between_the_looks(shop, monkeypatch, receive)
    assert shop.check().findings == []


def test_what_is_cleaned_meanwhile_is_no_finding(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    shop.complete(TIMES[1])
    shop.checkpoint(TIMES[1])
    shop.clock.advance(10 * INTERVAL_MS)

    def clean() -> None:
        assert shop.clean().segments == 1

    between_the_looks(shop, monkeypatch, clean)
    assert shop.check().findings == []


def test_what_is_run_meanwhile_is_no_finding(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> None:
        shop.clock.advance(INTERVAL_MS)
        for place in (1, 2):
            shop.complete(TIMES[place])
        shop.store()
        shop.run(TIMES[3])

    between_the_looks(shop, monkeypatch, run)
    assert shop.check().findings == []


def test_damage_is_reported_also_of_a_stream_that_runs(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = shop.segments()[0].removeprefix("log/")
    shop.log_path(gone).unlink()
    between_the_looks(shop, monkeypatch, lambda: shop.store() and None)
    assert [finding.subject for finding in shop.check().findings] == [gone]


def test_an_attempt_that_died_after_its_last_record_is_no_damage(shop: Shop) -> None:
    """Its commit of the end was lost. The next attempt completes the batch by the records, and does not begin."""
    died = shop.begin(TIMES[2])
    for output in died.outputs:
        shop.ledger.attempts.record_output(died, output, {})
    with pytest.raises(AlreadyCompletedError):
        shop.begin(TIMES[2])
    assert shop.check_ledger() == []
