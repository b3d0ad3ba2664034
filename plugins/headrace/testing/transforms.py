"""Runs a stream's transform on given records in a test, as a batch would: the same decoding, columns and checks; and
writes the rows by an output's writer, as any number of attempts at the batch.

It needs a Spark session and nothing else: no ledger, no log, no Kafka and no Elasticsearch. A session takes some
seconds to start, so let a fixture with the scope "session" hold it::

    @pytest.fixture(scope="session")
    def spark():
        with local_session() as session:
            yield session

    def test_the_total_is_cents_times_pieces(spark):
        run = run_transform(stream, [{"item": "cup", "cents": 250, "pieces": 2}], spark=spark)
        assert [row["total"] for row in run.rows()] == [500]

The records may also be the Parquet file that ``headrace batches export`` wrote.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyarrow import parquet

from headrace.batch.readers import last_read_by
from headrace.blocks import TopicPartition
from headrace.elasticsearch.indexer import duplicate_ids_error
from headrace.elasticsearch.options import DocumentIdKind
from headrace.errors import HeadraceError
from headrace.spark.outputs.documents import BatchIncarnations, PreviewedDocument, lacks_incarnation, preview_documents
from headrace.spark.outputs.writer import Counts, WrittenBatch, writer_of
from headrace.spark.records.decoding import RAW_KEY, RAW_VALUE, REASON, DecodedInput, RecordDecoding, decode_input
from headrace.spark.records.record_columns import RECORD_SCHEMA as SPARK_SCHEMA
from headrace.spark.records.transforms import BatchContext, apply_transform, check_transform, load_transform
from headrace.spark.sessions import collect, local_session
from headrace.stream import Input, Stream
from headrace.wal.frame import RECORD_SCHEMA

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["KafkaRecord", "TransformRun", "TransformTestError", "local_session", "run_transform"]

FIRST_BATCH_TIME = datetime(2026, 1, 1, tzinfo=UTC)
_EXAMPLES = 5


class TransformTestError(HeadraceError):
    """The records do not fit the stream's inputs, or there is no such output."""


@dataclass(frozen=True, slots=True)
class KafkaRecord:
    """A record as Kafka gives it. A text is encoded as UTF-8, a mapping as JSON.

    ``topic`` None: the input's first topic. ``offset`` None: the offset after that of the record before it in the
    partition, from 0 on. ``timestamp`` None: the start of the batch's interval.
    """

    value: bytes | str | Mapping[str, Any] | None
    key: bytes | str | None = None
    topic: str | None = None
    partition: int = 0
    offset: int | None = None
    timestamp: datetime | None = None
    headers: tuple[tuple[str, bytes | None], ...] = ()
    incarnation: int = 1


Values = Sequence[KafkaRecord | bytes | str | Mapping[str, Any] | None] | Path
"""Records of one input: records, or values of records; or the path of an exported Parquet file."""


def run_transform(
    stream: Stream,
    records: Values | Mapping[str, Values],
    *,
    spark: SparkSession,
    batch_time: datetime = FIRST_BATCH_TIME,
    attempt: int = 1,
    parameters: Mapping[str, Any] | None = None,
    state: Mapping[str, DataFrame] | None = None,
) -> TransformRun:
    """Run the transforms of all outputs on these records.

    Args:
        stream: the definition. Its connections are not used.
        records: those of the only input, or a mapping from input ids to records. Inputs that are not named are empty.
        spark: a classic session, such as that of `local_session`.
        batch_time: the time of the batch, for ``batch.batch_time``.
        attempt: the value of ``batch.attempt``, for transforms and for `TransformRun.write`.
        parameters: values that override the stream's parameters, for ``batch.parameters``.
        state: the frames "state" and "changes", for transforms of a stream with state that take them.

    Raises:
        TransformTestError: there is no such input.
        TransformError: the transform's parameters do not fit the inputs, or it does not return what the outputs need.
        StreamDefinitionError: the transform cannot be imported.
        SchemaNotKnownError: a decoder's columns come from a schema registry, and no batch of the stream has run here.
            Give the decoder ``schema_text`` for the test.
    """
    check_transform(stream)
    batch_time_ms = int(batch_time.timestamp() * 1000)
    tables = {
        source.id: _table(source, values, batch_time_ms - stream.batch_interval_ms)
        for source, values in _by_input(stream, records)
    }
    inputs = {
        source.id: decode_input(
            spark,
            last_read_by(stream, source),
            partial(_read, spark.createDataFrame(tables[source.id]).to(SPARK_SCHEMA)),
            stream.folder_url,
        )
        for source in stream.inputs
    }
    decoded = {name: views.decoded for name, views in inputs.items()}
    frames: dict[str, DataFrame] = {}
    contexts: dict[str, BatchContext] = {}
    for output in stream.outputs:
        context = contexts[output.id] = BatchContext.of(
            stream.name,
            batch_time_ms,
            stream.batch_interval_ms,
            attempt,
            parameters={**stream.parameters, **(parameters or {})},
            window_ms=None if output.window is None else output.window.length_ms,
        )
        transform = load_transform(stream, output)
        if transform is None and stream.sends_bytes(output):
            # A document or a message without a transform is the value's own bytes.
            (views,) = inputs.values()
            frames[output.id] = views.original
            continue
        known = [each.id for each in stream.outputs]
        frames |= apply_transform(transform, decoded, [output.id], context, more=state, known=known)
    return TransformRun(stream, batch_time_ms, frames, contexts, inputs, records=list(tables.values()))


