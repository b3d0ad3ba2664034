"""The answer of the route `/streams/{name}/trace`: one record's way, or the records with a key.

The fields are those of `headrace.views.traced`. Bytes are text if they are UTF-8, otherwise base64; ``…_encoding`` says
which.
"""

from __future__ import annotations

import base64
from typing import Any

from pydantic import Field

from headrace.ui.api.models.base import Answer, Time, ms
from headrace.views import traced

MAX_BYTES = 100_000
"""The most bytes of a key, a value or a header in an answer; a longer one is cut, and ``size`` says how long it is."""


class Bytes(Answer):
    """A key, a value or a header's value."""

    text: str
    encoding: str = Field(description='"utf-8" or "base64".')
    size: int = Field(description="The number of bytes. The text is cut after 100,000.")


class Header(Answer):
    """A header of a record."""

    key: str
    value: Bytes | None


class Position(Answer):
    """A record's place in Kafka."""

    input: str
    topic: str
    topic_id: str
    incarnation: int
    partition: int
    offset: int


class Record(Answer):
    """The record as Kafka gave it."""

    timestamp: Time | None
    timestamp_type: int = Field(description="0: when it was created; 1: when Kafka appended it; -1: unknown.")
    key: Bytes | None
    value: Bytes | None
    headers: tuple[Header, ...]
    read_from: str


class TracedBlock(Answer):
    """The block of the log that holds or held it."""

    segment: str
    offset: int
    length: int
    from_offset: int
    until_offset: int
    records: int
    in_log: bool
    batch_time: Time = ms("batch_time")
    receiver: str | None
    epoch: int | None
    sequence: int | None
    cut_at: Time | None = Field(validation_alias="cut_time_ms")
    added_at: Time | None = ms("added_at")


class TracedBatch(Answer):
    """The batch that has it."""

    batch_time: Time = ms("batch_time")
    state: str
    records: int
    built: bool
    revision: int
    allocated_at: Time = ms("allocated_at")
    completed_at: Time | None = ms("completed_at")
    error: str | None
    source: str | None


class TracedAttempt(Answer):
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
    started_at: Time = ms("started_at")
    ended_at: Time | None = ms("ended_at")
    error: str | None


class TracedDocument(Answer):
    """A document that was looked up."""

    index: str
    id: str
    found: bool
    version: int | None
    same: bool | None
    source: Any


class TracedLetter(Answer):
    """A dead letter of the record."""

    index: str
    id: str
    reason_type: str
    reason: str
    batch_time: Time | None = ms("batch_time")
    attempt: int | None
    replayed_at: Time | None = ms("replayed_at")


class OutputTrace(Answer):
    """What became of the record in one output."""

    output_id: str
    kind: str
    target: str
    outcome: traced.Outcome
    text: str
    attempt: int | None
    revision: int | None
    code_version: str | None
    recorded_at: Time | None = ms("recorded_at")
    error: str | None
    counts: dict[str, Any] | None
    document: TracedDocument | None
    letters: tuple[TracedLetter, ...]


class RecordTrace(Answer):
    """One record's way."""

    stream: str
    position: Position
    state: traced.RecordState
    text: str
    record: Record | None
    record_problem: str | None
    block: TracedBlock | None
    batch: TracedBatch | None
    attempts: tuple[TracedAttempt, ...]
    outputs: tuple[OutputTrace, ...]
    elsewhere: tuple[Position, ...]


class KeyMatch(Answer):
    """A record with the key."""

    position: Position
    timestamp: Time | None
    value_bytes: int | None
    batch_time: Time


class KeySearch(Answer):
    """The records with a key, newest first, and how far the search looked."""

    stream: str
    matches: tuple[KeyMatch, ...]
    searched_records: int
    searched_batches: int
    from_time: Time | None = Field(serialization_alias="from")
    until: Time | None
    complete: bool
    ended: str


class Trace(Answer):
    """Either ``record`` or ``search`` is null."""

    record: RecordTrace | None = None
    search: KeySearch | None = None


def trace_answer(trace: traced.RecordTrace) -> Trace:
    """The answer for a trace."""
    simple = {
        name: getattr(trace, name)
        for name in ("stream", "state", "text", "record_problem", "block", "batch", "attempts", "outputs")
    }
    record = trace.record
    return Trace(
        record=RecordTrace(
            **simple,
            position=_position(trace.position),
            elsewhere=tuple(map(_position, trace.elsewhere)),
            record=None
            if record is None
            else Record(
                timestamp=record.timestamp_ms,
                timestamp_type=record.timestamp_type,
                key=_bytes(record.key),
                value=_bytes(record.value),
                headers=tuple(Header(key=each.key, value=_bytes(each.value)) for each in record.headers),
                read_from=record.read_from,
            ),
        )
    )


def search_answer(search: traced.KeySearch) -> Trace:
    """The answer for a search for a key."""
    return Trace(
        search=KeySearch(
            stream=search.stream,
            matches=tuple(
                KeyMatch(
                    position=_position(each.position),
                    timestamp=each.timestamp_ms,
                    value_bytes=each.value_bytes,
                    batch_time=each.batch_time_ms,
                )
                for each in search.matches
            ),
            searched_records=search.searched_records,
            searched_batches=search.searched_batches,
            from_time=search.from_ms,
            until=search.until_ms,
            complete=search.complete,
            ended=search.ended,
        )
    )


def _position(position: traced.RecordPosition) -> Position:
    partition = position.partition
    return Position(
        input=position.input_id,
        topic=partition.topic,
        topic_id=partition.topic_id,
        incarnation=partition.incarnation,
        partition=partition.partition,
        offset=position.offset,
    )


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
