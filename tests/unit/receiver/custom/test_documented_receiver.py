"""The receiver that docs/receivers.md shows."""

from __future__ import annotations

import re
import sqlite3
import sys
from pathlib import Path
from types import ModuleType

import pytest
from tests.unit.receiver.custom.conftest import MakeCustom
from tests.unit.receiver.waiting import eventually

PAGE = Path(__file__).resolve().parents[4] / "docs" / "receivers.md"


def test_the_documented_receiver_stores_each_row_once_over_a_restart(
    make_custom: MakeCustom, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)[0]
    module = ModuleType("orders_receiver")
    exec(compile(code, str(PAGE), "exec"), module.__dict__)  # noqa: S102 - our own documentation
    monkeypatch.setitem(sys.modules, "orders_receiver", module)
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
