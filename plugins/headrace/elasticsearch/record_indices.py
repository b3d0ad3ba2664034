"""The index of each row, where the definition's name has placeholders: filled in for a whole Arrow batch at a time.

A row without a name that is legal is a dead letter: nothing is put in lower case or replaced, since rows whose names
differ would then meet in one index.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.elasticsearch import columns
from headrace.elasticsearch.errors import UnsuitableRowsError
from headrace.elasticsearch.options import IndexingOptions, TombstonePolicy
from headrace.elasticsearch.verdicts import Reason
from headrace.formats.index_names import DIRECTIVES, IndexNames, Placeholder, Template, begins_with_dot, illegal_name

MISSING_INDEX = "missing_index"
ILLEGAL_INDEX = "illegal_index"

_TOPIC = Placeholder("topic")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MINUTE = {"s": 60, "ms": 60_000, "us": 60_000_000, "ns": 60_000_000_000}
_CHARACTERS_SHOWN = 200


@dataclass(frozen=True, slots=True)
class RowNames:
    """The names that the rows have, and the number of each row's in them (int64 array); -1: it has none.

    ``rejected`` are rows without a name because a part is missing, or the name is not legal.
    """

    names: list[str]
    codes: Any
    rejected: dict[int, Reason]


def row_names(batch: pa.RecordBatch, options: IndexingOptions) -> RowNames:
    """The names of the indices of these rows (columns as in ``columns``).

    Rows that a decoder or the transform has rejected have none: they may not have the columns either. Nor have records
    without a value that are ignored: nothing goes there.

    Raises UnsuitableRowsError if a column is missing, or is of a type that makes no text or time.
    """
    names = options.names or IndexNames(options.target.name, (options.target.name,))
    codes = np.full(batch.num_rows, -1, np.int64)
    rows = _written(batch, options)
    if not len(rows):
        return RowNames([], codes, {})
    taken = batch if len(rows) == batch.num_rows else batch.take(pa.array(rows))
    values = {placeholder: _Values.of(taken, number, names) for number, placeholder in enumerate(names.placeholders)}
    found = _filled(values, names, taken.num_rows)
    encoded = found.dictionary_encode()
    distinct = encoded.dictionary.to_pylist()
    problems = {code: why for code, name in enumerate(distinct) if (why := _problem(name, options)) is not None}
    hidden = [code for code, name in enumerate(distinct) if name.startswith(".") and code not in problems]
    of_rows = pc.fill_null(encoded.indices, -1).to_numpy(zero_copy_only=False).astype(np.int64)
    rejected: dict[int, Reason] = {}
    refused = np.isin(of_rows, list(problems))
    if hidden:
        refused |= np.isin(of_rows, hidden) & ~_begins_with_dot(values, names, taken.num_rows)
        problems |= {code: f"{distinct[code]!r} begins with a dot, as the indices of the server do" for code in hidden}
    for row in np.flatnonzero((of_rows < 0) | refused).tolist():
        code = int(of_rows[row])
        reason = _missing(values, names, row) if code < 0 else Reason(ILLEGAL_INDEX, problems[code])
        rejected[int(rows[row])] = reason
        of_rows[row] = -1
    codes[rows] = of_rows
    return RowNames(distinct, codes, rejected)


def _written(batch: pa.RecordBatch, options: IndexingOptions) -> Any:
    """The numbers of the rows that are to be written."""
    written = np.ones(batch.num_rows, bool)
    if columns.REJECTED_BECAUSE in batch.schema.names:
        written &= batch.column(columns.REJECTED_BECAUSE).is_null().to_numpy(zero_copy_only=False)
    document = columns.document_column(batch.schema.names)
    # Spark's rows have no documents while their names are read: it has left these records out.
    if options.tombstones is TombstonePolicy.IGNORE and document in batch.schema.names:
        written &= batch.column(document).is_valid().to_numpy(zero_copy_only=False)
    return np.flatnonzero(written)


def _problem(name: str, options: IndexingOptions) -> str | None:
    shown = repr(name if len(name) <= _CHARACTERS_SHOWN else f"{name[:_CHARACTERS_SHOWN]}…")
    if (why := illegal_name(name)) is not None:
        return f"{shown} is no name for an index: {why}"
    if name in options.letters_names:
        return f"{shown} is the index of dead letters"
    return None


def _begins_with_dot(values: dict[Placeholder, _Values], names: IndexNames, number: int) -> Any:
    """Whether the definition's name for each row begins with a dot (bool array)."""
    if names.template:
        return np.full(number, begins_with_dot(names.template))
    topics = [topic for topic, template in names.by_topic if begins_with_dot(template)]
    return pc.is_in(values[_TOPIC].texts, pa.array(topics, pa.large_string())).to_numpy(zero_copy_only=False)


