"""The ledgers that the API server has open: one deadline for several silent ones, and connections that change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from tests.support.page_server import NoAirflow

from headrace.connections import Connection, variable_name
from headrace.ledger import Ledger
from headrace.ledger.errors import LedgerUnavailableError
from headrace.ui.api import catalogue
from headrace.ui.api.app import render_metrics
from headrace.ui.api.catalogue import Catalogue, LedgerSilentError, OpenLedgers
from headrace.views.streams import Placed

SECONDS = 10.0
SILENT = [f"sqlite:////silent/{number}.db" for number in range(4)]


class Clock:
    """A monotonic clock that only waiting moves."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def monotonic(self) -> float:
        return self.now


class SilentLedgers(OpenLedgers):
    """Ledgers that never answer: whoever waits for one lets the clock go on."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(lambda _: None, seconds=SECONDS)
        self._clock = clock

    def submit(self, reference: str, question: Any) -> Future[Any]:
        clock = self._clock

        class Never(Future[Any]):
            def result(self, timeout: float | None = None) -> Any:
                assert timeout is not None
                clock.now += timeout
                raise TimeoutError

        return Never()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(catalogue, "time", clock)
    return clock


def test_the_list_waits_for_silent_ledgers_as_long_as_for_one(clock: Clock) -> None:
    streams, problems = Catalogue(NoAirflow(SILENT), SilentLedgers(clock)).summaries(lambda _: True)
    assert clock.now == 1_000.0 + SECONDS
    assert streams == []
    assert {problem.ledger for problem in problems} == set(SILENT)


def test_a_stream_is_sought_in_silent_ledgers_as_long_as_in_one(clock: Clock) -> None:
    with pytest.raises(LedgerSilentError):
        Catalogue(NoAirflow(SILENT), SilentLedgers(clock)).find("orders", lambda _: True)
    assert clock.now == 1_000.0 + SECONDS


def test_a_scrape_waits_for_silent_ledgers_as_long_as_for_one(clock: Clock) -> None:
    body, _ = render_metrics(NoAirflow(SILENT), SilentLedgers(clock), None, "")
    assert clock.now == 1_000.0 + SECONDS
    assert body.decode().count("headrace_ledger_up{") == len(SILENT)


def test_an_answer_that_is_there_is_given_after_the_deadline_too(tmp_path: Path) -> None:
    with Ledger.open(f"sqlite:///{tmp_path}/ledger.db") as ledger:
        url = ledger.url
    ledgers = OpenLedgers(lambda _: None)
    future = ledgers.submit(url, lambda _: "there")
    assert future.result(timeout=60) == "there"
    assert ledgers.answer(url, future, deadline=0.0) == "there"
    ledgers.close()


def test_a_stream_of_two_references_is_in_the_one_that_has_it(tmp_path: Path) -> None:
    urls = [f"sqlite:///{tmp_path}/{name}.db" for name in ("empty", "full")]
    for url in urls:
        with Ledger.open(url) as ledger:
            if "full" in url:
                ledger.streams.register("orders", '{"outputs": []}', batch_interval_ms=1_000, block_interval_ms=200)
    airflow = NoAirflow(streams=[Placed("orders", url, "b", "r") for url in urls])
    ledgers = OpenLedgers(airflow.environ, seconds=600)
    declaration = Catalogue(airflow, ledgers).find("orders", lambda _: True)
    assert declaration is not None
    assert declaration.ledger == urls[1]
    ledgers.close()


class Connections:
    """The connection "the_ledger", which leads to a file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = "one.db"
        self.looked_up = 0

    def environ(self, reference: str) -> Mapping[str, str]:
        self.looked_up += 1
        connection = Connection("the_ledger", "sqlite", host=str(self.folder / self.file))
        return {variable_name("the_ledger"): connection.to_json()}


@pytest.fixture
def connections(tmp_path: Path) -> Connections:
    for name in ("one", "two"):
        with Ledger.open(f"sqlite:///{tmp_path}/{name}.db") as ledger:
            ledger.streams.register(name, '{"outputs": []}', batch_interval_ms=1_000, block_interval_ms=200)
    return Connections(tmp_path)


@pytest.fixture
def opened(connections: Connections) -> Iterator[OpenLedgers]:
    ledgers = OpenLedgers(connections.environ, seconds=600)
    yield ledgers
    ledgers.close()


def _names(ledgers: OpenLedgers) -> list[str]:
    return ledgers.ask("connection:the_ledger", lambda ledger: [row.name for row in ledger.streams.all()])


def test_a_changed_connection_is_opened_anew_after_half_a_minute(
    opened: OpenLedgers, connections: Connections, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _names(opened) == ["one"]
    connections.file = "two.db"
    assert _names(opened) == ["one"]
    assert connections.looked_up == 1
    later = Clock()
    later.now = catalogue.time.monotonic() + 31
    monkeypatch.setattr(catalogue, "time", later)
    assert _names(opened) == ["two"]
    assert _names(opened) == ["two"]
    assert connections.looked_up == 2


def test_a_failing_ledger_of_a_changed_connection_is_reopened(opened: OpenLedgers, connections: Connections) -> None:
    """It is opened anew at the next question."""
    assert _names(opened) == ["one"]
    connections.file = "two.db"
    (connections.folder / "one.db").unlink()
    with pytest.raises(LedgerUnavailableError):
        _names(opened)
    assert _names(opened) == ["two"]
