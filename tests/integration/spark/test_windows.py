"""Windows over batches: the cases of Spark's WindowOperationsSuite, and what only batches from a log can be asked.

A batch interval is one second, as in that suite. Where Spark counts slides from a stream's start, a window here ends at
multiples of its slide since the epoch; the tests' ledgers begin there.
"""

from __future__ import annotations

import ast
import io
import json
import sys
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from headrace.ledger import BatchState
from headrace.stream import (
    ConsoleOutput,
    ElasticsearchOutput,
    JsonDecoder,
    KafkaInput,
    SparkSettings,
    State,
    Window,
)

Records = Callable[..., pa.RecordBatch]
Make = Callable[..., Any]
Batches = Sequence[Sequence[Any]]

SECOND = 1_000

TRANSFORMS = """
from pyspark.sql import functions as F

def values(records):
    return records.select("value.v").orderBy("v")

def reduce(records):
    return records.groupBy("value.k").agg(F.sum("value.v").alias("v")).orderBy("k")

def group(records):
    return records.groupBy("value.k").agg(F.sort_array(F.collect_list("value.v")).alias("v")).orderBy("k")

def count(records):
    return records.agg(F.count("*"))

def count_by_value(records):
    return records.groupBy("value.k").agg(F.count("*").alias("n")).orderBy("k")

def add_and_subtract(records, state, leaving):
    came = records.select("value.k", "value.v")
    left = leaving.select("value.k", (-F.col("value.v")).alias("v"))
    return state.select("k", "v").unionByName(came).unionByName(left).groupBy("k").agg(F.sum("v").alias("v"))

def table(records, state):
    return state.orderBy("k")

def without_zeros(records, state):
    return state.where("v != 0").orderBy("k")

def numbers(records):
    number = F.expr("if(value.v = 0, 'no number', cast(value.v AS STRING))").alias("n")
    return records.select("topic", "partition", "offset", number)

def starts(records, batch):
    return records.select(F.lit(str(batch.window_start)), F.lit(str(batch.batch_time))).limit(1)
"""

LARGER_SLIDE: Batches = ([("a", 1)], [("a", 2)], [("a", 3)], [("a", 4)], [("a", 5)], [("a", 6)], [], [])
LARGER_SLIDE_REDUCED: Batches = ([("a", 3)], [("a", 10)], [("a", 18)], [("a", 11)])
A, AB, ABC = [("a", 1)], [("a", 1), ("b", 1)], [("a", 1), ("b", 1), ("c", 1)]
BIG: Batches = (A, AB, ABC, AB, A, [], A, AB, ABC, AB, A, [])
_BIG_HALF = ([("a", 1)], [("a", 2), ("b", 1)], [("a", 2), ("b", 2), ("c", 1)], [("a", 2), ("b", 2), ("c", 1)])
BIG_REDUCED: Batches = (*_BIG_HALF, [("a", 2), ("b", 1)], [("a", 1)]) * 2
BIG_INVERSE: Batches = (
    *_BIG_HALF,
    [("a", 2), ("b", 1), ("c", 0)],
    [("a", 1), ("b", 0), ("c", 0)],
    [("a", 1), ("b", 0), ("c", 0)],
    [("a", 2), ("b", 1), ("c", 0)],
    *_BIG_HALF[2:],
    [("a", 2), ("b", 1), ("c", 0)],
    [("a", 1), ("b", 0), ("c", 0)],
)


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    name = f"windows_{uuid.uuid4().hex}"
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / f"{name}.py").write_text(TRANSFORMS)
    yield name
    sys.modules.pop(name, None)


@pytest.fixture
def stream(make_batch_ledger: Make, make_records: Records, tmp_path: Path, code: str, small_data: None) -> Make:
    """Runs a stream's batches, a second each; gives what was printed of each batch, by the output's id."""

    def make(**fields: Any) -> Stream:
        records = KafkaInput(
            bootstrap_servers="localhost:9092", topics="clicks", value_decoder=JsonDecoder(fields="k STRING, v INT")
        )
        fields = {"batch_interval": "1 s", "inputs": records, **fields}
        spark = SparkSettings(py_files=(str(tmp_path / "code"),))
        return Stream(make_batch_ledger(spark=spark, **fields), make_records, code)

    return make


class Stream:
    def __init__(self, batch: Any, make_records: Records, code: str) -> None:
        self.batch = batch
        self.code = code
        self._records = make_records
        self._offset = 0

    def allocate(self, rows: Sequence[Any]) -> int:
        """Receive the rows, and allocate them as the next batch; its time."""
        self.receive([json.dumps({"k": k, "v": v}).encode() for k, v in rows])
        return self.batch.allocate()  # type: ignore[no-any-return]

    def receive(self, values: Sequence[bytes]) -> None:
        if values:
            self.batch.add(self._records(list(values), first_offset=self._offset))
            self._offset += len(values)

    def run(self, spark: Any, time_ms: int, *, force: bool = False) -> tuple[Any, list[Any]]:
        """Run a batch; its result and the rows that were printed."""
        out = io.StringIO()
        attempt = self.batch.begin(time_ms, force=force)
        result = self.batch.run(spark, attempt, out=out)
        lines = [line for line in out.getvalue().splitlines() if line and not line.startswith(("---", "Time: "))]
        return result, [line if "Row(" in line else ast.literal_eval(line) for line in lines]

    def windows(self, spark: Any, batches: Batches) -> list[list[Any]]:
        """Run these batches; what was printed of those at which a window ended."""
        printed = []
        for rows in batches:
            result, lines = self.run(spark, self.allocate(rows))
            if "skipped" not in result.outputs["console"]:
                printed.append(lines)
        return printed


