"""What can be wrong with a stream's state."""

from __future__ import annotations

from headrace.errors import HeadraceError
from headrace.failure import Failure


class StateError(HeadraceError):
    """The root of the state's errors."""


class StateDefinitionError(StateError):
    """``fields`` or ``keys`` of the stream's state cannot be used, or do not fit the table that is stored."""

    failure = Failure.CODE


class StateRowsError(StateError):
    """What the update returned has other columns than the state's fields, a null in a key, or a key twice."""

    failure = Failure.CODE


class StateMissingError(StateError):
    """The state of a batch is not stored: its update has not run, or the version has been pruned."""


class StateFencedError(StateError):
    """A later attempt at the same batch has written its version of the state."""


class StateDamagedError(StateError):
    """A file of the state is missing, or is not what was written."""

    failure = Failure.FINAL
