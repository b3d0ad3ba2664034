"""The columns that a transform makes are known before a batch, and their mapping takes what a batch writes."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from tests.support.document_edges import DDL, EDGES, document
from typer.testing import CliRunner, Result

from headrace.cli.main import app
from headrace.errors import HeadraceError
from headrace.spark.preview import transformed_columns
from headrace.stream import DebeziumDecoder, ElasticsearchOutput, JsonDecoder, KafkaInput, SparkSettings, Stream
from headrace.stream.ddl import parse_columns
from headrace.testing.transforms import run_transform

CODE = f"""
from pyspark.sql import functions as F

EDGES = {EDGES!r}

def edges(records):
    made = [f"CASE value.n WHEN 0 THEN {{a[0]}} ELSE {{b[0]}} END AS `{{name}}`" for name, (_, (a, b)) in EDGES.items()]
    return records.selectExpr("topic", "partition", "offset", "headers", *made)

def two(records):
    place = ("topic", "partition", "offset")
    text = F.col("value.n").cast("string").alias("t")
    return {{"first": records.select(*place, "value.n"), "second": records.select(*place, text)}}

def with_time(records):
    return records.select("topic", "partition", "offset", "key", "timestamp", "value.*")

def without_place(records):
    return records.select("value.n")

def as_it_is(records):
    return records.where("value.n > 0")

def of_bytes(records):
    return records.select("topic", "partition", "offset", F.to_json("value").alias("value"))

def needs_rows(records):
    return records.limit(records.first()["offset"])

def with_state(records, state):
    return records
"""


@pytest.fixture
def make(tmp_path: Path, elasticsearch: str) -> Any:
    code = tmp_path / f"code_{uuid.uuid4().hex[:8]}.py"
    code.write_text(CODE)

    def made(transform: str, *, outputs: tuple[str, ...] = ("first",), decoder: Any = None) -> Stream:
        return Stream(
            name="shop",
            inputs=KafkaInput(
                bootstrap_servers="127.0.0.1:1", topics="t", value_decoder=decoder or JsonDecoder(fields="n INT")
            ),
            outputs=tuple(
                ElasticsearchOutput(id=name, hosts=elasticsearch, index=f"mapping-{uuid.uuid4().hex[:8]}")
                for name in outputs
            ),
            transform=f"{code.stem}:{transform}",
            batch_interval="10 s",
            storage=tmp_path / "storage",
            ledger=f"sqlite:///{tmp_path}/ledger.db",
            spark=SparkSettings(py_files=(str(code),)),
        )

    return made


def columns(spark: SparkSession, stream: Stream) -> dict[str, str | HeadraceError]:
    return transformed_columns(spark, stream, [output.id for output in stream.outputs])


def run(folder: Path, stream: Stream, *arguments: str) -> Result:
    definition = folder / "stream.json"
    definition.write_text(stream.to_json())
    command, *more = arguments
    return CliRunner().invoke(app, [*command.split(), str(definition), *more])


def test_a_batch_indexes_into_the_mapping_of_its_columns(spark: SparkSession, make: Any, tmp_path: Path) -> None:
    stream = make("edges")
    made = columns(spark, stream)["first"]
    assert isinstance(made, str)
    assert parse_columns(made) == parse_columns(DDL)
    applied = run(tmp_path, stream, "mapping", "--apply", "--json")
    assert (applied.exit_code, json.loads(applied.stdout)["created"]) == (0, True), applied.output
    transformed = run_transform(stream, [{"n": 0}, {"n": 1}], spark=spark)
    assert [each.document for each in transformed.documents()] == [document(0), document(1)]
    counts = transformed.write()
    assert (counts["created"], counts["dead_lettered"]) == (2, 0)
    again = run(tmp_path, stream, "mapping", "--apply")
    assert again.exit_code == 0
    assert again.stdout == f"The index {stream.outputs[0].index} exists and has all of it; nothing is changed.\n"
    checked = run(tmp_path, stream, "streams check", "--connect", "--spark", "--json")
    (found,) = json.loads(checked.stdout)["columns"]
    assert (found["exists"], found["unknown"], found["conflicts"]) == (True, None, [])
    assert [field["path"] for field in found["fields"] if field["conflict"]] == []


def test_each_output_has_its_own_columns(spark: SparkSession, make: Any) -> None:
    stream = make("two", outputs=("first", "second"))
    assert columns(spark, stream) == {"first": "n INT", "second": "t STRING"}


def test_a_records_own_columns_are_those_of_its_documents(spark: SparkSession, make: Any) -> None:
    assert columns(spark, make("with_time"))["first"] == "timestamp TIMESTAMP,n INT"
    assert columns(spark, make("as_it_is"))["first"] == "n INT"
    # The operation and the source of a change event are beside its row.
    events = DebeziumDecoder(fields="id BIGINT, n INT")
    assert columns(spark, make("as_it_is", decoder=events))["first"] == "id BIGINT,n INT"


@pytest.mark.parametrize(
    ("transform", "reason"),
    [
        ("of_bytes", "are values of the type string, so their fields are not known"),
        ("needs_rows", "raises TypeError when it is called without records"),
    ],
)
def test_what_is_not_known_says_why(
    spark: SparkSession, make: Any, tmp_path: Path, transform: str, reason: str
) -> None:
    stream = make(transform)
    assert reason in str(columns(spark, stream)["first"])
    printed = run(tmp_path, stream, "mapping")
    assert (printed.exit_code, printed.stdout) == (1, "")
    assert reason in printed.stderr
    checked = run(tmp_path, stream, "streams check", "--connect", "--spark")
    assert reason in checked.stdout
    assert "output first, columns: index" not in checked.stdout


def test_a_transform_of_the_state_is_not_called(spark: SparkSession, make: Any) -> None:
    assert "are made of the state, which only a batch has" in str(columns(spark, make("with_state"))["first"])


def test_rows_that_fail_a_batch_fail_the_check(spark: SparkSession, make: Any, tmp_path: Path) -> None:
    checked = run(tmp_path, make("without_place"), "streams check", "--connect", "--spark", "--json")
    failed = [check for check in json.loads(checked.stdout)["checks"] if check["name"] == "output first, columns"]
    assert ["have no column 'topic', 'partition', 'offset'" in check["error"] for check in failed] == [True]
