"""Turns dead letters into documents with the stream's current decoders and transform."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema

from headrace.blocks import TopicPartition
from headrace.elasticsearch import columns
from headrace.elasticsearch.bulk_bodies import REJECTED_BEFORE
from headrace.elasticsearch.dead_letter_replay import LetterRows
from headrace.elasticsearch.errors import LettersNotReplayableError
from headrace.elasticsearch.verdicts import Reason
from headrace.spark.decoding import REASON, DecodedInput, decode_input
from headrace.spark.documents import prepare_documents
from headrace.spark.incarnations import BatchIncarnations, Range
from headrace.spark.transforms import STATE_FRAMES, BatchContext, apply_transform, load_transform, takes
from headrace.spark.wal_source import RECORD_SCHEMA
from headrace.stream import ColumnIds

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from headrace.elasticsearch.dead_letter_index import StoredLetter
    from headrace.stream import ElasticsearchOutput, KafkaInput, Stream


class ThroughTheTransform:
    """Reads letters as the records that they hold, and applies decoder and transform again, by batch time.

    The transform gets only the records of the letters; the stream's other inputs are empty.

    Raises:
        LettersNotReplayableError: the output's documents cannot be made from single records.
    """

    def __init__(self, stream: Stream, output: ElasticsearchOutput, session: Callable[[], SparkSession]) -> None:
        self._stream = stream
        self._output = output
        self._session = session
        self._transform = load_transform(stream, output)
        self._refuse_sums()

    def cannot(self, letter: StoredLetter) -> str | None:
        """The reason why not: it has no single record, does not hold it, or its input is unclear. None if it can."""
        if letter.coordinates is None:
            return "it is of no record, but of a row that was made of many"
        if letter.record is None:
            return "it does not hold its record, which was too large: run its batch again"
        if self._source(letter) is None:
            return "its topic could be of several inputs, or is of none"
        return None

    def read(self, letters: Sequence[StoredLetter]) -> Iterator[LetterRows]:
        """The documents that the transform makes from each batch's records.

        Each incarnation is a separate group, because the transform may drop the column.
        """
        groups: dict[tuple[int, int], list[StoredLetter]] = {}
        for letter in letters:
            incarnation = 1 if letter.coordinates is None else letter.coordinates[3]
            groups.setdefault((int(letter.fields.get("batch_time") or 0), incarnation), []).append(letter)
        for (batch_time_ms, _), some in groups.items():
            yield self._read(batch_time_ms, some)

    def _read(self, batch_time_ms: int, letters: Sequence[StoredLetter]) -> LetterRows:
        places: dict[Any, int] = {}
        for place, letter in enumerate(letters):
            places.setdefault(letter.coordinates, place)
        owners = [places[letter.coordinates] for letter in letters]
        # A record with several rejected rows is transformed only once.
        records = [letters[place] for place in places.values()]
        inputs = {source.id: self._decoded(source, records) for source in self._stream.inputs}
        rejected = {}
        for views in inputs.values():
            if views.undecodable is not None:
                for row in views.undecodable.select(*_PLACE, REASON).collect():
                    rejected[places[tuple(row)[:4]]] = Reason(REJECTED_BEFORE, row[REASON])
        known = BatchIncarnations(map(_range, letters))
        frame = prepare_documents(self._transformed(inputs, batch_time_ms), self._output, incarnations=known)
        missing = [name for name in columns.COORDINATES if name not in frame.columns]
        if missing:
            raise LettersNotReplayableError(
                f"The rows of output {self._output.id!r} do not tell of which record they are: they have no "
                f"{', '.join(missing)}.",
                remedy="Let the transform keep topic, partition and offset, or run the letters' batches again.",
            )
        rows = _one_batch(frame)
        return LetterRows(
            letters,
            rows,
            [self._owner(rows, row, places) for row in range(rows.num_rows)],
            rejected=rejected,
            same_record={place: owner for place, owner in enumerate(owners) if owner != place},
        )

    def _transformed(self, inputs: dict[str, DecodedInput], batch_time_ms: int) -> DataFrame:
        if self._transform is None:
            (views,) = inputs.values()
            return views.original
        context = BatchContext.of(
            self._stream.name, batch_time_ms, self._stream.batch_interval_ms, 0, parameters=self._stream.parameters
        )
        decoded = {name: views.decoded for name, views in inputs.items()}
        frames = apply_transform(
            self._transform,
            decoded,
            [self._output.id],
            context,
            known=[output.id for output in self._stream.outputs],
        )
        return frames[self._output.id]

    def _decoded(self, source: KafkaInput, letters: Sequence[StoredLetter]) -> DecodedInput:
        records = [_record(letter) for letter in letters if self._source(letter) is source]
        table = pa.Table.from_pylist(records, schema=to_arrow_schema(RECORD_SCHEMA, timezone="UTC"))
        return decode_input(self._session().createDataFrame(table, schema=RECORD_SCHEMA), source)

    def _source(self, letter: StoredLetter) -> KafkaInput | None:
        """The input to which the letter's topic belongs; None if that is not clear."""
        if len(self._stream.inputs) == 1:
            return self._stream.inputs[0]
        found = [source for source in self._stream.inputs if letter.fields.get("topic") in source.topics]
        return found[0] if len(found) == 1 else None

    def _owner(self, rows: pa.RecordBatch, row: int, places: dict[Any, int]) -> int:
        values = {name: rows.column(name)[row].as_py() for name in rows.schema.names if name in _PLACE}
        coordinates = (values["topic"], values["partition"], values["offset"], values.get("incarnation") or 1)
        place = places.get(coordinates)
        if place is None:
            raise LettersNotReplayableError(
                f"The transform of output {self._output.id!r} made a row of {coordinates}, no letter's record.",
                remedy="Let it keep topic, partition, offset and incarnation, or run the letters' batches again.",
            )
        return place

    def _refuse_sums(self) -> None:
        why = None
        if isinstance(self._output.document_ids, ColumnIds):
            why = "its documents have ids of columns, and may be made of many records"
        elif self._output.window is not None:
            why = "it reads a window"
        elif self._transform is not None and any(takes(self._transform, name) for name in STATE_FRAMES):
            why = "its transform takes the state"
        if why is not None:
            raise LettersNotReplayableError(
                f"Output {self._output.id!r} of stream {self._stream.name!r} cannot be made of single records: {why}.",
                remedy="Run the letters' batches again, or replay the letters as they were (without --transform).",
            )


_PLACE = (*columns.COORDINATES, columns.INCARNATION)


def _range(letter: StoredLetter) -> Range:
    if letter.coordinates is None:
        raise ValueError("a letter that cannot be read was to be read")
    topic, partition, offset, incarnation = letter.coordinates
    return TopicPartition(topic, "", partition, incarnation), offset, offset + 1


def _record(letter: StoredLetter) -> dict[str, Any]:
    record, place = letter.record, letter.coordinates
    if record is None or place is None:
        raise ValueError("a letter that cannot be read was to be read")
    topic, partition, offset, incarnation = place
    return {
        "key": record.key,
        "value": record.value,
        "topic": topic,
        "partition": partition,
        "offset": offset,
        "timestamp": None if record.timestamp_ms is None else record.timestamp_ms * 1000,
        "timestampType": 0,
        "headers": [{"key": name, "value": value} for name, value in record.headers],
        "incarnation": incarnation,
    }


def _one_batch(frame: DataFrame) -> pa.RecordBatch:
    table = frame.toArrow().combine_chunks()
    batches = table.to_batches()
    return batches[0] if batches else pa.RecordBatch.from_pylist([], schema=table.schema)
