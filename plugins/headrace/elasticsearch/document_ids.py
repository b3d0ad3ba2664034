"""Computes document ids and versions for a whole Arrow batch at a time, and checks them as Elasticsearch does.

One id of 513 bytes or one negative version makes Elasticsearch answer 400 to the whole bulk request, so such ids and
versions are never sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from headrace.blocks import TopicPartition
from headrace.elasticsearch import columns
from headrace.elasticsearch.errors import UnsuitableRowsError
from headrace.elasticsearch.options import DocumentIdKind, IndexingOptions, VersionSource
from headrace.elasticsearch.target import RowTargets
from headrace.elasticsearch.verdicts import Reason

MAX_ID_BYTES = 512

MISSING_ID = "missing_id"
ID_TOO_LONG = "id_too_long"
ID_NOT_UTF8 = "id_not_utf8"
MISSING_VERSION = "missing_version"
NEGATIVE_VERSION = "negative_version"


@dataclass(frozen=True, slots=True)
class Identities:
    """Where each row's document goes: its ``targets``, ``ids`` (large_string) and, if documents are versioned,
    ``versions`` (int64).

    ``rejected`` has the rows without a usable index, id or version; the arrays' values of these rows are null or
    invalid.
    """

    ids: Any
    versions: Any | None
    rejected: dict[int, Reason]
    targets: RowTargets


def identify(batch: pa.RecordBatch, options: IndexingOptions) -> Identities:
    """The targets, ids and versions of a batch's rows (columns as in ``columns``).

    Raises UnsuitableRowsError if a column's type, or a null in the record's coordinates, allows no id or version.
    """
    rejected: dict[int, Reason] = {}
    targets = RowTargets(options.target) if options.names is None else _targets(batch, options, rejected)
    if options.document_id is DocumentIdKind.RECORD:
        ids = record_ids(batch)
        if options.id_columns:
            ids = _appended(ids, row_parts(batch, options, rejected))
        _reject_unusable_ids(ids, options, rejected)
        return Identities(ids, None, rejected, targets)
    if options.document_id is DocumentIdKind.KEY:
        if options.version is VersionSource.OFFSET:
            _refuse_restarted_offsets(batch, options)
        ids = _key_text(batch.column(columns.KEY), rejected)
    else:
        ids = _column_values(batch, options, rejected)
    _reject_unusable_ids(ids, options, rejected)
    versions = None if options.version is None else _versions(batch, options, rejected)
    return Identities(ids, versions, rejected, targets)


def _targets(batch: pa.RecordBatch, options: IndexingOptions, rejected: dict[int, Reason]) -> RowTargets:
    # Of an output with one index, a worker needs none of this.
    from headrace.elasticsearch.record_indices import row_names

    found = row_names(batch, options)
    rejected |= found.rejected
    used = set(found.codes.tolist())
    several = (options.target_of(name) if code in used else options.target for code, name in enumerate(found.names))
    return RowTargets(options.target, tuple(several), found.codes)


def record_ids(batch: pa.RecordBatch) -> Any:
    """``topic+partition+offset``, followed by ``+incarnation`` from the second incarnation on (large_string).

    Raises UnsuitableRowsError if a row has no topic, partition, offset or incarnation.
    """
    topic, partition, offset = (batch.column(name) for name in columns.COORDINATES)
    if topic.null_count or partition.null_count or offset.null_count:
        raise UnsuitableRowsError(
            "A row has no topic, partition or offset, of which its document id is made.",
            remedy="Let the transform keep these columns as they are, or choose other document ids.",
        )
    parts = [_cast(part, pa.large_string()) for part in (topic, partition, offset)]
    ids = _joined(*parts)
    incarnation = incarnations(batch)
    if incarnation is None or pc.max(incarnation).as_py() == 1:
        return ids
    with_incarnation = _joined(ids, _cast(incarnation, pa.large_string()))
    return pc.if_else(pc.greater(incarnation, 1), with_incarnation, ids)


def record_id(partition: TopicPartition, offset: int) -> str:
    """The id that `record_ids` gives to one record."""
    values = [[partition.topic], [partition.partition], [offset], [partition.incarnation]]
    names = [*columns.COORDINATES, columns.INCARNATION]
    return str(record_ids(pa.record_batch([pa.array(value) for value in values], names=names))[0])


def row_parts(batch: pa.RecordBatch, options: IndexingOptions, rejected: dict[int, Reason]) -> Any:
    """The part of an id that distinguishes the rows of one record (large_string): ``id_columns``, with "" for null.

    Rows with binary columns that are not UTF-8 are added to ``rejected``.
    """
    return _column_values(batch, options, rejected, null="")


def incarnations(batch: pa.RecordBatch) -> Any | None:
    """The incarnation of each row's topic (int32); None if there is no such column, so all are first incarnations.

    Raises UnsuitableRowsError if a row has a null there.
    """
    index = batch.schema.get_field_index(columns.INCARNATION)
    if index < 0 or not batch.num_rows:
        return None
    column = batch.column(index)
    if column.null_count:
        row = pc.indices_nonzero(pc.is_null(column))[0].as_py()
        where = [batch.column(name)[row].as_py() for name in columns.COORDINATES if name in batch.schema.names]
        raise UnsuitableRowsError(
            f"A row has no 'incarnation', and the batch has no record at its topic, partition and offset {where} that "
            "would say which topic of that name it is.",
            remedy="Let the transform keep the column incarnation, and topic, partition and offset as they are.",
        )
    return _cast(column, pa.int32())


def _refuse_restarted_offsets(batch: pa.RecordBatch, options: IndexingOptions) -> None:
    incarnation = incarnations(batch)
    if incarnation is not None and pc.max(incarnation).as_py() > 1:
        raise UnsuitableRowsError(
            f"A topic of index {options.target.name!r} was deleted and created again, so its offsets started again: as "
            "versions they would let older documents replace newer ones.",
            remedy="Name a column that only grows with version_from, or index into a new index.",
        )


def _appended(ids: Any, parts: Any) -> Any:
    return pc.binary_join_element_wise(ids, parts, pa.scalar("~", pa.large_string()))


def _column_values(
    batch: pa.RecordBatch, options: IndexingOptions, rejected: dict[int, Reason], *, null: str | None = None
) -> Any:
    parts = [_text(batch.column(name), rejected) for name in options.id_columns]
    if null is not None:
        parts = [pc.fill_null(part, null) for part in parts]
    if options.id_batch_time:
        parts.append(pa.array([str(options.batch_time_ms)] * batch.num_rows, pa.large_string()))
    return _joined_values(parts)


def _joined_values(parts: list[Any]) -> Any:
    """One value as it is, several joined by "+"; null if one is."""
    if len(parts) == 1:
        return parts[0]
    # Escaped, so that ("a+b", "c") and ("a", "b+c") have different ids.
    escaped = [pc.replace_substring(pc.replace_substring(part, "%", "%25"), "+", "%2B") for part in parts]
    return _joined(*escaped)


def _key_text(key: Any, rejected: dict[int, Reason]) -> Any:
    """A key as large_string: a decoded one that is a struct as the values of its fields, joined as those of columns."""
    if pa.types.is_struct(key.type) and key.type.num_fields:
        return _joined_values([_text(part, rejected) for part in key.flatten()])
    return _text(key, rejected)


def _text(column: Any, rejected: dict[int, Reason]) -> Any:
    """A column as large_string. Rows with bytes that are not UTF-8 are null and added to ``rejected``."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_nested(column.type):
        raise UnsuitableRowsError(
            f"A column of type {column.type} cannot be a document id.", remedy="Use its fields instead."
        )
    if pa.types.is_timestamp(column.type):
        # In UTC, whatever the session's time zone is: the id must be the same in every run.
        column = _cast(column, pa.timestamp("us"))
    try:
        return _cast(column, pa.large_string())
    except pa.ArrowInvalid:
        texts: list[str | None] = []
        for row, value in enumerate(column.to_pylist()):
            try:
                texts.append(None if value is None else value.decode("utf-8"))
            except UnicodeDecodeError as error:
                rejected[row] = Reason(ID_NOT_UTF8, f"the key or id is no UTF-8: {error}")
                texts.append(None)
        return pa.array(texts, pa.large_string())


