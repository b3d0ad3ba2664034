"""Builds bulk bodies: a batch of rows becomes one buffer of NDJSON bytes, and each request's body is a slice of it.

Arrow joins ids, action lines and documents; Python handles single rows only in exceptional cases. The joined column's
data is one buffer, so a request's body is a range of that buffer.

Documents are converted to single lines, and checked without parsing them. Newlines separate the lines of a bulk body,
and Elasticsearch checks each line on its own: an error within a line becomes that item's 400. So only this is looked
for: what would break the separation into lines; what does not begin like an object; and what Elasticsearch accepts but
should not. It guesses UTF-16 and accepts a byte order mark and lone surrogates; it then copies the bytes unchanged into
every search answer with the document, which is not valid JSON then.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.elasticsearch import columns
from headrace.elasticsearch.document_ids import MISSING_VERSION, Identities, identify
from headrace.elasticsearch.options import (
    IndexingOptions,
    TombstonePolicy,
    TruncatePolicy,
    VersionSource,
    WriteMethod,
)
from headrace.elasticsearch.target import RowTargets, Target
from headrace.elasticsearch.verdicts import Reason
from headrace.formats.change_events import DELETED, ROW_OPERATIONS, TRUNCATED

TOMBSTONE = "tombstone"
TRUNCATE = "truncate"
REJECTED_BEFORE = "rejected"

# Characters that JSON requires to be escaped within a string.
_TO_ESCAPE = r'["\\\x00-\x1f]'


class PreparedRows:
    """The lines to send, in order: each is an operation on the document of an id, at its target.

    All that is asked about a document later (conflicts, verdicts, dead letters, previews) is asked of its line here.
    """

    def __init__(
        self, source: pa.RecordBatch, rows: Any, ids: Any, versions: Any | None, lines: Any, *, targets: RowTargets
    ) -> None:
        """``rows`` maps a line's number to its row number in ``source``; ``targets`` are those of the lines."""
        self.source = source
        self._targets = targets
        self._rows = rows
        self._ids = ids
        self._versions = versions
        self._lines = lines
        data, self.offsets = line_offsets(lines)
        self._view = memoryview(data)

    def __len__(self) -> int:
        return len(self._lines)

    def row(self, line: int) -> int:
        """The number of the row in ``source`` from which this line was made."""
        return int(self._rows[line])

    def target(self, line: int) -> Target:
        """Where this line's document goes."""
        return self._targets.of(line)

    def deletes(self, line: int) -> bool:
        """Whether this line deletes the document."""
        return self.document(line) is None

    def id(self, line: int) -> str:
        return str(self._ids[line].as_py())

    def ids(self, lines: Any) -> Any:
        """The ids of these lines (large_string)."""
        return self._ids.take(pa.array(lines))

    def describe(self, line: int) -> str:
        """The document of this line, for people: its id, and its record if the rows tell it."""
        named = f"document {self.id(line)!r}"
        if not all(name in self.source.schema.names for name in columns.COORDINATES):
            return named
        topic, partition, offset = (self.source.column(name)[self.row(line)] for name in columns.COORDINATES)
        return f"{named} ({topic}, partition {partition}, offset {offset})"

    def version(self, line: int) -> int | None:
        """The external version sent with this line, if it has one."""
        return None if self._versions is None else int(self._versions[line].as_py())

    def version_place(self, line: int, options: IndexingOptions) -> str | None:
        """What this line's version counts: the offsets of its ``topic-partition``, or batch times (""). None: something
        of the user's."""
        if options.version is VersionSource.BATCH_TIME:
            return ""
        if options.version is VersionSource.COLUMN or columns.PARTITION not in self.source.schema.names:
            return None
        return f"{self._topic}-{self._partitions[self.row(line)]}"

    @cached_property
    def _topic(self) -> str:
        """The topic: offsets of several topics are no versions."""
        return str(self.source.column(columns.TOPIC)[0].as_py())

    @cached_property
    def _partitions(self) -> Any:
        return pc.fill_null(self.source.column(columns.PARTITION), -1).to_numpy(zero_copy_only=False)

    def length(self, line: int) -> int:
        """The size in bytes of this line in a body."""
        return int(self.offsets[line + 1] - self.offsets[line])

    def fitting(self, lines: Any, most_bytes: float) -> Any:
        """The first of these lines whose body has at most so many bytes; the first one in any case."""
        sizes = np.cumsum(self.offsets[lines + 1] - self.offsets[lines])
        return lines[: max(1, int(np.searchsorted(sizes, most_bytes, side="right")))]

    def size(self, lines: Any) -> int:
        """The size in bytes of the body of these lines."""
        return int((self.offsets[lines + 1] - self.offsets[lines]).sum())

    def document(self, line: int) -> bytes | None:
        """The document in this line; None if the line deletes a document."""
        _, _, document = bytes(self._view[self.offsets[line] : self.offsets[line + 1]]).partition(b"\n")
        return document[:-1] or None

    def body(self, lines: Any) -> bytes:
        """The NDJSON of these lines (ascending numbers)."""
        first, last = int(lines[0]), int(lines[-1])
        if last - first + 1 == len(lines):
            return bytes(self._view[self.offsets[first] : self.offsets[last + 1]])
        return b"".join(self._view[self.offsets[line] : self.offsets[line + 1]] for line in lines.tolist())

    def requests(self, options: IndexingOptions) -> Iterator[Any]:
        """Yield the line numbers of each request: of one target, at most ``bulk_actions`` lines and ``bulk_bytes``
        bytes.

        A single line that is larger than ``bulk_bytes`` is a request of its own.
        """
        sizes = np.diff(self.offsets)
        for group in self._targets.groups(len(self)):
            ends = np.concatenate((np.zeros(1, np.int64), np.cumsum(sizes[group])))
            first = 0
            while first < len(group):
                fitting = int(np.searchsorted(ends, ends[first] + options.bulk_bytes, side="right")) - 1
                last = max(min(fitting, first + options.bulk_actions, len(group)), first + 1)
                yield group[first:last]
                first = last


