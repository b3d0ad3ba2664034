"""What an index makes of documents with given fields, and which of them it would refuse, before it gets any.

A conflict is that documents with usual values of the column are refused, and so would be dead letters. What depends on
the values is a note: a text in a date's field may be a date. The answers of real servers to the same documents are
compared in tests/integration/elasticsearch/test_mapping.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from headrace.elasticsearch.document_mapping import (
    DEFAULT_DEPTH_LIMIT,
    DEFAULT_FIELD_LIMIT,
    KEY,
    MOST_DIGITS_OF_LONG,
    TEXT,
    DocumentField,
    JsonForm,
    field_count,
    is_bad_name,
    object_depth,
)
from headrace.elasticsearch.errors import MappingError
from headrace.elasticsearch.search_server import SearchServer


@dataclass(frozen=True, slots=True)
class IndexMapping:
    """The mapping of an index, and its settings below ``index.mapping``, as the server gives them.

    ``name`` is the concrete index. ``exists`` False: they are what templates would give it.
    """

    name: str
    exists: bool
    mappings: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    server: SearchServer | None = None

    def limit(self, name: str, default: int) -> int:
        """A limit of the mapping, such as ``total_fields``."""
        return int(_at(self.settings, f"{name}.limit", default))


@dataclass(frozen=True, slots=True)
class FieldFinding:
    """A field of the documents, and what the index makes of it.

    ``column`` is its type in Spark, ``form`` what it is in JSON. ``index``: the type that the index has for it; None if
    it has none. ``new``: what the server makes of it then. ``conflict``: why documents are refused. ``note``: what
    depends on the values.
    """

    path: str
    column: str
    form: str
    index: str | None = None
    new: str | None = None
    conflict: str | None = None
    note: str | None = None


@dataclass(frozen=True, slots=True)
class _Verdict:
    """Whether a field's mapping takes the values of a column."""

    conflict: str | None = None
    note: str | None = None


_Judge = Callable[[DocumentField, Mapping[str, Any]], _Verdict]

_WHOLE = {"byte": 8, "short": 16, "integer": 32, "long": 64, "unsigned_long": 64}
"""The types of whole numbers, with their bits."""
_FLOATING = ("half_float", "float", "double", "scaled_float")
_FEW_DIGITS = {"half_float": (3, 8, "65504"), "float": (7, 24, "3.4e38")}
"""Types of fewer digits than a double: the digits, the bits of whole numbers, and the greatest number."""
_BITS = {"tinyint": 8, "byte": 8, "smallint": 16, "short": 16, "int": 32, "integer": 32, "bigint": 64, "long": 64}
_TEXTS = (
    *("text", "keyword", "constant_keyword", "wildcard", "match_only_text", "search_as_you_type"),
    *("icu_collation_keyword", "annotated_text", "pattern_text"),
)
_DATES = ("date", "date_nanos")
_OBJECTS = ("object", "nested", "flattened", "flat_object")
_CLOSED_OBJECTS = ("flattened", "flat_object")
_NO_OBJECTS = (*_WHOLE, *_FLOATING, *_TEXTS, *_DATES, "boolean", "ip")
_UNITS = {"epoch_millis": "milliseconds", "epoch_second": "seconds"}
_DEFAULT_FORMAT = "strict_date_optional_time||epoch_millis"

# Types that leave out a value that does not fit, if they have ignore_malformed.
_IGNORING = (*_WHOLE, *_FLOATING, *_DATES, "ip", "boolean")

_METADATA = frozenset(
    {
        *("_id", "_index", "_source", "_routing", "_field_names", "_ignored", "_seq_no", "_version", "_nested_path"),
        "_data_stream_timestamp",
    }
)
"""Names at the top of a document that are the server's own."""

_EXAMPLES = {
    JsonForm.DATE: "2026-01-05",
    JsonForm.TIMESTAMP: "2026-01-05T12:45:00.250000Z",
    JsonForm.LOCAL_TIMESTAMP: "2026-01-05T12:45:00.250000",
}
"""A value of each kind of time, as headrace writes it."""

