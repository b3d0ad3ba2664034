"""The ledger's API for batches: look-ups here; allocating, running and ending them in the base classes."""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy import select

from headrace.blocks import TopicPartition
from headrace.ledger.allocations import BatchAllocations
from headrace.ledger.attempts import BatchAttempts
from headrace.ledger.batch_ordering import BatchOrdering
from headrace.ledger.batch_origins import BatchOrigins
from headrace.ledger.batch_rows import find_batch
from headrace.ledger.codec import partition_key
from headrace.ledger.endings import BatchEndings
from headrace.ledger.errors import BatchNotFoundError
from headrace.ledger.models import BatchInputRow, BatchRow, batch_inputs, batches, unclaimed_times
from headrace.ledger.replays import BatchReplays
from headrace.ledger.states import BatchState
from headrace.ledger.written_outputs import WrittenOutputs


class Batches(BatchAllocations, BatchAttempts, BatchEndings, BatchReplays, BatchOrigins, BatchOrdering, WrittenOutputs):
    """Everything about batches: `seal`, `allocate`, `begin_attempt`, `complete_attempt`, … and these look-ups."""

    def get(self, stream: str, batch_time_ms: int) -> BatchRow:
        """Return the batch's row.

        Raises:
            BatchNotFoundError: it was not allocated.
        """
        batch = self.find(stream, batch_time_ms)
        if batch is None:
            raise BatchNotFoundError(stream, batch_time_ms)
        return batch

    def find(self, stream: str, batch_time_ms: int) -> BatchRow | None:
        """Return the batch's row, or None if it was not allocated."""
        with self._database.read() as connection:
            return find_batch(connection, stream, batch_time_ms)

    def page(
        self,
        stream: str,
        limit: int = 100,
        states: Iterable[BatchState | str] | None = None,
        *,
        before_ms: int | None = None,
        oldest_first: bool = False,
    ) -> list[BatchRow]:
        """Return up to ``limit`` batches with times below ``before_ms``, newest first or oldest first."""
        order = batches.c.batch_time_ms.asc() if oldest_first else batches.c.batch_time_ms.desc()
        query = select(batches).where(batches.c.stream == stream)
        if before_ms is not None:
            query = query.where(batches.c.batch_time_ms < before_ms)
        # One query per state uses the index; one query for all states would read and sort all their rows.
        parts = [query] if states is None else [query.where(batches.c.state == BatchState(state)) for state in states]
        rows: list[BatchRow] = []
        with self._database.read() as connection:
            for part in parts:
                rows += [BatchRow.from_row(row) for row in connection.execute(part.order_by(order).limit(limit))]
        return sorted(rows, key=lambda row: row.batch_time_ms, reverse=not oldest_first)[:limit]

    def uncleaned(self, stream: str, limit: int | None = None) -> list[BatchRow]:
        """Return the oldest ``limit`` batches that may still have blocks in the log; None means all."""
        query = select(batches).where(batches.c.stream == stream, batches.c.cleaned_at_ms.is_(None))
        with self._database.read() as connection:
            return [
                BatchRow.from_row(row)
                for row in connection.execute(query.order_by(batches.c.batch_time_ms).limit(limit))
            ]

    def inputs(self, stream: str, batch_time_ms: int) -> list[BatchInputRow]:
        """Return the batch's offset range of every partition. They stay when its blocks are deleted."""
        query = select(batch_inputs).where(
            batch_inputs.c.stream == stream, batch_inputs.c.batch_time_ms == batch_time_ms
        )
        order = (batch_inputs.c.input_id, batch_inputs.c.topic, batch_inputs.c.incarnation, batch_inputs.c.partition)
        with self._database.read() as connection:
            return [BatchInputRow.from_row(row) for row in connection.execute(query.order_by(*order))]

    def containing(self, stream: str, input_id: str, partition: TopicPartition, offset: int) -> BatchInputRow | None:
        """Return the batch input whose range holds the offset, or None."""
        query = select(batch_inputs).where(
            batch_inputs.c.stream == stream,
            batch_inputs.c.input_id == input_id,
            *(batch_inputs.c[name] == value for name, value in partition_key(partition).items()),
            batch_inputs.c.until_offset > offset,
        )
        with self._database.read() as connection:
            row = connection.execute(query.order_by(batch_inputs.c.until_offset).limit(1)).one_or_none()
        return BatchInputRow.from_row(row) if row is not None and row.from_offset <= offset else None

    def next_unclaimed(self, stream: str, *, after_ms: int = 0) -> int | None:
        """Return the earliest batch time after ``after_ms`` that has blocks and no batch, or None."""
        query = select(unclaimed_times.c.batch_time_ms).where(
            unclaimed_times.c.stream == stream, unclaimed_times.c.batch_time_ms > after_ms
        )
        with self._database.read() as connection:
            return connection.execute(query.order_by(unclaimed_times.c.batch_time_ms).limit(1)).scalar_one_or_none()

    def absorbable(self, stream: str, batch_time_ms: int) -> list[int]:
        """Return the batch times between the previous batch and this one that have blocks and no batch, oldest first.

        Earlier times are left out: with them the batch would have more than one offset range in a partition.
        """
        before = select(batches.c.batch_time_ms).where(
            batches.c.stream == stream, batches.c.batch_time_ms < batch_time_ms, batches.c.state != BatchState.ABSORBED
        )
        newest_first = before.order_by(batches.c.batch_time_ms.desc())
        time = unclaimed_times.c.batch_time_ms
        with self._database.read() as connection:
            after_ms = connection.execute(newest_first.limit(1)).scalar_one_or_none() or 0
            query = select(time).where(unclaimed_times.c.stream == stream, time > after_ms, time < batch_time_ms)
            return list(connection.execute(query.order_by(time)).scalars())
