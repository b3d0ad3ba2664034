"""Makes of any DataFrame the rows that the Elasticsearch sink accepts: their columns are the document and its id.

The columns are built by Spark's own expressions (``to_json`` in the JVM). They are SQL text, which works the same in
classic sessions and over Spark Connect.

If the transform dropped a record's topic incarnation, it is determined from the batch's offset ranges. A topic that was
deleted and created again reuses its offsets, and a topic of the same name in another cluster has the same offsets; the
incarnation distinguishes their records. The batch's manifest has it for every offset range.

`preview_documents` shows what would be sent of rows, without sending it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from headrace.blocks import TopicPartition
from headrace.elasticsearch import columns
from headrace.elasticsearch.bulk_bodies import prepare_rows
from headrace.elasticsearch.errors import FieldsUnknownError, UnsuitableRowsError
from headrace.elasticsearch.options import IndexingOptions
from headrace.elasticsearch.target import Target
from headrace.elasticsearch.verdicts import Reason
from headrace.formats.change_events import ROW_OPERATIONS
from headrace.stream.ddl import differing_in_case
from headrace.stream.outputs import ElasticsearchOutput, KeyIds

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType, StructType

    from headrace.batch.manifest import Manifest
    from headrace.stream import ElasticsearchOutput


_WITH_MICROSECONDS = (
    "map('timestampFormat', \"yyyy-MM-dd'T'HH:mm:ss.SSSSSS[XXX]\", "
    "'timestampNTZFormat', \"yyyy-MM-dd'T'HH:mm:ss.SSSSSS\")"
)
_NOT_IN_DOCUMENTS = frozenset({columns.INCARNATION, "timestampType", columns.HEADERS})
"""The record's own columns that are in no document beside columns of the transform."""
_OF_RECORDS = (*columns.COORDINATES, columns.KEY, columns.TIMESTAMP, columns.HEADERS)


def prepare_documents(
    df: DataFrame, output: ElasticsearchOutput, *, incarnations: BatchIncarnations | None = None
) -> DataFrame:
    """The rows of ``df`` in the shape of ``headrace.elasticsearch.columns``.

    The record's own columns are recognised by their marks (``headrace.spark.records.record_columns``), so a column that
    the transform made is part of the document whatever its name is, except for the reserved names:

    - Rows with ``topic``, ``partition`` and ``offset`` belong to a record: these are its position, not part of the
      document; nor are ``rejected_because`` and the record's own incarnation, headers, timestamp type and binary key.
    - ``value`` is the document if there is nothing but columns of the record beside it: bytes or text as they are, a
      struct or map as JSON. A field of the decoded value that is named ``value`` is a field of the document.
    - Rows without a position, for example of an aggregate, are documents with all their columns.

    Any of the columns may be used for ids and versions. ``incarnations`` are those of the batch, for rows without the
    record's incarnation.

    Raises:
        UnsuitableRowsError: a column that the ids need is missing, a field of the decoded value has a reserved name, or
            it is not clear what the document is.
    """
    rows = _Rows(df, output)
    rows.check()
    beside = [*_id_expressions(output), *_index_expressions(output), *rows.record_expressions()]
    if incarnations is not None and lacks_incarnation(df.schema):
        beside.append(f"CAST({_incarnation(incarnations, output)} AS INT) AS {columns.INCARNATION}")
    return df.selectExpr(*beside, rows.document_expression())


def columns_of_documents(df: DataFrame, output: ElasticsearchOutput) -> str:
    """The columns of the documents that are made of the rows, in Spark's DDL.

    Raises:
        FieldsUnknownError: the documents are texts or bytes of JSON.
        UnsuitableRowsError: as `prepare_documents`.
    """
    rows = _Rows(df, output)
    rows.check()
    return rows.document_columns()


def json_text(expression: str) -> str:
    """The SQL expression of a value's JSON. Its times have all microseconds; Spark's default cuts them."""
    return f"to_json({expression}, {_WITH_MICROSECONDS})"


