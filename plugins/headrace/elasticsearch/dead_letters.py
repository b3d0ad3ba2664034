"""Builds and writes dead letters, which describe rows that Elasticsearch can never accept.

There is one letter per rejected row, with all data for a replay: a document of an index, or a record of a topic
(``dead_letter_topic``). Its id contains the stream, the output, the index and the row's record, so running a batch
again does not duplicate it, and outputs that share a dead-letter index have separate letters. A replayed letter
(``dead_letter_index``) stays, with the time of the replay, until its batch is dead-lettered again.

A task's letters are written before the batch reports success. A batch whose dead letters cannot be written fails.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.elasticsearch import columns
from headrace.elasticsearch.bulk_bodies import REJECTED_BEFORE, TOMBSTONE, PreparedRows
from headrace.elasticsearch.bulk_sender import DOCUMENT_TOO_LARGE, BulkSender
from headrace.elasticsearch.counts import IndexingCounts
from headrace.elasticsearch.document_ids import MAX_ID_BYTES, identify, record_ids, row_parts
from headrace.elasticsearch.error_kinds import is_size
from headrace.elasticsearch.errors import DeadLettersRefusedError, ElasticsearchRefusedError, UnsuitableTargetError
from headrace.elasticsearch.options import DocumentIdKind, IndexingOptions, VersionSource
from headrace.elasticsearch.retry_budget import request_with_retries
from headrace.elasticsearch.target import RowTargets, Target, describe_indices, single_index
from headrace.elasticsearch.transport import Transport
from headrace.elasticsearch.verdicts import Reason

MAPPINGS: dict[str, Any] = {
    "dynamic": False,
    "properties": {
        "stream": {"type": "keyword"},
        "output": {"type": "keyword"},
        "batch_time": {"type": "date", "format": "epoch_millis"},
        "attempt": {"type": "integer"},
        "topic": {"type": "keyword"},
        "partition": {"type": "integer"},
        "offset": {"type": "long"},
        "incarnation": {"type": "integer"},
        "index": {"type": "keyword"},
        "index_names": {"type": "keyword"},
        "replay": {"type": "keyword"},
        "reason": {"properties": {"type": {"type": "keyword"}, "text": {"type": "text"}}},
        "key": {"type": "binary"},
        "value": {"type": "binary"},
        "value_text": {"type": "text"},
        "document_text": {"type": "text"},
        "value_bytes": {"type": "long"},
        "headers": {"enabled": False},
        "timestamp": {"type": "date", "format": "epoch_millis"},
        "document_id": {"type": "keyword"},
        "version": {"type": "long"},
        "value_is_document": {"type": "boolean"},
        "replayed_at": {"type": "date", "format": "epoch_millis"},
    },
}
"""The mappings with which a missing dead-letter index is created.

