"""The parameters that transforms read: the stream's own, overridden by those of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from headrace.errors import Failure, HeadraceError
from headrace.stream.stream import Stream

ATTRIBUTE = "parameters"
"""The attribute of an attempt that holds the parameters given by its run."""


class ParameterError(HeadraceError):
    """A run gives a parameter that the stream does not declare, or parameters that are not an object."""

    failure = Failure.CODE


def merged(stream: Stream, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """The stream's parameters, overridden by those in ``given``.

    Raises:
        ParameterError: ``given`` has a name that the stream's parameters do not have, or is not a mapping.
    """
    if given is None:
        return dict(stream.parameters)
    if not isinstance(given, Mapping):
        raise ParameterError(f"Parameters must be an object of names and values, not a {type(given).__name__}.")
    unknown = sorted(str(name) for name in given if name not in stream.parameters)
    if unknown:
        raise ParameterError(
            f"Stream {stream.name!r} has no parameter {', '.join(unknown)}, "
            f"but {', '.join(sorted(stream.parameters)) or 'none'}.",
            remedy="Declare it with a default in the stream's parameters.",
        )
    return {**stream.parameters, **given}


def parse(text: str) -> dict[str, Any]:
    """Read parameters from JSON text.

    Raises:
        ParameterError: the text is not a JSON object.
    """
    try:
        given = json.loads(text)
    except ValueError as error:
        raise ParameterError(f"The parameters are no JSON: {error}.") from None
    if not isinstance(given, dict):
        raise ParameterError("The parameters must be a JSON object.")
    return given
