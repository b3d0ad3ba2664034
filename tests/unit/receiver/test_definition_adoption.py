"""What a running receiver job has not adopted of its stream's newest definition."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.hooks.ledger import register
from headrace.ledger import EventKind, Ledger
from headrace.ledger.tables import JobLease
from headrace.receiver.health import REVISION, outdated_definition, receiving_differences
from headrace.stream import JsonDecoder, KafkaInput, KeyIds, Limits, Listener, Stream


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
    found = list(receiving_differences(shop(tmp_path), shop(tmp_path, **changes)))
    assert found == [text.format(folder=tmp_path) for text in expected]


def test_another_connection_of_a_listener_is_a_difference(tmp_path: Path) -> None:
    before, after = (
        shop(tmp_path, listeners=[Listener(reference="mine:Mine", connection=connection)]) for connection in (None, "a")
    )
    (found,) = receiving_differences(before, after)
    assert found == "listeners was mine:Mine (mine:Mine {}) and is mine:Mine (mine:Mine {}, connection a)"


def test_an_output_that_stops_the_stream_when_a_topic_grows_is_one_too(tmp_path: Path) -> None:
    output = {"kind": "elasticsearch", "hosts": "http://127.0.0.1:1", "index": "clicks", "document_ids": KeyIds()}
    (found,) = receiving_differences(shop(tmp_path), shop(tmp_path, outputs=output))
    assert found == "outputs versioned by offsets was none and is elasticsearch"


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
