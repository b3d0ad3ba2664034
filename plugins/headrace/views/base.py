"""What all views share: how they are written as JSON, and what of them the API leaves out.

A view is made once, of the ledger's rows. The API answers with it, commands print it, and metrics read it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import (
    AliasGenerator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    PlainSerializer,
    WithJsonSchema,
)
from pydantic_core import CoreSchema, core_schema


def iso(time_ms: int) -> str:
    """Epoch milliseconds as ISO 8601 in UTC, always with milliseconds."""
    at = datetime.fromtimestamp(time_ms / 1000, UTC)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


Time = Annotated[
    int,
    PlainSerializer(iso, return_type=str, when_used="json"),
    WithJsonSchema({"type": "string", "format": "date-time", "examples": ["2026-11-23T06:30:00.000Z"]}),
]
"""Epoch milliseconds in Python, ISO 8601 in JSON: the attribute ``at_ms`` is the field ``at``."""


Seconds = Annotated[float, BeforeValidator(lambda milliseconds: milliseconds / 1000)]
"""Seconds, of a value in milliseconds."""


class AsItIs:
    """An annotation: the value of a field is neither checked nor copied."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.any_schema()


@dataclass(frozen=True)
class ShownAs:
    """An annotation: in JSON a field is a ``view``, which ``show`` makes of its value. The value is not checked."""

    view: Any
    show: Callable[[Any], Any]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        shown = handler.generate_schema(self.view)
        in_json = core_schema.plain_serializer_function_ser_schema(self.show, return_schema=shown, when_used="json")
        # Around the view's own schema, so that the API's document describes that.
        return core_schema.no_info_wrap_validator_function(lambda value, _: value, shown, serialization=in_json)


UNPUBLISHED: Any = Field(exclude=True)
"""A field that the API's answers do not have. Commands print it."""
ROWS = (AsItIs(), UNPUBLISHED)
"""Rows of the ledger that a view was made of. The API's answers do not have them."""


class View(BaseModel):
    """A part of what is shown. It can be made of a row by its attributes."""

    model_config = ConfigDict(
        from_attributes=True,
        frozen=True,
        # Most processes that import a view need a few of them only.
        defer_build=True,
        alias_generator=AliasGenerator(serialization_alias=lambda name: name.removesuffix("_ms")),
    )
