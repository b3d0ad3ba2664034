"""Reads a single record: from its block in the log, or from Kafka."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa
import pyarrow.compute as pc

from headrace.batch.manifest import LOG_FOLDER
from headrace.blocks import BlockHandle
from headrace.errors import HeadraceError
from headrace.kafka.offsets import since
from headrace.kafka.range_reader import KafkaRangeReader, RangeClients
from headrace.kafka.ranges import RangeRun, RecordedRange
from headrace.stream import KafkaInput
from headrace.stream_context import StreamContext
from headrace.trace.models import RecordHeader, RecordPosition, TracedBlock, TracedRecord
from headrace.wal.reader import read_block

# A person waits for the answer.
ANSWER_SECONDS = 5.0
STALL_SECONDS = 10.0


class NotInKafkaError(HeadraceError):
    """Kafka does not have the offset: not yet, not any more, or the topic is another one."""


class RecordUnreadableError(HeadraceError):
    """The log's block is missing or damaged, and the record cannot be read from Kafka."""


class RecordReader:
    """Reads single records of a stream. ``environ``: where connections are looked up, by default the process's
    environment."""

    def __init__(self, context: StreamContext, environ: Mapping[str, str] | None = None) -> None:
        self._context = context
        self._environ = environ

    def read(self, position: RecordPosition, block: TracedBlock | None) -> TracedRecord | None:
        """The record from its block if the log has it, otherwise from Kafka.

        None: the block was read and does not hold the offset; or the log does not have the block, and Kafka has no
        record at the offset (any more).

        Raises:
            HeadraceError: neither has it, or both cannot be read.
        """
        if block is None or not block.in_log:
            return self.from_kafka(position)
        try:
            return self.from_log(BlockHandle(block.segment, block.offset, block.length), position)
        except HeadraceError as damage:
            try:
                record = self.from_kafka(position)
            except HeadraceError as error:
                raise RecordUnreadableError(f"{damage} In Kafka: {error}") from error
            if record is None:
                # Kafka may have compacted it since, so the offset may have had a record.
                raise RecordUnreadableError(
                    f"{damage} In Kafka: there is no record at the offset any more."
                ) from damage
            return record

    def from_log(self, handle: BlockHandle, position: RecordPosition) -> TracedRecord | None:
        """The record from its block; None if the block has no record at this offset.

        Raises:
            WalError: the segment is missing or damaged.
        """
        _, records = read_block(self._context.storage.below(LOG_FOLDER), handle)
        return _record(records, position, "log")

    def from_kafka(self, position: RecordPosition) -> TracedRecord | None:
        """The record from Kafka; None if Kafka has no record at this offset (a transaction marker, compaction).

        Raises:
            NotInKafkaError: Kafka does not have the offset, or the stream has no such input any more.
            HeadraceError: Kafka does not answer, or its connection cannot be used.
        """
        source = next((each for each in self._context.stream.inputs if each.id == position.input_id), None)
        if source is None:
            raise NotInKafkaError(f"The stream's definition has no input {position.input_id!r} any more.")
        if not isinstance(source, KafkaInput):
            raise NotInKafkaError(f"Input {position.input_id!r} is no Kafka input: only the log has its records.")
        clients = RangeClients.of(source, environ=self._environ).for_offsets(1).quiet()
        partition, questions = position.partition, clients.questions(answer_seconds=ANSWER_SECONDS)
        topic_id = questions.topic_ids({partition.topic})[partition.topic]
        if topic_id is None:
            raise NotInKafkaError(f"Topic {partition.topic!r} does not exist in Kafka any more.")
        if topic_id != partition.topic_id:
            raise NotInKafkaError(f"Topic {partition.topic!r} was deleted and created again since.")
        kept = questions.kept([(partition.topic, partition.partition)])[partition.topic, partition.partition]
        if kept is None:
            raise NotInKafkaError(f"Kafka has no partition {partition.partition} of topic {partition.topic!r}.")
        if position.offset >= kept.end:
            raise NotInKafkaError(f"Kafka has no such offset yet: the partition ends at {kept.end}.")
        if position.offset < kept.first:
            raise NotInKafkaError(f"Kafka has deleted it: {since(kept)}.")
        run = RangeRun.of([RecordedRange(partition, position.offset, position.offset + 1, None)])
        with KafkaRangeReader(clients, stall_seconds=STALL_SECONDS, questions=questions) as reader:
            for records in reader.read([run]):
                found = _record(records, position, "kafka")
                if found is not None:
                    return found
        return None


def _record(records: pa.RecordBatch, position: RecordPosition, read_from: str) -> TracedRecord | None:
    partition = position.partition
    wanted = pc.and_(
        pc.and_(
            pc.equal(records.column("offset"), position.offset),
            pc.equal(records.column("partition"), partition.partition),
        ),
        pc.and_(
            pc.equal(records.column("topic"), partition.topic),
            pc.equal(records.column("incarnation"), partition.incarnation),
        ),
    )
    rows = pc.indices_nonzero(wanted).to_pylist()
    if not rows:
        return None
    row = records.slice(rows[0], 1)
    timestamps = pc.cast(row.column("timestamp"), pa.int64())
    (fields,) = row.drop_columns(["timestamp"]).to_pylist()
    return TracedRecord(
        timestamp_ms=timestamps[0].as_py(),
        timestamp_type=fields["timestampType"],
        key=fields["key"],
        value=fields["value"],
        headers=tuple(RecordHeader(header["key"], header["value"]) for header in fields["headers"] or ()),
        read_from=read_from,
    )
