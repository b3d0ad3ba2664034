"""Which listeners a stream has: those of its definition, and those of installed packages."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.listeners import StatsReport, StreamListener
from headrace.listeners.listener import check_listeners, load_listeners
from headrace.stream import ConsoleOutput, KafkaInput, Listener, Stream
from headrace.stream.model import StreamDefinitionError

MODULE = """
from headrace.listeners import StreamListener


class Mine(StreamListener):
    def __init__(self, limit=1, connection=None):
        self.limit, self.connection = int(limit), connection


mine = Mine(9)
something_else = object()
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module of listeners, ``mine``, on the path."""
    (tmp_path / "mine.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    return tmp_path


def make(*listeners: Any, **fields: Any) -> Stream:
    settings = {
        "name": "clicks",
        "inputs": KafkaInput(bootstrap_servers="localhost:9", topics="clicks"),
        "outputs": ConsoleOutput(),
        "batch_interval": "10 s",
        "storage": "/folder",
        "ledger": "sqlite:////folder/ledger.db",
    }
    return Stream(**settings, listeners=listeners, **fields)


def test_a_reference_names_a_class_or_an_instance() -> None:
    stream = make("mine:Mine", "mine:mine", "headrace.listeners:StatsReport")
    listeners, problems = load_listeners(stream)
    assert problems == {}
    assert list(listeners) == ["mine:Mine", "mine:mine", "headrace.listeners:StatsReport"]
    assert [listeners[name].limit for name in ("mine:Mine", "mine:mine")] == [1, 9]  # type: ignore[attr-defined]
    assert isinstance(listeners["headrace.listeners:StatsReport"], StatsReport)


def test_one_reference_is_enough() -> None:
    assert [listener.reference for listener in make().listeners] == []
    stream = Stream(**{**make().model_dump(), "listeners": "mine:Mine"})
    assert [listener.id for listener in stream.listeners] == ["mine:Mine"]
    assert Stream.from_json(stream.to_json()) == stream


def test_a_class_gets_its_arguments_and_the_id_of_its_connection() -> None:
    stream = make(Listener(reference="mine:Mine", arguments={"limit": 5}, connection="alerts", name="five"))
    listeners, _ = load_listeners(stream)
    five: Any = listeners["five"]
    assert (five.limit, five.connection) == (5, "alerts")
    # So the receiver job gets it.
    assert "alerts" in stream.connection_ids


@pytest.mark.parametrize(
    ("listener", "reason"),
    [
        (Listener(reference="absent_module:Mine"), "cannot be imported"),
        (Listener(reference="mine:Absent"), "has no 'Absent'"),
        (Listener(reference="mine:something_else"), "no class derived from headrace.listeners.StreamListener"),
        (Listener(reference="pathlib:Path"), "no class derived from headrace.listeners.StreamListener"),
        (Listener(reference="mine:Mine", arguments={"limit": "many"}), "ValueError"),
        (Listener(reference="mine:Mine", arguments={"unknown": 1}), "unexpected keyword argument 'unknown'"),
        (Listener(reference="mine:mine", arguments={"limit": 1}), "is an instance, so it takes no limit"),
    ],
)
def test_a_listener_that_cannot_be_made_is_left_out_with_reason(listener: Listener, reason: str) -> None:
    stream = make(listener, "mine:Mine") if listener.id != "mine:Mine" else make(listener)
    listeners, problems = load_listeners(stream)
    assert reason in problems[listener.id]
    assert listener.id not in listeners
    with pytest.raises(StreamDefinitionError, match=reason):
        check_listeners(stream)


@pytest.mark.parametrize(
    ("listeners", "problem"),
    [
        (["mine"], 'must be "module:function"'),
        (["mine:Mine", "mine:Mine"], "listeners: the id mine:Mine is used twice"),
        ([{"reference": "mine:Mine", "arguments": {"url": "https://me:secret@host"}}], "hold a login or a secret"),
        ([{"reference": "mine:Mine", "arguments": {"url": "https://host?token=a"}}], "hold a login or a secret"),
    ],
)
def test_a_definition_with_wrong_listeners_is_refused(listeners: list[Any], problem: str) -> None:
    with pytest.raises(StreamDefinitionError, match=problem) as refused:
        make(*listeners)
    assert "me:secret" not in str(refused.value)


def test_an_installed_package_offers_listeners_to_all_streams(module: Path) -> None:
    package = module / "mine-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    points = "[headrace.listeners]\nours = mine:Mine\nready = mine:mine\nbroken = mine:Absent\nreplaced = mine:Mine\n"
    (package / "entry_points.txt").write_text(points)
    named = Listener(reference="mine:Mine", arguments={"limit": 3}, name="replaced")
    listeners, problems = load_listeners(make(named))
    assert {name: each.limit for name, each in listeners.items()} == {"replaced": 3, "ours": 1, "ready": 9}  # type: ignore[attr-defined]
    assert list(problems) == ["broken"]
    assert all(isinstance(listener, StreamListener) for listener in listeners.values())


def test_a_module_that_exits_at_its_import_harms_no_listener(module: Path) -> None:
    (module / "exiting.py").write_text("import sys\n\nsys.exit(3)\n")
    listeners, problems = load_listeners(make("exiting:Mine", "mine:Mine"))
    assert list(listeners) == ["mine:Mine"]
    assert "SystemExit: 3" in problems["exiting:Mine"]