def window(code: str, function: str, length: str = "2 s", slide: str | None = None) -> ConsoleOutput:
    return ConsoleOutput(transform=f"{code}:{function}", rows=100, window=Window(length=length, slide=slide))


def one_each(count: int) -> Batches:
    return [[("x", number)] for number in range(count)]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(("2 s", "1 s", 6, [[0], [0, 1], [1, 2], [2, 3], [3, 4], [4, 5]]), id="basic window"),
        pytest.param(("2 s", "2 s", 6, [[0, 1], [2, 3], [4, 5]]), id="tumbling window"),
        pytest.param(("4 s", "2 s", 8, [[0, 1], [0, 1, 2, 3], [2, 3, 4, 5], [4, 5]]), id="larger window"),
        pytest.param(("2 s", "3 s", 6, [[1, 2], [4, 5]]), id="non-overlapping window"),
    ],
)
def test_window(spark: SparkSession, stream: Make, code: str, case: tuple[str, str, int, Batches]) -> None:
    length, slide, batches, expected = case
    found = stream(outputs=window(code, "values", length, slide))
    assert found.windows(spark, [*one_each(6), [], []][:batches]) == expected


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(("2 s", "1 s", [[("a", 1), ("a", 3)]], [[("a", 4)]]), id="basic reduction"),
        pytest.param(
            ("2 s", "1 s", [A, A], [[("a", 1)], [("a", 2)]]), id="key already in window and new value added into window"
        ),
        pytest.param(("2 s", "1 s", [A, AB], [[("a", 1)], [("a", 2), ("b", 1)]]), id="new key added into window"),
        pytest.param(
            ("2 s", "1 s", [A, A, [], []], [[("a", 1)], [("a", 2)], [("a", 1)], []]), id="key removed from window"
        ),
        pytest.param(("4 s", "2 s", LARGER_SLIDE, LARGER_SLIDE_REDUCED), id="larger slide time"),
        pytest.param(("2 s", "1 s", BIG, BIG_REDUCED), id="big test"),
    ],
)
def test_reduce_by_key_and_window(
    spark: SparkSession, stream: Make, code: str, case: tuple[str, str, Batches, Batches]
) -> None:
    length, slide, batches, expected = case
    assert stream(outputs=window(code, "reduce", length, slide)).windows(spark, batches) == list(expected)


def test_reduce_by_key_and_window_with_inverse_and_with_filter(spark: SparkSession, stream: Make, code: str) -> None:
    """Both big tests: what came is added to the state, and what left the window subtracted, so a batch reads two."""
    state = State(update=f"{code}:add_and_subtract", fields="k STRING, v BIGINT", keys="k", window="2 s")
    outputs = [ConsoleOutput(id=name, transform=f"{code}:{name}") for name in ("table", "without_zeros")]
    found = stream(outputs=outputs, state=state)
    printed = [found.run(spark, found.allocate(rows))[1] for rows in BIG]
    assert printed == [[*inverse, *rows] for inverse, rows in zip(BIG_INVERSE, BIG_REDUCED, strict=True)]


def test_group_by_key_and_window(spark: SparkSession, stream: Make, code: str) -> None:
    batches = [[(key, number) for key, _ in rows] for number, rows in enumerate(BIG[:6])]
    found = stream(outputs=window(code, "group")).windows(spark, batches)
    assert found == [
        [("a", [0])],
        [("a", [0, 1]), ("b", [1])],
        [("a", [1, 2]), ("b", [1, 2]), ("c", [2])],
        [("a", [2, 3]), ("b", [2, 3]), ("c", [2])],
        [("a", [3, 4]), ("b", [3])],
        [("a", [4])],
    ]


def test_count_by_window(spark: SparkSession, stream: Make, code: str) -> None:
    sizes = [1, 1, 2, 1, 0, 0]
    found = stream(outputs=window(code, "count"))
    assert found.windows(spark, [[("x", 1)] * size for size in sizes]) == [[1], [2], [3], [3], [1], [0]]


def test_count_by_value_and_window(spark: SparkSession, stream: Make, code: str) -> None:
    batches = [[(key, 1) for key in keys] for keys in ("a", "bb", "ab")]
    found = stream(outputs=window(code, "count_by_value")).windows(spark, batches)
    assert found == [[("a", 1)], [("a", 1), ("b", 2)], [("a", 1), ("b", 3)]]


