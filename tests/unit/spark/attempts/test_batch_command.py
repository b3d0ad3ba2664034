"""The process of an attempt, without Spark."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.receiver.waiting import eventually

from headrace.batch import next_attempt
from headrace.batch.allocation import allocate
from headrace.batch.time_range import TimeRange
from headrace.hooks.ledger import register
from headrace.ledger import AttemptState, Ledger
from headrace.spark.attempts import batch_command, range_run
from headrace.spark.attempts.batch_attempt import BatchAttempt
from headrace.spark.connect_sessions import attempt_session_id
from headrace.spark.termination import EXIT_NOT_OURS
from headrace.stream import ConsoleOutput, KafkaInput, Stream
from headrace.stream_context import StreamContext


@pytest.fixture
def stream(tmp_path: Path) -> Stream:
    return Stream(
        name="shop",
        inputs=KafkaInput(bootstrap_servers="127.0.0.1:1", topics="clicks"),
        outputs=ConsoleOutput(),
        batch_interval="10 s",
        storage=tmp_path,
        ledger=f"sqlite:///{tmp_path}/ledger.db",
    )


class Unread:
    """A pipe without a reader."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")

    flush = write


def test_a_process_whose_task_was_killed_names_that_as_the_cause(stream: Stream, monkeypatch: Any) -> None:
    with Ledger.open(stream.ledger) as ledger:
        register(ledger, stream)
        at_ms = ledger.now_ms() // 10_000 * 10_000
        allocate(StreamContext(stream, ledger), at_ms)
        monkeypatch.setattr("sys.stdout", Unread())
        monkeypatch.setattr(batch_command, "raise_on_sigterm", lambda: None)
        # An empty batch needs no Spark: the table's header is printed to the task, which is gone.
        command = ["--ledger", stream.ledger, "--stream", "shop", "--batch-time", str(at_ms)]
        assert batch_command.main(command) == 1
        (row,) = ledger.attempts.of_batch("shop", at_ms)
    assert row.state is AttemptState.FAILED
    assert "The Airflow task that ran this attempt was killed" in str(row.error)
    assert "BrokenPipe" not in str(row.error)


