"""The fields of an output's documents, by the columns that they are made of, and a mapping for them.

The mapping has the types that the server would choose by itself, with these exceptions. Numbers with a fraction are
``double``, since ``float`` has 7 digits and refuses numbers beyond its range. Whole numbers beyond ``long`` are
``double``, since ``long`` refuses them. Base64 is ``binary``. A text is a text, also where the first one looks like a
date.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from headrace.stream.ddl import Column, ColumnType

KEY = "*"
"""In a path, the place of a map's keys."""

TEXT: Mapping[str, Any] = {"type": "text", "fields": {"keyword": {"type": "keyword", "ignore_above": 256}}}
"""What a server makes of a text by itself."""

DEFAULT_FIELD_LIMIT = 1_000
DEFAULT_DEPTH_LIMIT = 20
MOST_DIGITS_OF_LONG = 18
"""The most digits of which each whole number fits ``long``."""


class JsonForm(StrEnum):
    """What a value is in a document."""

    BOOLEAN = "boolean"
    INTEGER = "integer"
    NUMBER = "number"
    TEXT = "text"
    BASE64 = "base64"
    DATE = "date"
    TIMESTAMP = "timestamp"
    LOCAL_TIMESTAMP = "timestamp without a zone"
    OBJECT = "object"
    ANY = "any JSON"


_FORMS = {
    **dict.fromkeys(("boolean",), JsonForm.BOOLEAN),
    **dict.fromkeys(("tinyint", "byte", "smallint", "short", "int", "integer", "bigint", "long"), JsonForm.INTEGER),
    **dict.fromkeys(("float", "real", "double", "decimal", "dec", "numeric"), JsonForm.NUMBER),
    **dict.fromkeys(("string", "char", "character", "varchar", "time", "interval"), JsonForm.TEXT),
    "binary": JsonForm.BASE64,
    "date": JsonForm.DATE,
    "timestamp": JsonForm.TIMESTAMP,
    "timestamp_ltz": JsonForm.TIMESTAMP,
    "timestamp_ntz": JsonForm.LOCAL_TIMESTAMP,
    "struct": JsonForm.OBJECT,
    "map": JsonForm.OBJECT,
}

_TIMES = (JsonForm.TIMESTAMP, JsonForm.LOCAL_TIMESTAMP)


@dataclass(frozen=True, slots=True)
class DocumentField:
    """A field of documents. ``path`` has dots between its names, and `KEY` for the keys of a map. ``column`` is the
    type in Spark's DDL, without the fields of structs; ``kind`` is the type of a value, of an array that of its
    elements."""

    path: str
    column: str
    kind: ColumnType

    @property
    def form(self) -> JsonForm:
        """What a value is in JSON."""
        form = _FORMS.get(self.kind.name, JsonForm.ANY)
        return JsonForm.INTEGER if form is JsonForm.NUMBER and self.scale == 0 else form

    @property
    def is_array(self) -> bool:
        """Whether there are several values, in an array."""
        return self.column.startswith("ARRAY<")

    @property
    def scale(self) -> int | None:
        """The digits behind a decimal's point; None for another type."""
        return None if self.kind.digits is None else self.kind.digits[1]

    @property
    def whole_digits(self) -> int:
        """The digits in front of a decimal's point; 0 for another type."""
        return 0 if self.kind.digits is None else self.kind.digits[0] - self.kind.digits[1]

    @property
    def in_map(self) -> bool:
        """Whether its path depends on the keys of a map."""
        return KEY in self.path.split(".")


def document_fields(columns: Iterable[Column]) -> list[DocumentField]:
    """The fields of documents with these columns, those of objects after the object. A name with dots is an object's
    field, as it is to the server."""
    found: list[DocumentField] = []
    objects: set[str] = set()
    for field in (field for column in columns for field in _fields(column.name, column.type, "")):
        if field.form is JsonForm.OBJECT and field.path in objects:
            # One object may come of several names.
            continue
        if field.form is JsonForm.OBJECT:
            objects.add(field.path)
        found.append(field)
    return found


def _fields(name: str, kind: ColumnType, prefix: str) -> Iterator[DocumentField]:
    if not is_bad_name(name):
        # The server leaves out dots at the end.
        name = name.rstrip(".")
        outer = name.split(".")[:-1]
        for number in range(len(outer)):
            implied = ColumnType("struct")
            yield DocumentField(prefix + ".".join(outer[: number + 1]), _named(implied), implied)
    path = prefix + name
    column = _named(kind)
    while kind.name == "array":
        kind = kind.parts[0].type
    yield DocumentField(path, column, kind)
    if kind.name == "map":
        yield from _fields(KEY, kind.parts[1].type, f"{path}.")
    elif kind.name == "struct":
        for part in kind.parts:
            yield from _fields(part.name, part.type, f"{path}.")


def is_bad_name(name: str) -> bool:
    """Whether a server refuses documents with a field of this name, wherever it is."""
    return any(not part.strip() for part in name.rstrip(".").split("."))


def _named(kind: ColumnType) -> str:
    name = kind.name.upper()
    if kind.digits is not None:
        return f"{name}({kind.digits[0]}, {kind.digits[1]})"
    return f"{name}<{', '.join(_named(part.type) for part in kind.parts)}>" if name in ("ARRAY", "MAP") else name


