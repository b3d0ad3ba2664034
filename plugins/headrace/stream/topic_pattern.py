"""`TopicPattern`: a regular expression for names of topics that is matched in linear time.

Python's ``re`` goes back and tries again: ``([a-z]+-?)+\\.events`` took 19 s on a name of 26 letters, and no other
thread of the process ran meanwhile. Here Python's own parser reads the expression, and an automaton follows all ways
through it at once (Thompson's construction): its time is the length of the name by the size of the expression.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache, partial

# Private, and the same from Python 3.11 to 3.14; tests/unit/stream/test_topic_pattern.py compares with `re`.
from re import _parser  # type: ignore[attr-defined]
from typing import Any

_ALPHABET = frozenset(string.ascii_letters + string.digits + "._-")
_WORD = frozenset(string.ascii_letters + string.digits + "_")
_DIGITS = frozenset(string.digits)
_CATEGORIES = {
    "CATEGORY_DIGIT": _DIGITS,
    "CATEGORY_NOT_DIGIT": _ALPHABET - _DIGITS,
    "CATEGORY_WORD": _WORD,
    "CATEGORY_NOT_WORD": _ALPHABET - _WORD,
    "CATEGORY_SPACE": frozenset[str](),
    "CATEGORY_NOT_SPACE": _ALPHABET,
}
# Beside two for each character of the text. A name has 249 characters, so counts add at most half a million steps.
_MAX_STEPS = 2_000
_IGNORECASE = int(re.IGNORECASE)


class TopicPatternError(ValueError):
    """The text is no regular expression, or one that cannot be matched in linear time."""


_Ends = Callable[["_PatternStep"], set[int]]
_Condition = Callable[[str, int, _Ends], bool]


@dataclass(slots=True)
class _PatternStep:
    """A state of the automaton. It leads to ``then``: over one of ``characters``, or over none if ``condition`` (of the
    name and a position in it) holds. Where ``then`` is empty and nothing is asked, a match ends."""

    characters: frozenset[str] | None = None
    condition: _Condition | None = None
    then: tuple[int, ...] = ()
    # Of an assertion's first step, which is searched at all positions: its own first step, and whether it looks ahead.
    begin: int = -1
    backwards: bool = False


class TopicPattern:
    """Raises TopicPatternError: the text is no regular expression, has what needs the text that a group matched (a
    backreference, a condition, a possessive or atomic part), or is too large."""

    def __init__(self, text: str) -> None:
        self._steps: list[_PatternStep] = []
        self._most_steps = _MAX_STEPS + 2 * len(text)
        try:
            re.compile(text)
            tree = _parser.parse(text)
            self._begin = self._sequence(tree, self._add(_PatternStep()), tree.state.flags, backwards=False)
        except (re.error, OverflowError) as error:
            raise TopicPatternError(f"is not a regular expression ({error})") from None
        except RecursionError:
            raise TopicPatternError("is a regular expression that is nested too deep") from None

    def matches(self, name: str) -> bool:
        """Whether it matches the whole name. A name with other characters than a topic's is not matched."""
        if not _ALPHABET.issuperset(name):
            return False
        found: dict[int, set[int]] = {}

        def ends(look: _PatternStep) -> set[int]:
            if look.begin not in found:
                found[look.begin] = self._ends(name, look.begin, ends, backwards=look.backwards, anywhere=True)
            return found[look.begin]

        return len(name) in self._ends(name, self._begin, ends, backwards=False, anywhere=False)

    def _ends(self, name: str, begin: int, ends: _Ends, *, backwards: bool, anywhere: bool) -> set[int]:
        """The positions at which a match ends that begins at the name's first position, or ``anywhere``."""
        found: set[int] = set()
        reached: set[int] = {begin}
        for at in range(len(name), -1, -1) if backwards else range(len(name) + 1):
            if anywhere:
                reached.add(begin)
            character = name[at - 1 : at] if backwards else name[at : at + 1]
            after: set[int] = set()
            waiting = list(reached)
            while waiting:
                step = self._steps[waiting.pop()]
                if step.characters is not None:
                    if character in step.characters:
                        after.update(step.then)
                elif step.condition is not None and not step.condition(name, at, ends):
                    continue
                elif not step.then:
                    found.add(at)
                else:
                    new = [each for each in step.then if each not in reached]
                    reached.update(new)
                    waiting += new
            reached = after
        return found

    def _add(self, step: _PatternStep) -> int:
        if len(self._steps) >= self._most_steps:
            raise TopicPatternError(
                f"is too large: written without counts such as {{1,9}}, it has more than {self._most_steps} parts"
            )
        self._steps.append(step)
        return len(self._steps) - 1

    def _sequence(self, tree: Iterable[Any], then: int, flags: int, *, backwards: bool) -> int:
        """Add the steps of a parsed expression that lead to the step ``then``; return the first."""
        parts = list(tree)
        for kind, given in parts if backwards else reversed(parts):
            then = self._part(str(kind), given, then, flags, backwards=backwards)
        return then

    def _part(self, kind: str, given: Any, then: int, flags: int, *, backwards: bool) -> int:
        sequence = partial(self._sequence, flags=flags, backwards=backwards)
        match kind:
            case "LITERAL" | "NOT_LITERAL" | "ANY" | "IN":
                step = _PatternStep(characters=_characters(kind, given, flags), then=(then,))
            case "FAILURE":
                step = _PatternStep(characters=frozenset(), then=(then,))
            case "AT":
                step = _PatternStep(condition=partial(_is_at, str(given)), then=(then,))
            case "BRANCH":
                step = _PatternStep(then=tuple(sequence(each, then) for each in given[1]))
            case "ASSERT" | "ASSERT_NOT":
                # What follows a position is searched from the name's end on, so that one search is for all positions.
                ahead = given[0] > 0
                begin = self._sequence(given[1], self._add(_PatternStep()), flags, backwards=ahead)
                step = _PatternStep(begin=begin, backwards=ahead, then=(then,))
                step.condition = partial(_looks, step, kind == "ASSERT")
            case "SUBPATTERN":
                _, added, removed, tree = given
                return self._sequence(tree, then, (flags | added) & ~removed, backwards=backwards)
            case "MAX_REPEAT" | "MIN_REPEAT":
                least, most, tree = given
                return self._repeat(least, most, tree, then, sequence)
            case _:
                raise TopicPatternError(
                    "has a backreference, a condition on a group, or a possessive or atomic part, which takes more "
                    "than linear time; write it without"
                )
        return self._add(step)

    def _repeat(self, least: int, most: Any, tree: Any, then: int, sequence: Callable[[Any, int], int]) -> int:
        if most == _parser.MAXREPEAT:
            loop = self._add(_PatternStep())
            self._steps[loop].then = (sequence(tree, loop), then)
            then = loop
        else:
            end = then
            for _ in range(most - least):
                then = self._add(_PatternStep(then=(sequence(tree, then), end)))
        for _ in range(least):
            then = self._add(_PatternStep(then=(sequence(tree, then),)))
        return then


