"""Sets the package's long description, its project URLs and its authors, when hatchling builds it.

``HEADRACE_REPOSITORY`` says who releases it: ``Name <mail> (address)``, as npm writes a person, or the address alone.
This is the web address of the repository, in which ``<address>/blob/v<version>/README.md`` shows a file of a release.
With it, the description is README.md with absolute links, and the package has project URLs and an author. Without it,
the package names neither, and the relative links of README.md become text.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

VARIABLE = "HEADRACE_REPOSITORY"

_RELEASED_BY = re.compile(r"(?P<name>[^<>()]*?)\s*(?:<(?P<email>[^<>\s]+)>)?\s*\(?(?P<address>https?://[^\s()]+?)/*\)?")

# A link or an image in Markdown, without brackets in its text.
_LINK = re.compile(r"(!?)\[([^\]]+)\]\(([^)\s]+)\)")


class ReleaseMetadata(MetadataHookInterface):
    """hatchling's hook for the fields ``readme``, ``urls`` and ``authors``."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the fields. A wheel built from a source distribution keeps those of the source distribution.

        Raises ValueError if the variable has another form.
        """
        if "readme" in metadata:
            metadata.setdefault("urls", {})
            metadata.setdefault("authors", [])
            return
        author, repository = released_by(os.environ.get(VARIABLE, ""))
        release = f"v{metadata['version']}"
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": links_for_readers_elsewhere(text, f"{repository}/blob/{release}" if repository else None),
        }
        metadata["urls"] = project_urls(repository, release) if repository else {}
        metadata["authors"] = [author] if author else []


def released_by(text: str) -> tuple[dict[str, str], str]:
    """The author's ``name`` and ``email``, as far as they are given, and the address of the repository."""
    if not text:
        return {}, ""
    found = _RELEASED_BY.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{VARIABLE} is {text!r}. Its form is 'Name <mail> (https://address)', or the address alone.")
    return {field: found[field] for field in ("name", "email") if found[field]}, found["address"]


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
