"""Assigns batch times to Airflow runs whose date does not determine one: of a coalescing stream, or without a date.

The assignment is stored, so all tasks of a run find the same batch, also after the run is cleared.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sqlalchemy import Connection, exists, func, insert, select, update

from headrace.ledger.batches.batch_states import (
    find_batch,
)
from headrace.ledger.batches.tables import (
    batch_attempts,
    batch_runs,
    batches,
)
from headrace.ledger.clock_corrections import CLOCK_SKEW_MS, take_back
from headrace.ledger.database import LockedStream, Repository
from headrace.ledger.receiving.tables import unclaimed_sums, unclaimed_times
from headrace.ledger.states import BatchState

CLOCKS_DIFFER_MS = 60_000
"""From this difference on, a clock of the two is wrong, and a run takes no time that is ahead of either."""
# The runs of a backfill for the times of one batch follow each other in shorter intervals than this.
_REPEAT_MS = 600_000


@dataclass(frozen=True, slots=True)
class BatchBounds:
    """The most that a batch takes over from unclaimed batch times. It always takes the first of them."""

    records: int
    payload_bytes: int
    times: int = 360
    """Each time has a row, and its blocks are in the manifest: an hour of 10 s intervals is about 20,000 blocks."""


class RunBatchTimes(Repository):
    """Assigns batch times to runs."""

    def assign(self, stream_name: str, run_id: str, *, host_ms: int | None = None) -> int:
        """Return the batch time of a run without date; repeated calls return the same.

        It is the earliest time that has ended and has blocks, no batch and no other run. If there is none, it is the
        end of the latest interval that has ended.

        Args:
            host_ms: as in `take`.

        Raises:
            StreamNotFoundError: there is no such stream.
        """
        with self._database.write_stream(stream_name) as (connection, stream_now):
            known = _known(connection, stream_name, run_id)
            if known is not None:
                return known
            locked = _on_time(connection, stream_now, host_ms)
            batch_time_ms = _unassigned(connection, locked)
            return _keep(connection, locked, run_id, _ended(locked) if batch_time_ms is None else batch_time_ms)

    def take(
        self,
        stream_name: str,
        run_id: str,
        *,
        bounds: BatchBounds,
        date_ms: int | None = None,
        keeps_date: bool = False,
        host_ms: int | None = None,
    ) -> int | None:
        """Return the batch time of a run that takes over all pending batch times; repeated calls return the same.

        It is the end of the latest interval that has ended: its batch takes over the earlier times. It is an earlier
        time if one batch cannot take so much (``bounds``), or if there is already a batch in between: a batch has one
        offset range in each partition. Returns None if nothing is left to run: batch times are sealed up to now. A run
        without date then gets the latest interval.

        Args:
            date_ms: the batch time of the run's date. It has ended by Airflow's clock, which may be ahead.
            keeps_date: use the batch of the run's date if it exists, because a person asked for it.
            host_ms: the time by the clock of the run's host, or by Airflow's if that is later. If it differs from the
                ledger's by `CLOCKS_DIFFER_MS` or more, the earlier one counts: a time that is allocated while the
                ledger's clock is ahead stays sealed, and holds up all records until then.

        Raises:
            StreamNotFoundError: there is no such stream.
        """
        if (before := self.find(stream_name, run_id)) is not None:
            return before
        with self._database.write_stream(stream_name) as (connection, stream_now):
            known = _known(connection, stream_name, run_id)
            if known is not None:
                return known
            locked = _on_time(connection, stream_now, host_ms)
            if keeps_date and date_ms is not None and find_batch(connection, stream_name, date_ms) is not None:
                return _keep(connection, locked, run_id, date_ms)
            until_ms = _ended(locked)
            if date_ms is not None and until_ms < date_ms <= locked.now_ms + CLOCK_SKEW_MS:
                until_ms = date_ms
            batch_time_ms = _pending(connection, locked, until_ms, bounds)
            if batch_time_ms is None:
                if date_ms is not None:
                    return None
                batch_time_ms = until_ms
            return _keep(connection, locked, run_id, batch_time_ms)

    def repeat(self, stream_name: str, run_id: str, batch_time_ms: int) -> str:
        """Return the run that repeats the batch, of those runs of a backfill that ask for it.

        It is the first one that asks. The others get its id until none has asked, and its attempts have ended, for 10
        minutes: a task does not know its backfill. If the run that repeats it asks again (it was cleared, or its task
        is retried), it repeats it.

        Raises:
            StreamNotFoundError: there is no such stream.
        """
        with self._database.write_stream(stream_name) as (connection, locked):
            query = select(batch_runs.c.run_id, batch_runs.c.at_ms).where(
                batch_runs.c.stream == stream_name, batch_runs.c.batch_time_ms == batch_time_ms, batch_runs.c.repeats
            )
            newest = connection.execute(query.order_by(batch_runs.c.at_ms.desc()).limit(1)).one_or_none()
            by = run_id
            if newest is not None:
                # The batch may take longer than the runs wait for each other.
                ran_ms = _ran_until(connection, stream_name, batch_time_ms, newest.run_id)
                # A later time is of a clock that was ahead.
                if locked.now_ms - _REPEAT_MS < max(newest.at_ms, ran_ms) <= locked.now_ms:
                    by = newest.run_id
            asked = update(batch_runs).where(batch_runs.c.stream == stream_name, batch_runs.c.run_id == by)
            values = {"batch_time_ms": batch_time_ms, "at_ms": locked.now_ms, "repeats": True}
            if not connection.execute(asked.values(values)).rowcount:
                connection.execute(insert(batch_runs).values(stream=stream_name, run_id=by, **values))
            return by

    def find(self, stream_name: str, run_id: str) -> int | None:
        """Return the batch time assigned to the run, or None."""
        with self._database.read() as connection:
            return _known(connection, stream_name, run_id)

    def of_batch(self, stream_name: str, batch_time_ms: int) -> list[str]:
        """Return the ids of the runs to which this batch time was assigned, the last one first."""
        query = select(batch_runs.c.run_id).where(
            batch_runs.c.stream == stream_name, batch_runs.c.batch_time_ms == batch_time_ms
        )
        with self._database.read() as connection:
            return list(connection.execute(query.order_by(batch_runs.c.at_ms.desc())).scalars())


def _known(connection: Connection, stream_name: str, run_id: str) -> int | None:
    query = select(batch_runs.c.batch_time_ms).where(batch_runs.c.stream == stream_name, batch_runs.c.run_id == run_id)
    return connection.execute(query).scalar_one_or_none()


def _ran_until(connection: Connection, stream_name: str, batch_time_ms: int, run_id: str) -> int:
    """Return when the run's last attempt at the batch ended, or was last heard of; 0 if it has made none."""
    attempts = batch_attempts.c
    last_ms = func.coalesce(attempts.ended_at_ms, attempts.heartbeat_ms)
    query = select(attempts.attributes, last_ms.label("at_ms")).where(
        attempts.stream == stream_name, attempts.batch_time_ms == batch_time_ms, attempts.target == ""
    )
    own = (row.at_ms for row in connection.execute(query) if row.attributes.get("run_id") == run_id)
    return max(own, default=0)