class _Rows:
    """The columns of an output's rows, and what each of them is."""

    def __init__(self, df: DataFrame, output: ElasticsearchOutput) -> None:
        from headrace.spark.records.record_columns import decoded_fields, own_columns

        schema = df.schema
        self._output = output
        self._session = df.sparkSession
        self._names = schema.names
        self._types: dict[str, DataType] = {field.name: field.dataType for field in schema.fields}
        self._own = own_columns(schema)
        self._fields = decoded_fields(schema)
        self._incarnation = incarnation_column(schema)
        self._has_operation = columns.CHANGE_OPERATION in self._own
        self._has_position = all(name in self._types and name not in self._fields for name in columns.COORDINATES)

    def check(self) -> None:
        """Raise UnsuitableRowsError if the ids cannot be made of the columns, or a name has two meanings."""
        output = self._output.id
        twice = sorted(name for name, number in Counter(self._names).items() if number > 1)
        if twice:
            raise UnsuitableRowsError(
                f"The rows for output {output!r} have several columns named {', '.join(map(repr, twice))}.",
                remedy="Give each column its own name in the transform.",
            )
        for group in differing_in_case(self._names):
            if self._session.conf.get("spark.sql.caseSensitive") == "true":
                break
            raise UnsuitableRowsError(
                f"The rows for output {output!r} have the columns {' and '.join(map(repr, group))}, which differ in "
                "case only: to Spark they are one name.",
                remedy="Rename or drop one in the transform, or set spark.sql.caseSensitive to true in spark.conf.",
            )
        named = _named_columns(self._output)
        missing = [name for name in named if name not in self._types]
        if missing:
            raise UnsuitableRowsError(
                f"The rows for output {output!r} have no column {', '.join(map(repr, missing))}, of which its document "
                f"ids or its index are made; they have {', '.join(map(repr, self._types))}.",
                remedy="Let the transform keep these columns, or choose other document_ids, or another index.",
            )
        reserved = {columns.REJECTED_BECAUSE, *(columns.COORDINATES if self._output.needs_incarnation else ())}
        reserved |= {*_OF_RECORDS}.intersection(self._output.names.columns)
        if isinstance(self._output.document_ids, KeyIds):
            reserved.add(columns.KEY)
        taken = sorted(reserved & self._fields)
        if taken:
            raise UnsuitableRowsError(
                f"The rows for output {output!r} have {', '.join(map(repr, taken))} from the record's decoded value, "
                "and the name is reserved: ids and indices are made of the record's own topic, partition, offset, key, "
                "time and headers, and rejected_because is the reason of a dead letter.",
                remedy=f"Give the field another name in the transform, for example value.{taken[0]} AS "
                f"{taken[0]}_in_value, and keep the record's own columns.",
            )

    def record_expressions(self) -> list[str]:
        """The expressions of the record's columns that are passed along with the document."""
        wanted = {columns.KEY} if isinstance(self._output.document_ids, KeyIds) else set()
        operation = [f"{columns.CHANGE_OPERATION} AS {columns.OPERATION}"] if self._has_operation else []
        if self._has_position:
            wanted |= {*columns.COORDINATES, columns.REJECTED_BECAUSE}
            if self._value_is_document():
                wanted |= self._own & {columns.KEY, columns.HEADERS, columns.TIMESTAMP}
        casts = {columns.PARTITION: "CAST({} AS INT)", columns.OFFSET: "CAST({} AS BIGINT)"}
        passed = [name for name in self._types if name in wanted]
        expressions = operation + [
            f"{casts.get(name, '{}').format(_quoted(name))} AS {_quoted(name)}" for name in passed
        ]
        if self._has_position and self._incarnation is not None:
            number = f"CAST({self._incarnation} AS INT)"
            known = number if self._output.needs_incarnation else f"COALESCE({number}, 1)"
            expressions.append(f"{known} AS {columns.INCARNATION}")
        return expressions

    def document_expression(self) -> str:
        """The expression of the document: ``value`` or ``document``."""
        from pyspark.sql.types import BinaryType, MapType, StringType, StructType

        value = self._types.get(columns.VALUE)
        if self._value_is_document():
            if isinstance(value, BinaryType | StringType):
                return columns.VALUE
            if isinstance(value, StructType | MapType):
                return f"{json_text(columns.VALUE)} AS {columns.DOCUMENT}"
        elif self._has_position and isinstance(value, BinaryType):
            raise UnsuitableRowsError(
                f"The rows for output {self._output.id!r} have a binary 'value' and columns beside it, so it is not "
                "clear what the document is.",
                remedy="Let the transform select what the document holds, or drop the other columns.",
            )
        text = json_text(f"struct({', '.join(map(_quoted, self._document_names()))})")
        if self._has_operation and isinstance(self._output.document_ids, KeyIds):
            text = f"CASE WHEN {self._has_row()} THEN {text} END"
        return f"{text} AS {columns.DOCUMENT}"

    def _document_names(self) -> list[str]:
        fields = [name for name in self._types if not self._is_the_records(name)]
        if not fields:
            raise UnsuitableRowsError(f"The rows for output {self._output.id!r} have no column for a document.")
        return fields

    def document_columns(self) -> str:
        """The columns of the document in Spark's DDL. Raises as `columns_of_documents`."""
        from pyspark.sql.types import BinaryType, MapType, StringType, StructField, StructType

        # Raises where it is not clear what the document is.
        self.document_expression()
        value = self._types.get(columns.VALUE)
        if self._value_is_document() and isinstance(value, StructType):
            return value.toDDL()
        if self._value_is_document() and isinstance(value, BinaryType | StringType | MapType):
            raise FieldsUnknownError(
                f"The documents of output {self._output.id!r} are values of the type {value.simpleString()}, so their "
                "fields are not known.",
                remedy="Give the input a decoder with columns, or let the transform select columns.",
            )
        return StructType([StructField(name, self._types[name]) for name in self._document_names()]).toDDL()

    def _has_row(self) -> str:
        """The condition of change events after which there is a row. The others have no document, as without a
        transform: the struct of a transform's columns is never null."""
        op = columns.CHANGE_OPERATION
        of_rows = f"{op} IN ({', '.join(map(_text, sorted(ROW_OPERATIONS)))})"
        # A row in flattened form may have no operation; a tombstone has none either, and no source.
        no_operation = f"{op} IS NULL"
        if columns.CHANGE_SOURCE in self._own:
            no_operation = f"({no_operation} AND {columns.CHANGE_SOURCE} IS NOT NULL)"
        return f"{no_operation} OR {of_rows}"

    def _value_is_document(self) -> bool:
        """Whether there are only the record's columns beside ``value``, those of ids and versions, and
        ``rejected_because``."""
        if not self._has_position or columns.VALUE not in self._types or columns.VALUE in self._fields:
            return False
        beside = {*columns.COORDINATES, *_named_columns(self._output), columns.REJECTED_BECAUSE, FOUND_INCARNATION}
        return self._types.keys() <= self._own | beside | {columns.VALUE}

    def _is_the_records(self, name: str) -> bool:
        """Whether a column belongs to the record and not to the document."""
        from pyspark.sql.types import BinaryType

        if name == FOUND_INCARNATION:
            return True
        if not self._has_position:
            return False
        if name in (*columns.COORDINATES, columns.REJECTED_BECAUSE):
            return True
        binary_key = name == columns.KEY and isinstance(self._types[name], BinaryType)
        return name in self._own and (name in _NOT_IN_DOCUMENTS or binary_key)