``value_text`` is present if the value is UTF-8. ``document_text`` is the document that a transform made; without a
transform ``value_is_document`` is true. A letter too large for a request has none of these and no ``value``, only the
value's size in ``value_bytes``. ``index_names`` is the text of the output's index, if it has placeholders or is a
mapping; ``index`` is that text too of a row without an index. ``replay`` is the name of the replay that wrote it; the
stream's own letters lack it. ``document_id`` and ``version`` are those of the rejected document. ``replayed_at`` is
present once the letter was replayed."""


@dataclass(frozen=True, slots=True)
class OriginalRecord:
    """A record's key, value, headers and time as read from Kafka."""

    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()
    timestamp_ms: int | None = None


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A record, or a row of an aggregate, that could not be indexed. An aggregate's row has no coordinates (None)."""

    topic: str | None
    partition: int | None
    offset: int | None
    incarnation: int
    reason: Reason
    original: OriginalRecord | None
    document: bytes | None
    """The rejected document, if it is not the record's value."""
    target: Target
    """Where its document was to go."""
    row: str
    """The row's part of the letter's id: its record's id, and a digest if the record alone does not identify it."""
    ordinal: int = 1
    """Numbers the letters of one task whose ids would otherwise be equal."""
    task: int = 0
    """Distinguishes letters of different tasks whose rows may be equal; 0 if each row has an id of its own."""
    document_id: str | None = None
    """The id of the rejected document; None if it has no usable id, or a decoder or the transform rejected the row."""
    version: int | None = None
    """The external version of the rejected document."""
    value_is_document: bool = False
    omit_value: bool = False

    @property
    def id(self) -> str:
        """``stream/output/index/row``, followed by ``/ordinal`` from the second on, or by ``/ordinal+task``.

        None of the parts can contain a slash. An id that would be too long is replaced by its hash below stream/output.
        """
        number = [f"{self.ordinal}+{self.task}"] if self.task else [str(self.ordinal)] if self.ordinal > 1 else []
        owner = self.target.letter_owner
        named = "/".join((*owner, self.row, *number))
        if len(named.encode()) <= MAX_ID_BYTES:
            return named
        return "/".join((*owner[:-1], hashlib.sha256(named.encode()).hexdigest()))

    @property
    def size(self) -> int:
        """The approximate number of bytes that it holds in memory."""
        value = (self.original.value if self.original else None) or b""
        return 500 + len(value) + len(self.document or b"")

    def to_bytes(self, options: IndexingOptions) -> bytes:
        """The dead letter as JSON in one line."""
        held = contents(self.original, self.document, value_is_document=self.value_is_document)
        if self.omit_value:
            held = {name: held[name] for name in ("key", "headers") if name in held}
        present = {name: value for name, value in {**self.fields(options), **held}.items() if value is not None}
        return json.dumps(present, separators=(",", ":")).encode()

    def fields(self, options: IndexingOptions) -> dict[str, Any]:
        """What the letter says beside the `contents`, as JSON values; None where there is nothing to say."""
        value = self.original.value if self.original else None
        return {
            "stream": self.target.owner.stream_name,
            "output": self.target.owner.output_id,
            "batch_time": options.batch_time_ms,
            "attempt": options.attempt,
            "index": self.target.name,
            "index_names": None if options.names is None else options.names.text,
            "replay": self.target.owner.replay or None,
            "topic": self.topic,
            "partition": self.partition,
            "offset": self.offset,
            "incarnation": (self.incarnation or None) if self.topic is not None else None,
            "reason": {"type": self.reason.type, "text": self.reason.text},
            "value_bytes": None if value is None else len(value),
            "document_id": self.document_id,
            "version": self.version,
            "timestamp": self.original.timestamp_ms if self.original else None,
        }


def contents(original: OriginalRecord | None, document: bytes | None, *, value_is_document: bool) -> dict[str, Any]:
    """The fields of a letter that hold its record and its document, as JSON values."""
    value = original.value if original else None
    fields: dict[str, Any] = {
        "value": _base64(value),
        "value_text": _text(value),
        "document_text": _text(document),
        "value_is_document": value_is_document and value is not None,
    }
    if original is not None:
        fields["key"] = _base64(original.key)
        fields["headers"] = [{"key": name, "value": _base64(held)} for name, held in original.headers]
    return fields


def dead_letter(batch: pa.RecordBatch, row: int, reason: Reason, options: IndexingOptions) -> DeadLetter:
    """The dead letter of a row, with the record's bytes if the row has them."""
    names = batch.schema.names

    def cell(name: str) -> Any:
        return batch.column(name)[row].as_py() if name in names else None

    document = _as_bytes(cell(columns.document_column(batch.schema.names)))
    original: OriginalRecord | None = None
    untouched = columns.document_column(batch.schema.names) == columns.VALUE
    if untouched:
        headers = _headers(cell(columns.HEADERS))
        original = OriginalRecord(_as_bytes(cell(columns.KEY)), document, headers, _timestamp_ms(batch, row))
        document = None
    rejected_before = reason.type == REJECTED_BEFORE
    target, document_id, version = _identity(batch, row, options)
    incarnation = cell(columns.INCARNATION)
    # No two rows of a batch have the same id (`DuplicateIdCheck`), except rows of one key with different versions.
    has_own_id = (
        document_id is not None
        and options.version is not VersionSource.COLUMN
        and (not rejected_before or options.document_id is DocumentIdKind.RECORD)
    )
    return DeadLetter(
        cell(columns.TOPIC),
        cell(columns.PARTITION),
        cell(columns.OFFSET),
        1 if incarnation is None else incarnation,
        reason,
        original,
        document,
        target,
        _row_id(batch, row, options),
        task=0 if has_own_id else options.task,
        document_id=None if rejected_before else document_id,
        version=None if rejected_before else version,
        value_is_document=untouched,
    )


