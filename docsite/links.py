"""Links of the pages that leave docs/: to a page of the site where there is one, else to the file as text.

The pages link to files of the repository (``../plugins/headrace/wal/frame.py``), which a reader of the repository can
follow. The site does not know the repository's address.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

from docsite.home import PAGES, ROOT

_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)")
_FROM_ROOT = {page: name for name, page in PAGES.items()}


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Rewrite the links of a page.

    Raises:
        PluginError: a link names a file that does not exist.
    """
    source = page.file.src_uri
    folder = "" if source in _FROM_ROOT else posixpath.join("docs", posixpath.dirname(source))

    def replace(link: re.Match[str]) -> str:
        label, target = link.groups()
        path, mark, anchor = target.partition("#")
        if "://" in target or not path or target.startswith("mailto:"):
            return link.group()
        if files.get_file_from_path(posixpath.normpath(posixpath.join(posixpath.dirname(source), path))) is not None:
            return link.group()
        named = posixpath.normpath(posixpath.join(folder, path))
        if named in PAGES:
            return f"[{label}]({posixpath.relpath(PAGES[named], posixpath.dirname(source) or '.')}{mark}{anchor})"
        if not (ROOT / named).exists():
            raise PluginError(f"{source} links to {target}, and {named} does not exist.")
        return label if label.strip("`") in (named, Path(named).name) else f"{label} (`{named}`)"

    return _LINK.sub(replace, markdown)
