"""The kinds of failure of an attempt at a batch, which determine whether it is retried automatically."""

from __future__ import annotations

from enum import StrEnum

FAILURE = "failure"
"""The attribute of a failed attempt that holds its `Failure`."""

TRIED_WITH = "tried_with"
"""The attribute of a failed attempt that identifies the definition and the code that it ran with."""


TAKEN_UP = "taken_up"
"""The attribute of an attempt by which a later batch's run retries a batch that failed."""


class Failure(StrEnum):
    """The cause of a failure, which determines whether to retry."""

    PASSING = "passing"
    """The environment: an unavailable server, a killed process, credentials that will be corrected. Later runs retry it
    until it succeeds, so that nobody has to clear all the batches of a night."""
    CODE = "code"
    """The user's code or definition, or rows that do not fit. The same attempt will most likely fail again, so later
    runs retry it when the definition or the code has changed."""
    FINAL = "final"
    """Stored data is lost or damaged, and a retry does not restore it. Later runs retry it when the definition or the
    code has changed."""
