"""A receiver job as a task sees it, and its replacement when it is older than the task."""

from __future__ import annotations

import os
import sys

import pytest

from headrace.blocks import ReceiverId
from headrace.clock import ManualClock
from headrace.ledger import EventKind, Ledger
from headrace.ledger.errors import LeaseLostError
from headrace.ledger.tables import JobLease
from headrace.processes import PROCESS, own_identity
from headrace.runs.receiver_job import (
    SETTLED_MS,
    JobOutcome,
    JobWatch,
    awaited_application,
    is_newer,
    missing_application,
    newest_job,
    replace_older_job,
)
from headrace.spark import versions
from headrace.spark.sessions import REPLACED_BY


def test_troubles_of_the_job_are_reported_as_they_begin_and_end(tmp_path) -> None:
    reported: list[str] = []
    with Ledger.open(f"sqlite:///{tmp_path}/ledger.db") as ledger:
        ledger.streams.register("shop", "{}", batch_interval_ms=1000, block_interval_ms=200)
        lease = ledger.jobs.acquire("shop", holder="somebody", lease_ms=60_000)
        watch = JobWatch("shop", lease.epoch, progress=reported.append, warn=reported.append)
        for troubles in ([], ["no topic cliks"], ["no topic cliks"], [], []):
            ledger.jobs.renew(lease, attributes={"troubles": troubles})
            assert watch.poll(ledger) is None
    assert reported[1:] == ["Problem: no topic cliks", "The problem is over."]


def test_a_pause_of_a_receiver_is_reported(tmp_path) -> None:
    reported: list[str] = []
    with Ledger.open(f"sqlite:///{tmp_path}/ledger.db") as ledger:
        ledger.streams.register("shop", "{}", batch_interval_ms=1000, block_interval_ms=200)
        job = ledger.jobs.acquire("shop", holder="somebody", lease_ms=60_000)
        lease = ledger.receivers.register(
            ledger.receivers.schedule(job, ReceiverId("shop", "records", 0)), host="h", lease_ms=60_000
        )
        watch = JobWatch("shop", job.epoch, progress=reported.append, warn=reported.append)
        for reason in (None, "the disk is full", None):
            ledger.receivers.heartbeat(lease, sealed_through_ms=0, paused_reason=reason)
            watch.poll(ledger)
    running = "Receiver shop/records/0 is running on h"
    assert reported[1:] == [running, f"{running}, paused: the disk is full", running]


@pytest.mark.skipif(sys.platform != "linux", reason="processes have an identity on Linux only")
class TestAKilledProcess:
    """The lease of its job still lasts for an hour."""

    @pytest.fixture
    def ledger(self, tmp_path):
        with Ledger.open(f"sqlite:///{tmp_path}/ledger.db") as ledger:
            ledger.streams.register("shop", "{}", batch_interval_ms=1000, block_interval_ms=200)
            yield ledger

    def start(self, ledger, **changes) -> JobLease:
        identity = {**(own_identity() or {}), **changes}
        attributes = {PROCESS: identity, "host": "vm", "pid": identity["pid"]}
        job = ledger.jobs.acquire("shop", holder="somebody", lease_ms=3_600_000, attributes=attributes)
        ledger.receivers.register(
            ledger.receivers.schedule(job, ReceiverId("shop", "records", 0)), host="vm", lease_ms=3_600_000
        )
        return job

    def test_its_job_is_ended_at_once_and_the_next_one_begins(self, ledger):
        job = self.start(ledger, started=1)
        watch = JobWatch("shop", job.epoch, progress=lambda _: None, warn=lambda _: None)
        assert watch.poll(ledger) is JobOutcome.FAILED
        row = ledger.jobs.current("shop")
        assert row.error == f"its process {os.getpid()} on vm was killed or has crashed"
        assert [receiver.state.value for receiver in ledger.receivers.all("shop")] == ["lost"]
        assert self.start(ledger).epoch == job.epoch + 1
        with pytest.raises(LeaseLostError):
            ledger.jobs.renew(job)

    def test_a_batch_waits_for_the_next_job(self, ledger):
        self.start(ledger, started=1)
        reason = "The receiver job (epoch 1) is gone, and the next one is due."
        assert awaited_application(ledger, "shop", timeout_ms=120_000) == reason

    def test_a_job_that_lives_or_may_live_is_left_alone(self, ledger):
        for changes in ({}, {"boot": "another", "started": 1}):
            job = self.start(ledger, **changes)
            assert newest_job(ledger, "shop").alive(ledger.now_ms())
            ledger.jobs.release(job)

    def test_a_job_that_ended_with_a_report_keeps_it(self, ledger):
        ledger.jobs.release(self.start(ledger, started=1), "failed", "no storage")
        assert newest_job(ledger, "shop").error == "no storage"


