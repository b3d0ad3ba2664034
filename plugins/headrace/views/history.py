"""A stream over time: its batches and samples, its events and gaps in pages, and the batch of an Airflow run."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from pydantic import Field

from headrace.ledger import Ledger
from headrace.ledger.states import EventKind
from headrace.ledger.tables import EventRow
from headrace.views.base import Seconds, Time, View
from headrace.views.batches import BatchPoint, batch_line

# A busy stream has five of these a second: they would hide all others.
_MANY = frozenset({EventKind.BLOCK_ADDED})
_COUNTS = ("records", "blocks", "attempt", "partition", "receiver", "input", "epoch", "from_offset", "until_offset")


class Event(View):
    """An event of a stream."""

    id: int
    at_ms: Time
    kind: str
    batch_time_ms: Time | None
    text: str = Field(description="The event in a few words.")
    payload: dict[str, Any]


class EventPage(View):
    """Events, newest first."""

    events: tuple[Event, ...]
    next_before_id: int | None = Field(
        description="Pass it as ``before_id`` to get older ones; null if there are none."
    )


class Gap(View):
    """Offsets that were given up."""

    id: int
    at_ms: Time
    input: str
    topic: str
    partition: int
    from_offset: int
    until_offset: int
    reason: str
    batch_time_ms: Time | None


class GapPage(View):
    """Gaps, newest first."""

    gaps: tuple[Gap, ...]
    next_before_id: int | None


class Sample(View):
    """What the receiver job saw at a moment; in a thinned timeline the mean rate and the largest other values."""

    at_ms: Time
    input_rate: float | None
    lag: int | None
    lag_seconds: float | None
    queue_bytes: int | None
    paused: bool
    log_bytes: int | None


class Spread(View):
    """Delays of several batches, in seconds."""

    median: Seconds
    p95: Seconds
    maximum: Seconds


class TimelinePart(View):
    """The numbers of all batches of a range of time, but for absorbed ones."""

    from_ms: Time
    until_ms: Time
    batches: int
    records: int
    scheduling_delay: Spread | None
    processing_time: Spread | None
    total_delay: Spread | None
    above_interval: int = Field(description="Batches whose processing took longer than their batch interval.")


class Timeline(View):
    """Batches and samples of a range of time, oldest first, at most ``points`` of each."""

    batch_interval: float
    from_ms: Time
    until_ms: Time
    thinned: bool
    batches: tuple[BatchPoint, ...]
    samples: tuple[Sample, ...]
    parts: tuple[TimelinePart, ...] = Field(
        default=(), description="In a thinned timeline one for each of ``batches``, which are their slowest ones."
    )
    whole: TimelinePart | None = Field(default=None, description="In a thinned timeline the numbers of all batches.")


def events(
    ledger: Ledger, stream_name: str, kinds: Collection[EventKind], *, before_id: int | None, limit: int
) -> EventPage:
    """The newest events of these kinds; without any, of all kinds except those of blocks."""
    wanted = list(kinds) or [kind for kind in EventKind if kind not in _MANY]
    rows = ledger.events.latest(stream_name, wanted, limit + 1, before_id=before_id)
    page = tuple(map(event, rows[:limit]))
    return EventPage(events=page, next_before_id=page[-1].id if len(rows) > limit else None)


def event(row: EventRow) -> Event:
    """The event of a row."""
    return Event(
        id=row.event_id,
        at_ms=row.at_ms,
        kind=row.kind,
        batch_time_ms=row.batch_time_ms,
        text=event_text(row.kind, row.payload),
        payload=row.payload,
    )


def event_text(kind: str, payload: Mapping[str, Any]) -> str:
    """An event in words: its kind, the numbers that matter, and the error or the reason."""
    named = [f"{name.replace('_', ' ')} {payload[name]}" for name in _COUNTS if payload.get(name) not in (None, "")]
    if payload.get("topic"):
        named.insert(0, f"topic {payload['topic']}")
    if payload.get("by"):
        named.append(f"by {payload['by']}")
    if payload.get("subject"):
        named.append(f"version {payload.get('version')} of {payload['subject']}")
    text = kind.replace("_", " ").capitalize() + (f" ({', '.join(named)})" if named else "")
    why = payload.get("error") or payload.get("reason") or payload.get("desired_state") or payload.get("state")
    why = why or ", ".join(payload.get("differences", ()))
    return f"{text}: {why}" if why else text


def gaps(ledger: Ledger, stream_name: str, *, before_id: int | None, limit: int) -> GapPage:
    """The newest gaps."""
    rows = ledger.gaps.page(stream_name, limit + 1, before_id=before_id)
    page = tuple(
        Gap(
            id=row.gap_id,
            at_ms=row.at_ms,
            input=row.input_id,
            topic=row.partition.topic,
            partition=row.partition.partition,
            from_offset=row.from_offset,
            until_offset=row.until_offset,
            reason=row.reason,
            batch_time_ms=row.batch_time_ms,
        )
        for row in rows[:limit]
    )
    return GapPage(gaps=page, next_before_id=page[-1].id if len(rows) > limit else None)


def batch_of_run(ledger: Ledger, stream_name: str, run_id: str, ended_ms: int | None) -> int | None:
    """The batch time that an Airflow run has: assigned by the ledger, else the end of its interval if that has a batch.

    A batch that was taken over by a later one leads to that one.
    """
    batch_time_ms = ledger.runs.find(stream_name, run_id) or ended_ms
    batch = None if batch_time_ms is None else ledger.batches.find(stream_name, batch_time_ms)
    if batch is None:
        return None
    return batch.absorbed_by_ms or batch.batch_time_ms


def timeline(
    ledger: Ledger, stream_name: str, *, from_ms: int | None = None, until_ms: int | None = None, points: int = 200
) -> Timeline:
    """At most ``points`` batches and samples; by default the last ``points`` batch times."""
    interval_ms = ledger.streams.get(stream_name).batch_interval_ms
    until_ms = ledger.now_ms() + 1 if until_ms is None else until_ms
    from_ms = until_ms - points * interval_ms if from_ms is None else from_ms
    timeline_rows = ledger.batch_pages.points(stream_name, from_ms, until_ms, points=points)
    return Timeline(
        batch_interval=interval_ms / 1000,
        from_ms=from_ms,
        until_ms=until_ms,
        thinned=timeline_rows.whole is not None,
        batches=tuple(map(batch_line, timeline_rows.rows)),
        samples=tuple(
            Sample.model_validate(row) for row in ledger.samples.between(stream_name, from_ms, until_ms, points=points)
        ),
        parts=tuple(map(TimelinePart.model_validate, timeline_rows.parts)),
        whole=None if timeline_rows.whole is None else TimelinePart.model_validate(timeline_rows.whole),
    )
