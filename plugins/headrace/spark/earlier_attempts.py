"""Which outputs of a batch may hold documents of it already, from an attempt before this one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.indexing.errors import ForeignDocumentsError
from headrace.ledger.states import EventKind

if TYPE_CHECKING:
    from headrace.ledger import Ledger
    from headrace.ledger.rows import Attempt, BatchRow
    from headrace.stream import Stream


def written_before(ledger: Ledger, stream: Stream, batch: BatchRow, attempt: Attempt) -> frozenset[str]:
    """The outputs of ``attempt`` whose documents of this batch an earlier attempt may have written.

    That is an attempt at the same output of the batch, or of the same replay of it; but none that failed by the
    documents of others: what it found is still not the batch's own. Where the ledger was rebuilt, it has no attempts
    of the batches from before. An output with a window writes the records of one batch in several, and a batch that was
    built from Kafka by timestamps may have records that came too late for it, which a later batch wrote.
    """
    found = {output.id for output in stream.outputs if output.window is not None}
    for row in ledger.batches.attempts(attempt.stream, attempt.batch_time_ms):
        earlier = row.number < attempt.number and row.target == attempt.target
        if earlier and ForeignDocumentsError.__name__ not in (row.error or ""):
            found.update(row.outputs)
    asked = frozenset(attempt.outputs)
    if batch.built:
        return asked
    if not attempt.target and not found.issuperset(asked):
        rebuilt = ledger.events.latest(attempt.stream, [EventKind.LEDGER_REBUILT], limit=1)
        if rebuilt and batch.allocated_at_ms <= rebuilt[0].at_ms:
            return asked
    return asked.intersection(found)
