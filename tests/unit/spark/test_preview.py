from __future__ import annotations

from pathlib import Path

import pytest

from headrace.spark.preview import ExportError, only_file


@pytest.mark.parametrize("names", [[], ["part-0.parquet", "part-1.parquet"]])
def test_an_export_for_which_spark_did_not_write_one_file_is_an_error(tmp_path: Path, names: list[str]) -> None:
    for name in (*names, "_SUCCESS", ".part-0.parquet.crc"):
        (tmp_path / name).touch()
    with pytest.raises(ExportError, match=rf"Spark wrote {len(names)} Parquet files"):
        only_file(tmp_path)


def test_the_only_file_of_an_export_is_found_beside_sparks_other_files(tmp_path: Path) -> None:
    for name in ("part-0.parquet", "_SUCCESS", ".part-0.parquet.crc"):
        (tmp_path / name).touch()
    assert only_file(tmp_path) == tmp_path / "part-0.parquet"