class TestAnExpiredLease:
    """By a ledger's clock and a watch's, both moved by hand."""

    @pytest.fixture
    def clock(self) -> ManualClock:
        return ManualClock(1_700_000_000_000)

    @pytest.fixture
    def ledger(self, tmp_path, clock):
        with Ledger.open(f"sqlite:///{tmp_path}/ledger.db", clock=clock) as ledger:
            ledger.streams.register("shop", "{}", batch_interval_ms=1000, block_interval_ms=200)
            yield ledger

    @pytest.fixture
    def lease(self, ledger):
        return ledger.jobs.acquire("shop", holder="somebody", lease_ms=30_000)

    @pytest.fixture
    def watch(self, clock, lease):
        return JobWatch("shop", lease.epoch, progress=lambda _: None, warn=lambda _: None, monotonic=clock.monotonic)

    def looks(self, ledger, clock, watch, seconds: int) -> list[JobOutcome | None]:
        """One look a second."""
        found = []
        for _ in range(seconds):
            clock.advance(1_000)
            found.append(watch.poll(ledger))
        return found

    def test_a_watched_job_is_lost_as_soon_as_its_lease_is_out(self, ledger, clock, watch):
        assert self.looks(ledger, clock, watch, 29) == [None] * 29
        assert self.looks(ledger, clock, watch, 1) == [JobOutcome.LOST]

    def test_a_job_has_time_to_renew_after_a_ledgers_outage(self, ledger, clock, lease, watch):
        self.looks(ledger, clock, watch, 5)
        clock.advance(300_000)
        assert self.looks(ledger, clock, watch, 5) == [None] * 5
        ledger.jobs.renew(lease)
        assert self.looks(ledger, clock, watch, 29) == [None] * 29
        # Nothing more is overlooked after that.
        assert self.looks(ledger, clock, watch, 1) == [JobOutcome.LOST]

    def test_a_job_gone_in_an_outage_is_lost_one_lease_later(self, ledger, clock, watch):
        clock.advance(300_000)
        assert self.looks(ledger, clock, watch, 31) == [None] * 30 + [JobOutcome.LOST]

    def test_rare_looks_find_it_too(self, ledger, clock, watch):
        watch.poll(ledger)
        clock.advance(60_000)
        assert watch.poll(ledger) is None
        clock.advance(60_000)
        assert watch.poll(ledger) is JobOutcome.LOST


def test_an_input_that_cannot_be_asked_is_warned_of_repeatedly(tmp_path) -> None:
    reported: list[str] = []
    warned: list[str] = []
    clock = ManualClock(0)
    error = "Kafka at kafka:9 cannot be asked: _TRANSPORT: refused"
    with Ledger.open(f"sqlite:///{tmp_path}/ledger.db") as ledger:
        ledger.streams.register("shop", "{}", batch_interval_ms=1000, block_interval_ms=200)
        job = ledger.jobs.acquire("shop", holder="somebody", lease_ms=60_000)
        lease = ledger.receivers.register(
            ledger.receivers.schedule(job, ReceiverId("shop", "records", 0)), host="h", lease_ms=60_000
        )
        ledger.receivers.heartbeat(lease, sealed_through_ms=0)
        health = {"records": {"asked_ms": 0, "error": error, "topics": {}}}
        ledger.jobs.update(job, state="running", attributes={"inputs": health})
        watch = JobWatch("shop", job.epoch, progress=reported.append, warn=warned.append, monotonic=clock.monotonic)
        for seconds in (1, 29, 31, 1):
            watch.poll(ledger)
            clock.advance(1_000 * seconds)
        ledger.jobs.renew(job, attributes={"inputs": {"records": {"asked_ms": 1, "error": None, "topics": {}}}})
        watch.poll(ledger)
    assert warned == [f"Problem: input records is not received: {error} (not since the stream began)"] * 2
    assert reported[1:] == [
        "Receiver shop/records/0 is waiting for its input on h",
        "The problem is over.",
        "Receiver shop/records/0 is running on h",
    ]


class TestAMissingApplication:
    @pytest.fixture
    def ledger(self, tmp_path):
        with Ledger.open(f"sqlite:///{tmp_path}/ledger.db") as ledger:
            ledger.streams.register("shop", "{}", batch_interval_ms=1000, block_interval_ms=200)
            yield ledger

    def test_its_reason_names_what_to_do(self, ledger):
        assert "no receiver job yet. Is the DAG paused that starts it (shop_receiver)?" in missing(ledger)
        lease = ledger.jobs.acquire("shop", holder="somebody", lease_ms=60_000)
        assert missing(ledger) == "The receiver job (epoch 1) is starting and serves no Spark Connect."
        ledger.jobs.update(lease, state="running", attributes={"connect_url": "sc://localhost:1"})
        assert missing(ledger) is None
        ledger.jobs.release(lease, "failed", "its JVM was killed")
        assert "(epoch 1) is gone: its JVM was killed." in missing(ledger)
        ledger.streams.set_desired_state("shop", "stopped")
        assert "`headrace streams start shop` starts it" in missing(ledger)


