"""What a person sees on the page, and does with keyboard and mouse."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
from playwright.sync_api import Page, expect
from tests.integration.page.conftest import BATCHES, View

TABS = ("", "batches", "receivers", "events", "gaps", "dead-letters", "log", "trace", "definition")


def _failed_batch(page: Page) -> str:
    """The time of a failed batch of orders-3, as the address has it."""
    answer: Any = page.request.get(re.sub(r"#.*", "", page.url) + "api/v1/streams/orders-3/batches?state=failed").json()
    return str(answer["batches"][0]["batch_time"])


def test_the_worst_stream_is_first_with_state_by_word_and_icon(view: View) -> None:
    page = view("#/streams")
    lines = page.locator("tbody tr")
    expect(lines).to_have_count(7)
    expect(lines.first.locator("th")).to_have_text("orders-3")
    expect(lines.first.locator(".badge")).to_have_text("failing")
    expect(lines.first.locator(".badge svg")).to_be_visible()
    expect(lines.first.locator(".why")).to_contain_text("failed to parse field [cents]")
    shapes = page.locator(".badge").evaluate_all("all => all.map(each => [each.dataset.state, each.innerHTML])")
    assert len({shape for _, shape in shapes}) == len({state for state, _ in shapes})


def test_the_filter_by_name_and_state_stays_in_the_address(view: View) -> None:
    page = view("#/streams")
    page.get_by_label("Name or reason").fill("orders-5")
    expect(page.locator("tbody tr")).to_have_count(1)
    expect(page).to_have_url(re.compile("text=orders-5"))
    page.get_by_role("button", name=re.compile("^failing")).click()
    expect(page.get_by_text("No stream matches the filter")).to_be_visible()
    page.get_by_role("button", name="Show all 7").click()
    expect(page.locator("tbody tr")).to_have_count(7)


def test_a_failed_batch_is_reached_by_keyboard_from_the_list(view: View) -> None:
    page = view("#/streams")
    expect(page.locator("tbody tr")).to_have_count(7)
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()
    page.get_by_role("link", name="orders-3").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1, name="orders-3")).to_be_visible()
    page.get_by_role("link", name="Batches", exact=True).focus()
    page.keyboard.press("Enter")
    page.get_by_role("button", name=re.compile("^failed")).press("Enter")
    first = page.locator("tbody tr").first
    expect(first.locator(".badge")).to_have_text("failed")
    first.get_by_role("link").press("Enter")
    expect(page.get_by_role("heading", level=1, name=re.compile("^Batch "))).to_be_visible()
    expect(page.locator("main")).to_contain_text("failed to parse field [cents]")
    expect(page.get_by_role("table", name="Attempts").locator("tbody tr").first).to_be_visible()


@pytest.mark.parametrize(("browser", "airflow"), [("Asia/Tokyo", None), ("America/New_York", "Asia/Tokyo")])
def test_times_are_in_airflows_chosen_zone_with_utc_in_the_title(view: View, browser: str, airflow: str | None) -> None:
    page = view("#/streams/orders-3/batches", zone=browser)
    if airflow is not None:
        page.evaluate("zone => localStorage.setItem('timezone', JSON.stringify(zone))", airflow)
        page.reload()
    expect(page.locator("main .zone")).to_have_text("Times are in Asia/Tokyo.")
    shown = page.locator("tbody tr time").first
    at = shown.get_attribute("datetime")
    assert at is not None
    hour = (int(at[11:13]) + 9) % 24
    expect(shown).to_have_text(re.compile(rf"(^|\D){hour:02}{re.escape(at[13:19])}$"))
    expect(shown).to_have_attribute("title", re.compile(rf"^{at[:10]} {at[11:19]}.* UTC$"))


def test_each_timeline_has_a_summary_a_histogram_and_a_table(view: View) -> None:
    page = view("#/streams/orders")
    for title in ("Input rate", "Scheduling delay", "Processing time", "Total delay"):
        figure = page.get_by_role("group", name=title, exact=True)
        expect(figure.locator("canvas")).to_be_visible()
        expect(figure.locator(".summary")).to_contain_text("median")
        assert figure.locator(".histogram rect").count() > 0
    figure = page.get_by_role("group", name="Processing time", exact=True)
    expect(figure.locator(".summary")).to_contain_text("above the batch interval of 10 s")
    figure.locator("summary").click()
    expect(figure.locator("tbody tr")).to_have_count(60)


def test_a_click_on_a_timeline_opens_its_batch(view: View) -> None:
    page = view("#/streams/orders")
    page.get_by_role("group", name="Total delay").locator(".u-over").click()
    expect(page.get_by_role("heading", level=1, name=re.compile("^Batch "))).to_be_visible()


def test_a_batch_that_the_server_throttled_says_so(view: View) -> None:
    page = view("#/streams/orders/batches?order=oldest")
    page.locator("tbody tr").first.get_by_role("link").first.click()
    outputs = page.get_by_role("table", name="Outputs")
    expect(outputs).to_contain_text("throttled 12 s by the server (requests with 429: 5)")
    expect(outputs).not_to_contain_text("slow")


def test_batches_are_paged_sorted_and_filtered_by_the_server(view: View) -> None:
    page = view("#/streams/orders/batches")
    lines = page.locator("tbody tr")
    expect(lines).to_have_count(50)
    newest = lines.first.locator("time").get_attribute("datetime") or ""
    page.get_by_role("link", name="Next page").click()
    expect(page.get_by_text("Page 2")).to_be_visible()
    assert (lines.first.locator("time").get_attribute("datetime") or "") < newest
    page.go_back()
    expect(page.get_by_text("Page 1")).to_be_visible()
    page.get_by_role("combobox", name="Order").select_option("oldest")
    expect(page).to_have_url(re.compile("order=oldest"))
    expect(lines.first.locator("time")).not_to_have_attribute("datetime", newest)
    expect(lines).to_have_count(50)
    assert BATCHES > 50


# The place of the selection on the screen, not scrollY: the page scrolls on by itself when an event comes above it.
WHERE_ONE_READS = (
    "[Math.round(getSelection().getRangeAt(0).getBoundingClientRect().top), String(getSelection()), "
    "document.activeElement.textContent]"
)


def test_an_update_keeps_focus_scroll_selection_and_what_is_open(view: View) -> None:
    page = view("#/streams/orders/events")
    expect(page.locator("tbody tr").nth(60)).to_be_visible()
    answers = []
    page.on("response", lambda response: answers.append(response.url) if "/events" in response.url else None)
    page.locator("tbody tr").nth(60).scroll_into_view_if_needed()
    page.evaluate("getSelection().selectAllChildren(document.querySelectorAll('tbody tr')[60].cells[1])")
    page.get_by_role("link", name="Log", exact=True).evaluate("each => each.focus({preventScroll: true})")
    assert page.evaluate("scrollY") > 0
    before = page.evaluate(WHERE_ONE_READS)
    assert before[1]
    ends = time.monotonic() + 20
    while len(answers) < 2 and time.monotonic() < ends:
        page.wait_for_timeout(200)
    assert len(answers) >= 2
    page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert page.evaluate(WHERE_ONE_READS) == before


def test_a_hidden_page_asks_for_nothing(view: View) -> None:
    page = view("#/streams")
    expect(page.locator("tbody tr")).to_have_count(7)
    page.evaluate(
        "Object.defineProperty(document, 'hidden', {configurable: true, get: () => true});"
        "document.dispatchEvent(new Event('visibilitychange'))"
    )
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    # One whole interval, in which a visible page asks.
    page.wait_for_timeout(6_000)
    assert asked == []
    with page.expect_response(re.compile("/streams$")):
        page.evaluate("delete document.hidden; document.dispatchEvent(new Event('visibilitychange'))")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_each_view_fits_a_phone(view: View, address: str, theme: str) -> None:
    page = view("#/streams", theme=theme, width=360)
    batch = _failed_batch(page)
    for route in ("#/streams", *(f"#/streams/orders-3/{tab}" for tab in TABS), f"#/streams/orders-3/batches/{batch}"):
        page.goto(address + "static/icon.svg")
        page.goto(address + route)
        page.locator("h1").wait_for()
        expect(page.locator(".message.loading")).to_have_count(0)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360, route


def test_a_text_of_the_server_is_never_markup(view: View, address: str) -> None:
    page = view("static/icon.svg")
    name = "<img src=x onerror=window.broken=1>"

    def answer(route: Any) -> None:
        body = route.fetch().json()
        body["streams"][0]["reason"] = name
        route.fulfill(json=body)

    page.route("**/api/v1/streams", answer)
    page.goto(address + "#/streams")
    expect(page.get_by_text(name)).to_be_visible()
    assert page.locator("main img").count() == 0
    assert page.evaluate("window.broken") is None


def test_a_signed_out_user_is_asked_to_sign_in(view: View) -> None:
    page = view("#/streams", user="anonymous")
    expect(page.get_by_role("alert")).to_contain_text("You are signed out")
    expect(page.get_by_role("button", name="Sign in again")).to_be_visible()


def test_an_unreadable_ledger_shows_a_remedy_and_keeps_old_data(view: View) -> None:
    page = view("#/streams/orders-3/receivers")
    expect(page.get_by_role("table", name="Receivers")).to_be_visible()
    page.route(
        "**/api/v1/**",
        lambda route: route.fulfill(status=503, json={"detail": "no connection", "remedy": "Start its database."}),
    )
    alert = page.get_by_role("alert")
    expect(alert).to_contain_text("Not available at the moment")
    expect(alert).to_contain_text("Start its database.")
    expect(page.get_by_role("table", name="Receivers")).to_be_visible()
    page.unroute("**/api/v1/**")
    page.get_by_role("button", name="Try again").click()
    expect(alert).to_have_count(0)


def test_each_kind_of_problem_has_a_heading_that_fits(view: View) -> None:
    page = view("#/streams")
    expect(page.locator("tbody tr")).to_have_count(7)
    headings = {
        "ledger_unreadable": "The streams of one ledger are not shown",
        "several_batch_dags": "Several DAGs declare the stream orders",
        "not_registered": "The stream orders has not run yet",
        "same_name": "Two ledgers have a stream orders",
    }
    problems = [
        {"kind": kind, "ledger": None, "error": f"The error of {kind}.", "remedy": "Do it.", "streams": ["orders"]}
        for kind in headings
    ]
    page.route("**/api/v1/streams", lambda route: route.fulfill(json={"streams": [], "problems": problems}))
    alerts = page.get_by_role("alert")
    expect(alerts).to_have_count(len(headings))
    for kind, heading in headings.items():
        expect(alerts.filter(has_text=f"The error of {kind}.").locator("strong")).to_have_text(heading)


def test_a_new_stream_is_a_line_and_a_broken_dag_file_an_alert(view: View) -> None:
    page = view("#/streams")
    expect(page.locator("tbody tr")).to_have_count(7)
    new = {"kind": "new", "ledger": None, "error": "Unpause its DAGs.", "remedy": None, "streams": ["orders"]}
    broken = {
        "import_error_id": 1,
        "filename": "orders.py",
        "stack_trace": "Traceback (most recent call last):\n  File\nImportError: no module named ordrs\n",
    }
    page.route("**/api/v1/streams", lambda route: route.fulfill(json={"streams": [], "problems": [new]}))
    page.route(
        "**/api/v2/importErrors*", lambda route: route.fulfill(json={"import_errors": [broken], "total_entries": 1})
    )
    page.reload()
    expect(page.get_by_role("status").filter(has_text="The stream orders is new")).to_be_visible()
    alert = page.get_by_role("alert")
    expect(alert).to_have_count(1)
    expect(alert.get_by_text("orders.py")).to_be_visible()
    expect(alert.locator("summary")).to_contain_text("ImportError: no module named ordrs")


def test_events_that_a_listener_did_not_get_are_shown(view: View) -> None:
    line = view("#/streams/orders-2/receivers").get_by_role("table", name="Listeners").locator("tbody tr")
    expect(line.locator("th")).to_have_text("webhook")
    expect(line.locator("td").first).to_have_text("12")


def test_a_receivers_executor_and_last_errors_stack_are_shown(view: View) -> None:
    table = view("#/streams/orders-3/receivers").get_by_role("table", name="Receivers")
    line = table.locator("tbody tr")
    expect(line).to_contain_text("executor 3")
    expect(line).to_contain_text("OSError: no route to host")
    stack = line.locator("details pre")
    expect(stack).not_to_be_visible()
    line.get_by_text("Stack").click()
    expect(stack).to_contain_text("line 7, in read")


def test_an_unknown_stream_and_an_unknown_view_say_so(view: View) -> None:
    page = view("#/streams/nothing")
    expect(page.get_by_role("alert")).to_contain_text("Not found")
    page = view("#/elsewhere")
    expect(page.get_by_text("There is no such view")).to_be_visible()


def test_a_change_of_state_is_announced(view: View, address: str) -> None:
    page = view("static/icon.svg")
    states = iter(["well"])

    def answer(route: Any) -> None:
        body = route.fetch().json()
        body["streams"][0]["state"] = next(states, "stalled")
        route.fulfill(json=body)

    page.route("**/api/v1/streams", answer)
    page.goto(address + "#/streams")
    expect(page.get_by_role("status").last).to_contain_text("is stalled")
