"""Converts a batch's documents to single lines of NDJSON, and checks them without parsing them.

Newlines separate the lines of a bulk body, and Elasticsearch checks each line on its own: an error within a line
becomes that item's 400. So this module only finds what would break the separation into lines; what does not begin like
an object; and what Elasticsearch accepts but should not. It guesses UTF-16 and accepts a byte order mark and lone
surrogates; it then copies the bytes unchanged into every search answer with the document, which is not valid JSON then.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.elasticsearch.verdicts import Reason

MALFORMED = "malformed_document"

_OPENING_BRACE, _FIRST_PRINTABLE = b"{"[0], b" "[0]
_JSON_WHITESPACE = b" \t\r\n"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_ONE_LINE = bytes.maketrans(b"\r\n", b"  ")
_NEEDS_A_LOOK = b"\r\n\x00"


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
    found: list[int] = np.flatnonzero(suspects).tolist()
    return found


def _rows_with_controls(lines: Any) -> list[int]:
    """The rows with a line break or a NUL. They are rare, so the whole buffer is checked first."""
    data, offsets = line_offsets(lines)
    if not (data[offsets[0] : offsets[-1]] < _FIRST_PRINTABLE).any():
        return []
    masks = [pc.match_substring(lines, bytes([control])) for control in _NEEDS_A_LOOK]
    mask = pc.fill_null(pc.or_(pc.or_(masks[0], masks[1]), masks[2]), False)
    found: list[int] = pc.indices_nonzero(mask).to_pylist()
    return found


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
