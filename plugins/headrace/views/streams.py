"""A stream: in one line, with its state and numbers, and in detail, with its job, receivers, partitions and log."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field

from headrace.batch.due_batches import NextTries
from headrace.ledger import Ledger
from headrace.ledger.batches.tables import BatchRow
from headrace.ledger.errors import LedgerUnavailableError
from headrace.ledger.overviews import StreamOverview
from headrace.ledger.receiving.tables import PositionRow, ReceiverRow
from headrace.ledger.states import UNFINISHED, BatchState, PartitionState, ReceiverState
from headrace.ledger.tables import JobRow, SampleRow, StreamRow
from headrace.ledger.timelines import BatchOrder, BatchSelection
from headrace.receiver.health import InputProblem, input_problems, numbers, receiver_state
from headrace.views.base import UNPUBLISHED, Time, View
from headrace.views.batches import NOT_ALLOCATED, LastBatch, batch_line, completed_batch, failed_of, unfinished_of
from headrace.views.stream_state import DagFacts, Evidence, State, judge

LEASE_LOST = "lease lost"
"""The state of a job or receiver that should run and no longer renews its lease."""
_HOLDERS = 10
POINTS = 30
"""How many values a sparkline has."""


@dataclass(frozen=True, slots=True)
class Placed:
    """Where a stream is declared: its ledger's reference as the user wrote it, and its DAGs.

    ``other_batch_dag_ids`` are further DAGs that declare themselves its batch DAG, such as a copy.
    """

    name: str
    ledger: str
    batch_dag_id: str
    receiver_dag_id: str
    replay_dag_ids: tuple[str, ...] = ()
    other_batch_dag_ids: tuple[str, ...] = ()

    @property
    def batch_dag_ids(self) -> tuple[str, ...]:
        """All DAGs that decide who may read the stream, and act on it."""
        return (self.batch_dag_id, *self.other_batch_dag_ids)


def default_place(stream_name: str, ledger: str) -> Placed:
    """The place of a stream of whose DAGs nothing is known: they have the factories' default ids."""
    return Placed(stream_name, ledger, f"{stream_name}_batches", f"{stream_name}_receiver")


class ProblemKind(StrEnum):
    """What is wrong. The streams of a ledger that cannot be read are not listed; otherwise only one is concerned."""

    LEDGER_UNREADABLE = "ledger_unreadable"
    SEVERAL_BATCH_DAGS = "several_batch_dags"
    NOT_REGISTERED = "not_registered"
    NEW = "new"
    SAME_NAME = "same_name"


class Problem(View):
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


class May(View):
    """What the caller may do with the stream."""

    read: bool
    operate: bool


EVERYTHING = May(read=True, operate=True)
"""Of who reads the ledger itself."""


class OldestUnfinished(View):
    """The unfinished batch that is due longest; its ``state`` is a batch's state or "not allocated"."""

    batch_time_ms: Time
    state: str
    error: str | None
    age: float = Field(description="Seconds since its batch time, or since it was begun again after it had completed.")


class Sparklines(View):
    """The last 30 values, oldest first: ``total_delay`` of batches; the others of samples, or of batches if there are
    no samples."""

    input_rate: tuple[float | None, ...] = ()
    total_delay: tuple[float | None, ...] = ()
    lag: tuple[int | None, ...] = ()


class StreamSummary(View):
    """One stream in the list."""

    name: str
    state: State
    reason: str = Field(description="Why it is in this state, and since when, in words.")
    remedy: str | None = Field(description="What a person can do about it, in words.")
    since_ms: Time | None = Field(description="Since when it is in this state, as far as is known.")
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
    lag_seconds: float | None = Field(
        description="Age in seconds of the oldest record in Kafka that is not in the log."
    )
    last_completed_batch: LastBatch | None
    oldest_unfinished: OldestUnfinished | None
    sparklines: Sparklines
    may: May
    other_batch_dag_ids: Annotated[tuple[str, ...], UNPUBLISHED]

    @property
    def place(self) -> Placed:
        """Where it is declared."""
        return Placed(**{field.name: getattr(self, field.name) for field in fields(Placed)})


class StreamList(View):
    """The streams that the caller may read, and the ledgers that could not be read."""

    streams: tuple[StreamSummary, ...]
    problems: tuple[Problem, ...]


