"""What a trace reports: plain values, without methods that read anything. The command and the page show the same.

Times are milliseconds since the Unix epoch. None means that the value is not known, and the texts say why.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from headrace.blocks import TopicPartition
from headrace.errors import HeadraceError


class RecordState(StrEnum):
    """How far a record has come."""

    NOT_RECEIVED = "not_received"
    """The receiver's position is at or before its offset."""
    WAITING = "waiting"
    """It is in a block of the log, and no batch has taken the block yet."""
    IN_BATCH = "in_batch"
    """A batch has taken its block, or was built from Kafka with its offset."""
    NO_RECORD = "no_record"
    """The offset was received and holds no record: a transaction marker, an aborted or a compacted record."""
    GAP = "gap"
    """The offset is in a gap: lost by Kafka before it was received."""
    BEFORE_START = "before_start"
    """The stream began to read the partition at a later offset."""
    REMOVED = "removed"
    """Its batch is older than the stream's history, and was removed from the ledger."""


class Outcome(StrEnum):
    """What became of a record in one output."""

    DOCUMENT = "document"
    """The index has a document with the record's id. ``same`` says whether its contents are the record's value."""
    NEWER_DOCUMENT = "newer_document"
    """The index has a document with the record's id and a higher version than the record's: a later record's."""
    DEAD_LETTER = "dead_letter"
    """It was refused. The letter says why, and whether it was replayed."""
    NEITHER = "neither"
    """The output has written the batch, and there is neither a document nor a dead letter."""
    WRITTEN = "written"
    """The output has written the batch. Whether the record is in it cannot be looked up."""
    NOT_WRITTEN = "not_written"
    """The output has not written the batch: it waits, runs, or has failed."""
    UNKNOWN = "unknown"
    """It could not be looked up. The text says why."""


@dataclass(frozen=True, slots=True)
class RecordPosition:
    """A record's place in Kafka, as an input of a stream knows it."""

    input_id: str
    partition: TopicPartition
    offset: int

    def __str__(self) -> str:
        return f"{self.partition.topic} {self.partition.partition} {self.offset}"


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """A header of a record. Names may repeat."""

    key: str
    value: bytes | None


@dataclass(frozen=True, slots=True)
class TracedRecord:
    """The record as Kafka gave it. ``read_from`` is "log" or "kafka"."""

    timestamp_ms: int | None
    timestamp_type: int
    key: bytes | None
    value: bytes | None
    headers: tuple[RecordHeader, ...]
    read_from: str


@dataclass(frozen=True, slots=True)
class TracedBlock:
    """The block of the log that holds or held the record.

    ``in_log``: the segment's file has not been removed. The fields from ``receiver`` on are unknown once the ledger has
    deleted the block's row, with the segment.
    """

    segment: str
    offset: int
    length: int
    from_offset: int
    until_offset: int
    records: int
    in_log: bool
    batch_time_ms: int
    receiver: str | None = None
    epoch: int | None = None
    sequence: int | None = None
    cut_time_ms: int | None = None
    added_at_ms: int | None = None


@dataclass(frozen=True, slots=True)
class TracedBatch:
    """The batch that has the record. ``revision`` is that of the definition that the batch was allocated with.

    ``source`` is where an attempt would read its records now, "log" or "kafka"; None if the batch is abandoned.
    """

    batch_time_ms: int
    state: str
    records: int
    built: bool
    revision: int
    allocated_at_ms: int
    completed_at_ms: int | None
    error: str | None
    manifest_uri: str
    source: str | None


@dataclass(frozen=True, slots=True)
class TracedAttempt:
    """An attempt at the batch, or at its replay ``target``. ``run_id`` is the Airflow run that began it."""

    number: int
    target: str
    state: str
    outputs: tuple[str, ...]
    way: str
    holder: str
    source: str
    revision: int | None
    code_version: str | None
    run_id: str | None
    started_at_ms: int
    ended_at_ms: int | None
    error: str | None


@dataclass(frozen=True, slots=True)
class TracedDocument:
    """A document that was looked up by its id. ``same``: its contents are the record's value; None: not comparable."""

    index: str
    id: str
    found: bool
    version: int | None = None
    same: bool | None = None
    source: Any = None


@dataclass(frozen=True, slots=True)
class TracedLetter:
    """A dead letter of the record."""

    index: str
    id: str
    reason_type: str
    reason: str
    batch_time_ms: int | None
    attempt: int | None
    replayed_at_ms: int | None


@dataclass(frozen=True, slots=True)
class OutputTrace:
    """What became of the record in one output of the batch, or of its replay ``target``.

    ``attempt``, ``revision``, ``code_version`` and ``counts`` are those of the newest result that the ledger has.
    """

    output_id: str
    kind: str
    target: str
    outcome: Outcome
    text: str
    attempt: int | None = None
    revision: int | None = None
    code_version: str | None = None
    recorded_at_ms: int | None = None
    error: str | None = None
    counts: Mapping[str, Any] | None = None
    document: TracedDocument | None = None
    letters: tuple[TracedLetter, ...] = ()


@dataclass(frozen=True, slots=True)
class RecordTrace:
    """One record's way. ``text`` says in a sentence how far it has come.

    ``record_problem`` says why ``record`` is None. ``elsewhere`` are other incarnations of the topic, or other inputs
    with a topic of this name, that have received the same offset.
    """

    stream: str
    position: RecordPosition
    state: RecordState
    text: str
    record: TracedRecord | None = None
    record_problem: str | None = None
    block: TracedBlock | None = None
    batch: TracedBatch | None = None
    attempts: tuple[TracedAttempt, ...] = ()
    outputs: tuple[OutputTrace, ...] = ()
    elsewhere: tuple[RecordPosition, ...] = ()


@dataclass(frozen=True, slots=True)
class KeyMatch:
    """A record with the key. ``batch_time_ms`` is its block's batch time, whether the batch is allocated or not."""

    position: RecordPosition
    timestamp_ms: int | None
    value_bytes: int | None
    batch_time_ms: int


@dataclass(frozen=True, slots=True)
class KeySearch:
    """The result of a search for a key, newest first.

    ``searched_records`` were looked at, in the batch times from ``from_ms`` to ``until_ms`` (None: none). ``complete``:
    everything that the stream has received and still has was searched. ``ended`` says why the search ended.
    """

    stream: str
    key: bytes
    matches: tuple[KeyMatch, ...]
    searched_records: int
    searched_batches: int
    from_ms: int | None
    until_ms: int | None
    complete: bool
    ended: str


class UnknownRecordError(HeadraceError):
    """The stream has no such topic, partition or document id, so nothing can be said of the record."""
