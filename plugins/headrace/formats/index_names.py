"""The names of indices: what the server allows as a name, and names that each record fills in.

A name may have placeholders: ``{topic}``, ``{timestamp:%Y.%m.%d}``, ``{header.tenant}``, or any other column of the
rows as ``{column}``. `parse_index` reads one; `headrace.elasticsearch.record_indices` fills it in. Nothing but the
record and the definition decides a name, so a batch that runs again in a year writes to the same index.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

MAX_NAME_BYTES = 255
_MAX_MAPPING_BYTES = 8_000
"""Each dead letter repeats the mapping, as a keyword, of which the server takes no more than 32,766 bytes."""
UTC = "UTC"
_FORBIDDEN = '\\/*?"<>| ,#:'
_FORBIDDEN_FIRST = "-_+"

DIRECTIVES = {"%Y": 4, "%m": 2, "%d": 2, "%H": 2, "%j": 3, "%G": 4, "%V": 2}
"""What a time may be written with, and the number of its digits: year, month, day, hour, day of the year, and the year
and week of ISO 8601. All are digits, so the name depends on no language."""
_DIRECTIVE = re.compile(r"%.?")

_OWN = re.compile(r"\{([^{}:]+)(?::([^{}]*))?\}")
_HEADER = "header."

# The forms of Kafka Connect, Logstash, Vector, Fluent Bit, Airflow and of Elasticsearch's date mathematics. A percent
# sign before two hexadecimal digits is a character of a URL.
_FOREIGN = re.compile(
    r"<[^>]*>?|[$%#@~]?\{[^}]*\}*|\}|\$\(?\w+\)?|%(?![0-9A-Fa-f]{2})-?[A-Za-z]|\[[A-Za-z][^\]]*\]|yyyy", re.IGNORECASE
)
_DAY = "{timestamp:%Y.%m.%d}"


def foreign_placeholder(text: str) -> str | None:
    """The first part of the text that looks like another tool's placeholder, or like date mathematics."""
    found = _FOREIGN.search(text)
    return None if found is None else found[0]


def illegal_name(name: str) -> str | None:
    """Why the server would refuse this name for an index (its MetadataCreateIndexService), None if it would not.

    Characters that would make it an expression over several indices (wildcards, commas) are refused too.
    """
    if not name:
        return "it is empty"
    if name != name.lower():
        return "it has capital letters"
    forbidden = sorted(set(name) & set(_FORBIDDEN))
    if forbidden or not name.isprintable():
        shown = ", ".join("blanks" if character == " " else character for character in forbidden)
        return f"it has {shown or 'characters that cannot be printed'}"
    if name[0] in _FORBIDDEN_FIRST:
        return f"it begins with {name[0]}"
    if name in (".", ".."):
        return "it is a folder's"
    size = len(name.encode())
    return f"it has {size} bytes in UTF-8, more than {MAX_NAME_BYTES}" if size > MAX_NAME_BYTES else None


@dataclass(frozen=True, slots=True)
class Placeholder:
    """A part of a name that a row fills in: with a column, or a header of its record, as text; or as a time, with a
    ``time_format``."""

    column: str
    header: str = ""
    """The header, if ``column`` is that of the headers."""
    time_format: str = ""

    def __str__(self) -> str:
        name = f"{_HEADER}{self.header}" if self.header else self.column
        return f"{{{name}:{self.time_format}}}" if self.time_format else f"{{{name}}}"


Template = tuple[str | Placeholder, ...]
"""The parts of a name: texts, and placeholders between them."""


def begins_with_dot(template: Template) -> bool:
    """Whether the definition itself names a hidden index; no record may, since the server's own are named so."""
    return str(template[0]).startswith(".")


