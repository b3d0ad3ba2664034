"""Makes of any DataFrame the rows that the Elasticsearch sink accepts: their columns are the document and its id.

The columns are built by Spark's own expressions (``to_json`` in the JVM). They are SQL text, which works the same in
classic sessions and over Spark Connect.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.types import ArrayType, BinaryType, DataType, MapType, StringType, StructType

from headrace.elasticsearch import columns
from headrace.elasticsearch.errors import UnsuitableRowsError
from headrace.elasticsearch.options import VERSION, id_column, id_sources
from headrace.spark.incarnations import lacks_incarnation, needs_incarnation
from headrace.stream.outputs import ColumnIds, ElasticsearchOutput, KeyIds

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from headrace.spark.incarnations import BatchIncarnations

_BESIDE = (columns.ORIGINAL_KEY, columns.ORIGINAL_VALUE, columns.ORIGINAL_HEADERS, columns.REJECTED_BECAUSE)


def prepare_documents(
    df: DataFrame, output: ElasticsearchOutput, *, incarnations: BatchIncarnations | None = None
) -> DataFrame:
    """The rows of ``df`` in the shape of ``headrace.elasticsearch.columns``.

    - Rows with only the columns of the log are untransformed records: ``value``, bytes or text, is the document; a
      decoded ``value`` (a struct or map) is written as JSON.
    - Rows with ``topic``, ``partition`` and ``offset`` are records that a transform changed. These columns, the
      incarnation, a binary ``key``, the headers, ``original_…`` and ``rejected_because`` are not part of the document;
      all other columns are.
    - All other rows, for example of an aggregate, are documents with all their columns.

    Any of the columns may be used for ids and versions. ``incarnations`` are those of the batch, for rows without the
    column incarnation.

    Raises:
        UnsuitableRowsError: a column that the ids need is missing, or it is not clear what the document is.
    """
    types: dict[str, DataType] = {field.name: field.dataType for field in df.schema.fields}
    _check_named_columns(types, output)
    beside = [*_id_expressions(output), *_record_expressions(types, output)]
    if incarnations is not None and lacks_incarnation(types):
        beside.append(f"CAST({_incarnation(incarnations, output)} AS INT) AS {columns.INCARNATION}")
    return df.selectExpr(*beside, _document_expression(types, output))


def _named_columns(output: ElasticsearchOutput) -> list[str]:
    ids = output.document_ids
    if isinstance(ids, ColumnIds):
        return list(ids.columns)
    if isinstance(ids, KeyIds):
        return [columns.KEY] + ([ids.version_from] if ids.version_from else list(columns.COORDINATES))
    return [*columns.COORDINATES, *ids.rows]


def _incarnation(incarnations: BatchIncarnations, output: ElasticsearchOutput) -> str:
    if not needs_incarnation(output):
        return f"COALESCE({incarnations.expression()}, 1)"
    ambiguous = incarnations.ambiguous
    if ambiguous:
        raise UnsuitableRowsError(
            f"The rows for output {output.id!r} have no column 'incarnation', and the batch has records of several "
            f"topics named {', '.join(map(repr, ambiguous))} with the same offsets: one that was created again, or "
            "topics of two clusters. Their documents would have the same ids.",
            remedy="Let the transform keep the column incarnation beside topic, partition and offset.",
        )
    return incarnations.expression()


def _check_named_columns(types: dict[str, DataType], output: ElasticsearchOutput) -> None:
    missing = [name for name in _named_columns(output) if name not in types]
    if missing:
        raise UnsuitableRowsError(
            f"The rows for output {output.id!r} have no column {', '.join(map(repr, missing))}, of which its document "
            f"ids are made; they have {', '.join(map(repr, types))}.",
            remedy="Let the transform keep these columns, or choose other document_ids.",
        )


def _id_expressions(output: ElasticsearchOutput) -> list[str]:
    ids = output.document_ids
    named = id_sources(output)
    if named:
        return [f"{_quoted(name)} AS {id_column(number)}" for number, name in enumerate(named)]
    if isinstance(ids, KeyIds) and ids.version_from:
        return [f"{_quoted(ids.version_from)} AS {VERSION}"]
    return []


def _record_expressions(types: dict[str, DataType], output: ElasticsearchOutput) -> list[str]:
    """The expressions of the record's columns that are passed along with the document."""
    wanted = {columns.KEY} if isinstance(output.document_ids, KeyIds) else set()
    if _is_record(types):
        wanted |= {*columns.COORDINATES, columns.INCARNATION, *_BESIDE}
        wanted |= {columns.KEY, columns.HEADERS, columns.TIMESTAMP} if _is_untouched(types, output) else set()
    casts = {columns.PARTITION: "CAST({} AS INT)", columns.OFFSET: "CAST({} AS BIGINT)"}
    needed = needs_incarnation(output)
    casts[columns.INCARNATION] = "CAST({} AS INT)" if needed else "COALESCE(CAST({} AS INT), 1)"
    return [
        f"{casts[name].format(_quoted(name))} AS {_quoted(name)}" if name in casts else _quoted(name)
        for name in types
        if name in wanted
    ]


def _document_expression(types: dict[str, DataType], output: ElasticsearchOutput) -> str:
    value = types.get(columns.VALUE)
    if _is_untouched(types, output):
        if isinstance(value, BinaryType | StringType):
            return columns.VALUE
        if isinstance(value, StructType | MapType):
            return f"to_json({columns.VALUE}) AS {columns.DOCUMENT}"
    elif _is_record(types) and isinstance(value, BinaryType):
        raise UnsuitableRowsError(
            f"The rows for output {output.id!r} have the record's binary 'value' and columns beside it, so it is not "
            "clear what the document is.",
            remedy="Let the transform select what the document holds, or drop the other columns.",
        )
    fields = [name for name, kind in types.items() if not (_is_record(types) and _is_the_records(name, kind))]
    if not fields:
        raise UnsuitableRowsError(f"The rows for output {output.id!r} have no column for a document.")
    return f"to_json(struct({', '.join(map(_quoted, fields))})) AS {columns.DOCUMENT}"


def _is_record(types: dict[str, DataType]) -> bool:
    return all(name in types for name in columns.COORDINATES)


def _is_untouched(types: dict[str, DataType], output: ElasticsearchOutput) -> bool:
    """Whether there are only the log's columns, those that ids and versions need, and ``rejected_because``."""
    allowed = columns.RECORD_COLUMNS.union(_named_columns(output), [columns.REJECTED_BECAUSE])
    return _is_record(types) and columns.VALUE in types and all(name in allowed for name in types)


def _is_the_records(name: str, kind: DataType) -> bool:
    """Whether a column of a record's row belongs to the record and not to the document."""
    if name in (*columns.COORDINATES, columns.INCARNATION, "timestampType", *_BESIDE):
        return True
    return (name == columns.KEY and isinstance(kind, BinaryType)) or (
        name == columns.HEADERS and isinstance(kind, ArrayType)
    )


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"