def _reject_unusable_ids(ids: Any, options: IndexingOptions, rejected: dict[int, Reason]) -> None:
    lengths = pc.fill_null(pc.binary_length(ids), 0)
    what = "key" if options.document_id is DocumentIdKind.KEY else "id"
    empty = "key, or a field of the decoded one," if what == "key" else what
    for row in _rows_where(pc.equal(lengths, 0)):
        rejected.setdefault(row, Reason(MISSING_ID, f"the {empty} is null or empty"))
    for row in _rows_where(pc.greater(lengths, MAX_ID_BYTES)):
        length = lengths[row].as_py()
        rejected.setdefault(row, Reason(ID_TOO_LONG, f"the {what} has {length} bytes, more than {MAX_ID_BYTES}"))


def _versions(batch: pa.RecordBatch, options: IndexingOptions, rejected: dict[int, Reason]) -> Any:
    if options.version is VersionSource.BATCH_TIME:
        return pa.array([options.batch_time_ms] * batch.num_rows, pa.int64())
    name = columns.OFFSET if options.version is VersionSource.OFFSET else columns.VERSION
    column = batch.column(name)
    if pa.types.is_timestamp(column.type):
        column = _cast(_cast(column, pa.timestamp("us")), pa.int64())
    if not pa.types.is_integer(column.type):
        raise UnsuitableRowsError(
            f"The column {name!r} is of type {column.type} and cannot be a version.",
            remedy="version_from takes a whole number or a timestamp.",
        )
    versions = _cast(column, pa.int64())
    for row in _rows_where(pc.is_null(versions)):
        rejected.setdefault(row, Reason(MISSING_VERSION, f"{name!r} is null"))
    for row in _rows_where(pc.fill_null(pc.less(versions, 0), False)):
        rejected.setdefault(row, Reason(NEGATIVE_VERSION, f"{name!r} is {versions[row].as_py()}; versions begin at 0"))
    return versions


def _rows_where(mask: Any) -> list[int]:
    return [] if not pc.any(mask, min_count=0).as_py() else pc.indices_nonzero(mask).to_pylist()


def _joined(*parts: Any) -> Any:
    return pc.binary_join_element_wise(*parts, pa.scalar("+", pa.large_string()))


def _cast(column: Any, to: Any) -> Any:
    return column if column.type == to else pc.cast(column, to)
