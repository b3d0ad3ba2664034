"""The search without a server: Chromium and others start no worker for a page that is opened as a file.

mkdocs-material's plugin `offline` writes the index as a script, and uses a replacement for workers that it would load
from another host. The site has that script itself (`extra.polyfills` in mkdocs.yml).
"""

from __future__ import annotations

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from docsite.home import ROOT


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the script."""
    script = ROOT / "docsite" / "iframe-worker.js"
    files.append(File.generated(config, "assets/iframe-worker.js", abs_src_path=str(script)))
    return files
