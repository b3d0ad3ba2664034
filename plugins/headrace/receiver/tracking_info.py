"""One receiver as its tracker sees it: started, ended, waiting for its restart."""

from __future__ import annotations

import logging

from headrace.receiver.launchers import ReceiverHandle, ReceiverLauncher
from headrace.receiver.receiver_task import ReceiverTask

logger = logging.getLogger(__name__)

# Spark's receivers restart after 2 s. Doubling keeps one that cannot work from a new job every other second.
RESTART_SECONDS = 2.0
LONGEST_RESTART_SECONDS = 60.0
# A receiver that ran for this long was well: its next end is a new trouble.
_WELL_SECONDS = 60.0
# Its lease has lapsed, and its task lives: a sync that never returns, most likely. Longer than a disk stalls, or a
# Spark task waits for a slot, as a rule; other receivers have its partitions long before.
HANG_SECONDS = 60.0


class ReceiverTrackingInfo:
    """Keeps one receiver going until told not to. Times are seconds of the tracker's monotonic clock."""

    def __init__(
        self,
        task: ReceiverTask,
        launcher: ReceiverLauncher,
        restart_seconds: float = RESTART_SECONDS,
        hang_seconds: float = HANG_SECONDS,
    ) -> None:
        self.task = task
        self.starts = 0
        self.last_error: str | None = None
        self._launcher = launcher
        self._restart_seconds = restart_seconds
        self._hang_seconds = hang_seconds
        self._handle: ReceiverHandle | None = None
        self._started_at = 0.0
        self._heard_at = 0.0
        self._start_at = 0.0
        self._ends_in_a_row = 0

    @property
    def running(self) -> bool:
        return self._handle is not None

    def keep_going(self, now: float, *, heard: bool) -> str | None:
        """Start it when its time has come; note its end, and end it where it hangs. Returns a sentence when it has just
        ended, else None.

        ``heard``: its lease is live.
        """
        if self._handle is None:
            return self._start(now) if now >= self._start_at else None
        if self._handle.done():
            return self._ended(now, self._handle.error())
        if heard:
            self._heard_at = now
        silent = now - max(self._heard_at, self._started_at)
        if silent < self._hang_seconds:
            return None
        self._abandon(self._handle)
        return self._ended(now, f"it hangs, nothing was heard of it for {silent:.0f} s")

    def reap(self) -> bool:
        """While stopping: whether it has ended. It is not started again."""
        if self._handle is not None and self._handle.done():
            self.last_error = self._handle.error()
            self._handle = None
        return self._handle is None

    def cancel(self) -> None:
        if self._handle is not None:
            self._handle.cancel()

    def excuse(self, now: float) -> None:
        """The ledger does not answer, so nothing can be heard of it."""
        self._heard_at = now

    def _abandon(self, handle: ReceiverHandle) -> None:
        """It may be past ending (a process in the kernel's hands): the next one's epoch keeps it from storing."""
        try:
            handle.cancel()
        except Exception:
            logger.exception("receiver %s hangs and could not be cancelled", self.task.receiver_id)

    def _start(self, now: float) -> str | None:
        self._started_at = now
        self.starts += 1
        try:
            self._handle = self._launcher.start(self.task)
        except Exception as error:
            logger.exception("receiver %s could not be started", self.task.receiver_id)
            return self._ended(now, f"{type(error).__name__}: {error}")
        return None

    def _ended(self, now: float, error: str | None) -> str:
        self._handle = None
        self._ends_in_a_row = 1 if now - self._started_at >= _WELL_SECONDS else self._ends_in_a_row + 1
        # Capped: after a thousand ends in a row the power itself would be no float any more.
        seconds = min(LONGEST_RESTART_SECONDS, self._restart_seconds * 2 ** min(self._ends_in_a_row - 1, 30))
        self._start_at = now + seconds
        self.last_error = error
        how = "ended" if error is None else f"ended: {error}"
        return f"Receiver {self.task.receiver_id} {how}; it starts again in {seconds:.0f} s."