def test_a_window_and_a_batch_side_by_side(spark: SparkSession, stream: Make, code: str) -> None:
    """BasicOperationsSuite's "rdd cleanup - map and window": batches stay as long as the longest window needs them."""
    outputs = (
        ConsoleOutput(id="batch", transform=f"{code}:values"),
        ConsoleOutput(id="short", transform=f"{code}:values", window=Window(length="2 s")),
        ConsoleOutput(id="long", transform=f"{code}:values", window=Window(length="3 s")),
    )
    found = stream(outputs=outputs)
    printed = [found.run(spark, found.allocate(rows))[1] for rows in one_each(4)]
    assert printed[3] == [3, 2, 3, 1, 2, 3]
    assert found.batch.stream.remember_ms >= 3 * SECOND


def test_a_batch_that_is_run_again_has_its_own_window(spark: SparkSession, stream: Make, code: str) -> None:
    found = stream(outputs=window(code, "values"))
    times = [found.allocate(rows) for rows in one_each(4)]
    for time_ms in times:
        found.run(spark, time_ms)
    assert found.run(spark, times[1], force=True)[1] == [0, 1], "not what has come since"


def test_a_transform_gets_the_start_of_its_window(spark: SparkSession, stream: Make, code: str) -> None:
    found = stream(outputs=window(code, "starts", "2 s"))
    (rows,) = [found.run(spark, found.allocate(rows))[1] for rows in one_each(1)]
    assert rows == [("1969-12-31 23:59:59+00:00", "1970-01-01 00:00:01+00:00")]


def test_between_two_slides_an_output_is_done_without_spark(stream: Make, code: str) -> None:
    found = stream(outputs=window(code, "values", "4 s", "2 s"))

    def refuse() -> SparkSession:
        raise AssertionError("this batch needs no Spark")

    time_ms = found.allocate([("x", 1)])
    result, printed = found.run(refuse, time_ms)
    assert printed == []
    assert result.outputs["console"]["skipped"] == "no window ends at this batch time, but every 2000 ms"
    assert found.batch.ledger.batches.get("clicks", time_ms).state is BatchState.COMPLETED


def test_an_empty_batch_runs_while_its_window_holds_records(spark: SparkSession, stream: Make) -> None:
    """Also without a transform, when no rows can come of nothing."""
    found = stream(outputs=ConsoleOutput(window=Window(length="2 s")))
    printed = [len(found.run(spark, found.allocate(rows))[1]) for rows in ([("x", 1)], [], [])]
    assert printed == [1, 1, 0]


def test_undecodable_records_are_dead_lettered_in_one_window(
    spark: SparkSession, stream: Make, elasticsearch: str
) -> None:
    index = f"windows-{uuid.uuid4().hex}"
    output = ElasticsearchOutput(
        hosts=elasticsearch, index=index, window=Window(length="4 s", slide="2 s"), refresh=True
    )
    found = stream(outputs=output)
    counts = []
    for value in (b"none", b'{"k": "a"}', b'{"k": "b"}', b"nor this", b'{"k": "c"}', b"", b"", b""):
        found.receive([value] if value else [])
        counts.append(found.run(spark, found.batch.allocate())[0].outputs["elasticsearch"])
    due = [count for count in counts if "skipped" not in count]
    assert [count["undecodable"] for count in due] == [1, 1, 0, 0]
    assert [count["dead_lettered"] for count in due] == [1, 1, 0, 0]
    assert [count["batches"] for count in due] == [2, 4, 4, 4]
    assert ask(elasticsearch, "GET", f"{index}/_count")["count"] == 3


def test_a_refused_record_is_in_its_dead_letter_in_later_windows(
    spark: SparkSession, stream: Make, elasticsearch: str, code: str
) -> None:
    index = f"windows-{uuid.uuid4().hex}"
    output = ElasticsearchOutput(
        hosts=elasticsearch, index=index, window=Window(length="3 s"), transform=f"{code}:numbers"
    )
    ask(elasticsearch, "PUT", index, {"mappings": {"properties": {"n": {"type": "long"}}}})
    found = stream(outputs=output)
    counts = [found.run(spark, found.allocate(rows))[0].outputs["elasticsearch"] for rows in one_each(3)]
    assert [count["dead_lettered"] for count in counts] == [1, 1, 1], "it is in all three windows"
    ask(elasticsearch, "POST", f"{index}-dead-letters/_refresh")
    (letter,) = ask(elasticsearch, "GET", f"{index}-dead-letters/_search")["hits"]["hits"]
    assert json.loads(letter["_source"]["value_text"]) == {"k": "x", "v": 0}


def ask(url: str, method: str, path: str, body: Any = None) -> Any:
    request = urllib.request.Request(  # noqa: S310
        f"{url}/{path}",
        method=method,
        data=None if body is None else json.dumps(body).encode(),
        headers={"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310
        return json.load(answer)
