"""A stream's batches and samples over time, thinned to as many points as a picture has room for."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.ledger import Ledger
from headrace.ledger.models import SampleRow
from headrace.monitoring.batch_lines import BatchLine, batch_line


@dataclass(frozen=True, slots=True)
class Timeline:
    """``[from_ms, until_ms)``, oldest first. ``thinned``: some batches are left out."""

    batch_interval: float
    from_ms: int
    until_ms: int
    thinned: bool
    batches: tuple[BatchLine, ...]
    samples: tuple[SampleRow, ...]


def timeline(
    ledger: Ledger, stream_name: str, *, from_ms: int | None = None, until_ms: int | None = None, points: int = 200
) -> Timeline:
    """At most ``points`` batches and samples; by default the last ``points`` batch times."""
    interval_ms = ledger.streams.get(stream_name).batch_interval_ms
    until_ms = ledger.now_ms() + 1 if until_ms is None else until_ms
    from_ms = until_ms - points * interval_ms if from_ms is None else from_ms
    rows, thinned = ledger.batch_pages.points(stream_name, from_ms, until_ms, points=points)
    return Timeline(
        batch_interval=interval_ms / 1000,
        from_ms=from_ms,
        until_ms=until_ms,
        thinned=thinned,
        batches=tuple(map(batch_line, rows)),
        samples=tuple(ledger.samples.between(stream_name, from_ms, until_ms, points=points)),
    )
