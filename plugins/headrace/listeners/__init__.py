"""Listeners: code that is called when something happens in a stream, in the driver of its receiver job."""

from headrace.listeners.events import (
    BatchCompleted,
    BatchInfo,
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
    StreamEvent,
    StreamingStarted,
)
from headrace.listeners.stats_report import StatsReport
from headrace.listeners.stream_listener import StreamListener

__all__ = [
    "BatchCompleted",
    "BatchInfo",
    "BatchStarted",
    "BatchSubmitted",
    "BlockAdded",
    "DeadLetters",
    "Gap",
    "OutputOperationCompleted",
    "OutputOperationStarted",
    "ReceiverError",
    "ReceiverStarted",
    "ReceiverStopped",
    "ReceivingPaused",
    "ReceivingResumed",
    "StatsReport",
    "StreamEvent",
    "StreamListener",
    "StreamingStarted",
]