def _characters(kind: str, given: Any, flags: int) -> frozenset[str]:
    """The characters of topics' names that a part takes."""
    if kind == "ANY":
        return _ALPHABET
    if kind != "IN":
        found, negated = {chr(given)}, kind == "NOT_LITERAL"
    else:
        found, negated = set(), False
        for item, value in given:
            match str(item):
                case "NEGATE":
                    negated = True
                case "LITERAL":
                    found.add(chr(value))
                case "RANGE":
                    first, last = value
                    found |= {character for character in _ALPHABET if first <= ord(character) <= last}
                case _:
                    found |= _CATEGORIES[str(value)]
    if flags & _IGNORECASE:
        found |= {character.swapcase() for character in found}
    return _ALPHABET - found if negated else _ALPHABET & found


def _is_at(kind: str, name: str, at: int, _ends: _Ends) -> bool:
    match kind:
        case "AT_BEGINNING" | "AT_BEGINNING_STRING":
            return at == 0
        case "AT_END" | "AT_END_STRING":
            return at == len(name)
    boundary = (name[at - 1 : at] in _WORD) != (name[at : at + 1] in _WORD)
    return boundary == (kind == "AT_BOUNDARY")


def _looks(look: _PatternStep, positive: bool, _name: str, at: int, ends: _Ends) -> bool:
    return (at in ends(look)) == positive


@lru_cache(maxsize=64)
def topic_pattern(text: str) -> TopicPattern:
    """Raises TopicPatternError."""
    return TopicPattern(text)


@lru_cache(maxsize=1 << 14)
def matches(text: str, name: str) -> bool:
    """Whether the pattern matches the topic's whole name. The same names are asked at every look at a cluster."""
    return topic_pattern(text).matches(name)