def _named_columns(output: ElasticsearchOutput) -> tuple[str, ...]:
    ids = output.document_ids
    of_ids = columns.columns_of_ids(ids.kind, ids.id_columns, ids.version_column)
    return tuple(dict.fromkeys([*of_ids, *output.names.columns]))


def _incarnation(incarnations: BatchIncarnations, output: ElasticsearchOutput) -> str:
    ambiguous = incarnations.ambiguous
    if not output.needs_incarnation:
        known = f"COALESCE({incarnations.expression()}, 1)"
        # A dead letter would get the record of another topic of the name.
        either = f"WHEN topic IN ({', '.join(map(_text, ambiguous))}) THEN {columns.UNKNOWN_INCARNATION}"
        return f"CASE {either} ELSE {known} END" if ambiguous else known
    if ambiguous:
        raise UnsuitableRowsError(
            f"The rows for output {output.id!r} have no column 'incarnation', and the batch has records of several "
            f"topics named {', '.join(map(repr, ambiguous))} with the same offsets: one that was created again, or "
            "topics of two clusters. Their documents would have the same ids.",
            remedy="Let the transform keep the column incarnation beside topic, partition and offset.",
        )
    return incarnations.expression()


def _id_expressions(output: ElasticsearchOutput) -> list[str]:
    ids = output.document_ids
    named = [f"{_quoted(name)} AS {columns.id_column(number)}" for number, name in enumerate(ids.id_columns)]
    return [*named, *([f"{_quoted(ids.version_column)} AS {columns.VERSION}"] if ids.version_column else [])]


