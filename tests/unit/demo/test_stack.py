"""The demo's stack, before anything is started."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from examples.demo.errors import DemoError
from examples.demo.run import DemoOptions, run_demo
from examples.demo.stack import DemoStack, dags_folder, jars_are_there
from examples.demo.view import make_view
from rich.console import Console


def test_the_examples_dag_files_are_found() -> None:
    names = {file.name for file in dags_folder().iterdir()}
    assert {"flights.py", "word_count.py", "word_count_transform.py", "deployment.py", ".airflowignore"} <= names


def test_whether_jars_have_to_be_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    assert not jars_are_there()
    for bundle in ("kafka-0123", "elasticsearch-4567", "postgres-linux-amd64-89ab"):
        assert not jars_are_there()
        (tmp_path / "jars" / bundle).mkdir(parents=True)
    assert jars_are_there()


def test_a_stack_that_was_never_started(tmp_path: Path) -> None:
    stack = DemoStack(tmp_path / "demo", tmp_path, keep=False)
    with pytest.raises(DemoError, match="no stack in"):
        _ = stack.state
    stack.clear()
    assert not (tmp_path / "demo").exists()


def test_the_word_count_reads_the_lines_of_its_own_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str] = []

    def start(stack: DemoStack, show: object) -> None:
        host, _, port = stack._settings()["HEADRACE_LINES"].rpartition(":")
        with socket.create_connection((host, int(port)), timeout=60):
            given.append(host)
        raise DemoError("That is enough.")

    monkeypatch.setattr(DemoStack, "start", start)
    monkeypatch.setattr(DemoStack, "stop", lambda stack: None)
    with pytest.raises(DemoError, match="That is enough"):
        run_demo(DemoOptions("wordcount", tmp_path), make_view(Console(stderr=True)))
    assert given == ["127.0.0.1"]
