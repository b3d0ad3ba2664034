"""What result files and checkpoints hold (``headrace.batch.results``, ``headrace.batch.checkpoint``).

Each change of a batch increments `BatchRow.change`. A result file is named by the change that it holds, so of two files
of one batch the higher one counts, in whatever order they were written.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import and_, case, exists, select, update

from headrace.ledger.batches.batch_states import wrote_output
from headrace.ledger.batches.tables import (
    BatchRow,
    FiledReplay,
    ReplayDefinitionRow,
    ReplayRow,
    batch_attempts,
    batch_outputs,
    batch_runs,
    batches,
    replay_definitions,
    replays,
)
from headrace.ledger.database import Repository, chunks
from headrace.ledger.receiving.tables import MovedBlock, blocks, segments, unclaimed_times
from headrace.ledger.states import AttemptState, BatchState
from headrace.ledger.tables import streams

LAST_MS = 2**63 - 1
"""No batch time is later."""


class Results(Repository):
    """Finds the batches whose result files are behind, and what result files and checkpoints hold."""

    def behind(
        self, stream_name: str, limit: int = 500, *, after_ms: int = 0, until_ms: int = LAST_MS
    ) -> list[BatchRow]:
        """Return batches of the times ``(after_ms, until_ms]`` that have changed since their result files were written,
        the oldest first.

        A batch that was never run to an end, and whose attempt is still to begin or to end, needs none: its manifest
        holds all that is known of it.
        """
        unended = and_(batches.c.result == 0, batches.c.state.in_((BatchState.ALLOCATED, BatchState.RUNNING)))
        query = select(batches).where(
            batches.c.stream == stream_name,
            batches.c.result < batches.c.change,
            batches.c.batch_time_ms > after_ms,
            batches.c.batch_time_ms <= until_ms,
            ~unended,
        )
        return self._rows(BatchRow, query.order_by(batches.c.batch_time_ms).limit(limit))

    def written(self, stream_name: str) -> dict[int, int]:
        """Return the change that the result file of each batch holds, by batch time; those without a file are left
        out."""
        query = select(batches.c.batch_time_ms, batches.c.result).where(
            batches.c.stream == stream_name, batches.c.result > 0
        )
        with self._database.read() as connection:
            return {row.batch_time_ms: row.result for row in connection.execute(query)}

    def forget(self, stream_name: str, times: Collection[int]) -> None:
        """Note that the result files of these batches are lost: they are written again."""
        with self._database.write_stream(stream_name) as (connection, _):
            for part in chunks(list(times)):
                connection.execute(
                    update(batches)
                    .where(batches.c.stream == stream_name, batches.c.batch_time_ms.in_(part))
                    .values(result=0, change=batches.c.change + 1)
                )

    def runs_of(self, stream_name: str, times: Sequence[int]) -> dict[int, list[str]]:
        """Return the runs to which these batch times were assigned."""
        by_time: dict[int, list[str]] = {time_ms: [] for time_ms in times}
        with self._database.read() as connection:
            for part in chunks(times):
                query = select(batch_runs).where(
                    batch_runs.c.stream == stream_name, batch_runs.c.batch_time_ms.in_(part)
                )
                for row in connection.execute(query.order_by(batch_runs.c.run_id)):
                    by_time[row.batch_time_ms].append(row.run_id)
        return by_time

    def open_runs(self, stream_name: str) -> dict[str, int]:
        """Return the batch times of the runs whose batches have no result file, by run id."""
        has_result = exists().where(
            batches.c.stream == batch_runs.c.stream,
            batches.c.batch_time_ms == batch_runs.c.batch_time_ms,
            batches.c.result > 0,
        )
        query = select(batch_runs.c.run_id, batch_runs.c.batch_time_ms).where(
            batch_runs.c.stream == stream_name, ~has_result
        )
        with self._database.read() as connection:
            return {row.run_id: row.batch_time_ms for row in connection.execute(query)}

    def open_segments(self, stream_name: str, limit: int = 10_000) -> dict[str, int | None] | None:
        """Return the segments that are being written or hold a block without a batch, each with the latest batch time
        of its blocks; None if it is being written. None instead if they are more than ``limit``."""
        table = segments.c
        present = select(table.path, table.last_batch_time_ms).where(
            table.stream == stream_name, table.removing_at_ms.is_(None)
        )
        waiting = (
            select(blocks.c.segment_id)
            .join(
                unclaimed_times,
                and_(
                    unclaimed_times.c.stream == blocks.c.stream,
                    unclaimed_times.c.batch_time_ms == blocks.c.batch_time_ms,
                ),
            )
            .where(unclaimed_times.c.stream == stream_name)
        )
        queries = (present.where(table.closed_at_ms.is_(None)), present.where(table.segment_id.in_(waiting)))
        with self._database.read() as connection:
            rows = [row for query in queries for row in connection.execute(query.limit(limit + 1))]
        return {row.path: row.last_batch_time_ms for row in rows} if len(rows) <= limit else None

    def replays_of(self, stream_name: str, times: Sequence[int]) -> dict[int, list[FiledReplay]]:
        """Return the states of these batches in replays, by batch time, with the counts of their recorded outputs."""
        by_time: dict[int, list[FiledReplay]] = {time_ms: [] for time_ms in times}
        with self._database.read() as connection:
            for part in chunks(times):
                counts: dict[tuple[int, str, int], dict[str, Any]] = {}
                query = (
                    select(batch_outputs, batch_attempts.c.replay_revision)
                    .join(batch_attempts, wrote_output())
                    .where(
                        batch_outputs.c.stream == stream_name,
                        batch_outputs.c.batch_time_ms.in_(part),
                        batch_outputs.c.target != "",
                    )
                )
                for row in connection.execute(query.order_by(batch_outputs.c.attempt)):
                    recorded = counts.setdefault((row.batch_time_ms, row.target, row.replay_revision), {})
                    recorded.pop(row.output_id, None)
                    if row.state is AttemptState.COMPLETED:
                        recorded[row.output_id] = row.counts
                if not counts:
                    continue
                # By target: in the index it comes before the batch time.
                targets = sorted({target for _, target, _ in counts})
                of_times = select(replays).where(
                    replays.c.stream == stream_name, replays.c.target.in_(targets), replays.c.batch_time_ms.in_(part)
                )
                for row in connection.execute(of_times.order_by(replays.c.batch_time_ms, replays.c.target)):
                    replay = ReplayRow.from_row(row)
                    key = (replay.batch_time_ms, replay.target, replay.revision)
                    by_time[replay.batch_time_ms].append(FiledReplay.of(replay, counts.get(key, {})))
        return by_time

    def moved(self, stream_name: str) -> list[MovedBlock]:
        """Return the unclaimed blocks whose batch time is later than that of their cut or event time.

        Their own batch time was already sealed when they were added. They are few, and the log does not record this.
        """
        event = blocks.c.event_time_ms
        first = case((event < blocks.c.cut_time_ms, event), else_=blocks.c.cut_time_ms)
        interval = streams.c.batch_interval_ms
        unclaimed = select(unclaimed_times.c.batch_time_ms).where(unclaimed_times.c.stream == stream_name)
        query = (
            select(blocks)
            .join(streams, streams.c.name == blocks.c.stream)
            .where(
                blocks.c.stream == stream_name,
                blocks.c.batch_time_ms.in_(unclaimed),
                blocks.c.batch_time_ms > (first // interval + 1) * interval,
            )
        )
        with self._database.read() as connection:
            return [
                MovedBlock(row.input_id, row.receiver_index, row.epoch, row.sequence, row.batch_time_ms)
                for row in connection.execute(query.order_by(blocks.c.block_id))
            ]

    def replay_definitions(self, stream_name: str) -> list[ReplayDefinitionRow]:
        """Return every definition with which a replay of the stream was begun."""
        query = select(replay_definitions).where(replay_definitions.c.stream == stream_name)
        order = (replay_definitions.c.target, replay_definitions.c.revision)
        return self._rows(ReplayDefinitionRow, query.order_by(*order))
