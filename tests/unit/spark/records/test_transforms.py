"""Loading of transforms, the Python files of streams, and the version of code."""

from __future__ import annotations

import importlib
import importlib.machinery
import shutil
import sys
import uuid
import zipfile
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from headrace import __version__
from headrace.errors import HeadraceError
from headrace.spark.records.transforms import (
    BatchContext,
    TransformError,
    apply_transform,
    arguments,
    check_transform,
    code_version,
    load_function,
    load_transform,
    takes,
    tried_with,
)
from headrace.stream import ConsoleOutput, ForeachBatchOutput, KafkaInput, SparkSettings, State, Stream

CONTEXT = BatchContext.of("clicks", 1_700_000_010_000, 10_000, 2)


def stream(tmp_path: Path, **fields: Any) -> Stream:
    return Stream(
        name="clicks",
        inputs=KafkaInput(bootstrap_servers="localhost:9092", topics="clicks"),
        outputs=ConsoleOutput(),
        batch_interval="10 s",
        storage=str(tmp_path),
        ledger=f"sqlite:///{tmp_path}/ledger.db",
        **fields,
    )


def test_a_batch_context_has_the_batchs_time_and_interval() -> None:
    assert CONTEXT.batch_time == datetime(2023, 11, 14, 22, 13, 30, tzinfo=UTC)
    assert CONTEXT.interval == timedelta(seconds=10)
    assert CONTEXT.attempt == 2


def test_a_batch_context_has_window_parameters_and_replay() -> None:
    context = BatchContext.of(
        "clicks", 1_700_000_010_000, 10_000, 2, parameters={"threshold": 3}, window_ms=30_000, target="v2"
    )
    assert context.window_start == datetime(2023, 11, 14, 22, 13, 0, tzinfo=UTC)
    assert (context.parameters, context.target) == ({"threshold": 3}, "v2")
    assert (CONTEXT.window_start, CONTEXT.parameters, CONTEXT.target) == (None, {}, "")


def test_one_input_is_passed_whatever_the_parameter_is_called() -> None:
    assert arguments(lambda df: df, {"records": 1}, CONTEXT) == ((1,), {})


def test_inputs_are_passed_by_their_ids() -> None:
    assert arguments(lambda left, right: 0, {"left": 1, "right": 2}, CONTEXT) == ((), {"left": 1, "right": 2})
    assert arguments(lambda page_views: 0, {"page-views": 1}, CONTEXT) == ((), {"page_views": 1})
    assert arguments(lambda **inputs: 0, {"left": 1, "right": 2}, CONTEXT) == ((), {"left": 1, "right": 2})


def test_the_batch_is_passed_to_a_function_that_takes_it() -> None:
    assert arguments(lambda df, batch: 0, {"records": 1}, CONTEXT) == ((1,), {"batch": CONTEXT})
    assert arguments(lambda df, *, batch=None: 0, {"records": 1}, CONTEXT) == ((1,), {"batch": CONTEXT})


def test_the_state_is_passed_to_a_function_that_takes_it() -> None:
    more = {"state": "table", "changes": "rows"}
    assert arguments(lambda df, state: 0, {"records": 1}, CONTEXT, more) == ((1,), {"state": "table"})
    assert arguments(lambda state, records: 0, {"records": 1}, CONTEXT, more) == ((), {"records": 1, "state": "table"})
    assert arguments(lambda df: 0, {"records": 1}, CONTEXT, more) == ((1,), {})
    assert arguments(lambda state: 0, {"state": 1}, CONTEXT, more) == ((), {"state": 1}), "an input comes first"
    assert takes(lambda df, state: 0, "state")
    assert not takes(lambda df, **more: 0, "state")


@pytest.mark.parametrize("transform", [lambda: 0, lambda batch: 0, lambda left, middle: 0])
def test_parameters_that_do_not_fit_are_refused(transform: Any) -> None:
    inputs = {"left": 1, "right": 2} if transform.__code__.co_argcount > 1 else {"records": 1}
    with pytest.raises(TransformError, match="like the inputs' ids"):
        arguments(transform, inputs, CONTEXT)


def test_what_is_no_dataframe_is_refused() -> None:
    with pytest.raises(TransformError, match="returned a NoneType for output 'console'"):
        apply_transform(lambda df: None, {"records": 1}, ("console",), CONTEXT)  # type: ignore[dict-item]


def test_a_mapping_has_to_name_every_output() -> None:
    with pytest.raises(TransformError, match="returned DataFrames for"):
        apply_transform(lambda df: {"other": df}, {"records": 1}, ("console",), CONTEXT)  # type: ignore[dict-item]