def _row_id(batch: pa.RecordBatch, row: int, options: IndexingOptions) -> str:
    """The row's part of a letter's id: equal in every run of the batch, different for rows with different document ids.

    With record ids it is the document's id, so it distinguishes the rows of one record in the same way.
    """
    names = batch.schema.names
    one = batch.slice(row, 1)
    if any(name not in names or not one.column(name).is_valid()[0].as_py() for name in columns.COORDINATES):
        return f"row+{_digest(options.batch_time_ms, one.to_pylist())}"
    record = str(record_ids(one)[0])
    if options.document_id is DocumentIdKind.COLUMNS:
        return f"{record}+row+{_digest(options.batch_time_ms, one.to_pylist())}"
    if options.document_id is DocumentIdKind.KEY and columns.document_column(batch.schema.names) == columns.DOCUMENT:
        return f"{record}+key+{_digest(one.column(columns.KEY).to_pylist())}"
    if options.id_columns:
        return f"{record}~{quote(str(row_parts(one, options, {})[0]), safe='+')}"
    return record


def _digest(*held: Any) -> str:
    return hashlib.sha256(repr(held).encode()).hexdigest()[:32]


def _identity(batch: pa.RecordBatch, row: int, options: IndexingOptions) -> tuple[Target, str | None, int | None]:
    """Where the row's document was to go, its id and its version; both are None if it has no usable id or version."""
    identities = identify(batch.slice(row, 1), options)
    target = identities.targets.of(0)
    if identities.rejected:
        return target, None, None
    version = None if identities.versions is None else identities.versions[0].as_py()
    return target, identities.ids[0].as_py(), version


def _timestamp_ms(batch: pa.RecordBatch, row: int) -> int | None:
    index = batch.schema.get_field_index(columns.TIMESTAMP)
    if index < 0 or not pa.types.is_timestamp(batch.schema.field(index).type):
        return None
    in_ms = pc.cast(batch.column(index).slice(row, 1), pa.timestamp("ms"), safe=False)
    timestamp: int | None = pc.cast(in_ms, pa.int64())[0].as_py()
    return timestamp


def _as_bytes(value: str | bytes | None) -> bytes | None:
    return value.encode() if isinstance(value, str) else value


def _headers(value: Any) -> tuple[tuple[str, bytes | None], ...]:
    return tuple((header["key"], header["value"]) for header in value or ())


def _base64(value: bytes | None) -> str | None:
    return None if value is None else base64.b64encode(value).decode("ascii")


def _text(value: bytes | None) -> str | None:
    try:
        return None if value is None else value.decode("utf-8")
    except UnicodeDecodeError:
        return None


# Of an index whose name an index template reserves.
_DATA_STREAMS_ONLY = "creates data streams only"
# Elasticsearch's reason may quote the document.
_EXAMPLE_CHARACTERS = 500


class OriginalRecords(Protocol):
    """Looks up records by their position in Kafka. Called from one thread, only for dead letters."""

    def fetch(self, topic: str, partition: int, offset: int, incarnation: int) -> OriginalRecord | None:
        """The record, or None if it is no longer available; the dead letter is then written without it."""
        ...


class LetterPlace(Protocol):
    """Where letters go if they go to no index."""

    def send_letters(self, letters: Sequence[DeadLetter], options: IndexingOptions) -> None:
        """Send the letters, durable on return. Raises DeadLettersRefusedError."""
        ...


