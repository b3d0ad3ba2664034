"""The system's Chromium for the tests of the page; `make chromium` checks that there is one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, expect, sync_playwright

# For every assertion, and for a page that is given it: Airflow's page is megabytes of script, and the machine is busy
# with other processes.
PATIENCE_MS = 120_000


@contextmanager
def open_chromium() -> Iterator[Browser]:
    """Start a Chromium without a window. ``CHROMIUM`` names another program than the one on the PATH; with "none" the
    calling test is skipped.

    While it is open, its thread counts as one with a running event loop: keep it no longer than needed, so that tests
    that start a loop of their own can follow in the same process.

    Raises:
        FileNotFoundError: there is no Chromium.
    """
    if os.environ.get("CHROMIUM") == "none":
        pytest.skip("needs Chromium, and CHROMIUM=none")
    program = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        raise FileNotFoundError("These tests need Chromium: apt-get install chromium, or name a program in CHROMIUM.")
    arguments = ["--disable-gpu"]
    if os.geteuid() == 0:
        # Chromium refuses its own sandbox under root, as CI runs it; it loads only this machine's pages.
        arguments += ["--no-sandbox", "--disable-dev-shm-usage"]
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=arguments)
        try:
            yield browser
        finally:
            browser.close()
