from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.spark.transforms import TransformError, check_transform
from headrace.stream import ConsoleOutput, KafkaInput, SparkSettings, State, Stream
from headrace.stream.model import StreamDefinitionError

FUNCTIONS = """
def update(lines, state, leaving, timing_out, batch): ...
def leaves(lines, leaving): ...
def times_out(lines, timing_out): ...
def changed(lines, changes): ...
def other(lines, table): ...
"""


@pytest.fixture
def make_stream(tmp_path: Path) -> Callable[..., Stream]:
    name = f"functions_{uuid.uuid4().hex}"
    (tmp_path / f"{name}.py").write_text(FUNCTIONS)
    return lambda update, **state: Stream(
        name="lines",
        inputs=KafkaInput(id="lines", bootstrap_servers="127.0.0.1:1", topics="lines"),
        outputs=ConsoleOutput(transform=f"{name}:changed"),
        batch_interval="10 s",
        storage=str(tmp_path / "storage"),
        ledger=f"sqlite:///{tmp_path}/ledger.db",
        state=State(
            update=f"{name}:{update}",
            fields="word STRING",
            keys="word",
            **{key: value.replace("functions", name) for key, value in state.items()},
        ),
        spark=SparkSettings(py_files=(str(tmp_path / f"{name}.py"),)),
    )


def test_an_update_may_take_all_that_there_is(make_stream: Callable[..., Stream]) -> None:
    check_transform(make_stream("update", window="30 s", timeout="60 s"))


@pytest.mark.parametrize(("update", "declared"), [("leaves", {"window": "30 s"}), ("times_out", {"timeout": "60 s"})])
def test_an_update_may_take_leaving_only_with_a_window_and_timing_out_only_with_a_timeout(
    make_stream: Callable[..., Stream], update: str, declared: dict[str, Any]
) -> None:
    check_transform(make_stream(update, **declared))
    with pytest.raises(TransformError, match=r"takes \(lines, (leaving|timing_out)\)"):
        check_transform(make_stream(update))


def test_a_missing_function_of_the_initial_table_is_refused(make_stream: Callable[..., Stream]) -> None:
    check_transform(make_stream("leaves", window="30 s", initial="functions:other"))
    with pytest.raises(StreamDefinitionError, match="no 'missing' to be the state's initial table"):
        check_transform(make_stream("leaves", window="30 s", initial="functions:missing"))


def test_an_update_with_wrong_parameters_is_refused_before_the_first_batch(
    make_stream: Callable[..., Stream],
) -> None:
    with pytest.raises(TransformError, match=r"takes \(lines, table\)"):
        check_transform(make_stream("other"))


def test_a_missing_update_function_is_refused(make_stream: Callable[..., Stream]) -> None:
    with pytest.raises(StreamDefinitionError, match="no 'missing' to be the state's update"):
        check_transform(make_stream("missing"))
