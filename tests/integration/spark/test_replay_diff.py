"""`headrace replay diff`: two versions of a transform over past batches, on real Spark."""

from __future__ import annotations

import contextlib
import json
import re
import sqlite3
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from typer.testing import CliRunner

from headrace.batch.allocation import allocate
from headrace.cli.main import app
from headrace.spark.preview import PreviewError
from headrace.spark.replay_diff import WHOLE, CollidingId, Collisions, ReplayDiff, UnreadBatches, diff_replay
from headrace.stream import (
    ColumnIds,
    ConsoleOutput,
    ElasticsearchOutput,
    JsonDecoder,
    KafkaInput,
    KeyIds,
    SparkSettings,
)
from headrace.stream_context import StreamContext

pytestmark = pytest.mark.usefixtures("small_data")

Records = Callable[..., pa.RecordBatch]
Make = Callable[..., Any]

CODE = """
from pyspark.sql import functions as F

PLACE = ("topic", "partition", "offset")

def total(records):
    order = F.col("value")
    return records.select(*PLACE, order.item.alias("item"), (order.cents * order.pieces).alias("total"))

def reordered(records):
    return total(records).select(*PLACE, "total", "item")

def corrected(records):
    # Another total of pots, no cups, and pans, which `total` has not.
    order = F.col("value")
    rows = records.select(*PLACE, order.item.alias("item"), (order.cents * order.pieces).alias("total"))
    return rows.where("item <> 'cup'").withColumn("total", F.expr("IF(item = 'pot', total + 1, total)"))

def without_pans(records):
    return total(records).withColumn("item", F.expr("IF(item = 'pan', 'pot', item)"))

def cheap(records):
    return total(records).where("total < 400")

def by_item(records):
    order = F.col("value")
    return records.groupBy(order.item.alias("item")).agg(F.sum(order.pieces).alias("pieces"))

def by_item_doubled(records):
    return by_item(records).withColumn("pieces", F.col("pieces") * 2)

def changed_values(records):
    # Keys 0 and 2 are one key; values get another content, tombstones stay.
    key = F.expr("IF(CAST(key AS STRING) IN ('key-0', 'key-2'), CAST('one' AS BINARY), key)")
    value = F.expr("IF(CAST(value AS STRING) = '{7}', '{8}', REPLACE(CAST(value AS STRING), '2', '3'))")
    return records.withColumn("key", key).withColumn("value", value)

def by_kind(records):
    # All are of one kind but cups; each row is in a task of its own.
    rows = total(records).withColumn("kind", F.expr("IF(item = 'cup', 'cup', 'other')"))
    return rows.select("kind", "item", "offset").repartitionByRange(2, "offset").drop("offset")

def of_one_kind(records):
    return by_kind(records).withColumn("kind", F.lit("all"))

def rejected_twice(records):
    # Two rows of each record, of which one would be a dead letter.
    rows = total(records).withColumn("copy", F.explode(F.array(F.lit(0), F.lit(1))))
    return rows.withColumn("rejected_because", F.expr("IF(copy = 1, 'a copy', NULL)")).drop("copy")

def marked(records):
    return total(records).withColumn("rejected_because", F.expr("IF(item = 'cup', 'no cups', NULL)"))
"""
ORDERS = JsonDecoder(fields="item STRING, cents INT, pieces INT")
OUTPUT = ElasticsearchOutput(hosts="http://127.0.0.1:1", index="orders")


def order(item: str, cents: int, pieces: int) -> bytes:
    return json.dumps({"item": item, "cents": cents, "pieces": pieces}).encode()


VALUES = [order("cup", 250, 2), order("pot", 100, 3), b"junk"]
LATER = [order("pot", 100, 1), order("pan", 300, 2)]