def missing(ledger) -> str | None:
    return missing_application(ledger, "shop", ledger.jobs.current("shop"))


OURS = {"headrace": "0.2.0", "pyspark": "4.2.0", "python": "3.11"}
OLDER = OURS | {"headrace": "0.1.9"}


@pytest.mark.parametrize(
    ("newer", "older"),
    [
        (OURS, OLDER),
        (OURS | {"headrace": "0.10.0"}, OURS),
        (OURS, OURS | {"headrace": "0.2.0rc1"}),
        (OURS | {"pyspark": "4.10.0"}, OURS),
        (OURS | {"python": "3.12"}, OURS | {"python": "3.9"}),
        # headrace decides before pyspark, so that of the two one is newer.
        (OURS | {"pyspark": "4.1.0"}, OLDER),
    ],
)
def test_of_two_that_differ_one_is_newer(newer, older):
    assert is_newer(newer, older)
    assert not is_newer(older, newer)


@pytest.mark.parametrize("theirs", [OURS, {}, OURS | {"headrace": "unknown"}])
def test_what_is_equal_or_unknown_is_not_replaced(theirs):
    assert not is_newer(OURS, theirs)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1_700_000_000_000)


@pytest.fixture
def ledger(tmp_path, clock, monkeypatch):
    monkeypatch.setattr(versions, "current_versions", lambda: OURS)
    with Ledger.open(f"sqlite:///{tmp_path}/ledger.db", clock=clock) as ledger:
        ledger.streams.register("shop", "{}", batch_interval_ms=1000, block_interval_ms=200)
        yield ledger


@pytest.fixture
def begin(ledger, clock):
    """Begins a job that has lived for a while when this returns."""

    def make(versions=OLDER, *, lived_ms=SETTLED_MS):
        lease = ledger.jobs.acquire("shop", holder="somebody", lease_ms=60_000, versions=versions)
        clock.advance(lived_ms)
        ledger.jobs.renew(lease)
        return lease

    return make


def requests(ledger) -> list[str]:
    """The reasons of all requests to stop."""
    return [event.payload["reason"] for event in ledger.events.page("shop", kinds=[EventKind.JOB_STOP_REQUESTED])]


def test_an_older_job_is_asked_to_stop_once(ledger, begin):
    begin()
    reasons = {replace_older_job(ledger, "shop") for _ in range(3)}
    difference = "headrace 0.1.9 there, 0.2.0 here"
    assert reasons == {f"The receiver job (epoch 1) is being replaced by one of this version: {difference}."}
    assert requests(ledger) == [f"it is replaced by a job of a newer version: {difference}"]
    assert ledger.jobs.current("shop").attributes[REPLACED_BY] == OURS


@pytest.mark.parametrize("versions", [OURS, OURS | {"headrace": "0.3.0"}, {}], ids=["equal", "newer", "unknown"])
def test_another_job_is_left_alone(ledger, begin, versions):
    begin(versions)
    assert replace_older_job(ledger, "shop") is None
    assert requests(ledger) == []


def test_an_older_worker_that_restarted_the_job_keeps_it_a_while(ledger, begin, clock):
    lease = begin(lived_ms=SETTLED_MS - 1)
    assert replace_older_job(ledger, "shop") is None
    clock.advance(1)
    ledger.jobs.renew(lease)
    assert replace_older_job(ledger, "shop") is not None


def test_a_stream_that_is_to_be_stopped_gets_no_other_job(ledger, begin):
    begin()
    ledger.streams.set_desired_state("shop", "stopped")
    assert replace_older_job(ledger, "shop") is None
    assert requests(ledger) == []


def test_a_job_that_stops_for_another_reason_is_not_waited_for(ledger, begin):
    begin()
    ledger.jobs.request_stop("shop", "a person wants it")
    assert replace_older_job(ledger, "shop") is None
    assert requests(ledger) == ["a person wants it"]


def test_a_job_that_began_after_the_look_is_not_asked(ledger, begin, monkeypatch):
    old = begin()
    seen = ledger.jobs.current("shop")
    ledger.jobs.release(old)
    begin(OURS)
    monkeypatch.setattr(ledger.jobs, "current", lambda _: seen)
    monkeypatch.setattr(ledger, "now_ms", lambda: seen.heartbeat_ms)
    assert replace_older_job(ledger, "shop") is None
    assert requests(ledger) == []