def test_a_mapping_may_name_unwanted_outputs_but_no_unknown_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The unwanted outputs are those not wanted now."""
    monkeypatch.setattr("headrace.spark.records.transforms._check_frame", lambda output, frame: None)
    frames: Any = apply_transform(
        lambda df: {"a": 1, "b": 2},
        {"records": 0},  # type: ignore[dict-item]
        ["a"],
        CONTEXT,
        known=("a", "b"),
    )
    assert frames == {"a": 1}
    with pytest.raises(TransformError, match="returned DataFrames for"):
        apply_transform(lambda df: {"a": 1, "z": 2}, {"records": 0}, ["a"], CONTEXT, known=("a", "b"))  # type: ignore[dict-item]


def test_without_a_transform_the_input_is_the_result() -> None:
    frames: Any = apply_transform(None, {"records": "frame"}, ("a", "b"), CONTEXT)  # type: ignore[dict-item]
    assert frames == {"a": "frame", "b": "frame"}


def test_a_transform_from_py_files_is_pickled_with_its_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is pickled by value."""
    from pyspark import cloudpickle

    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "unit_transform_module.py").write_text(
        "from unit_transform_helper import twice\ndef transform(df):\n    return twice(df)\n"
    )
    (tmp_path / "lib" / "unit_transform_helper.py").write_text("def twice(x):\n    return [x, x]\n")
    transform = load_transform(
        stream(
            tmp_path,
            transform="unit_transform_module:transform",
            spark=SparkSettings(py_files=(str(tmp_path / "lib"),)),
        )
    )
    assert transform is not None
    pickled = cloudpickle.dumps(transform)
    for name in ("unit_transform_module", "unit_transform_helper"):
        cloudpickle.unregister_pickle_by_value(sys.modules.pop(name))
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if not entry.startswith(str(tmp_path))])
    assert cloudpickle.loads(pickled)(1) == [1, 1]


def test_other_files_beside_a_py_file_replace_no_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The modules are those that are installed."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("elasticsearch.py", "unit_transform_of_a_file.py"):
        (tmp_path / name).write_text("def transform(df):\n    return df\n")
    own = SparkSettings(py_files=(str(tmp_path / "unit_transform_of_a_file.py"),))
    assert load_transform(stream(tmp_path, transform="unit_transform_of_a_file:transform", spark=own)) is not None
    spec = importlib.machinery.PathFinder.find_spec("elasticsearch")
    assert spec is not None
    assert not str(spec.origin).startswith(str(tmp_path))


def test_missing_py_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TransformError, match="does not exist"):
        load_transform(
            stream(tmp_path, transform="m:f", spark=SparkSettings(py_files=(str(tmp_path / "missing.zip"),)))
        )


def test_every_outputs_own_transform_is_checked(tmp_path: Path) -> None:
    own = ConsoleOutput(transform=f"{__name__}:misnamed")
    with pytest.raises(TransformError, match="the stream's inputs are"):
        check_transform(stream(tmp_path).model_copy(update={"outputs": (own,)}))


@pytest.mark.parametrize(("function", "reported"), [("misnamed", r"takes \(\)"), ("nowhere", "nowhere")])
def test_the_function_of_a_foreach_batch_output_is_checked(tmp_path: Path, function: str, reported: str) -> None:
    output = ForeachBatchOutput(function=f"{__name__}:{function}")
    with pytest.raises(HeadraceError, match=reported):
        check_transform(stream(tmp_path).model_copy(update={"outputs": (output,)}))
    changed = output.model_copy(update={"function": f"{__name__}:write_somewhere"})
    check_transform(stream(tmp_path).model_copy(update={"outputs": (changed,)}))


def write_somewhere(frame: Any, batch: Any) -> None:
    """What a ForeachBatchOutput calls."""


def misnamed() -> None:
    """A transform that takes nothing."""


def test_what_is_no_function_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TransformError, match="is a BatchContext, not a function"):
        load_function(stream(tmp_path), f"{__name__}:CONTEXT", "transform")


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


def stream_with_code(folder: Path, py_files: tuple[str, ...] | None = None, **fields: Any) -> Stream:
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
    return code_version(stream_with_code(folder, **fields), steps or ("console",))


def test_the_code_version_names_function_hash_and_headrace(folder: Path) -> None:
    """The third part is headrace's own version."""
    name, digest, package, number = version(folder).split()
    assert (name, package, number) == ("flights:to_document", "headrace", __version__)
    assert len(digest.strip(",")) == 8


@pytest.mark.parametrize("changed", ["flights.py", "shared/__init__.py", "shared/airlines.py", "shared/names.py"])
def test_the_code_version_changes_with_every_imported_module(folder: Path, changed: str) -> None:
    """The modules are those that the function imports."""
    before = version(folder)
    with (folder / changed).open("a") as file:
        file.write("# changed\n")
    assert version(folder) != before


def test_the_code_version_ignores_other_imported_modules(folder: Path) -> None:
    before = version(folder)
    (folder / "unrelated.py").write_text("x = 2\n")
    name = f"other_{uuid.uuid4().hex}"
    (folder / f"{name}.py").write_text("")
    importlib.import_module(name)
    assert version(folder) == before


def test_the_code_version_is_equal_from_an_archive_and_elsewhere(folder: Path, tmp_path: Path) -> None:
    """It is equal on another machine, too."""
    archive = tmp_path / "elsewhere" / "code.zip"
    archive.parent.mkdir()
    with zipfile.ZipFile(archive, "w") as zipped:
        for path in folder.rglob("*.py"):
            zipped.write(path, path.relative_to(folder))
    assert version(folder, py_files=(str(archive),)) == version(folder)


def test_what_an_attempt_was_tried_with_is_its_code_not_a_folder(folder: Path, tmp_path: Path) -> None:
    """A git bundle of Airflow has the same file in a folder for each commit."""

    def tried(root: Path) -> str:
        return tried_with(stream_with_code(folder, py_files=(str(root),)), ["console"])

    moved = shutil.copytree(folder, tmp_path / "versions" / "c3d4")
    before = tried(folder)
    assert tried(moved) == before
    with (moved / "flights.py").open("a") as file:
        file.write("MORE = 1\n")
    assert tried(moved) != before


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
