"""`headrace batches preview` and `export`: what a batch would write, and its records in a file, on real Spark."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet
from pyspark.sql import SparkSession
from tests.unit.pins.freezing import every_stored, frozen, stored
from tests.unit.pins.test_parquet import described
from typer.testing import CliRunner, Result

from headrace.cli.main import app
from headrace.spark.preview import BatchPreview, PreviewError, preview_batch, with_transform
from headrace.stream import ConsoleOutput, ElasticsearchOutput, JsonDecoder, KafkaInput, SparkSettings, State, Window
from headrace.stream_context import StreamContext
from headrace.testing.transforms import run_transform

Records = Callable[..., pa.RecordBatch]
Make = Callable[..., Any]

CODE = """
from pyspark.sql import functions as F

def total(records):
    order = F.col("value")
    return records.select("topic", "partition", "offset", (order.cents * order.pieces).alias("total"))

def dear(records):
    return total(records).where("total > 300")

def count(records, batch):
    return records.agg(F.count("*").alias("n")).withColumn("since", F.lit(str(batch.window_start)))

def with_state(records, state):
    return state

def update(records, state):
    return records.select(F.col("key").cast("string").alias("k")).distinct()
"""
ORDERS = JsonDecoder(fields="item STRING, cents INT, pieces INT")
VALUES = [
    b'{"item": "cup", "cents": 250, "pieces": 2}', b'{"item": "pot", "cents": 100, "pieces": 3}', b"junk"
]  # fmt: skip


@pytest.fixture
def orders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_batch_ledger: Make, make_records: Records
) -> Iterator[Callable[..., Any]]:
    """Builds a stream of orders with the transforms above, and its first batch of three records."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "order_code.py").write_text(CODE)
    inputs = KafkaInput(bootstrap_servers="localhost:9092", topics="clicks", value_decoder=ORDERS)

    def make(values: list[bytes | None] = VALUES, **fields: Any) -> Any:
        spark = SparkSettings(py_files=(str(tmp_path / "code"),))
        batch = make_batch_ledger(**{"inputs": inputs, "transform": "order_code:total", "spark": spark} | fields)
        batch.add(make_records(values))
        batch.allocate()
        return batch

    yield make
    sys.modules.pop("order_code", None)


def preview(batch: Any, spark: SparkSession, time_ms: int = 10_000, **options: Any) -> BatchPreview:
    stream = with_transform(batch.stream, options.pop("transform", None), options.get("output_id"))
    return preview_batch(StreamContext(stream, batch.ledger), time_ms, lambda: spark, **options)


def test_a_preview_shows_documents_and_leaves_the_ledger_alone(spark: SparkSession, orders: Make) -> None:
    batch = orders(outputs=(ElasticsearchOutput(hosts="http://127.0.0.1:1", index="orders"), ConsoleOutput()))
    before = batch.ledger.snapshots.take("clicks")
    shown = preview(batch, spark)
    documents, printed = shown.outputs
    assert (shown.records, shown.source) == (3, "log")
    assert documents.documents is not None
    assert [(each.id, each.document, each.record) for each in documents.documents] == [
        ("clicks+0+0", '{"total":500}', ("clicks", 0, 0)),
        ("clicks+0+1", '{"total":300}', ("clicks", 0, 1)),
    ]
    assert (documents.undecodable, [bad.offset for bad in documents.undecodable_records]) == (1, [2])
    assert [row["total"] for row in printed.rows] == [500, 300] and printed.documents is None
    after = batch.ledger.snapshots.take("clicks")
    assert (after.batches, after.outputs, after.newest_attempts) == (before.batches, {}, {})


def test_a_previews_other_transform_is_for_the_named_output_only(spark: SparkSession, orders: Make) -> None:
    batch = orders(outputs=(ConsoleOutput(id="a"), ConsoleOutput(id="b")))
    both = preview(batch, spark, transform="order_code:dear")
    assert [len(output.rows) for output in both.outputs] == [1, 1]
    (one,) = preview(batch, spark, transform="order_code:dear", output_id="b").outputs
    assert (one.output_id, one.transform, [row["total"] for row in one.rows]) == ("b", "order_code:dear", [500])
    with pytest.raises(PreviewError, match="module:function"):
        with_transform(batch.stream, "no reference", None)
    with pytest.raises(PreviewError, match=r"no output 'c'\. Its outputs are a, b"):
        preview(batch, spark, output_id="c")


def test_a_preview_stops_at_its_limit_and_says_if_there_are_more(spark: SparkSession, orders: Make) -> None:
    batch = orders()
    (one,), (both,) = (preview(batch, spark, limit=limit).outputs for limit in (1, 2))
    assert [(len(output.rows), output.more) for output in (one, both)] == [(1, True), (2, False)]


def test_a_window_is_read_as_an_attempt_reads_it(spark: SparkSession, orders: Make, make_records: Records) -> None:
    output = ConsoleOutput(window=Window(length="20 s", slide="20 s"), transform="order_code:count")
    batch = orders(outputs=output)
    batch.add(make_records(VALUES[:1], first_offset=3))
    batch.allocate()
    (skipped,) = preview(batch, spark).outputs
    assert skipped.skipped is not None and "no window ends" in skipped.skipped
    (window,) = preview(batch, spark, 20_000).outputs
    assert window.rows == ({"n": 3, "since": "1970-01-01 00:00:00+00:00"},)