@dataclass(frozen=True, slots=True)
class Preparation:
    """A batch's rows, sorted into lines to send, dead letters, and what is ignored."""

    prepared: PreparedRows | None
    rejected: dict[int, Reason]
    """Rows of the batch that are dead letters."""
    ignored_tombstones: int = 0
    ignored_events: int = 0
    """Change events that change no row, or truncate a table, which is ignored."""
    truncates: tuple[int, ...] = ()
    """The versions below which truncates that are to be applied leave no document."""
    superseded: int = 0
    """Rows that are older than a truncate of an earlier batch."""


def created_answer(verb: bytes, index: str, ids: Any) -> bytes:
    """Elasticsearch's answer to a request that has created documents of these ids in the index."""
    opening = b'{"%b":{"_index":"%b","_id":"' % (verb, index.encode())
    data, offsets = line_offsets(
        _joined(opening, pc.cast(ids, pa.large_binary()), b'","result":"created","status":201}},')
    )
    return b'{"items":[%b]}' % data[offsets[0] : offsets[-1] - 1].tobytes()


def prepare_rows(
    batch: pa.RecordBatch, options: IndexingOptions, *, identities: Identities | None = None
) -> Preparation:
    """Sort a batch's rows into lines to send, dead letters and ignored tombstones.

    ``identities``: where the rows' documents go, if it is known; by default it is computed from the rows.
    """
    identities = identities or identify(batch, options)
    documents = as_lines(batch.column(columns.document_column(batch.schema.names)))
    tombstones = pc.is_null(documents.lines) if documents.lines.null_count else None
    rejected = identities.rejected | documents.rejected
    events = _events_without_rows(batch, identities, options, tombstones, rejected)
    ignored: list[int] = events.unversioned
    if tombstones is not None and options.tombstones is not TombstonePolicy.DELETE:
        rows = pc.indices_nonzero(tombstones).to_pylist()
        if options.tombstones is TombstonePolicy.IGNORE:
            ignored = [row for row in rows if row not in {*events.ignored, *events.truncates, *events.letters}]
            rejected = {
                row: reason for row, reason in rejected.items() if row in events.letters or not tombstones[row].as_py()
            }
        else:
            rejected |= {row: Reason(TOMBSTONE, "the value is null") for row in rows if row not in events.rows}
        tombstones = None
    before = rejected_before(batch)
    rejected |= before
    ignored = [row for row in ignored if row not in before]
    # What a transform has rejected is a dead letter, and nothing else.
    events.ignored = [row for row in events.ignored if row not in before]
    events.truncates = {row: version for row, version in events.truncates.items() if row not in before}
    dropped = {*rejected, *ignored, *events.ignored, *events.truncates}
    truncated = set(_rows_below(identities.versions, options.truncated_below)) - dropped
    kept = _kept(batch.num_rows, [*dropped, *truncated])
    sorted_out = Preparation(
        None, rejected, len(ignored), len(events.ignored), tuple(events.truncates.values()), len(truncated)
    )
    if not len(kept):
        return sorted_out
    prepared = _lines(batch, identities, documents, options, tombstones=tombstones, kept=kept)
    return replace(sorted_out, prepared=prepared)