def field_mapping(field: DocumentField, *, as_recorded: bool = False) -> dict[str, Any] | None:
    """The mapping of one field; None if the server is to choose it.

    ``as_recorded``: documents are the records' own JSON, where a time may also be a number, of an unknown unit. Then a
    number is no date.
    """
    form = field.form
    if form is JsonForm.TEXT:
        return {**TEXT}
    if form is JsonForm.INTEGER:
        return {"type": "double" if field.whole_digits > MOST_DIGITS_OF_LONG else "long"}
    if form is JsonForm.NUMBER:
        return {"type": "float" if field.kind.name in ("float", "real") else "double"}
    if form in _TIMES and as_recorded:
        return {"type": "date", "format": "strict_date_optional_time"}
    types = {
        JsonForm.BOOLEAN: "boolean",
        JsonForm.BASE64: "binary",
        JsonForm.OBJECT: "object",
        **dict.fromkeys((JsonForm.DATE, *_TIMES), "date"),
    }
    return {"type": types[form]} if form in types else None


_DETECTED = {
    JsonForm.TEXT: ("string", "date"),
    JsonForm.BASE64: ("string", "date"),
    JsonForm.NUMBER: ("double", "long"),
    JsonForm.INTEGER: ("long",),
}


def made_mapping(fields: Iterable[DocumentField], *, as_recorded: bool = False) -> dict[str, Any]:
    """The mapping of documents with these fields, which do not collide (`mapping_conflicts.name_conflicts`).

    The values of maps have dynamic templates in place of fields, so that the first one does not decide what they are.
    """
    root: dict[str, Any] = {}
    templates: list[dict[str, Any]] = []
    for field in fields:
        made = field_mapping(field, as_recorded=as_recorded)
        if made is None:
            continue
        if field.in_map:
            templates += _templates(field, made)
            continue
        *outer, name = field.path.split(".")
        parent = root
        for part in outer:
            parent = parent["properties"][part]
        parent.pop("type", None)
        parent.setdefault("properties", {}).setdefault(name, made)
    return {**({"dynamic_templates": templates} if templates else {}), "properties": root.get("properties", {})}


def _templates(field: DocumentField, made: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The dynamic templates of a map's values, for each type that the server may see in them."""
    detected = _DETECTED.get(field.form, ())
    if made.get("format") is not None:
        detected = ("string", "date")
    if made == {"type": "long"}:
        # That is what the server makes by itself.
        detected = ()
    for kind in detected:
        yield {f"{field.path} {kind}": {"path_match": field.path, "match_mapping_type": kind, "mapping": made}}


def field_count(mappings: Mapping[str, Any]) -> int:
    """The number of fields as the server counts them for index.mapping.total_fields.limit: objects and the further
    fields of a field are fields too."""
    within = [*mappings.get("properties", {}).values(), *mappings.get("fields", {}).values()]
    return len(within) + sum(map(field_count, within)) + len(mappings.get("runtime", {}))


def object_depth(path: str) -> int:
    """The depth of an object as the server counts it for index.mapping.depth.limit."""
    return path.count(".") + 2


def index_body(fields: Iterable[DocumentField], *, as_recorded: bool = False) -> dict[str, Any]:
    """The body of a request that creates an index with the mapping of these fields. Limits are raised if the fields
    need it."""
    fields = list(fields)
    mapping = made_mapping(fields, as_recorded=as_recorded)
    limits: dict[str, Any] = {}
    if (count := field_count(mapping)) > DEFAULT_FIELD_LIMIT:
        # As much room for further fields as by default.
        limits["total_fields"] = {"limit": count + DEFAULT_FIELD_LIMIT}
    objects = [field for field in fields if field.form is JsonForm.OBJECT]
    if (depth := max((object_depth(field.path) for field in objects), default=0)) > DEFAULT_DEPTH_LIMIT:
        limits["depth"] = {"limit": depth}
    return {**({"settings": {"index": {"mapping": limits}}} if limits else {}), "mappings": mapping}


_PRIORITY = 500
"""That of the index template: above the templates of the servers themselves, which have up to 200."""


class MappingBody(StrEnum):
    """What a mapping is sent as: with a new index, or in a template for one."""

    MAPPING = "mapping"
    INDEX_TEMPLATE = "index-template"
    COMPONENT_TEMPLATE = "component-template"

    def body(self, patterns: Sequence[str], made: dict[str, Any]) -> dict[str, Any]:
        """The request's body for indices with such names and this body (`index_body`). An index template is for these
        only: the name of the dead letters' index begins with that of the index."""
        if self is MappingBody.INDEX_TEMPLATE:
            return {"index_patterns": [*patterns], "priority": _PRIORITY, "template": made}
        return {"template": made} if self is MappingBody.COMPONENT_TEMPLATE else made

    def path(self, name: str) -> str:
        """The path of the index or template in the server's API."""
        return f"/{name}" if self is MappingBody.MAPPING else f"/_{self.value.replace('-', '_')}/{name}"

    def held(self, answer: dict[str, Any]) -> dict[str, Any]:
        """The body, of the server's answer to GET."""
        if self is MappingBody.MAPPING:
            # Its key is another name if it was asked for by an alias.
            (found,) = answer.values()
        else:
            kind = self.value.replace("-", "_")
            (one,) = answer[f"{kind}s"]
            found = one[kind]
        body: dict[str, Any] = found
        return body


def lacking(wanted: Any, there: Any, place: str = "") -> list[str]:
    """What is wanted and not there, in words, by place. What is there beside it is no difference."""
    if isinstance(wanted, Mapping) and isinstance(there, Mapping):
        return [
            text
            for name, value in wanted.items()
            for text in (
                lacking(value, there[name], f"{place}.{name}" if place else name)
                if name in there
                else [f"{place}.{name} is missing" if place else f"{name} is missing"]
            )
            # An object with fields is shown without its type.
            if not (name == "type" and value == "object" and "properties" in there)
        ]
    if isinstance(wanted, list) and isinstance(there, list):
        return [f"{place} lacks {each}" for each in wanted if not any(not lacking(each, other) for other in there)]
    return [] if str(wanted) == str(there) else [f"{place} is {there}, not {wanted}"]
