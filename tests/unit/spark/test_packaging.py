from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path
from typing import Any

import pytest

from headrace.connections import ALLOWLIST_VARIABLE, ConnectionNotFoundError, resolve, variable_of
from headrace.spark.packaging import PackageSourceError, connections_conf, package_zip, send_connections


class Context:
    """As much of a SparkContext as files are sent by."""

    def __init__(self, folder: Path, master: str) -> None:
        self._temp_dir = str(folder)
        self.master = master
        self.files: list[Path] = []

    def addFile(self, path: str) -> None:  # noqa: N802 - pyspark's name
        self.files.append(Path(path))


def test_executors_elsewhere_resolve_the_drivers_connections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context: Any = Context(tmp_path, "spark://host:7077")
    environment = {
        "AIRFLOW_CONN_ES": '{"conn_type": "elasticsearch", "password": "hunter2"}',
        ALLOWLIST_VARIABLE: "acme.kafka.make_token",
        "PATH": "/bin",
    }
    send_connections(context, environment)
    (sent,) = context.files
    assert sent.stat().st_mode & 0o077 == 0
    # Where Spark puts an application's files, an executor and its workers run.
    monkeypatch.chdir(tmp_path)
    prefix = "spark.executorEnv."
    conf = connections_conf(context.master, environment)
    there = {name.removeprefix(prefix): value for name, value in conf.items() if name.startswith(prefix)}
    assert "hunter2" not in str(there)
    assert resolve("es", there).password == "hunter2"
    assert variable_of(ALLOWLIST_VARIABLE, there) == "acme.kafka.make_token"
    assert variable_of("PATH", there) is None
    with pytest.raises(ConnectionNotFoundError):
        resolve("other", there)


@pytest.mark.parametrize(("master", "environment"), [("local[2]", {"AIRFLOW_CONN_ES": "{}"}), ("spark://h:7077", {})])
def test_no_file_is_sent_without_other_executors_or_connections(
    tmp_path: Path, master: str, environment: dict[str, str]
) -> None:
    context: Any = Context(tmp_path, master)
    send_connections(context, environment)
    assert (context.files, connections_conf(master, environment)) == ([], {})


def test_the_zip_has_core_and_spark_and_nothing_of_airflow(tmp_path: Path) -> None:
    """It has nothing of the command line either."""
    names = zipfile.ZipFile(package_zip(tmp_path)).namelist()
    assert "__init__.py" in names
    assert "blocks.py" in names
    assert "spark/packaging.py" in names
    folders = {name.split("/")[0] for name in names if "/" in name}
    assert not folders & {"operators", "sensors", "triggers", "hooks", "dags", "ui", "cli", "devstack", "timetables"}


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
        import headrace.spark.outputs.elasticsearch_sink, headrace.spark.receiving.receiver_launcher
        import headrace.spark.records.wal_source
        import headrace.elasticsearch.indexer, headrace.ledger.ledger, headrace.receiver.supervisor
        from headrace.spark.records import wal_source
        print(wal_source.__file__)
    """
    # Without site there is no .pth file, and so no other headrace than the zip's.
    libraries = [entry for entry in sys.path if entry.endswith("site-packages")]
    unpacked = tmp_path / "files"
    zipfile.ZipFile(package_zip(tmp_path)).extractall(unpacked / "headrace")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(unpacked), *libraries])}
    done = subprocess.run(
        [sys.executable, "-S", "-c", textwrap.dedent(code)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.stdout.startswith(str(unpacked)), done.stderr


def test_a_package_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PackageSourceError):
        package_zip(tmp_path, root=tmp_path / "headrace.zip" / "headrace")
