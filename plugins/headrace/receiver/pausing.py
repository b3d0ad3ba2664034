"""Decides whether a receiver pauses, and reports why. A paused receiver is alive: its lease is renewed.

Batches need room for manifests, checkpoints, and the ledger itself if it is on the log's disk. Without any room, not
even the pause could be reported. So receiving pauses before the disk is full.

Cleanup deletes only what no batch needs any more (rule 9 of the design). So when batches fall behind, the log grows,
and at ``Limits.max_log_bytes`` receivers pause: Kafka keeps the rest. Records already read are still stored, so the log
may exceed its budget by the receivers' queues.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from urllib.parse import unquote, urlsplit

from headrace.clock import Clock
from headrace.ledger.errors import LedgerUnavailableError
from headrace.ledger.receiving.tables import ReceiverLease
from headrace.ledger.states import UNFINISHED, EventKind
from headrace.stream_context import StreamContext
from headrace.wal.errors import is_out_of_space

logger = logging.getLogger(__name__)


# The smaller of these is kept free. Elasticsearch also stops writing at 95 % ("flood stage").
RESERVE_BYTES = 256 << 20
RESERVE_SHARE = 0.05
# Receiving resumes at this many times the reserve, so that it does not pause and resume with every block.
RESUME_AT_RESERVES = 1.5
# This share of the reserve is kept even if batches wait for records that only receiving can bring.
HARD_SHARE = 0.25
_POLL_SECONDS = 1.0
_MIB = 1024 * 1024
# Opens a file without a name, so a crash leaves nothing. Not available on every system and file system.
_NAMELESS = getattr(os, "O_TMPFILE", None)

Space = tuple[int, int]
"""Bytes free for this user, and total bytes."""


class DiskReserve:
    """Checks about once a second. Used by one thread. ``measured`` is the space at the last check, None if unknown."""

    def __init__(self, space: Callable[[], Space | None], clock: Clock) -> None:
        self._space = space
        self._clock = clock
        self._next_poll = 0.0
        self._reason: str | None = None
        self.measured: Space | None = None

    def poll(self, only_receiving_helps: Callable[[], bool] = lambda: False) -> str | None:
        """Return why receiving has to pause; None while there is enough room.

        ``only_receiving_helps`` is called when there is little room: if it returns True, receiving continues into the
        reserve, down to ``HARD_SHARE`` of it.
        """
        now = self._clock.monotonic()
        if now >= self._next_poll:
            self._next_poll = now + _POLL_SECONDS
            self.measured = self._space()
            self._reason = self._judge(self.measured, only_receiving_helps)
        return self._reason

    def _judge(self, space: Space | None, only_receiving_helps: Callable[[], bool]) -> str | None:
        if space is None:
            return None
        free, total = space
        reserve = min(RESERVE_BYTES, total * RESERVE_SHARE)
        resume = reserve * RESUME_AT_RESERVES
        if free >= (resume if self._reason is not None else reserve):
            return None
        # Nothing is freed below the hard reserve, so it needs no second bound to resume at.
        if free >= reserve * HARD_SHARE and only_receiving_helps():
            return None
        return (
            f"the log's disk is nearly full: {free / _MIB:.1f} MiB are free, and {reserve / _MIB:.1f} MiB are reserved "
            f"for batches and the ledger; receiving continues with {resume / _MIB:.1f} MiB free"
        )


def space_of(url: str) -> Space | None:
    """Return the space of the disk that holds a storage's ``url``; None for an object store, or if unknown."""
    folder = folder_of(url)
    if folder is None:
        return None
    try:
        disk = os.statvfs(folder)
    except OSError:
        return None
    return disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize


def folder_of(url: str) -> Path | None:
    """Return the folder at a storage's ``url``, or its nearest existing ancestor; None for an object store."""
    parts = urlsplit(url)
    if parts.scheme != "file":
        return None
    folder = Path(unquote(parts.path))
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    return folder


