"""Names in texts, which no linter reads: of programs that tests run in their own process, of the docs' examples, and of
what tests replace."""

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


def replaced(file: Path) -> Iterator[tuple[str, str]]:
    """The names that a test file replaces, as (module or class, name): ``setattr(module, "name", …)``,
    ``patch("module.name")``, and rows of tables such as ``(module, "name", value)``."""
    tree = ast.parse(file.read_bytes())
    known = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "headrace"
        for alias in node.names
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in REPLACING:
            parts = node.args
        elif isinstance(node, ast.Tuple) and len(node.elts) == 3:
            parts = node.elts
        else:
            continue
        values = [part.value if isinstance(part, ast.Constant) else getattr(part, "id", None) for part in parts[:2]]
        if values and isinstance(parts[0], ast.Constant) and str(values[0]).startswith("headrace."):
            yield tuple(str(values[0]).rsplit(".", 1))  # type: ignore[misc]
        elif len(values) == 2 and values[0] in known and isinstance(parts[1], ast.Constant) and is_name(values[1]):
            yield known[values[0]], str(values[1])


def is_name(value: object) -> bool:
    return isinstance(value, str) and value.isidentifier()


REPLACING = ("setattr", "patch")


def found(dotted: str) -> object | None:
    """The module, or what a module has by the rest of the name."""
    module, _, rest = dotted.rpartition(".")
    try:
        return importlib.import_module(dotted)
    except ImportError:
        return getattr(found(module), rest, None) if module else None


def test_replaced_names_exist() -> None:
    asked = {key: file for file in ROOT.glob("tests/**/*.py") for key in replaced(file)}
    assert len(asked) > 100
    missing = [f"{file.relative_to(ROOT)}: {key}" for key, file in asked.items() if not hasattr(found(key[0]), key[1])]
    assert not missing
