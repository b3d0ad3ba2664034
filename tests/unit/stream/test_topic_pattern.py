"""`TopicPattern` beside Python's ``re``, and expressions on which ``re`` takes minutes."""

from __future__ import annotations

import random
import re
import time

import pytest

from headrace.stream import KafkaInput, StreamDefinitionError
from headrace.stream.topic_pattern import TopicPattern, TopicPatternError

_NAMES = ("a", "b", "aa", "ab", "ba", "a.b", "-a", "aab", "b1", "B", "a-b.a", "aabbaa", ".", "..", "_a", "aB1.")
_ATOMS = ("a", "b", "-", ".", "[ab]", "[^a]", r"\w", r"\d", r"\D", r"\W", r"\.", "[a-c-]", "B", "$", "^", r"\b", r"\B")
_REPEATS = ("*", "+", "?", "{2}", "{1,3}", "{,2}", "{2,}", "*?", "+?", "??")
_BEHIND = ("(?<=a)", "(?<!ab)", "(?<=[ab].)", "(?<!a|b)", "(?<=^a)")


def _expression(chance: random.Random, depth: int) -> str:
    if depth == 0 or chance.random() < 0.35:
        return chance.choice(_ATOMS)
    inner, other = _expression(chance, depth - 1), _expression(chance, depth - 1)
    often = (inner + other, f"({inner}|{other})", f"(?:{inner}){chance.choice(_REPEATS)}")
    seldom = (f"(?{chance.choice('=!')}{inner})", f"(?i:{inner})", chance.choice(_BEHIND))
    return chance.choice(often * 3 + seldom)


def test_random_expressions_match_what_python_matches() -> None:
    chance = random.Random(11)
    matched = 0
    for _ in range(400):
        text = _expression(chance, 4)
        pattern, reference = TopicPattern(text), re.compile(text)
        for name in _NAMES:
            expected = reference.fullmatch(name) is not None
            assert pattern.matches(name) is expected, (text, name)
            matched += expected
    assert matched > 400


@pytest.mark.parametrize(
    ("text", "name", "expected"),
    [
        (r"(?!.*-test$)shop\..+", "shop.orders", True),
        (r"(?!.*-test$)shop\..+", "shop.orders-test", False),
        (r"shop\..*(?<!-dlq)", "shop.orders-dlq", False),
        (r"(?i)SHOP\.[a-c]+", "shop.aBc", True),
        (r"(?x) shop \. .*  # all of the shop's", "shop.a", True),
        (r"\Ashop\Z", "shop", True),
        ("shop", "shop\n", False),
        (".*", "caf\u00e9", False),
    ],
)
def test_a_pattern_has_pythons_syntax_for_names_of_topics(text: str, name: str, expected: bool) -> None:
    assert TopicPattern(text).matches(name) is expected


@pytest.mark.parametrize(
    "text",
    [
        r"([a-z]+-?)+\.events",
        r"([a-z]+[-.]?)*_events",
        "(a|a)*b",
        "(a?){60}a{60}b",
        "(.*)*.*.*.*.*.*x",
        "(?=(?:(?:a+)+)+x).*",
        "(?!(?:a|aa)+$).*y",
        "(?:.(?!.*.*.*x))*y",
    ],
)
def test_an_expressions_steps_grow_with_its_size_and_the_name(text: str) -> None:
    """They are at most the expression's size times the length of the name."""
    pattern = TopicPattern(text)
    began = time.process_time()
    assert not pattern.matches("a" * 248 + "_")
    # With `re`, years; here milliseconds.
    assert time.process_time() - began < 20


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("(", "not a regular expression"),
        ("a{99999999999}", "not a regular expression"),
        ("(" * 5_000 + ")" * 5_000, "nested too deep"),
        (r"(a+)\1", "backreference"),
        ("(?>a+)b", "atomic"),
        ("a++b", "possessive"),
        ("(a)?(?(1)b|c)", "condition"),
        ("((a{1,99}){1,99}){1,99}", "too large"),
        ("((){65535}){65535}", "too large"),
    ],
)
def test_what_is_not_matched_in_linear_time_is_refused(text: str, problem: str) -> None:
    """It is refused in the definition."""
    with pytest.raises(TopicPatternError, match=problem):
        TopicPattern(text)
    with pytest.raises(StreamDefinitionError, match=f"topic_pattern .*{problem}"):
        KafkaInput(bootstrap_servers="h:1", topic_pattern=text)


def test_a_list_of_many_topics_is_no_large_expression() -> None:
    names = [f"shop.orders-{number}.of-the-day" for number in range(500)]
    pattern = TopicPattern("|".join(re.escape(name) for name in names))
    assert pattern.matches(names[-1])
    assert not pattern.matches("shop.orders-500.of-the-day")
