"""What an operator does on the page, and what who may only read is shown instead."""

from __future__ import annotations

import re

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect
from tests.integration.page.conftest import View

from headrace.ledger import Ledger
from headrace.ledger.states import BatchState, DesiredState


def _failed(seeded: str) -> int:
    with Ledger.open(seeded) as ledger:
        return int(ledger.batches.page("orders-3", 1, [BatchState.FAILED])[0].batch_time_ms)


def _open_failed_batch(page: Page) -> None:
    page.get_by_role("button", name=re.compile("^failed")).click()
    expect(page.locator("tbody tr").first.locator(".badge")).to_have_text("failed")
    page.locator("tbody tr a").first.click()
    expect(page.get_by_role("heading", level=1, name=re.compile("^Batch "))).to_be_visible()


def test_a_viewer_sees_disabled_buttons_and_why(view: View) -> None:
    page = view("#/streams/orders", user="viewer")
    stop = page.get_by_role("button", name="Stop")
    expect(stop).to_have_attribute("aria-disabled", "true")
    expect(stop).to_have_accessible_description(re.compile("needs the right to edit"))
    stop.click(force=True)
    expect(page.get_by_role("dialog")).to_have_count(0)


def test_a_stream_is_stopped_only_if_confirmed_and_started_again(view: View, seeded: str) -> None:
    page = view("#/streams/orders")
    stop = page.get_by_role("button", name="Stop")
    stop.click()
    dialog = page.get_by_role("dialog", name="Stop orders")
    expect(dialog.locator(".will")).not_to_contain_text("Asking")
    # The dialog keeps the focus; Escape closes it, nothing has happened, and the button has the focus again.
    for _ in range(8):
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement === document.body || !!document.activeElement.closest('dialog')")
    page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)
    expect(stop).to_be_focused()
    with Ledger.open(seeded) as ledger:
        assert ledger.streams.get("orders").desired_state is DesiredState.RUNNING
        stop.click()
        dialog.get_by_label("Reason").fill("maintenance")
        dialog.get_by_role("button", name="Stop").click()
        expect(page.get_by_role("status").last).not_to_be_empty()
        expect(page.get_by_role("button", name="Start")).to_be_visible()
        assert ledger.streams.get("orders").desired_state is DesiredState.STOPPED
        page.get_by_role("button", name="Start").click()
        page.get_by_role("dialog").get_by_role("button", name="Start").click()
        expect(page.get_by_role("button", name="Stop")).to_be_visible()
        assert ledger.streams.get("orders").desired_state is DesiredState.RUNNING


def test_a_batch_is_abandoned_only_with_a_reason(view: View, seeded: str) -> None:
    batch_time_ms = _failed(seeded)
    page = view("#/streams/orders-3/batches")
    _open_failed_batch(page)
    page.get_by_role("button", name="Abandon").click()
    dialog = page.get_by_role("dialog")
    confirm = dialog.get_by_role("button", name="Abandon")
    expect(dialog.locator(".will")).not_to_contain_text("Asking")
    expect(confirm).to_be_disabled()
    dialog.get_by_label("Reason").fill("the records are test data")
    confirm.click()
    expect(page.locator(".headline .badge")).to_have_text("abandoned")
    with Ledger.open(seeded) as ledger:
        found = ledger.batches.get("orders-3", batch_time_ms)
        assert found is not None
        assert found.state is BatchState.ABANDONED
    page.goto(re.sub(r"#.*", "#/streams/orders-3/gaps", page.url))
    expect(page.locator("tbody tr").first).to_contain_text("the records are test data")
    assert Axe().run(page).response["violations"] == []
