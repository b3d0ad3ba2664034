"""A listener of a stream: the object that is called when something happens in it."""

from __future__ import annotations

import json

from pydantic import Field, JsonValue, field_validator

from headrace.stream.model import Part
from headrace.stream.references import check_reference
from headrace.stream.secrets import check_arguments


class Listener(Part):
    """A `headrace.listeners.StreamListener` that runs in the driver of the stream's receiver job.

    ``reference`` is "module:Class", which is called with ``arguments``, or "module:instance", which has none.
    """

    reference: str = Field(description='"module:Class" or "module:instance"')
    arguments: dict[str, JsonValue] = Field(
        default_factory=dict, description="What the class is called with, by name. They are stored in clear."
    )
    connection: str | None = Field(
        default=None,
        description="The id of an Airflow connection. The class is called with this id as ``connection``, and "
        "``headrace.connections.resolve`` finds the connection.",
    )
    name: str | None = Field(
        default=None, min_length=1, max_length=200, description="Names its cursor; by default the reference."
    )

    @field_validator("reference")
    @classmethod
    def _is_a_reference(cls, value: str) -> str:
        return check_reference(value)

    @field_validator("arguments")
    @classmethod
    def _hold_no_secret(cls, value: dict[str, JsonValue]) -> dict[str, JsonValue]:
        return check_arguments(value)

    @property
    def id(self) -> str:
        """The name, by default the reference: it distinguishes the listeners of a stream."""
        return self.name or self.reference

    def __str__(self) -> str:
        connection = "" if self.connection is None else f", connection {self.connection}"
        return f"{self.id} ({self.reference} {json.dumps(self.arguments)}{connection})"
