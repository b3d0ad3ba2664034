"""What a stream may take: memory, disk, rate and concurrency (rule 12 of the design)."""

from __future__ import annotations

from datetime import timedelta

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from headrace.stream.model import Duration, Part

MIB = 1024 * 1024


class Backpressure(Part):
    """How receivers are slowed down to what batches get through, by Spark's PID estimate (its defaults).

    The factors are without unit and weigh the error of the rate, its backlog and its change; rates are records a
    second. A rate is first set after the second completed batch.
    """

    proportional: NonNegativeFloat = 1.0
    integral: NonNegativeFloat = 0.2
    derivative: NonNegativeFloat = 0.0
    min_rate: PositiveFloat = 100.0
    """The lowest rate of one receiver that it sets."""


class Limits(Part):
    """Bounds, each for one receiver unless it says otherwise."""

    max_block_bytes: PositiveInt = 16 * MIB
    max_queued_blocks: PositiveInt = 10
    prefetch_bytes: PositiveInt = 128 * MIB
    max_rate: PositiveFloat | None = None
    """Records a second; None for as fast as Kafka gives them."""
    backpressure: Backpressure | None = None
    """How batches that take longer than their interval slow the receivers down; None: not at all."""
    max_log_bytes: PositiveInt | None = None
    """Bytes of the log that the stream may keep, all receivers together: at more, receiving pauses and Kafka keeps
    the rest. None for as many as there is room for."""
    segment_bytes: PositiveInt = 128 * MIB
    segment_interval: Duration = timedelta(seconds=60)
    seal_grace: Duration = timedelta(seconds=10)
    """How long a batch waits for live receivers to say that they have stored all blocks of its time."""
    max_coalesced_records: PositiveInt = 500_000
    """Records of a batch that takes over other batch times; the next batch takes the rest. One time may hold more."""
    max_coalesced_bytes: PositiveInt = 256 * MIB
    """The same in bytes as they are in the log."""
    retry_for: Duration | None = None
    """How long a run of the schedule waits for what has to come before its batch, and how long it takes up batches that
    failed before; by default 30 s, or three batch intervals if they are longer."""
    max_concurrent_batches: PositiveInt = 1
    """Batches of the stream that run at the same time."""
    history: Duration | None = timedelta(days=30)
    """How long the ledger and the stream's folder keep a batch that is over; None: for good. What is older can't be run
    or replayed again, not from Kafka either."""
