"""The pages for language models: each as Markdown beside its HTML, and ``llms.txt``, the list of them (llmstxt.org).

Pages of the reference that mkdocstrings makes of docstrings have no Markdown: the list links to their HTML.
"""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.nav import Navigation, Section
from mkdocs.structure.pages import Page

_FROM_DOCSTRINGS = "\n::: "
_markdown: dict[str, str] = {}
_sections: dict[str, list[Page]] = {}


def on_nav(nav: Navigation, *, config: MkDocsConfig, files: Files) -> Navigation:  # noqa: ARG001
    """Keep the order of the pages."""
    _sections.clear()
    for item in nav.items:
        if isinstance(item, Section):
            _sections[item.title] = [page for page in item.children if isinstance(page, Page)]
        elif isinstance(item, Page):
            _sections.setdefault("Overview", []).append(item)
    return nav


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Keep the page's Markdown, in which the links are those of the site."""
    if _FROM_DOCSTRINGS not in markdown:
        _markdown[page.file.src_uri] = markdown
    return markdown


def on_post_build(*, config: MkDocsConfig) -> None:
    """Write the files."""
    site = Path(config.site_dir)
    for name, markdown in _markdown.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(markdown, encoding="utf-8")
    lines = [f"# {config.site_name}", "", f"> {config.site_description}"]
    for title, pages in _sections.items():
        lines += ["", f"## {title}", ""]
        for page in pages:
            address = page.file.src_uri if page.file.src_uri in _markdown else page.file.dest_uri
            lines.append(f"- [{page.title}]({address})")
    (site / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
