"""The page in a real Chromium, with the real API over a real ledger; without Airflow."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI
from playwright.sync_api import Browser, Page
from tests.support.chromium import PATIENCE_MS, open_chromium
from tests.support.page_server import application
from tests.support.seeded_ledger import seed

from headrace.ledger import Ledger

BATCHES = 400
View = Callable[..., Page]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """The system's Chromium."""
    with open_chromium() as browser:
        yield browser


@pytest.fixture(scope="session")
def seeded(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The URL of a ledger with streams in several situations; `test_page` names those that it uses."""
    url = f"sqlite:///{tmp_path_factory.mktemp('page')}/ledger.db"
    with Ledger.open(url) as ledger:
        seed(ledger, streams=7, batches=BATCHES, ledger_url=url)
    return url


@pytest.fixture(scope="session")
def page_app(seeded: str) -> FastAPI:
    """The application that serves the page and its API."""
    return application(seeded)


@pytest.fixture(scope="session")
def address(page_app: FastAPI) -> Iterator[str]:
    """The page's address."""
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(page_app, log_level="warning", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listening.getsockname()[1]}/headrace/"
    server.should_exit = True
    thread.join(timeout=10)


@pytest.fixture
def view(chromium: Browser, address: str) -> Iterator[View]:
    """Opens the page at a view: ``view("#/streams", theme="dark", width=360, user="viewer")``. What the page writes to
    the console as an error, a violation of its Content-Security-Policy too, fails the test at its end."""
    contexts: list[Any] = []
    errors: list[str] = []

    def open_view(
        route: str, *, theme: Any = "light", width: int = 1280, user: str | None = None, zone: str = "Asia/Tokyo"
    ) -> Page:
        context = chromium.new_context(
            color_scheme=theme,
            viewport={"width": width, "height": 800},
            timezone_id=zone,
            locale="en-GB",
            extra_http_headers={"X-User": user} if user else {},
        )
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda line: errors.append(line.text) if line.type == "error" else None)
        page.goto(address + route)
        return page

    yield open_view
    for context in contexts:
        context.close()
    # A refused request is an error of the network, which some tests cause.
    assert [each for each in errors if "Failed to load resource" not in each] == []