@dataclass(frozen=True, slots=True)
class IndexNames:
    """The index of each row: one template for all, or one for each topic of a mapping. Spark pickles it."""

    text: str
    """As the definition has it; of a mapping as JSON."""
    template: Template = ()
    """That of all rows. Empty: ``by_topic`` decides."""
    by_topic: tuple[tuple[str, Template], ...] = ()
    zone: str = UTC
    """The time zone of times, by its name in the IANA database."""

    @property
    def is_plain(self) -> bool:
        """Whether all rows have one index, named by the definition."""
        return not self.by_topic and not any(isinstance(part, Placeholder) for part in self.template)

    @property
    def common(self) -> str:
        """The texts of the name, joined by hyphens: a plain name is that; "" if there are none, and of a mapping."""
        texts = [part.strip("-_+.") for part in self.template if isinstance(part, str)]
        return self.text if self.is_plain else "-".join(text for text in texts if text)

    @property
    def templates(self) -> tuple[Template, ...]:
        """Those that a row may have."""
        return (self.template,) if self.template else tuple(template for _, template in self.by_topic)

    @property
    def placeholders(self) -> tuple[Placeholder, ...]:
        """What is needed of a row, each once. A mapping needs the topic, and that comes first."""
        parts = [part for template in self.templates for part in template if isinstance(part, Placeholder)]
        return tuple(dict.fromkeys([*([Placeholder("topic")] if self.by_topic else []), *parts]))

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of rows of which names are made, each once."""
        return tuple(dict.fromkeys(part.column for part in self.placeholders))

    def template_of(self, topic: str) -> Template | None:
        """The template for the rows of a topic; None if the mapping does not have it."""
        return self.template or dict(self.by_topic).get(topic)

    def of_topics(self, topics: Iterable[str]) -> IndexNames:
        """The same for rows of these topics only, with the topic filled in wherever it is a part."""
        known: list[tuple[str, Template]] = []
        mapped = dict(self.by_topic)
        for topic in topics:
            if (template := self.template or mapped.get(topic)) is not None:
                known.append(
                    (topic, tuple(_joined(topic if part == Placeholder("topic") else part for part in template)))
                )
        return IndexNames(self.text, by_topic=tuple(known), zone=self.zone)

    def may_be(self, name: str) -> bool:
        """Whether some row may have the index of this name."""
        return any(_meet(_tokens(template), list(name)) for template in self.templates)

    def may_meet(self, other: IndexNames, *, one_row: bool) -> bool:
        """Whether rows of both may have the same index. ``one_row``: it is the same row in both, so equal placeholders
        have the same value."""
        if one_row and self.by_topic and other.by_topic:
            of_other = dict(other.by_topic)
            pairs = [(mine, of_other[topic]) for topic, mine in self.by_topic if topic in of_other]
        else:
            mine, theirs = set(self.templates), set(other.templates)
            if not mine.isdisjoint(theirs):
                return True
            pairs = [(first, second) for first in mine for second in theirs if _begin_alike(first, second)]
        if one_row and self.zone == other.zone:
            pairs = [_without_common_ends(*pair) for pair in pairs]
        return any(_meet(_tokens(first), _tokens(second)) for first, second in pairs)

    @property
    def patterns(self) -> tuple[str, ...]:
        """Wildcard expressions that match all of the names, for questions about privileges."""
        return tuple(
            dict.fromkeys(
                "".join(part if isinstance(part, str) else "*" for part in template) for template in self.templates
            )
        )


def parse_index(index: str | Mapping[str, str], zone: str = UTC) -> IndexNames:
    """Read the ``index`` of an output: a name with or without placeholders, or a mapping of topics to such names.

    Raises ValueError, which the definition's error repeats.
    """
    return _parsed(index if isinstance(index, str) else tuple(index.items()), zone)


# An output is asked for its names again and again, also as that of one index for each name of a batch.
@lru_cache(maxsize=1024)
def _parsed(index: str | tuple[tuple[str, str], ...], zone: str) -> IndexNames:
    if isinstance(index, str):
        return IndexNames(index, _template(index), zone=zone)
    if not index:
        raise ValueError("is an empty mapping; name an index for each topic")
    by_topic = []
    for topic, name in index:
        try:
            by_topic.append((topic, _template(name)))
        except ValueError as error:
            raise ValueError(f"for topic {topic!r} {error}") from None
    text = json.dumps(dict(index), ensure_ascii=False)
    if (size := len(text.encode())) > _MAX_MAPPING_BYTES:
        raise ValueError(
            f"is a mapping of {len(index)} topics with {size:,} bytes as JSON, more than {_MAX_MAPPING_BYTES:,}, and "
            "each dead letter repeats it; name the index by {topic}, or divide the topics among several streams"
        )
    return IndexNames(text, by_topic=tuple(by_topic), zone=zone)


def check_zone(zone: str) -> str:
    """Return the name of a time zone if it is known. Raises ValueError."""
    # Spark's workers import this module, and hardly any needs a zone.
    from zoneinfo import ZoneInfo

    try:
        ZoneInfo(zone)
    except (ValueError, OSError, KeyError):
        raise ValueError(
            f'is {zone!r}, which is no time zone that is known here; write one such as "Europe/Berlin"'
        ) from None
    return zone


def _template(text: str) -> Template:
    parts: list[str | Placeholder] = []
    end = 0
    for found in _OWN.finditer(text):
        parts += [_literal(text, end, found.start())] if found.start() > end else []
        parts.append(_placeholder(found))
        end = found.end()
    if end < len(text):
        parts.append(_literal(text, end, len(text)))
    # Each placeholder stands for at least one character that a name may begin with.
    problem = illegal_name("".join(part if isinstance(part, str) else "0" for part in parts))
    if problem == "it is empty":
        raise ValueError("is empty; name an index")
    if problem is not None:
        raise ValueError(f"is no name for an index: {problem}")
    return tuple(parts)


def _literal(text: str, start: int, end: int) -> str:
    literal = text[start:end]
    # Such a character before a placeholder of ours makes it one of another tool.
    if end < len(text) and literal[-1:] in ("$", "%", "#", "@", "~", "{"):
        raise ValueError(_refused(str(_FOREIGN.search(text[end - 1 :])[0])))  # type: ignore[index]
    if (found := foreign_placeholder(literal)) is not None:
        raise ValueError(_refused(text if found.startswith("<") else found))
    return literal


def _placeholder(found: re.Match[str]) -> Placeholder:
    name, time_format = found[1], found[2]
    if name != name.strip() or name[0] in "+[%" or not name.removeprefix(_HEADER):
        raise ValueError(_refused(found[0]))
    if time_format is None:
        placeholder = (
            Placeholder("headers", name.removeprefix(_HEADER)) if name.startswith(_HEADER) else Placeholder(name)
        )
        if name == "headers":
            raise ValueError(f"has {found[0]}; write {{header.NAME}} for the value of one header")
        if name == "timestamp":
            raise ValueError(f"has {found[0]} without a format; write for example {_DAY}")
        return placeholder
    if name == "topic":
        raise ValueError(f"has {found[0]!r}: a topic is no time; write {{topic}}, or {_DAY} for the record's time")
    known = _DIRECTIVE.findall(time_format)
    if not known or any(each not in DIRECTIVES for each in known) or name.startswith(_HEADER):
        raise ValueError(
            f"has {found[0]!r}: a time is a column with a format of {', '.join(DIRECTIVES)} and characters, such as "
            f"{{{'timestamp' if name.startswith(_HEADER) else name}:%Y.%m.%d}}"
        )
    if (problem := illegal_name("0" + _DIRECTIVE.sub("0", time_format))) is not None:
        raise ValueError(f"is no name for an index: {problem} in {found[0]}")
    return Placeholder(name, time_format=time_format)


def _refused(found: str) -> str:
    """The reason to refuse another tool's placeholder: what to write instead."""
    inner = re.sub(r"^[^\w]+|[^\w]+$", "", found)
    if found.startswith("<") or re.search(r"yyyy|%-?[a-z]|\+", found, re.IGNORECASE) or inner in ("ds", "date", "now"):
        mine = _DAY
    elif found.startswith("}") or not re.fullmatch(r"[\w.-]+", inner):
        mine = "{topic}"
    else:
        mine = f"{{{inner}}}"
    return (
        f"has {found!r}, as a placeholder of another tool or date mathematics, for which nothing is filled in; write "
        f"{mine}, or another of {{topic}}, {_DAY}, {{header.NAME}} and {{COLUMN}}"
    )


