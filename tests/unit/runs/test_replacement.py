"""The replacement of a receiver job that is older than the task that looks at it."""

from __future__ import annotations

import pytest

from headrace.clock import ManualClock
from headrace.ledger import EventKind, Ledger
from headrace.runs.replacement import SETTLED_MS, is_newer, replace_older_job
from headrace.spark import versions
from headrace.spark.versions import REPLACED_BY

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


def test_an_older_worker_that_started_the_job_again_keeps_it_for_a_while(ledger, begin, clock):
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
