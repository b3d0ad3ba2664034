"""Which outputs of a batch may hold documents of it already, from an attempt before this one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.indexing.errors import ForeignDocumentsError

if TYPE_CHECKING:
    from headrace.ledger import Ledger
    from headrace.ledger.rows import Attempt, BatchRow


def written_before(ledger: Ledger, batch: BatchRow, attempt: Attempt) -> frozenset[str]:
    """The outputs of ``attempt`` that an earlier attempt at the batch, or at the same replay of it, was at.

    An attempt that failed by the documents of others does not count: what it found is still not the batch's own. A
    batch that completed by an output counts, also where a recovered ledger has no attempts of it.
    """
    found: set[str] = set() if attempt.target else set(batch.steps or ())
    for row in ledger.batches.attempts(attempt.stream, attempt.batch_time_ms):
        earlier = row.number < attempt.number and row.target == attempt.target
        if earlier and ForeignDocumentsError.__name__ not in (row.error or ""):
            found.update(row.outputs)
    return frozenset(found.intersection(attempt.outputs))