class TransformRun:
    """The result of transforms. ``frames`` are the outputs' DataFrames by output id, ``inputs`` the decoded inputs."""

    def __init__(
        self,
        stream: Stream,
        batch_time_ms: int,
        frames: Mapping[str, DataFrame],
        contexts: Mapping[str, BatchContext],
        inputs: Mapping[str, DecodedInput],
        *,
        records: Sequence[pa.Table],
    ) -> None:
        self.frames = frames
        self.inputs = inputs
        self._stream = stream
        self._batch_time_ms = batch_time_ms
        self._contexts = contexts
        self._incarnations = _incarnations(records)
        self._is_empty = not any(table.num_rows for table in records)

    def rows(self, output_id: str | None = None) -> list[dict[str, Any]]:
        """The rows of an output, or of the only output, as dictionaries.

        Raises:
            TransformTestError: there is no such output, or there are several and none is named.
        """
        return [row.asDict(recursive=True) for row in collect(self.frames[self._output_id(output_id)])]

    def documents(self, output_id: str | None = None) -> list[PreviewedDocument]:
        """What an Elasticsearch output would send: for each row its id, version and JSON text, or why it is rejected.

        Raises:
            TransformTestError: there is no such Elasticsearch output.
            UnsuitableRowsError: the rows do not have the columns that the output's ids need.
            DuplicateIdsError: two rows have the same id, so the batch would fail.
        """
        name = self._output_id(output_id)
        output = self._stream.elasticsearch_output(name)
        if output is None:
            kind = self._stream.output(name).kind
            raise TransformTestError(f"Output {name!r} of kind {kind} writes no documents.")
        frame = self.frames[output.id]
        documents = preview_documents(
            frame,
            output,
            stream_name=self._stream.name,
            batch_time_ms=self._batch_time_ms,
            incarnations=self._incarnations if lacks_incarnation(frame.schema) else None,
        )
        # Several records of one key are several versions of one document.
        counted = Counter((each.id, each.version, each.index) for each in documents if each.rejected is None)
        duplicates = [str(id_) for (id_, *_), number in counted.items() if number > 1]
        if duplicates:
            raise duplicate_ids_error(
                output.index_text, DocumentIdKind(output.document_ids.kind), duplicates[:_EXAMPLES]
            )
        return documents

    def undecodable(self, input_id: str | None = None) -> list[dict[str, Any]]:
        """The records that do not decode, which the transform does not get, with ``undecodable_reason``."""
        wanted = [views for name, views in self.inputs.items() if input_id in (None, name)]
        frames = [views.undecodable for views in wanted if views.undecodable is not None]
        return [row.asDict(recursive=True) for frame in frames for row in collect(frame)]

    def write(self, output_id: str | None = None, *, attempt: int | None = None, target: str = "") -> Counts:
        """Write the rows of an output, or of the only output, by its writer: to the real target, as an attempt would.

        Two calls are two attempts at the same batch. The stream's connections are used here. If there are no records,
        the writer gets None in place of rows where a batch would give it None.

        Args:
            output_id: the id of the output.
            attempt: the attempt's number; by default that of `run_transform`.
            target: the name of a replay; "" for the stream itself.

        Returns:
            The writer's counts.

        Raises:
            TransformTestError: there is no such output, or there are several and none is named.
            HeadraceError: what the writer raises, such as AttemptReplacedError for an older attempt.
        """
        output = self._stream.output(self._output_id(output_id))
        given = self._contexts[output.id]
        context = replace(given, attempt=given.attempt if attempt is None else attempt, target=target)
        makes_rows = self._stream.transform_of(output) is not None and output.takes_rows_without_records
        undecodable = {name: views.undecodable for name, views in self.inputs.items() if views.undecodable is not None}
        batch = WrittenBatch(
            stream=self._stream,
            context=context,
            batch_time_ms=self._batch_time_ms,
            attempt=context.attempt,
            manifest_uri="",
            from_kafka=False,
            target=target,
            out=sys.stdout,
            progress=print,
            undecodable=lambda: undecodable,
            incarnations=lambda: self._incarnations,
            written_before=context.attempt > 1,
            tried_before=context.attempt > 1,
        )
        frame = self.frames[output.id] if makes_rows or not self._is_empty else None
        return writer_of(output).write(frame, batch)

    def _output_id(self, output_id: str | None) -> str:
        known = ", ".join(self.frames)
        if output_id is None and len(self.frames) == 1:
            return next(iter(self.frames))
        if output_id is None or output_id not in self.frames:
            raise TransformTestError(
                f"Stream {self._stream.name!r} has several outputs, or none of this name.",
                remedy=f"Name one of its outputs: {known}.",
            )
        return output_id


