"""The contract of inputs, decoders and outputs: what each says by its class, and the shapes of what it says.

headrace asks an input, a decoder or an output nothing else, and never for its class, so that a package of its own can
have one (docs/extending.md). A class is checked when it is defined, and the values of its properties when a stream is
defined with it: a wrong one is reported by its name. What asks for them later, such as the factory of the DAGs or the
page, finds the shape that it needs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, ForwardRef, Literal, get_args

from headrace.stream.model import Part, StreamDefinitionError, is_reference

if TYPE_CHECKING:
    from headrace.stream.fields import StreamFields

_MAX_LETTERS = 100


@dataclass(frozen=True)
class Shape:
    """What an attribute must be: in words, and as a test of a value."""

    words: str
    fits: Callable[[Any], bool]
    how: Literal["attribute", "property", "method"] = "property"
    """How it is declared. An attribute may be a property too; a method is called with one argument."""
    names_code: bool = False
    """Whether it names an object of a module, which is imported where it is used."""


def _is_several(value: Any, fits: Callable[[Any], bool]) -> bool:
    return isinstance(value, tuple | list) and all(map(fits, value))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_full_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _is_place(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 3 and _is_text(value[1]) and _is_text(value[2])


def _is_reference(value: Any) -> bool:
    return isinstance(value, str) and is_reference(value)


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


_REFERENCE = 'a text "module:name"'
_IDS = Shape(
    'a tuple of the ids of Airflow connections, such as ("lake_default",)',
    lambda value: _is_several(value, _is_full_text),
)
_TEXTS = "an iterator of texts, such as a generator makes"
_TRUTH = "True or False"

_NAMES_CODE = Shape(f"{_REFERENCE}, or None", lambda value: value is None or _is_reference(value), "attribute", True)

KIND_SHAPES: Mapping[str, Shape] = {
    "check": _NAMES_CODE,
    "description": Shape(
        "a tuple of two texts, the system and the target",
        lambda value: _is_several(value, _is_text) and len(value) == 2,
    ),
    "connection_ids": _IDS,
    "problems": Shape(_TEXTS, lambda value: _is_several(value, _is_text), "method"),
}
"""What headrace asks of each of them (`KindDefinition`)."""

_KEYWORDS = Shape(
    "a dict of keyword arguments by their names",
    lambda value: isinstance(value, dict) and all(map(_is_text, value)),
)

INPUT_SHAPES: Mapping[str, Shape] = {
    **KIND_SHAPES,
    "datasets": _NAMES_CODE,
    "receiver_class": Shape(_NAMES_CODE.words, _NAMES_CODE.fits, "property", True),
    "keywords": _KEYWORDS,
}
"""What headrace asks of an input (`InputDefinition`)."""

DECODER_SHAPES: Mapping[str, Shape] = {
    **KIND_SHAPES,
    "decodes": _NAMES_CODE,
    "keeps": Shape(_TRUTH, _is_bool, "attribute"),
    "bytes_are_json": Shape(_TRUTH, _is_bool, "attribute"),
    "reads": Shape(
        'a tuple of columns of the record, of "headers" and "topic"',
        lambda value: _is_several(value, lambda name: name in ("headers", "topic")),
        "attribute",
    ),
    "column": Shape("a type in Spark's DDL, as a text", _is_full_text),
    "beside": Shape("columns in Spark's DDL, as a text", _is_text),
    "keywords": _KEYWORDS,
}
"""What headrace asks of a decoder (`DecoderDefinition`)."""

OUTPUT_SHAPES: Mapping[str, Shape] = {
    **KIND_SHAPES,
    "writer": Shape(_REFERENCE, _is_reference, "attribute", True),
    "datasets": _NAMES_CODE,
    **{
        name: Shape(_TRUTH, _is_bool, "attribute")
        for name in ("keeps_undecodable", "sends_bytes", "writes_json", "reads_all_rows", "writes_empty_batches")
    },
    **{
        name: Shape(_TRUTH, _is_bool)
        for name in (
            "takes_rows_without_records",
            "takes_blocks",
            "needs_incarnation",
            "versions_by_offset",
            "deletes_by_key",
        )
    },
    "places": Shape("a tuple of OutputPlace(server, kind, name)", lambda value: _is_several(value, _is_place)),
    "functions": Shape('a tuple of texts "module:function"', lambda value: _is_several(value, _is_reference)),
    "whereabouts": Shape("a text", _is_text, "method"),
    "reasons_for_order": Shape(_TEXTS, lambda value: _is_several(value, _is_text), "method"),
}
"""What headrace asks of an output (`OutputDefinition`)."""


class KindDefinition(Part):
    """What an input, a decoder and an output have in common. A class has a field ``kind``, a Literal of one text with a
    default, by which a stored definition finds it."""

    shapes: ClassVar[Mapping[str, Shape]] = KIND_SHAPES
    """The shape of each attribute that headrace asks for."""

    check: ClassVar[str | None] = None
    """What `headrace streams check --connect` asks, as "module:function": ``function(definition)`` yields a
    ``headrace.checks.connecting.Checked`` for each question. None: nothing is asked."""

    if TYPE_CHECKING:
        # A field of each class, at its own place among them: the order of a stored definition's fields stays.
        kind: str

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Refuse a class whose attributes have wrong shapes, when it is defined. Raises StreamDefinitionError."""
        check_class(cls, cls.shapes)

    @property
    def description(self) -> tuple[str, str]:
        """The system that it reads or writes, and the target within it, in Markdown for a DAG's page."""
        return self.kind, ""

    @property
    def connection_ids(self) -> tuple[str, ...]:
        """The ids of the Airflow connections that its code looks up."""
        return ()

    def problems(self, stream: StreamFields) -> Iterator[str]:  # noqa: ARG002 - for subclasses
        """Yields what does not fit the rest of the stream's definition: each text begins with the field's name, and
        names the remedy. Fields that are wrong by themselves are refused by validators."""
        yield from ()


