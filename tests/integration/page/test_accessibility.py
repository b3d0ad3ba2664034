"""axe-core finds nothing on any view, in both themes; with or without a dialog."""

from __future__ import annotations

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect
from tests.integration.page.conftest import View

TABS = ("", "batches", "receivers", "events", "gaps", "log", "trace", "definition")
ROUTES = ("#/streams", *(f"#/streams/orders-3/{tab}" for tab in TABS))


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_on_any_view(view: View, address: str, theme: str) -> None:
    page = view("#/streams", theme=theme)
    batches = page.request.get(address + "api/v1/streams/orders-3/batches?state=failed").json()["batches"]
    failed = batches[0]["batch_time"]
    found = {}
    for route in (*ROUTES, f"#/streams/orders-3/batches/{failed}", "#/streams/nothing"):
        page.goto(address + route)
        page.reload()
        page.locator("h1, .message.problem").first.wait_for()
        expect(page.locator(".message.loading")).to_have_count(0)
        violations = Axe().run(page).response["violations"]
        if violations:
            found[route] = [(each["id"], each["impact"], each["nodes"][0]["html"][:300]) for each in violations]
    assert found == {}
