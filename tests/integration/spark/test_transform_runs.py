"""`headrace.testing.transforms`: a transform on given records is run as a batch runs it."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from headrace.elasticsearch.errors import DuplicateIdsError, UnsuitableRowsError
from headrace.spark.outputs.functions import print_batch
from headrace.spark.records.batch_frames import read_inputs
from headrace.spark.records.transforms import TransformError
from headrace.stream import (
    ColumnIds,
    ConsoleOutput,
    ElasticsearchOutput,
    JsonDecoder,
    KafkaInput,
    KeyIds,
    SparkSettings,
    Stream,
    Utf8Decoder,
)
from headrace.testing.transforms import KafkaRecord, TransformTestError, run_transform

DOCUMENT = Path(__file__).parents[3] / "docs" / "testing.md"
ORDERS = """
from pyspark.sql import functions as F

from headrace.stream import ElasticsearchOutput, JsonDecoder, KafkaInput, Stream

stream = Stream(
    name="orders",
    inputs=KafkaInput(
        connection="kafka_default",
        topics="orders",
        value_decoder=JsonDecoder(fields="item STRING, cents INT, pieces INT"),
    ),
    outputs=ElasticsearchOutput(connection="elasticsearch_default", index="orders"),
    transform="orders:with_total",
    batch_interval="10 s",
    storage="/tmp/orders",
    ledger="sqlite:////tmp/orders/ledger.db",
)


def with_total(records):
    order = F.col("value")
    return records.select("topic", "partition", "offset", "value.*", (order.cents * order.pieces).alias("total"))
"""
CODE = """
from pyspark.sql import functions as F

def upper(records):
    return records.withColumn("value", F.upper("value"))

def twice(records):
    return records.select("topic", "partition", "offset", F.explode(F.array(F.lit(1), F.lit(2))).alias("n"))

def without_offset(records):
    return records.select("topic", F.lit(1).alias("n"))

def of_batch(records, batch):
    return records.select(
        F.lit(str(batch.batch_time)).alias("time"), F.lit(batch.parameters["n"]).alias("n"), "timestamp", "headers"
    )

def by_python(records):
    return records.select("topic", "partition", "offset", F.udf(lambda text: text[::-1])("value").alias("back"))

def both(left, right):
    return {"a": left.select("value"), "b": right.select("value")}

def of_all_types(records):
    first = "TIMESTAMP'0001-01-01 00:00:00'"
    return records.selectExpr(
        f"{first} AS at", f"array({first}, NULL) AS many", f"map('k', named_struct('at', {first})) AS named",
        "DATE'0001-01-01' AS day", "TIMESTAMP_NTZ'0001-01-01 00:00:00' AS local",
        "TIMESTAMP'2026-01-02 03:04:05.6' AS now", "1.10BD AS exact", "X'ff' AS bytes", "INTERVAL '1' SECOND AS lasts",
        "NULL AS nothing", "timestamp",
    )

def nothing(records):
    return None

def flat(records):
    return records.select("topic", "partition", "offset", "value.*")

def of_all_topics(records):
    return records.select("partition", "offset", "value.*")

def fields_alone(records):
    return records.select("value.*")

def a_field(records):
    return records.select("topic", "partition", "offset", F.col("value.a").alias("value"))

def seen(records):
    return records.withColumn("timestamp", F.lit("now"))

def struct_alone(records):
    return records.withColumn("value", F.struct(F.col("value.a")))