def check_class(cls: type[Part], shapes: Mapping[str, Shape]) -> None:
    """Refuse a class of a kind whose attributes cannot have their shapes, when it is defined.

    A class without a kind is the base of others.

    Raises:
        StreamDefinitionError: an attribute is of another shape; the text names package, class and attribute.
    """
    kind = cls.model_fields.get("kind")
    if kind is None or kind.is_required():
        return
    # An annotation that cannot be evaluated yet is not known.
    is_known = not isinstance(kind.annotation, str | ForwardRef)
    if is_known and (get_args(kind.annotation) != (kind.default,) or not _is_full_text(kind.default)):
        raise _refused(cls, "kind", "is no Literal of one text", 'kind: Literal["name"] = "name"')
    for name, shape in shapes.items():
        wrong = _wrong_declaration(cls, name, shape)
        if wrong is not None:
            raise _refused(cls, name, *wrong)


def _wrong_declaration(cls: type[Part], name: str, shape: Shape) -> tuple[str, str] | None:
    """What the attribute is and what it must be; None if it may have its shape."""
    if name in cls.model_fields:
        # The base class's property would be asked in its place.
        return "is a field", f"a property, with a field of another name: {shape.words}"
    declared = inspect.getattr_static(cls, name, None)
    if shape.how == "method":
        is_method = inspect.isfunction(declared)
        return None if is_method else (f"is {_shown(declared)}", f"a method that returns {shape.words}")
    if inspect.isfunction(declared):
        return "is a method", f"a property (@property): {shape.words}"
    if isinstance(declared, property | cached_property) or shape.fits(declared):
        return None
    return f"is {_shown(declared)}", shape.words


def wrong_values(part: KindDefinition, stream: StreamFields) -> Iterator[str]:
    """Yield a text for each attribute of a definition that raises an error, or has another shape."""
    for name, shape in part.shapes.items():
        try:
            value = getattr(part, name)
            if shape.how == "method":
                value = value(*({"whereabouts": (0,), "problems": (stream,)}.get(name, ())))
                value = list(value) if shape.words == _TEXTS and not isinstance(value, str) else value
        except Exception as error:  # an extension's code may raise anything
            yield _problem(type(part), name, f"raises {type(error).__name__}: {str(error)[:_MAX_LETTERS]}", shape.words)
        else:
            if not shape.fits(value):
                yield _problem(type(part), name, f"is {_shown(value)}", shape.words)


def _refused(cls: type[Part], name: str, what: str, shape: str) -> StreamDefinitionError:
    return StreamDefinitionError(f"{_problem(cls, name, what, shape)}.")


def _problem(cls: type[Part], name: str, what: str, shape: str) -> str:
    package = cls.__module__.partition(".")[0]
    return f"{name} of the class {cls.__module__}.{cls.__qualname__} (package {package}) {what}; it must be {shape}"


def _shown(value: object) -> str:
    if value is None:
        return "None"
    text = repr(value)
    return f"{text[:_MAX_LETTERS]}{'…' if len(text) > _MAX_LETTERS else ''} (a {type(value).__name__})"
