"""headrace's page inside Airflow's, as a person reaches it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from playwright.sync_api import FrameLocator, Page
from tests.support.chromium import PATIENCE_MS, open_chromium

from headrace.devstack.airflow import USER, Airflow


@contextmanager
def signed_in(airflow: Airflow, *, theme: Any = "light") -> Iterator[Page]:
    """A browser's page on Airflow's front page, signed in by its form."""
    with open_chromium() as browser:
        page = browser.new_context(color_scheme=theme, viewport={"width": 1360, "height": 850}).new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.goto(airflow.url)
        page.locator("input[name=username]").fill(USER)
        page.locator("input[name=password]").fill(airflow.password())
        page.get_by_role("button", name=re.compile("sign in", re.IGNORECASE)).click()
        page.get_by_test_id("nav-sidebar").wait_for()
        yield page


def frame(page: Page, title: str) -> FrameLocator:
    """What is in headrace's frame: "Streams" from the navigation, "Stream" on a DAG, "Batch" on a run."""
    return page.frame_locator(f"iframe[title='{title}']")
