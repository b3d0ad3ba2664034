"""Which batch a run of Airflow's is, when its data interval does not say: manual and asset-triggered runs."""

from __future__ import annotations

from sqlalchemy import Connection, exists, insert, select

from headrace.ledger.database import LockedStream, Role
from headrace.ledger.tables import batch_runs, unclaimed_times


class Runs(Role):
    """Gives runs their batch times."""

    def assign(self, stream: str, run_id: str, *, coalesces: bool) -> int:
        """The batch time of this run, the same whenever the run asks.

        The earliest time that has ended, has blocks, no batch, and no other run; where batches coalesce, the latest
        one, which takes the earlier ones over. Where there is none, the end of the latest interval that has ended.

        Raises:
            StreamNotFoundError: there is no such stream.
        """
        with self._database.write_stream(stream) as (connection, locked):
            known = select(batch_runs.c.batch_time_ms).where(
                batch_runs.c.stream == stream, batch_runs.c.run_id == run_id
            )
            assigned: int | None = connection.execute(known).scalar_one_or_none()
            if assigned is not None:
                return assigned
            batch_time_ms = _unassigned(connection, locked, latest=coalesces)
            if batch_time_ms is None:
                interval_ms = locked.row.batch_interval_ms
                batch_time_ms = locked.now_ms // interval_ms * interval_ms
            connection.execute(
                insert(batch_runs).values(
                    stream=stream, run_id=run_id, batch_time_ms=batch_time_ms, at_ms=locked.now_ms
                )
            )
            return batch_time_ms

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


def _unassigned(connection: Connection, locked: LockedStream, *, latest: bool) -> int | None:
    time = unclaimed_times.c.batch_time_ms
    query = select(time).where(
        unclaimed_times.c.stream == locked.row.name,
        time <= locked.now_ms,
        ~exists().where(batch_runs.c.stream == unclaimed_times.c.stream, batch_runs.c.batch_time_ms == time),
    )
    return connection.execute(query.order_by(time.desc() if latest else time).limit(1)).scalar_one_or_none()
