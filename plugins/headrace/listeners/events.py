"""The events that listeners get: immutable values. Times are epoch milliseconds by the ledger's clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamEvent:
    """What all events have.

    ``event_id`` ascends in the order in which the stream's events happened; an event that is delivered again after a
    restart has the same id. ``at_ms`` is the time when it happened.
    """

    event_id: int
    at_ms: int
    stream: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamingStarted(StreamEvent):
    """The receiver job's Spark application is ready. ``job_epoch`` counts the stream's receiver jobs from 1."""

    job_epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverStarted(StreamEvent):
    """A receiver has registered. ``receiver`` is "<stream>/<input>/<index>", ``epoch`` counts its starts from 1,
    ``restarts`` those of this receiver job after the first."""

    receiver: str
    epoch: int
    host: str
    restarts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverError(StreamEvent):
    """A receiver has an error, was ended and is started again, or was refused (``receiver``); or an input has a problem
    (``input_id``). ``stack`` is the traceback of an error of a custom receiver."""

    receiver: str | None
    input_id: str | None
    error: str
    stack: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverStopped(StreamEvent):
    """A receiver has ended. ``error`` is None if it was asked to."""

    receiver: str
    epoch: int
    error: str | None


@dataclass(frozen=True, slots=True)
class BatchInfo:
    """A batch, as Spark's BatchInfo. What has not happened yet is None.

    ``submitted_at_ms`` is the time of its allocation, ``started_at_ms`` that of the first attempt of its present run.
    ``absorbed_ms`` are the earlier batch times that it took over. ``outputs`` has the counts of each output operation
    that is done, ``failures`` the reason of each that failed, both by the output's id.
    """

    batch_time_ms: int
    interval_ms: int
    records: int
    blocks: int
    payload_bytes: int
    late_records: int
    submitted_at_ms: int
    attempt: int = 0
    started_at_ms: int | None = None
    completed_at_ms: int | None = None
    absorbed_ms: tuple[int, ...] = ()
    outputs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    failures: Mapping[str, str] = field(default_factory=dict)

    @property
    def scheduling_delay_ms(self) -> int | None:
        """From the batch time to the start of processing: waiting for blocks, for the DAG run and for its turn."""
        return None if self.started_at_ms is None else self.started_at_ms - self.batch_time_ms

    @property
    def processing_time_ms(self) -> int | None:
        """From the start of processing to its end."""
        if self.started_at_ms is None or self.completed_at_ms is None:
            return None
        return self.completed_at_ms - self.started_at_ms

    @property
    def total_delay_ms(self) -> int | None:
        """From the batch time to the end of processing."""
        return None if self.completed_at_ms is None else self.completed_at_ms - self.batch_time_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSubmitted(StreamEvent):
    """A batch time was allocated: the batch's blocks are fixed."""

    batch: BatchInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchStarted(StreamEvent):
    """A run of a batch has begun: its first, or one that repeats outputs after it had failed or completed."""

    batch: BatchInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCompleted(StreamEvent):
    """No attempt at the batch runs any more, and it has succeeded or failed.

    A run that fails has one such event, also if outputs of it are begun later. A failed batch may be started again.
    """

    batch: BatchInfo

    @property
    def succeeded(self) -> bool:
        """Whether all outputs are written."""
        return not self.batch.failures


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOperationStarted(StreamEvent):
    """An attempt that includes this output has begun. The outputs of one attempt are written one after another."""

    batch_time_ms: int
    output_id: str
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOperationCompleted(StreamEvent):
    """An output of a batch was written, or failed. ``failure_reason`` is None if it was written.

    ``counts`` are those of the output's kind, ``duration_ms`` is how long writing took; empty and None if it failed.
    """

    batch_time_ms: int
    output_id: str
    attempt: int
    failure_reason: str | None
    counts: Mapping[str, Any] = field(default_factory=dict)
    duration_ms: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockAdded(StreamEvent):
    """A receiver's block is stored in the log, and in the ledger. It belongs to the batch of ``batch_time_ms``."""

    receiver: str
    batch_time_ms: int
    records: int
    payload_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap(StreamEvent):
    """The offsets ``[from_offset, until_offset)`` of a partition were given up. ``batch_time_ms`` is set if a person
    abandoned that batch."""

    input_id: str
    topic: str
    topic_id: str
    partition: int
    from_offset: int
    until_offset: int
    reason: str
    batch_time_ms: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetters(StreamEvent):
    """An output of a batch has written records to its dead letters. ``reasons`` counts them by reason.

    ``exceeded`` names the output's limit if they are more than it allows, so that the output has failed; else None.
    """

    batch_time_ms: int
    output_id: str
    attempt: int
    records: int
    reasons: Mapping[str, int]
    exceeded: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivingPaused(StreamEvent):
    """A receiver pauses. ``cause`` is "disk_full", "disk_low" or "log_budget", ``reason`` says it in words."""

    receiver: str
    epoch: int
    cause: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivingResumed(StreamEvent):
    """A receiver continues after a pause."""

    receiver: str
    epoch: int
    paused_seconds: float