def _filled(values: dict[Placeholder, _Values], names: IndexNames, number: int) -> Any:
    """The name of each row (large_string); null where a part is missing or empty."""
    texts = {placeholder: each.texts for placeholder, each in values.items()}
    if names.template:
        return _joined(names.template, texts, number)
    topics = texts[_TOPIC].dictionary_encode()
    codes = pc.fill_null(topics.indices, -1).to_numpy(zero_copy_only=False)
    by_topic, found = dict(names.by_topic), [pa.nulls(0, pa.large_string())]
    places, end = np.full(number, -1, np.int64), 0
    # A mapping may have many topics, and the rows few of them.
    for code, topic in enumerate(topics.dictionary.to_pylist()):
        if (template := by_topic.get(topic)) is not None:
            rows = np.flatnonzero(codes == code)
            taken = {part: texts[part].take(pa.array(rows)) for part in template if isinstance(part, Placeholder)}
            found.append(_joined(template, taken, len(rows)))
            places[rows] = np.arange(end, end := end + len(rows))
    return pa.concat_arrays(found).take(pa.array(places, mask=places < 0))


def _joined(template: Template, texts: dict[Placeholder, Any], number: int) -> Any:
    parts = [pa.scalar(part, pa.large_string()) if isinstance(part, str) else texts[part] for part in template]
    if not any(isinstance(part, Placeholder) for part in template):
        return pa.repeat(parts[0], number)
    return pc.binary_join_element_wise(*parts, pa.scalar("", pa.large_string()))


def _missing(values: dict[Placeholder, _Values], names: IndexNames, row: int) -> Reason:
    """Why the row has no name."""
    template: Template | None = names.template
    if not template:
        topic = values[_TOPIC].texts[row].as_py()
        template = (_TOPIC,) if topic is None else names.template_of(topic)
        if template is None:
            return Reason(MISSING_INDEX, f"the output names no index for topic {topic!r}")
    part = next(part for part in template if isinstance(part, Placeholder) and not values[part].texts[row].is_valid)
    return Reason(MISSING_INDEX, f"{part} is {values[part].problems.get(row, 'null or empty')}")


@dataclass(frozen=True, slots=True)
class _Values:
    """What the rows have for a placeholder: its text (large_string), null if it is missing or empty. ``problems`` says
    of some rows why."""

    texts: Any
    problems: dict[int, str]

    @classmethod
    def of(cls, batch: pa.RecordBatch, number: int, names: IndexNames) -> _Values:
        placeholder, problems = names.placeholders[number], dict[int, str]()
        column = _column(batch, number, placeholder)
        texts = (
            _times(column, placeholder, ZoneInfo(names.zone), problems)
            if placeholder.time_format
            else _texts(column, placeholder, problems)
        )
        return cls(pc.if_else(pc.equal(pc.binary_length(texts), 0), None, texts), problems)


def _column(batch: pa.RecordBatch, number: int, placeholder: Placeholder) -> Any:
    """The column of a placeholder: prepared under its number, or as records have it."""
    prepared = columns.index_column(number)
    name = prepared if prepared in batch.schema.names else placeholder.column
    if name not in batch.schema.names:
        raise UnsuitableRowsError(
            f"The rows have no column {placeholder.column!r}, of which {placeholder} of the index is made; they have "
            f"{', '.join(map(repr, batch.schema.names))}.",
            remedy="Let the transform keep this column, or name another index.",
        )
    column = batch.column(name)
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    return _header(column, placeholder.header) if placeholder.header and name != prepared else column


