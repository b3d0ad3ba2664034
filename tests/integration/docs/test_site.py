"""The documentation's site: it builds without a warning, holds every page, and needs no other host."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from playwright.sync_api import expect
from tests.support.chromium import open_chromium

from headrace.get_provider_info import get_provider_info
from headrace.stream import Stream

pytest.importorskip("mkdocs", reason="the site is built with the tools of requirements-dev.txt")

ROOT = Path(__file__).resolve().parents[3]


def build(folder: Path, site: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)],
        cwd=folder,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    built = build(ROOT, folder)
    assert built.returncode == 0, built.stderr
    return folder


def text_of(page: Path) -> str:
    return re.sub(r"<[^>]+>", "", page.read_text())


def test_every_page_of_docs_is_a_page_of_the_site(site: Path) -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        assert (site / page.relative_to(ROOT / "docs")).with_suffix(".html").is_file(), page


def test_no_page_loads_anything_from_another_host(site: Path) -> None:
    loads = re.compile(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"?((?:https?:)?//[^\s\">]+)|<link\b[^>]*>")
    for page in site.rglob("*.html"):
        for found in loads.finditer(page.read_text()):
            assert found.group(1) is None, f"{page.name} loads {found.group(1)}"
            assert not re.search(r'href="?(https?:)?//', found.group()), f"{page.name}: {found.group()}"


def test_the_search_finds_what_the_pages_say(site: Path) -> None:
    index = (site / "search" / "search_index.json").read_text()
    assert "write-ahead log" in index
    assert "reference/commands.html" in index


def test_the_search_works_in_a_page_that_is_opened_as_a_file(site: Path) -> None:
    """Without a server and without a network."""
    with open_chromium() as chromium:
        page = chromium.new_page()
        requested: list[str] = []
        page.on("request", lambda request: requested.append(request.url))
        page.goto((site / "index.html").as_uri())
        page.locator("input.md-search__input").fill("fsync")
        expect(page.locator(".md-search-result__item a[href*='.html']").first).to_be_visible()
        page.close()
    assert not [url for url in requested if not url.startswith(("file:", "about:", "data:", "blob:"))]


def test_llms_txt_lists_every_page_and_its_links_lead_to_files(site: Path) -> None:
    listed = re.findall(r"^- \[.+\]\((.+)\)$", (site / "llms.txt").read_text(), re.MULTILINE)
    assert not [name for name in listed if not (site / name).is_file()]
    assert {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")} <= set(listed)
    for name in ("index.md", "install.md"):
        targets = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", (site / name).read_text())
        assert targets
        assert not [target for target in targets if not (site / name).parent.joinpath(target).exists()]


def test_the_reference_has_every_field_command_and_option(site: Path) -> None:
    stream = text_of(site / "reference" / "stream.html")
    assert not [field for field in Stream.model_fields if field not in stream]
    configuration = text_of(site / "reference" / "configuration.html")
    assert not [name for name in get_provider_info()["config"]["headrace"]["options"] if name not in configuration]
    commands = text_of(site / "reference" / "commands.html")
    assert "headrace batches show NAME BATCH_TIME [OPTIONS]" in commands
    assert "GET /headrace/api/v1/streams/{name}/batches" in text_of(site / "reference" / "rest.html")
    assert "on_batch_completed" in text_of(site / "reference" / "listeners.html")
    assert "KafkaReceiverOperator" in text_of(site / "reference" / "operators.html")


def test_a_page_that_the_navigation_does_not_name_is_an_error(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    shutil.copytree(ROOT / "docs", copy / "docs")
    shutil.copytree(ROOT / "docsite", copy / "docsite")
    for entry in ROOT.iterdir():
        if not (copy / entry.name).exists() and entry.name != "mkdocs.yml" and not entry.name.startswith("."):
            (copy / entry.name).symlink_to(entry)
    # Without the reference: its generation takes most of the time, and is not the subject.
    configuration = (ROOT / "mkdocs.yml").read_text()
    configuration = re.sub(r"  - mkdocstrings:\n(?:    .*\n)+", "", configuration)
    configuration = configuration.replace("  - docsite/reference.py\n", "")
    configuration = re.sub(r"  - Reference:\n(?:      .*\n)+", "", configuration)
    (copy / "mkdocs.yml").write_text(configuration)
    assert build(copy, tmp_path / "site").returncode == 0
    (copy / "docs" / "forgotten.md").write_text("# Forgotten\n")
    built = build(copy, tmp_path / "site")
    assert built.returncode != 0
    assert "forgotten.md" in built.stderr
