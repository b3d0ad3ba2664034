"""The receiver that docs/receivers.md shows, and `TextFiles`."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.unit.receiver.custom.conftest import MakeCustom
from tests.unit.receiver.waiting import eventually

from headrace.receiver import Receiver, TextFiles
from headrace.receiver.followed_files import Listing
from headrace.testing.receivers import ReceiverTestError, run_receiver

PAGE = Path(__file__).resolve().parents[4] / "docs" / "receivers.md"


def documented() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)


@pytest.fixture
def orders_receiver(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of the page's first code."""
    module = ModuleType("orders_receiver")
    exec(compile(documented()[0], str(PAGE), "exec"), module.__dict__)  # noqa: S102 - our own documentation
    monkeypatch.setitem(sys.modules, "orders_receiver", module)
    return module


def test_the_documented_receiver_stores_rows_once_over_a_restart(
    make_custom: MakeCustom, tmp_path: Path, orders_receiver: ModuleType
) -> None:
    assert orders_receiver.Orders
    shop = sqlite3.connect(tmp_path / "shop.db")
    shop.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, customer TEXT, text TEXT)")

    def order(*texts: str) -> None:
        shop.executemany("INSERT INTO orders (customer, text) VALUES ('ann', ?)", [(text,) for text in texts])
        shop.commit()

    order("tea", "milk")
    arguments = {"database": str(tmp_path / "shop.db"), "look_seconds": 0.01}
    setting = make_custom("orders_receiver:Orders", arguments=arguments)
    running = setting.start()
    eventually(lambda: setting.values() == [b"tea", b"milk"])
    running.end()
    order("sugar")
    running = setting.start()
    eventually(lambda: setting.values() == [b"tea", b"milk", b"sugar"])
    running.end()
    assert setting.position() == "3"
    shop.close()


def test_the_documented_test_of_the_receiver_holds(tmp_path: Path, orders_receiver: ModuleType) -> None:
    with sqlite3.connect(tmp_path / "shop.db") as shop:
        shop.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, customer TEXT, text TEXT)")
        shop.executemany("INSERT INTO orders (customer, text) VALUES ('ann', ?)", [("tea",), ("milk",)])
    (code,) = [code for code in documented() if "run_receiver" in code]
    namespace = {"orders_receiver": orders_receiver}
    exec(compile(code, str(PAGE), "exec"), namespace)  # noqa: S102 - our own documentation
    test: Any = namespace["test_a_restart_goes_on_after_the_last_stored_row"]
    test(str(tmp_path / "shop.db"))


def test_the_documented_stream_is_a_dag_file(tmp_path: Path) -> None:
    pytest.importorskip("airflow")
    (code,) = [code for code in documented() if "stream_dags" in code]
    namespace = {"__file__": str(tmp_path / "dags" / "shop.py"), "__name__": "shop"}
    exec(compile(code, str(PAGE), "exec"), namespace)  # noqa: S102 - our own documentation
    assert [namespace[name].dag_id for name in ("receiver", "batches")] == ["shop_receiver", "shop_batches"]  # type: ignore[attr-defined]


class Failing(Receiver):
    def on_start(self) -> None:
        self.start_thread(self.fail)

    def fail(self) -> None:
        raise OSError("no route to host")


def test_a_test_that_waits_in_vain_names_the_receivers_errors() -> None:
    with run_receiver(Failing) as running, pytest.raises(ReceiverTestError, match=r"0 of 1 records.*no route to host"):
        running.wait_for(1, seconds=2)


@pytest.fixture
def lines(tmp_path: Path) -> Callable[[], Receiver]:
    """Makes a receiver of the lines of ``tmp_path``."""
    return lambda: TextFiles(str(tmp_path), look_seconds=0.01)


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


def test_a_file_that_became_shorter_is_an_error(lines: Callable[[], Receiver], tmp_path: Path) -> None:
    """Other files are read nevertheless."""
    cut = tmp_path / "cut.log"
    cut.write_text("one\ntwo\n")
    with run_receiver(lines) as running:
        running.wait_for(2)
        cut.write_text("new\n")
        eventually(lambda: running.errors != [])
        # Longer than before: it would be read from the middle of a line on.
        cut.write_text("another\nand another\n")
        (tmp_path / "other.log").write_text("three\n")
        running.wait_for(3)
    assert running.values == [b"one", b"two", b"three"]
    (error,) = running.errors
    assert "cut.log has 4 bytes, and is not what it was when 8 were read" in error
    with run_receiver(lines, position=running.stored_position) as again:
        (tmp_path / "last.log").write_text("four\n")
        again.wait_for(1)
    assert again.values == [b"four"]
    assert all("cut.log has 20 bytes, and is not what it was before" in error for error in again.errors)


