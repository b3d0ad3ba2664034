"""What goes wrong when recorded offset ranges are read again from Kafka."""

from __future__ import annotations

from headrace.errors import HeadraceError
from headrace.failure import Failure


class ReplayError(HeadraceError):
    """Ranges cannot be read again from Kafka."""


class OverlappingRangesError(ReplayError):
    """Two ranges share offsets."""

    failure = Failure.FINAL


class RangesGoneError(ReplayError):
    """Kafka no longer has all of the ranges: retention removed them, or the topic was deleted or created again."""

    failure = Failure.FINAL


class RecordsDifferError(ReplayError):
    """A range holds more or fewer records than were counted when it was first read."""

    failure = Failure.FINAL


class RangesUnreadableError(ReplayError):
    """Kafka does not answer, or does not give what it says it has."""
