from __future__ import annotations

from pathlib import Path

from headrace.stream import State

PAGE = Path(__file__).parents[4] / "docs" / "state.md"


def test_every_field_of_a_state_is_documented() -> None:
    text = PAGE.read_text()
    assert [name for name in State.model_fields if f"| `{name}` |" not in text] == []