def test_a_file_replaced_by_a_longer_one_is_an_error(lines: Callable[[], Receiver], tmp_path: Path) -> None:
    """It is replaced between two looks."""
    replaced = tmp_path / "app.log"
    replaced.write_text("one\ntwo\n")
    with run_receiver(lines) as running:
        running.wait_for(2)
    replaced.write_text("another line\nand another\n")
    with run_receiver(lines, position=running.stored_position) as again:
        eventually(lambda: again.errors != [])
    assert again.values == []
    assert "app.log has 25 bytes, and is not what it was when 8 were read" in again.errors[0]


def test_a_file_moved_away_during_the_reading_is_no_error(
    lines: Callable[[], Receiver], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory is being read when the file is moved."""
    (tmp_path / "here.log").write_text("here\n")
    listed = TextFiles._own_files

    def with_another(receiver: TextFiles, listing: Listing) -> list[tuple[str, os.stat_result]]:
        return [("gone.log", tmp_path.stat()), *listed(receiver, listing)]

    monkeypatch.setattr(TextFiles, "_own_files", with_another)
    with run_receiver(lines) as running:
        running.wait_for(1)
    assert (running.values, running.errors) == ([b"here"], [])


def test_a_file_whose_name_is_no_utf_8_is_read(lines: Callable[[], Receiver], tmp_path: Path) -> None:
    name = b"caf\xe9.log"
    (tmp_path / os.fsdecode(name)).write_text("one\n")
    with run_receiver(lines) as running:
        running.wait_for(1)
    with run_receiver(lines, position=running.stored_position) as again:
        (tmp_path / "other.log").write_text("two\n")
        again.wait_for(1)
    assert ([record.key for record in running.records], running.errors) == ([name], [])
    assert (again.values, again.errors) == ([b"two"], [])


def test_a_wildcard_reads_files_in_folders_also_of_one_name(tmp_path: Path) -> None:
    """Spark's "file input stream - wildcard", and its "Modified files are correctly detected."."""
    (tmp_path / "above.log").write_text("not in a folder\n")
    for folder, text in (("one", "1\n"), ("two", "2\n")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.log").write_text(text)
    outside = tmp_path.with_name(f"{tmp_path.name}-generated")
    outside.mkdir()
    (outside / "a.log").write_text("existing\n")
    os.utime(outside / "a.log", (10_000, 10_000))
    with run_receiver(lambda: TextFiles(str(tmp_path), pattern="*/*", look_seconds=0.01)) as running:
        running.wait_for(2)
        with (tmp_path / "one" / "a.log").open("a") as file:
            file.write("3\n")
        running.wait_for(3)
        outside.rename(tmp_path / "three")
        running.wait_for(4)
    assert [(record.key, record.value) for record in running.records] == [
        (b"one/a.log", b"1"),
        (b"two/a.log", b"2"),
        (b"one/a.log", b"3"),
        (b"three/a.log", b"existing"),
    ]
    read = {name: stored[0] for name, stored in running.stored_position.items()}
    assert read == {"one/a.log": 4, "two/a.log": 2, "three/a.log": 9}


def test_very_many_very_short_lines_are_read(lines: Callable[[], Receiver], tmp_path: Path) -> None:
    (tmp_path / "short.log").write_bytes(b"x\n" * 600_000)
    with run_receiver(lines) as running:
        running.wait_for(600_000, seconds=120)
    assert (running.errors, running.stored_position["short.log"][0]) == ([], 1_200_000)


def test_lines_of_any_length_keep_their_bytes(lines: Callable[[], Receiver], tmp_path: Path) -> None:
    texts = [b"", b"x" * 200_000, b"y" * 100_000, b"z" * ((1 << 20) - 1), b"\r\r"]
    (tmp_path / "long.log").write_bytes(b"\n".join(texts) + b"\nnot complete")
    with run_receiver(lines) as running:
        running.wait_for(5)
    # A carriage return before the line feed belongs to the line's end.
    assert running.values == [*texts[:-1], b"\r"]
    begins = [int(record.headers[0][1] or b"") for record in running.records]
    assert begins == [sum(len(text) + 1 for text in texts[:number]) for number in range(5)]


def test_a_line_that_is_too_long_is_an_error_that_names_it(lines: Callable[[], Receiver], tmp_path: Path) -> None:
    (tmp_path / "long.log").write_bytes(b"first\n" + b"x" * (2 << 20) + b"\n")
    with run_receiver(lines) as running:
        eventually(lambda: any("more than 1048576 bytes at byte 6" in error for error in running.errors))
    assert running.values == [b"first"]


def test_a_full_position_forgets_deleted_files_and_says_so(lines: Callable[[], Receiver], tmp_path: Path) -> None:
    (tmp_path / "new.log").write_text("new\n")
    gone: dict[str, Any] = {f"{number:040}.log": 1 for number in range(1_300)}
    with run_receiver(lines, position=gone) as running:
        running.wait_for(1)
    left = running.stored_position
    assert len(json.dumps(left)) < 64 << 10
    assert list(left) == [*list(gone)[-(len(left) - 1) :], "new.log"]
    assert "drops deleted files" in running.errors[0]
