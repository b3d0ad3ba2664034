"""Parses columns in Spark's DDL, such as ``"carrier STRING, flight INT"``, without Spark.

Spark's own parser runs in its JVM, which does not exist when a DAG file is parsed and takes seconds to start elsewhere.
This parser accepts exactly what Spark 4.2's accepts, except that names of collations are not checked;
tests/integration/spark/test_ddl.py compares the two.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated

from pydantic import BeforeValidator

_TOKEN = re.compile(r"\s+|--[^\r\n]*|/\*.*?\*/|(`(?:``|[^`])*`|'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\"|\w+|.)", re.S)
_NAME = re.compile(r"[A-Za-z0-9_]+")
_NUMBER = re.compile(r"(?i)\d+(e\d+)?(l|s|y|d|f|bd)?")

_DECIMALS = frozenset({"decimal", "dec", "numeric"})
_PLAIN = frozenset(
    {
        *("boolean", "tinyint", "byte", "smallint", "short", "int", "integer", "bigint", "long", "float", "real"),
        *("double", "date", "timestamp", "timestamp_ntz", "timestamp_ltz", "time", "string", "binary", "void"),
        *("variant", "interval", *_DECIMALS),
    }
)
_SIZED = frozenset({"char", "character", "varchar"})
_PLACED = frozenset({"geometry", "geography"})
_MAX_DIGITS = 38
_DEFAULT_DIGITS = (10, 0)
_MAX_FRACTION = 6
_UNITS = (("year", "month"), ("day", "hour", "minute", "second"))


@dataclass(frozen=True, slots=True)
class ColumnType:
    """A type. ``name`` is in lower case; ``parts`` are an array's element, a map's key and value, or a struct's
    columns. ``digits`` are those of a decimal: in all, and behind the point."""

    name: str
    parts: tuple[Column, ...] = ()
    digits: tuple[int, int] | None = None

    def all(self) -> Iterator[ColumnType]:
        """This type and all those within it."""
        yield self
        for part in self.parts:
            yield from part.type.all()


@dataclass(frozen=True, slots=True)
class Column:
    """A column, or a field of a struct; the parts of arrays and maps have no name."""

    name: str
    type: ColumnType


def parse_columns(text: str) -> tuple[Column, ...]:
    """Parse the columns of a DDL text, with or without ``struct<…>`` around them.

    Raises ValueError, which the definition's error repeats, if the text is not a list of columns or names one twice.
    """
    try:
        columns = _Parser(text).columns()
    except _NoColumnsError as error:
        raise ValueError(_not_ddl(str(error))) from None
    names = [column.name for column in columns]
    double = sorted({name for name in names if names.count(name) > 1})
    if double:
        raise ValueError(f"names the column {', '.join(double)} twice")
    return columns


def column_differences(before: str, after: str) -> list[str]:
    """What differs between the columns of two DDL texts, in words; a type that is no struct is one column."""
    places = [dict(_leaves(text)) for text in (before, after)]
    added = [f"{name} is new ({places[1][name]})" for name in places[1] if name not in places[0]]
    removed = [f"{name} is gone" for name in places[0] if name not in places[1]]
    changed = [
        f"{name} was {places[0][name]} and is {kind}"
        for name, kind in places[1].items()
        if name in places[0] and places[0][name] != kind
    ]
    return [*added, *removed, *changed]


def _leaves(text: str) -> Iterator[tuple[str, str]]:
    """The places of a type that have no columns within them, with their types."""
    try:
        columns = parse_columns(text)
    except ValueError:
        yield "the value", text
        return
    for column in columns:
        yield from _leaves_of(column, column.name)


def _leaves_of(column: Column, place: str) -> Iterator[tuple[str, str]]:
    kind = column.type
    if kind.name == "struct" and kind.parts:
        for part in kind.parts:
            yield from _leaves_of(part, f"{place}.{part.name}")
    elif kind.parts:
        yield place, kind.name.upper()
        for number, part in enumerate(kind.parts):
            yield from _leaves_of(part, f"{place}[{number if len(kind.parts) > 1 else ''}]")
    else:
        yield place, kind.name.upper() + (f"({kind.digits[0]}, {kind.digits[1]})" if kind.digits else "")


TypeTree = str | list["TypeTree"] | dict[str, "TypeTree"]
"""A type as JSON: a struct's fields by name, the key (of a map) and the value of others in a list, or a type's text."""


def type_tree(text: str) -> TypeTree:
    """The tree of a type in DDL, or of the columns of a struct. Raises ValueError."""
    check_decoded_type(text)
    try:
        return {name: type_tree(kind) for name, kind in typed_columns(text)}
    except ValueError:
        pass
    opening, _, inside = text.strip().partition("<")
    if not inside or opening.strip().lower() == "struct":
        return {} if inside else text.strip().upper()
    # What is within an array or a map has no names, and is separated as columns are.
    parts = _Parser(inside.rstrip()[:-1]).types()
    return [type_tree(part) for part in parts]


def typed_columns(text: str) -> tuple[tuple[str, str], ...]:
    """The names of columns, with their types as they are written. Raises ValueError."""
    parse_columns(text)
    return _Parser(text).typed_columns()


def differing_in_case(names: Iterable[str]) -> list[list[str]]:
    """The groups of these names that differ in case only. To Spark they are one name, by default."""
    groups: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        groups.setdefault(name.lower(), []).append(name)
    return [group for group in groups.values() if len(group) > 1]


def check_decoded_type(text: str) -> None:
    """Check a type in DDL, or the columns of a struct. Raises ValueError."""
    try:
        parse_columns(text)
    except ValueError as error:
        try:
            parse_columns(f"value {text}")
        except ValueError:
            raise error from None


def _one_text(given: object) -> str:
    if not isinstance(given, str):
        raise ValueError(_not_ddl(f"it is a {type(given).__name__}, and must be one text"))
    return given


def _not_ddl(why: str) -> str:
    return f'is not in Spark\'s DDL, such as "word STRING, count BIGINT": {why}'


ColumnsText = Annotated[str, BeforeValidator(_one_text)]
"""The type of a definition's field with columns in DDL."""


