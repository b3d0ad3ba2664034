"""Derives a state's next version from the one before it, and decides when a whole table is written.

Reading a version means reading all files of its table: the newest whole table and the changes since. The list of files
begins again with a version whose changes are the whole table, and with the whole table that is written after
``snapshot_every`` versions. So the thousandth batch costs the same as the tenth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from headrace.clock import time_text
from headrace.spark.state.errors import StateError
from headrace.spark.state.report import WriteReport
from headrace.spark.state.version import Outcome, StoredFile, Version


def next_version(
    base: Version | None,
    written: WriteReport,
    *,
    stream: str,
    batch_time_ms: int,
    attempt: int,
    keys: tuple[str, ...],
    schema: Mapping[str, Any],
    first_ms: int | None = None,
) -> Version:
    """The version that follows ``base`` (None: an empty table) with the changes in ``written``.

    ``first_ms``: the first batch time whose records are in the table, if it is not this version's.
    """
    changes = tuple(sorted(written.files, key=lambda file: file.path))
    live = written.outcomes[Outcome.ADDED] + written.outcomes[Outcome.CHANGED]
    gone = written.outcomes[Outcome.REMOVED] + written.outcomes[Outcome.TIMED_OUT]
    rows = (0 if base is None else base.rows) + written.outcomes[Outcome.ADDED] - gone
    version = Version(
        stream=stream,
        batch_time_ms=batch_time_ms,
        attempt=attempt,
        based_on=None if base is None else (base.batch_time_ms, base.attempt),
        first_ms=(first_ms or batch_time_ms) if base is None else base.first_ms,
        since_ms=batch_time_ms,
        chain=1,
        rows=rows,
        keys=keys,
        schema=schema,
        changes=changes,
        table=changes,
    )
    if base is None or live == rows:
        # The changes contain every row, so they are the whole table.
        return version
    return replace(version, since_ms=base.since_ms, chain=base.chain + 1, table=(*base.table, *changes))


def is_cut_due(version: Version, snapshot_every: int) -> bool:
    """Whether the version's whole table must be written to its own files."""
    return version.chain > snapshot_every


def cut(version: Version, table: Sequence[StoredFile]) -> Version:
    """The version with its whole table in the files ``table``.

    Raises:
        StateError: the files have another number of rows than the table.
    """
    rows = sum(file.rows for file in table)
    if rows != version.rows:
        raise StateError(
            f"The state of batch {time_text(version.batch_time_ms)} has {rows} rows where {version.rows} were counted.",
            remedy="This is a defect of headrace: please report it. The version was not written.",
        )
    ordered = tuple(sorted(table, key=lambda file: file.path))
    return replace(version, since_ms=version.batch_time_ms, chain=1, table=ordered)
