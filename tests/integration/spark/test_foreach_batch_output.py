"""A user's function with a real batch in a classic session; `test_over_connect` has it over Spark Connect."""

from __future__ import annotations

import io
import re
import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from headrace.spark.outputs.functions import ForeachBatchWriter, FunctionFailedError
from headrace.spark.outputs.writer import WrittenBatch
from headrace.spark.records.transforms import BatchContext
from headrace.stream import ForeachBatchOutput, KafkaInput, SparkSettings, Stream

T = 1_700_000_010_000

FUNCTIONS = """
from pyspark.sql.functions import udf

FACTOR = 2

def save(frame, batch, undecodable):
    doubled = udf(lambda n: n * FACTOR, "long")
    total = sum(row[0] for row in frame.select(doubled("id")).collect())
    return {"total": total, "undecodable": {name: rows.count() for name, rows in undecodable.items()}}

def fails(frame, batch):
    broken = udf(lambda n: 1 // (n - n), "long")
    frame.select(broken("id")).collect()
"""


@pytest.fixture
def make_batch(tmp_path: Path) -> Iterator[Callable[..., WrittenBatch]]:
    """A batch of a stream with these outputs; the function's module is in its py_files."""
    module = tmp_path / "functions" / f"foreach_{uuid.uuid4().hex}.py"
    module.parent.mkdir()
    module.write_text(FUNCTIONS)

    def make(*outputs: Any) -> WrittenBatch:
        if not outputs:
            outputs = tuple(ForeachBatchOutput(id=name, function=f"{module.stem}:{name}") for name in ("save", "fails"))
        stream = Stream(
            name=f"clicks-{uuid.uuid4().hex[:8]}",
            inputs=KafkaInput(bootstrap_servers="localhost:1", topics="clicks"),
            outputs=outputs,
            batch_interval="10 s",
            storage=str(tmp_path / "storage"),
            ledger=f"sqlite:///{tmp_path}/ledger.db",
            spark=SparkSettings(master="local[2]", py_files=(str(module.parent),)),
        )
        return WrittenBatch(
            stream=stream,
            context=BatchContext.of(stream.name, T, 10_000, 1),
            batch_time_ms=T,
            attempt=1,
            manifest_uri="",
            from_kafka=False,
            target="",
            out=io.StringIO(),
            progress=lambda _: None,
        )

    yield make
    sys.modules.pop(module.stem, None)
    if str(module.parent) in sys.path:
        sys.path.remove(str(module.parent))


def test_a_functions_module_is_on_executors_and_counts_are_kept(
    spark: SparkSession, make_batch: Callable[..., WrittenBatch]
) -> None:
    batch = replace(make_batch(), undecodable=lambda: {"records": spark.range(3)})
    save = ForeachBatchWriter(batch.stream.output("save"))  # type: ignore[arg-type]
    assert save.write(spark.range(5), batch) == {"total": 20, "undecodable": {"records": 3}}


def test_an_error_in_an_executor_shows_the_users_line(
    spark: SparkSession, make_batch: Callable[..., WrittenBatch]
) -> None:
    batch = make_batch()
    with pytest.raises(FunctionFailedError) as raised:
        ForeachBatchWriter(batch.stream.output("fails")).write(spark.range(5), batch)  # type: ignore[arg-type]
    first, *frames = str(raised.value).splitlines()
    reason = r"of output 'fails' failed: ZeroDivisionError: integer division or modulo by zero \(.*\.py, line \d+\)$"
    assert re.search(reason, first)
    assert 'frame.select(broken("id")).collect()' in [line.strip() for line in frames]
    assert not any("pyspark" in line for line in frames)
