"""Finds the outputs to which earlier attempts at a batch may have written."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.ledger.states import EventKind

if TYPE_CHECKING:
    from headrace.ledger import Ledger
    from headrace.ledger.models import Attempt, AttemptRow, BatchRow
    from headrace.stream import Stream

WRITTEN = "written"
"""The attribute of a failed attempt with the names of the outputs that may hold its documents. Outputs that it did not
begin are not included, nor those that failed because of another source's documents: the conflicting documents are not
the batch's own. An attempt without this attribute succeeded, was killed or never reported; it may have written to all
of its outputs."""


def written_before(ledger: Ledger, stream: Stream, batch: BatchRow, attempt: Attempt) -> frozenset[str]:
    """The outputs of ``attempt`` whose documents of this batch an earlier attempt may have written.

    Only attempts at the same output of the batch, or of the same replay, count. All outputs are returned in two cases:
    a rebuilt ledger lacks the attempts at batches from before; and a batch that was built from Kafka by timestamps may
    have late records that a later batch wrote. An output with a window is always included, because it writes the
    records of one batch in several batches.
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
    """The outputs of ``attempt`` for which an earlier attempt may have written dead letters."""
    return frozenset(attempt.outputs).intersection(name for row in _earlier(ledger, attempt) for name in row.outputs)


def _earlier(ledger: Ledger, attempt: Attempt) -> list[AttemptRow]:
    rows = ledger.attempts.of_batch(attempt.stream, attempt.batch_time_ms)
    return [row for row in rows if row.number < attempt.number and row.target == attempt.target]
