"""What a stream may take: memory, disk, rate and concurrency (rule 12 of the design)."""

from __future__ import annotations

from datetime import timedelta

from pydantic import PositiveFloat, PositiveInt

from headrace.stream.model import Duration, Part

MIB = 1024 * 1024


class Limits(Part):
    """Bounds, each for one receiver unless it says otherwise."""

    max_block_bytes: PositiveInt = 16 * MIB
    max_queued_blocks: PositiveInt = 10
    prefetch_bytes: PositiveInt = 128 * MIB
    max_rate: PositiveFloat | None = None
    """Records a second; None for as fast as Kafka gives them."""
    segment_bytes: PositiveInt = 128 * MIB
    segment_interval: Duration = timedelta(seconds=60)
    seal_grace: Duration = timedelta(seconds=10)
    """How long a batch waits for live receivers to say that they have stored all blocks of its time."""
    max_concurrent_batches: PositiveInt = 1
    """Batches of the stream that run at the same time."""
