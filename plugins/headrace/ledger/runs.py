"""Which batch a run of Airflow's is, where its date does not say: runs of streams that coalesce, and runs without date.

What a run is given is written down, so that all of its tasks, and the run when it is cleared, find the same batch.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, exists, insert, select

from headrace.ledger.allocations import CLOCK_SKEW_MS
from headrace.ledger.batch_rows import find_batch
from headrace.ledger.database import LockedStream, Role
from headrace.ledger.states import BatchState
from headrace.ledger.tables import batch_runs, batches, unclaimed_times


@dataclass(frozen=True, slots=True)
class BatchBounds:
    """What a batch takes of unclaimed batch times at most; the first of them it takes in any case."""

    records: int
    payload_bytes: int
    times: int = 360
    """Each time has its own row and its blocks a place in the manifest: an hour of 10 s is some 20,000 blocks."""


class Runs(Role):
    """Gives runs their batch times."""

    def assign(self, stream: str, run_id: str) -> int:
        """The batch time of a run without date, the same whenever the run asks: the earliest time that has ended, has
        blocks, no batch, and no other run. Where there is none, the end of the latest interval that has ended.

        Raises:
            StreamNotFoundError: there is no such stream.
        """
        with self._database.write_stream(stream) as (connection, locked):
            known = _known(connection, stream, run_id)
            if known is not None:
                return known
            batch_time_ms = _unassigned(connection, locked)
            return _keep(connection, locked, run_id, _ended(locked) if batch_time_ms is None else batch_time_ms)

    def take(
        self,
        stream: str,
        run_id: str,
        *,
        bounds: BatchBounds,
        date_ms: int | None = None,
        keeps_date: bool = False,
    ) -> int | None:
        """The batch time of a run that takes over all that nobody has run, the same whenever the run asks.

        That is the end of the latest interval that has ended: its batch takes the earlier times over. An earlier one
        where one batch cannot take so much, or where a batch between them is there already: the records of a batch are
        one range of offsets in each partition. None where nothing is left to run: a batch that is there, or its time,
        reaches up to now. A run without date is given the latest interval then.

        Args:
            date_ms: the batch time by the run's date. By Airflow's clock it has ended, which may be ahead.
            keeps_date: whether the run is about the batch of its date if there is one: somebody asked for it.

        Raises:
            StreamNotFoundError: there is no such stream.
        """
        if (before := self.find(stream, run_id)) is not None:
            return before
        with self._database.write_stream(stream) as (connection, locked):
            known = _known(connection, stream, run_id)
            if known is not None:
                return known
            if keeps_date and date_ms is not None and find_batch(connection, stream, date_ms) is not None:
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

    def find(self, stream: str, run_id: str) -> int | None:
        """The batch time that the run was given, if it was."""
        with self._database.read() as connection:
            return _known(connection, stream, run_id)

    def newest(self, stream: str, limit: int = 1_000) -> dict[str, int]:
        """The batch times of runs, of the ``limit`` latest of these."""
        query = (
            select(batch_runs.c.run_id, batch_runs.c.batch_time_ms)
            .where(batch_runs.c.stream == stream)
            .order_by(batch_runs.c.batch_time_ms.desc())
            .limit(limit)
        )
        with self._database.read() as connection:
            return {row.run_id: row.batch_time_ms for row in connection.execute(query)}


def _known(connection: Connection, stream: str, run_id: str) -> int | None:
    query = select(batch_runs.c.batch_time_ms).where(batch_runs.c.stream == stream, batch_runs.c.run_id == run_id)
    return connection.execute(query).scalar_one_or_none()


def _keep(connection: Connection, locked: LockedStream, run_id: str, batch_time_ms: int) -> int:
    row = {"stream": locked.row.name, "run_id": run_id, "batch_time_ms": batch_time_ms, "at_ms": locked.now_ms}
    connection.execute(insert(batch_runs).values(row))
    return batch_time_ms


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
    """The batch time whose batch takes over what is unclaimed up to ``until_ms``, or as much of it as it may."""
    stream = locked.row.name
    time = unclaimed_times.c.batch_time_ms
    query = select(unclaimed_times).where(unclaimed_times.c.stream == stream, time <= until_ms)
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
