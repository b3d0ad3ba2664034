"""Keeps sums that only grow, for metrics: what batches, attempts and outputs of a stream have counted so far.

Rows of batches, blocks and attempts are deleted in time, so a sum over them would fall. A total is written in the
transaction of what it counts, under the stream's lock, and is never deleted.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.dialects import postgresql, sqlite

from headrace.ledger.tables import totals

# Delays of batches, in seconds: from the shortest useful batch interval to a stream that is an hour late.
DELAY_BOUNDS = (1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 900.0, 3600.0)
# Writes of blocks to the log, and the ledger's transactions, in seconds.
DURATION_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)

OUTPUT_COUNTS = (
    "created",
    "updated",
    "repeated",
    "kept",
    "uncompared",
    "superseded",
    "deleted",
    "ignored_tombstones",
    "dropped",
    "dead_lettered",
    "undecodable",
    "rows",
    "messages",
    "printed",
    "requests",
    "retries",
    "bytes",
    "duration_seconds",
)
"""The counts of outputs that have totals. A user's function may return others, under any number of names."""


def observation(name: str, seconds: float, bounds: Sequence[float]) -> dict[str, float]:
    """Return what one duration adds to the histogram ``name``: 1 to its bucket, and its seconds to the sum.

    A bucket is named by its upper bound, and does not contain those below it.
    """
    place = bisect_left(bounds, seconds)
    bound = bounds[place] if place < len(bounds) else math.inf
    return {f"{name}_le_{bound:g}": 1.0, f"{name}_sum": max(0.0, seconds)}


def batch_delays(batch_time_ms: int, started_at_ms: int | None, completed_at_ms: int) -> dict[str, float]:
    """Return what a completed batch adds to the histograms of delays."""
    found = observation("total_delay", (completed_at_ms - batch_time_ms) / 1000, DELAY_BOUNDS)
    if started_at_ms is not None:
        found |= observation("scheduling_delay", (started_at_ms - batch_time_ms) / 1000, DELAY_BOUNDS)
        found |= observation("processing_time", (completed_at_ms - started_at_ms) / 1000, DELAY_BOUNDS)
    return found


def output_totals(counts: Mapping[str, Any]) -> dict[str, float]:
    """Return what an output's counts add to its totals."""
    known = {name: counts.get(name) for name in OUTPUT_COUNTS}
    return {name: value for name, value in known.items() if isinstance(value, int | float) and value > 0}


def add_totals(connection: Connection, stream: str, amounts: Mapping[str, float], *, output_id: str = "") -> None:
    """Add the amounts to the stream's totals, or to those of one output, within the caller's transaction."""
    rows = [
        # Sorted: two transactions that do not hold the stream's lock would take row locks in the same order.
        {"stream": stream, "output_id": output_id, "name": name, "value": float(amount)}
        for name, amount in sorted(amounts.items())
        if amount > 0
    ]
    if rows:
        connection.execute(_ADD[connection.dialect.name], rows)


def _statement(insert: Any) -> Any:
    new = insert(totals)
    return new.on_conflict_do_update(
        index_elements=["stream", "output_id", "name"], set_={"value": totals.c.value + new.excluded.value}
    )


_ADD = {"sqlite": _statement(sqlite.insert), "postgresql": _statement(postgresql.insert)}
