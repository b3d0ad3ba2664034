"""Reads the present numbers of all streams at once, for metrics.

A scrape reads them every few seconds. So there are few statements, whatever the number of streams, and each takes what
it needs from an index: none reads rows whose number grows with the batches or blocks of a stream.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, Row, and_, case, func, literal, select

from headrace.ledger.batch_tables import BatchRow, batch_attempts, batches
from headrace.ledger.blocks import stored_bytes_of
from headrace.ledger.database import Repository, any_of
from headrace.ledger.receiving_tables import ReceiverRow, positions, receivers, unclaimed_times
from headrace.ledger.states import UNFINISHED, AttemptState, BatchState, PartitionState
from headrace.ledger.tables import JobRow, StreamRow, receiver_jobs, streams, totals

MOST_COUNTED = 1_000
"""Unfinished batches of a state, and unclaimed batch times, are counted up to this number."""


@dataclass(frozen=True, slots=True)
class PartitionReading:
    """A partition that is received. ``received_records`` and ``received_offsets`` include the topic's earlier
    incarnations, whose partitions are no longer received."""

    input_id: str
    topic: str
    partition: int
    failed: bool
    received_records: int
    received_offsets: int


@dataclass(slots=True)
class StreamReading:
    """A stream's numbers at ``now_ms`` of the ledger's clock.

    ``unfinished`` counts batches by state, ``unclaimed_times`` the batch times with blocks and no batch, each up to
    `MOST_COUNTED`. ``oldest_unfinished_ms`` is the first of these batch times and ``oldest_failures`` the number of
    failed attempts at it; both leave out batches that had completed before, or of before the stream began. ``totals``
    has the stream's totals under the output id "".
    """

    stream: StreamRow
    now_ms: int
    log_bytes: int = 0
    unclaimed_times: int = 0
    unfinished: dict[BatchState, int] = field(default_factory=dict)
    oldest_unfinished_ms: int | None = None
    oldest_failures: int = 0
    last_completed: BatchRow | None = None
    job: JobRow | None = None
    receivers: list[ReceiverRow] = field(default_factory=list)
    partitions: list[PartitionReading] = field(default_factory=list)
    totals: dict[str, dict[str, float]] = field(default_factory=lambda: defaultdict(dict))


class Readings(Repository):
    """Reads the numbers of all streams."""

    def all(self) -> list[StreamReading]:
        """Return a reading of each stream, by name, as of one moment."""
        with self._database.snapshot() as connection:
            now_ms = self._database.now_ms(connection)
            found = {
                row.name: StreamReading(StreamRow.from_row(row), now_ms)
                for row in connection.execute(select(streams).order_by(streams.c.name))
            }
            _read_batches(connection, found)
            _read_receiving(connection, found)
            for row in connection.execute(select(totals)):
                found[row.stream].totals[row.output_id][row.name] = row.value
            return list(found.values())


def _read_receiving(connection: Connection, found: Mapping[str, StreamReading]) -> None:
    epochs = {name: each.stream.job_epoch for name, each in found.items()}
    for row in _rows_of(connection, receiver_jobs, receiver_jobs.c.epoch, epochs):
        found[row.stream].job = JobRow.from_row(row)
    order = (receivers.c.stream, receivers.c.input_id, receivers.c.receiver_index)
    for row in connection.execute(select(receivers).order_by(*order)):
        found[row.stream].receivers.append(ReceiverRow.from_row(row))
    for stream, reading in _partitions(connection):
        found[stream].partitions.append(reading)


def _partitions(connection: Connection) -> Iterable[tuple[str, PartitionReading]]:
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
        yield row.stream, PartitionReading(row.input_id, row.topic, row.partition, bool(row.failed), *counted)


def _read_batches(connection: Connection, found: Mapping[str, StreamReading]) -> None:
    last: dict[str, int] = {}
    for row in connection.execute(_BATCHES):
        reading = found[row.name]
        reading.log_bytes = int(row.log_bytes)
        reading.unclaimed_times = row.unclaimed
        reading.unfinished = {state: getattr(row, f"count_{state}") for state in UNFINISHED}
        times = [row.first_unclaimed, *(getattr(row, f"first_{state}") for state in UNFINISHED)]
        reading.oldest_unfinished_ms = min((each for each in times if each is not None), default=None)
        if row.last_completed is not None:
            last[row.name] = row.last_completed
    for row in _rows_of(connection, batches, batches.c.batch_time_ms, last):
        found[row.stream].last_completed = BatchRow.from_row(row)
    _count_failures(connection, found)


def _count_failures(connection: Connection, found: Mapping[str, StreamReading]) -> None:
    """Count the failed attempts at the oldest unfinished batches."""
    oldest = {name: each.oldest_unfinished_ms for name, each in found.items() if each.oldest_unfinished_ms is not None}
    failed = (batch_attempts.c.state == AttemptState.FAILED, batch_attempts.c.target == "")
    for row in _rows_of(connection, batch_attempts, batch_attempts.c.batch_time_ms, oldest, *failed):
        found[row.stream].oldest_failures += 1


def _rows_of(
    connection: Connection, table: Any, column: Any, values: Mapping[str, int], *conditions: Any
) -> list[Row[Any]]:
    """Return the rows of each stream in which ``column`` has its value; both are the beginning of the primary key."""
    these = [and_(table.c.stream == stream, column == value) for stream, value in values.items()]
    return any_of(connection, select(table).where(*conditions), these)


def _batches_query() -> Any:
    """One row for each stream. Each column is the end of an index range, or counts up to `MOST_COUNTED` of its rows."""

    def edge(function: Any, table: Any, *conditions: Any) -> Any:
        return select(function(table.c.batch_time_ms)).where(table.c.stream == streams.c.name, *conditions)

    def counted(table: Any, *conditions: Any) -> Any:
        rows = select(literal(1)).where(table.c.stream == streams.c.name, *conditions).limit(MOST_COUNTED)
        return select(func.count()).select_from(rows.correlate(streams).subquery())

    columns = [
        stored_bytes_of(streams.c.name).label("log_bytes"),
        counted(unclaimed_times).scalar_subquery().label("unclaimed"),
        edge(func.min, unclaimed_times).scalar_subquery().label("first_unclaimed"),
        edge(func.max, batches, batches.c.state == BatchState.COMPLETED).scalar_subquery().label("last_completed"),
    ]
    # A batch of before the stream began, or that had completed and is run again, is not late by its time.
    due = (batches.c.batch_time_ms > streams.c.zero_time_ms, batches.c.steps.is_(None))
    for state in UNFINISHED:
        first = edge(func.min, batches, batches.c.state == state, *due)
        columns.append(first.scalar_subquery().label(f"first_{state}"))
        columns.append(counted(batches, batches.c.state == state).scalar_subquery().label(f"count_{state}"))
    return select(streams.c.name, *columns)


_BATCHES = _batches_query()
