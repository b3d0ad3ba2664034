"""The batches of a range in one process. The ledger is real; what an attempt does is not."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import insert, update
from tests.unit.receiver.waiting import eventually

from headrace.batch import next_attempt
from headrace.batch.allocation import allocate
from headrace.batch.range_progress import RangeError, RangeProgress
from headrace.batch.time_range import TimeRange
from headrace.errors import TRY_NUMBER, HeadraceError
from headrace.hooks.ledger import register
from headrace.ledger import AttemptState, BatchState, Ledger
from headrace.ledger.batches.tables import Attempt, batches
from headrace.ledger.errors import AttemptFencedError, LedgerError, NotItsTurnError
from headrace.ledger.receiving.tables import unclaimed_times
from headrace.spark.attempts import range_run
from headrace.spark.attempts.batch_attempt import BatchAttempt
from headrace.spark.attempts.range_run import (
    RangeIncompleteError,
    RangeResult,
    RangeRunner,
    RangeSettings,
)
from headrace.stream import ElasticsearchOutput, KafkaInput, KeyIds, Stream
from headrace.stream.stream import replayed
from headrace.stream_context import StreamContext
from headrace.wal.errors import StorageError

INTERVAL_MS = 10_000


class Sessions:
    """No session is ever needed."""

    jobs: Any = None

    def __init__(self) -> None:
        self.given_up: list[int] = []
        self.ended_before: list[int] = []

    def attributes(self, number: int) -> dict[str, Any]:
        return {"session": f"of thread {number}"}

    def open(self, number: int) -> Any:
        raise AssertionError("nobody asks")

    def end_earlier(self, claim: Attempt) -> None:
        self.ended_before.append(claim.batch_time_ms)

    def give_up(self, number: int) -> None:
        self.given_up.append(number)


class Rig:
    """A stream with empty batches, and runs of their range. ``acts`` are called in place of an attempt's work."""

    def __init__(self, ledger: Ledger, stream: Stream, number: int) -> None:
        self.ledger, self.stream = ledger, stream
        now_ms = ledger.now_ms() // INTERVAL_MS * INTERVAL_MS
        self.after_ms = now_ms - number * INTERVAL_MS
        self.times = [self.after_ms + (place + 1) * INTERVAL_MS for place in range(number)]
        for time_ms in self.times:
            allocate(StreamContext(stream, ledger), time_ms)
        self.acts: dict[int, Callable[[], None]] = {}
        self.ran: list[int] = []
        self.shared: set[bool] = set()
        self.reported: list[str] = []
        self.sessions = Sessions()
        self.document_ids: Any = None

    @property
    def replay(self) -> Stream:
        ids = {} if self.document_ids is None else {"document_ids": self.document_ids}
        return replayed(self.stream, {"elasticsearch": {"index": "clicks-v2", **ids}})

    def batches(self, run: str = "run 1") -> TimeRange:
        return TimeRange(self.after_ms, self.times[-1], run)

    def begin(self, time_ms: int, *, run: str = "run 1", try_number: int = 1, holder: str = "task") -> Attempt:
        attributes = {**self.batches(run).attributes, TRY_NUMBER: try_number, "run_id": run}
        return self.ledger.replays.begin(
            "shop", time_ms, target="v2", definition=self.replay.to_json(), outputs=("elasticsearch",),
            holder=holder, way="connect", lease_ms=30_000, attributes=attributes,
        )  # fmt: skip

    def progress(self, run: str = "run 1", *, target: str = "v2", ordered: bool = False) -> RangeProgress:
        return RangeProgress.of(
            self.ledger, "shop", self.batches(run), ("elasticsearch",), target=target, ordered=ordered
        )

    def run(self, *, run: str = "run 1", threads: int = 3, **options: Any) -> RangeResult:
        left = self.progress(run, ordered=self.document_ids is not None).left
        first = self.begin(left[0].batch_time_ms, run=run, **options)
        (row,) = [r for r in self.attempts(first.batch_time_ms) if r.number == first.number]
        settings = RangeSettings(
            threads=threads, partitions=1, parameters={}, out=StringIO(), report=self.reported.append, lease_ms=30_000
        )
        context = StreamContext(self.replay, self.ledger)
        return RangeRunner(context, self.batches(run), row, self.sessions, settings).run()

    def attempts(self, time_ms: int) -> Any:
        return self.ledger.attempts.of_batch("shop", time_ms)

    def work(self, attempt: BatchAttempt) -> Any:
        """In place of `run_attempt`."""
        self.ran.append(attempt.batch_time_ms)
        self.shared.add(attempt.shares_jobs)
        try:
            self.acts.get(attempt.batch_time_ms, lambda: None)()
        except HeadraceError as error:
            self.ledger.attempts.fail(attempt.claim, str(error))
            raise
        self.ledger.attempts.record_output(attempt.claim, "elasticsearch", {"created": 10})
        self.ledger.attempts.complete(attempt.claim)
        return SimpleNamespace(records=10)

    def fail(self, *times: int) -> None:
        def refuse() -> None:
            raise HeadraceError("the index said no")

        self.acts.update(dict.fromkeys(times, refuse))

    def complete(self, time_ms: int) -> None:
        """By the batch's own run."""
        claim = self.ledger.attempts.begin("shop", time_ms, holder="t", way="connect", lease_ms=5_000)
        self.ledger.attempts.record_output(claim, "elasticsearch", {})
        assert self.ledger.attempts.complete(claim).state is BatchState.COMPLETED

    def repeat(self, time_ms: int, revision: int) -> None:
        """By the range, into the stream's own output."""
        claim = self.ledger.attempts.begin(
            "shop", time_ms, holder="t", way="connect", lease_ms=5_000, force=True, revision=revision,
            attributes=self.batches().attributes,
        )  # fmt: skip
        self.ledger.attempts.record_output(claim, "elasticsearch", {})
        self.ledger.attempts.complete(claim)

    def states(self) -> list[str]:
        rows = self.ledger.replays.between("shop", "v2", 0, 1 << 60)
        return [row.state.value for row in rows]


