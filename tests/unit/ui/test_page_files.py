"""The page's files: what index.html names exists, and every module is loaded ahead."""

from __future__ import annotations

import re

import pytest
from fastapi.testclient import TestClient
from tests.support.page_server import NoAirflow

from headrace.ui.api.app import PAGE, create_app

INDEX = (PAGE / "index.html").read_text()
# uPlot is a classic script, and main.js starts the others.
MODULES = {
    file.relative_to(PAGE).as_posix()
    for file in (PAGE / "static").rglob("*.js")
    if file.name not in ("uPlot.iife.min.js", "main.js")
}


@pytest.fixture
def page_policy() -> dict[str, str]:
    """The directives of the Content-Security-Policy with which the page is served."""
    app = create_app(NoAirflow())
    header = TestClient(app).get("/").headers["content-security-policy"]
    app.state.ledgers.close()
    return {name: value for name, _, value in (each.strip().partition(" ") for each in header.split(";"))}


def test_every_module_is_preloaded_so_that_the_page_needs_one_round_of_requests() -> None:
    assert set(re.findall(r'rel="modulepreload" href="([^"]+)"', INDEX)) == MODULES


def test_each_file_that_the_page_names_exists_and_is_its_own() -> None:
    named = re.findall(r'(?:href|src)="([^"]+)"', INDEX)
    assert [each for each in named if not (PAGE / each).is_file()] == []


def test_each_import_of_a_module_is_a_file_of_the_page() -> None:
    missing = []
    for module in sorted(MODULES | {"static/main.js"}):
        file = PAGE / module
        for name in re.findall(r'"(\.{1,2}/[^"]+\.js)"', file.read_text()):
            if not (file.parent / name).resolve().is_file():
                missing.append((module, name))
    assert missing == []


def test_the_pages_policy_refuses_scripts_and_styles_that_are_written_into_html(page_policy: dict[str, str]) -> None:
    assert page_policy["default-src"] == "'self'"
    assert page_policy["style-src"] == "'self'"
    assert "script-src" not in page_policy
    # So the page has none.
    assert re.findall(r"<style|\sstyle=|<script>|\son[a-z]+=", INDEX) == []


def test_each_library_has_its_licence() -> None:
    vendor = PAGE / "static" / "vendor"
    folders = [each for each in vendor.iterdir() if each.is_dir()]
    assert len(folders) == 3
    assert [each.name for each in folders if not (each / "LICENSE").is_file()] == []
