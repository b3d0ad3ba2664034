"""The error of an invalid stream definition."""

from __future__ import annotations

from headrace.errors import Failure, HeadraceError


class StreamDefinitionError(HeadraceError):
    """A stream cannot be started as it is defined. The text names the field and the remedy."""

    failure = Failure.CODE
