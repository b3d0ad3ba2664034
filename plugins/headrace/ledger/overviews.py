"""Reads what is judged and shown of streams now: for the page's list and one stream, the commands, and the metrics.

The page and a scrape read this every few seconds. So there are few statements, whatever the number of streams, and each
takes what it needs from an index: none reads rows whose number grows with the batches or blocks of a stream.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, Integer, Row, and_, bindparam, case, func, literal, select

from headrace.ledger.batches.batch_states import select_attempts
from headrace.ledger.batches.tables import AttemptRow, BatchRow, batch_attempts, batch_outputs, batches
from headrace.ledger.clock_corrections import CLOCK_SKEW_MS
from headrace.ledger.database import Repository, any_of
from headrace.ledger.errors import LedgerUnavailableError
from headrace.ledger.receiving.blocks import stored_bytes_of
from headrace.ledger.receiving.tables import LIVE, PositionRow, ReceiverRow, positions, receivers, unclaimed_times
from headrace.ledger.states import UNFINISHED, AttemptState, BatchState, PartitionState
from headrace.ledger.tables import (
    EventRow,
    JobRow,
    SampleRow,
    StreamRow,
    events,
    receiver_jobs,
    samples,
    streams,
    totals,
)

MAX_COUNTED = 1_000
"""Batches of a state, and unclaimed batch times, are counted up to this number."""


@dataclass(slots=True)
class StreamNow:
    """A stream at ``now_ms`` of the ledger's clock. ``job_before`` is the receiver job before ``job``."""

    stream: StreamRow
    now_ms: int
    job: JobRow | None = None
    job_before: JobRow | None = None
    receivers: list[ReceiverRow] = field(default_factory=list)
    last_completed: BatchRow | None = None


@dataclass(slots=True)
class StreamOverview(StreamNow):
    """What a stream is judged by.

    ``recent`` are its newest batches that are not absorbed, newest first. ``unfinished`` is the unfinished batch with
    the earliest time, leaving out backfilled ones. A batch is backfilled if it had completed before, or its time is
    before the stream began (its zero time): ``backfilled`` is that of the unfinished ones whose newest try began first.
    ``failed`` is the number of failed batches that are not backfilled, up to `MAX_COUNTED`. ``attempts`` are those at
    both batches and at the failed ones of ``recent``, by batch time and number; ``events`` those of ``backfilled``,
    oldest first. ``waiting_ms`` is the oldest batch time until now that has blocks and no batch. ``failed_positions``
    are partitions that an error has stopped; ``samples`` the newest ones, oldest first. ``dead_letters`` is the number
    that the newest writes of ``recent`` have counted.
    """

    recent: list[BatchRow] = field(default_factory=list)
    unfinished: BatchRow | None = None
    backfilled: BatchRow | None = None
    failed: int = 0
    attempts: list[AttemptRow] = field(default_factory=list)
    events: list[EventRow] = field(default_factory=list)
    waiting_ms: int | None = None
    failed_positions: list[PositionRow] = field(default_factory=list)
    samples: list[SampleRow] = field(default_factory=list)
    dead_letters: int = 0


@dataclass(frozen=True, slots=True)
class PartitionNumbers:
    """A partition that is received. ``received_records`` and ``received_offsets`` include the topic's earlier
    incarnations, whose partitions are no longer received."""

    input_id: str
    topic: str
    partition: int
    failed: bool
    received_records: int
    received_offsets: int


@dataclass(slots=True)
class StreamNumbers(StreamNow):
    """A stream's numbers for metrics.

    ``unfinished`` counts batches by state, ``unclaimed_times`` the batch times with blocks and no batch, each up to
    `MAX_COUNTED`. ``oldest_unfinished_ms`` is the first of these batch times and ``oldest_failures`` the number of
    failed attempts at it; both leave out backfilled batches (`StreamOverview`). ``totals`` are by output id, those of
    the whole stream under "".
    """

    log_bytes: int = 0
    unclaimed_times: int = 0
    unfinished: dict[BatchState, int] = field(default_factory=dict)
    oldest_unfinished_ms: int | None = None
    oldest_failures: int = 0
    partitions: list[PartitionNumbers] = field(default_factory=list)
    totals: dict[str, dict[str, float]] = field(default_factory=lambda: defaultdict(dict))


