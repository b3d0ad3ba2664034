"""The documents of a batch as bytes that fit a line of NDJSON, checked without parsing them.

A bulk body is framed by newlines, and Elasticsearch judges each line on its own: whatever is wrong within a line is
that item's 400. So what has to be found out here is only what would break the frame, or not even begin like an object.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.indexing.verdicts import Reason

MALFORMED = "malformed_document"

_LINE_FEED, _CARRIAGE_RETURN, _OPENING_BRACE = b"\n"[0], b"\r"[0], b"{"[0]
_JSON_WHITESPACE = b" \t\r\n"
_ONE_LINE = bytes.maketrans(b"\r\n", b"  ")


@dataclass(frozen=True, slots=True)
class Documents:
    """Per row one line without line breaks (large_binary, null for tombstones); ``rejected`` rows are not sent."""

    lines: Any
    rejected: dict[int, Reason]


def as_lines(column: Any) -> Documents:
    """The documents in a column of strings or bytes."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    lines = column if column.type == pa.large_binary() else pc.cast(column, pa.large_binary())
    if len(lines) == lines.null_count:
        return Documents(lines, {})
    rejected = {
        row: Reason(MALFORMED, problem)
        for row in _rows_to_look_at(lines)
        if (problem := _what_is_wrong(lines[row].as_py())) is not None
    }
    return Documents(_without_line_breaks(lines, rejected), rejected)


def line_offsets(lines: Any) -> tuple[Any, Any]:
    """A large_binary array's data as (uint8 array, offsets as int64 array of n + 1), without copying."""
    _, offsets, data = lines.buffers()
    positions = np.frombuffer(offsets, np.int64)[lines.offset : lines.offset + len(lines) + 1]
    return (np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)), positions


def _rows_to_look_at(lines: Any) -> list[int]:
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


def _what_is_wrong(document: bytes) -> str | None:
    stripped = document.lstrip(_JSON_WHITESPACE)
    if stripped.startswith(b"{"):
        return None
    if not stripped:
        return "the document is empty"
    try:
        parsed = json.loads(document.decode("utf-8-sig"))
    except ValueError:
        return "the document is not JSON"
    return None if isinstance(parsed, dict) else f"the document is JSON but no object: {stripped[:50]!r}"


def _without_line_breaks(lines: Any, rejected: dict[int, Reason]) -> Any:
    """Raw line breaks replaced by spaces, which is lossless: in JSON they can only stand between tokens.

    Parsing and writing anew would change numbers and drop repeated names. A line break within a string is no JSON, so
    whoever has one anywhere but at the end is parsed first, and rejected if that fails.
    """
    data, offsets = line_offsets(lines)
    used = data[offsets[0] : offsets[-1]]
    if not ((used == _LINE_FEED) | (used == _CARRIAGE_RETURN)).any():
        return lines
    breaks = pc.or_(pc.match_substring(lines, b"\n"), pc.match_substring(lines, b"\r"))
    mask = pc.fill_null(breaks, False)
    repaired: list[bytes] = []
    for row in pc.indices_nonzero(mask).to_pylist():
        line = lines[row].as_py().strip(_JSON_WHITESPACE)
        if row not in rejected and (b"\n" in line or b"\r" in line):
            try:
                json.loads(line.decode("utf-8"))
            except ValueError as error:
                rejected[row] = Reason(MALFORMED, f"the document has line breaks and is not JSON: {error}")
        repaired.append(line.translate(_ONE_LINE))
    return pc.replace_with_mask(lines, mask, pa.array(repaired, pa.large_binary()))