def _index_expressions(output: ElasticsearchOutput) -> list[str]:
    """The columns of which the name of a row's index is made, in the order of `IndexNames.placeholders`."""
    expressions = []
    for number, placeholder in enumerate(output.names.placeholders):
        value = _quoted(placeholder.column)
        if placeholder.header:
            value = f"try_element_at(filter({value}, h -> h.key = {_text(placeholder.header)}), -1).value"
        expressions.append(f"{value} AS {columns.index_column(number)}")
    return expressions


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


FOUND_INCARNATION = "_headrace_incarnation"
"""The column with the incarnation of rows whose transform dropped it, where it was found by other means."""

Range = tuple[TopicPartition, int, int]
"""A partition and an offset range: from (inclusive) and until (exclusive)."""


class BatchIncarnations:
    """The incarnations of a batch's records, by topic, partition and offset."""

    def __init__(self, ranges: Iterable[Range]) -> None:
        self._topics: dict[str, dict[int, dict[int, tuple[int, int]]]] = {}
        for where, start, until in ranges:
            partitions = self._topics.setdefault(where.topic, {}).setdefault(where.incarnation, {})
            known_start, known_until = partitions.get(where.partition, (start, until))
            partitions[where.partition] = (min(start, known_start), max(until, known_until))

    @classmethod
    def of(cls, manifests: Iterable[Manifest]) -> BatchIncarnations:
        """The incarnations of all inputs of these batches."""
        return cls(
            (recorded.partition, recorded.from_offset, recorded.until_offset)
            for manifest in manifests
            for input_id in sorted({*manifest.inputs, *manifest.built})
            for recorded in manifest.ranges(input_id)
        )

    @property
    def numbers(self) -> list[int]:
        """All incarnations that occur in any topic, ascending."""
        return sorted({number for incarnations in self._topics.values() for number in incarnations})

    @property
    def ambiguous(self) -> list[str]:
        """The topics in which one offset may belong to records of several incarnations."""
        return sorted(topic for topic, incarnations in self._topics.items() if _overlap(incarnations))

    def expression(self) -> str:
        """A Spark SQL expression that gives the incarnation for topic, partition and offset.

        It gives null for records that are not in the batch, and is not valid for ``ambiguous`` topics.
        """
        names: dict[int, list[str]] = {}
        cases = []
        for topic, incarnations in sorted(self._topics.items()):
            if len(incarnations) == 1:
                names.setdefault(next(iter(incarnations)), []).append(topic)
                continue
            cases += [
                f"WHEN topic = {_text(topic)} AND partition = {partition} AND offset >= {start} AND offset < {until} "
                f"THEN {number}"
                for number, partitions in sorted(incarnations.items())
                for partition, (start, until) in sorted(partitions.items())
            ]
        cases += [f"WHEN topic IN ({', '.join(map(_text, topics))}) THEN {number}" for number, topics in names.items()]
        return f"CASE {' '.join(cases)} END" if cases else "CAST(NULL AS INT)"


