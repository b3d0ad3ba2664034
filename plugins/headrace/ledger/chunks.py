"""Lists of any length in statements whose parameters the databases limit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

# Far below SQLite's 32,766 parameters of a statement and Postgres's 65,535.
CHUNK = 1_000


def chunks(values: Sequence[int]) -> Iterator[Sequence[int]]:
    """The values in their order, at most `CHUNK` at a time."""
    for start in range(0, len(values), CHUNK):
        yield values[start : start + CHUNK]
