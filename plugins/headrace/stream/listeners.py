"""A listener of a stream: the object that is called when something happens in it."""

from __future__ import annotations

import json

from pydantic import Field, field_validator

from headrace.stream.references import CalledClass, check_reference


class Listener(CalledClass):
    """A `headrace.listeners.StreamListener` that runs in the driver of the stream's receiver job.

    ``reference`` is "module:Class", which is called with ``arguments``, or "module:instance", which has none.
    """

    reference: str = Field(description='"module:Class" or "module:instance"')
    name: str | None = Field(
        default=None, min_length=1, max_length=200, description="Names its cursor; by default the reference."
    )

    @field_validator("reference")
    @classmethod
    def _is_a_reference(cls, value: str) -> str:
        return check_reference(value)

    @property
    def id(self) -> str:
        """The name, by default the reference: it distinguishes the listeners of a stream."""
        return self.name or self.reference

    def __str__(self) -> str:
        connection = "" if self.connection is None else f", connection {self.connection}"
        return f"{self.id} ({self.reference} {json.dumps(self.arguments)}{connection})"
