"""What previews and replay diffs leave out, without Spark."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.spark.preview import ExportError, only_file
from headrace.spark.replay_diff import WHOLE, _changed_fields


@pytest.mark.parametrize("names", [[], ["part-0.parquet", "part-1.parquet"]])
def test_an_export_without_just_one_file_is_an_error(tmp_path: Path, names: list[str]) -> None:
    """Spark did not write exactly one."""
    for name in (*names, "_SUCCESS", ".part-0.parquet.crc"):
        (tmp_path / name).touch()
    with pytest.raises(ExportError, match=rf"Spark wrote {len(names)} Parquet files"):
        only_file(tmp_path)


def test_the_only_file_of_an_export_is_found_beside_other_files(tmp_path: Path) -> None:
    for name in ("part-0.parquet", "_SUCCESS", ".part-0.parquet.crc"):
        (tmp_path / name).touch()
    assert only_file(tmp_path) == tmp_path / "part-0.parquet"


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