@pytest.fixture(scope="module")
def empty_ledger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty ledger, to be copied: making the schema takes longer than a test."""
    path = tmp_path_factory.mktemp("ledger") / "ledger.db"
    Ledger.open(f"sqlite:///{path}").close()
    return path


@pytest.fixture
def stream(tmp_path: Path, empty_ledger: Path) -> Stream:
    shutil.copy(empty_ledger, tmp_path / "ledger.db")
    return Stream(
        name="shop",
        inputs=KafkaInput(bootstrap_servers="127.0.0.1:1", topics="clicks"),
        outputs=ElasticsearchOutput(hosts="http://127.0.0.1:1", index="clicks"),
        batch_interval="10 s",
        storage=tmp_path,
        ledger=f"sqlite:///{tmp_path}/ledger.db",
    )


@pytest.fixture
def rig(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    with Ledger.open(stream.ledger) as ledger:
        register(ledger, stream)
        rig = Rig(ledger, stream, 8)
        monkeypatch.setattr(range_run, "run_attempt", rig.work)
        monkeypatch.setattr(range_run, "_POLL_SECONDS", 0.05)
        monkeypatch.setattr(next_attempt, "_ASK_SECONDS", 0.05)
        # The stream's own batches have not run: they are due.
        monkeypatch.setattr(next_attempt, "processors_are_short", lambda _: False)
        yield rig


def test_every_batch_of_a_range_has_an_attempt_like_the_first(rig: Rig) -> None:
    result = rig.run()
    assert (result.batches, result.records) == (8, 80)
    assert sorted(rig.ran) == rig.times
    assert rig.states() == ["completed"] * 8
    for time_ms in rig.times:
        (attempt,) = rig.attempts(time_ms)
        assert (attempt.holder, attempt.definition) == ("task", rig.replay.to_json())
        assert attempt.attributes["session"].startswith("of thread")
        assert TimeRange.of(attempt.attributes) == rig.batches()
    assert "8 batches are done: 80 records" in rig.reported[-1]
    assert rig.progress().to_dict() == {
        "batches": 8, "completed": 8, "failed": 0, "left": 0, "left_out": 0, "records": 0
    }  # fmt: skip


def test_a_range_is_done_when_one_definition_wrote_all_of_it(rig: Rig) -> None:
    before, after = rig.stream, rig.stream.model_copy(update={"parameters": {"limit": 2}})
    for time_ms in rig.times:
        rig.complete(time_ms)
    for stream, times in ((before, rig.times[:5]), (after, rig.times[5:])):
        revision = register(rig.ledger, stream)
        for time_ms in times:
            rig.repeat(time_ms, revision)
    assert [batch.batch_time_ms for batch in rig.progress(target="").left] == rig.times[:5]
    for time_ms in rig.times[:5]:
        rig.repeat(time_ms, revision)
    assert not rig.progress(target="").left


def test_a_batch_that_fails_does_not_stop_the_others(rig: Rig) -> None:
    """The next try runs it alone."""
    rig.fail(rig.times[2])
    with pytest.raises(RangeIncompleteError, match="1 of 8 batches"):
        rig.run()
    assert rig.states().count("completed") == 7
    assert list(rig.progress().failures()) and "the index said no" in next(rig.progress().failures())
    rig.acts.clear()
    rig.ran.clear()
    rig.run(try_number=2)
    assert rig.ran == [rig.times[2]]


def test_as_many_failures_in_a_row_as_run_at_a_time_end_the_run(rig: Rig) -> None:
    rig.fail(*rig.times)
    with pytest.raises(RangeIncompleteError, match="8 of 8 batches"):
        rig.run(threads=2)
    assert 3 <= len(rig.ran) <= 4, "an output that is away does not cost an attempt at each batch"
    assert any("no more batches are begun" in line for line in rig.reported)
    assert len(rig.progress().failed) == len(rig.ran)


def test_what_has_failed_comes_last_in_the_next_try(rig: Rig) -> None:
    rig.fail(rig.times[0])
    with pytest.raises(RangeIncompleteError):
        rig.run(threads=1)
    rig.ledger.attempts.fail(rig.begin(rig.times[1], run="run 2"), "no")
    left = [batch.batch_time_ms for batch in rig.progress("run 2").left]
    assert left == [rig.times[0], *rig.times[2:], rig.times[1]]


def test_a_range_that_deletes_by_key_stops_at_a_failure(rig: Rig) -> None:
    """It runs one batch after another."""
    rig.document_ids = KeyIds()
    rig.fail(rig.times[3])
    with pytest.raises(RangeIncompleteError):
        rig.run()
    assert rig.ran == rig.times[:4]
    rig.acts.clear()
    rig.run(try_number=2)
    assert rig.ran == [*rig.times[:4], *rig.times[3:]]


def test_another_runs_live_attempt_is_waited_for_first(rig: Rig) -> None:
    """The range runs the batch after it."""
    other = rig.begin(rig.times[5], run="run 2", holder="another task")
    thread = threading.Thread(target=rig.run)
    thread.start()
    eventually(lambda: any("is being run by another task" in line for line in rig.reported))
    eventually(lambda: len(rig.ran) == 7)
    assert rig.times[5] not in rig.ran
    rig.ledger.attempts.fail(other, "it is over")
    thread.join(20)
    assert rig.states() == ["completed"] * 8
    assert [row.state for row in rig.attempts(rig.times[5])] == [AttemptState.FAILED, AttemptState.COMPLETED]


@pytest.mark.parametrize(("threads", "shared"), [(3, True), (1, False)])
def test_batches_at_a_time_share_jobs_and_a_lone_one_never_waits(rig: Rig, threads: int, shared: bool) -> None:
    rig.sessions.jobs = object()
    rig.run(threads=threads)
    assert rig.shared == {shared}


def complete_own(rig: Rig) -> None:
    """Let the stream's own runs complete its batches."""
    for time_ms in rig.times:
        attempt = rig.ledger.attempts.begin("shop", time_ms, holder="own run", way="connect", lease_ms=30_000)
        rig.ledger.attempts.record_output(attempt, "elasticsearch", {"created": 10})
        rig.ledger.attempts.complete(attempt)


