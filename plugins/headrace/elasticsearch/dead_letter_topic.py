"""Dead letters in a Kafka topic: the records that they are, what sends them, and what reads them again.

A letter has the key, the value and the headers of the record as it was read from Kafka. Further headers follow: those
of Kafka Connect's dead letter queue, which name the record and the reason, and headrace's own. Its id is the same in
every attempt at its batch. Its time is when it was sent: Kafka's retention counts from there, and would soon remove the
letter of an old record. The record's own time is a header.

A topic takes nothing back. So what happens to a letter later is a record too, a note, without a value:

* ``withdrawn``: an attempt at the batch has succeeded. What earlier attempts have said of the batch does not hold any
  more: of this index, or where each record has its own, of any index of the output's (`Settling`). It is sent to each
  partition: a topic loses its oldest records first, so no letter outlives it there. It holds for letters before it and,
  of an earlier attempt that did not know that it had been replaced, for those after it.
* ``replayed`` and ``refused``: what a replay has done with a letter, in the letter's partition.

A reader reads the whole topic and applies the notes. Of a letter that is there several times, the newest counts. To
tell the attempts apart, their numbers are not enough: a stream that is made again counts from 1. So a letter
has the time when its write began, and a note when it was sent.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self, cast

from confluent_kafka import KafkaError, KafkaException, Message, Producer, TopicPartition

from headrace.clock import SystemClock
from headrace.elasticsearch.bulk_bodies import REJECTED_BEFORE
from headrace.elasticsearch.dead_letter_index import PAGE, KeptLetters, LetterFilter, Settling, StoredLetter
from headrace.elasticsearch.dead_letters import DeadLetter, OriginalRecord, contents
from headrace.elasticsearch.errors import DeadLettersRefusedError
from headrace.elasticsearch.options import IndexingOptions, LetterTopic
from headrace.elasticsearch.target import Target
from headrace.errors import HeadraceError
from headrace.kafka.client import open_consumer, open_producer
from headrace.kafka.client_errors import explained
from headrace.kafka.errors import KafkaNotAskedError
from headrace.kafka.producers import (
    PRODUCER_SETTINGS,
    KafkaOutputError,
    TopicQuestions,
    client_config,
    reported,
)

KIND = "headrace.kind"
"""The first of headrace's headers: what the record is. The headers before it are the original record's."""
LETTER, WITHDRAWN, REPLAYED, REFUSED = "letter", "withdrawn", "replayed", "refused"

_CONNECT = "__connect.errors."
_ID = "headrace.letter.id"
_AT = "headrace.at"
_RECORD = "headrace.record"
_IS_DOCUMENT = "headrace.value.is.document"
_DOCUMENT = "headrace.document"
_REASON_TYPE, _REASON_TEXT = f"{_CONNECT}exception.class.name", f"{_CONNECT}exception.message"
# The headers of a letter's fields, with what reads them.
_FIELDS = {
    f"{_CONNECT}topic": ("topic", str),
    f"{_CONNECT}partition": ("partition", int),
    f"{_CONNECT}offset": ("offset", int),
    "headrace.stream": ("stream", str),
    "headrace.output": ("output", str),
    "headrace.index": ("index", str),
    "headrace.index.names": ("index_names", str),
    "headrace.replay": ("replay", str),
    "headrace.batch.time": ("batch_time", int),
    "headrace.attempt": ("attempt", int),
    "headrace.began": ("began", int),
    "headrace.incarnation": ("incarnation", int),
    "headrace.timestamp": ("timestamp", int),
    "headrace.document.id": ("document_id", str),
    "headrace.version": ("version", int),
    "headrace.value.bytes": ("value_bytes", int),
}
# As Kafka Connect names where a record failed, and what failed.
_TASK_PUT, _TRANSFORMATION = "TASK_PUT", "TRANSFORMATION"
_EXECUTING = "headrace.elasticsearch.indexer.Indexer"

_SLACK_SECONDS = 10.0
_SLIM_CHARACTERS = 500
_TOO_LARGE = (KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.INVALID_MSG_SIZE)
_FINAL = (KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError._FATAL)
_POLL_SECONDS = 0.1
# Of two letters that are so near, the records between them are read too: a new position costs a request.
_NEAR_OFFSETS = 200

Headers = list[tuple[str, bytes | None]]


@dataclass(frozen=True, slots=True)
class LetterRecord:
    """A record to send. ``partition`` None: that of the key."""

    key: bytes | None
    value: bytes | None
    headers: Headers
    partition: int | None = None


def letter_record(letter: DeadLetter, options: IndexingOptions, *, slim: bool = False) -> LetterRecord:
    """The record of a letter. ``slim``: without the value and the document, which the reason may quote too."""
    original = letter.original or OriginalRecord(None, None)
    began_ms = 0 if options.letter_topic is None else options.letter_topic.began_ms
    fields = {**letter.fields(options), "began": began_ms}
    own = {
        KIND: LETTER,
        _ID: letter.id,
        **{header: fields.get(name) for header, (name, _) in _FIELDS.items()},
        f"{_CONNECT}connector.name": f"{letter.target.owner.stream_name}/{letter.target.owner.output_id}",
        f"{_CONNECT}task.id": options.task,
        f"{_CONNECT}stage": _TRANSFORMATION if letter.reason.type == REJECTED_BEFORE else _TASK_PUT,
        f"{_CONNECT}class.name": _EXECUTING,
        _REASON_TYPE: letter.reason.type,
        _REASON_TEXT: letter.reason.text[: _SLIM_CHARACTERS if slim else None],
        _RECORD: "true" if letter.original is not None else None,
        _IS_DOCUMENT: "true" if letter.value_is_document and original.value is not None and not slim else None,
    }
    headers = [*original.headers, *_encoded(own)]
    if letter.document is not None and not slim:
        headers.append((_DOCUMENT, letter.document))
    return LetterRecord(original.key, None if slim else original.value, headers)


def _encoded(values: Mapping[str, Any]) -> Headers:
    return [(name, str(value).encode()) for name, value in values.items() if value is not None]


class LetterSender:
    """Sends letters and notes to their topic. They are durable when its methods return."""

    def __init__(self, topic: LetterTopic, *, timeout_seconds: float, environ: Mapping[str, str] | None = None) -> None:
        """Checks the topic. Raises DeadLettersRefusedError, or the errors of the connection."""
        self._topic = topic.topic
        self._timeout_seconds = timeout_seconds
        self._config = client_config(topic.connection, topic.bootstrap_servers, environ)
        self._producer: Producer | None = None
        questions = TopicQuestions(self._config, self._topic)
        try:
            described = questions.describe()
        except KafkaOutputError as error:
            raise _refused(error) from error
        self._partitions = len(described.partitions)
        if str(described.topic_id) in topic.read_topics:
            raise DeadLettersRefusedError(
                f"The batch has records of topic {self._topic!r} of this cluster, which its dead letters are to go to: "
                "the stream would receive its own letters, without end.",
                remedy="Name another dead_letter_topic. (The input names the cluster by other servers or another "
                "connection.)",
            )
        if questions.is_compacted():
            raise DeadLettersRefusedError(
                f"Topic {self._topic!r} is compacted: of the dead letters with one key Kafka would keep the last one.",
                remedy="Set its cleanup.policy to delete, or name another dead_letter_topic.",
            )

    @classmethod
    def of(cls, options: IndexingOptions) -> Self:
        """What sends the letters of a write. Raises as the class does."""
        if options.letter_topic is None:
            raise ValueError("the letters of these options go to an index")
        return cls(options.letter_topic, timeout_seconds=options.max_retry_seconds)

    def send_letters(self, letters: Sequence[DeadLetter], options: IndexingOptions) -> None:
        """Send the letters. One that is too large for the topic is sent without its value and document: they are in
        the log and in Kafka.

        Raises DeadLettersRefusedError.
        """
        records = [letter_record(letter, options) for letter in letters]
        too_large = self._too_large(records)
        slim = [letter_record(letters[number], options, slim=True) for number in too_large]
        if slim and self._too_large(slim):
            raise DeadLettersRefusedError(
                f"A dead letter is too large for topic {self._topic!r}, even without its value.",
                remedy="Raise the topic's max.message.bytes.",
            )

    def send_notes(self, notes: Sequence[LetterRecord]) -> None:
        """Send the notes. Raises DeadLettersRefusedError."""
        if self._too_large(notes):
            raise DeadLettersRefusedError(
                f"A note on a dead letter is too large for topic {self._topic!r}.",
                remedy="Raise the topic's max.message.bytes.",
            )

    def withdraw(self, options: IndexingOptions) -> None:
        """Say that the attempt has succeeded, so that letters of earlier ones do not hold. Raises
        DeadLettersRefusedError."""
        owner = options.target.owner
        headers = _encoded(
            {
                KIND: WITHDRAWN,
                "headrace.stream": owner.stream_name,
                "headrace.output": owner.output_id,
                "headrace.index": options.target.name,
                "headrace.index.names": None if options.names is None else options.names.text,
                "headrace.replay": owner.replay or None,
                "headrace.batch.time": options.batch_time_ms,
                "headrace.attempt": options.attempt,
                _AT: SystemClock().now_ms(),
            }
        )
        self.send_notes([LetterRecord(None, None, headers, partition=each) for each in range(self._partitions)])

    def _too_large(self, records: Sequence[LetterRecord]) -> list[int]:
        """Send the records. Returns the numbers of those that are too large for the topic."""
        suspects = self._deliver(dict(enumerate(records)))
        # A record that is too large is refused with those that were sent beside it. So each of them is sent alone.
        return [number for number in suspects if self._deliver({number: records[number]})]

    def _deliver(self, records: Mapping[int, LetterRecord]) -> list[int]:
        # An idempotent producer needs half a second until it can send.
        producer = self._producer = self._producer or self._open_producer()
        failed: dict[int, KafkaError] = {}
        for number, record in records.items():
            self._produce(producer, number, record, failed)
        left = producer.flush(self._timeout_seconds + _SLACK_SECONDS)
        others = [error for error in failed.values() if error.code() not in _TOO_LARGE]
        if others:
            raise _refused(reported(others[0], self._topic))
        if left:
            raise DeadLettersRefusedError(
                f"Kafka has not taken {left} dead letters for topic {self._topic!r} in {self._timeout_seconds:g} s.",
                remedy="Check the brokers. The next run of the batch DAG tries the batch again.",
            )
        return sorted(failed)

    def _produce(self, producer: Producer, number: int, record: LetterRecord, failed: dict[int, KafkaError]) -> None:
        def delivered(error: KafkaError | None, _: Message) -> None:
            if error is not None:
                failed[number] = error

        more: dict[str, Any] = {"headers": record.headers, "on_delivery": delivered}
        if record.partition is not None:
            more["partition"] = record.partition
        while True:
            try:
                producer.produce(self._topic, record.value, record.key, **more)
                return
            except BufferError:
                producer.poll(_POLL_SECONDS)
            except KafkaException as error:
                failed[number] = error.args[0]
                return

    def _open_producer(self) -> Producer:
        timeout_ms = max(1000, int(self._timeout_seconds * 1000))
        return open_producer({**PRODUCER_SETTINGS, **self._config, "message.timeout.ms": timeout_ms})


def _refused(error: KafkaOutputError) -> DeadLettersRefusedError:
    return DeadLettersRefusedError(f"Dead letters cannot be written: {error.what}", remedy=error.remedy)


_Version = tuple[str, int | None, int]
"""A letter's id, the attempt that wrote it, and when that began: repetitions by Kafka or Spark are equal."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """What is kept of a letter until the whole topic is read: it may have a million. ``place``: partition, offset."""

    version: _Version
    place: tuple[int, int]
    index: str
    index_names: str | None
    replay: str | None
    batch_time_ms: int
    source: tuple[str | None, int | None, int | None]
    reason_type: str

    @classmethod
    def of(cls, version: _Version, place: tuple[int, int], fields: Mapping[str, Any]) -> Self:
        source = (fields.get("topic"), fields.get("partition"), fields.get("offset"))
        index, reason = sys.intern(fields["index"]), sys.intern(fields["reason"]["type"])
        names, replay = (sys.intern(fields[name]) if name in fields else None for name in ("index_names", "replay"))
        return cls(version, place, index, names, replay, fields["batch_time"], source, reason)

    def fields(self) -> dict[str, Any]:
        """The fields that a filter and a withdrawal look at."""
        topic, partition, offset = self.source
        fields = {"index": self.index, "batch_time": self.batch_time_ms, "reason": {"type": self.reason_type}}
        of_output = {"index_names": self.index_names, "replay": self.replay}
        return {**fields, **of_output, "topic": topic, "partition": partition, "offset": offset}

    @property
    def age(self) -> tuple[int, int]:
        _, attempt, began_ms = self.version
        return began_ms, attempt or 0

    @property
    def order(self) -> tuple[Any, ...]:
        """The newest batch first; what has no record comes last, as of an index."""
        return -self.batch_time_ms, *((value is None, value or 0) for value in self.source), self.version[0]