def _rows_below(versions: Any | None, least: int) -> list[int]:
    if versions is None or not least:
        return []
    rows: list[int] = pc.indices_nonzero(pc.less(versions, least)).to_pylist()
    return rows


@dataclass(slots=True)
class _EventsWithoutRows:
    """Rows that are change events of no row of a table, by number: those that are ignored, the versions of truncates
    that are to be applied, tombstones without a version behind an event that says the same, and truncates that are dead
    letters whatever becomes of tombstones."""

    ignored: list[int] = field(default_factory=list)
    truncates: dict[int, int] = field(default_factory=dict)
    unversioned: list[int] = field(default_factory=list)
    letters: dict[int, Reason] = field(default_factory=dict)

    @property
    def rows(self) -> set[int]:
        return {*self.ignored, *self.truncates, *self.unversioned, *self.letters}


def _events_without_rows(
    batch: pa.RecordBatch,
    identities: Identities,
    options: IndexingOptions,
    tombstones: Any | None,
    rejected: dict[int, Reason],
) -> _EventsWithoutRows:
    """Sort out change events of no row. Those that are dead letters are added to ``rejected``, the others removed."""
    events = _EventsWithoutRows()
    if tombstones is None or columns.OPERATION not in batch.schema.names:
        return events
    operations = batch.column(columns.OPERATION)
    # A document is written or deleted by whichever of these operations it has.
    of_rows = pc.is_in(operations, pa.array([*sorted(ROW_OPERATIONS), DELETED], operations.type))
    for row in pc.indices_nonzero(pc.and_(tombstones, pc.invert(of_rows))).to_pylist():
        operation = operations[row].as_py()
        version = None if identities.versions is None else identities.versions[row].as_py()
        if operation is None:
            if options.version is VersionSource.COLUMN and version is None:
                events.unversioned.append(row)
        elif operation != TRUNCATED or options.truncates is TruncatePolicy.IGNORE:
            events.ignored.append(row)
        elif options.truncates is TruncatePolicy.DEAD_LETTER:
            events.letters[row] = Reason(TRUNCATE, "the table was truncated, and the output does not apply it")
        elif version is None:
            events.letters[row] = Reason(MISSING_VERSION, "the table was truncated at no known position")
        else:
            events.truncates[row] = version
    for row in events.rows:
        rejected.pop(row, None)
    rejected |= events.letters
    return events


