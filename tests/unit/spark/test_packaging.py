from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from headrace.spark.packaging import PackageSourceError, package_zip


def test_the_zip_has_core_and_spark_and_nothing_of_airflow_or_the_command_line(tmp_path: Path) -> None:
    names = zipfile.ZipFile(package_zip(tmp_path)).namelist()
    assert "headrace/__init__.py" in names
    assert "headrace/blocks.py" in names
    assert "headrace/spark/packaging.py" in names
    folders = {name.split("/")[1] for name in names if name.count("/") > 1}
    assert not folders & {"operators", "sensors", "triggers", "hooks", "dags", "ui", "cli", "local", "timetables"}


def test_the_same_sources_give_the_same_file_once(tmp_path: Path) -> None:
    first = package_zip(tmp_path)
    written = first.stat().st_mtime_ns
    assert package_zip(tmp_path) == first
    assert first.stat().st_mtime_ns == written
    assert package_zip(tmp_path / "other").read_bytes() == first.read_bytes()
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == [first.name]


def test_changed_sources_give_another_file(tmp_path: Path) -> None:
    root = tmp_path / "headrace"
    (root / "wal").mkdir(parents=True)
    (root / "__init__.py").write_text("__version__ = '1'\n")
    first = package_zip(tmp_path / "cache", root=root)
    (root / "wal" / "__init__.py").write_text("changed = True\n")
    assert package_zip(tmp_path / "cache", root=root) != first


def test_the_zip_is_importable_without_the_checkout(tmp_path: Path) -> None:
    code = "import headrace.spark.block_groups as module; print(module.__file__)"
    environment = {**os.environ, "PYTHONPATH": str(package_zip(tmp_path))}
    found = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, cwd=tmp_path
    ).stdout
    assert found.startswith(str(tmp_path))


def test_a_package_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PackageSourceError):
        package_zip(tmp_path, root=tmp_path / "headrace.zip" / "headrace")
