"""Attempts at the outputs of a batch begin, die and report in any order: what the ledger says stays true."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from tests.support.ledger_rules import broken_rules

from headrace.clock import ManualClock
from headrace.ledger import AttemptState, BatchState, Ledger
from headrace.ledger.batches.tables import Attempt
from headrace.ledger.errors import (
    AlreadyCompletedError,
    AttemptFencedError,
    BatchStateError,
    OutputsMissingError,
    StepsLostError,
)

NOW_MS = 1_700_000_000_000
STEPS = ("index", "files", "topic")
# The stream has these all the time, and gets and loses the third.
ALWAYS = STEPS[:2]
RUN = {"holder": "task", "way": "connect", "lease_ms": 1_000}
COPY = '{"outputs": [{"id": "index"}, {"id": "files"}]}'
CHOICE = st.integers(min_value=0, max_value=9)


class AnyOrder(RuleBasedStateMachine):
    """Does what processes may do, and keeps account of which attempt has each output."""

    folder: Path
    empty: Path
    number = 0

    def __init__(self) -> None:
        super().__init__()
        type(self).number += 1
        path = self.folder / f"{self.number}.db"
        shutil.copy(self.empty, path)
        self.clock = ManualClock(NOW_MS)
        self.ledger = Ledger.open(f"sqlite:///{path}", clock=self.clock)
        self.batches = self.ledger.batches
        self.register(STEPS)
        self.ledger.allocations.allocate("s", NOW_MS, manifest_uri="m", manifest_sha256="0")
        self.attempts: list[Attempt] = []
        # By target and output: the attempt that has it, and whether it has recorded or failed it.
        self.owners: dict[tuple[str, str], int] = {}
        self.ended: set[int] = set()
        self.results: dict[tuple[str, str], AttemptState] = {}
        self.completed_by: tuple[str, ...] | None = None

    @rule(steps=st.sampled_from((STEPS, ALWAYS)))
    def register(self, steps: tuple[str, ...]) -> None:
        self.steps = steps
        self.ledger.streams.register("s", "{}", batch_interval_ms=1000, block_interval_ms=200, outputs=steps)

    def teardown(self) -> None:
        broken = broken_rules(self.ledger, "s")
        self.ledger.close()
        assert broken == []

    @rule(outputs=st.none() | st.sets(st.sampled_from(STEPS), min_size=1), force=st.booleans())
    def begin(self, outputs: set[str] | None, force: bool) -> None:
        if not (outputs or set()) <= set(self.steps):
            with pytest.raises(BatchStateError):
                self.ledger.attempts.begin("s", NOW_MS, outputs=sorted(outputs or ()), force=force, **RUN)
            return
        try:
            attempt = self.ledger.attempts.begin(
                "s", NOW_MS, outputs=None if outputs is None else sorted(outputs), force=force, **RUN
            )
        except AlreadyCompletedError as error:
            assert not force
            for step in outputs or ALWAYS:
                assert self.results["", step] is AttemptState.COMPLETED
            # One that is at an output which the stream has lost may live, and completes the batch when it ends.
            rows = self.ledger.attempts.of_batch("s", NOW_MS)
            lost = [row for row in rows if row.alive(self.clock.now_ms()) and not set(row.outputs) <= set(self.steps)]
            assert outputs is not None or lost or error.batch.state is BatchState.COMPLETED
            return
        except StepsLostError:
            # All that is missing is the step that the stream has lost.
            assert not force
            assert STEPS[2] not in self.steps
            done = [step for step in STEPS if self.results.get(("", step)) is AttemptState.COMPLETED]
            assert done == list(ALWAYS)
            return
        if not force:
            assert all(self.results.get(("", step)) is not AttemptState.COMPLETED for step in attempt.outputs)
        self.take(attempt)
        if outputs is None:
            # What it takes is all that is missing, so the batch completes when all attempts have.
            required = self.batches.get("s", NOW_MS).required
            assert required is not None
            assert set(self.steps) <= set(required) or self.completed_by is not None

    @rule(outputs=st.sets(st.sampled_from(("index", "files")), min_size=1), name=st.sampled_from(("v2", "v3")))
    def begin_replay(self, outputs: set[str], name: str) -> None:
        before = self.batches.get("s", NOW_MS)
        self.take(self.ledger.replays.begin("s", NOW_MS, target=name, definition=COPY, outputs=sorted(outputs), **RUN))
        after = self.batches.get("s", NOW_MS)
        assert after == replace(before, change=after.change)
        assert after.change > before.change

    def take(self, attempt: Attempt) -> None:
        for other in self.attempts:
            if other.target == attempt.target and set(other.outputs) & set(attempt.outputs):
                if other.number not in self.ended:
                    # Fenced: what it has not recorded is nobody's.
                    for output in other.outputs:
                        key = (other.target, output)
                        if self.owners.get(key) == other.number and key not in self.results:
                            self.owners.pop(key)
                self.ended.add(other.number)
        for output in attempt.outputs:
            self.owners[attempt.target, output] = attempt.number
            self.results.pop((attempt.target, output), None)
        self.attempts.append(attempt)

    @rule(which=CHOICE, output=CHOICE)
    def record(self, which: int, output: int) -> None:
        for attempt in self.one(which):
            name = attempt.outputs[output % len(attempt.outputs)]
            if self.allowed(attempt, self.ledger.attempts.record_output, name, {"by": attempt.number}):
                self.results[attempt.target, name] = AttemptState.COMPLETED

    @rule(which=CHOICE)
    def complete(self, which: int) -> None:
        for attempt in self.one(which):
            again = self.ledger.attempts.of_batch("s", NOW_MS)[attempt.number - 1].state is AttemptState.COMPLETED
            with contextlib.suppress(OutputsMissingError):
                if again:
                    self.ledger.attempts.complete(attempt)
                elif self.allowed(attempt, self.ledger.attempts.complete):
                    self.ended.add(attempt.number)

    @rule(which=CHOICE)
    def fail(self, which: int) -> None:
        for attempt in self.one(which):
            if self.allowed(attempt, self.ledger.attempts.fail, "boom"):
                self.ended.add(attempt.number)
                for output in attempt.outputs:
                    self.results.setdefault((attempt.target, output), AttemptState.FAILED)

    @rule(milliseconds=st.integers(min_value=100, max_value=1_500))
    def wait(self, milliseconds: int) -> None:
        self.clock.advance(milliseconds)

    @rule(which=CHOICE)
    def renew(self, which: int) -> None:
        for attempt in self.one(which):
            self.allowed(attempt, self.ledger.attempts.renew)

    def one(self, which: int) -> list[Attempt]:
        return [self.attempts[-1 - which % len(self.attempts)]] if self.attempts else []

    def allowed(self, attempt: Attempt, step: Callable[..., Any], *arguments: Any) -> bool:
        """Whether the step was taken: exactly if the attempt has neither ended nor lost an output."""
        if attempt.number in self.ended:
            with pytest.raises(AttemptFencedError):
                step(attempt, *arguments)
            return False
        step(attempt, *arguments)
        return True

    @invariant()
    def outputs_are_the_newest_attempts(self) -> None:
        for target in ("", "v2", "v3"):
            found = {row.output_id: row for row in self.ledger.attempts.outputs("s", NOW_MS, target=target)}
            expected = {output: state for (of, output), state in self.results.items() if of == target}
            assert {output: row.state for output, row in found.items()} == expected
            for output, row in found.items():
                assert row.attempt == self.owners[target, output]

    @invariant()
    def the_state_is_that_of_the_outputs(self) -> None:
        batch = self.batches.get("s", NOW_MS)
        running = [row for row in self.ledger.attempts.of_batch("s", NOW_MS) if row.state is AttemptState.RUNNING]
        own = [row for row in running if not row.target]
        recorded = [self.results.get(("", step)) for step in STEPS]
        # What it completed by stays, whatever is done to it then.
        assert set(self.completed_by or ()) <= set(batch.steps or ())
        self.completed_by = batch.steps
        if batch.state is BatchState.COMPLETED:
            assert recorded[:2] == [AttemptState.COMPLETED] * len(ALWAYS)
            assert set(ALWAYS) <= set(batch.steps or ())
        elif batch.state is BatchState.FAILED:
            if batch.error == "boom":
                assert AttemptState.FAILED in recorded
            else:
                # The stream had lost the third step when the other two were done.
                assert "was not written to 'topic', which the definition no longer has" in str(batch.error)
                assert recorded[:2] == [AttemptState.COMPLETED] * len(ALWAYS)
                assert recorded[2] is not AttemptState.COMPLETED
        elif batch.state is BatchState.RUNNING:
            assert own
        else:
            assert batch.state is BatchState.ALLOCATED
        assert (batch.completed_at_ms is not None) == (batch.state is BatchState.COMPLETED)
        # An output and a replay's copy of it are each written by one attempt.
        held = [(row.target, output) for row in running for output in row.outputs]
        assert len(held) == len(set(held))


def test_what_the_ledger_says_of_outputs_stays_true(tmp_path: Path, empty_ledger: Path) -> None:
    machine = type("Machine", (AnyOrder,), {"folder": tmp_path, "empty": empty_ledger})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=settings().max_examples // 3, stateful_step_count=40, suppress_health_check=list(HealthCheck)
        ),
    )
