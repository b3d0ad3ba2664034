"""Keeps the history of what the receiver jobs see: lag, rate, queues, size of the log. One short row each ten seconds.

A sample is an observation, not a fact that anything rests on. A rebuilt ledger begins without samples.
"""

from __future__ import annotations

from sqlalchemy import case, delete, func, insert, select

from headrace.ledger.database import Repository
from headrace.ledger.tables import SampleRow, samples


class Samples(Repository):
    """The samples of streams, by time."""

    def add(self, sample: SampleRow) -> None:
        """Add a sample without the stream's lock; a second one of the same moment is ignored."""
        with self._database.write() as connection:
            at = (samples.c.stream == sample.stream, samples.c.at_ms == sample.at_ms)
            if connection.execute(select(samples.c.at_ms).where(*at)).first() is None:
                connection.execute(insert(samples).values(**sample.to_columns()))

    def latest(self, stream: str, limit: int = 30) -> list[SampleRow]:
        """Return the newest samples, oldest first."""
        query = select(samples).where(samples.c.stream == stream).order_by(samples.c.at_ms.desc()).limit(limit)
        with self._database.read() as connection:
            return [SampleRow.from_row(row) for row in connection.execute(query)][::-1]

    def between(self, stream: str, from_ms: int, until_ms: int, *, points: int) -> list[SampleRow]:
        """Return samples of ``[from_ms, until_ms)``, oldest first, at most ``points``.

        If there are more, the range is cut into equal parts, each with one sample: the mean rate and the largest other
        values of the part, at the time of its last sample.
        """
        of_range = (samples.c.stream == stream, samples.c.at_ms >= from_ms, samples.c.at_ms < until_ms)
        query = select(samples).where(*of_range).order_by(samples.c.at_ms)
        with self._database.read() as connection:
            rows = connection.execute(query.limit(points + 1)).all()
            if len(rows) <= points:
                return [SampleRow.from_row(row) for row in rows]
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
                SampleRow(**{**row._asdict(), "stream": stream, "paused": bool(row.paused)})
                for row in connection.execute(thinned)
            ]

    def prune(self, stream: str, before_ms: int, limit: int = 5000) -> int:
        """Delete up to ``limit`` of the oldest samples before ``before_ms``. Returns the number deleted."""
        oldest = select(samples.c.at_ms).where(samples.c.stream == stream, samples.c.at_ms < before_ms)
        with self._database.write() as connection:
            times = connection.execute(oldest.order_by(samples.c.at_ms).limit(limit)).scalars().all()
            if times:
                connection.execute(delete(samples).where(samples.c.stream == stream, samples.c.at_ms <= times[-1]))
            return len(times)


_LARGEST = ("lag", "lag_seconds", "queue_bytes", "log_bytes")