def test_a_ledger_that_cannot_be_opened_is_reported_in_a_line(
    stream: Stream, monkeypatch: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(batch_command, "raise_on_sigterm", lambda: None)
    command = ["--ledger", stream.ledger, "--stream", "shop", "--batch-time", "1700000000000"]
    assert batch_command.main(command) == 1
    out, err = capfd.readouterr()
    assert "failed: There is no ledger at" in out + err
    assert "Traceback" not in out + err


def test_the_command_uses_the_definition_its_attempt_began_with(stream: Stream, monkeypatch: Any) -> None:
    old = stream.model_copy(update={"parameters": {"version": "old"}})
    ran = []
    monkeypatch.setattr(batch_command, "raise_on_sigterm", lambda: None)
    monkeypatch.setattr(
        batch_command,
        "run_attempt",
        lambda attempt: ran.append((attempt.stream.parameters, attempt.parameters)),
    )
    with Ledger.open(stream.ledger) as ledger:
        revision = register(ledger, old)
        at_ms = ledger.now_ms() // 10_000 * 10_000
        allocate(StreamContext(stream, ledger), at_ms)
        claim: dict[str, Any] = {"holder": "task", "way": "submit", "lease_ms": 60_000, "revision": revision}
        attempt = ledger.attempts.begin("shop", at_ms, **claim)
        register(ledger, stream.model_copy(update={"parameters": {"version": "new"}}))
    command = ["--ledger", stream.ledger, "--stream", "shop", "--batch-time", str(at_ms), "--way", "submit"]
    assert batch_command.main([*command, "--attempt", str(attempt.number)]) == 0
    assert ran == [({"version": "old"}, {"version": "old"})]


def test_an_attempt_of_a_range_has_a_session_for_each_thread(stream: Stream, monkeypatch: Any) -> None:
    opened, closed = [], []

    def run(attempt: BatchAttempt) -> SimpleNamespace:
        assert attempt.spark in opened
        attempt.ledger.attempts.record_output(attempt.claim, "console", {})
        attempt.ledger.attempts.complete(attempt.claim)
        return SimpleNamespace(records=0)

    def connect(_context: StreamContext, url: str, token: str, session_id: str) -> str:
        assert (url, token) == ("sc://localhost:1", "token")
        opened.append(session_id)
        return session_id

    monkeypatch.setattr(batch_command, "raise_on_sigterm", lambda: None)
    monkeypatch.setattr(batch_command, "_connect_server", lambda _: ("sc://localhost:1", "token"))
    monkeypatch.setattr(batch_command, "_connected", connect)
    monkeypatch.setattr(batch_command, "_close", closed.append)
    monkeypatch.setattr(range_run, "run_attempt", run)
    with Ledger.open(stream.ledger) as ledger:
        register(ledger, stream)
        last_ms = ledger.now_ms() // 10_000 * 10_000
        times = [last_ms - 30_000 + step for step in range(0, 40_000, 10_000)]
        for at_ms in times:
            allocate(StreamContext(stream, ledger), at_ms)
            single = ledger.attempts.begin("shop", at_ms, holder="own", way="connect", lease_ms=60_000)
            ledger.attempts.record_output(single, "console", {})
            ledger.attempts.complete(single)
        attributes = TimeRange(times[0] - 10_000, last_ms, "run").attributes
        first = ledger.attempts.begin(
            "shop", times[0], holder="task", way="connect", lease_ms=60_000, force=True, attributes=attributes
        )
        command = ["--ledger", stream.ledger, "--stream", "shop", "--batch-time", str(times[0])]
        assert batch_command.main([*command, "--attempt", str(first.number)]) == 0
        rows = [ledger.attempts.of_batch("shop", at_ms)[-1] for at_ms in times]
    assert {(row.number, row.state, row.holder) for row in rows} == {(2, AttemptState.COMPLETED, "task")}
    assert {row.attributes["session"] for row in rows} == set(opened) == set(closed)


def test_a_run_of_one_batch_leaves_the_ranges_session_to_others(stream: Stream, monkeypatch: Any) -> None:
    """The session stays for the range's other batches."""
    ended = []

    def end(_url: str, _token: str, session_id: str, tag: str, *, release: bool = True) -> list[str]:
        ended.append((session_id, tag.rpartition("/")[2], release))
        return [tag]

    monkeypatch.setattr(batch_command, "end_session", end)
    with Ledger.open(stream.ledger) as ledger:
        register(ledger, stream)
        at_ms = ledger.now_ms() // 10_000 * 10_000
        allocate(StreamContext(stream, ledger), at_ms)
        begun: dict[str, Any] = {"holder": "t", "way": "connect", "lease_ms": 60_000, "force": True}
        of_range = {"session": "of the range"}
        completed = ledger.attempts.begin("shop", at_ms, attributes=of_range, **begun)
        ledger.attempts.record_output(completed, "console", {})
        ledger.attempts.complete(completed)
        ledger.attempts.begin("shop", at_ms, attributes=of_range, **begun)
        single = ledger.attempts.begin("shop", at_ms, **begun)
        last = ledger.attempts.begin("shop", at_ms, **begun)
        batch_command.end_earlier_attempts(ledger, last, "sc://localhost:1", "token")
    # The first has ended, and the second may still run.
    assert ended == [("of the range", "2", False), (attempt_session_id(single), "3", True)]


def test_a_ranges_own_application_outlasts_a_batch_without_spark(stream: Stream, monkeypatch: Any) -> None:
    """Only its first batch needs no Spark."""
    application = SimpleNamespace(applicationId="local-1", uiWebUrl=None, _gateway=None)
    session = SimpleNamespace(sparkContext=application, stop=lambda: None, newSession=SimpleNamespace)
    done: list[int] = []
    sessions: list[Any] = []
    at_once = threading.Barrier(2, timeout=60)

    def run(attempt: BatchAttempt) -> SimpleNamespace:
        if attempt.batch_time_ms != times[0]:
            eventually(lambda: times[0] in done)
            # Else one thread may run both, in its session.
            at_once.wait()
            sessions.append(attempt.spark)
        attempt.ledger.attempts.record_output(attempt.claim, "console", {})
        attempt.ledger.attempts.complete(attempt.claim)
        done.append(attempt.batch_time_ms)
        return SimpleNamespace(records=0)

    monkeypatch.setattr(batch_command, "raise_on_sigterm", lambda: None)
    monkeypatch.setattr(batch_command, "open_own_session", lambda *_: session)
    monkeypatch.setattr(batch_command, "ProcessWatch", lambda *_: SimpleNamespace(start=lambda: None))
    monkeypatch.setattr(batch_command, "jvm_gone", lambda _: None)
    monkeypatch.setattr(range_run, "run_attempt", run)
    monkeypatch.setattr(next_attempt, "processors_are_short", lambda _: False)
    with Ledger.open(stream.ledger) as ledger:
        register(ledger, stream)
        last_ms = ledger.now_ms() // 10_000 * 10_000
        times = [last_ms - 20_000, last_ms - 10_000, last_ms]
        for at_ms in times:
            allocate(StreamContext(stream, ledger), at_ms)
        attributes = TimeRange(times[0] - 10_000, last_ms, "run").attributes
        first = ledger.replays.begin(
            "shop", times[0], target="v2", definition=stream.to_json(), outputs=["console"], holder="task",
            way="submit", lease_ms=60_000, attributes=attributes,
        )  # fmt: skip
        command = ["--ledger", stream.ledger, "--stream", "shop", "--batch-time", str(times[0]), "--way", "submit"]
        assert batch_command.main([*command, "--attempt", str(first.number)]) == 0
    assert sorted(done) == times
    # Views of one batch's transform are not another's.
    assert sessions[0] is not sessions[1]


def test_an_attempt_fenced_during_its_start_writes_nothing(stream: Stream, monkeypatch: Any) -> None:
    """It is fenced while its application starts."""
    application = SimpleNamespace(applicationId="local-1", uiWebUrl=None, _gateway=None)

    def start(*_: Any) -> SimpleNamespace:
        ledger.attempts.begin("shop", at_ms, holder="newer", way="submit", lease_ms=60_000, force=True)
        return SimpleNamespace(sparkContext=application, stop=lambda: stopped.append(True))

    wrote, stopped = [], []
    monkeypatch.setattr(batch_command, "raise_on_sigterm", lambda: None)
    monkeypatch.setattr(batch_command, "open_own_session", start)
    monkeypatch.setattr(batch_command, "ProcessWatch", lambda *_: SimpleNamespace(start=lambda: None))
    monkeypatch.setattr(batch_command, "jvm_gone", lambda _: None)
    monkeypatch.setattr(batch_command, "run_attempt", lambda attempt: wrote.append(attempt.spark))
    with Ledger.open(stream.ledger) as ledger:
        register(ledger, stream)
        at_ms = ledger.now_ms() // 10_000 * 10_000
        allocate(StreamContext(stream, ledger), at_ms)
        command = ["--ledger", stream.ledger, "--stream", "shop", "--batch-time", str(at_ms), "--way", "submit"]
        assert batch_command.main(command) == EXIT_NOT_OURS
    assert (wrote, stopped) == ([], [True])


def test_an_incomplete_range_does_not_blame_its_first_batch(
    stream: Stream, monkeypatch: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    def run(*_: Any) -> None:
        raise range_run.RangeIncompleteError("1 of 30 batches of the day are left, 1 failed in this try.")

    monkeypatch.setattr(batch_command, "raise_on_sigterm", lambda: None)
    monkeypatch.setattr(batch_command, "_run", run)
    with Ledger.open(stream.ledger):
        command = ["--ledger", stream.ledger, "--stream", "shop", "--batch-time", "1700000000000"]
        assert batch_command.main(command) == 1
    assert "headrace: shop, range: failed: 1 of 30 batches of the day are left" in capfd.readouterr().err
