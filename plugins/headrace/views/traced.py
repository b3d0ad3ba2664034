"""What a trace reports: the views of a record, its block, its batch, and what became of it in each output.

None means that a value is not known, and the texts say why. In JSON for programs, a key, a value and a header's value
are text if they are UTF-8, otherwise base64; ``encoding`` says which.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field

from headrace.blocks import TopicPartition
from headrace.errors import HeadraceError
from headrace.views.base import UNPUBLISHED, ShownAs, Time, View

MAX_BYTES = 100_000
"""The most bytes of a key, a value or a header in JSON; a longer one is cut, and ``size`` says how long it is."""


class UnknownRecordError(HeadraceError):
    """The stream has no such topic, partition or document id, so nothing can be said of the record."""


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


class Bytes(View):
    """A key, a value or a header's value."""

    text: str
    encoding: str = Field(description='"utf-8" or "base64".')
    size: int = Field(description="The number of bytes. The text is cut after 100,000.")


class Position(View):
    """A record's place in Kafka."""

    input: str
    topic: str
    topic_id: str
    incarnation: int
    partition: int
    offset: int


def _bytes(data: bytes | None) -> Bytes | None:
    if data is None:
        return None
    cut = data[:MAX_BYTES]
    try:
        data.decode()
    except UnicodeDecodeError:
        return Bytes(text=base64.b64encode(cut).decode(), encoding="base64", size=len(data))
    # A cut within a character leaves its first bytes out.
    return Bytes(text=cut.decode(errors="ignore"), encoding="utf-8", size=len(data))


def _position(position: RecordPosition) -> Position:
    partition = position.partition
    return Position(
        input=position.input_id,
        topic=partition.topic,
        topic_id=partition.topic_id,
        incarnation=partition.incarnation,
        partition=partition.partition,
        offset=position.offset,
    )


_AS_TEXT = ShownAs(Bytes | None, _bytes)
_IN_PARTS = ShownAs(Position, _position)


class Header(View):
    """A header of a record."""

    key: str
    value: Annotated[bytes | None, _AS_TEXT]


class Record(View):
    """The record as Kafka gave it."""

    timestamp_ms: Time | None
    timestamp_type: int = Field(description="0: when it was created; 1: when Kafka appended it; -1: unknown.")
    key: Annotated[bytes | None, _AS_TEXT]
    value: Annotated[bytes | None, _AS_TEXT]
    headers: tuple[Header, ...]
    read_from: str


class TracedBlock(View):
    """The block of the log that holds or held it."""

    segment: str
    offset: int
    length: int
    from_offset: int
    until_offset: int
    records: int
    in_log: bool
    batch_time_ms: Time
    receiver: str | None
    epoch: int | None
    sequence: int | None
    cut_time_ms: Time | None = Field(serialization_alias="cut_at")
    added_at_ms: Time | None


class TracedBatch(View):
    """The batch that has it."""

    batch_time_ms: Time
    state: str
    records: int
    built: bool
    revision: int
    allocated_at_ms: Time
    completed_at_ms: Time | None
    error: str | None
    source: str | None
    manifest_uri: Annotated[str, UNPUBLISHED]


class TracedAttempt(View):
    """An attempt at the batch, or at its replay ``target``."""

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
    started_at_ms: Time
    ended_at_ms: Time | None
    error: str | None


class TracedDocument(View):
    """A document that was looked up."""

    index: str
    id: str
    found: bool
    version: int | None
    same: bool | None
    source: Any


class TracedLetter(View):
    """A dead letter of the record."""

    index: str
    id: str
    reason_type: str
    reason: str
    batch_time_ms: Time | None
    attempt: int | None
    replayed_at_ms: Time | None


class OutputTrace(View):
    """What became of the record in one output."""

    output_id: str
    kind: str
    target: str
    outcome: Outcome
    text: str
    attempt: int | None
    revision: int | None
    code_version: str | None
    recorded_at_ms: Time | None
    error: str | None
    counts: dict[str, Any] | None
    document: TracedDocument | None
    letters: tuple[TracedLetter, ...]


class RecordTrace(View):
    """One record's way."""

    stream: str
    position: Annotated[RecordPosition, _IN_PARTS]
    state: RecordState
    text: str
    record: Record | None
    record_problem: str | None
    block: TracedBlock | None
    batch: TracedBatch | None
    attempts: tuple[TracedAttempt, ...]
    outputs: tuple[OutputTrace, ...]
    elsewhere: tuple[Annotated[RecordPosition, _IN_PARTS], ...]


class KeyMatch(View):
    """A record with the key."""

    position: Annotated[RecordPosition, _IN_PARTS]
    timestamp_ms: Time | None
    value_bytes: int | None
    batch_time_ms: Time


class KeySearch(View):
    """The records with a key, newest first, and how far the search looked."""

    stream: str
    key: Annotated[bytes, UNPUBLISHED]
    matches: tuple[KeyMatch, ...]
    searched_records: int
    searched_batches: int
    from_ms: Time | None
    until_ms: Time | None
    complete: bool
    ended: str


class Trace(View):
    """Either ``record`` or ``search`` is null."""

    record: RecordTrace | None = None
    search: KeySearch | None = None
