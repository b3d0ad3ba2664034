"""The base class of every part of a stream's definition (frozen, no unknown fields, plain errors), and shared types."""

from __future__ import annotations

import difflib
import re
from contextvars import ContextVar
from datetime import timedelta
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, PlainSerializer, ValidationError

from headrace.stream.errors import StreamDefinitionError

IDENTIFIER = re.compile(r"[a-z][a-z0-9_-]{0,62}")

_UNITS_MS = {"ms": 1, "s": 1_000, "min": 60_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_DURATION = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*(ms|s|min|m|h|d)\s*$")

_within_another: ContextVar[bool] = ContextVar("_within_another", default=False)


class Part(BaseModel):
    """A part of a stream's definition."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, allow_inf_nan=False)

    def __init__(self, **fields: Any) -> None:
        within = _within_another.set(True)
        try:
            super().__init__(**fields)
        except ValidationError as error:
            # A part within another one leaves the report to it: only the outermost knows the whole path.
            if within.old_value is True:
                raise
            raise _definition_error(type(self), fields, error) from None
        finally:
            _within_another.reset(within)


def _definition_error(part: type[Part], fields: dict[str, Any], error: ValidationError) -> StreamDefinitionError:
    """The error with one clause per problem, each with its field. Values are left out, since they may hold a secret."""
    problems = []
    for item in error.errors(include_url=False, include_input=False, include_context=False):
        where = ".".join(str(step) for step in item["loc"])
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            message = "is no field" + _suggestion(where, part)
        elif item["type"] == "missing":
            message = "is required"
        elif message.startswith("Input should"):
            message = f"must {message.removeprefix('Input should ')}"
        problems.append(f"{where} {message}" if where else message)
    name = fields.get("name", fields.get("id"))
    who = part.__name__ if name is None else f"{part.__name__} {name!r}"
    return StreamDefinitionError(f"{who} cannot be used as it is defined: {'; '.join(problems).rstrip('.')}.")


def _suggestion(field: str, part: type[Part]) -> str:
    """What the field was probably to be; "" if it is unlike the fields of ``part``."""
    close = difflib.get_close_matches(field, part.model_fields, 1)
    return f" (did you mean {close[0]}?)" if close else ""


def _identifier(value: str) -> str:
    if not IDENTIFIER.fullmatch(value):
        raise ValueError("must start with a letter and hold at most 63 of a-z, 0-9, _ and -")
    return value


def _parse_duration(value: Any) -> Any:
    if isinstance(value, timedelta):
        return value
    try:
        if isinstance(value, str) and (match := _DURATION.match(value)):
            return timedelta(milliseconds=float(match[1]) * _UNITS_MS[match[2]])
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return timedelta(seconds=value)
    except OverflowError:
        raise ValueError("is too long") from None
    raise ValueError('must be a timedelta, a number of seconds, or a text such as "200 ms", "10 s" or "5 min"')


def _whole_milliseconds(value: timedelta) -> timedelta:
    if value % timedelta(milliseconds=1):
        raise ValueError("must be a whole number of milliseconds")
    if value <= timedelta(0):
        raise ValueError("must be longer than zero")
    return value


def milliseconds(value: timedelta) -> int:
    """A duration in whole milliseconds."""
    return value // timedelta(milliseconds=1)


Identifier = Annotated[str, AfterValidator(_identifier)]

Duration = Annotated[
    timedelta,
    BeforeValidator(_parse_duration),
    AfterValidator(_whole_milliseconds),
    PlainSerializer(lambda value: f"{milliseconds(value)} ms", return_type=str, when_used="json"),
]
