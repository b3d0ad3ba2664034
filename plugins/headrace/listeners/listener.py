"""What a listener is, how it is loaded, and the events that it gets.

Times are epoch milliseconds by the ledger's clock.

Listeners are those of a stream's definition, and those that installed packages offer to all streams (`load_listeners`).
This module imports no ledger: `headrace streams check` loads listeners too.

`StatsReport` is a listener that reports the delays of the last batches in the receiver job's log, as Spark's
StatsReportListener does.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

from headrace.stream import Listener, Stream
from headrace.stream.model import StreamDefinitionError, load_reference

if TYPE_CHECKING:
    from headrace.stream_context import StreamContext


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


logger = logging.getLogger(__name__)

# The quantiles of Spark's report.
_PERCENTS = (0, 5, 10, 25, 50, 75, 90, 95, 100)
_FIGURES: tuple[tuple[str, Callable[[BatchInfo], int | None]], ...] = (
    ("Scheduling delay", lambda batch: batch.scheduling_delay_ms),
    ("Processing time", lambda batch: batch.processing_time_ms),
    ("Total delay", lambda batch: batch.total_delay_ms),
)


class StatsReport(StreamListener):
    """After each batch that succeeded, logs the quantiles of the delays of the last ``batches`` of them.

    With a ``prefix``, its lines begin with it.
    """

    def __init__(self, batches: int = 10, prefix: str = "") -> None:
        if batches < 1:
            raise ValueError(f"batches must be 1 or more, not {batches}")
        self._prefix = prefix
        self._last: deque[BatchInfo] = deque(maxlen=batches)

    def on_batch_completed(self, event: BatchCompleted) -> None:
        if not event.succeeded:
            return
        # A batch that is run again, or an event that comes again, replaces the former.
        kept = [batch for batch in self._last if batch.batch_time_ms != event.batch.batch_time_ms]
        self._last.clear()
        self._last.extend([*kept, event.batch])
        for line in self.lines():
            logger.info("%s%s", self._prefix, line)

    def lines(self) -> list[str]:
        """The report in lines: for each figure, its quantiles in seconds."""
        shown = []
        for name, figure in _FIGURES:
            values = sorted(value for batch in self._last if (value := figure(batch)) is not None)
            if values:
                cells = (f"{percent}% {_quantile(values, percent) / 1000:.1f} s" for percent in _PERCENTS)
                shown.append(f"{name} of the last {len(values)} batches: {', '.join(cells)}")
        return shown


def _quantile(values: Sequence[int], percent: int) -> int:
    """The value below which this part of the sorted values lies, as Spark's Distribution takes it."""
    return values[min(len(values) * percent // 100, len(values) - 1)]


GROUP = "headrace.listeners"
"""The entry point group: its names are the listeners' names, its values classes without arguments, or instances."""


def load_listeners(stream: Stream) -> tuple[dict[str, StreamListener], dict[str, str]]:
    """Return the listeners by name, and the errors of those that cannot be made, which are logged.

    A listener of the definition replaces one of an installed package with the same name.
    """
    listeners: dict[str, StreamListener] = {}
    problems: dict[str, str] = {}
    for name, make in _factories(stream):
        if name in listeners or name in problems:
            continue
        try:
            listeners[name] = make()
        except BaseException as error:
            # A module may call sys.exit when it is imported.
            problems[name] = f"{type(error).__name__}: {error}"
            logger.error("Listener %s is left out: %s", name, problems[name])
    return listeners, problems


def make_listener(listener: Listener) -> StreamListener:
    """Import the listener's class and call it.

    Raises:
        StreamDefinitionError: it cannot be imported, is no `StreamListener`, or cannot be called with its arguments.
    """
    loaded = load_reference(listener.reference, "listener")
    arguments: dict[str, object] = dict(listener.keywords)
    if isinstance(loaded, StreamListener) and arguments:
        raise StreamDefinitionError(
            f"The listener {listener.id} is an instance, so it takes no {', '.join(arguments)}.",
            remedy="Name its class, or leave them out.",
        )
    return _instance(loaded, listener.id, arguments)


def check_listeners(stream: Stream) -> None:
    """Make the listeners of the definition, to find out whether the receiver job can.

    Raises:
        StreamDefinitionError: see `make_listener`.
    """
    for listener in stream.listeners:
        make_listener(listener)


def _factories(stream: Stream) -> Iterator[tuple[str, Callable[[], StreamListener]]]:
    for listener in stream.listeners:
        yield listener.id, partial(make_listener, listener)
    for point in entry_points(group=GROUP):
        yield point.name, partial(_load, point)


def _load(point: EntryPoint) -> StreamListener:
    return _instance(point.load(), point.name, {})


def _instance(loaded: object, name: str, arguments: dict[str, object]) -> StreamListener:
    if isinstance(loaded, StreamListener):
        return loaded
    if not (isinstance(loaded, type) and issubclass(loaded, StreamListener)):
        raise StreamDefinitionError(
            f"The listener {name} is no class derived from headrace.listeners.StreamListener, and no instance of one."
        )
    try:
        return loaded(**arguments)
    except Exception as error:
        raise StreamDefinitionError(
            f"The listener {name} cannot be made: {loaded.__name__}({', '.join(arguments)}) raises "
            f"{type(error).__name__}: {error}.",
            remedy="Correct its arguments.",
        ) from error
