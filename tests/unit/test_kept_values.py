"""What decoders keep with the stream."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from headrace.kept_values import KeptValues


def test_a_value_is_kept_for_later_objects(tmp_path: Path) -> None:
    assert KeptValues(str(tmp_path)).get("schema-7") is None
    assert KeptValues(str(tmp_path)).keep("schema-7", b"{}") == b"{}"
    assert KeptValues(str(tmp_path)).get("schema-7") == b"{}"


def test_the_first_value_of_a_name_is_that_of_all(tmp_path: Path) -> None:
    given = [str(number).encode() for number in range(8)]
    with ThreadPoolExecutor(8) as threads:
        kept = set(threads.map(lambda value: KeptValues(str(tmp_path)).keep("reader", value), given))
    assert kept == {KeptValues(str(tmp_path)).get("reader")}
    assert kept <= set(given)


@pytest.mark.parametrize("name", ["", "../schema", "a/b", ".hidden", "x" * 201])
def test_a_name_that_is_no_file_of_its_folder_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot name a kept value"):
        KeptValues(str(tmp_path)).keep(name, b"")
    with pytest.raises(ValueError, match="cannot name a kept value"):
        KeptValues(str(tmp_path)).get(name)
