"""Letters as records of a topic, and what a reader makes of them; the real Kafka is in tests/integration."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pytest

from headrace.elasticsearch.dead_letter_index import DeadLetterReplay, LetterFilter, StoredLetter
from headrace.elasticsearch.dead_letter_topic import LetterRecord, LetterSender, TopicLetters, letter_record
from headrace.elasticsearch.dead_letters import OriginalRecord, dead_letter
from headrace.elasticsearch.options import IndexingOptions, LetterTopic
from headrace.elasticsearch.target import Target
from headrace.elasticsearch.verdicts import Reason
from headrace.errors import HeadraceError
from headrace.formats.index_names import parse_index
from headrace.stream import DeadLetterTopic, ElasticsearchOutput

TOPIC = LetterTopic(topic="letters", bootstrap_servers="127.0.0.1:1")
WHY = Reason("document_parsing_exception", "failed to parse")
EVERY = LetterFilter(replayed=True)


@dataclass(frozen=True)
class Sent:
    """A record as a consumer gives it."""

    record: LetterRecord
    place: tuple[int, int]

    def key(self) -> bytes | None:
        return self.record.key

    def value(self) -> bytes | None:
        return self.record.value

    def headers(self) -> Any:
        return self.record.headers

    def partition(self) -> int:
        return self.place[0]

    def offset(self) -> int:
        return self.place[1]


class Noting(LetterSender):
    """Keeps the notes that it is to send to a topic of three partitions."""

    def __init__(self, notes: list[LetterRecord]) -> None:
        self.notes = notes
        self._partitions = 3

    def send_notes(self, notes: Sequence[LetterRecord]) -> None:
        self.notes += notes


class Log(TopicLetters):
    """A topic in memory, of three partitions."""

    def __init__(self, options: IndexingOptions) -> None:
        super().__init__(TOPIC, options.target, timeout_seconds=0.2)
        self._options = options
        self.sent: list[Sent] = []
        self.notes: list[LetterRecord] = []
        self._sender = Noting(self.notes)

    def write(self, row: pa.RecordBatch, *, attempt: int, began_ms: int, partition: int = 0, why: Reason = WHY) -> None:
        options = replace(self._options, attempt=attempt, letter_topic=replace(TOPIC, began_ms=began_ms))
        self.append(letter_record(dead_letter(row, 0, why, options), options), partition)

    def withdraw(self, *, attempt: int, at_ms: int, **changed: Any) -> None:
        headers = {
            "headrace.kind": "withdrawn",
            "headrace.stream": self._options.target.owner.stream_name,
            "headrace.output": self._options.target.owner.output_id,
            "headrace.index": self._options.target.name,
            "headrace.batch.time": self._options.batch_time_ms,
            "headrace.attempt": attempt,
            "headrace.at": at_ms,
            **changed,
        }
        for partition in range(3):
            encoded: Any = [(name, str(value).encode()) for name, value in headers.items()]
            self.append(LetterRecord(None, None, encoded), partition)

    def append(self, record: LetterRecord, partition: int = 0) -> None:
        self.sent.append(Sent(record, (partition, len(self.sent))))
        self._found = None

    def _messages(self) -> Iterator[Any]:
        yield from self.sent

    def _message_at(self, partition: int, offset: int) -> Any:
        return next(each for each in self.sent if each.place == (partition, offset))


@pytest.fixture
def options(make_options: Any) -> IndexingOptions:
    made: IndexingOptions = make_options(stream_name="shop", output_id="es", batch_time_ms=10_000, letter_topic=TOPIC)
    return made


@pytest.fixture
def log(options: IndexingOptions) -> Iterator[Log]:
    made = Log(options)
    yield made
    made.close()


def attempts(log: Log) -> list[int]:
    return [letter.fields["attempt"] for letter in log.find(EVERY)]


def test_a_letter_of_a_letter_has_the_headers_of_the_first(log: Log, make_rows: Any, options: Any) -> None:
    """The stream reads a dead letter queue: the record has headers of the same names."""
    held = OriginalRecord(b"k", b"junk", (("headrace.kind", b"letter"), ("__connect.errors.topic", b"first")), 5)
    letter = replace(dead_letter(make_rows([b"junk"]), 0, WHY, options), original=held)
    log.append(letter_record(letter, options))
    (stored,) = log.find(EVERY)
    assert stored.record == held
    assert stored.fields["topic"] == "t"


def test_a_letter_of_a_topic_has_the_fields_of_one_of_an_index(log: Log, make_rows: Any, options: Any) -> None:
    rows = make_rows([{"n": "x"}], keys=[b"k"])
    log.write(rows, attempt=3, began_ms=7)
    (stored,) = log.find(EVERY)
    in_index = dead_letter(rows, 0, WHY, replace(options, attempt=3)).to_bytes(replace(options, attempt=3))
    assert stored.fields == {**json.loads(in_index), "began": 7}


@pytest.mark.parametrize(("type_", "stage"), [("rejected", b"TRANSFORMATION"), ("id_too_long", b"TASK_PUT")])
def test_the_stage_says_where_a_row_was_rejected(make_rows: Any, options: Any, type_: str, stage: bytes) -> None:
    record = letter_record(dead_letter(make_rows([{"n": 1}]), 0, Reason(type_, ""), options), options)
    assert dict(record.headers)["__connect.errors.stage"] == stage


def test_a_slim_letter_has_the_values_size_alone(log: Log, make_rows: Any, options: Any) -> None:
    letter = dead_letter(make_rows([b'{"n": "long"}']), 0, Reason("x", "r" * 9000), options)
    log.append(letter_record(letter, options, slim=True))
    (stored,) = log.find(EVERY)
    assert (stored.document, stored.record, stored.fields["value_bytes"]) == (None, None, 13)
    assert stored.reason.text == "r" * 500


def test_a_letter_refused_for_its_size_keeps_its_value(log: Log, make_rows: Any, options: Any) -> None:
    """It came from Kafka, so that Kafka takes it; Elasticsearch's limit can be raised."""
    letter = replace(dead_letter(make_rows([b'{"n": 1}']), 0, WHY, options), omit_value=True)
    log.append(letter_record(letter, options))
    (stored,) = log.find(EVERY)
    assert stored.document == b'{"n": 1}'