class DeadLetterWriter:
    """Collects a task's dead letters and writes them, a bounded number at a time."""

    MAX_HELD = 1000
    MAX_BYTES_HELD = 8 * 1024 * 1024
    MAX_REMEMBERED = 50_000
    """Letter ids that are remembered to number letters with equal ids. The rows of one record are at most a few
    requests apart."""

    def __init__(
        self,
        transport: Transport,
        sender: BulkSender,
        options: IndexingOptions,
        originals: OriginalRecords | None,
        open_topic: Callable[[IndexingOptions], LetterPlace],
    ) -> None:
        """``open_topic`` opens the topic that the options name, for the first letters."""
        self._transport = transport
        self._sender = sender
        self._options = options
        self._target = options.target
        self._originals = originals
        self._held: list[DeadLetter] = []
        self._ordinals: dict[str, int] = {}
        self._bytes_held = 0
        self._index_ensured = False
        self._open_topic = open_topic
        self._topic: LetterPlace | None = None

    def take(self, batch: pa.RecordBatch, rejected: Iterable[tuple[int, Reason]], counts: IndexingCounts) -> None:
        """Buffer and count the dead letters of these rows; writes them when the buffer is full."""
        for row, reason in rejected:
            letter = self._numbered(dead_letter(batch, row, reason, self._options))
            if is_size(reason.type, reason.text):
                # With the value, the letter would be larger than the document that was refused for its size.
                letter = replace(letter, omit_value=True)
            self._held.append(letter)
            self._bytes_held += letter.size
            counts.dead_lettered += 1
            counts.dead_letter_reasons[reason.type] += 1
            if not counts.dead_letter_example and reason.type != TOMBSTONE:
                counts.dead_letter_example = _example(letter)
            if len(self._held) >= self.MAX_HELD or self._bytes_held >= self.MAX_BYTES_HELD:
                self.flush(counts)

    def _numbered(self, letter: DeadLetter) -> DeadLetter:
        """The letter with an id that no other letter of this task has, so that none overwrites another."""
        ordinal = self._ordinals.pop(letter.id, 0) + 1
        self._ordinals[letter.id] = ordinal
        if len(self._ordinals) > self.MAX_REMEMBERED:
            del self._ordinals[next(iter(self._ordinals))]
        return letter if ordinal == 1 else replace(letter, ordinal=ordinal)

    def flush(self, counts: IndexingCounts) -> None:
        """Write the buffered letters. Raises DeadLettersRefusedError if one of them is refused."""
        if not self._held:
            return
        if self._options.letter_topic is None:
            self._write_to_index(counts)
        else:
            self._write_to_topic()
        self._held = []
        self._bytes_held = 0

    def _write_to_topic(self) -> None:
        self._topic = self._topic or self._open_topic(self._options)
        self._topic.send_letters([self._with_original(letter) for letter in self._held], self._options)

    def _write_to_index(self, counts: IndexingCounts) -> None:
        counts.letters_index = self._ensure_index() or counts.letters_index
        letters = [self._with_original(letter) for letter in self._held]
        too_large = self._write(letters, counts)
        # A letter too large for a request is written without its value; the record itself is in the log and in Kafka.
        slim = [replace(letter, omit_value=True) for letter in too_large]
        if slim and self._write(slim, counts):
            raise self._refused(Reason(DOCUMENT_TOO_LARGE, "not even without its value"))

    def _write(self, letters: Sequence[DeadLetter], counts: IndexingCounts) -> list[DeadLetter]:
        """Write these letters. Returns those that are too large for a request."""
        prepared = _prepared(letters, self._options)
        too_large = []
        for lines in prepared.requests(self._options):
            sent = self._sender.send(prepared, lines)
            counts.requests += sent.counts.requests
            counts.retries += sent.counts.retries
            counts.throttled_requests += sent.counts.throttled_requests
            counts.slow_requests += sent.counts.slow_requests
            counts.bytes += sent.counts.bytes
            if sent.counts.dropped:
                raise self._refused(Reason("dropped", "an ingest pipeline of the index drops it"))
            for line, reason in sent.refused:
                if reason.type != DOCUMENT_TOO_LARGE and not is_size(reason.type, reason.text):
                    raise self._refused(reason)
                too_large.append(letters[line])
        return too_large

    def _refused(self, reason: Reason) -> DeadLettersRefusedError:
        return DeadLettersRefusedError(
            f"A dead letter was refused by index {self._target.dead_letter_index!r}: {reason}.",
            remedy="Let headrace create that index, or give it the mapping that it would have created. "
            "The next run of the batch DAG tries the batch again.",
        )

    def _with_original(self, letter: DeadLetter) -> DeadLetter:
        if letter.original is not None or self._originals is None or letter.topic is None:
            return letter
        if letter.partition is None or letter.offset is None or letter.incarnation == columns.UNKNOWN_INCARNATION:
            return letter
        original = self._originals.fetch(letter.topic, letter.partition, letter.offset, letter.incarnation)
        return letter if original is None else replace(letter, original=original)

    def _ensure_index(self) -> str | None:
        """Create the index if it is missing. Returns the index behind the name if it is an alias and was not asked for
        before.

        Raises DeadLettersRefusedError if ids would not be unique in it, or if an alias of earlier letters is gone.
        """
        if self._index_ensured:
            return None
        name = self._target.dead_letter_index
        retry_budget = self._sender.retry_budget(self._target.letters)
        own = {self._target.name, *(each.concrete.name for each in self._options.watched if each.concrete)}
        try:
            there = single_index(name, describe_indices(self._transport, retry_budget, name))
            if there is not None and there.name != name and self._options.names is None:
                # The output's index may be an alias, too.
                own.update(describe_indices(self._transport, retry_budget, self._target.name) or ())
        except UnsuitableTargetError as error:
            raise self._not_unique(error.what) from error
        except ElasticsearchRefusedError:
            # Writing the letters shows whether the index can be used.
            there = None
        if there is not None and there.name in own:
            raise DeadLettersRefusedError(
                f"Dead letters cannot be written: {name!r} is an alias of {there.name!r}, the output's own index.",
                remedy="Name another dead_letter_index in the output.",
            )
        known = self._target.known_letters_index
        if known is not None and (there is None or there.name == name):
            raise DeadLettersRefusedError(
                f"Dead letters cannot be written: {name!r} is {'gone' if there is None else 'an index'} now. It was an "
                f"alias of {known!r} when earlier letters were written.",
                remedy=f"Make it an alias of {known!r} again. If the change is meant, accept it: `headrace aliases "
                f"accept {self._target.owner.stream_name} {self._target.owner.output_id}`.",
            )
        if there is None:
            body = json.dumps({"mappings": MAPPINGS}).encode()
            path = f"/{quote(name, safe='')}"
            reason = request_with_retries(self._transport, retry_budget, "PUT", path, body).error()[1]
            # Other errors are ignored: another task may have created it, or the user may index but not create.
            if _DATA_STREAMS_ONLY in reason:
                raise self._not_unique(
                    f"{name!r} would be a data stream, by an index template of the server: {reason}."
                )
        self._index_ensured = True
        return there.name if there is not None and there.name != name else None

    def _not_unique(self, why: str) -> DeadLettersRefusedError:
        return DeadLettersRefusedError(
            f"Dead letters cannot be written: {why}",
            remedy="Name another dead_letter_index in the output: one index, or an alias of one that does not roll "
            "over. A letter that is written again replaces the one before it, which is found in one index only.",
        )


def _prepared(letters: Sequence[DeadLetter], options: IndexingOptions) -> PreparedRows:
    # An existing letter is overwritten: when a batch is run again, the newer reason is the relevant one.
    lines = [
        b'{"index":{"_id":%s}}\n%s\n' % (json.dumps(letter.id).encode(), letter.to_bytes(options)) for letter in letters
    ]
    source = pa.record_batch([pa.array([letter.id for letter in letters], pa.large_string())], names=["id"])
    documents = pa.array(lines, pa.large_binary())
    ids, target = source.column(0), options.target.letters
    return PreparedRows(source, np.arange(len(letters)), ids, None, documents, targets=RowTargets(target))


def _example(letter: DeadLetter) -> str:
    record = f"{letter.topic}, partition {letter.partition}, offset {letter.offset}: " if letter.topic else ""
    return f"{record}{letter.reason}"[:_EXAMPLE_CHARACTERS]
