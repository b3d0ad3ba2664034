"""Which outputs of a batch may hold something of it already, from an attempt before this one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.ledger.states import EventKind

if TYPE_CHECKING:
    from headrace.ledger import Ledger
    from headrace.ledger.rows import Attempt, AttemptRow, BatchRow
    from headrace.stream import Stream

WRITTEN = "written"
"""The attribute of a failed attempt that names the outputs which may hold documents of it. Those that it did not begin
are not among them, nor those that failed by documents of others: what it found is still not the batch's own. An attempt
without it succeeded, was killed or never reported, and may have written to all of them."""


def written_before(ledger: Ledger, stream: Stream, batch: BatchRow, attempt: Attempt) -> frozenset[str]:
    """The outputs of ``attempt`` whose documents of this batch an earlier attempt may have written.

    That is an attempt at the same output of the batch, or of the same replay of it. Where the ledger was rebuilt, it
    has no attempts of the batches from before. An output with a window writes the records of one batch in several, and
    a batch that was built from Kafka by timestamps may have records that came too late for it, which a later batch
    wrote.
    """
    found = {output.id for output in stream.outputs if output.window is not None}
    for row in _earlier(ledger, attempt):
        found.update(row.attributes.get(WRITTEN, row.outputs))
    asked = frozenset(attempt.outputs)
    if batch.built:
        return asked
    if not attempt.target and not found.issuperset(asked):
        rebuilt = ledger.events.latest(attempt.stream, [EventKind.LEDGER_REBUILT], limit=1)
        if rebuilt and batch.allocated_at_ms <= rebuilt[0].at_ms:
            return asked
    return asked.intersection(found)


def tried_before(ledger: Ledger, attempt: Attempt) -> frozenset[str]:
    """The outputs of ``attempt`` for which an earlier attempt may have left dead letters."""
    return frozenset(attempt.outputs).intersection(name for row in _earlier(ledger, attempt) for name in row.outputs)


def _earlier(ledger: Ledger, attempt: Attempt) -> list[AttemptRow]:
    rows = ledger.batches.attempts(attempt.stream, attempt.batch_time_ms)
    return [row for row in rows if row.number < attempt.number and row.target == attempt.target]