def room_for(url: str, nbytes: int) -> bool:
    """Return whether ``nbytes`` more can be stored at a storage's ``url``.

    The bytes are allocated and freed again, since the free space shows neither quotas nor reserved blocks. Returns
    True if only a write can show it, as in an object store.
    """
    folder = folder_of(url)
    if folder is None:
        return True
    try:
        if _NAMELESS is None:
            return _is_free(folder, nbytes)
        descriptor = os.open(folder, _NAMELESS | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    except OSError as error:
        return not is_out_of_space(error) and _is_free(folder, nbytes)
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        return not is_out_of_space(error)
    finally:
        os.close(descriptor)
    return True


def _is_free(folder: Path, nbytes: int) -> bool:
    try:
        disk = os.statvfs(folder)
    except OSError:
        return True
    # File systems without a fixed number of files report 0 of 0.
    return disk.f_bavail * disk.f_frsize >= nbytes and (disk.f_favail > 0 or disk.f_files == 0)


# Receiving resumes below this share of the budget, so that it does not pause and resume with every segment.
RESUME_AT_SHARE = 0.9


class LogBudget:
    """One receiver's view of the stream's budget. Used by the pushing thread.

    All receivers read the same sum in the ledger, each about once a second; in between, each counts what it stores.
    """

    def __init__(self, context: StreamContext, max_bytes: int) -> None:
        self._context = context
        self._max_bytes = max_bytes
        self._in_ledger = 0
        self._stored_since = 0
        self._next_poll = 0.0
        self._exceeded = False

    def stored(self, nbytes: int) -> None:
        """Count a block that this receiver has stored."""
        self._stored_since += nbytes

    def poll(self) -> str | None:
        """Return why receiving has to pause; None while it may continue."""
        if self._context.clock.monotonic() >= self._next_poll:
            try:
                self._ask()
            except LedgerUnavailableError as error:
                logger.warning("The ledger does not answer, so the log's size is unknown: %s", error)
        elif not self._exceeded and self._in_ledger + self._stored_since >= self._max_bytes:
            # Exceeded by its own count; the ledger has to confirm it.
            self._next_poll = 0.0
            return self.poll()
        return self._reason() if self._exceeded else None

    def _ask(self) -> None:
        self._in_ledger = self._context.ledger.segments.stored_bytes(self._context.name)
        self._stored_since = 0
        self._next_poll = self._context.clock.monotonic() + _POLL_SECONDS
        bound = self._max_bytes * RESUME_AT_SHARE if self._exceeded else self._max_bytes
        self._exceeded = self._in_ledger >= bound and not only_receiving_helps(self._context)

    def _reason(self) -> str:
        return (
            f"the log holds {self._in_ledger / _MIB:.1f} MiB of the {self._max_bytes / _MIB:.1f} MiB that are allowed "
            f"(limits.max_log_bytes); receiving continues below {self._max_bytes * RESUME_AT_SHARE / _MIB:.1f} MiB, "
            "when batches have completed and cleanup has deleted what they needed"
        )


def only_receiving_helps(context: StreamContext) -> bool:
    """Return whether only receiving lets batches complete.

    Then receivers must not pause for lack of room: only a batch's cleanup frees room, so the pause would never end.

    With ``batch_by="timestamp"`` a batch waits for records that are still in Kafka. Unless another batch can be
    finished first, it must get them, or the log stays full. Raises LedgerUnavailableError.
    """
    ledger, name = context.ledger, context.name
    if context.stream.batch_by != "timestamp" or ledger.batches.page(name, 1, UNFINISHED):
        return False
    waiting_ms = ledger.batches.next_unclaimed(name)
    return waiting_ms is None or bool(ledger.positions.unpassed(name, waiting_ms))


class Pausing:
    """Used by the pushing thread, except ``reason``: the consuming thread stops fetching while it is set.

    ``pauses`` counts the pauses that began, ``paused_seconds`` their duration up to the last `poll`.
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

    def poll(self) -> bool:
        """Check the log's disk and budget. Returns whether there is something new to report."""
        self._low = self._reserve.poll(self._only_receiving_helps)
        if self._budget is not None:
            self._exceeded = self._budget.poll()
        self._measure()
        return self._kind != self._reported

    @property
    def disk(self) -> Space | None:
        """The space of the log's disk at the last `poll`; None if unknown."""
        return self._reserve.measured

    def disk_is_full(self, error: BaseException) -> None:
        """Pause: a write found no room."""
        url = self._context.storage.url
        space = space_of(url)
        free = "" if space is None else f", {space[0]:,} bytes are free"
        self._full = f"the log's disk is full ({url}{free}), and is tried again until there is room: {error}"

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
