"""Decides whether a receiver pauses, and reports why. A paused receiver is alive: its lease is renewed."""

from __future__ import annotations

import logging

from headrace.clock import Clock
from headrace.ledger import Ledger
from headrace.ledger.errors import LedgerUnavailableError
from headrace.ledger.models import ReceiverLease
from headrace.ledger.states import EventKind
from headrace.receiver.disk_reserve import DiskReserve
from headrace.receiver.log_budget import LogBudget, only_receiving_helps

logger = logging.getLogger(__name__)


class Pausing:
    """Used by the pushing thread, except ``reason``: the consuming thread stops fetching while it is set."""

    def __init__(
        self,
        lease: ReceiverLease,
        ledger: Ledger,
        clock: Clock,
        *,
        budget: LogBudget | None = None,
        reserve: DiskReserve | None = None,
    ) -> None:
        self._lease = lease
        self._ledger = ledger
        self._clock = clock
        self._budget = budget
        self._reserve = reserve
        self._full: str | None = None
        self._low: str | None = None
        self._exceeded: str | None = None
        self._reported: str | None = None
        self._reported_at = 0.0

    @property
    def reason(self) -> str | None:
        """Why receiving is paused; None while it is not."""
        return self._full or self._low or self._exceeded

    def look(self) -> bool:
        """Check the log's disk and budget. Returns whether there is something new to report."""
        if self._reserve is not None:
            self._low = self._reserve.look(self._only_receiving_helps)
        if self._budget is not None:
            self._exceeded = self._budget.look()
        return self._kind != self._reported

    def disk_is_full(self, error: BaseException) -> None:
        """Pause: a write found no room."""
        self._full = f"the log's disk is full, and is tried again until there is room: {error}"

    def disk_has_room(self) -> None:
        """End the pause: a write succeeded."""
        self._full = None

    def report(self) -> None:
        """Append an event when a pause begins, changes its cause or ends.

        Raises LedgerUnavailableError; the next call then reports it.
        """
        kind = self._kind
        if kind == self._reported:
            return
        receiver = self._lease.receiver_id
        payload: dict[str, object] = {"receiver": str(receiver), "epoch": self._lease.epoch}
        if kind is not None:
            payload |= {"cause": kind, "reason": self.reason}
            self._ledger.events.append(receiver.stream, EventKind.RECEIVING_PAUSED, payload)
            logger.warning("receiver %s pauses: %s", receiver, self.reason)
        else:
            payload["seconds"] = round(self._clock.monotonic() - self._reported_at, 1)
            self._ledger.events.append(receiver.stream, EventKind.RECEIVING_RESUMED, payload)
            logger.info("receiver %s goes on after %s s", receiver, payload["seconds"])
        if self._reported is None:
            self._reported_at = self._clock.monotonic()
        self._reported = kind

    def _only_receiving_helps(self) -> bool:
        stream = self._lease.receiver_id.stream
        try:
            return only_receiving_helps(self._ledger, stream, self._ledger.streams.get(stream).batch_by)
        except LedgerUnavailableError as error:
            logger.warning("the ledger does not say what batches wait for: %s", error)
            return False

    @property
    def _kind(self) -> str | None:
        causes = (("disk_full", self._full), ("disk_low", self._low), ("log_budget", self._exceeded))
        return next((cause for cause, reason in causes if reason is not None), None)