"""


@pytest.fixture
def of_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Stream]]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "run_code.py").write_text(CODE)
    source = KafkaInput(bootstrap_servers="localhost:9092", topics="clicks", value_decoder=Utf8Decoder())

    def make(function: str | None, **fields: Any) -> Stream:
        given: dict[str, Any] = {
            "name": "clicks",
            "inputs": source,
            "outputs": ConsoleOutput(),
            "transform": None if function is None else f"run_code:{function}",
            "batch_interval": "10 s",
            "storage": tmp_path / "storage",
            "ledger": f"sqlite:///{tmp_path}/ledger.db",
            "spark": SparkSettings(py_files=(str(tmp_path / "run_code.py"),)),
        }
        return Stream(**given | fields)

    yield make
    sys.modules.pop("run_code", None)


def test_the_example_of_the_documentation(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = DOCUMENT.read_text()
    marker = f"<!-- tested by {Path(__file__).relative_to(DOCUMENT.parents[1])} -->"
    (example,) = re.findall(rf"{re.escape(marker)}\n```python\n(.*?)```", text, re.DOTALL)
    (tmp_path / "orders.py").write_text(ORDERS)
    monkeypatch.syspath_prepend(str(tmp_path))
    names: dict[str, Any] = {}
    exec(compile(example, str(DOCUMENT), "exec"), names)  # noqa: S102 - our own documentation
    tests = [function for name, function in names.items() if name.startswith("test_")]
    assert len(tests) == 3
    for function in tests:
        function(spark)
    sys.modules.pop("orders", None)


def test_the_records_have_the_columns_that_a_batch_has(
    spark: SparkSession, of_code: Any, make_batch_ledger: Any, make_records: Callable[..., pa.RecordBatch]
) -> None:
    batch = make_batch_ledger(inputs=KafkaInput(bootstrap_servers="x:1", topics="clicks", value_decoder=Utf8Decoder()))
    batch.add(make_records([b"a"]))
    time_ms = batch.allocate()
    origins = list(batch.ledger.batches.origins("clicks", [time_ms]).values())
    of_batch = read_inputs(spark, batch.stream, origins)["records"]
    of_test = run_transform(batch.stream, ["a"], spark=spark).inputs["records"]
    assert of_test.decoded.dtypes == of_batch.decoded.dtypes
    assert of_test.original.dtypes == of_batch.original.dtypes


def test_a_transform_gets_the_batch_and_the_record(spark: SparkSession, of_code: Any) -> None:
    at = datetime(2026, 11, 21, 14, 5, tzinfo=UTC)
    record = KafkaRecord("a", timestamp=at, headers=(("trace", b"\x01"),))
    stream = of_code("of_batch", parameters={"n": 1})
    run = run_transform(stream, [record], spark=spark, batch_time=at, parameters={"n": 2})
    (row,) = run.rows()
    assert (row["time"], row["n"], row["headers"]) == (str(at), 2, [{"key": "trace", "value": b"\x01"}])
    assert row["timestamp"].astimezone(UTC) == at


def test_rows_may_have_times_of_the_first_day_of_the_year_1(spark: SparkSession, of_code: Any) -> None:
    """C# writes it for a time that is not set. Spark's own collect fails."""
    run = run_transform(of_code("of_all_types"), ["a"], spark=spark)
    (row,) = run.rows()
    first = datetime(1, 1, 1)
    assert (row["at"], row["many"], row["named"]) == (first, [first, None], {"k": {"at": first}})
    # The others are what Spark's own collect gives.
    others = [name for name in row if name not in ("at", "many", "named")]
    assert {name: row[name] for name in others} == run.frames["console"].select(others).collect()[0].asDict()
    out = io.StringIO()
    assert print_batch(run.frames["console"], batch_time_ms=0, rows=1, out=out) == 1
    assert "datetime.datetime(1, 1, 1, 0, 0)" in out.getvalue()


def test_python_functions_of_the_transform_run_in_workers(spark: SparkSession, of_code: Any) -> None:
    stream = of_code("by_python")
    assert [row["back"] for row in run_transform(stream, ["ab", "cd"], spark=spark).rows()] == ["ba", "dc"]


def test_each_output_gets_its_frame_and_each_input_its_records(spark: SparkSession, of_code: Any) -> None:
    inputs = tuple(
        KafkaInput(id=name, bootstrap_servers="x:1", topics=name, value_decoder=Utf8Decoder())
        for name in ("left", "right")
    )
    stream = of_code("both", inputs=inputs, outputs=(ConsoleOutput(id="a"), ConsoleOutput(id="b")))
    run = run_transform(stream, {"left": ["l"], "right": ["r", "s"]}, spark=spark)
    assert ([row["value"] for row in run.rows("a")], len(run.rows("b"))) == (["l"], 2)
    assert run_transform(stream, {"left": ["l"]}, spark=spark).rows("b") == []
    with pytest.raises(TransformTestError, match="by input id: left, right"):
        run_transform(stream, ["l"], spark=spark)
    with pytest.raises(TransformTestError, match=r"no input middle\. Its inputs are left, right"):
        run_transform(stream, {"middle": []}, spark=spark)
    with pytest.raises(TransformTestError, match="Name one of its outputs"):
        run.rows()


def elasticsearch(**fields: Any) -> ElasticsearchOutput:
    return ElasticsearchOutput(hosts="http://127.0.0.1:1", index="clicks", **fields)


def test_a_value_without_a_transform_is_the_document_or_rejected(spark: SparkSession, of_code: Any) -> None:
    stream = of_code(None, outputs=elasticsearch())
    good, junk, nothing = run_transform(stream, ['{"n":  1}', "junk", None], spark=spark).documents()
    assert (good.id, good.document, good.record) == ("clicks+0+0", '{"n":  1}', ("clicks", 0, 0))
    assert (junk.id, junk.rejected and junk.rejected.type) == (None, "malformed_document")
    assert nothing.rejected is not None and nothing.rejected.type == "tombstone"


def test_documents_by_key_have_offset_versions_and_null_deletes(spark: SparkSession, of_code: Any) -> None:
    stream = of_code(None, outputs=elasticsearch(document_ids=KeyIds()))
    records = [KafkaRecord('{"n":1}', key="cup", offset=7), KafkaRecord(None, key="cup", offset=9)]
    documents = run_transform(stream, records, spark=spark).documents()
    assert [(each.id, each.version, each.document) for each in documents] == [("cup", 7, '{"n":1}'), ("cup", 9, None)]


