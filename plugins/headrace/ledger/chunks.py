"""Splits long lists for SQL statements, since databases limit the number of parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

# Far below the limits of a statement: 32,766 parameters in SQLite, 65,535 in Postgres.
CHUNK = 1_000


def chunks(values: Sequence[int]) -> Iterator[Sequence[int]]:
    """Yield the values in order, at most `CHUNK` at a time."""
    for start in range(0, len(values), CHUNK):
        yield values[start : start + CHUNK]
