from __future__ import annotations

import importlib
import sys
import uuid
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace import __version__
from headrace.spark.transforms import code_version
from headrace.stream import ConsoleOutput, ForeachBatchOutput, KafkaInput, SparkSettings, State, Stream

Make = Callable[..., Stream]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the modules ``flights``, which imports ``airlines`` in a function, and ``unrelated``."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    code = tmp_path / "code"
    (code / "shared").mkdir(parents=True)
    (code / "flights.py").write_text("def to_document(df):\n    from shared import airlines\n    return df\n")
    (code / "shared" / "__init__.py").write_text("")
    (code / "shared" / "airlines.py").write_text("from . import names\n")
    (code / "shared" / "names.py").write_text("NAMES = {}\n")
    (code / "unrelated.py").write_text("x = 1\n")
    return code


def stream(folder: Path, py_files: tuple[str, ...] | None = None, **fields: Any) -> Stream:
    return Stream(
        **{
            "name": "flights",
            "inputs": KafkaInput(bootstrap_servers="localhost:9092", topics="flights"),
            "outputs": (ConsoleOutput(),),
            "batch_interval": "10 s",
            "storage": str(folder),
            "ledger": f"sqlite:///{folder}/ledger.db",
            "spark": SparkSettings(py_files=(str(folder),) if py_files is None else py_files),
            "transform": "flights:to_document",
            **fields,
        }
    )


def version(folder: Path, *steps: str, **fields: Any) -> str:
    return code_version(stream(folder, **fields), steps or ("console",))


def test_the_code_version_names_the_function_its_hash_and_headraces_version(folder: Path) -> None:
    name, digest, package, number = version(folder).split()
    assert (name, package, number) == ("flights:to_document", "headrace", __version__)
    assert len(digest.strip(",")) == 8


@pytest.mark.parametrize("changed", ["flights.py", "shared/__init__.py", "shared/airlines.py", "shared/names.py"])
def test_the_code_version_changes_with_every_module_that_the_function_imports(folder: Path, changed: str) -> None:
    before = version(folder)
    with (folder / changed).open("a") as file:
        file.write("# changed\n")
    assert version(folder) != before


def test_the_code_version_does_not_depend_on_other_imported_modules(folder: Path) -> None:
    before = version(folder)
    (folder / "unrelated.py").write_text("x = 2\n")
    name = f"other_{uuid.uuid4().hex}"
    (folder / f"{name}.py").write_text("")
    importlib.import_module(name)
    assert version(folder) == before


def test_the_code_version_is_equal_from_an_archive_and_on_another_machine(folder: Path, tmp_path: Path) -> None:
    archive = tmp_path / "elsewhere" / "code.zip"
    archive.parent.mkdir()
    with zipfile.ZipFile(archive, "w") as zipped:
        for path in folder.rglob("*.py"):
            zipped.write(path, path.relative_to(folder))
    assert version(folder, py_files=(str(archive),)) == version(folder)


def test_a_single_file_counts_alone(folder: Path) -> None:
    before = version(folder, py_files=(str(folder / "flights.py"),))
    (folder / "shared" / "names.py").write_text("NAMES = {1: 2}\n")
    assert version(folder, py_files=(str(folder / "flights.py"),)) == before


def test_each_output_has_its_own_functions(folder: Path) -> None:
    outputs = (
        ConsoleOutput(),
        ConsoleOutput(id="other", transform="unrelated:x"),
        ForeachBatchOutput(function="shared.names:write", transform="flights:to_document"),
    )
    state = State(update="shared.airlines:update", fields="word STRING, n INT", keys="word")
    more: dict[str, Any] = {"outputs": outputs, "state": state}
    assert version(folder, "console", **more) == version(folder)
    assert version(folder, "other", **more).startswith("unrelated:x ")
    assert [part.split()[0] for part in version(folder, "state", "foreach_batch", "console", **more).split(", ")] == [
        "shared.airlines:update",
        "flights:to_document",
        "shared.names:write",
        "headrace",
    ]


def test_the_code_version_without_functions_is_headraces_version(folder: Path) -> None:
    assert version(folder, transform=None) == f"headrace {__version__}"


def test_a_module_without_a_source_is_unknown(folder: Path) -> None:
    assert version(folder, transform="nowhere_at_all:f") == f"nowhere_at_all:f unknown, headrace {__version__}"
