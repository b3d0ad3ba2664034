"""The reader of ranges over a Kafka in memory: where a range ends, what is counted, and what it does not wait for."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, Message

from headrace.blocks import TopicPartition
from headrace.kafka import range_reader as kafka_ranges
from headrace.kafka.errors import RangesGoneError, RangesUnreadableError, RecordsDifferError, RecordsReplacedError
from headrace.kafka.offsets import Kept, OffsetQuestions
from headrace.kafka.range_reader import KafkaRangeReader, RangeClients
from headrace.kafka.ranges import RangeRun, RecordedRange
from headrace.stream import KafkaInput
from headrace.testing.fake_kafka import FakeConsumer, FakeEntry, FakeKafka

CONTROL = FakeEntry(None, kind="control")


class Questions(OffsetQuestions):
    """Answers for a `FakeKafka`."""

    def __init__(self, kafka: FakeKafka, *, compacted: bool = False) -> None:
        self.kafka = kafka
        self.compacted = compacted

    def topic_ids(self, topics: Collection[str]) -> Mapping[str, str | None]:
        return {topic: self.kafka.topic_ids.get(topic) for topic in topics}

    def kept(self, partitions: Collection[tuple[str, int]]) -> dict[tuple[str, int], Kept | None]:
        logs = self.kafka.logs
        return {key: Kept(logs[key].low, logs[key].high, 1_700_000_000_000) for key in partitions}

    def is_compacted(self, topic: str) -> bool | None:
        return self.compacted


class Clicks:
    """The topic "clicks" of two partitions, and a reader of it."""

    def __init__(self) -> None:
        self.kafka = FakeKafka()
        self.topic_id = self.kafka.create("clicks", 2)
        self.consumers: list[FakeConsumer] = []

    def run(self, partition: int, begin: int, *ends: tuple[int, int | None]) -> RangeRun:
        where = TopicPartition("clicks", self.topic_id, partition)
        begins = [begin, *(end for end, _ in ends)]
        return RangeRun.of(
            [RecordedRange(where, start, end, count) for start, (end, count) in zip(begins, ends, strict=False)]
        )

    def received(self, *ranges: tuple[int, int, int]) -> RangeRun:
        """A run of partition 0: each range's from, until and leader epoch; all offsets have a record."""
        where = TopicPartition("clicks", self.topic_id, 0)
        return RangeRun.of([RecordedRange(where, start, end, end - start, epoch) for start, end, epoch in ranges])

    def reader(
        self, *, stall_seconds: float = 5.0, compacted: bool = False, questions: OffsetQuestions | None = None
    ) -> KafkaRangeReader:
        def make(config: Mapping[str, Any]) -> FakeConsumer:
            self.consumers.append(self.kafka.consumer(config))
            return self.consumers[-1]

        return KafkaRangeReader(
            RangeClients.of(KafkaInput(bootstrap_servers="nowhere:1", topics="clicks")),
            stall_seconds=stall_seconds,
            consumer_factory=make,
            questions=questions or Questions(self.kafka, compacted=compacted),
        )

    def read(self, *runs: RangeRun, **options: Any) -> list[tuple[int, int, bytes]]:
        with self.reader(**options) as reader:
            rows = [row for batch in reader.read(runs) for row in batch.to_pylist()]
        assert self.consumers[-1].closed
        return [(row["partition"], row["offset"], row["value"]) for row in rows]


@pytest.fixture
def clicks() -> Clicks:
    return Clicks()


def test_exactly_the_ranges_are_read_of_each_partition(clicks: Clicks) -> None:
    for partition in (0, 1):
        clicks.kafka.produce("clicks", partition, *[b"%d" % number for number in range(100)])
    batches = clicks.read(clicks.run(0, 10, (15, 5), (20, 5)), clicks.run(1, 0, (3, None)), clicks.run(0, 90, (92, 2)))
    assert sorted(batches) == sorted(
        [(0, at, b"%d" % at) for at in (*range(10, 20), 90, 91)] + [(1, at, b"%d" % at) for at in range(3)]
    )


