"""The example that tails the files of a directory. tests/integration/receiver has it under a real tracker, killed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.receiver import Receiver
from headrace.testing.receivers import ReceiverTestError, run_receiver

EXAMPLES = Path(__file__).resolve().parents[4] / "examples" / "receivers"


@pytest.fixture
def lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Receiver]:
    """Makes a receiver of the lines of ``tmp_path``."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import directory_lines

    return lambda: directory_lines.DirectoryLines(str(tmp_path), look_seconds=0.01)  # type: ignore[no-any-return]


def test_a_file_that_is_moved_away_and_back_is_not_read_again(lines: Callable[[], Receiver], tmp_path: Path) -> None:
    moved = tmp_path / "away" / "a.log"
    moved.parent.mkdir()
    here = tmp_path / "a.log"
    here.write_text("one\ntwo\n")
    with run_receiver(lines) as running:
        running.wait_for(2)
        here.rename(moved)
        # It has looked without the file when it has read another one.
        (tmp_path / "b.log").write_text("three\n")
        running.wait_for(3)
        with moved.open("a") as file:
            file.write("four\n")
        moved.rename(here)
        running.wait_for(4)
    assert running.values == [b"one", b"two", b"three", b"four"]


def test_very_many_very_short_lines_are_read(lines: Callable[[], Receiver], tmp_path: Path) -> None:
    (tmp_path / "short.log").write_bytes(b"x\n" * 600_000)
    with run_receiver(lines) as running:
        running.wait_for(600_000, seconds=120)
    assert (running.errors, running.stored_position) == ([], {"short.log": 1_200_000})


def test_lines_of_any_length_keep_their_bytes(lines: Callable[[], Receiver], tmp_path: Path) -> None:
    texts = [b"", b"x" * 200_000, b"y" * 100_000, b"z" * ((1 << 20) - 1), b"\r"]
    (tmp_path / "long.log").write_bytes(b"\n".join(texts) + b"\nnot complete")
    with run_receiver(lines) as running:
        running.wait_for(5)
    assert running.values == texts
    begins = [int(record.headers[0][1] or b"") for record in running.records]
    assert begins == [sum(len(text) + 1 for text in texts[:number]) for number in range(5)]


def test_a_line_that_is_too_long_is_an_error_that_names_it(lines: Callable[[], Receiver], tmp_path: Path) -> None:
    (tmp_path / "long.log").write_bytes(b"first\n" + b"x" * (2 << 20) + b"\n")
    with run_receiver(lines) as running, pytest.raises(ReceiverTestError, match="more than 1048576 bytes at byte 6"):
        running.wait_for(2, seconds=1)
    assert running.values == [b"first"]


def test_a_full_position_forgets_the_files_that_are_gone_and_says_so(
    lines: Callable[[], Receiver], tmp_path: Path
) -> None:
    (tmp_path / "new.log").write_text("new\n")
    gone: dict[str, Any] = {f"{number:040}.log": 1 for number in range(1_250)}
    with run_receiver(lines, position=gone) as running:
        running.wait_for(1)
    left = running.stored_position
    assert len(json.dumps(left)) < 64 << 10
    assert list(left) == [*list(gone)[-(len(left) - 1) :], "new.log"]
    assert "files that are gone are forgotten" in running.errors[0]
