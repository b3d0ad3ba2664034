"""Finds the record that a person asks for: by its coordinates, or by a document's id."""

from __future__ import annotations

import re
from dataclasses import dataclass

from headrace.ledger.receiving_tables import PositionRow, TopicRow
from headrace.stream import ElasticsearchOutput
from headrace.stream.outputs import ColumnIds, RecordIds
from headrace.stream_context import StreamContext
from headrace.trace.errors import UnknownRecordError
from headrace.trace.models import RecordPosition

# A topic's name contains neither "+" nor "~".
_RECORD_ID = re.compile(r"([a-zA-Z0-9._-]{1,249})\+(\d{1,10})\+(\d{1,19})(?:\+(\d{1,9}))?(?:~.*)?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class FoundPosition:
    """The position that was asked for, its row in the ledger, and others with the same topic, partition and offset.

    ``is_of_earlier_incarnation``: the topic was created again since, and only this incarnation has the offset.
    """

    position: RecordPosition
    row: PositionRow
    is_of_earlier_incarnation: bool
    elsewhere: tuple[RecordPosition, ...] = ()


@dataclass(frozen=True, slots=True)
class Coordinates:
    """Topic, partition and offset as a person names them. ``incarnation`` None: the topic's current one."""

    topic: str
    partition: int
    offset: int
    incarnation: int | None = None


def find_position(context: StreamContext, asked: Coordinates, *, input_id: str | None = None) -> FoundPosition:
    """Find the partition in the ledger. Several inputs may have a topic of this name: the first is taken, by id.

    Raises:
        UnknownRecordError: the stream has not seen the topic, the partition, or this incarnation.
    """
    topics = [
        row
        for row in context.ledger.topics.all(context.name, input_id)
        if row.topic == asked.topic and asked.incarnation in (None, row.incarnation)
    ]
    if not topics:
        raise UnknownRecordError(_unknown_topic(context, asked, input_id))
    of_topic = {(row.input_id, row.topic_id): row for row in topics}
    found = [
        (of_topic[row.input_id, row.partition.topic_id], row)
        for row in context.ledger.positions.all(context.name, input_id)
        if (row.input_id, row.partition.topic_id) in of_topic and row.partition.partition == asked.partition
        if row.partition.topic == asked.topic
    ]
    if not found:
        raise UnknownRecordError(
            f"Stream {context.name!r} does not read partition {asked.partition} of topic {asked.topic!r}, which had "
            f"{max(row.partitions for row in topics)} partition(s) when it was last seen."
        )
    found.sort(key=_order)
    # The current incarnation may not have reached the offset that an earlier one has received.
    chosen = next((pair for pair in found if asked.offset < pair[1].next_offset), found[0])
    others = tuple(
        RecordPosition(row.input_id, row.partition, asked.offset)
        for _, row in found
        if row is not chosen[1] and asked.offset < row.next_offset
    )
    topic, row = chosen
    return FoundPosition(RecordPosition(row.input_id, row.partition, asked.offset), row, not topic.current, others)


def coordinates_of(context: StreamContext, document_id: str) -> Coordinates | None:
    """The coordinates in a document id of the default form; None if the id is of another form.

    Raises:
        UnknownRecordError: no output of the stream has ids that name a record.
    """
    outputs = [output for output in context.stream.outputs if isinstance(output, ElasticsearchOutput)]
    if not outputs:
        raise UnknownRecordError(
            f"Stream {context.name!r} has no Elasticsearch output, so it writes no documents with ids.",
            remedy="Give the record's topic, partition and offset.",
        )
    if any(isinstance(output.document_ids, RecordIds) for output in outputs):
        matched = _RECORD_ID.fullmatch(document_id)
        if matched:
            topic, partition, offset, incarnation = matched.groups()
            return Coordinates(topic, int(partition), int(offset), int(incarnation or 1))
        if all(isinstance(output.document_ids, RecordIds) for output in outputs):
            raise UnknownRecordError(
                f"{document_id!r} is not an id of stream {context.name!r}: its ids are topic+partition+offset, such as "
                "orders+0+17."
            )
    if all(isinstance(output.document_ids, ColumnIds) for output in outputs):
        raise UnknownRecordError(
            f"The document ids of stream {context.name!r} are made of columns: a document does not name its record.",
            remedy="Give the record's topic, partition and offset, or its key with --key.",
        )
    return None


def _order(pair: tuple[TopicRow, PositionRow]) -> tuple[bool, int, str]:
    topic, _ = pair
    return (not topic.current, -topic.incarnation, topic.input_id)


def _unknown_topic(context: StreamContext, asked: Coordinates, input_id: str | None) -> str:
    seen = context.ledger.topics.all(context.name, input_id)
    incarnations = sorted({row.incarnation for row in seen if row.topic == asked.topic})
    if incarnations:
        listed = ", ".join(map(str, incarnations))
        return (
            f"Stream {context.name!r} has not seen incarnation {asked.incarnation} of topic {asked.topic!r}, "
            f"only {listed}."
        )
    named = ", ".join(sorted({row.topic for row in seen})) or "none yet"
    where = "" if input_id is None else f" in input {input_id!r}"
    return f"Stream {context.name!r} has not seen a topic {asked.topic!r}{where}. The topics that it has seen: {named}."