def rejected_before(batch: pa.RecordBatch) -> dict[int, Reason]:
    """The rows that a decoder or the transform marked as dead letters, by row number."""
    if columns.REJECTED_BECAUSE not in batch.schema.names:
        return {}
    reasons = batch.column(columns.REJECTED_BECAUSE)
    return {
        row: Reason(REJECTED_BEFORE, str(reasons[row].as_py()))
        for row in pc.indices_nonzero(pc.is_valid(reasons)).to_pylist()
    }


def _kept(number: int, dropped: list[int]) -> Any:
    keep = np.ones(number, bool)
    keep[dropped] = False
    return np.flatnonzero(keep)


def _lines(
    batch: pa.RecordBatch,
    identities: Identities,
    documents: Documents,
    options: IndexingOptions,
    *,
    tombstones: Any | None,
    kept: Any,
) -> PreparedRows:
    ids, versions, lines = identities.ids, identities.versions, documents.lines
    if len(kept) < batch.num_rows:
        taken = pa.array(kept)
        ids, lines = ids.take(taken), lines.take(taken)
        versions = None if versions is None else versions.take(taken)
        tombstones = None if tombstones is None else tombstones.take(taken)
    quoted = pc.cast(_escaped(ids), pa.large_binary())
    verb = "create" if options.write_method is WriteMethod.CREATE and versions is None else "index"
    written = _joined(_opening(verb), quoted, *_closing(versions, options), lines, b"\n")
    if tombstones is not None:
        deleted = _joined(_opening("delete"), quoted, *_closing(versions, options))
        written = pc.if_else(tombstones, deleted, written)
    return PreparedRows(batch, kept, ids, versions, written, targets=identities.targets.taken(kept))


def _escaped(ids: Any) -> Any:
    if not pc.any(pc.match_substring_regex(ids, _TO_ESCAPE)).as_py():
        return ids
    return pa.array((json.dumps(text, ensure_ascii=False)[1:-1] for text in ids.to_pylist()), pa.large_string())


def _opening(verb: str) -> bytes:
    return f'{{"{verb}":{{"_id":"'.encode()


def _closing(versions: Any | None, options: IndexingOptions) -> list[Any]:
    if versions is None:
        return [b'"}}\n']
    # external: only a newer version is written. external_gte: the same version is also written again, as
    # write_method=index requires.
    kind = b"external" if options.write_method is WriteMethod.CREATE else b"external_gte"
    numbers = pc.cast(pc.cast(versions, pa.large_string()), pa.large_binary())
    return [b'","version":', numbers, b',"version_type":"' + kind + b'"}}\n']


def _joined(*parts: Any) -> Any:
    scalars = [pa.scalar(part, pa.large_binary()) if isinstance(part, bytes) else part for part in parts]
    return pc.binary_join_element_wise(*scalars, pa.scalar(b"", pa.large_binary()))


MALFORMED = "malformed_document"

_OPENING_BRACE, _FIRST_PRINTABLE = b"{"[0], b" "[0]
_JSON_WHITESPACE = b" \t\r\n"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_ONE_LINE = bytes.maketrans(b"\r\n", b"  ")
_NOT_IN_A_LINE = b"\r\n\x00"


@dataclass(frozen=True, slots=True)
class Documents:
    """One line per row, without line breaks (large_binary, null for tombstones); ``rejected`` rows are not sent."""

    lines: Any
    rejected: dict[int, Reason]


