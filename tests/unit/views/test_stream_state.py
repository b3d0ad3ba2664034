"""What a person finds at three in the morning: a stream's state, the reason, and what to do.

Fault by fault: the cause that is named first, the remedy, and after how many seconds.
"""

from __future__ import annotations

import errno
import json
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.support.seeded_ledger import SITUATIONS, seed

from headrace.blocks import ReceiverId
from headrace.clock import ManualClock, time_text
from headrace.errors import FAILURE, REPAIR, WARNING, Failure, headline
from headrace.ledger import Ledger
from headrace.receiver.health import INPUTS, InputHealth
from headrace.views.stream_state import DagFacts, Finding, judge
from headrace.views.streams import Placed, StreamSummary, default_place, summaries, summarize

from .conftest import INTERVAL_MS, Shop, T

BATCHES = 45


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ledger]:
    with Ledger.open(f"sqlite:///{tmp_path_factory.mktemp('state')}/ledger.db") as ledger:
        seed(ledger, streams=len(SITUATIONS), batches=BATCHES)
        yield ledger


def _summary(ledger: Ledger, situation: str, *facts: DagFacts) -> StreamSummary:
    index = SITUATIONS.index(situation)
    name = "orders" if index == 0 else f"orders-{index + 1}"
    place = Placed(name, "ledger", "b", "r")
    return summarize(ledger, ledger.streams.get(name), place, {dag_facts.dag_id: dag_facts for dag_facts in facts})


BUSY = (DagFacts("b", running=1), DagFacts("r", running=1))


@pytest.mark.parametrize("situation", [name for name in SITUATIONS if name != "well"])
def test_each_situation_is_recognised(ledger: Ledger, situation: str) -> None:
    assert _summary(ledger, situation, *BUSY).state.value == situation


def test_a_paused_batch_dag_is_the_reason_even_if_all_is_well(ledger: Ledger) -> None:
    summary = _summary(ledger, "well", DagFacts("b", paused=True), DagFacts("r", running=1))
    assert summary.state.value == "stalled"
    assert "The DAG b is paused in Airflow" in summary.reason
    assert "Unpause b" in (summary.remedy or "")


def test_a_receiver_without_a_job_and_with_a_paused_dag_says_so(ledger: Ledger) -> None:
    summary = _summary(ledger, "stalled", DagFacts("b", running=1), DagFacts("r", paused=True))
    texts = " ".join([summary.reason, summary.remedy or "", *summary.also])
    assert summary.state.value == "stalled"
    assert "lease of the receiver job" in texts