def test_an_attempt_that_succeeded_withdraws_earlier_letters(log: Log, make_rows: Any) -> None:
    log.write(make_rows([{"n": 1}]), attempt=1, began_ms=100)
    log.withdraw(attempt=1, at_ms=150)
    assert attempts(log) == [1], "its own letters hold"
    log.withdraw(attempt=2, at_ms=300)
    assert attempts(log) == []


@pytest.mark.parametrize(
    "changed", [{"headrace.batch.time": "20000"}, {"headrace.index": "other"}, {"headrace.output": "other"}]
)
def test_a_withdrawal_is_of_one_batch_output_and_index(log: Log, make_rows: Any, changed: dict[str, str]) -> None:
    log.write(make_rows([{"n": 1}]), attempt=1, began_ms=100)
    log.withdraw(attempt=2, at_ms=300, **changed)
    assert attempts(log) == [1]


@pytest.fixture
def orders() -> Iterator[Log]:
    """The letters of an output whose records have an index each, by its second attempt at a batch."""
    topic = DeadLetterTopic(topic=TOPIC.topic, bootstrap_servers=TOPIC.bootstrap_servers)
    output = ElasticsearchOutput(hosts="http://h:1", index="orders-{topic}", dead_letter_topic=topic)
    made = Log(IndexingOptions.of(output, Target.of(output, "shop"), batch_time_ms=10_000, attempt=2))
    yield made
    made.close()


def write_orders(orders: Log, make_rows: Any) -> None:
    """Letters of an index each, and of a topic whose capital letter makes an illegal name."""
    for number, topic in enumerate(("a", "b", "Big")):
        row = make_rows([{"n": number}], topic=[topic])
        orders.write(row, attempt=1, began_ms=100, partition=number)


def test_a_withdrawal_is_of_each_index_of_an_output(orders: Log, make_rows: Any) -> None:
    write_orders(orders, make_rows)
    assert {letter.fields["index"] for letter in orders.find(EVERY)} == {"orders-a", "orders-b", "orders-{topic}"}
    orders.write(make_rows([{"n": 1}], topic=["b"]), attempt=2, began_ms=200, partition=2)
    Noting(orders.notes).withdraw(orders._options)
    for partition, note in enumerate(orders.notes):
        orders.append(note, partition)
    assert [(letter.fields["index"], letter.fields["attempt"]) for letter in orders.find(EVERY)] == [("orders-b", 2)]


@pytest.mark.parametrize(
    ("changed", "replay", "left"), [("sales-{topic}", "", 0), ("orders-a", "", 0), ("sales-{topic}", "v2", 3)]
)
def test_a_withdrawal_is_of_any_names_of_its_output(
    orders: Log, make_rows: Any, changed: str, replay: str, left: int
) -> None:
    """The definition was edited between the attempts. A replay may be of another definition too: it stays apart."""
    write_orders(orders, make_rows)
    names, target = parse_index(changed), orders._options.target
    target = replace(target, name=changed, owner=replace(target.owner, replay=replay))
    options = replace(orders._options, target=target)
    Noting(orders.notes).withdraw(replace(options, names=None if names.is_plain else names))
    for partition, note in enumerate(orders.notes):
        orders.append(note, partition)
    assert len(attempts(orders)) == left


