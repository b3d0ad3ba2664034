"""Compares what must not change with a file in ``frozen/``, and writes the file anew where that is asked for."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from pathlib import Path

import pytest

FOLDER = Path(__file__).with_name("frozen")
STORED = FOLDER / "stored"
_REWRITE = "REWRITE_PINS"
_DIFFERENCES = 80
"""Lines of a difference that are shown."""


def frozen(name: str, text: str) -> None:
    """Fail unless the file holds ``text``. With REWRITE_PINS=1 the file gets it."""
    file = FOLDER / name
    if os.environ.get(_REWRITE):
        file.write_text(text, encoding="utf-8")
    _compare(name, file.read_text(encoding="utf-8") if file.exists() else "", text)


def stored(name: str, data: bytes) -> bytes:
    """Return the frozen file of a format that headrace stores. With REWRITE_PINS=1 it gets ``data`` if it is missing.

    It is never written anew: what an earlier headrace has stored stays readable (`every_stored`).
    """
    file = STORED / name
    if os.environ.get(_REWRITE) and not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    return file.read_bytes()


def every_stored() -> list[Path]:
    """The folders of stored files: ``stored``, with those that this headrace writes, and earlier ones beside it."""
    return sorted(FOLDER.glob("stored*"))


def frozen_list(name: str, lines: Iterable[str]) -> None:
    """Fail unless the file has these lines. REWRITE_PINS=1 takes lines out of it, and adds none."""
    file, now = FOLDER / name, sorted(lines)
    if os.environ.get(_REWRITE):
        known = file.read_text(encoding="utf-8").splitlines() if file.exists() else now
        file.write_text("".join(f"{line}\n" for line in known if line in now), encoding="utf-8")
    _compare(name, file.read_text(encoding="utf-8"), "".join(f"{line}\n" for line in now))


def _compare(name: str, before: str, now: str) -> None:
    if now == before:
        return
    difference = list(difflib.unified_diff(before.splitlines(), now.splitlines(), "frozen", "now", lineterm="", n=1))
    shown = "\n".join(difference[:_DIFFERENCES])
    pytest.fail(f"{name} has changed. If that is meant, see CONTRIBUTING.md on pins.\n{shown}", pytrace=False)