def summarize(ledger: Ledger, row: StreamRow, place: Placed, facts: Mapping[str, DagFacts]) -> StreamSummary:
    """Judge the stream by its ledger and by what Airflow says of its DAGs. Unlike `summaries` it also finds out when a
    failed batch is tried again."""

    def tried_again(batch: BatchRow) -> str | None:
        tries = NextTries(ledger, row.name)
        following = tries.of(batch)
        return None if following is None else following.text(tries.now_ms)

    (summary,) = summaries(ledger, [(row, place)], facts, tried_again)
    return summary


def summaries(
    ledger: Ledger,
    placed: Sequence[tuple[StreamRow, Placed]],
    facts: Mapping[str, DagFacts],
    tried_again: Callable[[BatchRow], str | None] = lambda _: None,
) -> list[StreamSummary]:
    """Judge several streams of a ledger, with as many queries as for one. ``tried_again``: see `Evidence`."""
    overviews = ledger.overviews.of([row for row, _ in placed], POINTS)
    refusals = ledger.overviews.write_refusals([now.stream.name for now in overviews if _is_silent(now)])
    return [
        _summary(overview, place, facts, refusals.get(overview.stream.name), tried_again)
        for overview, (_, place) in zip(overviews, placed, strict=True)
    ]


def _is_silent(overview: StreamOverview) -> bool:
    """Whether what should write to the ledger does not: its writer may be dead, or the ledger not be writable."""
    job = overview.job
    return job is not None and not job.state.ended and not job.alive(overview.now_ms)


def _summary(
    overview: StreamOverview,
    place: Placed,
    facts: Mapping[str, DagFacts],
    write_refusal: LedgerUnavailableError | None,
    tried_again: Callable[[BatchRow], str | None],
) -> StreamSummary:
    now = numbers(overview.receivers, overview.now_ms)
    unfinished = [*unfinished_of(overview)]
    evidence = Evidence(
        overview,
        unfinished=unfinished,
        failed=[*failed_of(overview)],
        write_refusal=write_refusal,
        lag_seconds=now.lag_seconds,
        batch_dag_id=place.batch_dag_id,
        receiver_dag_id=place.receiver_dag_id,
        facts=facts,
        tried_again=tried_again,
    )
    first, *others = judge(evidence)
    completed = overview.last_completed
    return StreamSummary(
        **{field.name: getattr(place, field.name) for field in fields(Placed)},
        state=first.state,
        reason=first.reason,
        remedy=first.remedy,
        since_ms=first.since_ms,
        details=first.details,
        also=tuple(finding.reason for finding in others),
        desired_state=overview.stream.desired_state.value,
        batch_interval=overview.stream.batch_interval_ms / 1000,
        input_rate=now.input_rate,
        lag=now.lag,
        lag_unknown=now.lag_unknown,
        lag_seconds=now.lag_seconds,
        last_completed_batch=None if completed is None else completed_batch(completed),
        oldest_unfinished=_oldest(evidence),
        sparklines=_sparklines(overview.recent, overview.samples),
        may=EVERYTHING,
    )


def _oldest(evidence: Evidence) -> OldestUnfinished | None:
    oldest = evidence.oldest
    if oldest is None:
        return None
    return OldestUnfinished(
        batch_time_ms=oldest.batch_time_ms,
        state=oldest.state,
        error=oldest.error,
        age=evidence.late_seconds(oldest.due_ms),
    )


def _sparklines(recent: Sequence[BatchRow], samples: Sequence[SampleRow]) -> Sparklines:
    lines = [batch_line(row) for row in reversed(recent)]
    return Sparklines(
        input_rate=tuple(point.input_rate for point in samples or lines),
        total_delay=tuple(line.total_delay for line in lines),
        lag=tuple(sample.lag for sample in samples),
    )


class ReceiverJob(View):
    """The newest receiver job. ``state`` is "lease lost" if it should run but no longer renews its lease."""

    state: str
    holder: str
    host: str | None
    since_ms: Time
    ended_at_ms: Time | None = None
    error: str | None = None
    epoch: int
    revision: int | None = Field(default=None, description="The definition's revision that it runs with.")
    code_version: str | None
    spark_ui: str | None
    log_path: str | None


class ListenerStatus(View):
    """A listener in this receiver job, which counts from its own beginning."""

    name: str
    dropped: int = Field(description="Events that came while its queue was full.")
    missed: int = Field(description="Events that were deleted before it got them.")
    failed: int = Field(description="Its calls that raised.")
    error: str | None = Field(description="The last error, also of a listener that could not be made.")
    slow: str | None = Field(description="Which call takes longer than 30 seconds at the moment.")


