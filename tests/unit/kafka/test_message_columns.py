"""Taken in chunks, messages become the same columns as if they were taken at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, Message
from hypothesis import given
from hypothesis import strategies as st

from headrace.blocks import TopicPartition
from headrace.kafka import records
from headrace.kafka.records import Cursor, EpochRecords, columns_of, concat, consume, convert

CHUNK = records._CHUNK
OWNED = {
    (topic, partition): Cursor(TopicPartition(topic, f"id-{topic}", partition), 0)
    for topic in ("a", "b")
    for partition in (0, 1)
}
BROKEN = KafkaError(KafkaError._BAD_MSG, "damaged")


class Consumer:
    """Returns the given messages, as a consumer that has already fetched them."""

    def __init__(self, messages: Sequence[Message]) -> None:
        self.left = list(messages)
        self.asked: list[tuple[int, float]] = []

    def consume(self, most: int, timeout: float) -> list[Message]:
        self.asked.append((most, timeout))
        taken, self.left = self.left[:most], self.left[most:]
        return taken


def message(offset: int, topic: str = "a", partition: int = 0, **fields: Any) -> Message:
    return Message(topic=topic, partition=partition, offset=offset, value=b"%d" % offset, timestamp=(1, 5), **fields)


def never(_messages: Sequence[Any]) -> Sequence[Any]:
    raise AssertionError("no message has an error")


@st.composite
def arrivals(draw: st.DrawFn) -> list[Message]:
    drawn = st.tuples(st.sampled_from(sorted(OWNED)), st.booleans(), st.integers(0, 2))
    offsets = dict.fromkeys(OWNED, 0)
    messages = []
    for key, has_headers, epoch in draw(st.lists(drawn, max_size=40)):
        fields: dict[str, Any] = {"headers": [("h", b"1")]} if has_headers else {}
        if epoch:
            fields["leader_epoch"] = epoch
        messages.append(message(offsets[key], *key, key=b"k" if epoch else None, **fields))
        offsets[key] += 1
    return messages


@given(arrivals(), st.integers(1, 50), st.integers(1, 7))
def test_chunks_give_what_all_messages_at_once_give(messages: list[Message], most: int, chunk: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "_CHUNK", chunk)
        columns = consume(Consumer(messages), most, 0.0, separate_errors=never)
    in_lots, at_once = convert(columns, OWNED), convert(columns_of(messages[:most]) if messages else None, OWNED)
    assert (in_lots.counts, in_lots.positions, in_lots.epochs) == (at_once.counts, at_once.positions, at_once.epochs)
    if messages:
        assert in_lots.batch is not None
        assert in_lots.batch.to_pylist() == at_once.batch.to_pylist()
    else:
        assert in_lots.batch is None


def test_no_more_than_asked_is_taken_and_a_short_lot_is_the_last() -> None:
    consumer = Consumer([message(offset) for offset in range(3 * CHUNK)])
    columns = consume(consumer, CHUNK + 7, 0.0, separate_errors=never)
    assert columns is not None and len(columns) == CHUNK + 7
    assert [most for most, _ in consumer.asked] == [CHUNK, 7]
    consumer = Consumer([message(offset) for offset in range(CHUNK + 7)])
    columns = consume(consumer, 5 * CHUNK, 0.0, separate_errors=never)
    assert columns is not None and len(columns) == CHUNK + 7
    assert [most for most, _ in consumer.asked] == [CHUNK, CHUNK]


def test_all_lots_together_wait_no_longer_than_the_timeout() -> None:
    consumer = Consumer([message(offset) for offset in range(CHUNK)])
    consume(consumer, 2 * CHUNK, 5.0, separate_errors=never)
    (_, first), (_, second) = consumer.asked
    assert first == 5.0
    assert 0.0 <= second < 5.0


def test_nothing_taken_is_no_columns() -> None:
    assert consume(Consumer([]), 10, 0.0, separate_errors=never) is None


def test_from_an_error_on_every_lot_is_sorted_out() -> None:
    messages = [message(offset) for offset in range(3 * CHUNK)]
    messages[CHUNK + 3] = Message(topic="a", partition=0, offset=CHUNK + 3, error=BROKEN)
    given: list[int] = []

    def separate_errors(chunk: Sequence[Any]) -> Sequence[Any]:
        given.append(chunk[0].offset())
        return [message for message in chunk if message.offset() < CHUNK + 3]

    columns = consume(Consumer(messages), 10 * CHUNK, 0.0, separate_errors=separate_errors)
    assert columns is not None and columns.offsets.tolist() == list(range(CHUNK + 3))
    assert given == [CHUNK, 2 * CHUNK], "the first chunk has no error, and the last one comes after it"


def test_an_error_of_the_consumer_is_passed_on() -> None:
    class Failing:
        def consume(self, most: int, timeout: float) -> list[Message]:
            raise KafkaException(BROKEN)

    with pytest.raises(KafkaException):
        consume(Failing(), 10, 0.0, separate_errors=never)


def test_a_known_topic_is_not_asked_for() -> None:
    columns = columns_of([message(0), message(1)], "a")
    assert (list(columns.names), columns.codes.tolist()) == (["a"], [0, 0])


def test_topics_keep_their_rows_if_lots_name_them_in_other_order() -> None:
    chunks = [columns_of([message(0, "a"), message(0, "b")]), columns_of([message(1, "b"), message(1, "a")])]
    columns = concat(chunks)
    assert [columns.names[code] for code in columns.codes] == ["a", "b", "b", "a"]


def test_rows_can_be_chosen() -> None:
    messages = [message(0, headers=[("h", b"1")]), message(1), message(2, headers=[("h", b"2")])]
    chosen = columns_of(messages).where(columns_of(messages).offsets > 0)
    assert chosen.offsets.tolist() == [1, 2]
    assert chosen.values.to_pylist() == [b"1", b"2"]
    assert chosen.headers.to_pylist() == [None, [{"key": "h", "value": b"2"}]]


def test_an_unreported_leader_epoch_ends_the_former_ones_records() -> None:
    messages = [message(0, leader_epoch=1), message(1), message(2, leader_epoch=2)]
    assert convert(columns_of(messages), OWNED).epochs == {
        OWNED["a", 0].partition: [EpochRecords(0, 1, 1), EpochRecords(2, 3, 2)]
    }