_EVERY_TIME = frozenset(_EXAMPLES)
_FORMATS: Mapping[str, frozenset[JsonForm]] = {
    **dict.fromkeys(("strict_date_optional_time", "date_optional_time", "iso8601"), _EVERY_TIME),
    "strict_date_optional_time_nanos": _EVERY_TIME,
    **dict.fromkeys(("date_time", "strict_date_time"), frozenset({JsonForm.TIMESTAMP})),
    **dict.fromkeys(
        ("date", "strict_date", "year_month_day", "strict_year_month_day"),
        frozenset({JsonForm.DATE}),
    ),
    **dict.fromkeys(
        ("date_hour_minute_second_fraction", "strict_date_hour_minute_second_fraction"),
        frozenset({JsonForm.LOCAL_TIMESTAMP}),
    ),
    # OpenSearch's.
    "rfc3339_lenient": frozenset({JsonForm.DATE, JsonForm.TIMESTAMP}),
}
"""The formats with a name that take times as headrace writes them."""

# Other formats with a name, such as epoch_millis, basic_date_time or week_date, take none of them.
_NAME = re.compile(r"[a-z]+(_[a-z]+)+")

_PATTERN = re.compile(r"'((?:[^']|'')*)'|([A-Za-z])\2*|.", re.S)


def accepts(formats: str, form: JsonForm) -> bool | None:
    """Whether one of a field's formats takes a time as headrace writes it; None if a format is not known."""
    answers = [_takes(each, form) for each in formats.split("||")]
    return True if True in answers else None if None in answers else False


def _takes(date_format: str, form: JsonForm) -> bool | None:
    if date_format in _FORMATS:
        return form in _FORMATS[date_format]
    if _NAME.fullmatch(date_format):
        return False
    expression = _expression(date_format)
    return None if expression is None else re.fullmatch(expression, _EXAMPLES[form]) is not None


def _expression(pattern: str) -> str | None:
    """The regular expression of a pattern of Java's times; None if it has letters that are not known here."""
    made = ""
    for match in _PATTERN.finditer(pattern):
        text, letter = match[0], match[2]
        if match[1] is not None:
            made += re.escape(match[1].replace("''", "'") or "'")
        elif letter is None:
            made += {"[": "(?:", "]": ")?"}.get(text, re.escape(text))
        elif (part := _letters(letter, len(text))) is None:
            return None
        else:
            made += part
    return made


def _letters(letter: str, number: int) -> str | None:
    if letter in "yu":
        return rf"\d{{{number}}}" if number > 1 else r"\d{4}"
    if letter in "MdHms" and number <= 2:
        return rf"\d{{{number},2}}"
    if letter == "S":
        return rf"\d{{{number}}}"
    zone = {1: r"[+-]\d\d(?:\d\d)?", 2: r"[+-]\d{4}", 3: r"[+-]\d\d:\d\d"}
    if letter in "xX" and number in zone:
        return f"(?:Z|{zone[number]})" if letter == "X" else zone[number]
    if letter == "Z":
        return {5: f"(?:Z|{zone[3]})"}.get(number, zone[2]) if number != 4 else None
    return None


def _judge(column: DocumentField, mapping: Mapping[str, Any]) -> _Verdict:
    """What a field with this mapping does with the values of a column."""
    kind, form = _type_of(mapping), column.form
    if mapping.get("enabled") is False:
        return _Verdict(note="kept and not indexed: enabled is false")
    if form is JsonForm.ANY:
        return _Verdict(note=f"a {column.kind.name.upper()} may be what {_a(kind)} refuses")
    if (kind in _OBJECTS) != (form is JsonForm.OBJECT) and (kind in _OBJECTS or kind in _NO_OBJECTS):
        return _refused(column, mapping)
    return next((judge for kinds, judge in _JUDGES if kind in kinds), _judge_other)(column, mapping)


def _refused(column: DocumentField, mapping: Mapping[str, Any]) -> _Verdict:
    return _Verdict(f"{_a(column.form)} is refused: the field is {_a(_type_of(mapping))}")


def _judge_other(column: DocumentField, mapping: Mapping[str, Any]) -> _Verdict:
    kind = _type_of(mapping)
    if kind == "binary" and column.form is JsonForm.BASE64:
        return _Verdict()
    if kind == "alias":
        return _Verdict(f"the field is an alias of {mapping.get('path')}, which documents may not have")
    return _Verdict(note=f"whether the values fit is not known: the field is {_a(kind)}")


def _only(form: JsonForm, note: str | None = None) -> _Judge:
    return lambda column, mapping: _Verdict(note=note) if column.form is form else _refused(column, mapping)