class LastError(View):
    """The last error of a receiver."""

    at_ms: Time
    text: str
    stack: str | None = Field(description="The traceback, if the error has one.")


class Receiver(View):
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
    heartbeat_at_ms: Time
    sealed_through_ms: Time | None = Field(description="Everything that it cut until then is stored.")
    lease_until_ms: Time
    restarts: int
    last_error: LastError | None
    paused_reason: str | None


class Partition(View):
    """A partition and its position."""

    input: str
    topic: str
    partition: int
    receiver: int | None
    state: str
    next_offset: int
    lag: int | None
    watermark_ms: Time | None = Field(description="The latest timestamp; null in a stream by arrival.")
    drained_ms: Time | None = Field(
        description="Everything that Kafka had at this time is stored; null in a stream by arrival."
    )
    error: str | None
    incarnation: Annotated[int, UNPUBLISHED]


class Holder(View):
    """A batch whose blocks keep segments of the log from being deleted."""

    batch_time_ms: Time
    state: str
    reason: str
    bytes: int | None


class Log(View):
    """The write-ahead log's files. ``held_by`` are the ten oldest batches that need it."""

    bytes: int
    limit_bytes: int | None
    segments: int
    held_by: tuple[Holder, ...]


class Counts(View):
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


class OfDag(View):
    """The stream of a DAG, and the batch of one of its runs; null if the run has none, or took over another one's."""

    stream: str
    batch_time_ms: Time | None = None


def stream_detail(ledger: Ledger, name: str, place: Placed, facts: Mapping[str, DagFacts]) -> StreamDetail:
    """Read a stream.

    Raises:
        StreamNotFoundError: the ledger does not have it.
    """
    # The list of streams needs nothing of listeners, and their events are many classes.
    from headrace.listeners.bus import listener_statuses

    row, now_ms = ledger.streams.get(name), ledger.now_ms()
    definition = json.loads(row.definition)
    job, receivers = ledger.jobs.current(name), ledger.receivers.all(name)
    troubles = input_problems(job, receivers, now_ms)
    return StreamDetail(
        **dict(summarize(ledger, row, place, facts)),
        definition=definition,
        revision=row.revision,
        outputs=tuple(row.id_of_step.get(step, step) for step in row.outputs),
        troubles=() if job is None or not job.alive(now_ms) else tuple(job.attributes.get("troubles") or ()),
        receiver_job=None if job is None else _job(job, now_ms),
        listeners=tuple(map(ListenerStatus.model_validate, listener_statuses(job))),
        receivers=tuple(_receiver(receiver, troubles, now_ms) for receiver in receivers),
        partitions=tuple(_partition(position, receivers) for position in ledger.positions.all(name, live=True)),
        log=_log(ledger, row, definition, now_ms),
        counts=_counts(ledger, row, definition),
    )


def _job(job: JobRow, now_ms: int) -> ReceiverJob:
    attributes, versions = job.attributes, job.versions
    return ReceiverJob(
        state=job.state.value if job.state.ended or job.alive(now_ms) else LEASE_LOST,
        holder=job.holder,
        host=attributes.get("host"),
        since_ms=job.acquired_at_ms,
        ended_at_ms=job.ended_at_ms,
        error=job.error,
        epoch=job.epoch,
        revision=attributes.get("revision"),
        code_version=", ".join(f"{name} {version}" for name, version in sorted(versions.items())) or None,
        spark_ui=attributes.get("ui_url"),
        log_path=attributes.get("log"),
    )


def _receiver(row: ReceiverRow, troubles: Sequence[InputProblem], now_ms: int) -> Receiver:
    stats, receiver_id = row.stats, row.receiver_id
    return Receiver(
        id=str(receiver_id),
        index=receiver_id.index,
        input=receiver_id.input_id,
        host=row.host,
        executor=row.executor_id,
        state=_receiver_state(row, troubles, now_ms),
        epoch=row.epoch,
        partitions=stats.get("partitions"),
        rate=stats.get("rate"),
        rate_limit=row.max_rate,
        queue_blocks=stats.get("queued_blocks"),
        queue_bytes=stats.get("queued_bytes"),
        lag=None if stats.get("lag_unknown") else stats.get("total_lag"),
        late_records=stats.get("late_records"),
        heartbeat_at_ms=row.heartbeat_ms,
        sealed_through_ms=row.sealed_through_ms or None,
        lease_until_ms=row.lease_until_ms,
        restarts=row.restarts,
        last_error=_last_error(row),
        paused_reason=row.paused_reason,
    )


