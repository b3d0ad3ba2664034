"""A dead letter: what Elasticsearch can never take, with everything to understand and to repeat it.

One document per record, under the record's own id, so that running a batch again does not double it. One that was
replayed (``dead_letter_replay``) stays, with the time of it, until its batch is dead-lettered anew.
"""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from headrace.indexing import columns
from headrace.indexing.bulk_bodies import REJECTED_BEFORE, document_column
from headrace.indexing.document_ids import identify
from headrace.indexing.options import DocumentIdKind, IndexingOptions
from headrace.indexing.originals import OriginalRecord
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
        "timestamp": {"type": "date", "format": "epoch_millis"},
        "document_id": {"type": "keyword"},
        "version": {"type": "long"},
        "value_is_document": {"type": "boolean"},
        "replayed_at": {"type": "date", "format": "epoch_millis"},
    },
}
"""How the dead-letter index is created where it is missing. ``value_text`` is there when the value is UTF-8,
``document_text`` (what was sent) when a transform made it, otherwise ``value_is_document``; a record too large even for
here has neither, nor ``value``, but ``value_bytes``, its size. ``document_id`` and ``version`` are those
that the document was to have; ``replayed_at`` is there once it was indexed after all."""


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
    document_id: str | None = None
    """Under which it was to be indexed; None where it has no usable id, or was rejected by a step before."""
    version: int | None = None
    """The external version that it was to have."""
    value_is_document: bool = False
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
            "document_id": self.document_id,
            "version": self.version,
        }
        if self.original is not None:
            fields["timestamp"] = self.original.timestamp_ms
            fields["key"] = _base64(self.original.key)
            fields["headers"] = [{"key": name, "value": _base64(held)} for name, held in self.original.headers]
        if not self.omit_value:
            fields |= {"value": _base64(value), "value_text": _text(value), "document_text": _text(self.document)}
            fields["value_is_document"] = self.value_is_document and value is not None
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
    untouched = document_column(batch) == columns.VALUE
    if untouched:
        headers = _headers(cell(columns.HEADERS))
        original = OriginalRecord(_as_bytes(cell(columns.KEY)), document, headers, _timestamp_ms(batch, row))
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
        *((None, None) if reason.type == REJECTED_BEFORE else _identity(batch, row, options)),
        value_is_document=untouched,
    )


def _identity(batch: pa.RecordBatch, row: int, options: IndexingOptions) -> tuple[str | None, int | None]:
    """The id and the version that the row's document has; no id where none can be made."""
    identities = identify(batch.slice(row, 1), options)
    if identities.rejected:
        return None, None
    return identities.ids[0].as_py(), None if identities.versions is None else identities.versions[0].as_py()


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
