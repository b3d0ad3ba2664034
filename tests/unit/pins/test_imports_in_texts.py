"""Programs in texts, which no linter reads: those that tests run in their own process, and the examples of the docs."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[3]
EXAMPLE = re.compile(r"```python\n(.*?)```", re.DOTALL)
# Also in a text whose other parts are filled in later.
IMPORT = re.compile(r"from (headrace(?:\.\w+)*) import (\w+(?: as \w+)?(?:, \w+(?: as \w+)?)*|\([\w\s,]+\))")


def texts(file: Path) -> Iterator[str]:
    if file.suffix == ".md":
        yield from EXAMPLE.findall(file.read_text(encoding="utf-8"))
    else:
        every = ast.walk(ast.parse(file.read_bytes()))
        yield from (each.value for each in every if isinstance(each, ast.Constant) and isinstance(each.value, str))


def names(imported: str) -> Iterator[str]:
    for each in imported.strip("()").split(","):
        if each.strip():
            yield each.split()[0]


def exists(module: str, name: str) -> bool:
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError:
        return False
    return hasattr(found, name) or find_spec(f"{module}.{name}") is not None


def test_imports_in_texts_find_their_names() -> None:
    files = [*ROOT.glob("tests/**/*.py"), *ROOT.glob("benchmarks/**/*.py"), *ROOT.glob("docs/**/*.md")]
    asked = {
        (module, name): file
        for file in files
        for text in texts(file)
        for module, imported in IMPORT.findall(text)
        for name in names(imported)
    }
    assert len(asked) > 50
    missing = [f"{file.relative_to(ROOT)}: {key}" for key, file in asked.items() if not exists(*key)]
    assert not missing
