"""What a write in Spark's workers warns of reaches whoever waits for it."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.receiver.waiting import eventually

from headrace.elasticsearch.counts import take_warnings, warnings_beside
from headrace.spark.outputs import writer
from headrace.spark.outputs.writer import report_file

WORKER = logging.getLogger("headrace.elasticsearch.retry_budget")


@pytest.fixture
def batch(tmp_path: Path) -> Any:
    reported: list[str] = []
    stream = SimpleNamespace(folder_url=str(tmp_path))
    return SimpleNamespace(
        stream=stream, target="", batch_time_ms=5, attempt=1, progress=reported.append, reported=reported
    )


def test_a_warning_is_reported_while_the_write_is_running(batch: Any, tmp_path: Path) -> None:
    with report_file(batch, "search") as uri:
        with warnings_beside(uri):
            WORKER.warning("Indexing into %r makes no progress: 429", "orders")
            WORKER.warning("the same of another request, a moment later")
        eventually(lambda: bool(batch.reported))
        assert batch.reported == ["warning: output search: Indexing into 'orders' makes no progress: 429"]
        WORKER.warning("said by nobody's write")
    assert len(batch.reported) == 1
    assert list((tmp_path / "reports").iterdir()) == []


def test_warnings_of_many_tasks_are_one_line_now_and_then(batch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "_POLL_SECONDS", 0.01)
    with report_file(batch, "search") as uri:
        for number in range(3):
            with warnings_beside(uri):
                WORKER.warning("429 of task %d", number)
            eventually(lambda: take_none_left(uri))
        assert len(batch.reported) == 1
    assert batch.reported[1:] == ["warning: output search: 429 of task 2 (and 1 more like it)"], "at the end"


def take_none_left(uri: str) -> bool:
    folder, _, name = uri.rpartition("/")
    return not [file for file in Path(folder).glob(f"{name}.warning-*")]


def test_a_place_that_cannot_be_written_fails_no_write(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with warnings_beside(f"{tmp_path}/file/report.json"):
        WORKER.warning("429")
    assert take_warnings(f"{tmp_path}/none/report.json") == []