def _header(headers: Any, name: str) -> Any:
    """The value of the record's last header of this name; null if there is none."""
    flat = headers.flatten()
    parents = pc.list_parent_indices(headers).to_numpy(zero_copy_only=False)
    found = np.flatnonzero(pc.fill_null(pc.equal(flat.field("key"), name), False).to_numpy(zero_copy_only=False))
    last = np.full(len(headers), -1, np.int64)
    last[parents[found]] = found
    return flat.field("value").take(pa.array(last, mask=last < 0))


def _texts(column: Any, placeholder: Placeholder, problems: dict[int, str]) -> Any:
    kind = column.type
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return _decoded(column, problems)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_integer(kind):
        return pc.cast(column, pa.large_string())
    raise UnsuitableRowsError(
        f"The column of {placeholder} of the index is of type {kind}: a part of a name is a text or a whole number.",
        remedy=f"Give a time a format, such as {{{placeholder.column}:%Y.%m.%d}}, or let the transform make a text.",
    )


def _decoded(column: Any, problems: dict[int, str]) -> Any:
    try:
        return pc.cast(column, pa.large_string())
    except pa.ArrowInvalid:
        texts: list[str | None] = []
        for row, value in enumerate(column.to_pylist()):
            try:
                texts.append(None if value is None else value.decode("utf-8"))
            except UnicodeDecodeError:
                problems[row] = "not UTF-8"
                texts.append(None)
        return pa.array(texts, pa.large_string())


def _times(column: Any, placeholder: Placeholder, zone: ZoneInfo, problems: dict[int, str]) -> Any:
    """The times in the format. A time without a zone, and a day, are taken as they are."""
    if pa.types.is_date32(column.type):
        column = pc.cast(column, pa.timestamp("s"))
    if not pa.types.is_timestamp(column.type):
        raise UnsuitableRowsError(
            f"The column of {placeholder} of the index is of type {column.type}, which is no time.",
            remedy=f"Make a time of it in the transform, or write {{{placeholder.column}}} for a text.",
        )
    if placeholder.column == columns.TIMESTAMP:
        column = _without_unknown(column, problems)
    local = zone if column.type.tz is not None else None
    # Few minutes differ, so few are formatted one by one.
    numbers = pc.fill_null(pc.cast(column, pa.int64()), 0).to_numpy(zero_copy_only=False)
    minutes, codes = np.unique(numbers // _MINUTE[column.type.unit], return_inverse=True)
    texts = pa.array(
        [_time_text(minute, placeholder.time_format, local) for minute in minutes.tolist()], pa.large_string()
    )
    found = texts.take(pa.array(codes.reshape(-1)))
    for row in pc.indices_nonzero(pc.and_(pc.is_null(found), pc.is_valid(column))).to_pylist():
        problems[row] = "a time outside the years 1 to 9999"
    return pc.if_else(pc.is_valid(column), found, None)


def _without_unknown(times: Any, problems: dict[int, str]) -> Any:
    """The times of records, null where it is -1 ms: Kafka's sign for a record without a time."""
    in_ms = pc.cast(pc.cast(times, pa.timestamp("ms", times.type.tz), safe=False), pa.int64())
    unknown = pc.fill_null(pc.equal(in_ms, -1), False)
    problems |= dict.fromkeys(pc.indices_nonzero(unknown).to_pylist(), "not known to Kafka")
    return pc.if_else(unknown, None, times)


def _time_text(minutes: int, time_format: str, zone: ZoneInfo | None) -> str | None:
    try:
        at = _EPOCH + timedelta(minutes=minutes)
        at = at if zone is None else at.astimezone(zone)
    except OverflowError:
        return None
    year, week, _ = at.isocalendar()
    numbers = (at.year, at.month, at.day, at.hour, at.timetuple().tm_yday, year, week)
    for (directive, digits), number in zip(DIRECTIVES.items(), numbers, strict=True):
        time_format = time_format.replace(directive, f"{number:0{digits}d}")
    return time_format


def distinct_names(batches: Iterable[pa.RecordBatch], options: IndexingOptions, most: int) -> list[str]:
    """The names of all rows, each once, but no more than ``most``. All batches are taken, as Spark wants."""
    seen: dict[str, None] = {}
    for batch in batches:
        if len(seen) < most:
            found = row_names(batch, options)
            seen.update(dict.fromkeys(found.names[code] for code in np.unique(found.codes[found.codes >= 0]).tolist()))
    return list(seen)[:most]