class SlowToForget(FakeConsumer):
    """Reports the position in an earlier assignment until it has a result, as librdkafka does until its main thread has
    stopped the partition's fetcher. On a busy machine the first consume() may return before that."""

    def __init__(self, kafka: FakeKafka, config: Mapping[str, Any]) -> None:
        super().__init__(kafka, config)
        self._old: dict[tuple[str, int], int] = {}
        self._is_new = False

    def incremental_assign(self, partitions: Iterable[Any]) -> None:
        super().incremental_assign(partitions)
        self._is_new = bool(self._old)

    def incremental_unassign(self, partitions: Iterable[Any]) -> None:
        self._old |= self._read
        super().incremental_unassign(partitions)

    def consume(self, num_messages: int, timeout: float) -> list[Message]:
        is_new, self._is_new = self._is_new, False
        return [] if is_new else super().consume(num_messages, timeout)

    def position(self, partitions: Iterable[Any]) -> list[Any]:
        reported = super().position(partitions)
        for each in reported:
            if each.offset < 0:
                each.offset = self._old.get((each.topic, each.partition), each.offset)
        return reported


@pytest.mark.parametrize("records", [10, None])
def test_a_partitions_earlier_range_is_read_after_a_later_one(clicks: Clicks, records: int | None) -> None:
    clicks.kafka.produce("clicks", 0, *[b"%d" % number for number in range(100)])
    clients = RangeClients.of(KafkaInput(bootstrap_servers="nowhere:1", topics="clicks"))
    with KafkaRangeReader(
        clients, consumer_factory=partial(SlowToForget, clicks.kafka), questions=Questions(clicks.kafka)
    ) as reader:
        for begin in (50, 10, 30, 0):
            read = [
                row for batch in reader.read([clicks.run(0, begin, (begin + 10, records))]) for row in batch.to_pylist()
            ]
            assert [row["offset"] for row in read] == [*range(begin, begin + 10)]


def test_a_range_ends_by_the_position_if_its_end_holds_nothing(clicks: Clicks) -> None:
    clicks.kafka.produce("clicks", 0, b"a", CONTROL, CONTROL, CONTROL)
    assert clicks.read(clicks.run(0, 0, (4, 1))) == [(0, 0, b"a")]
    clicks.kafka.produce("clicks", 0, CONTROL, b"later")
    assert clicks.read(clicks.run(0, 0, (3, 1))) == [(0, 0, b"a")]
    assert clicks.read(clicks.run(0, 1, (3, 0))) == []


def test_what_stands_after_a_damaged_record_is_not_taken_for_all(clicks: Clicks) -> None:
    clicks.kafka.produce("clicks", 0, b"a", FakeEntry(b"b", kind="damaged"), b"c")
    with pytest.raises(RangesUnreadableError, match="clicks-0, offset 1 cannot be read"):
        clicks.read(clicks.run(0, 0, (3, 3)))


def test_records_behind_a_passing_error_are_fetched_from_there(clicks: Clicks) -> None:
    """Not taken as if nothing lay between: of a range without a count nobody would miss it."""
    clicks.kafka.produce("clicks", 0, b"a", b"b", b"c", b"d")
    clicks.kafka.produce("clicks", 1, b"e")
    with clicks.reader() as reader:
        error = KafkaError(KafkaError.KAFKA_STORAGE_ERROR, "a disk")
        end = KafkaError(KafkaError._PARTITION_EOF, "the end")
        clicks.consumers[-1].events = [
            Message(topic="clicks", partition=0, offset=0, value=b"a", timestamp=(1, 1)),
            Message(topic="clicks", partition=0, offset=1, error=error),
            Message(topic="clicks", partition=0, offset=3, value=b"d", timestamp=(1, 1)),
            Message(topic="clicks", partition=0, offset=4, error=end),
        ]
        batches = reader.read([clicks.run(0, 0, (4, None)), clicks.run(1, 0, (1, None))])
        values = sorted(row["value"] for batch in batches for row in batch.to_pylist())
    assert values == [b"a", b"b", b"c", b"d", b"e"]


