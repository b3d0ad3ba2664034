"""Keeps one receiver running: starts it by a launcher, notices its end or hang, and restarts it with backoff."""

from __future__ import annotations

import logging
from typing import Protocol

from headrace.receiver.receiver_task import ReceiverTask

logger = logging.getLogger(__name__)

# Spark's receivers restart after 2 s. The delay doubles, so that a failing receiver does not start a job every 2 s.
RESTART_SECONDS = 2.0
LONGEST_RESTART_SECONDS = 60.0
# After a run of this length the backoff starts again from the beginning.
_WELL_SECONDS = 60.0
# A receiver hangs when its lease has lapsed for this long while its task lives, most likely in a sync that never
# returns. Usually longer than a disk stall or a Spark task's wait for a slot; other receivers take its partitions long
# before.
HANG_SECONDS = 60.0


class ReceiverHandle(Protocol):
    """A receiver that was started. The tracker's loop calls it, so no method waits."""

    def done(self) -> bool:
        """Whether its job has ended, with or without an error."""
        ...

    def error(self) -> str | None:
        """Why it ended; None while it runs, and after a requested stop."""
        ...

    def cancel(self) -> None:
        """End it by force. Safe at any moment: what is not stored is read again."""
        ...


class ReceiverLauncher(Protocol):
    """Starts receivers somewhere. ``start`` must not wait for the receiver; raising counts as an end with error."""

    def start(self, task: ReceiverTask) -> ReceiverHandle: ...

    def crowding(self) -> str | None:
        """Why batches cannot run beside the running receivers; None if they can."""
        ...


class TrackedReceiver:
    """Keeps one receiver running until it is stopped. Times are seconds of the tracker's monotonic clock."""

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
        self._alive_at = 0.0
        self._start_at = 0.0
        self._ends_in_a_row = 0

    @property
    def running(self) -> bool:
        return self._handle is not None

    def keep_going(self, now: float, *, alive: bool) -> str | None:
        """Start the receiver when it is due, notice its end, and cancel it if it hangs.

        ``alive`` says that its lease is live. Returns a sentence when the receiver has just ended, else None.
        """
        if self._handle is None:
            return self._start(now) if now >= self._start_at else None
        if self._handle.done():
            return self._ended(now, self._handle.error())
        if alive:
            self._alive_at = now
        silent = now - max(self._alive_at, self._started_at)
        if silent < self._hang_seconds:
            return None
        self._abandon(self._handle)
        return self._ended(now, f"it hangs: its lease was not renewed for {silent:.0f} s")

    def reap(self) -> bool:
        """While stopping: return whether the receiver has ended. It is not started again."""
        if self._handle is not None and self._handle.done():
            self.last_error = self._handle.error()
            self._handle = None
        return self._handle is None

    def cancel(self) -> None:
        if self._handle is not None:
            self._handle.cancel()

    def excuse(self, now: float) -> None:
        """Count the receiver as live: the ledger does not answer, so its lease cannot be checked."""
        self._alive_at = now

    def _abandon(self, handle: ReceiverHandle) -> None:
        """Cancel it. If that has no effect (a process blocked in the kernel), the next epoch keeps it from storing."""
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
        # Capped: after a thousand ends in a row the power would overflow a float.
        seconds = min(LONGEST_RESTART_SECONDS, self._restart_seconds * 2 ** min(self._ends_in_a_row - 1, 30))
        self._start_at = now + seconds
        self.last_error = error
        how = "ended" if error is None else f"ended: {error}"
        return f"Receiver {self.task.receiver_id} {how}; it starts again in {seconds:.0f} s."