def test_a_replay_of_a_topic_sends_a_letter_to_its_index(
    orders: Log, make_rows: Any, elasticsearch: Any, clock: Any
) -> None:
    write_orders(orders, make_rows)
    counts = DeadLetterReplay(elasticsearch, orders._options, orders, clock=clock).replay(orders.find(LetterFilter()))
    assert {name: len(documents) for name, documents in elasticsearch.indices.items()} == {"orders-a": 1, "orders-b": 1}
    assert (counts.replayed, counts.left) == (2, 1)
    assert [why.partition(":")[0] for why in counts.left_because] == ["it has no index"]
    assert [letter.fields["index"] for letter in orders.find(LetterFilter(index="orders-b"))] == ["orders-b"]


def test_a_withdrawal_by_a_slow_clock_holds_for_earlier_letters(log: Log, make_rows: Any) -> None:
    """The later attempt ran on a host whose clock was behind."""
    log.write(make_rows([{"n": 1}]), attempt=1, began_ms=100_000, partition=2)
    log.withdraw(attempt=2, at_ms=50)
    assert attempts(log) == []


def test_a_slow_clock_hides_no_letter_that_was_written_again(log: Log, make_rows: Any) -> None:
    log.write(make_rows([{"n": 1}]), attempt=1, began_ms=100_000)
    log.write(make_rows([{"n": 1}]), attempt=2, began_ms=50)
    log.withdraw(attempt=2, at_ms=60)
    assert attempts(log) == [2]


def test_a_replaced_attempts_late_letter_does_not_hold(log: Log, make_rows: Any) -> None:
    log.withdraw(attempt=2, at_ms=300)
    log.write(make_rows([{"n": 1}]), attempt=1, began_ms=100)
    assert attempts(log) == []


def test_a_later_run_with_lower_numbers_is_not_hidden(log: Log, make_rows: Any) -> None:
    """The stream was made again, or its ledger restored: its attempts count from 1."""
    log.withdraw(attempt=5, at_ms=300)
    log.write(make_rows([{"n": 1}]), attempt=5, began_ms=200)
    log.write(make_rows([{"n": 1}]), attempt=1, began_ms=400)
    assert attempts(log) == [1], "the newer one, whatever its number"


def test_the_order_of_partitions_does_not_matter(log: Log, make_rows: Any) -> None:
    """A record without a key goes to any partition, and a consumer reads partitions in any order."""
    for number in range(3):
        log.write(make_rows([{"n": number}], offsets=[number]), attempt=1, began_ms=100, partition=number)
    log.write(make_rows([{"n": 1}], offsets=[1]), attempt=2, began_ms=200, partition=2)
    log.withdraw(attempt=2, at_ms=300)
    random.Random(7).shuffle(log.sent)
    assert [(letter.fields["offset"], letter.fields["attempt"]) for letter in log.find(EVERY)] == [(1, 2)]


def test_a_letter_sent_twice_in_an_attempt_is_one(log: Log, make_rows: Any) -> None:
    """Spark has run the task again."""
    for partition in (0, 1):
        log.write(make_rows([{"n": 1}]), attempt=1, began_ms=100, partition=partition)
    assert log.reasons(EVERY) == {"document_parsing_exception": 1}


def test_a_record_in_two_windows_has_the_letter_of_the_later(log: Log, make_rows: Any, options: Any) -> None:
    """Its id has no batch time. As in an index, the batch that was written last has it."""
    log.write(make_rows([{"n": 1}]), attempt=1, began_ms=100)
    later = replace(options, batch_time_ms=20_000, attempt=1, letter_topic=replace(TOPIC, began_ms=200))
    log.append(letter_record(dead_letter(make_rows([{"n": 1}]), 0, WHY, later), later))
    assert [letter.fields["batch_time"] for letter in log.find(EVERY)] == [20_000]
    assert list(log.find(LetterFilter(until_ms=10_000))) == []


def test_records_that_are_no_letters_are_passed_over(log: Log, make_rows: Any) -> None:
    log.append(LetterRecord(b"k", b"v", []))
    log.append(LetterRecord(b"k", b"v", [("__connect.errors.topic", b"t"), ("headrace.id", None)]))
    log.write(make_rows([{"n": 1}]), attempt=1, began_ms=100)
    assert attempts(log) == [1]


