"""Dead letters of a real Elasticsearch on the page: their reasons, and their replay after the index was corrected."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect
from tests.integration.dead_letter_shop import Shop
from tests.support.chromium import PATIENCE_MS
from tests.support.page_server import application


@pytest.fixture
def shop(elasticsearch: str, tmp_path: Path) -> Iterator[Shop]:
    """One document, and two records that were refused for the mapping."""
    shop = Shop(elasticsearch, tmp_path)
    shop.write(b'{"n": 1}', b'{"n": "one"}', b'{"n": "two"}')
    yield shop
    shop.close()


@pytest.fixture
def page(shop: Shop, chromium: Browser) -> Iterator[Page]:
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(application(shop.stream.ledger), log_level="warning", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    context = chromium.new_context(viewport={"width": 1280, "height": 800})
    page = context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    page.goto(f"http://127.0.0.1:{listening.getsockname()[1]}/headrace/#/streams/shop/dead-letters")
    yield page
    context.close()
    server.should_exit = True
    thread.join(timeout=10)


def test_dead_letters_show_reasons_and_replay_after_a_correction(shop: Shop, page: Page) -> None:
    lines = page.locator("tbody tr")
    expect(lines).to_have_count(2)
    expect(lines.first).to_contain_text("failed to parse field [n]")
    # Three lines of a reason are shown, and all of it after a click.
    reason = lines.first.locator("summary", has_text="failed to parse").first
    reason.click()
    expect(reason.locator("..")).to_have_attribute("open", "")
    assert Axe().run(page).response["violations"] == []

    shop.correct_mapping()
    page.get_by_role("button", name="Replay").click()
    dialog = page.get_by_role("dialog")
    expect(dialog.locator(".will")).to_contain_text("2 of 2 dead letters")
    assert Axe().run(page).response["violations"] == []
    dialog.get_by_role("button", name="Replay").click()
    expect(page.get_by_text(re.compile("2 of 2 dead letters are indexed"))).to_be_attached()
    expect(page.get_by_text("No dead letter")).to_be_visible()
    assert {document["n"] for document in shop.documents().values()} == {1, "one", "two"}
