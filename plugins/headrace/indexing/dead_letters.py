"""Dead letters: what Elasticsearch can never take, written where a person finds it, with everything to repeat it.

One document per record, under the record's own id, so that running a batch again does not double it. They are written
before the batch reports success, and a batch whose dead letters cannot be written fails.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote

import numpy as np
import pyarrow as pa

from headrace.indexing import columns
from headrace.indexing.bulk_bodies import PreparedRows, document_column
from headrace.indexing.bulk_sender import DOCUMENT_TOO_LARGE, BulkSender
from headrace.indexing.counts import IndexingCounts
from headrace.indexing.errors import DeadLettersRefusedError
from headrace.indexing.options import DocumentIdKind, IndexingOptions
from headrace.indexing.originals import OriginalRecord, OriginalRecords
from headrace.indexing.retrying import request_patiently
from headrace.indexing.transport import Transport
from headrace.indexing.verdicts import Reason

MAPPINGS: dict[str, Any] = {
    "dynamic": False,
    "properties": {
        "stream": {"type": "keyword"},
        "output": {"type": "keyword"},
        "batch_time": {"type": "date", "format": "epoch_millis"},
        "topic": {"type": "keyword"},
        "partition": {"type": "integer"},
        "offset": {"type": "long"},
        "incarnation": {"type": "integer"},
        "index": {"type": "keyword"},
        "reason": {"properties": {"type": {"type": "keyword"}, "text": {"type": "text"}}},
        "key": {"type": "binary"},
        "value": {"type": "binary"},
        "value_text": {"type": "text"},
        "document_text": {"type": "text"},
        "value_bytes": {"type": "long"},
        "headers": {"enabled": False},
    },
}
"""How the dead-letter index is created where it is missing. ``value_text`` is there when the value is UTF-8,
``document_text`` (what was sent) when a transform made it; a record too large even for here has neither, nor ``value``,
but ``value_bytes``, its size."""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """One record, or row of an aggregate, that could not be indexed. Coordinates are None for an aggregate's row."""

    topic: str | None
    partition: int | None
    offset: int | None
    incarnation: int
    reason: Reason
    original: OriginalRecord | None
    document: bytes | None
    """What was to be indexed, where that is not the record's value."""
    digest: str = ""
    """Stands for the row in its id where its record does not, or not alone."""
    omit_value: bool = False

    @property
    def id(self) -> str:
        """The record's id; for one of several rows that may come of a record, and for a row without one, with a digest
        of its batch and all it holds."""
        if self.topic is None or self.partition is None or self.offset is None:
            return f"row+{self.digest}"
        record = f"{self.topic}+{self.partition}+{self.offset}"
        incarnation = f"+{self.incarnation}" if self.incarnation > 1 else ""
        return record + incarnation + (f"+row+{self.digest}" if self.digest else "")

    @property
    def size(self) -> int:
        """About how many bytes it holds on to."""
        value = (self.original.value if self.original else None) or b""
        return 500 + len(value) + len(self.document or b"")

    def to_bytes(self, options: IndexingOptions) -> bytes:
        """The dead letter as JSON in one line."""
        value = self.original.value if self.original else None
        fields: dict[str, Any] = {
            "stream": options.stream,
            "output": options.output,
            "batch_time": options.batch_time,
            "index": options.index,
            "topic": self.topic,
            "partition": self.partition,
            "offset": self.offset,
            "incarnation": self.incarnation if self.topic is not None else None,
            "reason": {"type": self.reason.type, "text": self.reason.text},
            "value_bytes": None if value is None else len(value),
        }
        if self.original is not None:
            fields["key"] = _base64(self.original.key)
            fields["headers"] = [{"key": name, "value": _base64(held)} for name, held in self.original.headers]
        if not self.omit_value:
            fields |= {"value": _base64(value), "value_text": _text(value), "document_text": _text(self.document)}
        present = {name: held for name, held in fields.items() if held is not None}
        return json.dumps(present, separators=(",", ":")).encode()


def dead_letter(batch: pa.RecordBatch, row: int, reason: Reason, options: IndexingOptions) -> DeadLetter:
    """The dead letter of a row, with the record's bytes as far as the row has them."""
    names = batch.schema.names
    digest = ""
    is_record = all(name in names and batch.column(name)[row].is_valid for name in columns.COORDINATES)
    if not is_record or options.document_id is DocumentIdKind.COLUMNS:
        held = (options.batch_time, batch.slice(row, 1).to_pylist())
        digest = hashlib.sha256(repr(held).encode()).hexdigest()

    def cell(name: str) -> Any:
        return batch.column(name)[row].as_py() if name in names else None

    document = _as_bytes(cell(document_column(batch)))
    original: OriginalRecord | None = None
    if document_column(batch) == columns.VALUE:
        original = OriginalRecord(_as_bytes(cell(columns.KEY)), document, _headers(cell(columns.HEADERS)))
        document = None
    elif columns.ORIGINAL_VALUE in names:
        original = OriginalRecord(
            _as_bytes(cell(columns.ORIGINAL_KEY)),
            _as_bytes(cell(columns.ORIGINAL_VALUE)),
            _headers(cell(columns.ORIGINAL_HEADERS)),
        )
    return DeadLetter(
        cell(columns.TOPIC),
        cell(columns.PARTITION),
        cell(columns.OFFSET),
        cell(columns.INCARNATION) or 1,
        reason,
        original,
        document,
        digest,
    )


