"""Waits, in a graceful stop after the receivers have ended, for the batches that still need this application."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from headrace.ledger import BatchState
from headrace.ledger.errors import LedgerUnavailableError
from headrace.spark.sessions import REPLACED_BY

if TYPE_CHECKING:
    from headrace.ledger.tables import JobLease, JobRow
    from headrace.stream_context import StreamContext

logger = logging.getLogger(__name__)

# Spark Streaming's bound for a graceful stop: ten batch intervals.
_MOST_INTERVALS = 10
# How long after an interval's end a batch task may take to be scheduled and to allocate its blocks.
_SCHEDULING_SECONDS = 15.0
_PERIOD_SECONDS = 1.0

Pending = tuple[int, ...]


class BatchDrain:
    """Keeps the application (and its lease) until the batches of all received blocks are done.

    It waits for at most ten batch intervals. It stops waiting after one interval and 15 s without any change: failed
    batches need a person, and if no batches are run there is nothing to wait for. A job that is replaced by one of a
    newer version does not wait for batches that have not started; they run in the new job. Time in which the ledger
    does not answer does not count as time without change.
    """

    def __init__(self, context: StreamContext, lease: JobLease) -> None:
        self._name = context.name
        self._ledger = context.ledger
        self._lease = lease
        self._clock = context.clock
        self._interval = context.stream.batch_interval_ms / 1000

    def wait(self) -> Pending:
        """Wait. Returns the batch times that are still not done, as far as known. Raises LeaseLostError."""
        started = changed = self._clock.monotonic()
        pending: Pending | None = None
        while True:
            latest = self._look()
            now = self._clock.monotonic()
            if latest is None or latest != pending:
                pending, changed = pending if latest is None else latest, now
            if pending == () or now - started > _MOST_INTERVALS * self._interval:
                return pending or ()
            if now - changed > self._interval + _SCHEDULING_SECONDS:
                return pending or ()
            self._clock.wait(threading.Event(), _PERIOD_SECONDS)

    def _look(self) -> Pending | None:
        """Renew the lease and return the pending batch times; None if the ledger does not answer."""
        try:
            self._ledger.jobs.renew(self._lease)
            return self.pending()
        except LedgerUnavailableError as error:
            logger.warning("the ledger does not answer, so the pending batches are not known: %s", error)
            return None

    def pending(self) -> Pending:
        """The batch times that run now; also those that wait to run, if batches are run at all."""
        name = self._name
        running = {row.batch_time_ms for row in self._ledger.batches.page(name, states=[BatchState.RUNNING])}
        # A running batch whose process is gone is not worth waiting for.
        now_ms = self._ledger.now_ms()
        alive = {
            batch_time_ms
            for batch_time_ms in running
            if any(attempt.alive(now_ms) for attempt in self._ledger.attempts.of_batch(name, batch_time_ms))
        }
        job = self._ledger.jobs.current(name)
        if not self._somebody_runs_batches(job) or (job is not None and REPLACED_BY in job.attributes):
            return tuple(sorted(alive))
        allocated = {row.batch_time_ms for row in self._ledger.batches.page(name, states=[BatchState.ALLOCATED])}
        unclaimed = {row.batch_time_ms for row in self._ledger.blocks.unclaimed(name)}
        return tuple(sorted(alive | allocated | unclaimed))

    def _somebody_runs_batches(self, job: JobRow | None) -> bool:
        since_ms = 0 if job is None else job.acquired_at_ms
        return any(
            row.started_at_ms is not None and row.started_at_ms >= since_ms
            for row in self._ledger.batches.page(self._name, 20)
        )
