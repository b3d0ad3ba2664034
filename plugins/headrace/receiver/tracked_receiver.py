"""Keeps one receiver running: schedules it in the ledger, starts it by a launcher, notices its end or hang, and
restarts it with backoff.
"""

from __future__ import annotations

import logging
import traceback
from typing import Protocol

from headrace.blocks import ReceiverId
from headrace.errors import HeadraceError
from headrace.ledger.errors import LedgerUnavailableError
from headrace.ledger.receiving.receivers import Receivers
from headrace.ledger.receiving.tables import ScheduledReceiver
from headrace.ledger.tables import JobLease
from headrace.receiver.heartbeat import LEASE_MS
from headrace.receiver.placement import Executor
from headrace.receiver.supervisor import ReceiverTask

logger = logging.getLogger(__name__)

# Spark's receivers restart after 2 s. The delay doubles, so that a failing receiver does not start a job every 2 s.
RESTART_SECONDS = 2.0
# With its start of about 3 s, a receiver is back within 20 s of the end of an outage that its start did not survive.
LONGEST_RESTART_SECONDS = 16.0
# A receiver that ran for so long, with its start of about 3 s, has received, so the backoff starts again at its
# minimum. A receiver that cannot work at all, because its log cannot be opened for example, fails within a few seconds.
_WELL_SECONDS = 10.0
# A receiver hangs when its lease has lapsed for this long while its task lives, most likely in a sync that never
# returns. Usually longer than a disk stall or a Spark task's wait for a slot; other receivers take its partitions long
# before.
HANG_SECONDS = 60.0


class NoPlaceError(HeadraceError):
    """The launcher has no place for a receiver at the moment. The tracker tries again soon, without backoff: that costs
    little, and executors that come back are used at once."""


class ReceiverHandle(Protocol):
    """A receiver that was started. The tracker's loop calls it, so no method waits."""

    def done(self) -> bool:
        """Whether its job has ended, with or without an error."""
        ...

    def error(self) -> str | None:
        """Why it ended; None while it runs, and after a requested stop."""
        ...

    def running_on(self) -> Executor | None:
        """The executor that runs it; None while that is not known, or if there is none."""
        ...

    def cancel(self) -> None:
        """End it by force. Safe at any moment: what is not stored is read again."""
        ...


class ReceiverLauncher(Protocol):
    """Starts receivers somewhere."""

    def start(self, task: ReceiverTask) -> ReceiverHandle:
        """Start a receiver, without waiting for it. Raises NoPlaceError; any other error counts as the receiver's end
        with that error."""
        ...

    def crowding(self) -> str | None:
        """Why batches cannot run beside the running receivers; None if they can."""
        ...


class TrackedReceiver:
    """Keeps one receiver running until it is stopped. ``now`` is in seconds of the tracker's monotonic clock."""

    def __init__(
        self,
        stream_json: str,
        receiver_id: ReceiverId,
        job_lease: JobLease,
        receivers: Receivers,
        launcher: ReceiverLauncher,
        *,
        lease_ms: int = LEASE_MS,
        restart_seconds: float = RESTART_SECONDS,
        hang_seconds: float = HANG_SECONDS,
    ) -> None:
        """``receivers`` schedules receivers in the ledger, and ``lease_ms`` is the length of the receiver's lease."""
        self.receiver_id = receiver_id
        self.starts = 0
        self.last_error: str | None = None
        self._stream_json = stream_json
        self._job_lease = job_lease
        self._receivers = receivers
        self._launcher = launcher
        self._lease_ms = lease_ms
        self._scheduled: ScheduledReceiver | None = None
        self._executor_is_noted = False
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

        Raises LedgerUnavailableError, after which the next call continues, and LeaseLostError if the job is over.
        """
        if self._handle is None:
            return self._start(now) if now >= self._start_at else None
        if self._handle.done():
            return self._ended(now, self._handle.error())
        self._note_executor(self._handle)
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

    def assume_alive(self, now: float) -> None:
        """Count the receiver as live: the ledger does not answer, so its lease cannot be checked."""
        self._alive_at = now

    def _abandon(self, handle: ReceiverHandle) -> None:
        """Cancel it. If that has no effect (a process blocked in the kernel), the next epoch keeps it from storing."""
        try:
            handle.cancel()
        except Exception:
            logger.exception("receiver %s hangs and could not be cancelled", self.receiver_id)

    def _start(self, now: float) -> str | None:
        self._scheduled = self._receivers.schedule(self._job_lease, self.receiver_id)
        self._executor_is_noted = False
        self._started_at = now
        self.starts += 1
        try:
            self._handle = self._launcher.start(ReceiverTask(self._stream_json, self._scheduled, self._lease_ms))
        except NoPlaceError as error:
            return self._note_wait(now, str(error))
        except Exception as error:
            logger.exception("receiver %s could not be started", self.receiver_id)
            return self._ended(now, f"{type(error).__name__}: {error}", traceback.format_exc())
        return None

    def _note_wait(self, now: float, error: str) -> str | None:
        self._start_at = now + self._restart_seconds
        if error == self.last_error:
            return None
        self._note_end(error)
        self.last_error = error
        return f"Receiver {self.receiver_id} waits: {error}"

    def _note_executor(self, handle: ReceiverHandle) -> None:
        if self._executor_is_noted or self._scheduled is None:
            return
        executor = handle.running_on()
        if executor is not None:
            self._receivers.runs_on(self._scheduled, executor.executor_id)
            self._executor_is_noted = True

    def _ended(self, now: float, error: str | None, stack: str | None = None) -> str:
        self._handle = None
        self._note_end(error, stack)
        self._ends_in_a_row = 1 if now - self._started_at >= _WELL_SECONDS else self._ends_in_a_row + 1
        # Capped: after a thousand ends in a row the power would overflow a float.
        seconds = min(LONGEST_RESTART_SECONDS, self._restart_seconds * 2 ** min(self._ends_in_a_row - 1, 30))
        self._start_at = now + seconds
        self.last_error = error
        how = "ended" if error is None else f"ended: {error.rstrip('.')}"
        return f"Receiver {self.receiver_id} {how}; it starts again in {seconds:.0f} s."

    def _note_end(self, error: str | None, stack: str | None = None) -> None:
        if self._scheduled is None:
            return
        try:
            self._receivers.task_ended(self._scheduled, error, stack)
        except LedgerUnavailableError as unavailable:
            # The next start fences the instance in any case.
            logger.warning("the end of receiver %s was not recorded in the ledger: %s", self.receiver_id, unavailable)
