"""What all answers share: how they are made, and how times are written."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, WithJsonSchema


def iso(time_ms: int) -> str:
    """Epoch milliseconds as ISO 8601 in UTC, always with milliseconds."""
    at = datetime.fromtimestamp(time_ms / 1000, UTC)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


Time = Annotated[
    int,
    PlainSerializer(iso, return_type=str, when_used="json"),
    WithJsonSchema({"type": "string", "format": "date-time", "examples": ["2026-11-23T06:30:00.000Z"]}),
]
"""Epoch milliseconds in Python, ISO 8601 in JSON."""


Seconds = Annotated[float, BeforeValidator(lambda milliseconds: milliseconds / 1000)]
"""Seconds, of a value in milliseconds."""


def ms(name: str, **options: Any) -> Any:
    """A time whose attribute in `headrace.views` is called ``<name>_ms``."""
    return Field(validation_alias=f"{name}_ms", **options)


class Answer(BaseModel):
    """A part of an answer, made of a value of `headrace.views` by its attributes."""

    model_config = ConfigDict(from_attributes=True, frozen=True)
