"""A stream over time: its batches in pages, and batches and samples for a picture, of which a long range has too many.

An order of batches by time uses the primary key, or the index by state. An order by another value sorts the newest
`WINDOW` batches of the range: an index for each order would cost every batch a write.

A sample is what the receiver jobs see every ten seconds: lag, rate, queues, size of the log. It is an observation, not
a fact that anything rests on. A rebuilt ledger begins without samples.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, Select, case, func, insert, select

from headrace.ledger.batches.tables import BatchRow, batches
from headrace.ledger.database import Repository
from headrace.ledger.states import BatchState
from headrace.ledger.tables import SampleRow, gaps, samples

WINDOW = 10_000
"""How many of the newest batches an order other than by time sorts, and the largest number that is counted."""


class BatchOrder(StrEnum):
    """The orders of a page."""

    NEWEST = "newest"
    OLDEST = "oldest"
    RECORDS = "records"
    PROCESSING_TIME = "processing_time"
    TOTAL_DELAY = "total_delay"

    @property
    def by_time(self) -> bool:
        """Whether it is an order by batch time."""
        return self in (BatchOrder.NEWEST, BatchOrder.OLDEST)


_VALUES: dict[BatchOrder, ColumnElement[Any]] = {
    BatchOrder.RECORDS: batches.c.records,
    BatchOrder.PROCESSING_TIME: func.coalesce(batches.c.completed_at_ms - batches.c.started_at_ms, -1),
    BatchOrder.TOTAL_DELAY: func.coalesce(batches.c.completed_at_ms - batches.c.batch_time_ms, -1),
}


# The largest values of a part of a timeline.
_LARGEST = ("lag", "lag_seconds", "queue_bytes", "log_bytes")
# What a part of a timeline is made of.
_MEASURED = ("interval_ms", "records", "started_at_ms", "completed_at_ms")


@dataclass(frozen=True, slots=True)
class BatchSelection:
    """Batches of these states, all if empty, with times in ``[from_ms, until_ms)``.

    ``folded``: without batch times that a later batch absorbed. The row of that batch names them.
    """

    states: tuple[BatchState, ...] = ()
    from_ms: int | None = None
    until_ms: int | None = None
    folded: bool = False


@dataclass(frozen=True, slots=True)
class Place:
    """Where a page ended: the last batch time, and its value in an order other than by time."""

    batch_time_ms: int
    value: int | None = None


@dataclass(frozen=True, slots=True)
class Page:
    """Batches in order. ``after`` is where the next page begins, None after the last; ``window`` as in `BatchOrder`."""

    rows: tuple[BatchRow, ...]
    after: Place | None
    window: int | None = None


@dataclass(frozen=True, slots=True)
class Spread:
    """The median, the 95th percentile and the maximum of delays, in milliseconds."""

    median: int
    p95: int
    maximum: int

    @classmethod
    def of(cls, values: Iterable[int | None]) -> Spread | None:
        """The spread of the values that are known; None without any. Percentiles by the nearest rank."""
        known = sorted(value for value in values if value is not None)
        if not known:
            return None
        return cls(*(known[-(-len(known) * percent // 100) - 1] for percent in (50, 95, 100)))


@dataclass(frozen=True, slots=True)
class Part:
    """All batches of ``[from_ms, until_ms)`` that are not absorbed: their number, records, and delays.

    ``above_interval`` is the number of those whose processing took longer than their batch interval.
    """

    from_ms: int
    until_ms: int
    batches: int
    records: int
    scheduling_delay: Spread | None
    processing_time: Spread | None
    total_delay: Spread | None
    above_interval: int


@dataclass(frozen=True, slots=True)
class Points:
    """Batches for a picture, oldest first. If some are left out, ``parts`` and ``whole`` say what all of them were."""

    rows: tuple[BatchRow, ...]
    parts: tuple[Part, ...] = ()
    whole: Part | None = None


class BatchPages(Repository):
    """Pages and points of a stream's batches."""

    def page(
        self, stream_name: str, of: BatchSelection, order: BatchOrder, limit: int, after: Place | None = None
    ) -> Page:
        """Return the next ``limit`` batches after ``after``."""
        with self._database.read() as connection:
            if order.by_time:
                rows = _by_time(connection, stream_name, of, order=order, limit=limit + 1, after=after)
                more, window = len(rows) > limit, None
                end = Place(rows[limit - 1].batch_time_ms) if more else None
                return Page(tuple(rows[:limit]), end, window)
            return _by_value(connection, stream_name, of, order=order, limit=limit, after=after)

    def points(self, stream_name: str, from_ms: int, until_ms: int, *, points: int) -> Points:
        """Return batches of ``[from_ms, until_ms)``, oldest first, at most ``points``.

        If there are more, the range is cut into equal parts, each with its batch of the longest total delay, and with
        the numbers of all its batches. Absorbed batches are never included.
        """
        time = batches.c.batch_time_ms
        of_range = (
            batches.c.stream == stream_name,
            time >= from_ms,
            time < until_ms,
            batches.c.state != BatchState.ABSORBED,
        )
        with self._database.read() as connection:
            every = select(batches).where(*of_range).order_by(time)
            rows = BatchRow.rows(connection, every.limit(points + 1))
            if len(rows) <= points:
                return Points(tuple(rows))
            narrow = select(time, *(batches.c[name] for name in _MEASURED)).where(*of_range).order_by(time)
            every_row = connection.execute(narrow).all()
            part_ms = -(-(until_ms - from_ms) // points)
            parts = [
                (from_ms + number * part_ms, list(group))
                for number, group in groupby(every_row, lambda row: (row.batch_time_ms - from_ms) // part_ms)
            ]
            slowest = [max(group, key=_total_delay_ms).batch_time_ms for _, group in parts]
            thinned = select(batches).where(batches.c.stream == stream_name, time.in_(slowest)).order_by(time)
            return Points(
                tuple(BatchRow.rows(connection, thinned)),
                tuple(_part(group, start, min(start + part_ms, until_ms)) for start, group in parts),
                _part(every_row, from_ms, until_ms),
            )

    def counts(self, stream_name: str) -> dict[str, int]:
        """Return the number of batches by state, of the states that occur; each up to `WINDOW`."""
        with self._database.read() as connection:
            by_state = {
                state.value: _count(
                    connection,
                    select(batches.c.batch_time_ms).where(batches.c.stream == stream_name, batches.c.state == state),
                )
                for state in BatchState
            }
        return {state: number for state, number in by_state.items() if number}

    def gaps(self, stream_name: str) -> int:
        """Return the number of the stream's gaps, up to `WINDOW`."""
        with self._database.read() as connection:
            return _count(connection, select(gaps.c.gap_id).where(gaps.c.stream == stream_name))


def _total_delay_ms(row: Row[Any]) -> int:
    """-1 while it is not known: the others are slower."""
    return -1 if row.completed_at_ms is None else int(row.completed_at_ms - row.batch_time_ms)


def _part(rows: Sequence[Row[Any]], from_ms: int, until_ms: int) -> Part:
    processing = [_between(row.started_at_ms, row.completed_at_ms) for row in rows]
    return Part(
        from_ms,
        until_ms,
        batches=len(rows),
        records=sum(row.records for row in rows),
        scheduling_delay=Spread.of(_between(row.batch_time_ms, row.started_at_ms) for row in rows),
        processing_time=Spread.of(processing),
        total_delay=Spread.of(_between(row.batch_time_ms, row.completed_at_ms) for row in rows),
        above_interval=sum(
            took is not None and took > row.interval_ms for took, row in zip(processing, rows, strict=True)
        ),
    )


def _between(from_ms: int | None, until_ms: int | None) -> int | None:
    return None if from_ms is None or until_ms is None or until_ms < from_ms else until_ms - from_ms


def _count(connection: Connection, query: Select[Any]) -> int:
    return int(connection.execute(select(func.count()).select_from(query.limit(WINDOW).subquery())).scalar_one())


def _selected(stream_name: str, of: BatchSelection, *columns: Any) -> Select[Any]:
    query = select(*columns or (batches,)).where(batches.c.stream == stream_name)
    if of.folded:
        query = query.where(batches.c.state != BatchState.ABSORBED)
    if of.from_ms is not None:
        query = query.where(batches.c.batch_time_ms >= of.from_ms)
    return query if of.until_ms is None else query.where(batches.c.batch_time_ms < of.until_ms)


def _by_state(query: Select[Any], states: Collection[BatchState]) -> Sequence[Select[Any]]:
    # One query per state uses the index; one query for all states would read and sort all their rows.
    return [query.where(batches.c.state == state) for state in states] or [query]


def _by_time(
    connection: Connection, stream_name: str, of: BatchSelection, *, order: BatchOrder, limit: int, after: Place | None
) -> list[BatchRow]:
    time = batches.c.batch_time_ms
    newest = order is BatchOrder.NEWEST
    query = _selected(stream_name, of)
    if after is not None:
        query = query.where(time < after.batch_time_ms if newest else time > after.batch_time_ms)
    rows: list[BatchRow] = []
    for part in _by_state(query, of.states):
        rows += BatchRow.rows(connection, part.order_by(time.desc() if newest else time.asc()).limit(limit))
    return sorted(rows, key=lambda row: row.batch_time_ms, reverse=newest)[:limit]


def _by_value(
    connection: Connection, stream_name: str, of: BatchSelection, *, order: BatchOrder, limit: int, after: Place | None
) -> Page:
    time = batches.c.batch_time_ms
    narrow = _selected(stream_name, of, time, _VALUES[order].label("value"))
    values: list[tuple[int, int]] = []
    for part in _by_state(narrow, of.states):
        rows = connection.execute(part.order_by(time.desc()).limit(WINDOW))
        values += [(int(row.value), int(row.batch_time_ms)) for row in rows]
    if len(values) > WINDOW:
        values = sorted(values, key=lambda pair: pair[1], reverse=True)[:WINDOW]
    window = len(values)
    ordered = sorted(values, reverse=True)
    if after is not None:
        place = (after.value or 0, after.batch_time_ms)
        ordered = [pair for pair in ordered if pair < place]
    taken = ordered[:limit]
    query = select(batches).where(batches.c.stream == stream_name, time.in_([time_ms for _, time_ms in taken]))
    by_time = {row.batch_time_ms: BatchRow.from_row(row) for row in connection.execute(query)}
    page = tuple(by_time[time_ms] for _, time_ms in taken if time_ms in by_time)
    end = Place(taken[-1][1], taken[-1][0]) if len(ordered) > limit else None
    return Page(page, end, window)


class Samples(Repository):
    """The samples of streams, by time."""

    def add(self, sample: SampleRow) -> None:
        """Add a sample without the stream's lock; a second one of the same moment is ignored."""
        with self._database.write() as connection:
            at = (samples.c.stream == sample.stream, samples.c.at_ms == sample.at_ms)
            if connection.execute(select(samples.c.at_ms).where(*at)).first() is None:
                connection.execute(insert(samples).values(**sample.to_columns()))

    def between(self, stream_name: str, from_ms: int, until_ms: int, *, points: int) -> list[SampleRow]:
        """Return samples of ``[from_ms, until_ms)``, oldest first, at most ``points``.

        If there are more, the range is cut into equal parts, each with one sample: the mean rate and the largest other
        values of the part, at the time of its last sample.
        """
        of_range = (samples.c.stream == stream_name, samples.c.at_ms >= from_ms, samples.c.at_ms < until_ms)
        query = select(samples).where(*of_range).order_by(samples.c.at_ms)
        with self._database.read() as connection:
            rows = SampleRow.rows(connection, query.limit(points + 1))
            if len(rows) <= points:
                return rows
            part_ms = -(-(until_ms - from_ms) // points)
            # ``//`` on integers, in SQLite and Postgres.
            part = (samples.c.at_ms - from_ms) // part_ms
            thinned = (
                select(
                    func.max(samples.c.at_ms).label("at_ms"),
                    func.avg(samples.c.input_rate).label("input_rate"),
                    *(func.max(samples.c[name]).label(name) for name in _LARGEST),
                    func.max(case((samples.c.paused, 1), else_=0)).label("paused"),
                )
                .where(*of_range)
                .group_by(part)
                .order_by(func.max(samples.c.at_ms))
            )
            return [
                SampleRow(**{**row._asdict(), "stream": stream_name, "paused": bool(row.paused)})
                for row in connection.execute(thinned)
            ]