def as_lines(column: Any) -> Documents:
    """Convert a column of strings or bytes to lines, and find its malformed documents."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    lines = column if column.type == pa.large_binary() else pc.cast(column, pa.large_binary())
    if len(lines) == lines.null_count:
        return Documents(lines, {})
    rejected = _not_utf8(lines)
    repaired: dict[int, bytes] = {}
    for row in sorted({*_rows_not_begun_as_objects(lines), *_rows_with_controls(lines)} - rejected.keys()):
        document = lines[row].as_py()
        try:
            line = _one_line(document)
        except _MalformedError as error:
            rejected[row] = Reason(MALFORMED, str(error))
            continue
        if line != document:
            repaired[row] = line
    return Documents(_replaced(lines, repaired), rejected)


def line_offsets(lines: Any) -> tuple[Any, Any]:
    """A large_binary array's data as (uint8 array, offsets as int64 array of n + 1), without copying."""
    _, offsets, data = lines.buffers()
    positions = np.frombuffer(offsets, np.int64)[lines.offset : lines.offset + len(lines) + 1]
    return (np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)), positions


class _MalformedError(Exception):
    """The document cannot be indexed; the text gives the reason."""


def _not_utf8(lines: Any) -> dict[int, Reason]:
    try:
        # Arrow checks the bytes without copying them.
        pc.cast(lines, pa.large_string())
    except pa.ArrowInvalid:
        rejected = {}
        for row, document in enumerate(lines.to_pylist()):
            try:
                (document or b"").decode("utf-8")
            except UnicodeDecodeError as error:
                rejected[row] = Reason(MALFORMED, f"the document is not UTF-8: {error.reason} at byte {error.start}")
        return rejected
    return {}


def _rows_not_begun_as_objects(lines: Any) -> list[int]:
    """The rows that are not null and do not begin with "{"."""
    data, offsets = line_offsets(lines)
    starts, lengths = offsets[:-1], np.diff(offsets)
    first = np.zeros(len(lines), np.uint8)
    first[lengths > 0] = data[starts[lengths > 0]]
    suspects = first != _OPENING_BRACE
    if lines.null_count:
        suspects &= ~np.asarray(pc.is_null(lines).to_numpy(zero_copy_only=False))
    rows: list[int] = np.flatnonzero(suspects).tolist()
    return rows


def _rows_with_controls(lines: Any) -> list[int]:
    """The rows with a line break or a NUL. They are rare, so the whole buffer is checked first."""
    data, offsets = line_offsets(lines)
    if not (data[offsets[0] : offsets[-1]] < _FIRST_PRINTABLE).any():
        return []
    masks = [pc.match_substring(lines, bytes([control])) for control in _NOT_IN_A_LINE]
    mask = pc.fill_null(pc.or_(pc.or_(masks[0], masks[1]), masks[2]), False)
    rows: list[int] = pc.indices_nonzero(mask).to_pylist()
    return rows


def _one_line(document: bytes) -> bytes:
    """The document without byte order mark and raw line breaks, otherwise unchanged; raises _MalformedError.

    The document is not serialised again: that would change numbers and drop repeated names. Valid JSON has raw line
    breaks only between tokens, where a space is equivalent. In a string they are invalid, so a document with line
    breaks is parsed to check it.
    """
    line = document.removeprefix(_BYTE_ORDER_MARK).strip(_JSON_WHITESPACE)
    if not line:
        raise _MalformedError("the document is empty")
    if b"\x00" in line:
        raise _MalformedError("the document has a NUL byte, so it is no JSON in UTF-8")
    if line.startswith(b"{"):
        if b"\n" in line or b"\r" in line:
            _check_json(line, "the document has line breaks and is not JSON")
        return line.translate(_ONE_LINE)
    _check_json(line, "the document is not JSON")
    raise _MalformedError(f"the document is JSON but no object: {line[:50].decode('utf-8', 'replace')}")


def _check_json(line: bytes, otherwise: str) -> None:
    try:
        json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _MalformedError(f"{otherwise}: {error}") from None


def _replaced(lines: Any, repaired: dict[int, bytes]) -> Any:
    if not repaired:
        return lines
    mask = np.zeros(len(lines), bool)
    mask[list(repaired)] = True
    return pc.replace_with_mask(lines, pa.array(mask), pa.array(repaired.values(), pa.large_binary()))
