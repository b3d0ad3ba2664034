"""Tests that replace an inside name of the package: they only get fewer. A parameter, a clock, a constant that is
public, or what a person would do says the same, and stays when the inside is written anew."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.unit.pins.freezing import frozen_list

TESTS = Path(__file__).parents[2]
REPLACING = ("setattr", "patch", "object", "delattr")


def private_patches(file: Path) -> Iterator[str]:
    """The names, as in ``setattr(module, "_NAME", 1)``, ``setattr("package.module._NAME", 1)`` or ``patch(…)``."""
    for node in ast.walk(ast.parse(file.read_bytes())):
        if not isinstance(node, ast.Call) or ast.unparse(node.func).rpartition(".")[2] not in REPLACING:
            continue
        replaced = node.args[:2]
        # Python's own `os._exit` is no inside name.
        texts = [each.value for each in replaced if isinstance(each, ast.Constant) and ast.unparse(replaced[0]) != "os"]
        names = [text.rpartition(".")[2] for text in texts if isinstance(text, str)]
        yield from (name for name in names if name.startswith("_") and not name.startswith("__"))


def test_private_patches() -> None:
    counts = {file: len(list(private_patches(file))) for file in sorted(TESTS.rglob("*.py"))}
    frozen_list(
        "private_patches.txt",
        (f"{file.relative_to(TESTS)} {n}" for file in counts for n in range(1, counts[file] + 1)),
    )
