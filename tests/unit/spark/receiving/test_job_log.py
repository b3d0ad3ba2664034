"""The receiver job's log is bounded, while its processes go on writing into it."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.spark.receiving import job_log
from headrace.spark.receiving.job_log import LOG_VARIABLE, bounded_log, parts_of, rotate


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "receiver-1.log"


def append(log: Path, text: str) -> None:
    with log.open("a") as file:
        file.write(text)


def held(log: Path) -> list[str]:
    return [gzip.decompress(part.read_bytes()).decode() for part in parts_of(log)]


def test_a_log_below_the_limit_is_not_rotated(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append(log, "a line\n")
    monkeypatch.setattr(job_log, "MAX_BYTES", 7)
    assert not rotate(log)
    assert (log.read_text(), parts_of(log)) == ("a line\n", [])


def test_a_rotated_log_becomes_a_part_and_its_file_is_empty(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its writers continue in the empty file."""
    monkeypatch.setattr(job_log, "MAX_BYTES", 3)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    script = "import sys\nfor line in sys.stdin: print('wrote', line.strip(), flush=True)"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=descriptor, text=True, bufsize=1
    ) as child:
        assert child.stdin is not None
        for number in range(3):
            child.stdin.write(f"{number}\n")
            while not (log.exists() and log.read_text().endswith(f"wrote {number}\n")):
                pass
            assert rotate(log)
        child.stdin.write("last\n")
        child.stdin.close()
    os.close(descriptor)
    assert log.read_text() == "wrote last\n"
    assert held(log) == ["wrote 2\n", "wrote 1\n", "wrote 0\n"]


def test_only_the_newest_parts_are_kept(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_log, "MAX_BYTES", 1)
    monkeypatch.setattr(job_log, "KEPT_PARTS", 12)
    for number in range(20):
        append(log, f"{number}\n")
        rotate(log)
    assert held(log) == [f"{number}\n" for number in range(19, 7, -1)]


def test_a_log_is_emptied_even_if_no_part_can_be_written(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    append(log, "a line\n")
    monkeypatch.setattr(job_log.shutil, "copyfileobj", full)
    monkeypatch.setattr(job_log, "MAX_BYTES", 1)
    assert rotate(log)
    assert (log.read_text(), parts_of(log)) == ("", [])


def test_a_job_limits_the_log_that_the_environment_names(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_log, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(job_log, "MAX_BYTES", 3)
    monkeypatch.setenv(LOG_VARIABLE, str(log))
    append(log, "a line\n")
    with bounded_log():
        while not parts_of(log) or log.stat().st_size:
            pass
    assert held(log) == ["a line\n"]


@pytest.mark.parametrize("path", [None, "/nowhere/receiver.log"])
def test_a_job_without_a_log_in_its_environment_runs(path: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if path is None:
        monkeypatch.delenv(LOG_VARIABLE, raising=False)
    else:
        monkeypatch.setenv(LOG_VARIABLE, path)
    with bounded_log():
        pass
