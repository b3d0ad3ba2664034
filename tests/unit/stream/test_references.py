"""What "module:attribute" may lead to, and how its absence is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.stream import StreamDefinitionError
from headrace.stream.model import is_reference, load_reference


def test_a_reference_is_a_module_and_one_name() -> None:
    assert is_reference("flights.clean:to_document")
    assert not any(map(is_reference, ("flights", "flights:", ":f", "a b:c", "a:b.c", "a:b()", "../a:b")))


def test_what_cannot_be_imported_is_reported_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "raising_module.py").write_text("raise TypeError('no such option')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load_reference("os.path:join", "transform")
    for reference, reported in (
        ("no_such_module:f", "No module named"),
        ("raising_module:f", "its module raises TypeError: no such option"),
        ("os.path:no_such_name", "has no 'no_such_name' to be the transform"),
    ):
        with pytest.raises(StreamDefinitionError, match=reported):
            load_reference(reference, "transform")