def test_a_lasting_error_is_reported_and_no_later_record_used(clicks: Clicks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka_ranges, "_FINAL", frozenset())
    clicks.kafka.produce("clicks", 0, b"a", FakeEntry(b"b", kind="damaged"), b"c")
    with pytest.raises(RangesUnreadableError, match=r"clicks-0 \[0, 3\) from offset 1 on.*last error: _BAD_MSG"):
        clicks.read(clicks.run(0, 0, (3, None)), stall_seconds=0.2)


@pytest.mark.parametrize("compacted", [True, False])
def test_fewer_records_than_recorded_are_an_error_of_all_ranges(clicks: Clicks, compacted: bool) -> None:
    clicks.kafka.produce("clicks", 0, b"a", CONTROL, b"c", b"d")
    clicks.kafka.produce("clicks", 1, CONTROL, b"b")
    runs = clicks.run(0, 0, (2, 2), (4, 2)), clicks.run(1, 0, (2, 2))
    with pytest.raises(RecordsDifferError) as reported:
        clicks.read(*runs, compacted=compacted)
    text = str(reported.value)
    assert "2 of 4 records are gone from Kafka" in text
    assert "clicks-0 [0, 2): 2 recorded, 1 read; clicks-1 [0, 2): 2 recorded, 1 read" in text
    assert ("Compacted" in text) == compacted


def test_more_records_than_recorded_are_an_error(clicks: Clicks) -> None:
    clicks.kafka.produce("clicks", 0, b"a", b"b")
    with pytest.raises(RecordsDifferError, match=r"1 recorded, 2 read.*isolation.level"):
        clicks.read(clicks.run(0, 0, (2, 1)))


def test_records_at_the_offsets_of_others_are_refused_first(clicks: Clicks) -> None:
    """They are refused before any record is returned."""
    clicks.kafka.produce("clicks", 0, b"a", b"b")
    clicks.kafka.elect("clicks", 0)
    clicks.kafka.produce("clicks", 0, b"c", b"d", b"e")
    runs = clicks.received((0, 1, 0), (1, 4, 1), (4, 5, 1))
    assert len(clicks.read(runs)) == 5
    clicks.kafka.elect("clicks", 0, high=3)
    clicks.kafka.produce("clicks", 0, b"x", b"y", b"z")
    refused = pytest.raises(RecordsReplacedError, match=r"clicks-0 \[1, 4\) ended in leader epoch 1")
    received: list[object] = []
    with clicks.reader() as reader, refused:
        received.extend(reader.read([runs]))
    assert received == []
    assert len(clicks.read(clicks.received((0, 1, 0), (1, 3, 1)))) == 3, "what was not cut off is read"
    assert len(clicks.read(clicks.run(0, 0, (5, 5)))) == 5, "without leader epochs there is nothing to compare"


def test_a_log_that_ends_early_is_not_waited_for_forever(clicks: Clicks) -> None:
    clicks.kafka.produce("clicks", 0, b"a")
    message = r"missing is clicks-0 \[0, 3\) from offset 1 on, where Kafka says that it ends at 1"
    with pytest.raises(RangesUnreadableError, match=message):
        clicks.read(clicks.run(0, 0, (3, 3)), stall_seconds=0.05)


def test_the_time_that_the_caller_takes_is_no_stall(clicks: Clicks) -> None:
    import time

    clicks.kafka.produce("clicks", 0, *[b"%d" % number for number in range(2_000)])
    with clicks.reader(stall_seconds=0.05) as reader:
        rows = 0
        for batch in reader.read([clicks.run(0, 0, (2_000, 2_000))]):
            rows += batch.num_rows
            if rows < 1_000:
                time.sleep(0.1)
    assert rows == 2_000


def test_offsets_that_are_gone_meanwhile_are_reported(clicks: Clicks) -> None:
    clicks.kafka.produce("clicks", 0, b"a", b"b", b"c")
    clicks.kafka.expire("clicks", 0, 2)
    with pytest.raises(RangesGoneError, match=r"clicks-0 \[0, 2\).*Kafka keeps offsets from 2 on"):
        clicks.read(clicks.run(0, 0, (3, 3)))


