"""Answers about streams: the list, and one stream with its receivers, partitions and log."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from pydantic import Field

from headrace.ui.api.catalogue import ProblemKind
from headrace.ui.api.models.base import Answer, Time, ms


class State(StrEnum):
    """What a stream is, judged by what is known; the first that applies, in this order."""

    FAILING = "failing"
    STALLED = "stalled"
    PAUSED = "paused"
    FALLING_BEHIND = "falling_behind"
    STARTING = "starting"
    STOPPED = "stopped"
    WELL = "well"


class Problem(Answer):
    """A ledger that cannot be read (`ledger_unreadable`), so that its streams are not listed. Or a stream that several
    DAGs declare (`several_batch_dags`), that is new (`new`: its DAGs are paused) or not in its ledger yet
    (`not_registered`), or that another ledger has too (`same_name`)."""

    kind: ProblemKind
    ledger: str | None = Field(
        description='As the stream names it; "invalid ledger" for a URL that is refused; null if no ledger is to blame.'
    )
    error: str
    remedy: str | None = None
    streams: tuple[str, ...] = Field(
        default=(), description="The streams that are known to be in it, and that you may read."
    )


class May(Answer):
    """What the caller may do with the stream."""

    read: bool
    operate: bool


class LastBatch(Answer):
    """The newest batch that has completed."""

    batch_time: Time = ms("batch_time")
    records: int
    scheduling_delay: float | None = Field(description="Seconds from the batch time to the start of its processing.")
    processing_time: float | None = Field(description="Seconds from its start to its completion.")
    total_delay: float | None = Field(description="Seconds from the batch time to its completion.")
    completed_at: Time | None = ms("completed_at")


class OldestUnfinished(Answer):
    """The unfinished batch that is due longest; its ``state`` is a batch's state or "not allocated"."""

    batch_time: Time = ms("batch_time")
    state: str
    error: str | None
    age: float = Field(description="Seconds since its batch time, or since it was begun again after it had completed.")


class Sparklines(Answer):
    """The last 30 values, oldest first: ``total_delay`` of batches; the others of samples, or of batches if there are
    no samples."""

    input_rate: tuple[float | None, ...] = ()
    total_delay: tuple[float | None, ...] = ()
    lag: tuple[int | None, ...] = ()


class StreamSummary(Answer):
    """One stream in the list."""

    name: str
    state: State
    reason: str = Field(description="Why it is in this state, and since when, in words.")
    remedy: str | None = Field(description="What a person can do about it, in words.")
    since: Time | None = ms("since", description="Since when it is in this state, as far as is known.")
    details: str | None = Field(
        default=None, description="The whole error, if the reason has only the line of it that matters."
    )
    also: tuple[str, ...] = Field(default=(), description="Other problems, less severe than the reason.")
    ledger: str
    batch_dag_id: str
    receiver_dag_id: str
    replay_dag_ids: tuple[str, ...] = ()
    desired_state: str
    batch_interval: float
    input_rate: float = Field(description="Records per second that receivers stored over the last 10 s.")
    lag: int | None = Field(description="Records that Kafka has and the log has not, in partitions whose lag is known.")
    lag_unknown: int = Field(default=0, description="The number of partitions whose lag is not known.")
    lag_seconds: float | None = Field(description="Everything that Kafka had this long ago is in the log.")
    last_completed_batch: LastBatch | None
    oldest_unfinished: OldestUnfinished | None
    sparklines: Sparklines
    may: May


class StreamList(Answer):
    """The streams that the caller may read, and the ledgers that could not be read."""

    streams: tuple[StreamSummary, ...]
    problems: tuple[Problem, ...]


class ReceiverJob(Answer):
    """The newest receiver job. ``state`` is "lease lost" if it should run but no longer renews its lease."""

    state: str
    holder: str
    host: str | None
    since: Time = ms("since")
    ended_at: Time | None = ms("ended_at", default=None)
    error: str | None = None
    epoch: int
    revision: int | None = Field(default=None, description="The definition's revision that it runs with.")
    code_version: str | None
    spark_ui: str | None
    log_path: str | None


class ListenerStatus(Answer):
    """A listener in this receiver job, which counts from its own beginning."""

    name: str
    dropped: int = Field(description="Events that came while its queue was full.")
    missed: int = Field(description="Events that were deleted before it got them.")
    failed: int = Field(description="Its calls that raised.")
    error: str | None = Field(description="The last error, also of a listener that could not be made.")
    slow: str | None = Field(description="Which call takes longer than 30 seconds at the moment.")


class LastError(Answer):
    """The last error of a receiver."""

    at: Time = ms("at")
    text: str
    stack: str | None = Field(description="The traceback, if the error has one.")


class Receiver(Answer):
    """The newest instance of a receiver."""

    id: str
    index: int
    input: str
    host: str | None = Field(description="Null until it has registered.")
    executor: str | None = Field(description="Spark's name of the executor that runs it, null while it is not known.")
    state: str
    epoch: int
    partitions: int | None
    rate: float | None
    rate_limit: float | None
    queue_blocks: int | None
    queue_bytes: int | None
    lag: int | None
    late_records: int | None = Field(description="Records that came too late for the batch of their timestamps.")
    heartbeat_at: Time = ms("heartbeat_at")
    sealed_through: Time | None = ms("sealed_through", description="Everything that it cut until then is stored.")
    lease_until: Time = ms("lease_until")
    restarts: int
    last_error: LastError | None
    paused_reason: str | None


class Partition(Answer):
    """A partition and its position."""

    input: str
    topic: str
    partition: int
    receiver: int | None
    state: str
    next_offset: int
    lag: int | None
    watermark: Time | None = ms("watermark", description="The latest timestamp; null in a stream by arrival.")
    drained: Time | None = ms(
        "drained", description="Everything that Kafka had at this time is stored; null in a stream by arrival."
    )
    error: str | None


class Holder(Answer):
    """A batch whose blocks keep segments of the log from being deleted."""

    batch_time: Time = ms("batch_time")
    state: str
    reason: str
    bytes: int | None


class Log(Answer):
    """The write-ahead log's files. ``held_by`` are the ten oldest batches that need it."""

    bytes: int
    limit_bytes: int | None
    segments: int
    held_by: tuple[Holder, ...]


class Counts(Answer):
    """Numbers of batches by state (up to 10,000 each), of gaps (up to 10,000), and of dead letters by output."""

    batches: dict[str, int]
    gaps: int
    dead_letters: dict[str, int | None]


class StreamDetail(StreamSummary):
    """Everything about a stream but its batches."""

    definition: dict[str, Any]
    revision: int
    outputs: tuple[str, ...]
    troubles: tuple[str, ...] = Field(default=(), description="What the receiver job reports, in words.")
    receiver_job: ReceiverJob | None
    listeners: tuple[ListenerStatus, ...]
    receivers: tuple[Receiver, ...]
    partitions: tuple[Partition, ...]
    log: Log
    counts: Counts


class OfDag(Answer):
    """The stream of a DAG, and the batch of one of its runs; null if the run has none, or took over another one's."""

    stream: str
    batch_time: Time | None = ms("batch_time", default=None)
