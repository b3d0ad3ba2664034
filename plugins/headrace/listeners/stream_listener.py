"""The base class of listeners."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.listeners.events import (
    BatchCompleted,
    BatchStarted,
    BatchSubmitted,
    BlockAdded,
    DeadLetters,
    Gap,
    OutputOperationCompleted,
    OutputOperationStarted,
    ReceiverError,
    ReceiverStarted,
    ReceiverStopped,
    ReceivingPaused,
    ReceivingResumed,
    StreamingStarted,
)

if TYPE_CHECKING:
    from headrace.stream_context import StreamContext


class StreamListener:
    """Gets a stream's events in their order. Override the methods of the events that you want; the others do nothing.

    The methods run in the driver of the stream's receiver job, in a thread that only this listener has. So no two of
    them run at the same time, and one that is slow or hangs delays no other listener and no receiver. An exception is
    logged and counted, and the next event follows. Delivery is at least once: after a restart some events come again,
    with the same ``event_id``.

    An instance is made for each receiver job: `start` is called first, `close` at the job's end.
    """

    def start(self, context: StreamContext) -> None:
        """The job begins. ``context`` has the stream's definition and its ledger. If it raises, this job calls the
        listener no more."""

    def on_streaming_started(self, event: StreamingStarted) -> None:
        """The receiver job is ready to start receivers."""

    def on_receiver_started(self, event: ReceiverStarted) -> None:
        """A receiver has started."""

    def on_receiver_error(self, event: ReceiverError) -> None:
        """A receiver is started again after an error, or an input has a problem."""

    def on_receiver_stopped(self, event: ReceiverStopped) -> None:
        """A receiver has ended."""

    def on_batch_submitted(self, event: BatchSubmitted) -> None:
        """A batch was allocated."""

    def on_batch_started(self, event: BatchStarted) -> None:
        """Processing of a batch has begun."""

    def on_batch_completed(self, event: BatchCompleted) -> None:
        """Processing of a batch has ended, successfully or not."""

    def on_output_operation_started(self, event: OutputOperationStarted) -> None:
        """An attempt at an output of a batch has begun."""

    def on_output_operation_completed(self, event: OutputOperationCompleted) -> None:
        """An output of a batch was written, or failed."""

    def on_block_added(self, event: BlockAdded) -> None:
        """A block was stored. There are several a second for each receiver. They are read from the ledger only for
        listeners that override this method."""

    def on_gap(self, event: Gap) -> None:
        """Offsets of a partition were given up."""

    def on_dead_letters(self, event: DeadLetters) -> None:
        """Records of a batch became dead letters."""

    def on_receiving_paused(self, event: ReceivingPaused) -> None:
        """A receiver pauses."""

    def on_receiving_resumed(self, event: ReceivingResumed) -> None:
        """A receiver continues after a pause."""

    def close(self) -> None:
        """The job ends, and no more events come. Runs in the listener's thread, for at most a few seconds."""
