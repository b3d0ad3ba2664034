"""Two versions of Spark in one folder are reported before anything starts, with the command that fixes it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace.cli.main import app
from headrace.spark.receiving.receiver_process import ReceiverProcess
from headrace.spark.versions import MixedSparkError, check_spark_packages

Install = Callable[[str, str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts the metadata of a package ahead of what is installed."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(package: str, version: str) -> None:
        metadata = tmp_path / f"{package.replace('-', '_')}-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")

    return write


@pytest.fixture
def mixed(install: Install) -> None:
    install("pyspark", "4.3.0")
    install("pyspark-client", "4.2.0")


def test_the_error_names_both_versions_and_one_command(mixed: None) -> None:
    with pytest.raises(MixedSparkError, match=r"pyspark 4\.3\.0 and pyspark-client 4\.2\.0 are mixed") as found:
        check_spark_packages()
    command = "pip install --force-reinstall --no-deps pyspark==4.2.0 pyspark-client==4.2.0"
    assert command in str(found.value.remedy)


def test_one_version_is_as_it_should_be(install: Install) -> None:
    install("pyspark", "4.3.0")
    install("pyspark-client", "4.3.0")
    check_spark_packages()


def test_pyspark_alone_is_no_mixture(monkeypatch: pytest.MonkeyPatch, install: Install, tmp_path: Path) -> None:
    install("pyspark", "4.3.0")
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    check_spark_packages()


def test_a_check_of_a_stream_reports_it(mixed: None, tmp_path: Path) -> None:
    definition = tmp_path / "shop.json"
    definition.write_text(
        '{"name": "shop", "batch_interval": "10 s", "storage": "/tmp/shop", "ledger": "sqlite:////tmp/shop.db", '
        '"inputs": {"kind": "kafka", "bootstrap_servers": "127.0.0.1:1", "topics": "clicks"}, '
        '"outputs": {"kind": "console"}}'
    )
    ran = CliRunner().invoke(app, ["streams", "check", str(definition)])
    assert ran.exit_code == 1
    assert "pyspark 4.3.0 and pyspark-client 4.2.0 are mixed" in ran.output


def test_a_receiver_job_does_not_start(mixed: None) -> None:
    process = object.__new__(ReceiverProcess)
    with pytest.raises(MixedSparkError):
        process.run()
