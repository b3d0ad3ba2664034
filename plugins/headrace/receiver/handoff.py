"""Hands records over from the threads of a custom receiver to the consuming thread, and says when they are stored."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from headrace.blocks import OffsetRange
from headrace.receiver.errors import ReceiverStoppedError
from headrace.receiver.receiver import Record


@dataclass(slots=True, eq=False)
class Handed:
    """Records of one call, or a piece of them. With ``position`` they are never divided or extended.

    ``until`` is the offset after the last of them, None while they are not all taken.
    """

    records: list[Record]
    nbytes: int
    position: str | None
    until: int | None = None


@dataclass(frozen=True, slots=True)
class Taken:
    """Records to be stored together, and where the source stands after them (None: it did not say)."""

    records: list[Record]
    position: str | None


class Handoff:
    """A queue of ``max_bytes`` bytes; a larger entry is alone in it. Thread-safe.

    It is also the `Acknowledgements` of its records: a call that waits for them returns when they are noted.
    """

    def __init__(self, max_bytes: int, next_offset: int, position: str | None) -> None:
        self._max_bytes = max_bytes
        self._changed = threading.Condition()
        self._queue: deque[Handed] = deque()
        self._queued_bytes = 0
        self._next_offset = next_offset
        self._stored_until = next_offset
        self._position = position
        self._without_records: str | None = None
        self._closed: str | None = None

    @property
    def next_offset(self) -> int:
        """The offset of the next record that is taken."""
        with self._changed:
            return self._next_offset

    @property
    def position(self) -> str | None:
        """The position given last."""
        with self._changed:
            return self._position

    def put(self, handed: Handed, is_over: Callable[[], bool]) -> None:
        """Add records; waits while the queue is full. ``is_over`` says whether their receiver has ended.

        Raises ReceiverStoppedError; then they were not added.
        """
        with self._changed:
            while self._queue and self._queued_bytes + handed.nbytes > self._max_bytes:
                self._raise_if_over(is_over)
                self._changed.wait(0.1)
            self._raise_if_over(is_over)
            if handed.position is not None:
                self._position = handed.position
            if handed.records:
                if handed.position is None:
                    handed.position = self._without_records
                # A position given with records is newer.
                self._without_records = None
                self._queue.append(handed)
                self._queued_bytes += handed.nbytes
            else:
                # Stored with the next records: until then nothing would come twice.
                self._without_records = handed.position
                handed.until = self._next_offset + sum(len(each.records) for each in self._queue)
            self._changed.notify_all()

    def extend(self, handed: Handed, record: Record, nbytes: int, is_over: Callable[[], bool]) -> bool:
        """Add a record to the entry that was put last, while nobody has taken it. Returns whether that was possible."""
        with self._changed:
            if not self._queue or self._queue[-1] is not handed or self._queued_bytes + nbytes > self._max_bytes:
                return False
            if is_over():
                return False
            handed.records.append(record)
            handed.nbytes += nbytes
            self._queued_bytes += nbytes
            return True

    def wait_stored(self, handed: Handed) -> None:
        """Return when the records are durable. Raises ReceiverStoppedError if that will never be known."""
        with self._changed:
            while handed.until is None or self._stored_until < handed.until:
                if self._closed is not None:
                    raise ReceiverStoppedError(
                        f"Whether records are stored is not known: {self._closed}.",
                        remedy="Do not acknowledge them; they are read again, or may come twice.",
                    )
                self._changed.wait()

    def take(self, seconds: float, max_records: int | None, max_bytes: int) -> Taken | None:
        """Take at most ``max_records`` records of about ``max_bytes``; wait up to ``seconds`` for the first.

        Records with a position are taken as a whole, however many. Returns None if there are none.
        """
        until = time.monotonic() + seconds
        with self._changed:
            while not self._queue:
                left = until - time.monotonic()
                if left <= 0 or self._closed is not None:
                    return None
                self._changed.wait(left)
            records: list[Record] = []
            position, nbytes = None, 0
            while self._queue:
                first = self._queue[0]
                room = None if max_records is None else max(0, max_records - len(records))
                if records and (nbytes + first.nbytes > max_bytes or room == 0):
                    break
                divides = room is not None and len(first.records) > room
                if divides and first.position is None and room:
                    part = max(1, first.nbytes * room // len(first.records))
                    records += first.records[:room]
                    del first.records[:room]
                    first.nbytes -= part
                    self._queued_bytes -= part
                    break
                if divides and records:
                    break
                self._queue.popleft()
                records += first.records
                nbytes += first.nbytes
                self._queued_bytes -= first.nbytes
                first.until = self._next_offset + len(records)
                position = first.position if first.position is not None else position
            self._next_offset += len(records)
            self._changed.notify_all()
            return Taken(records, position)

    def close(self, reason: str) -> int:
        """Drop what was not taken, and end all that wait, with ``reason``. A second call does nothing.

        Returns the number of dropped records that no position brings back.
        """
        with self._changed:
            lost = sum(len(each.records) for each in self._queue if each.position is None)
            self._closed = self._closed or reason
            self._queue.clear()
            self._queued_bytes = 0
            self._changed.notify_all()
            return lost

    open = 0
    failures = 0
    last_error: str | None = None

    def wake(self) -> None:
        """Have all that wait look at their receiver's end again."""
        with self._changed:
            self._changed.notify_all()

    # -- Acknowledgements ------------------------------------------------------------------------------------------

    def note(self, ranges: Iterable[OffsetRange]) -> None:
        """Note that the offsets are durable in log and ledger."""
        with self._changed:
            self._stored_until = max([self._stored_until, *(each.until_offset for each in ranges)])
            self._changed.notify_all()

    def repeat(self) -> None:
        """Nothing is ever open."""

    def forget(self, topic: str, partition: int) -> None:
        """`close` does this."""

    def allow_until(self, monotonic_seconds: float) -> None:
        """What is stored may be reported at any time."""

    def _raise_if_over(self, is_over: Callable[[], bool]) -> None:
        if self._closed is not None or is_over():
            raise ReceiverStoppedError(
                f"Records are not taken: {self._closed or 'the receiver has ended'}.",
                remedy="End the threads of a receiver when is_stopped is true.",
            )
