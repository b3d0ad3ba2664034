"""The errors of a stream's state."""

from __future__ import annotations

from headrace.errors import Failure, HeadraceError


class StateError(HeadraceError):
    """The base class of the state's errors."""


class StateDefinitionError(StateError):
    """``fields`` or ``keys`` of the stream's state cannot be used, or do not fit the stored table."""

    failure = Failure.CODE


class StateRowsError(StateError):
    """The update's result is not a DataFrame, has other columns than the fields, a null in a key, or a key twice."""

    failure = Failure.CODE


class StateMissingError(StateError):
    """The state of a batch is not stored: its update has not run, or the version has been pruned."""


class StateFencedError(StateError):
    """A later attempt at the same batch has written its version of the state."""


class StateDamagedError(StateError):
    """A file of the state is missing, damaged or not readable."""

    failure = Failure.FINAL
