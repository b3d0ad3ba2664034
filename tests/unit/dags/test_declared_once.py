"""Two DAG files with one stream name, parsed as the DAG processor parses them, one after the other."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from airflow.dag_processing.dagbag import BundleDagBag
from airflow.sdk.definitions.context import _AIRFLOW_PARSING_CONTEXT_DAG_ID
from airflow.sdk.execution_time import task_runner

FILE = '''\
"""airflow dag"""
from headrace.dags import {factory}
from headrace.stream import ConsoleOutput, KafkaInput, Stream

stream = Stream(
    name="{name}",
    inputs=KafkaInput(bootstrap_servers="127.0.0.1:1", topics="{topic}"),
    outputs=ConsoleOutput(),
    batch_interval="10 s",
    storage="/nowhere",
    ledger="sqlite:////nowhere/ledger.db",
)
dags = {factory}(stream{options})
'''


class Files:
    """DAG files, parsed as by the DAG processor, a task or a command, with an Airflow home of their own."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.dags, self._monkeypatch = folder / "dags", monkeypatch
        self.dags.mkdir()
        monkeypatch.setattr("airflow.configuration.AIRFLOW_HOME", str(folder / "home"))

    def write(
        self, file: str, *, name: str = "shop", topic: str = "clicks", factory: str = "stream_dags", options: str = ""
    ) -> None:
        (self.dags / file).write_text(FILE.format(name=name, topic=topic, factory=factory, options=options))

    def parse(self, file: str, by: str = "processor") -> str:
        """The file's import errors."""
        with self._monkeypatch.context() as context:
            context.setattr(task_runner, "SUPERVISOR_COMMS", None if by == "command" else object(), raising=False)
            context.setattr(sys, "path", [*sys.path])
            if by == "task":
                context.setenv(_AIRFLOW_PARSING_CONTEXT_DAG_ID, "any")
            path = str(self.dags / file)
            bag = BundleDagBag(path, bundle_path=self.dags, bundle_name="dags", load_op_links=False)
        self.dag_ids = sorted(bag.dags)
        self.queues = {task.queue for dag in bag.dags.values() for task in dag.tasks}
        return "\n".join(bag.import_errors.values())


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Files:
    return Files(tmp_path, monkeypatch)


def test_a_file_with_the_documented_line_has_three_dags(files: Files) -> None:
    files.write("shop.py")
    assert files.parse("shop.py") == ""
    assert files.dag_ids == ["shop_batches", "shop_receiver", "shop_repair"]


def test_a_queue_is_that_of_the_tasks_of_all_three_dags(files: Files) -> None:
    """On another worker the repair would not find the log."""
    files.write("shop.py", options=", default_args={'queue': 'headrace'}")
    assert files.parse("shop.py") == ""
    assert files.dag_ids == ["shop_batches", "shop_receiver", "shop_repair"]
    assert files.queues == {"headrace"}


def test_a_batch_dag_brings_its_repair_unless_asked_not_to(files: Files) -> None:
    files.write("shop.py", factory="batch_dag", options=", dag_id='mine'")
    assert files.parse("shop.py") == ""
    assert files.dag_ids == ["mine", "shop_repair"]
    files.write("shop.py", factory="batch_dag", options=", repair=False")
    assert files.parse("shop.py") == ""
    assert files.dag_ids == ["shop_batches"]


def test_the_second_file_with_a_streams_name_has_an_import_error(files: Files) -> None:
    """The error lasts until the first file is gone."""
    files.write("a.py")
    files.write("b.py", topic="taps", factory="batch_dag", options=', dag_id="other"')
    assert files.parse("a.py") == ""
    reported = files.parse("b.py")
    assert f"Stream 'shop' is declared by another DAG file, {files.dags / 'a.py'}" in reported
    assert "Give this stream another name" in reported
    assert files.parse("a.py") == ""
    # A run of the first file's DAG, or a command, is refused by nobody.
    assert files.parse("b.py", "task") == files.parse("b.py", "command") == ""
    (files.dags / "a.py").unlink()
    assert files.parse("b.py") == ""


def test_the_first_file_keeps_the_name_when_it_is_changed(files: Files) -> None:
    files.write("a.py")
    files.write("b.py")
    assert files.parse("a.py") == ""
    files.write("a.py", topic="clicks-of-today")
    assert "declared by another DAG file" in files.parse("b.py")
    assert files.parse("a.py") == ""


def test_receiver_and_batches_of_one_stream_may_be_in_two_files(files: Files) -> None:
    files.write("a.py", factory="receiver_dag")
    files.write("b.py", factory="batch_dag")
    assert (files.parse("a.py"), files.parse("b.py"), files.parse("a.py")) == ("", "", "")
    files.write("c.py", factory="batch_dag", topic="taps")
    assert "declared by another DAG file" in files.parse("c.py")