class Overviews(Repository):
    """Reads overviews of several streams at once."""

    def write_refusals(self, stream_names: Sequence[str]) -> dict[str, LedgerUnavailableError]:
        """Why these streams cannot be written at the moment, by stream; those that can are left out. Waits a second."""
        return self._database.write_refusals(stream_names)

    def of(self, rows: Sequence[StreamRow], points: int) -> list[StreamOverview]:
        """Return an overview of each stream in the order of ``rows``, with ``points`` recent batches and samples."""
        with self._database.snapshot() as connection:
            now_ms = self._database.now_ms(connection)
            overviews = {row.name: StreamOverview(row, now_ms) for row in rows}
            _read_batches(connection, overviews, now_ms, points)
            _read_attempts(connection, overviews)
            _read_receiving(connection, overviews)
            _read_failed_positions(connection, overviews)
            _read_dead_letters(connection, overviews)
            return list(overviews.values())

    def numbers(self) -> list[StreamNumbers]:
        """Return the numbers of each stream, by name, as of one moment."""
        with self._database.snapshot() as connection:
            now_ms = self._database.now_ms(connection)
            numbers_of = {
                row.name: StreamNumbers(StreamRow.from_row(row), now_ms)
                for row in connection.execute(select(streams).order_by(streams.c.name))
            }
            _count_batches(connection, numbers_of, now_ms)
            _read_receiving(connection, numbers_of)
            for stream, numbers in _partitions(connection):
                numbers_of[stream].partitions.append(numbers)
            for row in connection.execute(select(totals)):
                numbers_of[row.stream].totals[row.output_id][row.name] = row.value
            return list(numbers_of.values())


def _read_batches(connection: Connection, overviews: Mapping[str, StreamOverview], now_ms: int, points: int) -> None:
    time = batches.c.batch_time_ms
    wanted: list[Any] = []
    last: dict[str, int | None] = {}
    oldest: dict[str, int | None] = {}
    backfilled: dict[str, int | None] = {}
    sampled: list[Any] = []
    parameters = {"streams": list(overviews), "now_ms": now_ms, "offset": points - 1}
    for row in connection.execute(_EDGES, parameters):
        overviews[row.name].waiting_ms = row.first_waiting
        overviews[row.name].failed = row.failed
        last[row.name] = row.last_completed
        unfinished = (getattr(row, f"first_{state}") for state in UNFINISHED)
        oldest[row.name] = min((time_ms for time_ms in unfinished if time_ms is not None), default=None)
        backfilled[row.name] = row.first_backfilled
        since_ms = row.recent_since or 0
        of_stream = batches.c.stream == row.name
        wanted.append(and_(of_stream, time >= since_ms, batches.c.state != BatchState.ABSORBED))
        for time_ms in {last[row.name], oldest[row.name], backfilled[row.name]}:
            if time_ms is not None and time_ms < since_ms:
                wanted.append(and_(of_stream, time == time_ms))
        sampled.append(and_(samples.c.stream == row.name, samples.c.at_ms >= (row.sampled_since or 0)))
    for row in any_of(connection, select(batches), wanted):
        batch, overview = BatchRow.from_row(row), overviews[row.stream]
        overview.recent.append(batch)
        if batch.batch_time_ms == last[row.stream]:
            overview.last_completed = batch
        if batch.batch_time_ms == oldest[row.stream]:
            overview.unfinished = batch
        if batch.batch_time_ms == backfilled[row.stream]:
            overview.backfilled = batch
    for row in any_of(connection, select(samples), sampled):
        overviews[row.stream].samples.append(SampleRow.from_row(row))
    for overview in overviews.values():
        overview.recent = sorted(overview.recent, key=lambda batch: -batch.batch_time_ms)[:points]
        overview.samples.sort(key=lambda sample: sample.at_ms)


def _read_attempts(connection: Connection, overviews: Mapping[str, StreamOverview]) -> None:
    backfilled = [overview.backfilled for overview in overviews.values() if overview.backfilled is not None]
    unfinished = [overview.unfinished for overview in overviews.values() if overview.unfinished is not None]
    failed = [batch for overview in overviews.values() for batch in overview.recent if batch.state is BatchState.FAILED]
    wanted = {(batch.stream, batch.batch_time_ms): batch for batch in [*unfinished, *backfilled, *failed]}
    attempted = [_of_batch(batch_attempts, batch) for batch in wanted.values()]
    tried = any_of(connection, select_attempts(), attempted)
    for row in sorted(tried, key=lambda row: (row.batch_time_ms, row.number)):
        overviews[row.stream].attempts.append(AttemptRow.from_row(row))
    happened = any_of(connection, select(events), [_of_batch(events, batch) for batch in backfilled])
    for row in sorted(happened, key=lambda row: row.event_id):
        overviews[row.stream].events.append(EventRow.from_row(row))


