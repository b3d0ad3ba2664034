"""Tracks which batches are in the files of the stream's history, so that a checkpoint need not hold them all.

Filing takes two transactions, since no lock is held while a file is written. The first marks the batches; a change of a
batch removes its mark, so that the second leaves it out.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import ColumnElement, and_, case, exists, func, or_, select, update

from headrace.ledger.batch_states import wrote_output
from headrace.ledger.batch_tables import (
    BatchRow,
    FiledReplay,
    ReplayDefinitionRow,
    ReplayRow,
    batch_attempts,
    batch_outputs,
    batches,
    replay_definitions,
    replays,
)
from headrace.ledger.database import Repository, chunks
from headrace.ledger.receiving_tables import MovedBlock, blocks, unclaimed_times
from headrace.ledger.states import UNFINISHED, AttemptState, BatchState
from headrace.ledger.tables import streams


def _settled(now_ms: int) -> ColumnElement[bool]:
    """Whether a batch may be filed: completed and checkpointed, abandoned or absorbed; or repeated without success.

    A repetition of a batch whose log was deleted reads Kafka, which may have deleted the records too. Then the batch
    can neither complete again nor be abandoned, and must not stop the removal of later ones. A live attempt may still
    complete it.
    """
    live = exists().where(
        batch_attempts.c.stream == batches.c.stream,
        batch_attempts.c.batch_time_ms == batches.c.batch_time_ms,
        batch_attempts.c.state == AttemptState.RUNNING,
        batch_attempts.c.lease_until_ms > now_ms,
    )
    checkpointed = batches.c.checkpointed_at_ms.is_not(None)
    return or_(
        and_(batches.c.state == BatchState.COMPLETED, checkpointed),
        batches.c.state.in_((BatchState.ABANDONED, BatchState.ABSORBED)),
        and_(
            batches.c.state.in_(UNFINISHED),
            batches.c.steps.is_not(None),
            checkpointed,
            batches.c.cleaned_at_ms.is_not(None),
            ~live,
        ),
    )


class History(Repository):
    """Finds what a checkpoint must hold, and records which batches are filed."""

    def unfiled(self, stream: str) -> list[BatchRow]:
        """Return the batches that no history file holds in their present state, oldest first."""
        query = select(batches).where(batches.c.stream == stream, batches.c.history <= 0)
        return self._rows(BatchRow, query.order_by(batches.c.batch_time_ms))

    def begin_filing(self, stream: str, count: int, *, after: int = 0) -> tuple[int, list[BatchRow]] | None:
        """Mark the oldest ``count`` unfiled batches that are settled (see `_settled`).

        Returns the number of the file to write and the batches; None while there are fewer. The number is the ledger's
        time, above ``after``, and not below the stream's ``history_from``: a rebuild ignores files with lower numbers.
        """
        with self._database.write_stream(stream) as (connection, locked):
            query = select(batches).where(batches.c.stream == stream, batches.c.history <= 0, _settled(locked.now_ms))
            rows = connection.execute(query.order_by(batches.c.batch_time_ms).limit(count)).all()
            if len(rows) < count:
                return None
            # The clock may have been ahead when ``history_from`` was noted.
            number = max(locked.now_ms, after + 1, locked.row.history_from)
            for part in chunks([row.batch_time_ms for row in rows]):
                connection.execute(
                    update(batches)
                    .where(batches.c.stream == stream, batches.c.batch_time_ms.in_(part))
                    .values(history=-number)
                )
            return number, [BatchRow.from_row(row) for row in rows]

    def end_filing(self, stream: str, number: int) -> None:
        """Note that the file is durable. The batches that have not changed since they were marked are filed now."""
        with self._database.write_stream(stream) as (connection, _):
            connection.execute(
                update(batches).where(batches.c.stream == stream, batches.c.history == -number).values(history=number)
            )

    def filed_elsewhere(self, stream: str, kept: Collection[int]) -> int:
        """Return how many batches are in history files other than ``kept``."""
        query = select(func.count()).where(
            batches.c.stream == stream, batches.c.history > 0, batches.c.history.not_in(list(kept))
        )
        with self._database.read() as connection:
            return int(connection.execute(query).scalar_one())

    def forget(self, stream: str, kept: Collection[int]) -> int:
        """Mark the batches of all files except ``kept`` as unfiled: those files are gone. Returns their number."""
        with self._database.write_stream(stream) as (connection, _):
            return connection.execute(
                update(batches)
                .where(batches.c.stream == stream, batches.c.history > 0, batches.c.history.not_in(list(kept)))
                .values(history=0)
            ).rowcount

    def replays_of(self, stream: str, times: Sequence[int]) -> dict[int, list[FiledReplay]]:
        """Return the states of these batches in replays, by batch time, with the counts of their recorded outputs."""
        by_time: dict[int, list[FiledReplay]] = {time_ms: [] for time_ms in times}
        with self._database.read() as connection:
            for part in chunks(times):
                counts: dict[tuple[int, str, int], dict[str, Any]] = {}
                query = (
                    select(batch_outputs, batch_attempts.c.replay_revision)
                    .join(batch_attempts, wrote_output())
                    .where(
                        batch_outputs.c.stream == stream,
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
                    replays.c.stream == stream, replays.c.target.in_(targets), replays.c.batch_time_ms.in_(part)
                )
                for row in connection.execute(of_times.order_by(replays.c.batch_time_ms, replays.c.target)):
                    replay = ReplayRow.from_row(row)
                    key = (replay.batch_time_ms, replay.target, replay.revision)
                    by_time[replay.batch_time_ms].append(FiledReplay.of(replay, counts.get(key, {})))
        return by_time

    def moved(self, stream: str) -> list[MovedBlock]:
        """Return the unclaimed blocks whose batch time is later than that of their cut or event time.

        Their own batch time was already sealed when they were added. They are few, and the log does not record this.
        """
        event = blocks.c.event_time_ms
        first = case((event < blocks.c.cut_time_ms, event), else_=blocks.c.cut_time_ms)
        interval = streams.c.batch_interval_ms
        unclaimed = select(unclaimed_times.c.batch_time_ms).where(unclaimed_times.c.stream == stream)
        query = (
            select(blocks)
            .join(streams, streams.c.name == blocks.c.stream)
            .where(
                blocks.c.stream == stream,
                blocks.c.batch_time_ms.in_(unclaimed),
                blocks.c.batch_time_ms > (first // interval + 1) * interval,
            )
        )
        with self._database.read() as connection:
            return [
                MovedBlock(row.input_id, row.receiver_index, row.epoch, row.sequence, row.batch_time_ms)
                for row in connection.execute(query.order_by(blocks.c.block_id))
            ]

    def replay_definitions(self, stream: str) -> list[ReplayDefinitionRow]:
        """Return every definition with which a replay of the stream was begun."""
        query = select(replay_definitions).where(replay_definitions.c.stream == stream)
        order = (replay_definitions.c.target, replay_definitions.c.revision)
        return self._rows(ReplayDefinitionRow, query.order_by(*order))
