"""Which outputs a failed attempt reports as possibly written. The ledger is real; rows and writers are not."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from tests.unit.receiver.waiting import eventually

from headrace.batch.allocation import allocate
from headrace.batch.readers import BatchReaders
from headrace.clock import Clock, ManualClock, SystemClock
from headrace.elasticsearch.errors import ForeignDocumentsError, TooManyDeadLettersError
from headrace.errors import HeadraceError
from headrace.hooks.ledger import register
from headrace.ledger import Ledger
from headrace.ledger.batches.tables import Attempt, AttemptRow
from headrace.spark.attempts import attempt
from headrace.spark.attempts.attempt import run_attempt
from headrace.spark.attempts.batch_attempt import BatchAttempt
from headrace.spark.attempts.batch_plan import WRITTEN, AttemptPlan, OutputPlan, plan_attempt
from headrace.spark.attempts.failures import AttemptFailedError
from headrace.spark.termination import Terminated
from headrace.stream import ConsoleOutput, KafkaInput, Stream
from headrace.stream_context import StreamContext

OUTPUTS = ("first", "second", "third")


class Inputs:
    def __init__(self, attempt: BatchAttempt) -> None:
        self.readers = BatchReaders(attempt.stream)

    def undecodable(self, _: Any) -> tuple[int, dict[str, Any]]:
        return 0, {}

    def incarnations(self, *_: Any) -> None:
        raise AssertionError("nobody asks")


class Frames:
    """An output named in ``broken`` has no rows: its transform fails."""

    broken: frozenset[str] = frozenset()

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> Frames:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def of(self, output: ConsoleOutput) -> str:
        if output.id in self.broken:
            raise ValueError("the transform said no")
        return "rows"


class Writers:
    """The writers of all outputs. ``acts`` are called in place of a write, by output."""

    def __init__(self) -> None:
        self.acts: dict[str, Callable[[], None]] = {}
        self.called: list[str] = []

    def __call__(self, output: ConsoleOutput) -> Any:
        writers = self

        class Writer:
            def write(self, *_: Any) -> dict[str, int]:
                writers.called.append(output.id)
                writers.acts.get(output.id, lambda: None)()
                return {"rows": 1}

        return Writer()

    def fail(self, output: str, error: Exception) -> None:
        def refuse() -> None:
            raise error

        self.acts[output] = refuse


class Rig:
    def __init__(self, ledger: Ledger, stream: Stream, claim: Attempt) -> None:
        self.ledger = ledger
        self.stream = stream
        self.claim = claim
        self.clock: Clock = SystemClock()

    def name_jobs(self, step: str) -> None:
        pass

    def run(self, session: Any = None) -> None:
        """Run the attempt; the error that it ends with is raised."""

        def open_session() -> Any:
            if isinstance(session, Exception):
                raise session
            return object()

        context = StreamContext(self.stream, self.ledger, clock=self.clock)
        attempt = BatchAttempt(context, self.claim, open_session, out=StringIO())
        attempt.name_jobs = self.name_jobs  # type: ignore[method-assign]
        attempt.cancel_jobs = lambda: None  # type: ignore[method-assign]
        run_attempt(attempt)

    @property
    def row(self) -> AttemptRow:
        (row,) = self.ledger.attempts.of_batch("shop", self.claim.batch_time_ms)
        return row


@pytest.fixture
def writers(monkeypatch: pytest.MonkeyPatch) -> Writers:
    writers = Writers()
    monkeypatch.setattr(attempt, "writer_of", writers)
    return writers


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, writers: Writers) -> Iterator[Rig]:
    def with_spark(*given: Any) -> AttemptPlan:
        plan = plan_attempt(*given)
        outputs = tuple(
            OutputPlan(output_plan.output, output_plan.origins, output_plan.fresh, needs_spark=True)
            for output_plan in plan.outputs
        )
        return AttemptPlan(plan.own, plan.leaving, outputs)

    monkeypatch.setattr(attempt, "BatchInputs", Inputs)
    monkeypatch.setattr(attempt, "OutputFrames", Frames)
    monkeypatch.setattr(attempt, "plan_attempt", with_spark)
    monkeypatch.setattr(Frames, "broken", frozenset())
    stream = Stream(
        name="shop",
        inputs=KafkaInput(bootstrap_servers="127.0.0.1:1", topics="clicks"),
        outputs=tuple(ConsoleOutput(id=name) for name in OUTPUTS),
        batch_interval="10 s",
        storage=tmp_path,
        ledger=f"sqlite:///{tmp_path}/ledger.db",
    )
    with Ledger.open(stream.ledger) as ledger:
        register(ledger, stream)
        at_ms = ledger.now_ms() // 10_000 * 10_000
        allocate(StreamContext(stream, ledger), at_ms)
        claim = ledger.attempts.begin("shop", at_ms, holder="task", way="submit", lease_ms=300)
        yield Rig(ledger, stream, claim)


def test_an_attempt_renews_its_lease_and_uses_the_streams_clock(rig: Rig, writers: Writers) -> None:
    rig.clock = clock = ManualClock()
    beaten_ms = rig.row.heartbeat_ms

    def take_seconds() -> None:
        def is_renewed() -> bool:
            clock.advance(1_000)
            return rig.row.heartbeat_ms > beaten_ms

        eventually(is_renewed)

    writers.acts[OUTPUTS[0]] = take_seconds
    rig.run()
    rows = rig.ledger.attempts.outputs("shop", rig.claim.batch_time_ms)
    seconds = {row.output_id: row.counts["duration_seconds"] for row in rows if row.counts}
    assert seconds == {name: clock.monotonic() if name == OUTPUTS[0] else 0.0 for name in OUTPUTS}


def test_nothing_is_written_by_an_attempt_that_gets_no_session(rig: Rig) -> None:
    with pytest.raises(AttemptFailedError, match="no Spark"):
        rig.run(ConnectionError("no Spark"))
    assert rig.row.attributes[WRITTEN] == []


def test_a_begun_output_may_be_written_if_it_met_nothing_foreign(rig: Rig, writers: Writers) -> None:
    writers.fail("first", ForeignDocumentsError("others"))
    writers.fail("second", OSError("the executor died"))
    with pytest.raises(AttemptFailedError, match=r"first: .*others .*; second: .*the executor died .*; done: third"):
        rig.run()
    assert rig.row.attributes[WRITTEN] == ["second", "third"]


def test_dead_letters_above_the_limit_are_in_the_ledger(rig: Rig, writers: Writers) -> None:
    """They come with the failure."""
    counts = {"rows": 3, "dead_lettered": 2, "dead_letter_reasons": {"rejected": 2}}
    writers.fail("first", TooManyDeadLettersError("too many", remedy="Do.", exceeded="more than 1", counts=counts))
    with pytest.raises(AttemptFailedError):
        rig.run()
    failed = rig.ledger.attempts.outputs("shop", rig.claim.batch_time_ms)[0]
    assert (failed.output_id, failed.state.value) == ("first", "failed")
    assert failed.counts == {**counts, "dead_letter_limit_exceeded": "more than 1"}


def test_an_output_whose_transform_fails_is_not_written(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Frames, "broken", frozenset({"first"}))
    with pytest.raises(AttemptFailedError, match="the transform said no"):
        rig.run()
    assert rig.row.attributes[WRITTEN] == ["second", "third"]


def test_no_output_begins_after_the_attempt_was_terminated(
    rig: Rig, writers: Writers, monkeypatch: pytest.MonkeyPatch
) -> None:
    renew, writing, terminated = rig.ledger.attempts.renew, threading.Event(), threading.Event()

    def renewed(*given: Any, **more: Any) -> int:
        if writing.is_set() and not terminated.is_set():
            terminated.set()
            raise Terminated
        return renew(*given, **more)

    def write_second() -> None:
        writing.set()
        # The attempt's thread notices the end of the attempt only between two steps.
        assert terminated.wait(10)
        threading.Event().wait(0.2)

    monkeypatch.setattr(rig.ledger.attempts, "renew", renewed)
    writers.acts["second"] = write_second
    with pytest.raises(Terminated):
        rig.run()
    assert writers.called == ["first", "second"]
    assert rig.row.attributes[WRITTEN] == ["first", "second"]


def test_an_error_in_naming_the_jobs_fails_no_step(rig: Rig, writers: Writers, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: str) -> None:
        raise OSError("the Connect server does not answer")

    monkeypatch.setattr(rig, "name_jobs", fail)
    rig.run()
    assert rig.row.state.value == "completed"


def test_a_single_failed_step_raises_its_own_error(rig: Rig, writers: Writers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Frames, "broken", frozenset())
    claim = rig.ledger.attempts.begin(
        "shop", rig.claim.batch_time_ms, holder="task", way="submit", lease_ms=300, outputs=["first"]
    )
    writers.fail("first", ForeignDocumentsError("others"))
    with pytest.raises(HeadraceError, match="others") as failed:
        Rig(rig.ledger, rig.stream, claim).run()
    assert type(failed.value) is ForeignDocumentsError