def _read_dead_letters(connection: Connection, overviews: Mapping[str, StreamOverview]) -> None:
    table = batch_outputs.c
    written = [
        and_(table.stream == name, table.batch_time_ms >= overview.recent[-1].batch_time_ms)
        for name, overview in overviews.items()
        if overview.recent
    ]
    columns = select(table.stream, table.batch_time_ms, table.output_id, table.attempt, table.counts)
    newest: dict[tuple[str, int, str], Any] = {}
    for row in sorted(any_of(connection, columns.where(table.target == ""), written), key=lambda row: row.attempt):
        newest[row.stream, row.batch_time_ms, row.output_id] = row.counts
    for (stream, _, _), counts in newest.items():
        number = counts.get("dead_lettered")
        overviews[stream].dead_letters += number if isinstance(number, int) else 0


def _of_batch(table: Any, batch: BatchRow) -> Any:
    return and_(table.c.stream == batch.stream, table.c.batch_time_ms == batch.batch_time_ms)


def _read_receiving(connection: Connection, states: Mapping[str, StreamNow]) -> None:
    jobs = [
        and_(receiver_jobs.c.stream == name, receiver_jobs.c.epoch >= state.stream.job_epoch - 1)
        for name, state in states.items()
    ]
    for row in any_of(connection, select(receiver_jobs), jobs):
        stream_now, job = states[row.stream], JobRow.from_row(row)
        if job.epoch == stream_now.stream.job_epoch:
            stream_now.job = job
        else:
            stream_now.job_before = job
    for row in connection.execute(_RECEIVERS, {"streams": list(states)}):
        states[row.stream].receivers.append(ReceiverRow.from_row(row))


def _read_failed_positions(connection: Connection, overviews: Mapping[str, StreamOverview]) -> None:
    """There may be many positions, so they are read only if a receiver reports failed partitions."""
    failing = [name for name, now in overviews.items() if any(row.stats.get("failed") for row in now.receivers)]
    for row in connection.execute(_FAILED_POSITIONS, {"streams": failing}) if failing else ():
        overviews[row.stream].failed_positions.append(PositionRow.from_row(row))


def _edges_query() -> Any:
    """One row for each stream. Each column is the end of an index range, or ``offset`` rows away from it."""

    def since(table: Any, column: Any, *conditions: Any) -> Any:
        query = select(column).where(table.c.stream == streams.c.name, *conditions)
        return query.order_by(column.desc()).limit(1).offset(bindparam("offset", type_=Integer)).scalar_subquery()

    waiting = unclaimed_times.c.batch_time_ms <= bindparam("now_ms")
    # Not ORDER BY with LIMIT: that would sort them all.
    others = batches.alias()
    begun = select(func.min(_begun_ms(others))).where(others.c.stream == streams.c.name, *_backfilled(others))
    # Said, since only what the next query names is correlated by itself.
    first_begun_ms = begun.correlate(streams).scalar_subquery()
    columns = [
        since(batches, batches.c.batch_time_ms, batches.c.state != BatchState.ABSORBED).label("recent_since"),
        since(samples, samples.c.at_ms).label("sampled_since"),
        _edge(func.min, unclaimed_times, waiting).label("first_waiting"),
        _last_completed(bindparam("now_ms")).label("last_completed"),
        _failed_query().label("failed"),
        *(
            _edge(func.min, batches, batches.c.state == state, *_scheduled(batches)).label(f"first_{state}")
            for state in UNFINISHED
        ),
        _edge(func.min, batches, *_backfilled(batches), _begun_ms(batches) == first_begun_ms).label("first_backfilled"),
    ]
    return select(streams.c.name, *columns).where(_these(streams.c.name))


def _edge(function: Any, table: Any, *conditions: Any) -> Any:
    """The first or last batch time of a stream in a table."""
    query = select(function(table.c.batch_time_ms)).where(table.c.stream == streams.c.name, *conditions)
    return query.scalar_subquery()


def _last_completed(now_ms: Any) -> Any:
    """Not a batch of a clock that was ahead: it would hide for as long that none completes."""
    times = batches.c.batch_time_ms <= now_ms + CLOCK_SKEW_MS
    return _edge(func.max, batches, batches.c.state == BatchState.COMPLETED, times)


def _failed_query() -> Any:
    rows = select(batches.c.batch_time_ms).where(
        batches.c.stream == streams.c.name, batches.c.state == BatchState.FAILED, *_scheduled(batches)
    )
    counted = rows.limit(MAX_COUNTED).correlate(streams).subquery("counted_failures")
    return select(func.count()).select_from(counted).scalar_subquery()


def _backfilled(table: Any) -> tuple[Any, Any]:
    """The conditions of `StreamOverview.backfilled`."""
    return table.c.state.in_(UNFINISHED), ~and_(*_scheduled(table))


def _scheduled(table: Any) -> tuple[Any, Any]:
    return table.c.steps.is_(None), table.c.batch_time_ms > streams.c.zero_time_ms