@pytest.mark.parametrize(("changed", "why"), [("headrace.began", "ValueError"), ("headrace.index", "KeyError")])
def test_a_letter_that_something_else_changed_is_named(
    log: Log, make_rows: Any, options: Any, changed: str, why: str
) -> None:
    record = letter_record(dead_letter(make_rows([{"n": 1}]), 0, WHY, options), options)
    headers = [(name, value) for name, value in record.headers if name != changed]
    headers += [(changed, b"soon")] if why == "ValueError" else []
    log.append(replace(record, headers=headers), 2)
    with pytest.raises(HeadraceError, match=rf"offset 0 of partition 2 of 'letters' .* nor a note: {why}.*Delete the"):
        log.reasons(EVERY)


def test_letters_without_a_record_come_last_in_their_batch(log: Log, make_rows: Any, options: Any) -> None:
    aggregate = pa.record_batch({"document": pa.array([b"{}"]), "id_0": ["x"]})
    log.write(make_rows([{"n": 1}], offsets=[7]), attempt=1, began_ms=1)
    by_columns = replace(options, document_id="columns", id_columns=("id_0",), attempt=1)
    log.append(letter_record(dead_letter(aggregate, 0, WHY, by_columns), by_columns))
    log.write(make_rows([{"n": 1}], offsets=[3]), attempt=1, began_ms=1)
    *_, last = letters = list(log.find(EVERY))
    assert [letter.fields.get("offset") for letter in letters] == [3, 7, None]
    assert "headers" not in last.fields
    assert last.document == b"{}"
    assert [letter.fields.get("offset") for letter in log.find(EVERY, 1)] == [3]


FIELDS = {"topic": "t", "partition": 0, "offset": 5, "index": "i", "batch_time": 10, "reason": {"type": "r"}}


@pytest.mark.parametrize(
    ("wanted", "selects"),
    [
        (LetterFilter(), True),
        (LetterFilter(ids=("x", "id")), True),
        (LetterFilter(ids=("x",)), False),
        (LetterFilter(from_ms=10, until_ms=10), True),
        (LetterFilter(from_ms=11), False),
        (LetterFilter(until_ms=9), False),
        (LetterFilter(reason="r"), True),
        (LetterFilter(reason="s"), False),
        (LetterFilter(topic="t", partition=0, index="i"), True),
        (LetterFilter(topic="u"), False),
        (LetterFilter(partition=1), False),
        (LetterFilter(index="j"), False),
        (LetterFilter(from_offset=5, until_offset=5), True),
        (LetterFilter(from_offset=6), False),
        (LetterFilter(until_offset=4), False),
    ],
)
def test_a_filter_selects_letters_as_its_query_does(wanted: LetterFilter, *, selects: bool) -> None:
    assert wanted.matches("id", FIELDS) is selects
    assert not wanted.matches("id", {**FIELDS, "replayed_at": 1})
    assert replace(wanted, replayed=True).matches("id", {**FIELDS, "replayed_at": 1}) is selects


def test_a_filter_of_offsets_leaves_out_what_has_none() -> None:
    fields = {**FIELDS, "offset": None}
    assert LetterFilter().matches("id", fields)
    assert not LetterFilter(until_offset=5).matches("id", fields)


def test_a_kafka_that_is_away_is_named_with_what_to_do(options: IndexingOptions) -> None:
    letters = TopicLetters(TOPIC, options.target, timeout_seconds=0.2)
    with pytest.raises(HeadraceError, match="topic 'letters'"):
        letters.reasons(EVERY)
    letters.close()


def test_what_a_replay_notes_is_about_one_version_of_a_letter(log: Log, make_rows: Any) -> None:
    log.write(make_rows([{"n": 1}]), attempt=1, began_ms=100, partition=2)
    (letter,) = log.find(LetterFilter())
    assert log.note([(letter, {"replayed_at": 700})]) == []
    (note,) = log.notes
    assert note.partition == 2
    log.sent.append(Sent(note, (2, len(log.sent))))
    assert list(log.find(LetterFilter())) == []
    assert [each.fields["replayed_at"] for each in log.find(EVERY)] == [700]
    log.write(make_rows([{"n": 1}]), attempt=2, began_ms=200)
    assert [each.fields["attempt"] for each in log.find(LetterFilter())] == [2], "it was rejected again since"


def test_a_note_of_a_refusal_replaces_the_reason(log: Log, make_rows: Any) -> None:
    log.write(make_rows([{"n": 1}]), attempt=1, began_ms=100)
    (letter,) = log.find(LetterFilter())
    log.note([(letter, {"reason": {"type": "other", "text": "why"}})])
    log.append(log.notes[0])
    found: list[StoredLetter] = list(log.find(LetterFilter(reason="other")))
    assert [each.reason for each in found] == [Reason("other", "why")]
    assert list(log.find(LetterFilter(reason=WHY.type))) == []
