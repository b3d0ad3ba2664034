"""The package has no import circle and no name of two classes, but for those that are listed; the lists get shorter."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from tests.unit.pins.freezing import frozen_list

import headrace

PACKAGE = Path(headrace.__file__).parent
MODULES = {
    ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): file
    for file in sorted(PACKAGE.rglob("*.py"))
}


@cache
def imports_and_classes() -> dict[str, tuple[set[str], list[str]]]:
    """Of each module the modules that it imports, anywhere in it, and the names of its classes."""
    found = {}
    for name, file in MODULES.items():
        every = list(statements(ast.parse(file.read_bytes())))
        imported = {module for node in every for module in imports(node)} - {name}
        found[name] = imported, [node.name for node in every if isinstance(node, ast.ClassDef)]
    return found


def statements(node: Any) -> Iterator[ast.stmt]:
    """All statements in a node, also those in functions, without those that only a type checker reads."""
    only_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    for part in ("body", "orelse", "handlers", "finalbody", "cases"):
        for below in () if only_types and part == "body" else getattr(node, part, ()):
            yield below
            yield from statements(below)


def imports(node: ast.stmt) -> Iterator[str]:
    """The modules of the package that a statement imports."""
    if isinstance(node, ast.Import):
        yield from (name.name for name in node.names if name.name in MODULES)
    if isinstance(node, ast.ImportFrom):
        assert not node.level, "relative imports are not followed"
        for name in node.names:
            # A module of a package, or a name in a module.
            yield from [each for each in (f"{node.module}.{name.name}", node.module) if each in MODULES][:1]


def test_import_circles() -> None:
    imported = {name: found for name, (found, _) in imports_and_classes().items()}

    def reached(name: str) -> set[str]:
        found: set[str] = set()
        ahead = [name]
        while ahead:
            new = imported[ahead.pop()] - found
            found |= new
            ahead += new
        return found

    reach = {name: reached(name) for name in imported}
    circles = (f"{name} -> {other}" for name in imported for other in imported[name] if name in reach[other])
    frozen_list("import_circles.txt", circles)


def test_class_names_given_twice() -> None:
    names = Counter(name for _, classes in imports_and_classes().values() for name in classes)
    frozen_list("class_names_given_twice.txt", (f"{name} {n}" for name in names for n in range(2, names[name] + 1)))
