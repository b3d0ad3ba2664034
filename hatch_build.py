"""Sets the package's long description and its project URLs, when hatchling builds it.

``HEADRACE_REPOSITORY`` is the web address of the repository, in which ``<address>/blob/v<version>/README.md`` shows a
file of a release. With it, the description is README.md with absolute links, and the package has project URLs. Without
it, the package names no address: the relative links of README.md become text.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

VARIABLE = "HEADRACE_REPOSITORY"

# A link or an image in Markdown, without brackets in its text.
_LINK = re.compile(r"(!?)\[([^\]]+)\]\(([^)\s]+)\)")


class ReadmeAndUrls(MetadataHookInterface):
    """hatchling's hook for the fields ``readme`` and ``urls``."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set both fields. A wheel built from a source distribution keeps those of the source distribution."""
        if "readme" in metadata:
            metadata.setdefault("urls", {})
            return
        repository = os.environ.get(VARIABLE, "").rstrip("/")
        release = f"v{metadata['version']}"
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": links_for_readers_elsewhere(text, f"{repository}/blob/{release}" if repository else None),
        }
        metadata["urls"] = project_urls(repository, release) if repository else {}


def project_urls(repository: str, release: str) -> dict[str, str]:
    """The addresses of a release, by the labels that package indexes know."""
    return {
        "Homepage": repository,
        "Source": f"{repository}/tree/{release}",
        "Documentation": f"{repository}/tree/{release}/docs",
        "Changelog": f"{repository}/blob/{release}/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }


def links_for_readers_elsewhere(text: str, files: str | None) -> str:
    """The Markdown ``text`` with its relative links and images below the address ``files``.

    If there is no address, links become text, and images are left out.
    """

    def replace(link: re.Match[str]) -> str:
        image, label, target = link.groups()
        if "://" in target or target.startswith(("#", "mailto:")):
            return link.group()
        if files is not None:
            return f"![{label}]({files}/{target}?raw=true)" if image else f"[{label}]({files}/{target})"
        if image:
            return ""
        path = target.partition("#")[0]
        return label if label == path else f"{label} ({path})"

    return _LINK.sub(replace, text)