@dataclass(slots=True)
class _Withdrawal:
    """What an attempt that succeeded has said: when, and from which offset of each partition on."""

    settling: Settling
    attempt: int
    at_ms: int
    offsets: dict[int, int] = field(default_factory=dict)

    def applies(self, letter: _Seen) -> bool:
        """Whether the letter of this batch does not hold any more."""
        _, attempt, began_ms = letter.version
        if attempt is None or attempt >= self.attempt or not self.settling.settles(letter.fields()):
            return False
        partition, offset = letter.place
        return offset < self.offsets.get(partition, -1) or began_ms <= self.at_ms


@dataclass(slots=True)
class _SeenRecords:
    """What a topic says of the letters of one output. ``wanted`` selects the letters that are kept."""

    wanted: LetterFilter
    letters: dict[_Version, _Seen] = field(default_factory=dict)
    withdrawals: dict[int, dict[tuple[Settling, int, int], _Withdrawal]] = field(default_factory=dict)
    """By batch time: what attempts have said, each in every partition."""
    notes: dict[_Version, dict[str, Any]] = field(default_factory=dict)

    def take(self, headers: Mapping[str, str], place: tuple[int, int]) -> None:
        """Add a record. Raises KeyError or ValueError if it lacks a header, or a number is none."""
        kind, fields = headers[KIND], _fields(headers)
        if kind == WITHDRAWN:
            settling = Settling(fields["index"], fields.get("replay", ""), of_names="index_names" in fields)
            said = (settling, fields["attempt"], int(headers[_AT]))
            batch = self.withdrawals.setdefault(fields["batch_time"], {})
            batch.setdefault(said, _Withdrawal(*said)).offsets.update([place])
            return
        version = (headers[_ID], fields.get("attempt"), fields["began"])
        if kind == LETTER:
            letter = _Seen.of(version, place, fields)
            if self.wanted.matches(headers[_ID], letter.fields()):
                self.letters[version] = letter
        elif kind == REPLAYED:
            self.notes.setdefault(version, {})["replayed_at"] = int(headers[_AT])
        elif kind == REFUSED:
            # Of two replays at once, one may have written the document.
            self.notes.setdefault(version, {})["reason"] = fields["reason"]

    def newest(self) -> Iterable[_Seen]:
        """The newest version of each letter among those that are not withdrawn."""
        newest: dict[str, _Seen] = {}
        for letter in self.letters.values():
            if self._is_withdrawn(letter):
                continue
            there = newest.get(letter.version[0])
            if there is None or there.age < letter.age:
                newest[letter.version[0]] = letter
        return newest.values()

    def _is_withdrawn(self, letter: _Seen) -> bool:
        return any(each.applies(letter) for each in self.withdrawals.get(letter.batch_time_ms, {}).values())


