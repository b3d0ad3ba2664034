"""The receiver that docs/receivers.md shows."""

from __future__ import annotations

import re
import sqlite3
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.unit.receiver.custom.conftest import MakeCustom
from tests.unit.receiver.waiting import eventually

from headrace.receiver import Receiver
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


def test_the_documented_receiver_stores_each_row_once_over_a_restart(
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
    (code,) = [each for each in documented() if "run_receiver" in each]
    namespace = {"orders_receiver": orders_receiver}
    exec(compile(code, str(PAGE), "exec"), namespace)  # noqa: S102 - our own documentation
    test: Any = namespace["test_a_restart_goes_on_after_the_last_stored_row"]
    test(str(tmp_path / "shop.db"))


def test_the_documented_stream_is_a_dag_file(tmp_path: Path) -> None:
    pytest.importorskip("airflow")
    (code,) = [each for each in documented() if "stream_dags" in each]
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