@pytest.fixture
def orders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_batch_ledger: Make, make_records: Records
) -> Iterator[Make]:
    """Builds a stream of orders with two batches, at 10 s and at 20 s."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "order_code.py").write_text(CODE)
    inputs = KafkaInput(bootstrap_servers="localhost:9092", topics="clicks", value_decoder=ORDERS)

    def make(first: list[bytes | None] = VALUES, second: list[bytes | None] = LATER, **fields: Any) -> Any:
        spark = SparkSettings(py_files=(str(tmp_path / "code"),))
        given = {"inputs": inputs, "outputs": OUTPUT, "transform": "order_code:total", "spark": spark} | fields
        batch = make_batch_ledger(**given)
        batch.add(make_records(first))
        batch.allocate()
        batch.add(make_records(second, first_offset=len(first)))
        batch.allocate()
        return batch

    yield make
    sys.modules.pop("order_code", None)


@pytest.fixture
def diff(spark: SparkSession, tmp_path: Path) -> Callable[..., ReplayDiff]:
    def run(batch: Any, transform: str, from_ms: int = 10_000, to_ms: int = 20_000, **options: Any) -> ReplayDiff:
        folder = tmp_path / f"diff-{len(list(tmp_path.iterdir()))}"
        context = StreamContext(batch.stream, batch.ledger)
        given = {"transform": transform, "from_ms": from_ms, "to_ms": to_ms, **options}
        return diff_replay(context, spark, folder, **given)

    return run


def test_new_changed_and_gone_documents_are_counted_and_shown(orders: Make, diff: Callable[..., ReplayDiff]) -> None:
    batch = orders(transform="order_code:cheap")
    before = batch.ledger.snapshots.take("clicks")
    found = diff(batch, "order_code:corrected")
    (output,) = found.outputs
    assert (found.batches, found.records) == (2, 5)
    # Before: two pots (300, 100). After: two pots with other totals, and the pan.
    assert (output.new, output.changed, output.gone, output.same) == (1, 2, 0, 0)
    assert output.changed_fields == {"total": 2}
    assert (output.transform_before, output.transform_after) == ("order_code:cheap", "order_code:corrected")
    assert [(each.id, each.before, each.after, each.fields) for each in output.examples] == [
        ("clicks+0+4", None, '{"item":"pan","total":600}', ()),
        ("clicks+0+1", '{"item":"pot","total":300}', '{"item":"pot","total":301}', ("total",)),
        ("clicks+0+3", '{"item":"pot","total":100}', '{"item":"pot","total":101}', ("total",)),
    ]
    after = batch.ledger.snapshots.take("clicks")
    assert (after.batches, after.outputs, after.newest_attempts) == (before.batches, {}, {})
    (back,) = diff(orders_with(batch, "order_code:corrected"), "order_code:cheap").outputs
    assert (back.new, back.changed, back.gone, back.same) == (0, 2, 1, 0)


def orders_with(batch: Any, transform: str) -> Any:
    class Changed:
        stream = batch.stream.model_copy(update={"transform": transform})
        ledger = batch.ledger

    return Changed


def test_a_document_of_another_index_is_another_one(orders: Make, diff: Callable[..., ReplayDiff]) -> None:
    """The index is the item of a row; the other transform calls a pan a pot."""
    output = OUTPUT.model_copy(update={"index": "orders-{item}"})
    (found,) = diff(orders(outputs=output), "order_code:without_pans").outputs
    assert (found.new, found.changed, found.gone, found.same) == (1, 0, 1, 3)
    assert [(each.index, each.id, each.before is None) for each in found.examples] == [
        ("orders-pot", "clicks+0+4", True),
        ("orders-pan", "clicks+0+4", False),
    ]


def test_the_order_of_fields_is_no_change(orders: Make, diff: Callable[..., ReplayDiff]) -> None:
    (output,) = diff(orders(), "order_code:reordered").outputs
    assert (output.new, output.changed, output.gone, output.same) == (0, 0, 0, 4)
    assert output.examples == ()


def test_only_the_batches_of_the_range_are_compared(orders: Make, diff: Callable[..., ReplayDiff]) -> None:
    later = diff(orders(), "order_code:corrected", from_ms=20_000, to_ms=90_000)
    assert (later.batches, later.records, later.outputs[0].changed) == (1, 2, 1)


def test_an_id_that_recurs_counts_as_at_the_end_of_the_range(orders: Make, diff: Callable[..., ReplayDiff]) -> None:
    output = OUTPUT.model_copy(update={"document_ids": ColumnIds(columns=("item",), with_batch_time=False)})
    batch = orders(outputs=output, transform="order_code:by_item")
    (found,) = diff(batch, "order_code:by_item_doubled").outputs
    assert (found.new, found.changed, found.gone, found.same) == (0, 3, 0, 0)
    pot = next(each for each in found.examples if each.id == "pot")
    assert json.loads(pot.before or "")["pieces"] == 1 and json.loads(pot.after or "")["pieces"] == 2


def test_a_document_that_one_version_deletes_is_gone(orders: Make, diff: Callable[..., ReplayDiff]) -> None:
    output = OUTPUT.model_copy(update={"document_ids": KeyIds()})
    inputs = KafkaInput(bootstrap_servers="localhost:9092", topics="clicks")
    batch = orders([b'{"a": 1}', b"{7}"], [None, b'{"a": 2}'], outputs=output, inputs=inputs, transform=None)
    (found,) = diff(batch, "order_code:changed_values").outputs
    # Before, key-0 has a document; after, the tombstone of the same key has deleted it.
    assert (found.new, found.changed, found.gone, found.same) == (0, 2, 1, 0)
    assert {each.id: each.fields for each in found.examples} == {"key-0": (), "key-1": (WHOLE,), "key-3": ("a",)}


def test_rows_that_only_one_version_rejects_are_counted(orders: Make, diff: Callable[..., ReplayDiff]) -> None:
    (output,) = diff(orders(), "order_code:marked").outputs
    assert (output.rejected_before, output.rejected_after) == (0, 1)
    assert (output.gone, output.same) == (1, 3)


def test_what_cannot_be_compared_is_refused(orders: Make, diff: Callable[..., ReplayDiff]) -> None:
    batch = orders()
    with pytest.raises(PreviewError, match="no batch from"):
        diff(batch, "order_code:corrected", from_ms=50_000, to_ms=60_000)
    with pytest.raises(PreviewError, match="module:function"):
        diff(batch, "corrected")
    with pytest.raises(PreviewError, match="no output 'other'"):
        diff(batch, "order_code:corrected", output_id="other")


def test_ids_that_collide_in_a_batch_are_counted_and_shown(orders: Make, diff: Callable[..., ReplayDiff]) -> None:
    ids = ColumnIds(columns=("kind",), with_batch_time=False)
    batch = orders(outputs=OUTPUT.model_copy(update={"document_ids": ids}), transform="order_code:by_kind")
    (found,) = diff(batch, "order_code:of_one_kind").outputs
    # The first batch has a cup and a pot, the second one a pot and a pan, in two tasks each.
    assert found.collisions_before == Collisions(1, (CollidingId("other", 20_000, 2),))
    assert found.collisions_after == Collisions(2, (CollidingId("all", 10_000, 2), CollidingId("all", 20_000, 2)))
    given = ["replay", "diff", "clicks", "--from", "10000", "--until", "20000", "--transform", "order_code:of_one_kind"]
    printed = CliRunner().invoke(app, [*given, "--limit", "1", "--ledger", batch.stream.ledger])
    assert "Ids that several rows of one batch share, which would fail its run: 1 before and 2 after." in printed.stdout
    assert re.findall(r"after +all +(\S+) +2", printed.stdout) == ["1970-01-01T00:00:10Z"], printed.stdout


def test_a_dead_letter_collides_with_its_records_document(orders: Make, diff: Callable[..., ReplayDiff]) -> None:
    (found,) = diff(orders(), "order_code:rejected_twice").outputs
    assert (found.rejected_after, found.same) == (4, 4)
    assert (found.collisions_before.number, found.collisions_after.number) == (0, 4)


def test_versions_of_a_key_in_one_batch_do_not_collide(orders: Make, diff: Callable[..., ReplayDiff]) -> None:
    output = OUTPUT.model_copy(update={"document_ids": KeyIds()})
    inputs = KafkaInput(bootstrap_servers="localhost:9092", topics="clicks")
    first: list[bytes | None] = [b'{"a": 1}', b'{"a": 2}', b'{"a": 3}']
    batch = orders(first, [b'{"a": 4}'], outputs=output, inputs=inputs, transform=None)
    (found,) = diff(batch, "order_code:changed_values").outputs
    # Keys 0 and 2 of the first batch have become one.
    assert (found.new, found.gone, found.collisions_after) == (1, 2, Collisions(0, ()))


def test_batches_that_are_not_read_are_listed_with_the_reason(
    orders: Make, diff: Callable[..., ReplayDiff], make_records: Records
) -> None:
    batch = orders(outputs=OUTPUT)
    context = StreamContext(batch.stream, batch.ledger)
    batch.add(make_records(LATER, first_offset=5))
    assert allocate(context, 40_000, takes_over=True).batch.absorbed == (30_000,)
    assert diff(batch, "order_code:corrected", to_ms=40_000).not_read == ()
    reason = "its records are in batch 1970-01-01T00:00:40Z, which is "
    early = diff(batch, "order_code:corrected", to_ms=30_000)
    assert early.batches == 2
    assert early.not_read == (UnreadBatches(30_000, 30_000, f"{reason}after the range"),)
    batch.ledger.batches.abandon("clicks", 40_000, "no use")
    assert diff(batch, "order_code:corrected", to_ms=40_000).not_read == (
        UnreadBatches(30_000, 30_000, f"{reason}not read"),
        UnreadBatches(40_000, 40_000, "abandoned"),
    )
    batch.ledger.batches.abandon("clicks", 10_000, "no use")
    # Its blocks share a segment with the other batches', so a real cleanup would not take them.
    with contextlib.closing(sqlite3.connect(batch.stream.ledger.removeprefix("sqlite:///"))) as database, database:
        database.execute("UPDATE batches SET cleaned_at_ms = 1 WHERE batch_time_ms = 10000")
    batch.ledger.batches.mark_checkpointed("clicks", [batch.ledger.batches.get("clicks", 10_000).filed("result", 1)])
    assert batch.ledger.removal.remove_batches("clicks", 20_000) == 1
    kept = "removed, since the stream keeps batches for limits.history"
    with pytest.raises(PreviewError, match=r"no batch from .* 1970-01-01T00:00:10Z: removed"):
        diff(batch, "order_code:corrected", to_ms=10_000)
    given = ["replay", "diff", "clicks", "--from", "10000", "--until", "20000", "--transform", "order_code:corrected"]
    printed = CliRunner().invoke(app, [*given, "--ledger", batch.stream.ledger])
    assert f"Not read: 1970-01-01T00:00:10Z: {kept}" in printed.stdout


def test_a_stream_without_an_index_has_no_documents(orders: Make, diff: Callable[..., ReplayDiff]) -> None:
    with pytest.raises(PreviewError, match="no Elasticsearch output"):
        diff(orders(outputs=ConsoleOutput()), "order_code:corrected")


def test_the_command_prints_table_and_json_with_limited_examples(spark: SparkSession, orders: Make) -> None:
    batch = orders()
    given = ["replay", "diff", "clicks", "--from", "10000", "--until", "20000", "--transform", "order_code:corrected"]
    given += ["--ledger", batch.stream.ledger]
    printed = CliRunner().invoke(app, given)
    assert printed.exit_code == 0, printed.output
    assert "2 batches of clicks" in printed.stdout and "Nothing was written." in printed.stdout
    assert "Output elasticsearch, order_code:total and order_code:corrected" in printed.stdout
    assert "(1 of 2)" in printed.stderr
    shown = json.loads(CliRunner().invoke(app, [*given, "--json", "--limit", "1"]).stdout)
    (output,) = shown["outputs"]
    assert (output["new"], output["changed"], output["gone"], output["same"]) == (0, 2, 1, 1)
    assert len(output["examples"]) == 2, "one that changed, one that is gone"