class _NoColumnsError(Exception):
    """The text is not a list of columns, for the reason given."""


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = [(match[1], match.start() + 1) for match in _TOKEN.finditer(text) if match[1] is not None]
        self._next = 0

    def columns(self) -> tuple[Column, ...]:
        """Parse the whole text."""
        if not self._tokens:
            raise _NoColumnsError("it is empty")
        whole = self._peek("struct") and self._peek("<", ahead=1)
        columns = self._type().parts if whole else self._columns()
        if self._next < len(self._tokens):
            raise self._unexpected("',' or the end")
        return columns

    def typed_columns(self) -> tuple[tuple[str, str], ...]:
        """Parse the whole text. Returns the names with the texts of the types."""
        if self._peek("struct") and self._peek("<", ahead=1):
            self._next += 2
        columns = []
        while self._next < len(self._tokens) and not self._peek(">"):
            first = self._next
            name = self._name()
            self._taken(":")
            start = self._next
            self._type()
            columns.append((name, self._text_of(start)))
            self._next = first
            self._column()
            self._taken(",")
        return tuple(columns)

    def types(self) -> tuple[str, ...]:
        """Parse types that are separated by commas. Returns their texts."""
        types = []
        while self._next < len(self._tokens):
            start = self._next
            self._type()
            types.append(self._text_of(start))
            self._taken(",")
        return tuple(types)

    def _text_of(self, start: int) -> str:
        """The text of the tokens from ``start`` up to the next one."""
        end = self._tokens[self._next][1] - 1 if self._next < len(self._tokens) else len(self._text)
        return self._text[self._tokens[start][1] - 1 : end].strip()

    def _column(self) -> Column:
        name = self._name()
        self._taken(":")
        column = Column(name, self._type())
        if self._taken("not"):
            self._expect("null")
        if self._taken("comment"):
            self._comment()
        return column

    def _comment(self) -> None:
        first = self._next
        while len(self._here()) > 1 and self._here()[0] in "'\"":
            self._next += 1
        if self._next == first:
            raise self._unexpected("a comment in quotes")

    def _type(self) -> ColumnType:
        place = self._next
        name = self._word("a type").lower()
        if name in ("array", "map", "struct"):
            return self._compound(name)
        if name == "interval":
            self._interval()
        elif name in ("timestamp", "time"):
            self._time(name)
        elif name == "string":
            if self._taken("collate"):
                self._word("a collation")
        elif name in _DECIMALS:
            return ColumnType(name, digits=self._decimal())
        elif name in _SIZED:
            self._expect("(")
            self._number()
            self._expect(")")
        elif name in _PLACED:
            self._expect("(")
            self._word("a reference system")
            self._expect(")")
        elif name not in _PLAIN:
            self._next = place
            near = difflib.get_close_matches(name, _PLAIN, n=1)
            raise self._unexpected("a type", f"; is {near[0].upper()} meant?" if near else "")
        return ColumnType(name)

    def _compound(self, name: str) -> ColumnType:
        self._expect("<")
        if name == "struct":
            parts = () if self._peek(">") else self._columns()
        elif name == "array":
            parts = (Column("", self._type()),)
        else:
            key = Column("", self._type())
            self._expect(",")
            parts = (key, Column("", self._type()))
        self._expect(">")
        return ColumnType(name, parts)

    def _interval(self) -> None:
        for units in _UNITS:
            for place, unit in enumerate(units):
                if self._taken(unit):
                    if self._taken("to") and not any(self._taken(later) for later in units[place + 1 :]):
                        raise self._unexpected("a smaller unit of time")
                    return

    def _time(self, name: str) -> None:
        if name == "time" and self._taken("("):
            if self._number() > _MAX_FRACTION:
                raise _NoColumnsError(f"TIME has at most {_MAX_FRACTION} digits of a second")
            self._expect(")")
        if self._taken("without"):
            self._expect("time")
            self._expect("zone")

    def _decimal(self) -> tuple[int, int]:
        if not self._taken("("):
            return _DEFAULT_DIGITS
        digits, scale = self._number(), 0
        if self._taken(","):
            scale = self._number()
        self._expect(")")
        if digits > _MAX_DIGITS or scale > digits:
            raise _NoColumnsError(
                f"DECIMAL({digits},{scale}) has more than {_MAX_DIGITS} digits, or more behind the point than in all"
            )
        return digits, scale

    def _columns(self) -> tuple[Column, ...]:
        columns = [self._column()]
        while self._taken(","):
            columns.append(self._column())
        return tuple(columns)

    def _name(self) -> str:
        token = self._here()
        if token.startswith("`") and len(token) > 1:
            self._next += 1
            return token[1:-1].replace("``", "`")
        if not _NAME.fullmatch(token) or _NUMBER.fullmatch(token):
            raise self._unexpected("a column's name (in backquotes, if it is more than letters, digits and _)")
        self._next += 1
        return token

    def _word(self, wanted: str) -> str:
        token = self._here()
        if not _NAME.fullmatch(token):
            raise self._unexpected(wanted)
        self._next += 1
        return token

    def _number(self) -> int:
        token = self._here()
        if not (token.isascii() and token.isdigit()):
            raise self._unexpected("a number")
        self._next += 1
        return int(token)

    def _expect(self, token: str) -> None:
        if not self._taken(token):
            raise self._unexpected(f"{token.upper()!r}")

    def _taken(self, token: str) -> bool:
        taken = self._peek(token)
        self._next += taken
        return taken

    def _peek(self, token: str, ahead: int = 0) -> bool:
        place = self._next + ahead
        return place < len(self._tokens) and self._tokens[place][0].lower() == token

    def _here(self) -> str:
        return self._tokens[self._next][0] if self._next < len(self._tokens) else ""

    def _unexpected(self, wanted: str, more: str = "") -> _NoColumnsError:
        if self._next >= len(self._tokens):
            return _NoColumnsError(f"it ends where {wanted} should be")
        token, place = self._tokens[self._next]
        return _NoColumnsError(f"{token!r} at character {place} is not {wanted}{more}")
