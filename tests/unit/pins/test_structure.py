"""How the package is built. Import circles, names of two classes, and files that name an input, a decoder or an output
only get fewer. The size of a room changes on purpose. The circle of imports that is left is made by types: a part of a
stream is checked against its stream."""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from tests.unit.pins.freezing import frozen, frozen_list

import headrace
from headrace.stream import decoders, inputs, outputs

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
    """All statements in a node, also those in functions, and those that only a type checker reads."""
    for part in ("body", "orelse", "handlers", "finalbody", "cases"):
        for below in getattr(node, part, ()):
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


def test_files_that_name_a_kind() -> None:
    """A file that names a class of them has to be looked at for the next one too. Base classes do not count."""
    kinds = {kind.__name__ for module in (inputs, decoders, outputs) for kind in module._BUILT_IN}
    found = set()
    for name, file in MODULES.items():
        if name.startswith("headrace.stream"):
            continue
        every = ast.walk(ast.parse(file.read_bytes()))
        imported = {each.name for node in every if isinstance(node, ast.ImportFrom) for each in node.names}
        found |= {f"{kind} {name}" for kind in kinds & imported}
    frozen_list("files_that_name_a_kind.txt", found)


def test_names_of_tests_are_read_at_once() -> None:
    """In a list of failures a longer one is cut off."""
    files = PACKAGE.parents[1].glob("tests/**/*.py")
    every = ((file, node) for file in files for node in ast.walk(ast.parse(file.read_bytes())))
    tests = [(file, node.name) for file, node in every if isinstance(node, ast.FunctionDef)]
    assert len(tests) > 4_000
    assert not [f"{file.name}: {name}" for file, name in tests if name.startswith("test_") and len(name) > 60]


def code_lines(file: Path) -> int:
    """The lines of a file that hold code: no comments, no docstrings, no empty lines."""
    text = file.read_text(encoding="utf-8")
    documented = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - documented)


_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def test_size_of_rooms() -> None:
    """In full hundreds of lines, so that the size of a room does not change with every line."""
    sizes: dict[str, list[int]] = {}
    for file in MODULES.values():
        lines = code_lines(file)
        if lines:
            room = "/".join(file.relative_to(PACKAGE).parts[:-1][:2]) or "(package)"
            sizes.setdefault(room, []).append(lines)
    rows = (
        f"{room}: {len(each)} modules, up to {-(-sum(each) // 100) * 100} lines" for room, each in sorted(sizes.items())
    )
    frozen("size_of_rooms.txt", "".join(f"{row}\n" for row in rows))