class DeadLetterOffice:
    """Collects a task's dead letters and writes them, a bounded number at a time."""

    MOST_HELD = 1000
    MOST_BYTES_HELD = 8 * 1024 * 1024

    def __init__(
        self,
        transport: Transport,
        sender: BulkSender,
        options: IndexingOptions,
        originals: OriginalRecords | None,
    ) -> None:
        """``sender`` writes into the dead-letter index."""
        self._transport = transport
        self._sender = sender
        self._options = options
        self._originals = originals
        self._held: list[DeadLetter] = []
        self._bytes_held = 0
        self._index_ensured = False

    def take(self, batch: pa.RecordBatch, rejected: Iterable[tuple[int, Reason]], counts: IndexingCounts) -> None:
        """Hold the dead letters of these rows, and count them; writes when too many are held."""
        for row, reason in rejected:
            letter = dead_letter(batch, row, reason, self._options)
            self._held.append(letter)
            self._bytes_held += letter.size
            counts.dead_lettered += 1
            counts.dead_letter_reasons[reason.type] += 1
            if len(self._held) >= self.MOST_HELD or self._bytes_held >= self.MOST_BYTES_HELD:
                self.flush(counts)

    def flush(self, counts: IndexingCounts) -> None:
        """Write what is held. Raises DeadLettersRefusedError if one of them is refused."""
        if not self._held:
            return
        self._ensure_index()
        letters = [self._with_original(letter) for letter in self._held]
        too_large = self._write(letters, counts)
        # What does not fit a request even so is told of without its value; the record itself is in the log and Kafka.
        slim = [replace(letter, omit_value=True) for letter in too_large]
        if slim and self._write(slim, counts):
            raise self._refused(Reason(DOCUMENT_TOO_LARGE, "not even without its value"))
        self._held = []
        self._bytes_held = 0

    def _write(self, letters: Sequence[DeadLetter], counts: IndexingCounts) -> list[DeadLetter]:
        """Write these; those that are too large come back."""
        prepared = _prepared(letters, self._options)
        too_large = []
        for lines in prepared.requests(self._options):
            sent = self._sender.send(prepared, lines)
            counts.requests += sent.counts.requests
            counts.retries += sent.counts.retries
            counts.bytes += sent.counts.bytes
            for line, reason in sent.rejected:
                if reason.type != DOCUMENT_TOO_LARGE:
                    raise self._refused(reason)
                too_large.append(letters[line])
        return too_large

    def _refused(self, reason: Reason) -> DeadLettersRefusedError:
        return DeadLettersRefusedError(
            f"A dead letter was refused by index {self._options.dead_letters!r}: {reason}.",
            remedy="Let headrace create that index, or give it the mapping that it would have created; "
            "then run the batch again.",
        )

    def _with_original(self, letter: DeadLetter) -> DeadLetter:
        if letter.original is not None or self._originals is None or letter.topic is None:
            return letter
        if letter.partition is None or letter.offset is None:
            return letter
        found = self._originals.fetch(letter.topic, letter.partition, letter.offset, letter.incarnation)
        return letter if found is None else replace(letter, original=found)

    def _ensure_index(self) -> None:
        if self._index_ensured:
            return
        path = f"/{quote(self._options.dead_letters, safe='')}"
        patience = self._sender.patience()
        if request_patiently(self._transport, patience, "HEAD", path).status != 200:
            # Another task may be first, or the user may index but not create: writing the letters tells.
            body = json.dumps({"mappings": MAPPINGS}).encode()
            request_patiently(self._transport, patience, "PUT", path, body)
        self._index_ensured = True


def _prepared(letters: Sequence[DeadLetter], options: IndexingOptions) -> PreparedRows:
    # Overwritten rather than kept: when a batch is run again the newer reason is the one to act on.
    lines = [
        b'{"index":{"_id":%s}}\n%s\n' % (json.dumps(letter.id).encode(), letter.to_bytes(options)) for letter in letters
    ]
    source = pa.record_batch([pa.array([letter.id for letter in letters], pa.large_string())], names=["id"])
    return PreparedRows(source, np.arange(len(letters)), source.column(0), None, pa.array(lines, pa.large_binary()))


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
