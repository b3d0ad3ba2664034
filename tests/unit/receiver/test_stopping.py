"""Receivers that take their time to end when the stream is stopped."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from headrace.ledger import Ledger
from headrace.ledger.tables import JobLease
from headrace.receiver.partitioning import Discovery, Known
from headrace.receiver.supervisor import ReceiverTask
from headrace.receiver.tracker import ReceiverTracker, TrackerEnd
from headrace.stream import Stream
from headrace.stream_context import StreamContext

MakeStream = Callable[..., Stream]
OpenLedger = Callable[[Stream], tuple[Ledger, JobLease]]


class SlowReceiver:
    """It has heard of the stop, and ends when it is let go, or cancelled."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.gone = threading.Event()
        self.cancelled = False

    def start(self, task: ReceiverTask) -> SlowReceiver:
        self.begun.set()
        return self

    def crowding(self) -> None:
        """It holds no task slot."""

    def done(self) -> bool:
        return self.gone.is_set()

    def running_on(self) -> None:
        """No executor runs it."""

    def error(self) -> str | None:
        return None

    def cancel(self) -> None:
        self.cancelled = self.cancelled or not self.gone.is_set()
        self.gone.set()


class NothingThere:
    def discover(self, known: Known) -> Discovery:
        return Discovery((), (), {}, ())


def track(stream: Stream, ledger: Ledger, job: JobLease, receiver: SlowReceiver, *, stop_seconds: float) -> TrackerEnd:
    tracker = ReceiverTracker(
        StreamContext(stream, ledger), receiver, job, discoverer=lambda _: NothingThere(), stop_seconds=stop_seconds
    )

    def ask() -> None:
        receiver.begun.wait(30)
        ledger.jobs.request_stop(stream.name, "enough")

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        return tracker.run().end
    finally:
        asking.join()


@pytest.fixture
def receiver() -> SlowReceiver:
    return SlowReceiver()


def test_a_slow_receiver_is_waited_for(
    make_stream: MakeStream, open_ledger: OpenLedger, receiver: SlowReceiver
) -> None:
    stream = make_stream(receivers=1)
    ledger, job = open_ledger(stream)
    # A round of the tracker's loop takes half a second.
    threading.Timer(1.5, receiver.gone.set).start()
    assert track(stream, ledger, job, receiver, stop_seconds=60.0) is TrackerEnd.STOPPED
    assert not receiver.cancelled


def test_a_receiver_that_does_not_end_is_cancelled(
    make_stream: MakeStream, open_ledger: OpenLedger, receiver: SlowReceiver
) -> None:
    stream = make_stream(receivers=1)
    ledger, job = open_ledger(stream)
    assert track(stream, ledger, job, receiver, stop_seconds=0.2) is TrackerEnd.FORCED
    assert receiver.cancelled
