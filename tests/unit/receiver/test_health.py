"""Inputs that are not received, and what a running job has not adopted of its stream's newest definition."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.blocks import ReceiverId
from headrace.clock import ManualClock
from headrace.hooks.ledger import register
from headrace.ledger import EventKind, Ledger
from headrace.ledger.tables import JobLease
from headrace.receiver.health import (
    INPUTS,
    REVISION,
    UNREADABLE_TOPICS,
    InputHealth,
    InputProblem,
    Part,
    input_problems,
    outdated_definition,
    receiving_differences,
)
from headrace.stream import JsonDecoder, KafkaInput, KeyIds, Limits, Listener, Stream

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


def shop(folder: Path, **changes: Any) -> Stream:
    fields: dict[str, Any] = {
        "name": "shop",
        "inputs": KafkaInput(bootstrap_servers="127.0.0.1:1", topics="clicks"),
        "outputs": {"kind": "elasticsearch", "hosts": "http://127.0.0.1:1", "index": "clicks"},
        "batch_interval": "10 s",
        "storage": folder,
        "ledger": f"sqlite:///{folder}/ledger.db",
    }
    return Stream(**{**fields, **changes})


CLICKS = {"bootstrap_servers": "127.0.0.1:1", "topics": "clicks"}
RECEIVED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "topics": (
        {"inputs": KafkaInput(**{**CLICKS, "topics": ("clicks", "taps")})},
        ["inputs.records.topics was clicks and is clicks, taps"],
    ),
    "receivers": (
        {"inputs": KafkaInput(**CLICKS, receivers=2)},
        ["inputs.records.receivers was 1 and is 2"],
    ),
    "by": ({"batch_by": "timestamp"}, ["batch_by was arrival and is timestamp"]),
    "blocks": ({"block_interval": "100 ms"}, ["block_interval was 200 ms and is 100 ms"]),
    "storage": ({"storage": "/elsewhere"}, ["storage.url was {folder} and is /elsewhere"]),
    "rate": ({"limits": Limits(max_rate=5)}, ["limits.max_rate was none and is 5.0"]),
    "spark": ({"spark": {"master": "local[9]"}}, ["spark.master was none and is local[9]"]),
}


@pytest.mark.parametrize("change", RECEIVED)
def test_what_receivers_read_is_a_difference(tmp_path: Path, change: str) -> None:
    changes, expected = RECEIVED[change]
    differences = list(receiving_differences(shop(tmp_path), shop(tmp_path, **changes)))
    assert differences == [text.format(folder=tmp_path) for text in expected]


def test_another_connection_of_a_listener_is_a_difference(tmp_path: Path) -> None:
    before, after = (
        shop(tmp_path, listeners=[Listener(reference="mine:Mine", connection=connection)]) for connection in (None, "a")
    )
    (difference,) = receiving_differences(before, after)
    assert difference == "listeners was mine:Mine (mine:Mine {}) and is mine:Mine (mine:Mine {}, connection a)"


def test_an_output_that_stops_when_a_topic_grows_is_one_too(tmp_path: Path) -> None:
    output = {"kind": "elasticsearch", "hosts": "http://127.0.0.1:1", "index": "clicks", "document_ids": KeyIds()}
    (difference,) = receiving_differences(shop(tmp_path), shop(tmp_path, outputs=output))
    assert difference == "outputs versioned by offsets was none and is elasticsearch"


def test_another_folder_of_python_files_is_no_difference(tmp_path: Path) -> None:
    """Another name of a file is a difference."""
    before, moved, more = (
        shop(tmp_path, spark={"py_files": [f"{folder}/{name}", folder]})
        for folder, name in (("/a1", "code.py"), ("/b2", "code.py"), ("/b2", "more.py"))
    )
    assert list(receiving_differences(before, moved)) == []
    (difference,) = receiving_differences(before, more)
    assert difference == "spark.py_files was code.py, a folder and is more.py, a folder"


@pytest.mark.parametrize(
    "changes",
    [
        {"transform": "operator:itemgetter"},
        {"outputs": {"kind": "console"}},
        {"parameters": {"n": 1}},
        {"limits": Limits(max_concurrent_batches=5)},
        {"inputs": KafkaInput(**CLICKS, value_decoder=JsonDecoder(fields="n INT"))},
        {"checkpoint_interval": "1 min"},
    ],
    ids=["transform", "outputs", "parameters", "slots", "decoder", "checkpoints"],
)
def test_what_only_batches_use_is_none(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert list(receiving_differences(shop(tmp_path), shop(tmp_path, **changes))) == []


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger.open(shop(tmp_path).ledger) as ledger:
        yield ledger


@pytest.fixture
def job(tmp_path: Path, ledger: Ledger) -> JobLease:
    """A job by the stream's first definition."""
    return ledger.jobs.acquire(
        "shop", holder="driver", lease_ms=60_000, attributes={REVISION: register(ledger, shop(tmp_path))}
    )


def noted(ledger: Ledger) -> list[dict[str, Any]]:
    return [event.payload for event in ledger.events.page("shop", kinds=[EventKind.DEFINITION_NOT_ADOPTED])]


def test_a_difference_is_reported_until_a_job_has_adopted_it(tmp_path: Path, ledger: Ledger, job: JobLease) -> None:
    assert outdated_definition(ledger, "shop") is None
    by_timestamp = shop(tmp_path, batch_by="timestamp")
    newest = register(ledger, by_timestamp)
    assert str(outdated_definition(ledger, "shop")) == (
        "The receiver job (epoch 1) still receives by revision 1 of the definition, and the stream has revision 2: "
        "batch_by was arrival and is timestamp. To have it adopted: `headrace streams stop shop`, then "
        "`headrace streams start shop`."
    )
    ledger.jobs.release(job)
    assert outdated_definition(ledger, "shop") is None
    ledger.jobs.acquire("shop", holder="next", lease_ms=60_000, attributes={REVISION: newest})
    assert outdated_definition(ledger, "shop") is None


def test_an_event_is_written_once_for_a_job_and_a_definition(tmp_path: Path, ledger: Ledger, job: JobLease) -> None:
    before, after = shop(tmp_path), shop(tmp_path, batch_by="timestamp")
    # Tasks of both register in turns, as during a deploy.
    for stream in (before, after, before, after, after):
        register(ledger, stream)
    register(ledger, shop(tmp_path, batch_by="timestamp", transform="operator:itemgetter"))
    expected = {"epoch": job.epoch, "running": 1, "newest": 2, "differences": ["batch_by was arrival and is timestamp"]}
    assert noted(ledger)[:1] == [expected]
    assert len(noted(ledger)) == 2


def test_a_change_that_is_the_batches_alone_is_no_event(tmp_path: Path, ledger: Ledger, job: JobLease) -> None:
    register(ledger, shop(tmp_path, transform="operator:itemgetter"))
    assert noted(ledger) == []
    assert outdated_definition(ledger, "shop") is None
