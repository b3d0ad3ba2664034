"""Which fields of a document an index keeps, by the patterns of its mapping's ``_source``."""

from __future__ import annotations

import time

import pytest

from headrace.elasticsearch.stored_source import _KeptFields


@pytest.mark.parametrize(
    ("pattern", "sent", "held"),
    [
        ("b", {"a": 1, "b": 2, "bc": 3}, {"a": 1, "bc": 3}),
        ("b", {"a": 1, "b": {"c": 2}}, {"a": 1}),
        ("c.d*", {"c": {"d": 1, "de": {"f": 2}, "e": 3}}, {"c": {"e": 3}}),
        ("*.d", {"c": {"d": {"x": 1}, "e": 3}, "d": 4}, {"c": {"e": 3}, "d": 4}),
        ("a[bc]?", {"ab": 1, "a[bc]?": 2}, {"ab": 1}),
    ],
)
def test_an_excluded_field_and_all_below_it_are_not_compared(pattern: str, sent: object, held: object) -> None:
    assert _KeptFields.of({"mappings": {"_source": {"excludes": [pattern]}}}).same(sent, held)


def test_a_pattern_of_many_stars_is_matched_at_once() -> None:
    fields = _KeptFields.of({"mappings": {"_source": {"excludes": ["*a" * 30 + "b"]}}})
    began = time.process_time()
    assert not fields.same({"a" * 200: 1}, {})
    # Going back over each star would take years.
    assert time.process_time() - began < 20