def test_what_fails_a_batch_fails_the_test(spark: SparkSession, of_code: Any) -> None:
    with pytest.raises(DuplicateIdsError, match=r"clicks\+0\+0"):
        run_transform(of_code("twice", outputs=elasticsearch()), ["a"], spark=spark).documents()
    with pytest.raises(UnsuitableRowsError, match="'partition', 'offset'"):
        run_transform(of_code("without_offset", outputs=elasticsearch()), ["a"], spark=spark).documents()
    with pytest.raises(TransformError, match="returned a NoneType"):
        run_transform(of_code("nothing"), ["a"], spark=spark)
    with pytest.raises(TransformError, match=r"takes \(left, right\)"):
        run_transform(of_code("both"), ["a"], spark=spark)


def test_a_file_that_is_no_export_is_refused(spark: SparkSession, of_code: Any, tmp_path: Path) -> None:
    from pyarrow import parquet

    parquet.write_table(pa.table({"a": [1]}), tmp_path / "a.parquet")
    with pytest.raises(TransformTestError, match="no column raw_key, raw_value, undecodable_reason"):
        run_transform(of_code("upper"), tmp_path / "a.parquet", spark=spark)


def documents_of(
    spark: SparkSession, make: Any, function: str, fields: str, value: dict[str, Any], **ids: Any
) -> list[tuple[str | None, Any]]:
    source = KafkaInput(bootstrap_servers="x:1", topics="clicks", value_decoder=JsonDecoder(fields=fields))
    stream = make(function, inputs=source, outputs=elasticsearch(**ids))
    found = run_transform(stream, [value], spark=spark).documents()
    return [(each.id, each.document and json.loads(each.document)) for each in found]


@pytest.mark.parametrize(
    ("fields", "value"),
    [
        ("timestamp BIGINT, value STRUCT<celsius: DOUBLE>", {"timestamp": 7, "value": {"celsius": 21.5}}),
        ("value STRUCT<celsius: DOUBLE>", {"value": {"celsius": 21.5}}),
        ("value STRING", {"value": "x"}),
        (
            "incarnation INT, key STRING, headers ARRAY<INT>, timestampType STRING",
            {"incarnation": 7, "key": "k", "headers": [1], "timestampType": "t"},
        ),
    ],
)
def test_a_field_is_not_taken_for_the_records_own_by_its_name(
    spark: SparkSession, of_code: Any, fields: str, value: dict[str, Any]
) -> None:
    assert documents_of(spark, of_code, "flat", fields, value) == [("clicks+0+0", value)]


def test_a_value_is_the_document_only_beside_the_records_columns(spark: SparkSession, of_code: Any) -> None:
    value = {"a": 1, "b": 2}
    (alone,) = documents_of(spark, of_code, "struct_alone", "a INT, b INT", value)
    (beside,) = documents_of(spark, of_code, "seen", "a INT, b INT", value)
    assert (alone[1], beside[1]) == ({"a": 1}, {"value": value, "timestamp": "now"})
    assert documents_of(spark, of_code, "a_field", "a STRUCT<b: INT>", {"a": {"b": 1}}) == [("clicks+0+0", {"b": 1})]


def test_a_field_named_key_is_not_taken_for_the_records_key(spark: SparkSession, of_code: Any) -> None:
    with pytest.raises(UnsuitableRowsError, match="'key' from the record's decoded value, and the name is reserved"):
        documents_of(spark, of_code, "flat", "key STRING", {"key": "k"}, document_ids=KeyIds())


@pytest.mark.parametrize(
    ("function", "field", "message"),
    [
        ("of_all_topics", "topic", "'topic' from the record's decoded value, and the name is reserved"),
        ("flat", "topic", "several columns named 'topic'"),
        ("flat", "rejected_because", "'rejected_because' from the record's decoded value, and the name is reserved"),
    ],
)
def test_a_field_with_a_reserved_name_is_refused_by_its_name(
    spark: SparkSession, of_code: Any, function: str, field: str, message: str
) -> None:
    with pytest.raises(UnsuitableRowsError, match=message):
        documents_of(spark, of_code, function, f"{field} STRING", {field: "x"})


def test_documents_of_own_ids_keep_fields_named_like_a_position(spark: SparkSession, of_code: Any) -> None:
    value = {"topic": "audit", "partition": 1, "offset": 5}
    ids = ColumnIds(columns=("topic", "offset"), with_batch_time=False)
    found = documents_of(
        spark, of_code, "fields_alone", "topic STRING, partition INT, offset BIGINT", value, document_ids=ids
    )
    assert found == [("audit+5", value)]


def test_times_keep_their_microseconds_in_documents(spark: SparkSession, of_code: Any) -> None:
    value = {"at": "2026-01-02T03:04:05.123456Z"}
    assert documents_of(spark, of_code, "flat", "at TIMESTAMP", value) == [("clicks+0+0", value)]
    local = {"at": "2026-01-02T03:04:05.123456"}
    assert documents_of(spark, of_code, "flat", "at TIMESTAMP_NTZ", local) == [("clicks+0+0", local)]
