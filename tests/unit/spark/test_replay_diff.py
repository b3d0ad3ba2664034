from __future__ import annotations

import pytest

from headrace.spark.replay_diff import WHOLE, _changed_fields


@pytest.mark.parametrize(
    ("before", "after", "fields"),
    [
        ({"a": {"b": 1, "c": 2}, "d": 3}, {"d": 3, "a": {"c": 2, "b": 1}}, []),
        ({"a": True}, {"a": 1}, ["a"]),
        ({"a": 1}, {"a": 1.0}, ["a"]),
        ({"a": None}, {}, ["a"]),
        ({}, {"a": None}, ["a"]),
        ("no JSON", {"a": 1}, [WHOLE]),
    ],
)
def test_fields_differ_if_their_json_does(before: object, after: object, fields: list[str]) -> None:
    assert _changed_fields(before, after) == fields
