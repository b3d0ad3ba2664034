"""How many dead letters a batch may have before something other than its documents is taken to be at fault."""

from __future__ import annotations

from pydantic import Field, NonNegativeInt

from headrace.stream.model import Part


class DeadLetterLimit(Part):
    """Bounds on the dead letters of one batch in one output, all tasks together. A batch with more of them fails.

    Records without a value do not count: what becomes of them is the output's ``tombstones``.

    By default a batch fails when more than half of its rows are rejected and they are more than 100. Damaged records
    are a small part of a healthy stream; where most are rejected, the mapping, the decoder or the transform is wrong.
    In a batch of a few records a share says nothing, so 100 letters never fail one.
    """

    number: NonNegativeInt | None = Field(default=None, description="The most letters; None for any number.")
    share: float = Field(default=0.5, ge=0, le=1, description="The most letters as a part of the rows; 1 for all.")
    tolerated: NonNegativeInt = Field(default=100, description="Up to so many letters the share is not looked at.")

    def passed(self, letters: int, rows: int) -> str | None:
        """Which bound so many letters of so many rows pass, for people; None if they pass none."""
        if self.number is not None and letters > self.number:
            return f"more than the {self.number:,} of dead_letter_limit.number"
        if letters > self.tolerated and letters > self.share * rows:
            return f"more than the {self.share:.0%} of dead_letter_limit.share"
        return None
