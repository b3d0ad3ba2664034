"""What a failure says of the next try."""

from __future__ import annotations

from enum import StrEnum

FAILURE = "failure"
"""The attribute of a failed attempt that says which."""


class Failure(StrEnum):
    """Whose fault a failure is, and so whether to try again."""

    PASSING = "passing"
    """The surroundings': a server that is away, a process that was killed, credentials that somebody will mend. Tried
    again for hours, since nobody should have to clear all the batches of a night."""
    CODE = "code"
    """The user's code or definition, or rows that do not fit. The same again will most likely fail again, and now and
    then it does not: tried again a few times."""
    FINAL = "final"
    """What was stored is gone or damaged. No repetition brings it back, so there is none."""