def test_a_transform_with_the_state_needs_its_batchs_update(spark: SparkSession, orders: Make) -> None:
    from headrace.spark.state.version import StateMissingError

    state = State(keys=("k",), fields="k STRING", update="order_code:update")
    batch = orders(state=state, outputs=ConsoleOutput(transform="order_code:with_state"))
    with pytest.raises(StateMissingError):
        preview(batch, spark)
    batch.run(spark, batch.begin(10_000))
    (output,) = preview(batch, spark).outputs
    assert sorted(row["k"] for row in output.rows) == ["key-0", "key-1"]


def test_an_empty_batch_writes_nothing_and_a_missing_one_refused(spark: SparkSession, orders: Make) -> None:
    batch = orders(outputs=ElasticsearchOutput(hosts="http://127.0.0.1:1", index="orders"))
    batch.allocate()
    assert preview(batch, spark, 20_000).outputs[0].skipped == "the batch has no records"
    with pytest.raises(PreviewError, match="is not allocated"):
        preview(batch, spark, 30_000)
    batch.ledger.batches.abandon("clicks", 10_000, "no use")
    with pytest.raises(PreviewError, match="is abandoned"):
        preview(batch, spark)


def command(batch: Any, verb: str, *arguments: str) -> Result:
    given = ["batches", verb, "clicks", "10000", *arguments, "--ledger", batch.stream.ledger]
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 0, result.output
    return result


def test_the_command_prints_rows_and_json(spark: SparkSession, orders: Make) -> None:
    batch = orders(outputs=ElasticsearchOutput(hosts="http://127.0.0.1:1", index="orders"))
    printed = command(batch, "preview", "--limit", "1").stdout
    assert "Nothing was written." in printed and '{"total":500}' in printed and "There are more rows" in printed
    assert "1 records do not decode. The first is clicks 0 2: the value is no JSON object" in printed
    shown = json.loads(command(batch, "preview", "--transform", "order_code:dear", "--json").stdout)
    (output,) = shown["outputs"]
    assert [each["id"] for each in output["documents"]] == ["clicks+0+0"]


def test_an_exported_batch_has_each_record_decoded_and_as_bytes(
    spark: SparkSession, orders: Make, tmp_path: Path
) -> None:
    batch = orders()
    path = tmp_path / "batch.parquet"
    done = json.loads(command(batch, "export", "--to", str(path), "--json").stdout)
    assert (done["records"], done["undecodable"], done["bytes"]) == (3, 1, path.stat().st_size)
    table = parquet.read_table(path)
    assert table.column("offset").to_pylist() == [0, 1, 2]
    assert table.column("value").to_pylist() == [
        {"item": "cup", "cents": 250, "pieces": 2}, {"item": "pot", "cents": 100, "pieces": 3}, None
    ]  # fmt: skip
    assert table.column("raw_value").to_pylist() == VALUES
    assert table.column("raw_key").to_pylist() == [b"key-0", b"key-1", b"key-2"]
    assert table.column("timestamp").to_pylist()[0].isoformat() == "2023-11-14T22:13:20.123000+00:00"
    reasons = table.column("undecodable_reason").to_pylist()
    assert reasons[:2] == [None, None] and "no JSON object" in reasons[2]
    assert [each.name for each in tmp_path.glob("*batch.parquet*")] == ["batch.parquet"]


def test_an_exported_batch_runs_through_the_transform_in_a_test(
    spark: SparkSession, orders: Make, tmp_path: Path
) -> None:
    batch = orders()
    path = tmp_path / "batch.parquet"
    command(batch, "export", "--to", str(path))
    run = run_transform(batch.stream, path, spark=spark)
    (shown,) = preview(batch, spark).outputs
    assert run.rows() == list(shown.rows)
    assert [(row["offset"], row["value"]) for row in run.undecodable()] == [(2, b"junk")]


def test_export_format(spark: SparkSession, orders: Make, tmp_path: Path) -> None:
    batch = orders()
    path = tmp_path / "batch.parquet"
    command(batch, "export", "--to", str(path))
    stored("export.parquet", path.read_bytes())
    frozen("parquet_export.txt", described(path))
    for kept in every_stored():
        run = run_transform(batch.stream, kept / "export.parquet", spark=spark)
        assert [(row["offset"], row["total"]) for row in run.rows()] == [(0, 500), (1, 300)]


def test_an_existing_file_is_replaced_only_on_request(spark: SparkSession, orders: Make, tmp_path: Path) -> None:
    batch = orders()
    path = tmp_path / "batch.parquet"
    path.write_text("mine")
    arguments = ["batches", "export", "clicks", "10000", "--to", str(path), "--ledger", batch.stream.ledger]
    refused = CliRunner().invoke(app, arguments)
    assert refused.exit_code == 1 and path.read_text() == "mine"
    command(batch, "export", "--to", str(path), "--overwrite")
    assert parquet.read_metadata(path).num_rows == 3


def test_an_exports_path_may_have_characters_that_a_url_encodes(
    spark: SparkSession, orders: Make, tmp_path: Path
) -> None:
    folder = tmp_path / "orders: a + b%20#1?"
    folder.mkdir()
    path = folder / "batch 14:05+00 #1?.parquet"
    command(orders(), "export", "--to", str(path))
    assert parquet.read_metadata(path).num_rows == 3
    assert list(folder.iterdir()) == [path]
    assert not [each for each in tmp_path.iterdir() if each.name.startswith("orders") and each != folder]
