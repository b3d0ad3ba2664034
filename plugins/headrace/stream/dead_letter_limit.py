"""The limit on a batch's dead letters: above it the batch fails, since the fault is probably not in single records."""

from __future__ import annotations

from pydantic import Field, NonNegativeInt

from headrace.stream.model import Part


class DeadLetterLimit(Part):
    """Bounds on the dead letters of one batch in one output, all tasks together. A batch with more of them fails.

    Records without a value do not count: ``tombstones`` of the output decides what happens to them.

    By default a batch fails when more than 100 rows and more than half of its rows are rejected. Damaged records are a
    small part of a healthy stream; if most are rejected, the mapping, the decoder or the transform is wrong. In a batch
    of a few records a share means nothing, so up to 100 letters never fail a batch.
    """

    number: NonNegativeInt | None = Field(default=None, description="The most letters; None for any number.")
    share: float = Field(default=0.5, ge=0, le=1, description="The most letters as a part of the rows; 1 for all.")
    tolerated: NonNegativeInt = Field(default=100, description="Up to so many letters the share is not looked at.")

    def passed(self, letters: int, rows: int) -> str | None:
        """Text that names the bound that ``letters`` of ``rows`` exceed; None if they exceed none."""
        if self.number is not None and letters > self.number:
            return f"more than the {self.number:,} of dead_letter_limit.number"
        if letters > self.tolerated and letters > self.share * rows:
            return f"more than the {self.share:.0%} of dead_letter_limit.share"
        return None
