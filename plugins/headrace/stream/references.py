"""References to Python objects in definitions, "module:attribute": checks and loads them."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator

from pydantic import Field, JsonValue, field_validator

from headrace.stream.errors import StreamDefinitionError
from headrace.stream.model import Part
from headrace.stream.secrets import check_arguments

_REFERENCE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class CalledClass(Part):
    """A part of a definition that names a class, with what the class is called with."""

    arguments: dict[str, JsonValue] = Field(
        default_factory=dict, description="What the class is called with, by name. They are stored in clear."
    )
    connection: str | None = Field(
        default=None,
        description="The id of an Airflow connection. The class is called with this id as ``connection``, and "
        "``headrace.connections.resolve`` finds the connection.",
    )

    @field_validator("arguments")
    @classmethod
    def _hold_no_secret(cls, value: dict[str, JsonValue]) -> dict[str, JsonValue]:
        return check_arguments(value)

    @property
    def keywords(self) -> dict[str, JsonValue]:
        """The keyword arguments of the class: the arguments, and the connection's id if there is one."""
        return self.arguments if self.connection is None else {**self.arguments, "connection": self.connection}


def is_reference(text: str) -> bool:
    """Whether the text has the form of a reference."""
    return _REFERENCE.fullmatch(text) is not None


def check_reference(text: str) -> str:
    """Return the text if it is a reference. Raises ValueError, which the definition's error repeats."""
    if not is_reference(text):
        raise ValueError('must be "module:function"')
    return text


def references_in(value: JsonValue, name: str = "") -> Iterator[str]:
    """Yields each text in ``value`` that has the form of a reference, as "outputs.0.transform: module:function"."""
    if isinstance(value, dict):
        inside = [(f"{name}.{key}" if name else key, each) for key, each in value.items()]
    elif isinstance(value, list):
        inside = [(f"{name}.{index}", each) for index, each in enumerate(value)]
    else:
        if isinstance(value, str) and is_reference(value):
            yield f"{name}: {value}"
        return
    for path, each in inside:
        yield from references_in(each, path)


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
