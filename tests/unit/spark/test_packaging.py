from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

from headrace.spark.packaging import PackageSourceError, package_zip


def test_the_zip_has_core_and_spark_and_nothing_of_airflow_or_the_command_line(tmp_path: Path) -> None:
    names = zipfile.ZipFile(package_zip(tmp_path)).namelist()
    assert "__init__.py" in names
    assert "blocks.py" in names
    assert "spark/packaging.py" in names
    folders = {name.split("/")[0] for name in names if "/" in name}
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


def test_all_that_executors_run_is_in_the_zip(tmp_path: Path) -> None:
    code = """
        import headrace.spark.elasticsearch_sink, headrace.spark.receiver_launcher, headrace.spark.wal_source
        import headrace.indexing.indexer, headrace.ledger.ledger, headrace.receiving.receiver_task
        from headrace.spark import wal_source
        print(wal_source.__file__)
    """
    # Without site there is no .pth file, and so no other headrace than the zip's.
    libraries = [entry for entry in sys.path if entry.endswith("site-packages")]
    unpacked = tmp_path / "files"
    zipfile.ZipFile(package_zip(tmp_path)).extractall(unpacked / "headrace")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(unpacked), *libraries])}
    found = subprocess.run(
        [sys.executable, "-S", "-c", textwrap.dedent(code)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert found.stdout.startswith(str(unpacked)), found.stderr


def test_a_package_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PackageSourceError):
        package_zip(tmp_path, root=tmp_path / "headrace.zip" / "headrace")