def test_a_topic_of_the_same_name_is_not_taken_for_it(clicks: Clicks) -> None:
    run = clicks.run(0, 0, (1, 1))
    clicks.kafka.create("clicks", 2)
    clicks.kafka.produce("clicks", 0, b"another")
    returned: list[Any] = []
    with pytest.raises(RangesGoneError, match="while it was read"), clicks.reader() as reader:
        returned.extend(reader.read([run]))
    assert not returned


def test_a_broker_away_during_the_topics_check_may_come_back(clicks: Clicks) -> None:
    clicks.kafka.produce("clicks", 0, b"a")
    silent = [RangesUnreadableError("Kafka does not describe clicks")]

    class OnceAway(Questions):
        def topic_ids(self, topics: Collection[str]) -> Mapping[str, str | None]:
            if silent:
                raise silent.pop()
            return super().topic_ids(topics)

    with clicks.reader(questions=OnceAway(clicks.kafka)) as reader:
        assert sum(batch.num_rows for batch in reader.read([clicks.run(0, 0, (1, 1))])) == 1
    assert not silent


def test_a_counted_range_that_comes_at_once_costs_one_query(clicks: Clicks) -> None:
    clicks.kafka.produce("clicks", 0, b"a", b"b")
    asked: list[Collection[str]] = []

    class Listening(Questions):
        def topic_ids(self, topics: Collection[str]) -> Mapping[str, str | None]:
            asked.append(topics)
            return super().topic_ids(topics)

    with clicks.reader(questions=Listening(clicks.kafka)) as reader:
        assert sum(batch.num_rows for batch in reader.read([clicks.run(0, 0, (2, 2))])) == 2
        assert len(asked) == 1
        list(reader.read([clicks.run(0, 0, (2, None))]))
        assert len(asked) == 3, "not counted: records may be missing at its end"


def test_a_user_who_may_not_describe_topics_is_refused_at_once(clicks: Clicks) -> None:
    clicks.kafka.produce("clicks", 0, b"a")
    asked = 0

    def describe_topics(*_: Any, **__: Any) -> dict[str, Future[Any]]:
        nonlocal asked
        asked += 1
        future: Future[Any] = Future()
        future.set_exception(KafkaException(KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)))
        return {"clicks": future}

    admin = SimpleNamespace(describe_topics=describe_topics)
    with (
        clicks.reader(stall_seconds=3, questions=OffsetQuestions(admin)) as reader,
        pytest.raises(RangesUnreadableError, match="does not describe clicks"),
    ):
        list(reader.read([clicks.run(0, 0, (1, 1))]))
    assert asked == 1


def test_a_stall_is_reported_with_the_clients_last_error(clicks: Clicks) -> None:
    with clicks.reader(stall_seconds=0.05) as reader:
        clicks.consumers[-1].events = [Message(error=KafkaError(KafkaError._ALL_BROKERS_DOWN, "all down"))]
        with pytest.raises(RangesUnreadableError, match="all down"):
            list(reader.read([clicks.run(0, 0, (1, 1))]))


def test_a_reading_that_is_given_up_leaves_the_reader_usable(clicks: Clicks) -> None:
    clicks.kafka.produce("clicks", 0, *[b"%d" % number for number in range(2_000)])
    with clicks.reader() as reader:
        begun = reader.read([clicks.run(0, 0, (2_000, 2_000))])
        assert next(begun).num_rows < 2_000
        begun.close()
        assert sum(batch.num_rows for batch in reader.read([clicks.run(0, 0, (2_000, 2_000))])) == 2_000


def test_secrets_are_not_shown() -> None:
    clients = RangeClients(consumer={"sasl.password": "hush"}, admin={"sasl.password": "hush"})
    assert "hush" not in repr(clients)


def test_nothing_much_beyond_the_ranges_is_fetched() -> None:
    clients = RangeClients.of(KafkaInput(bootstrap_servers="nowhere:1", topics="clicks"))
    assert clients.for_offsets(10).consumer["queued.min.messages"] == 10
    assert clients.for_offsets(10**12).consumer == clients.consumer
