"""Times and durations as text."""

from __future__ import annotations

import pytest

from headrace.clock import readable_seconds


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.25, "0.2 s"), (59, "59 s"), (60, "1 min"), (61, "1 min 1 s"), (7_300, "2 h 1 min"), (90_000, "1 d 1 h")],
)
def test_lengths_of_time_are_readable(seconds: float, text: str) -> None:
    assert readable_seconds(seconds) == text
