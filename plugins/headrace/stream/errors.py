"""What is wrong with a stream's definition."""

from __future__ import annotations

from headrace.errors import HeadraceError
from headrace.failure import Failure


class StreamDefinitionError(HeadraceError):
    """A stream cannot be started as it is defined; the text names the field and the remedy."""

    failure = Failure.CODE