def _judge_number(column: DocumentField, mapping: Mapping[str, Any]) -> _Verdict:
    kind, form = _type_of(mapping), column.form
    if form is JsonForm.TEXT:
        return _Verdict(f"a text that is no number is refused: the field is {_a(kind)}")
    if form not in (JsonForm.INTEGER, JsonForm.NUMBER):
        return _refused(column, mapping)
    if kind in _FLOATING:
        return _Verdict(note=_lost_digits(column, kind))
    if column.whole_digits > MOST_DIGITS_OF_LONG and kind != "unsigned_long":
        return _Verdict(f"numbers beyond {_a(kind)} are refused, and {column.column} has {column.whole_digits} digits")
    cuts = str(mapping.get("coerce", True)).lower() != "false"
    if form is JsonForm.NUMBER and not cuts:
        return _Verdict(f"a number with a fraction is refused: the field is {_a(kind)} with coerce false")
    return _Verdict(note=_lost_of_whole(column, kind))


def _lost_of_whole(column: DocumentField, kind: str) -> str | None:
    """What a field of whole numbers does not take of the column's numbers; None if it takes all."""
    if column.form is JsonForm.NUMBER:
        return f"searched without the fraction: the field is {_a(kind)}"
    if kind == "unsigned_long":
        return "numbers below 0 and beyond 18446744073709551615 are refused"
    if _bits(column) > _WHOLE[kind]:
        return f"numbers beyond {2 ** (_WHOLE[kind] - 1) - 1} are refused: the field is {_a(kind)}"
    return None


def _bits(column: DocumentField) -> int:
    """The bits that the column's whole numbers need."""
    of_decimal = (10**column.whole_digits - 1).bit_length() + 1
    return of_decimal if column.kind.digits else _BITS.get(column.kind.name, 64)


def _lost_digits(column: DocumentField, kind: str) -> str | None:
    """What a field of fewer digits than the column makes of its numbers; None if it is not to be told."""
    digits, bits, most = _FEW_DIGITS.get(kind, (None, 0, ""))
    if digits is None or (column.kind.name in ("float", "real") and kind == "float"):
        return None
    if column.kind.digits:
        return f"searched with {digits} digits" if column.kind.digits[0] > digits else None
    if column.form is JsonForm.INTEGER and kind == "float":
        return f"searched with {digits} digits" if _bits(column) > bits else None
    return f"searched with {digits} digits; numbers beyond {most} are refused"


def _judge_date(column: DocumentField, mapping: Mapping[str, Any]) -> _Verdict:
    form, formats = column.form, _formats(mapping)
    if form is JsonForm.TEXT:
        return _Verdict(note=f"a text that does not fit the format {formats} is refused")
    if form in (JsonForm.INTEGER, JsonForm.NUMBER):
        unit = next((_UNITS[name] for name in formats.split("||") if name in _UNITS), None)
        fits = f"a number that does not fit the format {formats} is refused"
        return _Verdict(note=fits if unit is None else f"read as {unit} since 1970")
    if form not in _EXAMPLES:
        return _refused(column, mapping)
    fitting = accepts(formats, form)
    if fitting is False:
        return _Verdict(f"{_EXAMPLES[form]} does not fit the field's format {formats}")
    if fitting is None:
        return _Verdict(note=f"{_EXAMPLES[form]} must fit the field's format {formats}")
    return _Verdict(note="times outside of 1970 to 2262 are refused" if _type_of(mapping) == "date_nanos" else None)


_JUDGES: tuple[tuple[Container[str], _Judge], ...] = (
    ((*_OBJECTS, *_TEXTS), lambda *_: _Verdict()),
    ((*_WHOLE, *_FLOATING), _judge_number),
    (_DATES, _judge_date),
    (("boolean",), _only(JsonForm.BOOLEAN)),
    (("ip",), _only(JsonForm.TEXT, "a text that is no IP address is refused")),
)
"""The types of fields, with what judges them; of the others it is not known."""


def _formats(mapping: Mapping[str, Any]) -> str:
    return str(mapping.get("format", _DEFAULT_FORMAT))


def _type_of(mapping: Mapping[str, Any]) -> str:
    return str(mapping.get("type", "object"))