@pytest.mark.parametrize("paused", [False, True])
@pytest.mark.parametrize("dag_id", ["b", "r"])
def test_a_dag_that_is_in_no_file_any_more_is_named_in_a_remedy(
    ledger: Ledger, dag_id: str, paused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    findings: list[Finding] = []
    monkeypatch.setattr("headrace.views.streams.judge", lambda evidence: findings.extend(judge(evidence)) or findings)
    _summary(ledger, "stalled", DagFacts(dag_id, stale=True, paused=paused))
    remedy = f"Restore the file of the DAG {dag_id}, which Airflow does not find any more."
    remedies = [finding.remedy for finding in findings]
    assert remedy in remedies
    assert not any("npause it" in (text or "") or f"Unpause {dag_id}" in (text or "") for text in remedies)


def test_a_stopped_stream_without_a_dag_file_is_only_stopped(ledger: Ledger, shop: Shop) -> None:
    """It is more than that if batches are left."""
    gone = DagFacts("b", stale=True)
    assert _summary(ledger, "stopped", gone).state.value == "stopped"
    shop.store()
    shop.clock.advance(15_000)
    shop.ledger.streams.set_desired_state("shop", "stopped")
    place = Placed("shop", "ledger", "b", "r")
    summary = summarize(shop.ledger, shop.ledger.streams.get("shop"), place, {"b": gone})
    assert (summary.state.value, "in no file any more" in summary.reason) == ("stalled", True)


def test_a_paused_receiver_dag_of_a_live_job_is_a_warning_only(ledger: Ledger) -> None:
    summary = _summary(ledger, "paused", DagFacts("b", running=1), DagFacts("r", paused=True))
    assert summary.state.value == "paused"
    assert any("if the receiver job ends, no other is started" in text for text in summary.also)


@pytest.mark.parametrize("paused", [False, True])
def test_a_live_jobs_receiver_dag_in_no_file_is_a_warning_too(
    ledger: Ledger, paused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    findings: list[Finding] = []
    monkeypatch.setattr("headrace.views.streams.judge", lambda evidence: findings.extend(judge(evidence)) or findings)
    _summary(ledger, "paused", DagFacts("b", running=1), DagFacts("r", stale=True, paused=paused))
    (found,) = [finding for finding in findings if "no other is started" in finding.reason]
    assert found.reason == "The DAG r is in no file any more: if the receiver job ends, no other is started."
    assert (found.remedy or "").startswith("Restore the file of the DAG r")


def test_a_failing_batch_has_its_error_and_number_of_tries(ledger: Ledger) -> None:
    summary = _summary(ledger, "failing", *BUSY)
    assert "3 times" in summary.reason
    assert "document_parsing_exception" in summary.reason
    assert summary.since_ms is not None
    assert summary.oldest_unfinished is not None
    assert summary.oldest_unfinished.state == "failed"


def test_the_disk_that_pauses_a_receiver_is_named(ledger: Ledger) -> None:
    assert "0.4 GiB" in _summary(ledger, "paused", *BUSY).reason


def test_a_pause_is_named_before_batches_that_fall_behind(shop: Shop) -> None:
    shop.beat(paused="the log's disk is full", lag_seconds=300.0)
    shop.clock.advance(15_000)
    shop.store()
    shop.clock.advance(100_000)
    shop.complete(shop.begin(shop.latest()))
    summary = shop.summary()
    assert summary.state == "paused"
    assert "the log's disk is full" in summary.reason
    assert "make room" in (summary.remedy or "")
    assert any("is late" in text for text in summary.also)


def test_an_open_transaction_is_named_and_not_too_few_receivers(shop: Shop) -> None:
    waiting = {
        "topic": "clicks",
        "partition": 3,
        "offset": 120,
        "since_ms": shop.clock.now_ms() - 90_000,
        "behind": 200,
    }
    shop.beat(total_lag=200, lag_seconds=90.0, open_transactions=[waiting])
    summary = shop.summary()
    assert summary.state == "falling_behind"
    assert "partition 3: a producer's transaction has been open at offset 120 for at least 1 min 30 s" in summary.reason
    assert "The 200 offsets from there on cannot be read" in summary.reason
    assert "describe-producers --topic clicks --partition 3" in (summary.remedy or "")
    assert summary.also == ()


def test_a_stream_without_a_completed_batch_awaits_no_records(shop: Shop) -> None:
    """It does not wait for records before the first batch with records has completed."""
    assert "waits for its first records" in shop.summary().reason
    shop.store()
    shop.clock.advance(15_000)
    summary = shop.summary()
    assert summary.state == "well"
    assert "its first with records, is not completed yet" in summary.reason


def test_a_running_batch_that_tries_again_says_why(shop: Shop) -> None:
    shop.store()
    shop.clock.advance(15_000)
    attempt = shop.begin(T + INTERVAL_MS)
    shop.ledger.attempts.renew(attempt, attributes={WARNING: "Elasticsearch does not answer"})
    summary = shop.summary()
    assert summary.state == "falling_behind"
    assert "is delayed: Elasticsearch does not answer." in summary.reason
    shop.clock.advance(61_000)
    summary = shop.summary()
    assert summary.state == "stalled"
    assert "is delayed: Elasticsearch does not answer." in summary.reason
    shop.complete(attempt)
    assert shop.summary().state == "well"


def test_dead_letters_of_recent_batches_are_always_named(shop: Shop) -> None:
    """They are named even if all else is well."""
    for letters in (2, 30, 0):
        shop.clock.advance(INTERVAL_MS)
        shop.complete(shop.begin(shop.latest()), dead_lettered=letters)
    summary = shop.summary()
    assert (summary.state, summary.reason) == ("well", "The last 3 batches have 32 dead letters.")
    assert "replay them" in (summary.remedy or "")
    # Run again, the batch has none: the newest write counts.
    shop.complete(shop.begin(shop.latest() - INTERVAL_MS, force=True), dead_lettered=0)
    assert shop.summary().reason == "The last 3 batches have 2 dead letters."
    shop.clock.advance(INTERVAL_MS)
    shop.beat(lag_seconds=300.0)
    summary = shop.summary()
    assert (summary.state, summary.also) == ("falling_behind", ("The last 3 batches have 2 dead letters.",))


def test_a_dag_file_with_an_import_error_has_it_in_the_reason(ledger: Ledger) -> None:
    summary = _summary(
        ledger, "well", DagFacts("b", import_error="SyntaxError: invalid syntax"), DagFacts("r", running=1)
    )
    assert summary.state.value == "stalled"
    assert "SyntaxError: invalid syntax" in summary.reason


def test_a_stopped_stream_is_not_accused_of_receiving_nothing(ledger: Ledger) -> None:
    summary = _summary(ledger, "stopped", *BUSY)
    assert "A person has stopped it" in summary.reason
    assert not any("not received" in text for text in summary.also)


def test_a_new_ledger_without_batches_is_no_error(tmp_path: Path) -> None:
    with Ledger.open(f"sqlite:///{tmp_path}/ledger.db") as ledger:
        ledger.streams.register("new", '{"outputs": []}', batch_interval_ms=1000, block_interval_ms=200)
        summary = summarize(ledger, ledger.streams.get("new"), Placed("new", "l", "b", "r"), {})
    assert summary.state.value == "starting"
    assert (summary.lag, summary.last_completed_batch, summary.oldest_unfinished) == (None, None, None)


def test_a_live_job_without_a_receiver_is_stalled_in_5_minutes(tmp_path: Path) -> None:
    clock = ManualClock(1_800_000_000_000)
    with Ledger.open(f"sqlite:///{tmp_path}/ledger.db", clock=clock) as ledger:
        ledger.streams.register("new", '{"outputs": []}', batch_interval_ms=1000, block_interval_ms=200)
        ledger.jobs.acquire("new", holder="job", lease_ms=3_600_000)
        clock.advance(299_000)
        assert summarize(ledger, ledger.streams.get("new"), Placed("new", "l", "b", "r"), {}).state.value == "starting"
        clock.advance(2_000)
        summary = summarize(ledger, ledger.streams.get("new"), Placed("new", "l", "b", "r"), {})
    assert summary.state.value == "stalled"
    assert "no receiver has started yet" in summary.reason
    assert "log" in (summary.remedy or "")


@pytest.mark.parametrize(
    ("kind", "remedy"), [("kafka", "Look whether Kafka runs"), ("receiver", "last errors say why")]
)
def test_only_an_input_of_kafka_sends_a_person_to_kafka(tmp_path: Path, kind: str, remedy: str) -> None:
    definition = json.dumps({"inputs": [{"kind": kind, "id": "feed"}], "outputs": []})
    with Ledger.open(f"sqlite:///{tmp_path}/ledger.db", clock=ManualClock(1_800_000_000_000)) as ledger:
        ledger.streams.register("new", definition, batch_interval_ms=1000, block_interval_ms=200)
        job = ledger.jobs.acquire("new", holder="job", lease_ms=3_600_000)
        scheduled = ledger.receivers.schedule(job, ReceiverId("new", "feed", 0))
        ledger.receivers.register(scheduled, host="h", lease_ms=60_000)
        health = InputHealth(["feed"], custom=["feed"] if kind == "receiver" else [])
        ledger.jobs.renew(job, attributes={INPUTS: health.to_json()})
        summary = summarize(ledger, ledger.streams.get("new"), Placed("new", "l", "b", "r"), {})
        assert summary.state.value == "starting"
        health.failed("feed", "it does not answer")
        ledger.jobs.renew(job, attributes={INPUTS: health.to_json()})
        summary = summarize(ledger, ledger.streams.get("new"), Placed("new", "l", "b", "r"), {})
    assert summary.state.value == "stalled"
    assert remedy in (summary.remedy or "")


def test_records_behind_a_batch_of_a_clock_ahead_are_no_silence(shop: Shop) -> None:
    shop.clock.advance(600_000)
    shop.complete(shop.begin(shop.latest()))
    shop.clock.set_back(600_000)
    shop.beat()
    shop.store()
    summary = shop.summary()
    assert summary.state == "stalled"
    assert "was allocated while the ledger's clock was ahead" in summary.reason
    assert "`headrace streams reopen shop --yes`" in (summary.remedy or "")
    shop.clock.advance(600_000)
    shop.beat()
    assert shop.summary().state == "well"


def test_a_reopened_stream_is_judged_by_its_batches_of_now(shop: Shop) -> None:
    shop.clock.advance(600_000)
    shop.complete(shop.begin(shop.latest()))
    shop.clock.set_back(600_000)
    shop.ledger.clock_corrections.reopen("shop")
    shop.beat()
    shop.store()
    assert shop.summary().state == "well"
    shop.clock.advance(300_000)
    shop.beat()
    assert shop.summary().state == "stalled", "the batch ahead does not count as one that has just completed"


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
    Case(elasticsearch_away, "failing", "and 11 more failed", "again once output console is written for another", 300),
    Case(elasticsearch_back, "falling_behind", "Later batches have completed since", "", 300, (KAFKA, ABANDON)),
    Case(another_failure, "failing", "KeyError", "Correct the transform", 30),
    Case(poison, "failing", "KeyError", "Correct the transform", 30),
    Case(corrected, "falling_behind", "Later batches have completed since", "", 30, (KAFKA, ABANDON)),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.fault.__name__)
def test_each_fault_has_its_cause_first(running: Shop, case: Case) -> None:
    began_ms = running.clock.now_ms()
    case.fault(running)
    summary = running.summary()
    assert (summary.state.value, case.cause in summary.reason) == (case.state, True), summary.reason
    assert case.remedy in (summary.remedy or "")
    assert not [text for text in case.never if text in f"{summary.reason} {summary.remedy}"]
    assert (running.clock.now_ms() - began_ms) / 1000 <= case.seconds


@contextmanager
def locked(shop: Shop) -> Iterator[None]:
    connection = sqlite3.connect(shop.ledger.url.removeprefix("sqlite:///"), isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    yield
    connection.execute("ROLLBACK")
    connection.close()


def test_a_locked_ledger_is_named_after_the_first_lease_is_out(
    running: Shop,
) -> None:
    """It is named no longer than it is locked."""
    with locked(running):
        running.clock.advance(LEASE_MS + 1_000)
        summary = running.summary()
        assert summary.state == "failing"
        assert "The ledger cannot be written" in summary.reason
        assert "database is locked" in summary.reason
        assert "End what holds its lock" in (summary.remedy or "")
        assert "brokers are down" not in " ".join([summary.reason, *summary.also])
    summary = running.summary()
    assert summary.state == "stalled"
    assert "which it last renewed at" in summary.reason


def test_an_outlived_error_is_not_the_reason_of_the_silence(running: Shop) -> None:
    """The receiver outlived the error."""
    silent_receiver(running)
    summary = running.summary()
    assert "brokers are down" not in " ".join([summary.reason, *summary.also])
    running.ledger.receivers.report_error(running.lease, "the disk is gone", None)
    assert "the disk is gone" in running.summary().reason


def test_failures_of_one_cause_are_one_finding(shop: Shop) -> None:
    """Failures beyond the newest batches belong to it as well."""
    for _ in range(40):
        fail(shop, "Elasticsearch does not answer")
    summary = shop.summary()
    assert "and 39 more failed" in summary.reason
    assert not [text for text in summary.also if "does not answer" in text]


@pytest.mark.parametrize("ordered", [False, True])
def test_a_batch_that_waits_for_its_next_try_says_when_that_is(shop: Shop, ordered: bool) -> None:
    """In an ordered stream at a time; in another one once its output works again, which another batch shows."""
    failed_ms = fail(shop, "Elasticsearch does not answer")
    shop.ledger.streams.register(
        "shop", shop.stream.to_json(), batch_interval_ms=INTERVAL_MS, block_interval_ms=200, ordered=ordered
    )
    for _ in range(2):
        repair = shop.ledger.attempts.begin("shop", failed_ms, way="connect", holder="test", lease_ms=60_000)
        shop.ledger.attempts.renew(repair, attributes={REPAIR: True})
        shop.ledger.attempts.fail(repair, "Elasticsearch does not answer")
    if ordered:
        when = f"at {time_text(shop.clock.now_ms() + 4 * INTERVAL_MS)}"
    else:
        when = "once output console is written for another batch"
    assert f"The repair tries batch {time_text(failed_ms)} again {when}, or" in (shop.summary().remedy or "")
    if not ordered:
        complete(shop)
        paused_ms = shop.clock.now_ms() + 3 * INTERVAL_MS
        assert f"the repair runs it again at {time_text(paused_ms)}." in shop.summary().reason


def test_of_two_causes_the_newest_failure_comes_first(shop: Shop) -> None:
    fail(shop, "the mapping conflicts")
    newest = fail(shop, "the index is read-only")
    summary = shop.summary()
    assert time_text(newest) in summary.reason
    assert "the index is read-only" in summary.reason
    assert any("the mapping conflicts" in text for text in summary.also)


def test_a_headline_is_the_line_that_matters_the_rest_details(shop: Shop) -> None:
    frames = "".join(
        f'  File "/srv/jobs/orders.py", line {line}, in total\n    return one + two\n' for line in range(20)
    )
    error = f"The batch failed:\nTraceback (most recent call last):\n{frames}KeyError: 'cents'\n"
    fail(shop, error, Failure.CODE)
    summary = shop.summary()
    assert summary.reason.endswith(": KeyError: 'cents'")
    assert summary.details is not None
    assert "line 19, in total" in summary.details


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


@pytest.mark.parametrize(
    ("part", "reason", "remedy"),
    [
        ("log_write", "a sync of the log takes 8.0 s in receiver shop/records/0", "Look at the disk, or the object"),
        ("ledger_transaction", "a transaction of the ledger takes 8.0 s in receiver", "what holds locks in it"),
    ],
)
def test_what_is_slow_to_store_is_named_with_its_seconds(running: Shop, part: str, reason: str, remedy: str) -> None:
    slow = {f"{part}_seconds": 8.0}
    running.beat(**slow)
    assert any(reason in text for text in running.summary().also) or reason in running.summary().reason
    running.beat(total_lag=5_000, lag_seconds=200.0, **slow)
    summary = running.summary()
    assert summary.state == "falling_behind"
    assert reason in summary.reason
    assert remedy in (summary.remedy or "")
    assert "Give the input more receivers" not in (summary.remedy or "")
    # Nor is an executor blamed for the silence that follows.
    silent_receiver(running)
    summary = running.summary()
    assert reason[2:] in (summary.remedy or "")


SLOW_DISK = "a sync of the log takes 8.0 s in receiver shop/records/0"


def test_slow_syncs_are_the_cause_of_runs_that_begin_late(shop: Shop) -> None:
    for _ in range(5):
        shop.clock.advance(25_000)
        shop.complete(shop.begin(shop.latest() - 2 * INTERVAL_MS))
    assert "Give the stream a longer batch_interval" in (shop.summary().remedy or "")
    shop.beat(log_write_seconds=8.0)
    summary = shop.summary()
    assert summary.state == "falling_behind"
    assert summary.reason.startswith("Runs take 25.0 s")
    assert SLOW_DISK in summary.reason
    assert summary.also == ()
    assert (summary.remedy or "").startswith("Look at the disk")


def test_slow_syncs_are_the_cause_of_a_batch_that_is_late(shop: Shop) -> None:
    shop.clock.advance(15_000)
    shop.store()
    shop.clock.advance(100_000)
    shop.complete(shop.begin(shop.latest()))
    assert "say what it waits for" in (shop.summary().remedy or "")
    shop.beat(log_write_seconds=8.0)
    summary = shop.summary()
    assert "is late by" in summary.reason
    assert SLOW_DISK in summary.reason
    assert summary.also == ()
    assert (summary.remedy or "").startswith("Look at the disk")


@pytest.mark.parametrize(
    ("ahead", "said"),
    [(3_600, "is 1 h ahead of the ledger's clock"), (-31_536_000, "is 365 d behind the ledger's clock")],
)
def test_a_clock_that_differs_from_the_ledgers_is_named(running: Shop, ahead: int, said: str) -> None:
    running.beat(clock_ahead_seconds=ahead)
    summary = running.summary()
    assert said in summary.reason
    assert "receiver shop/records/0" in summary.reason
    assert "Correct the clock of that host" in (summary.remedy or "")
    running.beat(clock_ahead_seconds=59 if ahead > 0 else -59)
    assert "clock" not in running.summary().reason


def test_the_clock_of_a_host_that_is_gone_is_not_named(running: Shop) -> None:
    running.beat(clock_ahead_seconds=3_600)
    silent_receiver(running)
    assert "clock" not in " ".join([running.summary().reason, *running.summary().also])


def test_a_part_that_is_as_slow_as_usual_is_not_named(running: Shop) -> None:
    running.beat(total_lag=5_000, lag_seconds=200.0, log_write_seconds=1.2, ledger_transaction_seconds=0.1)
    summary = running.summary()
    assert "takes" not in summary.reason
    assert "Give the input more receivers" in (summary.remedy or "")


def test_a_ledgers_full_disk_is_named_though_its_lock_is_free(running: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    running.clock.advance(LEASE_MS + 1_000)

    def full(**_: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("headrace.ledger.database.tempfile.TemporaryFile", full)
        summary = running.summary()
    path = running.ledger.url.removeprefix("sqlite:///")
    assert summary.state == "failing"
    assert f"The disk of the ledger {path} is full: No space left on device, " in summary.reason
    assert "bytes are free" in summary.reason
    assert "Make room on that disk" in (summary.remedy or "")
    assert running.summary().state == "stalled"


def test_one_locked_ledger_is_asked_once_for_all_its_streams(running: Shop) -> None:
    names = ["shop", *(f"shop-{number:02d}" for number in range(49))]
    for name in names[1:]:
        running.ledger.streams.register(
            name, running.stream.model_copy(update={"name": name}).to_json(), batch_interval_ms=1_000,
            block_interval_ms=200,
        )  # fmt: skip
        running.ledger.jobs.acquire(name, holder="test", lease_ms=LEASE_MS)
    running.clock.advance(LEASE_MS + 1_000)
    rows = [(row, default_place(row.name, running.ledger.url)) for row in running.ledger.streams.all()]
    with locked(running):
        began = time.monotonic()
        listed = summaries(running.ledger, rows, {})
        seconds = time.monotonic() - began
    assert [summary.name for summary in listed] == sorted(names)
    assert len({summary.reason for summary in listed}) == 1
    assert "database is locked" in listed[0].reason
    # One wait of a second, not one for each stream; a busy machine may take a few.
    assert seconds < 25
