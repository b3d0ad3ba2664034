"""The names of indices with placeholders: what is read, what is refused, and which may meet."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from headrace.formats.index_names import IndexNames, Placeholder, check_zone, illegal_name, parse_index

DAY = Placeholder("timestamp", time_format="%Y.%m.%d")


@pytest.mark.parametrize(
    ("text", "template"),
    [
        ("orders", ("orders",)),
        ("orders-{topic}", ("orders-", Placeholder("topic"))),
        ("logs-{timestamp:%Y.%m.%d}", ("logs-", DAY)),
        ("{header.tenant}-orders", (Placeholder("headers", "tenant"), "-orders")),
        ("{shop}-{day:%G-w%V}", (Placeholder("shop"), "-", Placeholder("day", time_format="%G-w%V"))),
    ],
)
def test_a_name_is_read_into_texts_and_placeholders(text: str, template: Any) -> None:
    names = parse_index(text)
    assert names.template == template
    assert names.is_plain == (text == "orders")


def test_a_mapping_has_a_name_for_each_topic() -> None:
    names = parse_index({"a": "x", "b": "y-{timestamp:%Y}"})
    assert [names.template_of(topic) for topic in ("a", "c")] == [("x",), None]
    assert names.columns == ("topic", "timestamp")
    assert (names.text, names.is_plain) == ('{"a": "x", "b": "y-{timestamp:%Y}"}', False)


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("logs-${topic}", "write {topic}"),
        ("logs-%{[tenant]}", "write {tenant}"),
        ("logs-%{+YYYY.MM.dd}", r"write \{timestamp:%Y.%m.%d\}"),
        ("logs-{{ service }}", "write {service}"),
        ("logs-$(topic)", "write {topic}"),
        ("logs-%Y.%m.%d", r"write \{timestamp:%Y.%m.%d\}"),
        ("<logs-{now/d}>", r"write \{timestamp:%Y.%m.%d\}"),
        ("logs-{topic}-{{ ds }}", r"write \{timestamp:%Y.%m.%d\}"),
        ("cost${topic}", "write {topic}"),
        ("logs-{}", "write {topic}"),
        ("{headers}", "write {header.NAME} for the value"),
        ("{timestamp}", r"without a format; write for example \{timestamp:%Y.%m.%d\}"),
        ("{timestamp:%b}", "a format of %Y, %m, %d"),
        ("{timestamp:%y}", "a format of %Y, %m, %d"),
        ("{timestamp:}", "a format of"),
        ("{header.day:%Y}", r"such as \{timestamp:%Y.%m.%d\}"),
        ("{topic:%Y}", "a topic is no time; write {topic}"),
        ("{timestamp:%Y/%m}", r"it has / in \{timestamp:%Y/%m\}"),
        ("{timestamp:%YW%V}", "capital letters in"),
        ("-{topic}", "begins with -"),
        ("Logs-{topic}", "capital letters"),
        ("", "is empty"),
        ("x" * 255 + "{topic}", "256 bytes"),
    ],
)
def test_another_tools_placeholder_is_refused_with_the_right_one(text: str, right: str) -> None:
    with pytest.raises(ValueError, match=right):
        parse_index(text)


def test_a_wrong_name_of_a_mapping_is_refused_with_its_topic() -> None:
    with pytest.raises(ValueError, match=r"for topic 'b' has '\$\{topic\}'"):
        parse_index({"a": "x", "b": "${topic}"})
    with pytest.raises(ValueError, match="empty mapping"):
        parse_index({})


def test_a_mapping_that_no_dead_letter_could_hold_is_refused() -> None:
    mapping = {"é" * 1_000: "x", "b" * 5_980: "y"}
    assert len(parse_index(mapping).text.encode()) == 7_998
    with pytest.raises(ValueError, match=r"2 topics with 8,001 bytes .* name the index by \{topic\}, or divide"):
        parse_index({**mapping, "b" * 5_980: "zzzz"})


@pytest.mark.parametrize("name", ["", "A", "a b", "a/b", "a\\b", "a*", "a?", 'a"', "a<", "a>", "a|", "a,", "a#", "a:"])
def test_a_name_that_the_server_refuses_is_illegal(name: str) -> None:
    assert illegal_name(name)


@pytest.mark.parametrize("name", ["-a", "_a", "+a", ".", "..", "a" * 256, "é" * 128, "a\n"])
def test_a_name_of_a_wrong_beginning_or_length_is_illegal(name: str) -> None:
    assert illegal_name(name)


@pytest.mark.parametrize("name", ["a", "a-b_c+d", ".a", "é", "a" * 255, "0", "a.b", "ß", "日"])
def test_a_name_that_the_server_takes_is_legal(name: str) -> None:
    assert illegal_name(name) is None


@pytest.mark.parametrize(
    ("mine", "theirs", "one_row", "anyhow"),
    [
        ("a", "a", True, True),
        ("a", "b", False, False),
        ("{topic}", "{topic}", True, True),
        ("{topic}", "{topic}-v2", False, True),
        ("v2-{topic}", "{topic}", False, True),
        ("{topic}-a", "{topic}-b", False, False),
        ("logs-{topic}", "logs-x", True, True),
        ("logs-{topic}", "letters-x", False, False),
        ("l-{timestamp:%Y}", "l-{timestamp:%Y.%m}", False, False),
        ("l-{timestamp:%Y}", "l-2026", True, True),
        ("l-{timestamp:%Y}", "l-202x", False, False),
        ("l-{timestamp:%Y.%m.%d}", "l-{header.day}", True, True),
        ("{a}-x", "y-{b}", True, True),
        ({"a": "x", "b": "y"}, {"a": "y", "b": "x"}, False, True),
        ({"a": "x", "b": "y"}, "y", True, True),
        ({"a": "x", "b": "y"}, "z", False, False),
    ],
)
def test_two_names_may_meet_in_one_index(mine: Any, theirs: Any, *, one_row: bool, anyhow: bool) -> None:
    """Of one row, equal placeholders have one value; none is ever empty."""
    for first, second in ((mine, theirs), (theirs, mine)):
        assert parse_index(first).may_meet(parse_index(second), one_row=True) == one_row
        assert parse_index(first).may_meet(parse_index(second), one_row=False) == anyhow


def test_two_long_mappings_are_not_compared_name_by_name() -> None:
    """Comparing all names of 400 topics letter by letter takes 2 s, whenever the definition is read."""
    for time in ("", "-{timestamp:%Y}"):
        mine, theirs = (parse_index(f"{{topic}}-{end}{time}").of_topics(map(str, range(1000, 1100))) for end in "xy")
        calls: list[str] = []
        sys.setprofile(lambda _, event, __, calls=calls: calls.append(event))
        try:
            met = mine.may_meet(theirs, one_row=False)
        finally:
            sys.setprofile(None)
        assert not met
        assert calls.count("call") < 2 * 100 * 100
        assert mine.may_meet(mine, one_row=False)


def test_a_name_is_read_once() -> None:
    assert parse_index({"a": "x"}) is parse_index({"a": "x"})
    assert parse_index({"a": "x"}, "Europe/Berlin").zone == "Europe/Berlin"


def test_times_of_two_zones_are_not_taken_for_equal() -> None:
    text = "{timestamp:%Y}"
    zones = [parse_index(text, zone) for zone in ("UTC", "Europe/Berlin")]
    assert zones[0].may_meet(zones[1], one_row=True)
    assert parse_index("{timestamp:%Y}", "UTC").may_meet(parse_index("{timestamp:%Y}x{topic}"), one_row=True) is False


def test_known_topics_make_a_name_exact() -> None:
    names = parse_index("{topic}-x").of_topics(["a", "b"])
    assert [names.may_be(name) for name in ("a-x", "c-x")] == [True, False]
    assert names.by_topic == (("a", ("a-x",)), ("b", ("b-x",)))


@pytest.mark.parametrize(
    ("index", "common"),
    [(".a-", ".a-"), ("logs-{timestamp:%Y}-v2", "logs-v2"), ("{topic}", ""), ("{topic}.{n}", ""), ({"a": "x"}, "")],
)
def test_the_texts_of_a_name_are_common_to_all(index: Any, common: str) -> None:
    assert parse_index(index).common == common


def test_patterns_match_the_names() -> None:
    assert parse_index({"a": "x", "b": "y-{timestamp:%Y}-{topic}"}).patterns == ("x", "y-*-*")


def test_a_zone_has_to_be_known() -> None:
    assert check_zone("Europe/Berlin") == "Europe/Berlin"
    for zone in ("Berlin", "", "../etc/passwd", "+01:00"):
        with pytest.raises(ValueError, match="no time zone"):
            check_zone(zone)


def test_names_are_a_value() -> None:
    assert parse_index("{a}") == IndexNames("{a}", (Placeholder("a"),))
    assert [str(each) for each in parse_index("{a}{header.b}{c:%Y}").placeholders] == ["{a}", "{header.b}", "{c:%Y}"]
