"""Runs a custom receiver in a test, without a stream: what it gives counts as stored at once."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from headrace.blocks import OffsetRange, TopicPartition
from headrace.clock import SystemClock
from headrace.errors import HeadraceError
from headrace.receiver.receiver import Receiver, Record, position_text
from headrace.receiver.receiver_lifecycle import STOP_SECONDS, Handoff, ReceiverLifecycle

_PARTITION = TopicPartition("test", "test", 0)
_CALL_BYTES = 16 << 20


class ReceiverTestError(HeadraceError):
    """The receiver did not do in time what the test waits for."""


class RunningReceiver:
    """A receiver that runs. See `run_receiver`.

    ``records`` are the records that it has given, in order. ``stored_position`` is the position stored with the last
    of them, with which the test can run the receiver again. ``errors`` are the errors that it has reported.
    ``positions`` are all stored positions, by the number of records up to each; without ``by_call`` those of several
    calls of `store` may be one.
    """

    def __init__(
        self, handoff: Handoff, lifecycle: ReceiverLifecycle, position: str | None, *, by_call: bool = False
    ) -> None:
        self._handoff = handoff
        # Records with a position are taken as a whole all the same.
        self._max_records = 1 if by_call else None
        self._lifecycle = lifecycle
        self._position = position
        self.records: list[Record] = []
        self.errors: list[str] = []
        self.positions: dict[int, Any] = {}

    @property
    def values(self) -> list[bytes | str | None]:
        """The values of the records, as bytes."""
        return [record.value for record in self.records]

    @property
    def stored_position(self) -> Any:
        return None if self._position is None else json.loads(self._position)

    def wait_for(self, records: int, seconds: float = 30.0) -> None:
        """Return when it has given so many records. Raises ReceiverTestError after ``seconds``."""
        until = time.monotonic() + seconds
        while len(self.records) < records:
            if time.monotonic() > until:
                raise ReceiverTestError(
                    f"The receiver has given {len(self.records)} of {records} records in {seconds:g} s; its errors: "
                    f"{'; '.join(self.errors) or 'none'}."
                )
            time.sleep(0.01)

    def take(self) -> None:
        """Store what the receiver gives until it has ended."""
        while not self._take_once(0.02) or not self._lifecycle.join(0.0):
            pass
        while not self._take_once(0.0):
            pass

    def _take_once(self, seconds: float) -> bool:
        """Returns whether there was nothing."""
        self.errors += [error.error for error in self._lifecycle.take_errors()]
        begin = self._handoff.next_offset
        taken = self._handoff.take(seconds, self._max_records, _CALL_BYTES)
        if taken is None:
            return True
        self.records += taken.records
        if taken.position is not None:
            self._position = taken.position
            self.positions[len(self.records)] = json.loads(taken.position)
        self._handoff.note([OffsetRange(_PARTITION, begin, begin + len(taken.records), len(taken.records))])
        return False


@contextmanager
def run_receiver(
    make: Callable[[], Receiver],
    *,
    position: Any = None,
    index: int = 0,
    receivers: int = 1,
    by_call: bool = False,
) -> Iterator[RunningReceiver]:
    """Run the receiver that ``make`` makes for the length of a ``with`` block; at its end, stop it as headrace does.

    Args:
        make: called for each start and restart, such as ``lambda: Orders(database="shop.db")``.
        position: where the source stands, as a JSON value; None for a first start.
        by_call: take the records of one call of `store` at a time, if it has a position, and else one record.
    """
    text = position_text(position)
    clock = SystemClock()
    handoff = Handoff(_CALL_BYTES, 0, text, clock)
    lifecycle = ReceiverLifecycle(
        make, handoff, name="test-0", index=index, receivers=receivers, max_call_bytes=_CALL_BYTES, clock=clock
    )
    running = RunningReceiver(handoff, lifecycle, text, by_call=by_call)
    thread = threading.Thread(target=running.take, name="headrace-test", daemon=True)
    lifecycle.start()
    thread.start()
    try:
        yield running
    finally:
        lifecycle.end()
        thread.join(STOP_SECONDS + 5.0)
        handoff.close("the test is over")
