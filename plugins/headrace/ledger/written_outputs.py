"""Finds the batches that were written to one output of the stream or of a replay."""

from __future__ import annotations

from sqlalchemy import and_, or_, select

from headrace.ledger.attempt_statements import wrote_output
from headrace.ledger.database import Role
from headrace.ledger.models import batch_attempts, batch_outputs, batches, replay_definitions
from headrace.ledger.states import AttemptState, BatchState


class WrittenOutputs(Role):
    """Finds the batches that an output holds."""

    def written(self, stream: str, output: str, from_ms: int, until_ms: int) -> dict[int, BatchState]:
        """Return the states of the batches of times ``[from_ms, until_ms)`` that the output holds, oldest first.

        These are the completed batches, and batches in any other state for which the output was ever recorded: for
        example, another output failed, or they are being run again, or were abandoned.
        """
        recorded = batch_outputs.c.batch_time_ms.is_not(None)
        of_output = and_(
            batch_outputs.c.stream == batches.c.stream,
            batch_outputs.c.batch_time_ms == batches.c.batch_time_ms,
            batch_outputs.c.output_id == output,
            batch_outputs.c.target == "",
            batch_outputs.c.state == AttemptState.COMPLETED,
        )
        query = (
            select(batches.c.batch_time_ms, batches.c.state)
            .select_from(batches.outerjoin(batch_outputs, of_output))
            .where(
                batches.c.stream == stream,
                batches.c.batch_time_ms >= from_ms,
                batches.c.batch_time_ms < until_ms,
                or_(batches.c.state == BatchState.COMPLETED, recorded),
            )
            .order_by(batches.c.batch_time_ms)
        )
        with self._database.read() as connection:
            return {row.batch_time_ms: row.state for row in connection.execute(query)}

    def replayed_by(self, stream: str, target: str, output: str, from_ms: int, until_ms: int) -> dict[int, str]:
        """Return the replay's definition that last wrote the output, for each batch time of ``[from_ms, until_ms)``."""
        query = (
            select(batch_outputs.c.batch_time_ms, batch_attempts.c.replay_revision)
            .join(batch_attempts, wrote_output())
            .where(
                batch_outputs.c.stream == stream,
                batch_outputs.c.batch_time_ms >= from_ms,
                batch_outputs.c.batch_time_ms < until_ms,
                batch_outputs.c.target == target,
                batch_outputs.c.output_id == output,
                batch_outputs.c.state == AttemptState.COMPLETED,
            )
            .order_by(batch_outputs.c.batch_time_ms, batch_outputs.c.attempt)
        )
        named = select(replay_definitions.c.revision, replay_definitions.c.definition).where(
            replay_definitions.c.stream == stream, replay_definitions.c.target == target
        )
        with self._database.read() as connection:
            definitions = {row.revision: row.definition for row in connection.execute(named)}
            found = {row.batch_time_ms: row.replay_revision for row in connection.execute(query)}
        return {batch_time_ms: definitions[revision] for batch_time_ms, revision in found.items()}
