"""What the ledger's rows say of inputs that are not received."""

from __future__ import annotations

import pytest

from headrace.blocks import ReceiverId
from headrace.clock import ManualClock
from headrace.ledger import Ledger
from headrace.receiver.health import INPUTS, UNREADABLE_TOPICS, InputHealth, InputProblem, Part, input_problems

T = 1_700_000_000_000


def reported(health: InputHealth) -> dict:
    return health.to_json()["records"]


def test_an_input_of_which_nothing_was_heard_was_never_asked() -> None:
    assert reported(InputHealth(["records"])) == {"asked_ms": 0, "error": "Kafka has not answered yet", "topics": {}}


def test_an_input_of_custom_receivers_does_not_wait_for_kafka() -> None:
    health = InputHealth(["feed", "clicks"], custom=["feed"])
    assert health.to_json()["feed"]["error"] == "its receivers have not started yet"
    assert health.to_json()["clicks"]["error"] == "Kafka has not answered yet"


def test_an_input_that_was_not_looked_at_yet_is_starting(rows: Rows) -> None:
    job = rows.ledger.jobs.acquire("air", holder="test", lease_ms=60_000)
    health = InputHealth(["feed"], custom=["feed"])
    scheduled = rows.ledger.receivers.schedule(job, ReceiverId("air", "feed", 0))
    rows.ledger.receivers.register(scheduled, host="h", lease_ms=60_000)
    rows.ledger.jobs.renew(job, attributes={INPUTS: health.to_json()})
    assert rows.problems() == [InputProblem("feed", None, "its receivers have not started yet", 0, starting=True)]
    health.failed("feed", "The class cannot be imported")
    rows.ledger.jobs.renew(job, attributes={INPUTS: health.to_json()})
    assert rows.problems() == [InputProblem("feed", None, "The class cannot be imported", 0)]


def test_an_answer_ends_the_trouble_and_dates_the_next_one() -> None:
    health = InputHealth(["records"])
    health.answered("records", T, {})
    health.failed("records", "refused")
    health.failed("records", "refused")
    assert reported(health) == {"asked_ms": T, "error": "refused", "topics": {}}
    health.answered("records", T + 9, {})
    assert reported(health) == {"asked_ms": T + 9, "error": None, "topics": {}}


def test_a_topic_is_missed_since_the_last_look_that_had_it() -> None:
    health = InputHealth(["records"])
    health.answered("records", T, {"never": "it does not exist"})
    health.answered("records", T + 1, {"never": "it does not exist"})
    health.answered("records", T + 2, {"never": "it does not exist", "gone": "it does not exist"})
    topics = reported(health)["topics"]
    assert {topic: entry["asked_ms"] for topic, entry in topics.items()} == {"never": 0, "gone": T + 1}
    health.answered("records", T + 3, {})
    assert reported(health)["topics"] == {}


def test_the_next_job_knows_since_when() -> None:
    """A job that is replaced in an outage does not begin the count anew."""
    before = InputHealth(["records"])
    before.answered("records", T, {"a": "it does not exist"})
    after = InputHealth(["records", "more"])
    after.inherit({INPUTS: before.to_json() | {"gone": {"asked_ms": T}}})
    assert reported(after)["asked_ms"] == T
    after.inherit({})
    assert after.to_json()["more"]["asked_ms"] == 0


class Rows:
    """A ledger with a stream, as the problems are read from it."""

    def __init__(self, ledger: Ledger, clock: ManualClock) -> None:
        self.ledger, self.clock = ledger, clock

    def problems(self) -> list[InputProblem]:
        job = self.ledger.jobs.current("air")
        return input_problems(job, self.ledger.receivers.all("air"), self.ledger.now_ms())


@pytest.fixture
def rows(tmp_path) -> Rows:  # type: ignore[no-untyped-def]
    clock = ManualClock(T)
    ledger = Ledger.open(f"sqlite:///{tmp_path}/ledger.db", clock=clock)
    ledger.streams.register("air", "{}", batch_interval_ms=1_000, block_interval_ms=100)
    return Rows(ledger, clock)


def test_without_a_job_nothing_is_received(rows: Rows) -> None:
    assert rows.problems() == [InputProblem(None, None, "the stream has no receiver job yet", 0, part=Part.JOB)]
    job = rows.ledger.jobs.acquire("air", holder="test", lease_ms=5_000)
    no_receiver = "no receiver has started yet"
    assert rows.problems() == [InputProblem(None, None, no_receiver, 0, starting=True, part=Part.JOB)]
    lease = rows.ledger.receivers.register(
        rows.ledger.receivers.schedule(job, ReceiverId("air", "records", 0)), host="h", lease_ms=5_000
    )
    no_reader = "no receiver reads it (they are starting)"
    starting = InputProblem("records", None, no_reader, 0, starting=True, part=Part.RECEIVER)
    assert rows.problems() == [starting]
    rows.ledger.receivers.heartbeat(lease, sealed_through_ms=T)
    assert rows.problems() == []
    rows.clock.advance(6_000)
    (problem,) = rows.problems()
    expected = (
        "no receiver is alive: the lease of the receiver job (epoch 1) has run out, which it last renewed at "
        "2023-11-14T22:13:20Z"
    )
    assert (problem.asked_ms, problem.error) == (T, expected)


def test_a_receiver_that_ends_again_and_again_reads_nothing(rows: Rows) -> None:
    """Its storage cannot be written to, say. That it is being set up again says nothing."""
    job = rows.ledger.jobs.acquire("air", holder="test", lease_ms=60_000)
    receiver = ReceiverId("air", "records", 0)
    for _ in range(2):
        lease = rows.ledger.receivers.register(rows.ledger.receivers.schedule(job, receiver), host="h", lease_ms=5_000)
        if rows.ledger.receivers.all("air")[0].epoch == 1:
            rows.ledger.receivers.heartbeat(lease, sealed_through_ms=T)
        rows.ledger.receivers.release(lease, "failed", "/data/air is read-only")
    rows.ledger.receivers.register(rows.ledger.receivers.schedule(job, receiver), host="h", lease_ms=5_000)
    expected = "no receiver reads it (air/records/0: /data/air is read-only)"
    assert rows.problems() == [InputProblem("records", None, expected, T, part=Part.RECEIVER)]


def test_what_tracker_and_receivers_note_is_put_together(rows: Rows) -> None:
    job = rows.ledger.jobs.acquire("air", holder="test", lease_ms=60_000)
    health = InputHealth(["records", "other"])
    health.answered("records", T, {"absent": "it does not exist at kafka:9092"})
    health.answered("other", T, {})
    for input_id, unreadable in (("records", [{"topic": "a", "asked_ms": 5, "error": "silent"}]), ("other", [])):
        lease = rows.ledger.receivers.register(
            rows.ledger.receivers.schedule(job, ReceiverId("air", input_id, 0)), host="h", lease_ms=60_000
        )
        rows.ledger.receivers.heartbeat(lease, sealed_through_ms=T, stats={UNREADABLE_TOPICS: unreadable})
    rows.ledger.jobs.renew(job, attributes={INPUTS: health.to_json()})
    assert rows.problems() == [
        InputProblem("records", "absent", "it does not exist at kafka:9092", 0),
        InputProblem("records", "a", "silent", 5),
    ]
    health.failed("records", "Kafka at kafka:9092 cannot be asked")
    rows.ledger.jobs.renew(job, attributes={INPUTS: health.to_json()})
    assert rows.problems() == [InputProblem("records", None, "Kafka at kafka:9092 cannot be asked", T)], (
        "it explains the others"
    )
