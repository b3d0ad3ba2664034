"""The base class of every part of a stream's definition (frozen, no unknown fields, plain errors), and shared types.

One of them is a reference to a Python object, "module:attribute".
"""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from datetime import timedelta
from functools import cache
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    PlainSerializer,
    ValidationError,
    ValidatorFunctionWrapHandler,
)

from headrace.errors import Failure, HeadraceError
from headrace.stream.secrets import check_arguments


class StreamDefinitionError(HeadraceError):
    """A stream cannot be started as it is defined. The text names the field and the remedy."""

    failure = Failure.CODE


IDENTIFIER = re.compile(r"[a-z][a-z0-9_-]{0,62}")

_UNITS_MS = {"ms": 1, "s": 1_000, "min": 60_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_DURATION = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*(ms|s|min|m|h|d)\s*$")

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
        else:
            # pydantic's "Input should be …", "String should match …", "Tuple should have …".
            message = re.sub(r"^[A-Z]\w+ should ", "must ", message)
        problems.append(f"{where} {message}" if where else message)
    name = fields.get("name", fields.get("id"))
    who = part.__name__ if name is None else f"{part.__name__} {name!r}"
    return StreamDefinitionError(f"{who} cannot be used as it is defined: {'; '.join(problems).rstrip('.')}.")


def _suggestion(field: str, part: type[Part]) -> str:
    """What the field was probably to be; "" if it is unlike the fields of ``part``."""
    close = difflib.get_close_matches(field, part.model_fields, 1)
    return f" (did you mean {close[0]}?)" if close else ""


def check_identifier(value: str) -> str:
    """Return the id or name if it is valid. Raises ValueError, which the definition's error repeats."""
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


Identifier = Annotated[str, AfterValidator(check_identifier)]

Texts = Annotated[tuple[str, ...], BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)]
"""The type of a field with several texts; a single one may be written without a list."""

Duration = Annotated[
    timedelta,
    BeforeValidator(_parse_duration),
    AfterValidator(_whole_milliseconds),
    PlainSerializer(lambda value: f"{milliseconds(value)} ms", return_type=str, when_used="json"),
]


_REFERENCE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class CalledClass(Part):
    """A part of a definition that names a class, with what the class is called with."""

    arguments: Annotated[dict[str, JsonValue], AfterValidator(check_arguments)] = Field(
        default_factory=dict, description="What the class is called with, by name. They are stored in clear."
    )
    connection: str | None = Field(
        default=None,
        description="The id of an Airflow connection. The class is called with this id as ``connection``, and "
        "``headrace.connections.resolve`` finds the connection.",
    )

    @property
    def keywords(self) -> dict[str, JsonValue]:
        """The keyword arguments of the class: the arguments, and the connection's id if there is one."""
        return self.arguments if self.connection is None else {**self.arguments, "connection": self.connection}

    @property
    def connection_ids(self) -> tuple[str, ...]:
        """The ids of the Airflow connections that the class looks up."""
        return () if self.connection is None else (self.connection,)


def is_reference(text: str) -> bool:
    """Whether the text has the form of a reference."""
    return _REFERENCE.fullmatch(text) is not None


def _check_reference(text: str) -> str:
    if not is_reference(text):
        raise ValueError('must be "module:function"')
    return text


Reference = Annotated[str, AfterValidator(_check_reference)]
"""The type of a field with a reference."""


def validate_part(
    base: type[Part], built_in: Sequence[type[Part]], group: str, value: Any, handler: ValidatorFunctionWrapHandler
) -> Any:
    """Validate a part that is one of headrace's own, or of another package: an instance, or its fields with a ``kind``.

    The package's class is found by the entry point named as the kind in ``group``. It is looked for only if a
    definition has a kind that headrace does not know.
    """
    if isinstance(value, base) and type(value) not in built_in:
        return value
    kind = value.get("kind") if isinstance(value, dict) else None
    own = {part.model_fields["kind"].default for part in built_in}
    if not isinstance(kind, str) or kind in own:
        return handler(value)
    part = _class_of_kind(base, kind, group, tuple(sorted(own)))
    try:
        return part.model_validate(value)
    except ValueError:
        # pydantic's errors too, with the fields.
        raise
    except Exception as error:
        raise ValueError(
            f"has the kind {kind!r}, and a validator of its class {part.__module__}.{part.__qualname__} raises "
            f"{type(error).__name__}: {error}"
        ) from error


@cache
def _class_of_kind(base: type[Part], kind: str, group: str, own: tuple[str, ...]) -> type[Part]:
    from importlib.metadata import entry_points

    installed = entry_points(group=group)
    named = list(installed.select(name=kind))
    if not named:
        others = f" ({', '.join(sorted(installed.names))})" if installed else ""
        raise ValueError(
            f"has the kind {kind!r}, which is none of headrace's ({', '.join(own)}) and of no installed package"
            f"{others}; install the package that has it, with its entry point {kind!r} in the group {group}, wherever "
            "the stream runs"
        )
    where = f"the entry point {kind!r} in the group {group}, {named[0].value}"
    try:
        loaded = named[0].load()
    except (Exception, SystemExit) as error:
        # A module may raise anything; the streams of other kinds go on.
        what = f"{type(error).__name__}: {error}"
        raise ValueError(f"has the kind {kind!r}, and {where}, cannot be loaded: {what}") from error
    if not isinstance(loaded, type) or not issubclass(loaded, base):
        raise ValueError(f"has the kind {kind!r}, and {where}, is no class that extends {base.__name__}")
    return loaded


def references_in(value: JsonValue, name: str = "") -> Iterator[str]:
    """Yields each text in ``value`` that has the form of a reference, as "outputs.0.transform: module:function"."""
    if isinstance(value, dict):
        inside = [(f"{name}.{key}" if name else key, child) for key, child in value.items()]
    elif isinstance(value, list):
        inside = [(f"{name}.{index}", child) for index, child in enumerate(value)]
    else:
        if isinstance(value, str) and is_reference(value):
            yield f"{name}: {value}"
        return
    for path, child in inside:
        yield from references_in(child, path)


def load_reference(reference: str, what: str) -> object:
    """Import the object that ``reference`` names; ``what`` is its role in the definition, for the error.

    Raises:
        StreamDefinitionError: its module cannot be imported or has no such attribute.
    """
    module_name, _, attribute = reference.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise StreamDefinitionError(
            f"The {what} {reference} cannot be imported: {error}.",
            remedy="Run this where Python finds the module: in its folder, or with PYTHONPATH."
            if what == "stream"
            else "Put its file or package into spark.py_files, or install it where headrace runs.",
        ) from error
    except Exception as error:
        raise StreamDefinitionError(
            f"The {what} {reference} cannot be imported: its module raises {type(error).__name__}: "
            f"{str(error).rstrip('.')}.",
            remedy=f"Correct the module: python -c 'import {module_name}' shows where.",
        ) from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise StreamDefinitionError(f"The module {module_name} has no {attribute!r} to be the {what}.") from None
