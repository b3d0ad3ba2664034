"""What starts a batch in place of the clock."""

from __future__ import annotations

from pydantic import PositiveInt

from headrace.stream.model import Duration, Part, milliseconds


class BatchTrigger(Part):
    """A batch as soon as ``min_records`` are waiting, or the oldest of them for ``max_delay``.

    The batch takes everything received in intervals that have ended; so the batch interval is how finely the trigger
    sees, and is best a second or a few.
    """

    min_records: PositiveInt
    max_delay: Duration

    @property
    def max_delay_ms(self) -> int:
        """Milliseconds that a record waits at most for a batch to be triggered."""
        return milliseconds(self.max_delay)
