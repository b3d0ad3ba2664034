"""Writers of the log with segments of the tests' choice."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from headrace.wal.writer import SegmentSettings

_NAMES = {field.name for field in fields(SegmentSettings)}


def writer_options(**options: Any) -> dict[str, Any]:
    """The options of a `WriteAheadLogWriter`, with the fields of `SegmentSettings` among them as its settings."""
    settings = {name: options.pop(name) for name in _NAMES & options.keys()}
    return {**options, "segments": SegmentSettings(**settings)}