def _joined(parts: Iterable[str | Placeholder]) -> Iterator[str | Placeholder]:
    """The parts with neighbouring texts as one."""
    held = ""
    for part in parts:
        if isinstance(part, str):
            held += part
            continue
        if held:
            yield held
        held = ""
        yield part
    if held:
        yield held


_ANY = None
"""A token that stands for at least one character, whichever."""
_DIGIT = ""
"""A token that stands for one digit."""
_Tokens = list[str | None]


def _tokens(template: Template) -> _Tokens:
    tokens: _Tokens = []
    for part in template:
        if isinstance(part, str):
            tokens += list(part)
        elif not part.time_format:
            tokens.append(_ANY)
        else:
            for piece in re.split(r"(%.)", part.time_format):
                tokens += [_DIGIT] * DIRECTIVES[piece] if piece in DIRECTIVES else list(piece)
    return tokens


def _meet(mine: _Tokens, theirs: _Tokens) -> bool:
    """Whether some text is matched by both."""
    reached, seen = [(0, 0)], {(0, 0)}
    while reached:
        at, other = reached.pop()
        if at == len(mine) and other == len(theirs):
            return True
        if at == len(mine) or other == len(theirs) or not _one_character(mine[at], theirs[other]):
            continue
        # A token for any text may take the next character too.
        steps = [(at + 1, other + 1)]
        steps += [(at, other + 1)] if mine[at] is _ANY else []
        steps += [(at + 1, other)] if theirs[other] is _ANY else []
        for step in steps:
            if step not in seen:
                seen.add(step)
                reached.append(step)
    return False


def _one_character(mine: str | None, theirs: str | None) -> bool:
    if _ANY in (mine, theirs) or mine == theirs:
        return True
    return (mine == _DIGIT and str(theirs).isdigit()) or (theirs == _DIGIT and str(mine).isdigit())


def _begin_alike(mine: Template, theirs: Template) -> bool:
    """Whether the texts that both begin with allow an equal name: a cheap answer for most pairs of two mappings."""
    first, second = mine[0], theirs[0]
    if not (isinstance(first, str) and isinstance(second, str)):
        return True
    if len(mine) == len(theirs) == 1:
        return first == second
    return first.startswith(second) or second.startswith(first)


def _without_common_ends(mine: Template, theirs: Template) -> tuple[Template, Template]:
    """Both without the parts that they begin and end with alike: of one row these are equal texts."""
    first, second = _pieces(mine), _pieces(theirs)
    while first and second and first[0] == second[0]:
        first, second = first[1:], second[1:]
    while first and second and first[-1] == second[-1]:
        first, second = first[:-1], second[:-1]
    return tuple(first), tuple(second)


def _pieces(template: Template) -> list[str | Placeholder]:
    return [piece for part in template for piece in (part if isinstance(part, str) else (part,))]