def _a(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeio' else 'a'} {noun}"


def name_conflicts(fields: Iterable[DocumentField]) -> Iterator[tuple[str, str]]:
    """Yield the paths of fields that no index takes beside each other, with the reason: names without letters, and one
    path for an object and a value."""
    objects: dict[str, bool] = {}
    for each in fields:
        name = each.path.rpartition(".")[2] if each.in_map else each.path
        if name != KEY and is_bad_name(name):
            yield each.path, "a server takes no name that is empty, also between dots"
            continue
        if each.path in _METADATA:
            yield each.path, "the name is the server's own, and documents with it are refused"
        is_object = each.form is JsonForm.OBJECT
        if objects.setdefault(each.path, is_object) != is_object:
            yield (
                each.path,
                "it is an object in one column and a value in another; names with dots are fields of objects",
            )


def check_names(output_id: str, fields: Iterable[DocumentField]) -> None:
    """Raise MappingError if no index takes the names of these fields beside each other."""
    if found := [f"{path!r}: {why}" for path, why in name_conflicts(fields)]:
        raise MappingError(
            f"There is no mapping for the columns of output {output_id!r}. {'; '.join(found)}.",
            remedy="Rename these columns in the transform.",
        )


class MappedDocuments:
    """What an index makes of documents with these fields: ``fields``, and ``conflicts`` of all of them together.

    ``as_recorded``: documents are the records' own JSON, in which there may be other fields and forms.
    """

    def __init__(self, fields: Sequence[DocumentField], index: IndexMapping, *, as_recorded: bool = False) -> None:
        self._index = index
        self._root = index.mappings
        self._as_recorded = as_recorded
        self._there: dict[str, Mapping[str, Any]] = dict(_flat(index.mappings))
        self._before = field_count(index.mappings)
        self._added = 0
        self._closed: dict[str, str] = {}
        self._bad = dict(name_conflicts(fields))
        self.fields = [self._found(each) for each in fields]
        self.conflicts = list(self._beyond_limits(fields))

    def _found(self, column: DocumentField) -> FieldFinding:
        path = column.path
        form = f"array of {column.form}" if column.is_array else str(column.form)
        finding = FieldFinding(path, column.column, form)
        if path in self._bad:
            self._closed[path] = "refused"
            return replace(finding, conflict=self._bad[path])
        for outer in _outer(path):
            if outer in self._closed:
                return replace(finding, new=self._closed[outer])
        mapping = self._there.get(path)
        if mapping is not None:
            verdict = self._judged(column, mapping)
            finding = replace(finding, index=self._shown(mapping), conflict=verdict.conflict, note=verdict.note)
            self._close(path, mapping, verdict)
            return finding
        return self._new(column, finding)

    def _judged(self, column: DocumentField, mapping: Mapping[str, Any]) -> _Verdict:
        if self._as_recorded and column.form in _EXAMPLES and _type_of(mapping) in _DATES:
            return _Verdict(note=f"a record's time that does not fit the format {_formats(mapping)} is refused")
        verdict = _judge(column, mapping)
        if verdict.conflict is None or not self._ignores(column, mapping):
            return verdict
        return _Verdict(note=f"{verdict.conflict}; with ignore_malformed only the field is left out")

    def _ignores(self, column: DocumentField, mapping: Mapping[str, Any]) -> bool:
        """Whether a value that does not fit is left out, and the document kept."""
        of_index = _is_true(self._index.settings.get("ignore_malformed"))
        server = self._index.server
        opensearch = server.version if server is not None and server.product == "OpenSearch" else None
        if opensearch is not None and of_index:
            # There it is for values of every kind in every field.
            return True
        # OpenSearch 3 leaves out objects too, its version 2 does not.
        objects_too = opensearch is not None and not opensearch.startswith("2.")
        kind = _type_of(mapping)
        return (
            _is_true(mapping.get("ignore_malformed", of_index))
            and kind in _IGNORING
            and (objects_too or column.form is not JsonForm.OBJECT)
        )

    def _shown(self, mapping: Mapping[str, Any]) -> str:
        kind = _type_of(mapping)
        return f"{kind}, format {mapping['format']}" if kind in _DATES and "format" in mapping else kind

    def _new(self, column: DocumentField, finding: FieldFinding) -> FieldFinding:
        path = column.path
        if column.form is JsonForm.OBJECT and self._inherited(path, "subobjects") in ("false", "auto"):
            return replace(finding, new="no field: subobjects is false")
        detected = self._detected(column)
        template = self._template(path, detected[0])
        dynamic = self._inherited(path, "dynamic")
        if dynamic.endswith("_allow_templates"):
            dynamic = "true" if template is not None else dynamic.partition("_")[0]
        if dynamic in ("strict", "false"):
            return self._not_made(column, finding, dynamic)
        if column.form is JsonForm.ANY:
            return replace(finding, new="what the first value is")
        if dynamic == "runtime" and column.form is not JsonForm.OBJECT and template is None:
            self._added += 1
            return replace(finding, new=f"{_RUNTIME.get(detected[0], detected[0])}, a runtime field")
        return self._made(column, finding, detected, template)

    def _not_made(self, column: DocumentField, finding: FieldFinding, dynamic: str) -> FieldFinding:
        """A field that the index lacks and does not make."""
        if dynamic == "false":
            self._closed[column.path] = "kept and not indexed"
            return replace(finding, new="kept and not indexed", note="dynamic is false, so the index makes no field")
        self._closed[column.path] = "refused"
        if column.in_map:
            return replace(finding, note="a key without a field in the index is refused: dynamic is strict")
        return replace(finding, conflict="the index has no such field and takes no new one: dynamic is strict")

    def _made(
        self,
        column: DocumentField,
        finding: FieldFinding,
        detected: Sequence[str],
        template: tuple[str, Mapping[str, Any]] | None,
    ) -> FieldFinding:
        """A field that the index makes at the first value."""
        made = _DEFAULTS[detected[0]] if template is None else template[1]
        verdict = self._judged(column, made)
        self._there[column.path] = made
        self._close(column.path, made, verdict)
        self._added += 0 if column.in_map else 1 + field_count(made)
        by = "" if template is None else f", by dynamic template {template[0]!r}"
        return replace(
            finding,
            new=f"{self._shown(made)}{by}{', for each key' if column.in_map else ''}",
            conflict=verdict.conflict,
            note=self._vector(column, made) or verdict.note or self._first_value(column, detected, made),
        )

    def _vector(self, column: DocumentField, made: Mapping[str, Any]) -> str | None:
        """What a long array of numbers with fractions makes of a new field."""
        server = self._index.server
        is_opensearch = server is not None and server.product == "OpenSearch"
        if is_opensearch or not column.is_array or made is not _DEFAULTS["double"]:
            return None
        return "if the first array has 128 to 4096 numbers, the field becomes a dense_vector and refuses other lengths"

    def _close(self, path: str, mapping: Mapping[str, Any], verdict: _Verdict) -> None:
        """Nothing is said of the fields within one that is no object with fields."""
        if verdict.conflict or mapping.get("enabled") is False or _type_of(mapping) not in ("object", "nested"):
            self._closed[path] = f"within {path}"

    def _first_value(self, column: DocumentField, detected: Sequence[str], made: Mapping[str, Any]) -> str | None:
        """What a first value that looks like something else makes of the field."""
        others = []
        for kind in detected[1:]:
            template = self._template(column.path, kind)
            other = _type_of(_DEFAULTS[kind] if template is None else template[1])
            if other != _type_of(made) and other not in _TEXTS:
                others.append((kind, other))
        if not others:
            return None
        looks = "date" if others[0][0] == "date" else "number"
        becomes = " or ".join(_a(other) for _, other in others)
        return f"if the first text looks like a {looks}, the field becomes {becomes} and refuses other texts"

    def _detected(self, column: DocumentField) -> list[str]:
        """The types that the server may see in the values, as dynamic templates name them; the usual one first."""
        form = column.form
        if form not in (JsonForm.TEXT, JsonForm.BASE64, *_EXAMPLES):
            return [_SEEN.get(form, "string")]
        detects_dates = _is_true(self._root.get("date_detection", True))
        if form in _EXAMPLES:
            formats = self._root.get("dynamic_date_formats", ("strict_date_optional_time",))
            formats = [formats] if isinstance(formats, str) else formats
            is_date = detects_dates and any(accepts(each, form) for each in formats)
            return ["date" if is_date else "string"]
        numbers = ["long", "double"] if _is_true(self._root.get("numeric_detection", False)) else []
        # Base64 has no hyphens and no slashes in a date's places.
        return ["string", *(["date"] if detects_dates and form is JsonForm.TEXT else []), *numbers]

    def _template(self, path: str, seen: str) -> tuple[str, Mapping[str, Any]] | None:
        """The first dynamic template that takes a new field, with its mapping."""
        for each in self._root.get("dynamic_templates", ()):
            for name, template in each.items():
                if _matches(template, path, seen):
                    given = template.get("mapping", template.get("runtime", {}))
                    made = {**(given if isinstance(given, Mapping) else {})}
                    made["type"] = str(made.get("type", "{dynamic_type}")).replace(
                        "{dynamic_type}", _type_of(_DEFAULTS[seen])
                    )
                    return name, made
        return None

    def _inherited(self, path: str, name: str) -> str:
        """``dynamic`` or ``subobjects`` for a new field: that of the nearest object, or of the index."""
        for outer in reversed(_outer(path)):
            if name in self._there.get(outer, {}):
                return str(self._there[outer][name]).lower()
        return str(self._root.get(name, True)).lower()

    def _beyond_limits(self, fields: Iterable[DocumentField]) -> Iterator[str]:
        limit = self._index.limit("total_fields", DEFAULT_FIELD_LIMIT)
        spares = _is_true(_at(self._index.settings, "total_fields.ignore_dynamic_beyond_limit", False))
        if self._added and self._before + self._added > limit and not spares:
            yield (
                f"the index has {self._before} fields, and the documents add {self._added}: that is beyond "
                f"index.mapping.total_fields.limit, {limit}"
            )
        depth = self._index.limit("depth", DEFAULT_DEPTH_LIMIT)
        made = {found.path for found in self.fields if found.index is None and found.path in self._there}
        objects = [each.path for each in fields if each.form is JsonForm.OBJECT and each.path in made]
        if deep := [path for path in objects if object_depth(path) > depth]:
            yield f"the object {deep[0]} is deeper than index.mapping.depth.limit, {depth}"


_SEEN = {
    JsonForm.BOOLEAN: "boolean",
    JsonForm.INTEGER: "long",
    JsonForm.NUMBER: "double",
    JsonForm.OBJECT: "object",
}
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "string": TEXT,
    "date": {"type": "date"},
    "boolean": {"type": "boolean"},
    "long": {"type": "long"},
    "double": {"type": "float"},
    "object": {"type": "object"},
}
"""What the server makes of what it sees, without a template."""
_RUNTIME = {"string": "keyword"}


