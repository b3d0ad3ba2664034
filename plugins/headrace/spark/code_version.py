"""Computes the version of a batch's code: a hash over the sources of the user's functions, and headrace's version.

The sources are found by following import statements, not by the modules that this process has imported. So the version
is equal on every machine, and whether one process runs all of a batch's outputs or each output has its own process.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.machinery
import importlib.util
import pkgutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import headrace
from headrace.spark.transforms import add_py_files
from headrace.stream import STATE_STEP, ForeachBatchOutput

if TYPE_CHECKING:
    from headrace.stream import Stream

_DIGITS = 8
_UNKNOWN = "unknown"


def code_version(stream: Stream, steps: Iterable[str]) -> str:
    """The version of the code of these steps (`Stream.steps`): ``flights:to_document 3f9c2a10, headrace 0.1.0``.

    A function's hash covers its module and everything that the module imports, directly or indirectly, from
    ``spark.py_files`` or from its own package; it is "unknown" if there is no source to read. Only the packages that
    contain the module are imported.
    """
    roots = add_py_files(stream)
    references = dict.fromkeys(_references(stream, steps))
    versions = [f"{reference} {_hash(reference.partition(':')[0], roots)}" for reference in references]
    return ", ".join([*versions, f"headrace {headrace.__version__}"])


def tried_with(stream: Stream, steps: Iterable[str]) -> str:
    """A hash of what an attempt at these steps depends on besides its records: the stream's definition and the code.

    Steps that the stream no longer has are ignored.
    """
    known = [step for step in steps if step in stream.steps]
    reported = f"{stream.to_json()} {code_version(stream, known)}"
    return hashlib.sha256(reported.encode()).hexdigest()[:16]


def _references(stream: Stream, steps: Iterable[str]) -> Iterator[str]:
    for step in steps:
        if step == STATE_STEP:
            if stream.state is not None:
                yield stream.state.update
                yield from [stream.state.initial] if stream.state.initial is not None else []
            continue
        output = stream.output_of_step(step)
        transform = stream.transform_of(output)
        if transform is not None:
            yield transform
        if isinstance(output, ForeachBatchOutput):
            yield output.function


def _hash(module: str, roots: Sequence[Path]) -> str:
    sources = _sources(module, roots)
    if module not in sources:
        return _UNKNOWN
    digest = hashlib.sha256()
    for name, source in sorted(sources.items()):
        digest.update(f"{name}\0{len(source)}\0".encode())
        digest.update(source)
    return digest.hexdigest()[:_DIGITS]


def _sources(module: str, roots: Sequence[Path]) -> dict[str, bytes]:
    """The source bytes of the module and of the user's modules that it imports, by module name."""
    found: dict[str, bytes] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        spec = _spec_in(roots, name)
        if spec is None and name.partition(".")[0] == module.partition(".")[0]:
            spec = _installed(name)
        source = None if spec is None else _bytes(spec)
        if spec is None or source is None:
            continue
        found[name] = source
        # A package's __init__ runs before its modules do.
        waiting += [parent for parent in [name.rpartition(".")[0]] if parent]
        waiting += _imported(source, name, is_package=spec.submodule_search_locations is not None)
    return found


def _imported(source: bytes, module: str, *, is_package: bool) -> list[str]:
    """Every name that may be an imported module, from import statements anywhere in the source."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        # Not Python source, for example an extension module: only its bytes are hashed.
        return []
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = _base(node, module, is_package=is_package)
            names += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    return names


def _base(node: ast.ImportFrom, module: str, *, is_package: bool) -> str:
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    parts = parts[: len(parts) - node.level + (1 if is_package else 0)]
    return ".".join([*parts, *([node.module] if node.module else [])])


def _spec_in(roots: Sequence[Path], name: str) -> importlib.machinery.ModuleSpec | None:
    """The module's spec in ``py_files`` (folders, files, archives); None if it is not there."""
    *parents, last = name.split(".")
    for root in roots:
        if root.suffix == ".py":
            if not parents and root.stem == last:
                return importlib.util.spec_from_file_location(name, root)
            continue
        finder: Any = pkgutil.get_importer(str(root.joinpath(*parents)))
        spec = None if finder is None else finder.find_spec(name)
        if spec is not None and spec.loader is not None:
            return spec  # type: ignore[no-any-return]
    return None


def _installed(name: str) -> importlib.machinery.ModuleSpec | None:
    module = sys.modules.get(name)
    if module is not None and getattr(module, "__spec__", None) is not None:
        return module.__spec__
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None


def _bytes(spec: importlib.machinery.ModuleSpec) -> bytes | None:
    loader: Any = spec.loader
    if spec.origin is None or not hasattr(loader, "get_data"):
        return None
    try:
        return bytes(loader.get_data(spec.origin))
    except OSError:
        return None
