"""The limits of a stream: memory, disk, rate, time, concurrency (rule 12 of the design) and dead letters."""

from __future__ import annotations

from datetime import timedelta

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from headrace.stream.model import Duration, Part

MIB = 1024 * 1024


class Backpressure(Part):
    """Slows receivers down to the rate that batches can process, by Spark's PID estimate (with its defaults).

    The factors have no unit: ``proportional`` weighs the error of the rate, ``integral`` the backlog, ``derivative``
    the change of the error. Rates are records per second. Without ``initial_rate`` a rate is first set after the second
    completed batch, with it after the first.
    """

    proportional: NonNegativeFloat = 1.0
    integral: NonNegativeFloat = 0.2
    derivative: NonNegativeFloat = 0.0
    min_rate: PositiveFloat = 100.0
    """The lowest rate that is set for one receiver."""
    initial_rate: PositiveFloat | None = None
    """The rate of each receiver until the first estimate; None: no bound. For the backlog of a new stream."""


class Limits(Part):
    """Bounds on what a stream uses, each for one receiver unless stated otherwise."""

    max_block_bytes: PositiveInt = 16 * MIB
    max_queued_blocks: PositiveInt = 10
    prefetch_bytes: PositiveInt = 128 * MIB
    max_rate: PositiveFloat | None = None
    """Records per second; None: no bound."""
    max_rate_per_partition: PositiveFloat | None = None
    """Records per second of each partition, so that a busy one does not take the whole of ``max_rate``; None: no
    bound."""
    backpressure: Backpressure | None = None
    """How batches that take longer than their interval slow the receivers down; None: not at all."""
    max_log_bytes: PositiveInt | None = None
    """The log's bytes, of all receivers together. Above this, receiving pauses and Kafka keeps the rest. None: no
    bound."""
    segment_bytes: PositiveInt = 128 * MIB
    segment_interval: Duration = timedelta(seconds=60)
    store_timeout: Duration = Field(default=timedelta(seconds=30), le=timedelta(seconds=45))
    """How long one write to an object store may take, with the retries of its driver. Then it counts as failed. The
    default is that of Spark's ``blockStoreTimeout``. At most 45 s: the tracker gives up a receiver that has not renewed
    its lease for 60 s. Has no effect on a log in a folder."""
    seal_grace: Duration = timedelta(seconds=10)
    """How long a batch waits for live receivers to declare that they have stored all blocks of its batch time."""
    max_coalesced_records: PositiveInt = 500_000
    """Records of a batch that takes over other batch times; the next batch takes the rest. A single batch time may hold
    more."""
    max_coalesced_bytes: PositiveInt = 256 * MIB
    """The same bound in bytes, as stored in the log."""
    retry_for: Duration | None = None
    """How long a run of the schedule waits for the batches that must run before its own, and for how long it retries
    batches that failed before; by default 30 s, or three batch intervals if they are longer."""
    max_concurrent_batches: PositiveInt = 1
    """Batches of the stream that run at the same time."""
    history: Duration | None = timedelta(days=30)
    """How long the ledger and the stream's folder keep a finished batch; None: forever. Older batches cannot be run or
    replayed again, not even from Kafka."""


class DeadLetterLimit(Part):
    """Bounds on the dead letters of one batch in one output, all tasks together. A batch with more of them fails.

    Records without a value do not count: ``tombstones`` of the output decides what happens to them.

    By default a batch fails when more than 100 rows and more than half of its rows are rejected. Damaged records are a
    small part of a healthy stream; if most are rejected, the mapping, the decoder or the transform is wrong. In a batch
    of a few records a share means nothing, so up to 100 letters never fail a batch.
    """

    number: NonNegativeInt | None = Field(default=None, description="The maximum number of letters; None: no maximum.")
    share: float = Field(
        default=0.5, ge=0, le=1, description="The maximum number of letters as a share of the rows; 1: no maximum."
    )
    tolerated: NonNegativeInt = Field(
        default=100, description="Up to this number of letters, the share is not checked."
    )

    def passed(self, letters: int, rows: int) -> str | None:
        """Text that names the bound that ``letters`` of ``rows`` exceed; None if they exceed none."""
        if self.number is not None and letters > self.number:
            return f"more than the {self.number:,} of dead_letter_limit.number"
        if letters > self.tolerated and letters > self.share * rows:
            return f"more than the {self.share:.0%} of dead_letter_limit.share"
        return None
