"""Answers about batches: timelines, lists, and one batch."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from headrace.ui.api.models.base import Answer, Seconds, Time, ms
from headrace.ui.api.models.history import Event


class Phases(Answer):
    """Where a batch's time went, in seconds; they add up from the batch time to the checkpoint."""

    waiting: float | None = Field(description="From the batch time to its allocation.")
    starting: float | None = Field(
        description="From its allocation to the start of its newest run: Spark's start, and earlier runs that failed."
    )
    running: float | None = Field(description="From the start of its newest run to its completion.")
    checkpointing: float | None = Field(description="From its completion to its checkpoint.")


class BatchPoint(Answer):
    """A batch on the timeline."""

    batch_time: Time = ms("batch_time")
    records: int
    bytes: int
    input_rate: float = Field(description="Records per second of the time that the batch covers.")
    scheduling_delay: float | None
    processing_time: float | None
    total_delay: float | None
    state: str
    phases: Phases


class Sample(Answer):
    """What the receiver job saw at a moment; in a thinned timeline the mean rate and the largest other values."""

    at: Time = ms("at")
    input_rate: float | None
    lag: int | None
    lag_seconds: float | None
    queue_bytes: int | None
    paused: bool
    log_bytes: int | None


class Spread(Answer):
    """Delays of several batches, in seconds."""

    median: Seconds
    p95: Seconds
    maximum: Seconds


class TimelinePart(Answer):
    """The numbers of all batches of a range of time, but for absorbed ones."""

    from_time: Time = Field(validation_alias="from_ms", serialization_alias="from")
    until: Time = ms("until")
    batches: int
    records: int
    scheduling_delay: Spread | None
    processing_time: Spread | None
    total_delay: Spread | None
    above_interval: int = Field(description="Batches whose processing took longer than their batch interval.")


class Timeline(Answer):
    """Batches and samples of a range of time, oldest first, at most ``points`` of each."""

    batch_interval: float
    from_time: Time = Field(validation_alias="from_ms", serialization_alias="from")
    until: Time = ms("until")
    thinned: bool
    batches: tuple[BatchPoint, ...]
    samples: tuple[Sample, ...]
    parts: tuple[TimelinePart, ...] = Field(
        default=(), description="In a thinned timeline one for each of ``batches``, which are their slowest ones."
    )
    whole: TimelinePart | None = Field(default=None, description="In a thinned timeline the numbers of all batches.")


class BatchLine(BatchPoint):
    """A batch in a list."""

    attempts: int
    error: str | None
    absorbed: int = Field(description="How many earlier batch times it took over.")
    first_time: Time = ms("first_time", description="The earliest of them, or its own time.")
    built: bool = Field(description="It was built from Kafka by timestamps; its records are an upper bound.")
    late_records: int
    started_at: Time | None = ms("started_at")
    completed_at: Time | None = ms("completed_at")
    checkpointed: bool
    cleaned: bool


class BatchPage(Answer):
    """A page of batches."""

    batches: tuple[BatchLine, ...]
    next_cursor: str | None = Field(description="Pass it as ``cursor`` to get the next page; null on the last one.")
    total_by_state: dict[str, int]
    window: int | None = Field(
        default=None, description="With an order other than by time: how many of the newest batches were sorted."
    )


class BatchRange(Answer):
    """The offsets ``[from_offset, until_offset)`` of one partition in a batch."""

    input: str
    topic: str
    partition: int
    from_offset: int
    until_offset: int
    records: int
    blocks: int


class Block(Answer):
    """A block that is still in the log."""

    id: int
    input: str
    receiver: int
    epoch: int
    sequence: int
    cut_at: Time = ms("cut_at")
    records: int
    bytes: int
    segment: str


class Attempt(Answer):
    """An attempt at a batch, or at its replay ``target``."""

    number: int
    state: str
    holder: str
    way: str
    source: str
    target: str | None
    outputs: tuple[str, ...]
    started_at: Time = ms("started_at")
    ended_at: Time | None = ms("ended_at")
    duration: float | None
    error: str | None
    warning: str | None = None
    code_version: str | None
    revision: int | None
    links: Links | None = None


class OutputResult(Answer):
    """The newest result of one output of a batch."""

    id: str
    kind: str | None
    state: str
    counts: dict[str, Any]
    error: str | None
    retries: int = Field(description="The number of its earlier attempts.")
    recorded_at: Time | None = ms("recorded_at", default=None)
    attempt: int | None = None
    target: str | None = Field(default=None, description="The replay that wrote it, null for the stream itself.")


class Links(Answer):
    """Addresses below Airflow's own (they begin with /), and Spark's. Null where there is none."""

    run: str | None = None
    logs: str | None = None
    spark_ui: str | None = None
    grid: str | None = None


class BatchDetail(BatchLine):
    """A batch: what it holds, its attempts, and what became of it in each output."""

    allocated_at: Time | None = ms("allocated_at")
    checkpointed_at: Time | None = ms("checkpointed_at")
    cleaned_at: Time | None = ms("cleaned_at")
    absorbed_times: tuple[Time, ...] = Field(validation_alias="absorbed_times_ms")
    absorbed_by: Time | None = ms("absorbed_by")
    interval: float
    ranges: tuple[BatchRange, ...]
    blocks: tuple[Block, ...] = Field(description="The first 100 that are still in the log.")
    block_count: int
    all_attempts: tuple[Attempt, ...] = Field(description="Oldest first.")
    outputs: tuple[OutputResult, ...]
    code_version: str | None
    revision: int | None
    manifest: str | None
    where: str | None = Field(description="Where its records are read from if it is run again: log, kafka or removed.")
    became: str | None = Field(description="Which run has completed it after another one failed.")
    links: Links
    events: tuple[Event, ...]