def _read(records: DataFrame, *, decoding: RecordDecoding | None = None) -> DataFrame:
    return records if decoding is None else records.mapInArrow(decoding.run, decoding.schema)


def _by_input(stream: Stream, records: Values | Mapping[str, Values]) -> list[tuple[Input, Values]]:
    known = ", ".join(source.id for source in stream.inputs)
    if not isinstance(records, Mapping):
        if len(stream.inputs) > 1:
            raise TransformTestError(
                f"Stream {stream.name!r} has several inputs.", remedy=f"Give the records by input id: {known}."
            )
        return [(stream.inputs[0], records)]
    unknown = sorted(set(records) - {source.id for source in stream.inputs})
    if unknown:
        raise TransformTestError(f"Stream {stream.name!r} has no input {', '.join(unknown)}. Its inputs are {known}.")
    return [(source, records.get(source.id, [])) for source in stream.inputs]


def _table(source: Input, values: Values, timestamp_ms: int) -> pa.Table:
    """The records as the log has them (``RECORD_SCHEMA``)."""
    if isinstance(values, Path):
        return _exported(values)
    topic = source.topic_names[0] if source.topic_names else "records"
    next_offsets: Counter[tuple[str, int, int]] = Counter()
    rows = []
    for each in values:
        record = each if isinstance(each, KafkaRecord) else KafkaRecord(each)
        where = (record.topic or topic, record.partition, record.incarnation)
        offset = next_offsets[where] if record.offset is None else record.offset
        next_offsets[where] = offset + 1
        at = timestamp_ms if record.timestamp is None else int(record.timestamp.timestamp() * 1000)
        rows.append(
            {
                "key": _bytes(record.key),
                "value": _bytes(record.value),
                "topic": where[0],
                "partition": record.partition,
                "offset": offset,
                "timestamp": at,
                "timestampType": 0,
                "headers": [{"key": name, "value": value} for name, value in record.headers] or None,
                "incarnation": record.incarnation,
            }
        )
    arrays = [pa.array([row[field.name] for row in rows], field.type) for field in RECORD_SCHEMA]
    return pa.Table.from_arrays(arrays, schema=RECORD_SCHEMA)


def _exported(path: Path) -> pa.Table:
    """The records of a file of ``headrace batches export``, with their bytes, to be decoded again."""
    table = parquet.read_table(path)
    missing = [name for name in (RAW_KEY, RAW_VALUE, REASON) if name not in table.column_names]
    if missing:
        raise TransformTestError(
            f"{path} has no column {', '.join(missing)}.", remedy="Write it with `headrace batches export`."
        )
    raw = table.drop_columns(["key", "value"]).rename_columns({RAW_KEY: "key", RAW_VALUE: "value"})
    return raw.select(RECORD_SCHEMA.names).cast(RECORD_SCHEMA)


def _incarnations(tables: Iterable[pa.Table]) -> BatchIncarnations:
    ranges = []
    for table in tables:
        keys = ["topic", "partition", "incarnation"]
        grouped = table.group_by(keys).aggregate([("offset", "min"), ("offset", "max")])
        for row in grouped.to_pylist():
            partition = TopicPartition(row["topic"], "", row["partition"], row["incarnation"])
            ranges.append((partition, row["offset_min"], row["offset_max"] + 1))
    return BatchIncarnations(ranges)


def _bytes(value: bytes | str | Mapping[str, Any] | None) -> bytes | None:
    if value is None or isinstance(value, bytes):
        return value
    return value.encode() if isinstance(value, str) else json.dumps(value).encode()
