"""The contract of a foreach_batch function, without Spark: its arguments, its counts and its failures."""

from __future__ import annotations

import io
import sys
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import pytest

from headrace.spark.outputs.functions import ForeachBatchWriter, FunctionFailedError, print_batch
from headrace.spark.outputs.writer import Counts, WrittenBatch
from headrace.spark.records.transforms import BatchContext, TransformError
from headrace.stream import ForeachBatchOutput, KafkaInput, Stream, StreamDefinitionError


class Session:
    __module__ = "pyspark.sql.connect.session"


class Rows:
    """As much of a Connect DataFrame as the console takes."""

    sparkSession = Session()  # noqa: N815 - Spark's name

    def __init__(self, *rows: tuple[Any, ...]) -> None:
        self._rows = rows

    def limit(self, count: int) -> Rows:
        return Rows(*self._rows[:count])

    def collect(self) -> list[tuple[Any, ...]]:
        return list(self._rows)


def printed(frame: Any, rows: int = 2) -> str:
    out = io.StringIO()
    print_batch(frame, batch_time_ms=1_700_000_010_000, rows=rows, out=out)
    return out.getvalue()


def test_a_batch_is_printed_as_spark_streaming_did() -> None:
    assert printed(Rows(("a", 1), ("b", 2))) == (
        "-------------------------------------------\n"
        "Time: 1700000010000 ms (2023-11-14T22:13:30Z)\n"
        "-------------------------------------------\n"
        "('a', 1)\n"
        "('b', 2)\n"
        "\n"
    )


def test_more_rows_than_asked_for_are_dots() -> None:
    assert printed(Rows((1,), (2,), (3,))).splitlines()[3:] == ["1", "2", "...", ""]


def test_an_empty_batch_has_its_header() -> None:
    assert printed(None).splitlines()[1] == "Time: 1700000010000 ms (2023-11-14T22:13:30Z)"
    assert printed(None) == printed(Rows())


def test_bytes_are_text_where_they_are_utf8() -> None:
    assert printed(Rows((b"gr\xc3\xbcn", b"\xff"))).splitlines()[3] == "('grün', b'\\xff')"


def test_zero_rows_is_the_header_and_whether_there_are_any() -> None:
    assert printed(Rows((1,)), rows=0).splitlines()[3:] == ["...", ""]


T = 1_700_000_010_000
FRAME = cast("Any", object())

Write = Callable[..., Counts]


@pytest.fixture
def write(tmp_path: Path) -> Iterator[Write]:
    """Call the function ``save`` of a module with this text; by ``name`` another one's."""
    modules = []

    def write(text: str, *, frame: Any = FRAME, undecodable: Any = None, name: str = "save") -> Counts:
        module = f"foreach_{uuid.uuid4().hex}"
        modules.append(module)
        folder = tmp_path / module
        folder.mkdir()
        (folder / f"{module}.py").write_text(text)
        output = ForeachBatchOutput(function=f"{module}:{name}")
        stream = Stream(
            name="clicks",
            inputs=KafkaInput(bootstrap_servers="localhost:1", topics="clicks"),
            outputs=output,
            batch_interval="10 s",
            storage=str(tmp_path / "storage"),
            ledger=f"sqlite:///{tmp_path}/ledger.db",
            spark={"py_files": [str(folder)]},
        )
        batch = WrittenBatch(
            stream=stream,
            context=BatchContext.of("clicks", T, 10_000, 2),
            batch_time_ms=T,
            attempt=2,
            manifest_uri="",
            from_kafka=False,
            target="",
            undecodable=lambda: undecodable or {},
            out=io.StringIO(),
            progress=lambda _: None,
        )
        return ForeachBatchWriter(output).write(frame, batch)

    path = list(sys.path)
    yield write
    sys.path[:] = path
    for module in modules:
        sys.modules.pop(module, None)


def test_the_function_gets_frame_and_batch_and_returns_counts(write: Write) -> None:
    counts = write(
        "def save(frame, batch):\n"
        "    return {'frame': type(frame).__name__, 'attempt': batch.attempt, 'time': batch.batch_time.isoformat()}\n"
    )
    at = datetime.fromtimestamp(T / 1000, UTC).isoformat()
    assert counts == {"frame": "object", "attempt": 2, "time": at}
    assert write("def save(rows, *more): pass") == {}


def test_undecodable_records_go_to_a_function_that_asks_for_them(write: Write) -> None:
    text = "def save(frame, batch, undecodable): return {'inputs': sorted(undecodable)}"
    assert write(text, undecodable={"records": FRAME}) == {"inputs": ["records"]}
    assert write(text) == {"inputs": []}
    assert write("def save(frame, batch): return {'n': 1}", undecodable={"records": FRAME}) == {"n": 1}


def test_the_function_is_not_called_without_a_frame(write: Write) -> None:
    assert write("def save(frame, batch): raise RuntimeError", frame=None) == {}


def test_a_failed_functions_error_shows_only_the_users_frames(write: Write) -> None:
    with pytest.raises(FunctionFailedError) as raised:
        write("def save(frame, batch):\n    deeper(batch)\n\ndef deeper(batch):\n    raise KeyError('lost')\n")
    text = str(raised.value)
    assert "of output 'foreach_batch' failed: KeyError: 'lost' (" in text.splitlines()[0]
    assert "line 2, in save" in text
    assert "line 5, in deeper\n    raise KeyError('lost')" in text
    assert "headrace/spark" not in text
    assert isinstance(raised.value.__cause__, KeyError)


def test_sparks_frames_between_the_functions_own_are_left_out(write: Write) -> None:
    """As where a function fails in an executor: Spark adds the frames that the error had there."""
    with pytest.raises(FunctionFailedError) as raised:
        write(
            "sparks = {}\n"
            "exec(compile('def collect(f): f()', '/lib/pyspark/sql/dataframe.py', 'exec'), sparks)\n"
            "def save(frame, batch):\n"
            "    sparks['collect'](lambda: 1 // 0)\n"
        )
    text = str(raised.value)
    assert "in save" in text
    assert "in <lambda>" in text
    assert "pyspark" not in text


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        ("7", "returned int, not a mapping"),
        ("{'rows': object()}", "returned 'rows': object"),
        ("{1: 2}", "returned 1: int"),
        ("{'rate': float('nan')}", "returned 'rate': float"),
    ],
)
def test_counts_that_json_cannot_hold_are_refused(write: Write, returned: str, says: str) -> None:
    with pytest.raises(FunctionFailedError, match=says):
        write(f"def save(frame, batch): return {returned}")


def test_a_function_with_too_few_parameters_is_refused(write: Write) -> None:
    """A missing function is refused too."""
    with pytest.raises(StreamDefinitionError, match="has no 'missing'"):
        write("", name="missing")
    with pytest.raises(TransformError, match=r"takes \(frame\)\. It must take the batch's DataFrame and its context"):
        write("def save(frame): pass")
