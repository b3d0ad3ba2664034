"""Ids of documents through whole batches: topics created again, several rows of a record, and documents of others.

Every record of a batch is a document, a dead letter or in a count, or the batch fails and says which ids are at fault.
"""

from __future__ import annotations

import json
import sys
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from headrace.errors import HeadraceError
from headrace.stream import ElasticsearchOutput, JsonDecoder, KafkaInput, KeyIds, RecordIds, SparkSettings

# The first is the README's.
TRANSFORMS = """
from pyspark.sql import functions as F

def with_total(records):
    order = F.col("value")
    return records.select("topic", "partition", "offset", "value.*", (order.cents * order.pieces).alias("total"))

def east_and_west(east, west):
    return with_total(east).unionByName(with_total(west))

def east_and_west_kept(east, west):
    rows = [side.select("topic", "partition", "offset", "incarnation", "value.*") for side in (east, west)]
    return rows[0].unionByName(rows[1])

def lines(records):
    return records.select("topic", "partition", "offset", F.posexplode("value.lines").alias("line", "sku"))

def lines_louder(records):
    return lines(records).withColumn("sku", F.upper("sku"))

def lines_by_key(records):
    return records.select("topic", "partition", "offset", "key", F.explode("value.lines").alias("sku"))

def rejected_lines(records):
    bad = F.when(F.col("sku") == "bad", "bad line")
    return lines(records).withColumn("rejected_because", bad)

def twice_in_other_tasks(records):
    rows = with_total(records)
    return rows.unionByName(rows.withColumn("total", F.lit(0)))
"""
FIELDS = "item STRING, cents INT, pieces INT, lines ARRAY<STRING>"


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    name = f"ids_{uuid.uuid4().hex}"
    (tmp_path / f"{name}.py").write_text(TRANSFORMS)
    yield str(tmp_path / f"{name}.py")
    sys.modules.pop(name, None)


class Shop:
    """A stream of orders into an index of its own, whose batches are run one by one."""

    def __init__(self, spark: SparkSession, batches: Any, records: Any, url: str) -> None:
        self._spark = spark
        self.batches = batches
        self._records = records
        self._url = url
        (output,) = batches.stream.outputs
        self.index = output.index

    def add(self, *orders: dict[str, Any], input_id: str = "records", **where: Any) -> None:
        values = [json.dumps(order).encode() for order in orders]
        self.batches.add(self._records(values, topic="orders", **where), input_id=input_id)

    def run(self, batch_time_ms: int | None = None, **changes: Any) -> dict[str, Any]:
        """Run the next batch, or one again; its output's counts. ``changes`` are those of the stream's definition."""
        again = batch_time_ms is not None
        time_ms = batch_time_ms if again else self.batches.allocate()
        attempt = self.batches.begin(time_ms, force=again)
        stream = self.batches.stream
        if changes:
            stream = type(stream).model_validate({**stream.model_dump(), **changes})
        (counts,) = self.batches.run(self._spark, attempt, stream=stream).outputs.values()
        return counts

    def documents(self, suffix: str = "") -> dict[str, Any]:
        self.ask("POST", f"/{self.index}{suffix}/_refresh?ignore_unavailable=true")
        hits = self.ask("POST", f"/{self.index}{suffix}/_search?ignore_unavailable=true", {"size": 1000})["hits"][
            "hits"
        ]
        return {hit["_id"]: hit["_source"] for hit in hits}

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(self._url + path, data, headers, method=method)  # noqa: S310
        with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310
            return json.load(answer)


@pytest.fixture
def make_shop(
    spark: SparkSession, make_batch_ledger: Any, make_records: Any, elasticsearch: str, code: str
) -> Callable[..., Shop]:
    def make(transform: str, *, inputs: tuple[str, ...] = ("records",), **output: Any) -> Shop:
        batches = make_batch_ledger(
            inputs=tuple(
                KafkaInput(
                    id=input_id,
                    bootstrap_servers=f"{input_id}:9092",
                    topics="orders",
                    value_decoder=JsonDecoder(fields=FIELDS),
                )
                for input_id in inputs
            ),
            outputs=ElasticsearchOutput(hosts=elasticsearch, index=f"ids-{uuid.uuid4().hex[:12]}", **output),
            transform=f"{Path(code).stem}:{transform}",
            spark=SparkSettings(py_files=(code,)),
        )
        return Shop(spark, batches, make_records, elasticsearch)

    return make


def orders(count: int, *, cents: int = 100, **more: Any) -> list[dict[str, Any]]:
    return [{"item": "cup", "cents": cents, "pieces": number, **more} for number in range(count)]