def _last_error(row: ReceiverRow) -> LastError | None:
    if row.last_error is None or row.last_error_at_ms is None:
        return None
    return LastError(at_ms=row.last_error_at_ms, text=row.last_error, stack=row.last_error_stack)


def _receiver_state(row: ReceiverRow, troubles: Sequence[InputProblem], now_ms: int) -> str:
    if row.state.ended or row.state is ReceiverState.SCHEDULED:
        return row.state.value
    if not row.alive(now_ms):
        return LEASE_LOST
    return receiver_state(row, troubles) if row.paused_reason is None else "paused"


def _partition(row: PositionRow, receivers: Sequence[ReceiverRow]) -> Partition:
    owner = (row.input_id, -1 if row.receiver_index is None else row.receiver_index)
    owners = {(receiver.receiver_id.input_id, receiver.receiver_id.index): receiver for receiver in receivers}
    lag = owners[owner].lag_of(row.partition) if owner in owners else None
    return Partition(
        input=row.input_id,
        topic=row.partition.topic,
        partition=row.partition.partition,
        incarnation=row.partition.incarnation,
        receiver=row.receiver_index,
        state=row.state.value,
        next_offset=row.next_offset,
        lag=lag if row.state is PartitionState.ACTIVE else None,
        watermark_ms=row.watermark_ms or None,
        drained_ms=row.drained_ms or None,
        error=row.error,
    )


def _log(ledger: Ledger, row: StreamRow, definition: Mapping[str, Any], now_ms: int) -> Log:
    from headrace.stream import Stream
    from headrace.stream.model import StreamDefinitionError

    try:
        remember_ms = Stream.from_json(row.definition).remember_ms
    except StreamDefinitionError:  # another version of headrace wrote it
        remember_ms = row.batch_interval_ms
    kept_ms = remember_ms + row.batch_interval_ms  # each batch cleans up once
    waiting = [
        Holder(
            batch_time_ms=pending.batch_time_ms,
            state=NOT_ALLOCATED,
            reason="no batch has taken it yet",
            bytes=pending.payload_bytes,
        )
        for pending in ledger.blocks.unclaimed(row.name, _HOLDERS)
        if pending.batch_time_ms <= now_ms
    ]
    allocated = [
        Holder(
            batch_time_ms=batch.batch_time_ms,
            state=batch.state.value,
            reason=_held(batch, now_ms, kept_ms),
            bytes=batch.payload_bytes,
        )
        for batch in ledger.batches.uncleaned(row.name, _HOLDERS, with_built=False)
    ]
    return Log(
        bytes=ledger.segments.stored_bytes(row.name),
        limit_bytes=(definition.get("limits") or {}).get("max_log_bytes"),
        segments=ledger.segments.count(row.name),
        held_by=tuple(sorted([*waiting, *allocated], key=lambda holder: holder.batch_time_ms)[:_HOLDERS]),
    )


def _held(batch: BatchRow, now_ms: int, kept_ms: int) -> str:
    if batch.state in UNFINISHED:
        return f"it is {batch.state.value}" + (f": {batch.error}" if batch.error else "")
    if batch.state is BatchState.COMPLETED and batch.checkpointed_at_ms is None:
        return "it is not checkpointed yet"
    if now_ms - batch.batch_time_ms < kept_ms:
        return "it is remembered for a while (Stream.remember)"
    return "the next cleanup deletes it, unless a block in the same segment is still needed"


def _counts(ledger: Ledger, row: StreamRow, definition: Mapping[str, Any]) -> Counts:
    newest = ledger.batch_pages.page(row.name, BatchSelection((BatchState.COMPLETED,)), BatchOrder.NEWEST, POINTS).rows
    # Of the definition, not `row.outputs`: only Elasticsearch outputs have dead letters.
    outputs = [output for output in definition.get("outputs") or () if output.get("kind") == "elasticsearch"]
    letters: dict[str, int | None] = dict.fromkeys(output["id"] for output in outputs)
    for recorded in ledger.attempts.recorded(row.name, [batch.batch_time_ms for batch in newest]).values():
        for output, record in recorded.items():
            number = record.counts.get("dead_lettered")
            if output in letters and isinstance(number, int):
                letters[output] = (letters.get(output) or 0) + number
    return Counts(
        batches=ledger.batch_pages.counts(row.name), gaps=ledger.batch_pages.gaps(row.name), dead_letters=letters
    )
