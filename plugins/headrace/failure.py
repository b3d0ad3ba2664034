"""What a failure says of the next try."""

from __future__ import annotations

from enum import StrEnum

FAILURE = "failure"
"""The attribute of a failed attempt that says which."""

TRIED_WITH = "tried_with"
"""The attribute of a failed attempt that names the definition and the code that it ran with."""


TAKEN_UP = "taken_up"
"""The attribute of an attempt at a batch that had failed, made by the run of a later batch."""


class Failure(StrEnum):
    """Whose fault a failure is, and so whether to try again."""

    PASSING = "passing"
    """The surroundings': a server that is away, a process that was killed, credentials that somebody will mend. Tried
    again by later runs, until it succeeds: nobody should have to clear all the batches of a night."""
    CODE = "code"
    """The user's code or definition, or rows that do not fit. The same again will most likely fail again: tried once
    more at once, and by later runs when the definition or the code is another one."""
    FINAL = "final"
    """What was stored is gone or damaged. No repetition brings it back: tried again only as after `CODE`, by later
    runs."""
