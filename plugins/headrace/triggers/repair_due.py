"""The trigger that starts a stream's repair when a batch is due to be tried again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.errors import REPAIR
from headrace.triggers.ledger import LedgerWatcher

if TYPE_CHECKING:
    from headrace.batch.next_attempt import NextAttempt
    from headrace.ledger import Ledger
    from headrace.ledger.batches.tables import AttemptRow, BatchRow

# After this time the event is repeated for a batch of which nothing has changed. A run then also checks whether the
# code by which a batch failed has changed; the trigger cannot check that.
_REPEAT_MS = 300_000
# Events follow each other no faster than this, and not while a repair works.
_PAUSE_MS = 15_000
# How long a batch that was never begun is left to its own run at least, if no other batch waits for it: that run may
# wait for the receiver job's application.
_LEFT_MS = 120_000
# The number of unfinished batches that the trigger checks. A repair checks more; the repeated event starts it.
_MOST = 100


class RepairDueTrigger(LedgerWatcher):
    """Fires when a batch is due to be tried again (``headrace.batch.due_batches``): once for each state of the oldest
    such batch, and again after five minutes.

    It does not create the ledger, nor import the user's code.

    :param retry_for_ms: how long a batch that was never begun is left to a run of its own, two minutes at least; in an
        ordered stream it is a batch interval.
    """

    POLL_SECONDS = 5.0
    CREATE = False

    def __init__(self, *, ledger: str, stream: str, retry_for_ms: int, poll_interval: float | None = None) -> None:
        super().__init__(ledger=ledger, stream=stream, poll_interval=poll_interval, retry_for_ms=retry_for_ms)
        self._retry_for_ms = retry_for_ms
        self._fired_for: tuple[int, ...] = ()
        self._fired_ms = 0

    def poll(self, ledger: Ledger) -> dict[str, Any] | None:
        from headrace.ledger.errors import StreamNotFoundError

        now_ms = ledger.now_ms()
        if now_ms < self._fired_ms:
            # The ledger's clock was ahead.
            self._fired_ms = 0
        if now_ms < self._fired_ms + _PAUSE_MS:
            return None
        repeats = now_ms >= self._fired_ms + _REPEAT_MS
        try:
            due = self._first_due(ledger, now_ms, checks_code=repeats)
        except StreamNotFoundError:
            # No task of the stream has run yet.
            return None
        if due is None:
            return None
        batch, attempts = due.batch, due.attempts
        # Together they change with whatever may let the next attempt succeed.
        state = (batch.batch_time_ms, len(attempts), ledger.streams.get(self.stream).revision)
        if (state == self._fired_for and not repeats) or _is_being_repaired(ledger, self.stream, now_ms):
            return None
        self._fired_for, self._fired_ms = state, now_ms
        error = next((row.error for row in reversed(attempts) if row.error), None)
        return {"stream": self.stream, "batch_time_ms": batch.batch_time_ms, "steps": list(due.steps), "error": error}

    def _first_due(self, ledger: Ledger, now_ms: int, *, checks_code: bool) -> NextAttempt | None:
        from headrace.batch.due_batches import due_batches, is_as_it_failed

        stream = ledger.streams.get(self.stream)
        # In an ordered stream the next run waits for this batch. The repair asks Airflow whether it has a run.
        left_ms = stream.batch_interval_ms if stream.ordered else max(self._retry_for_ms, _LEFT_MS)

        def held_back(last: AttemptRow) -> bool:
            return not checks_code and is_as_it_failed(stream, last)

        def has_own_run(batch: BatchRow) -> bool:
            # Allocated later than now: by a clock that was ahead.
            return batch.allocated_at_ms <= now_ms < batch.allocated_at_ms + left_ms

        due = due_batches(ledger, self.stream, held_back=held_back, has_own_run=has_own_run, most=_MOST)
        return next(due, None)


def _is_being_repaired(ledger: Ledger, stream_name: str, now_ms: int) -> bool:
    return any(row.alive(now_ms) and row.attributes.get(REPAIR) for row in ledger.attempts.running(stream_name))
