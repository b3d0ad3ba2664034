"""Decides whether a receiver pauses, and reports why. A paused receiver is alive: its lease is renewed."""

from __future__ import annotations

import logging
from functools import partial

from headrace.ledger.errors import LedgerUnavailableError
from headrace.ledger.models import ReceiverLease
from headrace.ledger.states import EventKind
from headrace.receiver.disk_space import DiskReserve, Space, space_of
from headrace.receiver.log_budget import LogBudget, only_receiving_helps
from headrace.stream_context import StreamContext

logger = logging.getLogger(__name__)


class Pausing:
    """Used by the pushing thread, except ``reason``: the consuming thread stops fetching while it is set.

    ``pauses`` counts the pauses that began, ``paused_seconds`` their duration up to the last `look`.
    """

    def __init__(self, context: StreamContext, lease: ReceiverLease) -> None:
        self._context = context
        self._lease = lease
        max_log_bytes = context.stream.limits.max_log_bytes
        self._budget = None if max_log_bytes is None else LogBudget(context, max_log_bytes)
        self._reserve = DiskReserve(partial(space_of, context.storage.url), context.clock)
        self._full: str | None = None
        self._low: str | None = None
        self._exceeded: str | None = None
        self._reported: str | None = None
        self._paused_since: float | None = None
        self.pauses = 0
        self.paused_seconds = 0.0
        self._reported_at = 0.0

    @property
    def reason(self) -> str | None:
        """Why receiving is paused; None while it is not."""
        return self._full or self._low or self._exceeded

    def look(self) -> bool:
        """Check the log's disk and budget. Returns whether there is something new to report."""
        self._low = self._reserve.look(self._only_receiving_helps)
        if self._budget is not None:
            self._exceeded = self._budget.look()
        self._measure()
        return self._kind != self._reported

    @property
    def disk(self) -> Space | None:
        """The space of the log's disk at the last `look`; None if unknown."""
        return self._reserve.found

    def disk_is_full(self, error: BaseException) -> None:
        """Pause: a write found no room."""
        self._full = f"the log's disk is full, and is tried again until there is room: {error}"

    def stored(self, nbytes: int) -> None:
        """Note that a block was written: the disk has room, and the log has grown by ``nbytes``."""
        self._full = None
        if self._budget is not None:
            self._budget.stored(nbytes)

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
            self._context.ledger.events.append(receiver.stream, EventKind.RECEIVING_PAUSED, payload)
            logger.warning("receiver %s pauses: %s", receiver, self.reason)
        else:
            payload["seconds"] = round(self._context.clock.monotonic() - self._reported_at, 1)
            self._context.ledger.events.append(receiver.stream, EventKind.RECEIVING_RESUMED, payload)
            logger.info("receiver %s continues after %s s", receiver, payload["seconds"])
        if self._reported is None:
            self._reported_at = self._context.clock.monotonic()
        self._reported = kind

    def _only_receiving_helps(self) -> bool:
        try:
            return only_receiving_helps(self._context)
        except LedgerUnavailableError as error:
            logger.warning("The ledger does not answer, so it is unknown what batches wait for: %s", error)
            return False

    def _measure(self) -> None:
        now = self._context.clock.monotonic()
        if self._paused_since is not None:
            self.paused_seconds += now - self._paused_since
        elif self.reason is not None:
            self.pauses += 1
        self._paused_since = None if self.reason is None else now

    @property
    def _kind(self) -> str | None:
        causes = (("disk_full", self._full), ("disk_low", self._low), ("log_budget", self._exceeded))
        return next((cause for cause, reason in causes if reason is not None), None)