def incarnation_column(schema: StructType) -> str | None:
    """The column that has the record's incarnation, if the rows have it: a transform's own ``incarnation`` is none."""
    from headrace.spark.records.record_columns import own_columns

    if FOUND_INCARNATION in schema.names:
        return FOUND_INCARNATION
    return columns.INCARNATION if columns.INCARNATION in own_columns(schema) else None


def lacks_incarnation(schema: StructType) -> bool:
    """Whether rows with these columns have coordinates but no incarnation."""
    return incarnation_column(schema) is None and all(name in schema.names for name in columns.COORDINATES)


def _overlap(incarnations: dict[int, dict[int, tuple[int, int]]]) -> bool:
    by_partition: dict[int, list[tuple[int, int]]] = {}
    for partitions in incarnations.values():
        for partition, offsets in partitions.items():
            by_partition.setdefault(partition, []).append(offsets)
    return any(
        earlier[1] > later[0] for offsets in by_partition.values() for earlier, later in pairwise(sorted(offsets))
    )


def _text(topic: str) -> str:
    return "'" + topic.replace("\\", "\\\\").replace("'", "\\'") + "'"


@dataclass(frozen=True, slots=True)
class PreviewedDocument:
    """What a row would become.

    ``id``, ``version`` and ``index`` are those that would be sent; ``document`` is the JSON text, None if the document
    with this id would be deleted. ``rejected``: the row would be a dead letter for this reason, and has no id.
    Elasticsearch may still refuse a document, for example for its mapping. ``record`` is the row's topic, partition and
    offset, if it has them.
    """

    id: str | None
    version: int | None
    document: str | None
    rejected: Reason | None
    record: tuple[str, int, int] | None
    index: str | None = None


def preview_documents(
    frame: DataFrame,
    output: ElasticsearchOutput,
    *,
    stream_name: str,
    batch_time_ms: int,
    incarnations: BatchIncarnations | None = None,
) -> list[PreviewedDocument]:
    """The documents of the frame's rows, in the order of the rows, by the code that a batch uses.

    All rows are collected in this process. Ignored tombstones give none.

    Raises:
        UnsuitableRowsError: the rows do not have the columns that the output's ids need, or it is not clear what the
            document is.
    """
    options = IndexingOptions.of(output, Target.of(output, stream_name), batch_time_ms=batch_time_ms)
    prepared = prepare_documents(frame, output, incarnations=incarnations)
    options.check_columns(prepared.columns)
    rows = prepared.toArrow().combine_chunks()
    return [document for batch in rows.to_batches() for document in _documents(batch, options)]


def _documents(batch: pa.RecordBatch, options: IndexingOptions) -> Iterator[PreviewedDocument]:
    preparation = prepare_rows(batch, options)
    prepared = preparation.prepared
    lines = {} if prepared is None else {prepared.row(line): line for line in range(len(prepared))}
    for row in range(batch.num_rows):
        record = _record(batch, row)
        if row in preparation.rejected:
            yield PreviewedDocument(None, None, None, preparation.rejected[row], record)
        elif prepared is not None and row in lines:
            line = lines[row]
            document = prepared.document(line)
            text = None if document is None else document.decode()
            index = prepared.target(line).name
            yield PreviewedDocument(prepared.id(line), prepared.version(line), text, None, record, index)


def _record(batch: pa.RecordBatch, row: int) -> tuple[str, int, int] | None:
    if any(name not in batch.schema.names for name in columns.COORDINATES):
        return None
    topic, partition, offset = (batch.column(name)[row].as_py() for name in columns.COORDINATES)
    return None if topic is None or partition is None or offset is None else (topic, partition, offset)
