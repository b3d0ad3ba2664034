"""The leases of shared jobs, and the requests for their processes."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.ledger import JobState
from headrace.ledger.errors import LeaseHeldError, LeaseLostError
from headrace.ledger.receiving.jobs import REQUESTED_OF


def register(ledger: Any, *names: str) -> None:
    for name in names:
        ledger.streams.register(name, "{}", batch_interval_ms=1000, block_interval_ms=200)


def request(ledger: Any, stream: str, shared_job: str = "shared") -> Any:
    attributes = {REQUESTED_OF: shared_job, "revision": 1}
    ledger.jobs.acquire(stream, holder=f"task of {stream}", lease_ms=1000, attributes=attributes)
    return ledger.jobs.current(stream)


def test_one_process_is_the_job_of_a_name(ledger: Any) -> None:
    """It takes over the lease of the process that started it."""
    claim = ledger.shared_jobs.acquire("shared", holder="one", lease_ms=1000)
    assert (claim.epoch, claim.attributes) == (1, {})
    with pytest.raises(LeaseHeldError, match="held by one"):
        ledger.shared_jobs.acquire("shared", holder="two", lease_ms=1000)
    lease = ledger.shared_jobs.acquire("shared", holder="one", lease_ms=3000, attributes={"pid": 7})
    assert (lease.epoch, lease.attributes, lease.lease_until_ms) == (1, {"pid": 7}, ledger.now_ms() + 3000)
    assert ledger.shared_jobs.acquire("other", holder="two", lease_ms=1000).epoch == 1


def test_a_process_whose_lease_is_out_hears_of_its_successor(ledger: Any, clock: Any) -> None:
    lease = ledger.shared_jobs.acquire("shared", holder="one", lease_ms=1000)
    clock.advance(900)
    ledger.shared_jobs.renew(lease)
    clock.advance(1000)
    assert ledger.shared_jobs.acquire("shared", holder="two", lease_ms=1000).epoch == 2
    with pytest.raises(LeaseLostError, match="no longer the shared job"):
        ledger.shared_jobs.renew(lease)
    ledger.shared_jobs.end("shared", 1)
    assert ledger.shared_jobs.current("shared").alive(ledger.now_ms()), "the end of the first is not that of the second"


def test_after_its_end_the_same_holder_begins_a_new_epoch(ledger: Any) -> None:
    lease = ledger.shared_jobs.acquire("shared", holder="one", lease_ms=1000)
    ledger.shared_jobs.end("shared", 1)
    assert not ledger.shared_jobs.current("shared").alive(ledger.now_ms())
    with pytest.raises(LeaseLostError):
        ledger.shared_jobs.renew(lease)
    assert ledger.shared_jobs.acquire("shared", holder="one", lease_ms=1000).epoch == 2
    assert ledger.shared_jobs.current("unknown") is None


def test_a_shared_jobs_requests_wait_and_have_not_expired(ledger: Any, clock: Any) -> None:
    register(ledger, "a", "b", "c", "d")
    request(ledger, "a")
    clock.advance(500)
    request(ledger, "b")
    request(ledger, "c", "other")
    ledger.jobs.acquire("d", holder="a job of its own", lease_ms=1000)
    assert [job.stream for job in ledger.jobs.requests("shared")] == ["a", "b"]
    clock.advance(600)
    assert [job.stream for job in ledger.jobs.requests("shared")] == ["b"]


def test_a_request_is_adopted_once(ledger: Any) -> None:
    register(ledger, "a")
    waiting = request(ledger, "a")
    lease = ledger.jobs.adopt(waiting, holder="process", lease_ms=9000, attributes={"pid": 7})
    job = ledger.jobs.current("a")
    assert (job.holder, job.state, job.lease_until_ms) == ("process", JobState.STARTING, ledger.now_ms() + 9000)
    assert job.attributes == {REQUESTED_OF: None, "revision": 1, "pid": 7}
    assert ledger.jobs.requests("shared") == []
    ledger.jobs.renew(lease)
    with pytest.raises(LeaseLostError):
        ledger.jobs.adopt(waiting, holder="another process", lease_ms=9000, attributes={})


def test_a_request_that_was_ended_is_not_adopted(ledger: Any) -> None:
    register(ledger, "a")
    waiting = request(ledger, "a")
    ledger.jobs.end_dead("a", 1, "its task was killed")
    with pytest.raises(LeaseLostError):
        ledger.jobs.adopt(waiting, holder="process", lease_ms=9000, attributes={})
