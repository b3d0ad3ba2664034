"""Fault by fault: the cause that is named first, the remedy, and after how many seconds."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pytest

from headrace.blocks import ReceiverId
from headrace.clock import time_text
from headrace.errors import FAILURE, Failure
from headrace.views.stream_state import headline

from .conftest import INTERVAL_MS, Shop

LEASE_MS = 30_000
KAFKA = "Look whether Kafka runs"
ABANDON = "abandon"


def next_job(shop: Shop) -> None:
    """A receiver job with one receiver, with leases as they are outside tests."""
    job = shop.ledger.jobs.acquire("shop", holder="next", lease_ms=LEASE_MS)
    receiver = shop.ledger.receivers.schedule(job, ReceiverId("shop", "records", 0))
    shop.job, shop.lease = job, shop.ledger.receivers.register(receiver, host="h", lease_ms=LEASE_MS)
    shop.ledger.jobs.update(job, state="running")
    shop.ledger.receivers.heartbeat(shop.lease, sealed_through_ms=shop.clock.now_ms())


def goes_on(shop: Shop, milliseconds: int) -> None:
    """The job and its receiver renew their leases for so long."""
    for _ in range(0, milliseconds, 10_000):
        shop.clock.advance(10_000)
        shop.ledger.jobs.renew(shop.job)
        shop.ledger.receivers.heartbeat(shop.lease, sealed_through_ms=shop.clock.now_ms())


def fail(shop: Shop, error: str, kind: Failure = Failure.PASSING) -> int:
    """The newest batch fails."""
    shop.clock.advance(INTERVAL_MS)
    attempt = shop.begin(shop.latest())
    shop.ledger.attempts.renew(attempt, attributes={FAILURE: kind.value})
    shop.ledger.attempts.fail(attempt, error)
    return attempt.batch_time_ms


def complete(shop: Shop) -> int:
    """The newest batch completes."""
    shop.clock.advance(INTERVAL_MS)
    shop.complete(shop.begin(shop.latest()))
    return shop.latest()


@pytest.fixture
def running(shop: Shop) -> Shop:
    """A job that had an error of Kafka once, and has been well for a minute."""
    shop.ledger.jobs.release(shop.job)
    next_job(shop)
    shop.ledger.receivers.report_error(shop.lease, "KafkaError: brokers are down", None)
    goes_on(shop, 60_000)
    complete(shop)
    return shop


def killed_job(shop: Shop) -> None:
    shop.clock.advance(INTERVAL_MS)
    attempt = shop.begin(shop.latest())
    shop.clock.advance(1_000)
    shop.ledger.attempts.fail(attempt, "the receiver job that the batch ran in has ended")
    shop.ledger.jobs.end_dead("shop", shop.job.epoch, "its process has ended without a report")


def killed_job_and_the_next_one(shop: Shop) -> None:
    killed_job(shop)
    shop.clock.advance(2_000)
    next_job(shop)
    goes_on(shop, 30_000)


def silent_receiver(shop: Shop) -> None:
    for _ in range(4):
        shop.clock.advance(10_000)
        shop.ledger.jobs.renew(shop.job)


def kafka_away(shop: Shop) -> None:
    health = {"records": {"asked_ms": 1, "error": "Kafka at kafka:9092 does not answer", "topics": {}}}
    shop.ledger.jobs.renew(shop.job, attributes={"inputs": health})


def elasticsearch_away(shop: Shop) -> None:
    for _ in range(12):
        fail(shop, f"Elasticsearch does not answer for {shop.clock.now_ms() % 97} s")
        goes_on(shop, 10_000)


def elasticsearch_back(shop: Shop) -> None:
    elasticsearch_away(shop)
    complete(shop)


def another_failure(shop: Shop) -> None:
    fail(shop, "Elasticsearch does not answer")
    fail(shop, "the transform raised KeyError", Failure.CODE)


def poison(shop: Shop) -> None:
    fail(shop, "the transform raised KeyError", Failure.CODE)
    complete(shop)


def corrected(shop: Shop) -> None:
    fail(shop, "the transform raised KeyError", Failure.CODE)
    goes_on(shop, 10_000)
    shop.stream = shop.stream.model_copy(update={"transform": "corrected:transform"})
    complete(shop)


class Case(NamedTuple):
    """``cause`` is in the reason, ``remedy`` in the remedy; ``seconds`` from the fault to this answer, at most."""

    fault: Callable[[Shop], None]
    state: str
    cause: str
    remedy: str
    seconds: int
    never: tuple[str, ...] = (KAFKA,)


CASES = [
    Case(killed_job, "stalled", "its process has ended without a report", "receiver DAG", 12, (KAFKA, ABANDON)),
    Case(
        killed_job_and_the_next_one,
        "falling_behind",
        "failed with the receiver job (epoch 2), in which it ran: its process has ended without a report",
        "it is run again as soon as",
        50,
        (KAFKA, ABANDON),
    ),
    Case(silent_receiver, "stalled", "has written nothing to the ledger since", "lost its executor", 40),
    Case(kafka_away, "stalled", "Kafka at kafka:9092 does not answer", KAFKA, 1, (ABANDON,)),
    Case(elasticsearch_away, "failing", "and 11 more failed", "tries the batch again by itself", 300),
    Case(elasticsearch_back, "falling_behind", "Later batches have completed since", "", 300, (KAFKA, ABANDON)),
    Case(another_failure, "failing", "KeyError", "Correct the transform", 30),
    Case(poison, "failing", "KeyError", "Correct the transform", 30),
    Case(corrected, "falling_behind", "Later batches have completed since", "", 30, (KAFKA, ABANDON)),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.fault.__name__)
def test_each_fault_has_its_cause_first(running: Shop, case: Case) -> None:
    began_ms = running.clock.now_ms()
    case.fault(running)
    found = running.summary()
    assert (found.state.value, case.cause in found.reason) == (case.state, True), found.reason
    assert case.remedy in (found.remedy or "")
    assert not [text for text in case.never if text in f"{found.reason} {found.remedy}"]
    assert (running.clock.now_ms() - began_ms) / 1000 <= case.seconds


@contextmanager
def locked(shop: Shop) -> Iterator[None]:
    connection = sqlite3.connect(shop.ledger.url.removeprefix("sqlite:///"), isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    yield
    connection.execute("ROLLBACK")
    connection.close()


def test_a_locked_ledger_is_named_when_the_first_lease_has_run_out_and_no_longer_than_it_is_locked(
    running: Shop,
) -> None:
    with locked(running):
        running.clock.advance(LEASE_MS + 1_000)
        found = running.summary()
        assert found.state == "failing"
        assert "The ledger cannot be written" in found.reason
        assert "database is locked" in found.reason
        assert "End what holds its lock" in (found.remedy or "")
        assert "brokers are down" not in " ".join([found.reason, *found.also])
    found = running.summary()
    assert found.state == "stalled"
    assert "which it last renewed at" in found.reason


def test_an_error_that_the_receiver_outlived_is_not_the_reason_of_its_silence(running: Shop) -> None:
    silent_receiver(running)
    found = running.summary()
    assert "brokers are down" not in " ".join([found.reason, *found.also])
    running.ledger.receivers.report_error(running.lease, "the disk is gone", None)
    assert "the disk is gone" in running.summary().reason


def test_failures_of_one_cause_are_one_finding_also_beyond_the_newest_batches(shop: Shop) -> None:
    for _ in range(40):
        fail(shop, "Elasticsearch does not answer")
    found = shop.summary()
    assert "and 39 more failed" in found.reason
    assert not [text for text in found.also if "does not answer" in text]


def test_of_two_causes_the_newest_failure_comes_first(shop: Shop) -> None:
    fail(shop, "the mapping conflicts")
    newest = fail(shop, "the index is read-only")
    found = shop.summary()
    assert time_text(newest) in found.reason
    assert "the index is read-only" in found.reason
    assert any("the mapping conflicts" in text for text in found.also)


def test_a_headline_is_the_line_that_matters_and_the_rest_are_details(shop: Shop) -> None:
    frames = "".join(
        f'  File "/srv/jobs/orders.py", line {line}, in total\n    return one + two\n' for line in range(20)
    )
    error = f"The batch failed:\nTraceback (most recent call last):\n{frames}KeyError: 'cents'\n"
    fail(shop, error, Failure.CODE)
    found = shop.summary()
    assert found.reason.endswith(": KeyError: 'cents'")
    assert found.details is not None
    assert "line 19, in total" in found.details


@pytest.mark.parametrize(
    ("error", "line", "whole"),
    [
        ("one line", "one line", True),
        ("first\nsecond", "first", False),
        ("\n\n", "\n\n", True),
        ("x" * 1_000, "x" * 300 + " …", False),
        ("Traceback (most recent call last):\n  File\nValueError: no\n\nmore", "ValueError: no", False),
    ],
)
def test_headline(error: str, line: str, whole: bool) -> None:
    assert headline(error) == (line, None if whole else error)