def test_the_readme_transform_loses_nothing_of_a_recreated_topic(make_shop: Any) -> None:
    """It drops the incarnation. The topic is created again in the middle of a batch, which has its offsets twice."""
    shop = make_shop("with_total")
    shop.add(*orders(10))
    assert shop.run()["created"] == 10
    shop.add(*orders(10, cents=101), first_offset=10)
    shop.add(*orders(15, cents=200), incarnation=2)
    shop.add(*orders(5, cents=300), incarnation=3)
    assert (counts := shop.run())["created"] == 30, counts
    shop.add(*orders(5, cents=301), first_offset=5, incarnation=3)
    assert shop.run()["created"] == 5
    found = shop.documents()
    assert len(found) == 45
    assert found["orders+0+3"] == {"item": "cup", "cents": 100, "pieces": 3, "total": 300}
    assert [found[f"orders+0+3+{number}"]["cents"] for number in (2, 3)] == [200, 300]
    assert shop.run(20_000)["repeated"] == 30


def test_one_topic_name_on_two_clusters_needs_the_incarnation(make_shop: Any) -> None:
    """Without it, rows do not say which cluster they are from, and are refused."""
    shop = make_shop("east_and_west", inputs=("east", "west"))
    shop.add(*orders(10), input_id="east")
    shop.add(*orders(5), input_id="west", incarnation=2)
    with pytest.raises(HeadraceError, match=r"no column 'incarnation'.*'orders'.*keep the column incarnation"):
        shop.run()
    assert shop.documents() == {}
    kept = shop.batches.stream.transform.replace("east_and_west", "east_and_west_kept")
    assert shop.run(10_000, transform=kept)["created"] == 15
    assert "orders+0+4+2" in shop.documents()


@pytest.mark.parametrize("method", ["create", "index"])
def test_several_rows_of_a_record_need_an_id_rule(make_shop: Any, method: str) -> None:
    shop = make_shop("lines", write_method=method)
    shop.add(*orders(2, lines=["a", "a", "b"]))
    with pytest.raises(HeadraceError, match=r"same document id.*'orders\+0\+0'.*RecordIds\(rows="):
        shop.run()


def test_rows_of_a_record_are_documents_by_their_position(make_shop: Any) -> None:
    shop = make_shop("lines", document_ids=RecordIds(rows="line"))
    shop.add({"lines": ["a", "a", "b"]}, {"lines": []}, {"lines": ["c"]})
    assert shop.run()["created"] == 4
    assert shop.documents() == {
        "orders+0+0~0": {"line": 0, "sku": "a"},
        "orders+0+0~1": {"line": 1, "sku": "a"},
        "orders+0+0~2": {"line": 2, "sku": "b"},
        "orders+0+2~0": {"line": 0, "sku": "c"},
    }
    assert shop.run(10_000)["repeated"] == 4
    louder = shop.batches.stream.transform.replace("lines", "lines_louder")
    assert (counts := shop.run(10_000, transform=louder))["kept"] == 4, counts
    assert shop.documents()["orders+0+0~2"]["sku"] == "b"


def test_rejected_rows_of_a_record_have_a_dead_letter_each(make_shop: Any) -> None:
    shop = make_shop("rejected_lines", document_ids=RecordIds(rows="line"))
    shop.add({"lines": ["bad", "good", "bad"]})
    for again in (None, 10_000):
        assert (counts := shop.run(again))["dead_lettered"] == 2, counts
    rows = {id_.rpartition("/")[2] for id_ in shop.documents("-dead-letters")}
    assert (rows, list(shop.documents())) == ({"orders+0+0~0", "orders+0+0~2"}, ["orders+0+0~1"])


def test_rows_of_one_key_in_one_record_fail_the_batch(make_shop: Any) -> None:
    shop = make_shop("lines_by_key", document_ids=KeyIds())
    shop.add({"lines": ["a", "b"]})
    with pytest.raises(HeadraceError, match=r"'key-0'.*A key has one document"):
        shop.run()


def test_rows_of_a_record_in_different_tasks_fail_the_batch_too(make_shop: Any) -> None:
    shop = make_shop("twice_in_other_tasks")
    shop.add(*orders(4))
    for again in (None, 10_000):
        with pytest.raises(HeadraceError, match=r"'orders\+0\+\d'.*RecordIds\(rows="):
            shop.run(again)
    assert shop.batches.ledger.attempts.outputs("clicks", 10_000)[0].state.value == "failed"


def test_documents_of_others_are_not_taken_for_the_batchs_own(make_shop: Any) -> None:
    """Not by the next attempt either, and not after one that failed before it wrote anything."""
    shop = make_shop("with_total")
    shop.ask("PUT", f"/{shop.index}/_doc/orders+0+1", {"of": "another stream"})
    shop.add(*orders(3))
    with pytest.raises(HeadraceError, match="nosuch"):
        shop.run(transform=shop.batches.stream.transform.replace("with_total", "nosuch"))
    for again in (10_000, 10_000):
        with pytest.raises(HeadraceError, match=r"other documents under 1 ids of the batch \('orders\+0\+1'\)"):
            shop.run(again)
    replacing = {"outputs": [{**shop.batches.stream.outputs[0].model_dump(), "write_method": "index"}]}
    assert shop.run(10_000, **replacing)["updated"] == 3
    assert shop.documents()["orders+0+1"]["total"] == 100
