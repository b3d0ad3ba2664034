"""Versions that an index holds and the topic never had, by a real ledger's positions and a Kafka that knows its end."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.batch.held_versions import check_held_versions
from headrace.blocks import TopicPartition
from headrace.elasticsearch.counts import HeldVersion
from headrace.elasticsearch.errors import ForeignVersionsError
from headrace.kafka.offsets import Kept, unreadable
from headrace.kafka.range_reader import RangeClients
from headrace.ledger import EventKind, Ledger
from headrace.stream import ElasticsearchOutput, KafkaInput, KeyIds, Stream
from headrace.stream_context import StreamContext

FIRST, SECOND = ("orders", 0), ("orders", 1)


class Questions:
    """Kafka's answers: the ends of the partitions, or that it cannot be asked."""

    def __init__(self, ends: dict[tuple[str, int], int] | None) -> None:
        self.ends = ends
        self.asked: list[tuple[str, int]] = []

    def kept(self, partitions: Collection[tuple[str, int]]) -> dict[tuple[str, int], Kept | None]:
        self.asked += partitions
        if self.ends is None:
            raise unreadable("does not answer")
        return {place: Kept(0, self.ends[place], None) for place in partitions}


@pytest.fixture
def kafka(monkeypatch: pytest.MonkeyPatch) -> Questions:
    """Partition 0 ends at 100, partition 1 at 1000."""
    questions = Questions({FIRST: 100, SECOND: 1_000})
    monkeypatch.setattr(RangeClients, "questions", lambda *_, **__: questions)
    return questions


@pytest.fixture
def context(tmp_path: Path) -> Iterator[StreamContext]:
    """A stream that has received the offsets up to 50 of both partitions."""
    stream = Stream(
        name="orders",
        inputs=KafkaInput(id="kafka", bootstrap_servers="h:1", topics="orders"),
        outputs=ElasticsearchOutput(hosts="http://h:1", index="orders", document_ids=KeyIds()),
        batch_interval="10 s",
        storage=tmp_path / "storage",
        ledger=f"sqlite:///{tmp_path}/ledger.db",
    )
    with Ledger.open(stream.ledger) as ledger:
        ledger.streams.register(
            "orders", stream.to_json(), batch_interval_ms=10_000, block_interval_ms=200, outputs=stream.steps
        )
        job = ledger.jobs.acquire("orders", holder="driver", lease_ms=60_000)
        ledger.topics.observe(job, "kafka", [("orders", "id", 2)])
        places = {TopicPartition("orders", "id", number): 50 for number in (0, 1)}
        ledger.positions.ensure_all(job, "kafka", places)
        yield StreamContext(stream, ledger)


def check(context: StreamContext, **held: int) -> str | None:
    places = {"first": FIRST, "second": SECOND}
    found = {places[name]: HeldVersion(version, f"key of {name}") for name, version in held.items()}
    return check_held_versions(context, 10_000, "orders", found)


def events(context: StreamContext) -> list[dict[str, Any]]:
    return [
        dict(event.payload) for event in context.ledger.events.latest("orders", [EventKind.VERSIONS_BEYOND_POSITION])
    ]


def test_newer_versions_that_were_received_are_those_of_a_replay(context: StreamContext, kafka: Questions) -> None:
    assert check(context, first=49, second=3) is None
    assert kafka.asked == [], "Kafka is asked only where a version is beyond the position"


def test_versions_beyond_the_position_may_be_another_readers(context: StreamContext, kafka: Questions) -> None:
    """Kafka Connect wrote the index, and the stream that takes its place starts from the beginning."""
    assert check(context, first=99, second=999) is None
    assert events(context) == []


@pytest.mark.parametrize(("held", "partition"), [({"first": 100}, 0), ({"first": 10, "second": 1_000_000}, 1)])
def test_a_version_beyond_its_partitions_end_fails_the_batch(
    context: StreamContext, kafka: Questions, held: dict[str, int], partition: int
) -> None:
    """A version at the end itself fails it too."""
    with pytest.raises(
        ForeignVersionsError, match=f"partition {partition} of topic 'orders'.*ends at offset"
    ) as refused:
        check(context, **held)
    assert "Index into a new index" in str(refused.value)


def test_the_end_is_the_keys_own_partitions(context: StreamContext, kafka: Questions) -> None:
    """The versions of 500 are offsets of the second partition, and none of the first."""
    assert check(context, second=500) is None
    with pytest.raises(ForeignVersionsError, match="version 500 of document 'key of first'"):
        check(context, first=500)


def test_an_event_and_a_warning_say_that_kafka_cannot_be_asked(context: StreamContext, kafka: Questions) -> None:
    kafka.ends = None
    warning = check(context, first=500)
    assert warning is not None
    assert "received its offsets up to 50" in warning
    (event,) = events(context)
    assert event["index"] == "orders"
    assert "Kafka does not answer" in event["what"]