@pytest.mark.parametrize("old", [0, 100])
def test_a_due_batch_goes_first_where_processors_are_short(rig: Rig, monkeypatch: pytest.MonkeyPatch, old: int) -> None:
    """The due batch is one of the stream, not of the range."""
    monkeypatch.setattr(next_attempt, "GIVE_WAY_SECONDS", 600)
    # Batch times of yesterday that nobody has run.
    yesterday = [rig.after_ms - 86_400_000 + number * INTERVAL_MS for number in range(old)]
    with rig.ledger._database.write() as connection:
        for time_ms in yesterday:
            sums = {"blocks": 1, "records": 1, "payload_bytes": 1}
            connection.execute(insert(unclaimed_times).values(stream="shop", part=0, batch_time_ms=time_ms, **sums))
    asked, before = 0, list[int]()

    def short(_: float) -> bool:
        nonlocal asked
        with asking:
            asked += 1
            if asked == 10:
                before.extend(rig.ran)
                complete_own(rig)
        return True

    asking = threading.Lock()
    monkeypatch.setattr(next_attempt, "processors_are_short", short)
    assert rig.run().batches == 8
    # The task has begun the first one before.
    assert before in ([], rig.times[:1])


def test_few_batches_run_at_a_time_where_processors_are_short(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream is live."""
    complete_own(rig)
    monkeypatch.setattr(next_attempt, "GIVE_WAY_SECONDS", 600)
    monkeypatch.setattr(next_attempt, "processors_are_short", lambda _: True)
    at_once, most = 0, 0

    def work(attempt: BatchAttempt) -> Any:
        nonlocal at_once, most
        with counting:
            at_once += 1
            most = max(most, at_once)
        time.sleep(0.05)
        with counting:
            at_once -= 1
        return rig.work(attempt)

    counting = threading.Lock()
    monkeypatch.setattr(range_run, "run_attempt", work)
    assert rig.run(threads=8).batches == 8
    # One of the eight threads, which also runs the batch that the task has begun before.
    assert most == 1


@pytest.mark.parametrize("passed", ["the longest wait", "the time in which a batch is due"])
def test_a_range_does_not_wait_for_ever_for_an_unrun_batch(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, passed: str
) -> None:
    """Nobody runs that batch."""
    if passed == "the longest wait":
        monkeypatch.setattr(next_attempt, "GIVE_WAY_SECONDS", 0.05)
    else:
        monkeypatch.setattr(next_attempt, "GIVE_WAY_SECONDS", 600)
        now_ms = rig.times[-1] + 10 * INTERVAL_MS
        monkeypatch.setattr(Ledger, "now_ms", lambda _: now_ms)
    monkeypatch.setattr(next_attempt, "processors_are_short", lambda _: True)
    assert rig.run().batches == 8


def test_a_range_does_not_wait_for_batches_behind_a_failed_one(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batches are those of an ordered stream."""
    monkeypatch.setattr(next_attempt, "GIVE_WAY_SECONDS", 600)
    monkeypatch.setattr(next_attempt, "processors_are_short", lambda _: True)
    rig.stream = rig.stream.model_copy(update={"ordered": True})
    register(rig.ledger, rig.stream)
    rig.ledger.attempts.fail(
        rig.ledger.attempts.begin("shop", rig.times[0], holder="own run", way="connect", lease_ms=30_000), "no"
    )
    assert rig.run(threads=1).batches == 8


@pytest.mark.parametrize("first", ["runs", "has completed", "has completed before absorbed times"])
def test_a_range_gives_way_to_an_ordered_streams_backlog(rig: Rig, monkeypatch: pytest.MonkeyPatch, first: str) -> None:
    monkeypatch.setattr(next_attempt, "GIVE_WAY_SECONDS", 600)
    # All its batches are older than those that would be due.
    now_ms = rig.times[-1] + 10 * INTERVAL_MS
    monkeypatch.setattr(Ledger, "now_ms", lambda _: now_ms)
    rig.stream = rig.stream.model_copy(update={"ordered": True})
    register(rig.ledger, rig.stream)
    begun: dict[str, Any] = {"holder": "own run", "way": "connect", "lease_ms": 600_000}
    own = rig.ledger.attempts.begin("shop", rig.times[0], **begun)
    rig.ledger.attempts.record_output(own, "elasticsearch", {})
    if first != "runs":
        rig.ledger.attempts.complete(own)
    absorbed = rig.times[1:3] if "absorbed" in first else []
    with rig.ledger._database.write() as connection:
        query = update(batches).where(batches.c.batch_time_ms.in_(absorbed))
        connection.execute(query.values(state=BatchState.ABSORBED, absorbed_by_ms=rig.times[3]))
    asked, before = 0, list[int]()

    def short(_: float) -> bool:
        nonlocal asked
        asked += 1
        if asked == 5:
            before.extend(rig.ran)
            if first == "runs":
                rig.ledger.attempts.complete(own)
            for time_ms in rig.times[1 + len(absorbed) :]:
                rig.complete(time_ms)
        return True

    monkeypatch.setattr(next_attempt, "processors_are_short", short)
    assert rig.run(threads=1).batches == 8 - len(absorbed)
    # The task has begun the first one before.
    assert asked >= 5 and before in ([], rig.times[:1])


def test_an_attempt_that_a_killed_try_has_left_is_fenced_at_once(rig: Rig) -> None:
    left = rig.begin(rig.times[4])
    assert rig.run(try_number=2).batches == 8
    states = {row.number: row.state for row in rig.attempts(rig.times[4])}
    assert states == {left.number: AttemptState.FENCED, left.number + 1: AttemptState.COMPLETED}
    # What it had started in Spark ends before the batch is written again. The others have nothing to end.
    assert rig.sessions.ended_before == [rig.times[4]]


def test_a_try_leaves_the_range_to_a_later_ones_definition(rig: Rig) -> None:
    later = replace(rig.batches(), definition="another").attributes
    fields = {"target": "v2", "definition": rig.replay.to_json(), "outputs": ("elasticsearch",), "way": "connect"}

    def replaced() -> None:
        attributes = {**later, TRY_NUMBER: 2}
        claim = rig.ledger.replays.begin(
            "shop", rig.times[1], holder="later", lease_ms=30_000, attributes=attributes, **fields
        )
        rig.ledger.attempts.record_output(claim, "elasticsearch", {})
        rig.ledger.attempts.complete(claim)

    rig.acts[rig.times[0]] = replaced
    with pytest.raises(AttemptFencedError, match="later try"):
        rig.run(threads=1)
    assert rig.ran == rig.times[:1]


def test_a_try_that_was_replaced_gives_the_range_up(rig: Rig) -> None:
    rig.begin(rig.times[6], try_number=2)
    with pytest.raises(AttemptFencedError, match="later try"):
        rig.run(try_number=1, threads=1)
    assert rig.ran == rig.times[:6]


@pytest.mark.parametrize("ends", ["failed", "is silent"])
def test_a_range_in_order_ends_at_a_batch_taken_over(rig: Rig, ends: str) -> None:
    """Else it would wait for that batch for ever, or write the later ones without it."""
    rig.document_ids = KeyIds()

    def taken_over() -> None:
        fields = {"definition": rig.replay.to_json(), "outputs": ("elasticsearch",), "ordered": ("elasticsearch",)}
        other = rig.ledger.replays.begin(
            "shop", rig.times[3], target="v2", holder="another run", way="connect", lease_ms=60_000, **fields
        )
        if ends == "failed":
            rig.ledger.attempts.fail(other, "no")
        raise AttemptFencedError("Another attempt has taken over.")

    rig.acts[rig.times[3]] = taken_over
    with pytest.raises(RangeIncompleteError):
        rig.run()
    assert rig.ran == rig.times[:4]
    assert [batch.batch_time_ms for batch in rig.progress(ordered=True).left] == rig.times[3:]


def test_a_range_in_order_ends_at_an_earlier_batch_that_is_left(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.document_ids = KeyIds()
    begin = rig.ledger.replays.begin

    def not_yet(stream_name: str, batch_time_ms: int, **fields: Any) -> Any:
        if batch_time_ms == rig.times[2]:
            raise NotItsTurnError("An earlier batch is not written.", busy=(rig.times[1],), remedy="Wait.")
        return begin(stream_name, batch_time_ms, **fields)

    monkeypatch.setattr(rig.ledger.replays, "begin", not_yet)
    with pytest.raises(RangeIncompleteError):
        rig.run()
    assert rig.ran == rig.times[:2]


def test_an_interrupted_run_cancels_what_runs_and_begins_nothing(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    cancelled = threading.Event()
    monkeypatch.setattr(BatchAttempt, "cancel_jobs", lambda _: cancelled.set())
    started = threading.Barrier(3)

    def wait_until_cancelled() -> None:
        started.wait(20)
        cancelled.wait(20)
        raise HeadraceError("cancelled")

    rig.acts = dict.fromkeys(rig.times, wait_until_cancelled)

    def interrupt(*_: Any) -> None:
        started.wait(20)
        raise KeyboardInterrupt

    monkeypatch.setattr(RangeRunner, "_follow", interrupt)
    with pytest.raises(KeyboardInterrupt):
        rig.run(threads=2)
    assert len(rig.ran) == 2
    assert rig.states() == ["failed"] * 2


def test_a_reader_that_is_gone_ends_the_run(rig: Rig) -> None:
    rig.fail(rig.times[0])
    reported = []

    def report(line: str) -> None:
        reported.append(line)
        if "failed" in line:
            raise HeadraceError("the task is gone")

    rig.reported = SimpleNamespace(append=report)  # type: ignore[assignment]
    with pytest.raises(RangeIncompleteError):
        rig.run(threads=1)
    assert rig.ran == rig.times[:1]


def test_an_error_between_two_batches_is_reported(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise LedgerError("the ledger refused a statement")

    monkeypatch.setattr(next_attempt, "processors_are_short", lambda _: True)
    monkeypatch.setattr(type(rig.ledger.batches), "page", refuse)
    with pytest.raises(RangeIncompleteError, match="7 of 8 batches"):
        rig.run(threads=1)
    assert any("no more batches are begun: LedgerError: the ledger refused" in line for line in rig.reported)


def test_the_results_of_a_range_are_written_while_it_runs(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(range_run, "_REPORT_SECONDS", 0.01)
    for time_ms in rig.times:
        rig.complete(time_ms)
    # The first is not of the range: its own run writes its result.
    rig.after_ms = rig.times[0]

    def written() -> set[int]:
        return set(rig.ledger.results.written("shop"))

    rig.acts[rig.times[7]] = lambda: eventually(lambda: written() >= set(rig.times[1:7]))
    rig.run(threads=1)
    assert rig.times[0] not in written()


def test_results_that_cannot_be_written_do_not_end_a_range(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> int:
        raise StorageError("the disk is full")

    monkeypatch.setattr(range_run, "_REPORT_SECONDS", 0.01)
    monkeypatch.setattr(range_run, "write_results", refuse)
    rig.acts[rig.times[7]] = lambda: eventually(lambda: any("disk is full" in line for line in rig.reported))
    assert rig.run(threads=1).batches == 8


def test_a_range_leaves_out_what_has_no_records_of_its_own(rig: Rig) -> None:
    rig.ledger.batches.abandon("shop", rig.times[0], "lost")
    assert rig.progress().left_out == {"abandoned": 1}
    assert rig.run().batches == 7


def test_a_range_says_when_a_batch_after_it_took_its_records(rig: Rig) -> None:
    absorbed = update(batches).where(batches.c.batch_time_ms.in_(rig.times[5:7]))
    with rig.ledger._database.write() as connection:
        connection.execute(absorbed.values(state=BatchState.ABSORBED, absorbed_by_ms=rig.times[7]))
    assert rig.progress().left_out == {"taken over by a later batch": 2}
    del rig.times[7]
    assert rig.progress().left_out == {"taken over by a batch after the range (a later `until` includes it)": 2}


def test_only_batches_that_have_completed_are_run_again(rig: Rig) -> None:
    rig.complete(rig.times[1])
    progress = rig.progress(target="")
    assert [batch.batch_time_ms for batch in progress.left] == [rig.times[1]]
    assert progress.left_out == {"not completed yet": 7}


def test_a_range_without_batches_says_what_to_do(rig: Rig) -> None:
    rig.after_ms, rig.times = 0, [1_000]
    with pytest.raises(RangeError, match=r"no batch to run in 1970-.*`headrace batches list shop`"):
        rig.progress()


def test_a_range_with_removed_batches_is_refused_only_at_first(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused only when the range begins."""
    row = rig.ledger.streams.get("shop")
    removed = {**row.to_columns(), "removed_from_ms": rig.times[0], "removed_until_ms": rig.times[1]}
    monkeypatch.setattr(
        type(rig.ledger.streams),
        "get",
        lambda *_: SimpleNamespace(**removed, batch_time_after=row.batch_time_after),
    )
    with pytest.raises(RangeError, match=r"were removed.*Begin at"):
        rig.progress()
    rig.begin(rig.times[3])
    assert len(rig.progress().left) == 8
