"""Whatever a definition, a connection or a run says, spark-submit gets the arguments that headrace gives it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.hooks.spark_submit import StreamSparkSubmitHook
from headrace.stream import ConsoleOutput, KafkaInput, Stream
from headrace.stream.model import StreamDefinitionError
from headrace.stream.settings import SparkSettings

EVIL = "x --class Evil --jars evil.jar"
# With a value each, as SparkSubmitOptionParser reads them.
FLAGS = {"--master", "--conf", "--py-files", "--name", "--queue", "--deploy-mode", "--principal", "--keytab"}


def stream(folder: Path, **spark: Any) -> Stream:
    return Stream(
        name="shop",
        inputs=KafkaInput(bootstrap_servers="127.0.0.1:1", topics="clicks"),
        outputs=ConsoleOutput(),
        batch_interval="10 s",
        storage={"url": str(folder), "shared": True},
        ledger=f"sqlite:///{folder}/ledger.db",
        spark=SparkSettings(**spark),
    )


def options_of(command: list[str]) -> dict[str, list[str]]:
    """The options before the application, as spark-submit reads them: a flag, then its value, whatever it is."""
    options: dict[str, list[str]] = {}
    rest = iter(command[1:])
    for argument in rest:
        if not argument.startswith("-"):
            assert argument == "/app.py"
            assert list(rest) == ["--stream", "shop"]
            return options
        assert argument in FLAGS, command
        options.setdefault(argument, []).append(next(rest))
    raise AssertionError(f"there is no application in {command}")


def command(one: Stream, **options: Any) -> list[str]:
    hook = StreamSparkSubmitHook(one, application_args=["--stream", "shop"], name="headrace shop", **options)
    return hook.command("/app.py")


def test_a_connections_extra_cannot_add_an_argument(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connection = {
        "conn_type": "spark",
        "host": f"spark://host {EVIL}",
        "port": 7077,
        "extra": {"queue": EVIL, "deploy-mode": EVIL, "namespace": EVIL, "principal": EVIL, "keytab": "eA=="},
    }
    monkeypatch.setenv("AIRFLOW_CONN_CLUSTER", json.dumps(connection))
    options = options_of(command(stream(tmp_path, connection="cluster")))
    assert options["--queue"] == [EVIL]
    assert options["--deploy-mode"] == [EVIL]
    assert options["--master"] == [f"spark://host {EVIL}:7077"]


@pytest.mark.parametrize(
    "extra", [{"spark-binary": "/tmp/evil"}, {"spark-binary": "sh"}, {"spark-home": "/tmp/evil"}], ids=str
)
def test_a_connections_extra_cannot_name_another_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extra: dict[str, str]
) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_CLUSTER", json.dumps({"conn_type": "spark", "host": "yarn", "extra": extra}))
    with pytest.raises(ValueError, match=r"spark-(binary|home)"):
        command(stream(tmp_path, connection="cluster"))


def test_a_definitions_settings_stay_values(tmp_path: Path) -> None:
    options = options_of(
        command(stream(tmp_path, conf={"spark.eventLog.dir": EVIL}, py_files=["/code/a b --class Evil.py"]))
    )
    assert f"spark.eventLog.dir={EVIL}" in options["--conf"]
    assert options["--py-files"] == ["/code/a b --class Evil.py"]


@pytest.mark.parametrize(
    "spark",
    [
        {"master": "--class"},
        {"master": "local[4] --class Evil"},
        {"master": "local[4]\n--class"},
        {"conf": {"spark.x=1 --class Evil": "y"}},
        {"conf": {"spark.x y": "z"}},
        {"conf": {"spark.x\n": "z"}},
        {"conf": {"spark.x": "a\nspark.plugins=Evil"}},
        {"conf": {"spark.x": "a\x00b"}},
        {"conf": {"spark.plugins": "Evil"}},
        {"conf": {"spark.master": "local[1]"}},
        {"conf": {"spark.submit.deployMode": "cluster"}},
        {"conf": {"spark.submit.pyFiles": "/evil.py"}},
        {"conf": {"spark.connect.grpc.binding.address": "0.0.0.0"}},  # noqa: S104
        {"conf": {"spark.connect.extensions.command.classes": "Evil"}},
        {"conf": {"--class": "Evil"}},
        {"py_files": ["/a.py,/evil.py"]},
        {"py_files": ["--class"]},
        {"py_files": ["--class=Evil://x"]},
        {"py_files": ["evil.py"]},
        {"py_files": ["/a.py\n"]},
    ],
    ids=str,
)
def test_what_is_more_than_it_looks_like_is_refused(tmp_path: Path, spark: dict[str, Any]) -> None:
    with pytest.raises(StreamDefinitionError):
        stream(tmp_path, **spark)