def _keep(connection: Connection, locked: LockedStream, run_id: str, batch_time_ms: int) -> int:
    row = {"stream": locked.row.name, "run_id": run_id, "batch_time_ms": batch_time_ms, "at_ms": locked.now_ms}
    connection.execute(insert(batch_runs).values(row))
    return batch_time_ms


def _on_time(connection: Connection, locked: LockedStream, host_ms: int | None) -> LockedStream:
    """The stream with the time that counts for a run, after a clock that was ahead is corrected."""
    locked, _ = take_back(connection, locked)
    if host_ms is None or abs(locked.now_ms - host_ms) < CLOCKS_DIFFER_MS:
        return locked
    return replace(locked, now_ms=min(locked.now_ms, host_ms))


def _ended(locked: LockedStream) -> int:
    interval_ms = locked.row.batch_interval_ms
    return locked.now_ms // interval_ms * interval_ms


def _unassigned(connection: Connection, locked: LockedStream) -> int | None:
    time = unclaimed_times.c.batch_time_ms
    query = select(time).where(
        unclaimed_times.c.stream == locked.row.name,
        time <= locked.now_ms,
        ~exists().where(batch_runs.c.stream == unclaimed_times.c.stream, batch_runs.c.batch_time_ms == time),
    )
    return connection.execute(query.order_by(time).limit(1)).scalar_one_or_none()


def _pending(connection: Connection, locked: LockedStream, until_ms: int, bounds: BatchBounds) -> int | None:
    """Return the batch time whose batch takes over the unclaimed times up to ``until_ms``, or as many as allowed."""
    stream = locked.row.name
    time = unclaimed_times.c.batch_time_ms
    query = unclaimed_sums(stream).where(time <= until_ms)
    unclaimed = connection.execute(query.order_by(time).limit(bounds.times + 1)).all()
    if not unclaimed:
        return until_ms if until_ms > locked.row.sealed_until_ms else None
    between = select(batches.c.batch_time_ms).where(
        batches.c.stream == stream,
        batches.c.batch_time_ms > unclaimed[0].batch_time_ms,
        batches.c.batch_time_ms <= until_ms,
        batches.c.state != BatchState.ABSORBED,
    )
    barrier_ms = connection.execute(between.order_by(batches.c.batch_time_ms).limit(1)).scalar_one_or_none()
    records = payload_bytes = taken = 0
    for row in unclaimed:
        records += row.records
        payload_bytes += row.payload_bytes
        beyond = records > bounds.records or payload_bytes > bounds.payload_bytes or taken == bounds.times
        if (taken and beyond) or (barrier_ms is not None and row.batch_time_ms > barrier_ms):
            break
        taken += 1
    if taken == len(unclaimed) and barrier_ms is None:
        return until_ms
    last_ms: int = unclaimed[taken - 1].batch_time_ms
    return last_ms
