"""The setting that starts batches by the records received instead of by the clock."""

from __future__ import annotations

from pydantic import PositiveInt

from headrace.stream.model import Duration, Part, milliseconds


class BatchTrigger(Part):
    """Starts a batch as soon as ``min_records`` are waiting, or the oldest has waited for ``max_delay``.

    The batch takes everything received in intervals that have ended. So the batch interval is the trigger's resolution;
    one to a few seconds is best.
    """

    min_records: PositiveInt
    max_delay: Duration

    @property
    def max_delay_ms(self) -> int:
        """The longest time in milliseconds that a record waits for a batch to be triggered."""
        return milliseconds(self.max_delay)