class TopicLetters(KeptLetters):
    """The dead letters in a topic. Must be closed.

    Its methods raise TopicMissingError, KafkaRefusedError or KafkaOutputError if the topic cannot be described, and
    KafkaNotAskedError if Kafka does not give its records for ``timeout_seconds``.
    """

    def __init__(
        self,
        topic: LetterTopic,
        target: Target,
        *,
        timeout_seconds: float,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        """Raises the errors of the connection."""
        super().__init__(target)
        self.where = topic.topic
        self._topic = topic
        self._environ = environ
        self._timeout_seconds = timeout_seconds
        self._config = client_config(topic.connection, topic.bootstrap_servers, environ)
        self._consumer = open_consumer(
            {
                **self._config,
                # Nothing is ever committed for it.
                "group.id": "headrace-dead-letters",
                "enable.auto.commit": False,
                "enable.partition.eof": True,
                # Letters are in no transaction, and another producer's open one must not hide those behind it.
                "isolation.level": "read_uncommitted",
                # What retention removes meanwhile is left out.
                "auto.offset.reset": "earliest",
                "fetch.wait.max.ms": 100,
                "queued.min.messages": 10_000,
            }
        )
        self._sender: LetterSender | None = None
        self._found: tuple[LetterFilter, list[tuple[_Seen, dict[str, Any]]]] | None = None
        # The partition that is read, and its next offset.
        self._position: tuple[int, int] | None = None

    def close(self) -> None:
        """Close the consumer."""
        self._consumer.close()

    def reasons(self, letters: LetterFilter) -> dict[str, int]:
        counted = Counter(noted.get("reason", {}).get("type", seen.reason_type) for seen, noted in self._all(letters))
        return dict(counted.most_common())

    def find(self, letters: LetterFilter, limit: int | None = None, *, contents: bool = True) -> Iterator[StoredLetter]:
        found = self._all(letters)[:limit]
        for first in range(0, len(found), PAGE):
            page = found[first : first + PAGE]
            there = {place: self._message_at(*place) for place in sorted(seen.place for seen, _ in page)}
            for seen, noted in page:
                if (message := there[seen.place]) is not None:
                    fields = {**_fields(_own_headers(message)), **noted}
                    if contents:
                        fields |= _contents_of(message)
                    yield StoredLetter(seen.version[0], seen.place, fields)

    def prepare_notes(self) -> None:
        """Do nothing: a topic has no mappings."""

    def note(self, notes: Sequence[tuple[StoredLetter, Mapping[str, Any]]]) -> list[StoredLetter]:
        """As of an index. A letter that was written again meanwhile is another version: the note is not about that."""
        self._sender = self._sender or LetterSender(
            self._topic, timeout_seconds=self._timeout_seconds, environ=self._environ
        )
        self._sender.send_notes([_note(letter, changed) for letter, changed in notes])
        self._found = None
        return []

    def _all(self, wanted: LetterFilter) -> list[tuple[_Seen, dict[str, Any]]]:
        """The letters, newest batch first, each with what was noted of it. They are read once for a filter."""
        if self._found is None or self._found[0] != wanted:
            self._found = (wanted, sorted(self._read(wanted), key=lambda found: found[0].order))
        return self._found[1]

    def _read(self, wanted: LetterFilter) -> Iterator[tuple[_Seen, dict[str, Any]]]:
        # A note can change the others. With a window, a letter can be there again by another batch.
        seen = _SeenRecords(replace(wanted, reason=None, replayed=True, from_ms=None, until_ms=None))
        for message in self._messages():
            headers = _own_headers(message)
            if (headers.get("headrace.stream"), headers.get("headrace.output")) == self._owner:
                self._take(seen, headers, _place(message))
        for letter in seen.newest():
            noted = seen.notes.get(letter.version, {})
            if wanted.matches(letter.version[0], {**letter.fields(), **noted}):
                yield letter, noted

    def _take(self, seen: _SeenRecords, headers: Mapping[str, str], place: tuple[int, int]) -> None:
        try:
            seen.take(headers, place)
        except (KeyError, ValueError) as error:
            partition, offset = place
            raise HeadraceError(
                f"The record at offset {offset} of partition {partition} of {self.where!r} has headrace's headers, and "
                f"is neither a dead letter nor a note: {error!r}.",
                remedy="Something else has sent it. Delete the topic's records up to it when the letters before it are "
                "replayed, or name another dead_letter_topic.",
            ) from None

    @property
    def _owner(self) -> tuple[str, str]:
        return self._target.owner.stream_name, self._target.owner.output_id

    def _messages(self) -> Iterator[Message]:
        """Yield the records that the topic has now, those of a partition in their order."""
        described = TopicQuestions(self._config, self.where, seconds=self._timeout_seconds).describe()
        ends: dict[int, int] = {}
        starts = []
        for number in range(len(described.partitions)):
            asked = TopicPartition(self.where, number)
            try:
                low, high = self._consumer.get_watermark_offsets(asked, timeout=self._timeout_seconds)
            except KafkaException as error:
                raise self._unreadable(error.args[0]) from error
            if low < high:
                ends[number] = high
                starts.append(TopicPartition(self.where, number, low))
        self._consumer.assign(starts)
        self._position = None
        while ends:
            message = self._next()
            partition, offset = _place(message)
            if message.error() is None and offset < ends.get(partition, 0):
                yield message
            if message.error() is not None or offset >= ends.get(partition, 0) - 1:
                ends.pop(partition, None)

    def _message_at(self, partition: int, offset: int) -> Message | None:
        """The record there; None if the topic does not have it any more."""
        at = self._position
        if at is None or at[0] != partition or not at[1] <= offset <= at[1] + _NEAR_OFFSETS:
            self._consumer.assign([TopicPartition(self.where, partition, offset)])
        while True:
            message = self._next()
            if message.error() is not None:
                self._position = None
                return None
            _, found = _place(message)
            self._position = partition, found + 1
            if found >= offset:
                return message if found == offset else None

    def _next(self) -> Message:
        """The next record, or the end of a partition as an error."""
        last: KafkaError | None = None
        until = time.monotonic() + self._timeout_seconds
        while time.monotonic() < until:
            message = self._consumer.poll(_POLL_SECONDS)
            error = None if message is None else message.error()
            if message is not None and (error is None or error.code() == KafkaError._PARTITION_EOF):
                return message
            last = error or last
            if last is not None and last.code() in _FINAL:
                break
        raise self._unreadable(last)

    def _unreadable(self, error: KafkaError | None) -> KafkaNotAskedError:
        if error is None:
            return KafkaNotAskedError(
                f"Kafka gives no records of topic {self.where!r}, which has dead letters, for "
                f"{self._timeout_seconds:g} s.",
                remedy="Check the brokers, and try again.",
            )
        why = explained(error)
        remedy = "Allow it READ on the topic." if error.code() in _FINAL else why.remedy
        return KafkaNotAskedError(f"The dead letters in topic {self.where!r} are not read: {why.text}.", remedy=remedy)


def _note(letter: StoredLetter, changed: Mapping[str, Any]) -> LetterRecord:
    reason = changed.get("reason")
    headers = _encoded(
        {
            KIND: REFUSED if reason else REPLAYED,
            _ID: letter.id,
            "headrace.stream": letter.fields["stream"],
            "headrace.output": letter.fields["output"],
            "headrace.attempt": letter.fields.get("attempt"),
            "headrace.began": letter.fields["began"],
            _AT: changed.get("replayed_at") or SystemClock().now_ms(),
            # A note must fit where the letter did.
            **({_REASON_TYPE: reason["type"], _REASON_TEXT: reason["text"][:_SLIM_CHARACTERS]} if reason else {}),
        }
    )
    return LetterRecord(None, None, headers, partition=letter.version[0])


def _place(message: Message) -> tuple[int, int]:
    """The partition and the offset, which what was consumed has."""
    return cast("tuple[int, int]", (message.partition(), message.offset()))


def _own_headers(message: Message) -> dict[str, str]:
    """headrace's headers as text; empty of a record that is neither a letter nor a note."""
    headers, first = _split(message)
    return {name: (value or b"").decode("utf-8", "replace") for name, value in headers[first:] if name != _DOCUMENT}


def _split(message: Message) -> tuple[Headers, int]:
    """The headers, and where headrace's begin. The record may itself have been a letter."""
    headers = cast("Headers", list(message.headers() or ()))
    names = [name for name, _ in headers]
    return headers, len(names) - 1 - names[::-1].index(KIND) if KIND in names else len(names)


def _fields(headers: Mapping[str, str]) -> dict[str, Any]:
    fields: dict[str, Any] = {
        name: read(headers[header]) for header, (name, read) in _FIELDS.items() if header in headers
    }
    if _REASON_TYPE in headers:
        fields["reason"] = {"type": headers[_REASON_TYPE], "text": headers.get(_REASON_TEXT, "")}
    return fields


def _contents_of(message: Message) -> dict[str, Any]:
    headers, first = _split(message)
    own = dict(headers[first:])
    original = OriginalRecord(message.key(), message.value(), tuple(headers[:first])) if _RECORD in own else None
    held = contents(original, own.get(_DOCUMENT), value_is_document=_IS_DOCUMENT in own)
    return {name: value for name, value in held.items() if value is not None}