def _matches(template: Mapping[str, Any], path: str, seen: str) -> bool:
    name = path.rpartition(".")[2]
    kinds = _several(template.get("match_mapping_type"))
    if kinds and seen not in kinds and "*" not in kinds:
        return False
    if seen in _several(template.get("unmatch_mapping_type")):
        return False
    is_regex = template.get("match_pattern") == "regex"

    def fits(key: str, text: str) -> bool:
        return any(_fits(each, text, is_regex=is_regex) for each in _several(template.get(key)))

    return (
        ("match" not in template or fits("match", name))
        and ("path_match" not in template or fits("path_match", path))
        and not fits("unmatch", name)
        and not fits("path_unmatch", path)
    )


def _fits(pattern: str, text: str, *, is_regex: bool) -> bool:
    if not is_regex:
        return fnmatchcase(text, re.sub(r"([\[?])", r"[\1]", pattern))
    try:
        return re.fullmatch(pattern, text) is not None
    except re.error:
        # Java's expressions have some that Python's have not.
        return False


def _several(given: Any) -> list[str]:
    return [] if given is None else [given] if isinstance(given, str) else [str(each) for each in given]


def _flat(mappings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name, mapping in mappings.get("properties", {}).items():
        yield prefix + name, mapping
        yield from _flat(mapping, f"{prefix}{name}.")


def _outer(path: str) -> list[str]:
    """The paths of the objects around a field, the outermost first."""
    names = path.split(".")[:-1]
    return [".".join(names[: number + 1]) for number in range(len(names))]


def _is_true(value: Any) -> bool:
    return str(value).lower() == "true"


def _at(settings: Mapping[str, Any], path: str, default: Any) -> Any:
    """A setting by its path; a part of it may be in one name with dots."""
    if path in settings:
        return settings[path]
    first, _, rest = path.partition(".")
    within = settings.get(first)
    return _at(within, rest, default) if rest and isinstance(within, Mapping) else default