def _begun_ms(table: Any) -> Any:
    return func.coalesce(table.c.started_at_ms, table.c.allocated_at_ms)


def _these(column: Any) -> Any:
    return column.in_(bindparam("streams", expanding=True))


def _partitions(connection: Connection) -> Iterable[tuple[str, PartitionNumbers]]:
    key = (positions.c.stream, positions.c.input_id, positions.c.topic, positions.c.partition)
    live = positions.c.state != PartitionState.ENDED
    query = (
        select(
            *key,
            func.max(case((positions.c.state == PartitionState.FAILED, 1), else_=0)).label("failed"),
            func.sum(positions.c.received_records).label("records"),
            func.sum(positions.c.next_offset - positions.c.starting_offset).label("offsets"),
        )
        .group_by(*key)
        .having(func.max(case((live, 1), else_=0)) == 1)
        .order_by(*key)
    )
    for row in connection.execute(query):
        counted = (int(row.records), int(row.offsets))
        yield row.stream, PartitionNumbers(row.input_id, row.topic, row.partition, bool(row.failed), *counted)


def _count_batches(connection: Connection, numbers_of: Mapping[str, StreamNumbers], now_ms: int) -> None:
    last: dict[str, int] = {}
    for row in connection.execute(_NUMBERS, {"now_ms": now_ms}):
        numbers = numbers_of[row.name]
        numbers.log_bytes = int(row.log_bytes)
        numbers.unclaimed_times = row.unclaimed
        numbers.unfinished = {state: getattr(row, f"count_{state}") for state in UNFINISHED}
        times = [row.first_unclaimed, *(getattr(row, f"first_{state}") for state in UNFINISHED)]
        numbers.oldest_unfinished_ms = min((time_ms for time_ms in times if time_ms is not None), default=None)
        if row.last_completed is not None:
            last[row.name] = row.last_completed
    for row in _rows_of(connection, batches, batches.c.batch_time_ms, last):
        numbers_of[row.stream].last_completed = BatchRow.from_row(row)
    _count_failures(connection, numbers_of)


def _count_failures(connection: Connection, numbers_of: Mapping[str, StreamNumbers]) -> None:
    """Count the failed attempts at the oldest unfinished batches."""
    times = {name: numbers.oldest_unfinished_ms for name, numbers in numbers_of.items()}
    oldest = {name: time_ms for name, time_ms in times.items() if time_ms is not None}
    failed = (batch_attempts.c.state == AttemptState.FAILED, batch_attempts.c.target == "")
    for row in _rows_of(connection, batch_attempts, batch_attempts.c.batch_time_ms, oldest, *failed):
        numbers_of[row.stream].oldest_failures += 1


def _rows_of(
    connection: Connection, table: Any, column: Any, values: Mapping[str, int], *conditions: Any
) -> list[Row[Any]]:
    """Return the rows of each stream in which ``column`` has its value; both are the beginning of the primary key."""
    these = [and_(table.c.stream == stream, column == value) for stream, value in values.items()]
    return any_of(connection, select(table).where(*conditions), these)


def _numbers_query() -> Any:
    """One row for each stream. Each column is the end of an index range, or counts up to `MAX_COUNTED` of its rows."""

    def counted(table: Any, *conditions: Any, column: Any = None) -> Any:
        rows = select(literal(1)) if column is None else select(column).distinct()
        rows = rows.where(table.c.stream == streams.c.name, *conditions).limit(MAX_COUNTED)
        return select(func.count()).select_from(rows.correlate(streams).subquery())

    columns = [
        stored_bytes_of(streams.c.name).label("log_bytes"),
        counted(unclaimed_times, column=unclaimed_times.c.batch_time_ms).scalar_subquery().label("unclaimed"),
        _edge(func.min, unclaimed_times).label("first_unclaimed"),
        _last_completed(bindparam("now_ms")).label("last_completed"),
    ]
    for state in UNFINISHED:
        # A backfilled batch is not late by its time.
        first = _edge(func.min, batches, batches.c.state == state, *_scheduled(batches))
        columns.append(first.label(f"first_{state}"))
        columns.append(counted(batches, batches.c.state == state).scalar_subquery().label(f"count_{state}"))
    return select(streams.c.name, *columns)


_EDGES = _edges_query()
_NUMBERS = _numbers_query()
_RECEIVERS = (
    select(receivers)
    .where(_these(receivers.c.stream))
    .order_by(receivers.c.stream, receivers.c.input_id, receivers.c.receiver_index)
)
_FAILED_POSITIONS = (
    select(positions)
    .where(_these(positions.c.stream), LIVE, positions.c.error.is_not(None))
    .order_by(
        positions.c.stream, positions.c.input_id, positions.c.topic, positions.c.incarnation, positions.c.partition
    )
)
