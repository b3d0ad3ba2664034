from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from tests.integration.spark.conftest import read_log

from headrace.spark.records.decoding import decode_input
from headrace.stream import JsonDecoder, KafkaInput, Utf8Decoder

Records = Callable[..., pa.RecordBatch]


def decoded(spark: SparkSession, log: Any, batch: pa.RecordBatch, **decoders: Any) -> Any:
    log.add(batch)
    manifest = log.manifest()
    source = KafkaInput(bootstrap_servers="localhost:9092", topics="clicks", **decoders)
    return decode_input(spark, source, partial(read_log, spark, manifest), folder_url="")


def test_bytes_stay_as_they_are(spark: SparkSession, written_log: Any, make_records: Records) -> None:
    views = decoded(spark, written_log, make_records([b"\xff"]))
    assert views.decoded is views.original
    assert views.undecodable is None
    assert [row.value for row in views.decoded.collect()] == [b"\xff"]


def test_utf8_becomes_text_and_other_bytes_are_kept_whole(
    spark: SparkSession, written_log: Any, make_records: Records
) -> None:
    values = ["grün".encode(), b"broken \xff", b"", None, b"\xc0\x80"]
    views = decoded(spark, written_log, make_records(values), value_decoder=Utf8Decoder())
    assert {row.offset: row.value for row in views.decoded.collect()} == {0: "grün", 2: "", 3: None}
    assert {row.offset: row.value for row in views.original.collect()} == {0: "grün".encode(), 2: b"", 3: None}
    bad = {row.offset: row for row in views.undecodable.collect()}
    assert {offset: row.value for offset, row in bad.items()} == {1: b"broken \xff", 4: b"\xc0\x80"}
    assert bad[1].undecodable_reason == "the value is not UTF-8: invalid start byte at byte 7"
    assert bad[1].key == b"key-1"


def test_json_becomes_a_struct_and_what_does_not_fit_stays_whole(
    spark: SparkSession, written_log: Any, make_records: Records
) -> None:
    values: dict[bytes | None, Any] = {
        b'{"id": 1, "name": "a"}': (1, "a"),
        b'{"id": 2}': (2, None),
        b'{"id": 3, "name": "c", "more": true}': (3, "c"),
        None: None,
        b'{"id": "four"}': "bad",
        b'{"id": 5': "bad",
        b"": "bad",
        b"  ": "bad",
        b"null": "bad",
        b"[1]": "bad",
        b"17": "bad",
        b'{"id": 9, "name": "\xff"}': "bad",
        b'{"id": 10, "name": {"deep": 1.10}}': (10, '{"deep": 1.10}'),
        b'{"id": 11} trailing': "bad",
        b'{"id": 12}{"id": 13}': "bad",
        b'{"id": 14}\n{"id": 15}\n': "bad",
        b'{"id": 16}, {"id": 17}': "bad",
        b' {"id": 18}\r\n': (18, None),
        b"{'id': 19, 'name': '}{'}": "bad",
        b'{"id": 20, "name": "}{"}': (20, "}{"),
    }
    views = decoded(
        spark, written_log, make_records(list(values)), value_decoder=JsonDecoder(fields="id INT, name STRING")
    )
    good = {row.offset: row.value and tuple(row.value) for row in views.decoded.collect()}
    bad = {row.offset: row.value for row in views.undecodable.collect()}
    assert sorted([*good, *bad]) == list(range(len(values))), "every record is in exactly one of the two"
    for offset, (value, expected) in enumerate(values.items()):
        if expected == "bad":
            assert bad[offset] == value
        else:
            assert good[offset] == expected
    assert views.decoded.schema["value"].dataType.simpleString() == "struct<id:int,name:string>"
    assert views.undecodable.count() == len(bad)


def test_key_and_value_are_judged_together(spark: SparkSession, written_log: Any, make_records: Records) -> None:
    batch = make_records([b"\xff", b"fine"])
    batch = batch.set_column(0, "key", pa.array([b"\xfe", b"\xfe"], pa.binary()))
    views = decoded(spark, written_log, batch, key_decoder=Utf8Decoder(), value_decoder=Utf8Decoder())
    assert views.decoded.count() == 0
    reasons = {row.offset: row.undecodable_reason for row in views.undecodable.collect()}
    not_utf8 = "not UTF-8: invalid start byte at byte 0"
    assert reasons == {0: f"the key is {not_utf8}; the value is {not_utf8}", 1: f"the key is {not_utf8}"}


VALUES = [b'{"id": 1, "price": 2.5}', b"junk", b'{"id": "x"}', b'{"id": 3}'] * 5
FIELDS = JsonDecoder(fields="id INT, price DOUBLE")


def no_query() -> int:
    raise AssertionError("a query of its own")


@pytest.mark.parametrize(
    "query",
    [
        lambda decoded: decoded,
        lambda decoded: decoded.select("value.id"),
        lambda decoded: decoded.where("value.id = 1"),
        lambda decoded: decoded.alias("a").join(decoded.alias("b"), F.expr("a.offset = b.offset")).select("a.offset"),
        lambda decoded: decoded.union(decoded),
        lambda decoded: decoded.groupBy("value.id").count(),
        lambda decoded: decoded.persist(),
    ],
    ids=["all", "a field", "a condition", "a join with itself", "a union with itself", "an aggregate", "persisted"],
)
def test_a_query_of_all_records_counts_the_undecodable_ones(
    spark: SparkSession, written_log: Any, make_records: Records, query: Callable[[DataFrame], DataFrame]
) -> None:
    views = decoded(spark, written_log, make_records(VALUES), value_decoder=FIELDS)
    query(views.decoded).collect()
    known = replace(views, undecodable=SimpleNamespace(count=no_query))
    assert known.number_undecodable(len(VALUES)) == 10


@pytest.mark.parametrize(
    "query",
    [lambda decoded: decoded.limit(1), lambda decoded: decoded.where("1 = 0"), None],
    ids=["a limit", "a condition that is always false", "no query"],
)
def test_a_query_that_reads_fewer_records_does_not(
    spark: SparkSession, written_log: Any, make_records: Records, query: Callable[[DataFrame], DataFrame] | None
) -> None:
    for first in range(0, 400, 20):
        written_log.add(make_records(VALUES, first_offset=first))
    views = decoded(spark, written_log, make_records(VALUES, first_offset=400), value_decoder=FIELDS)
    if query is not None:
        query(views.decoded).collect()
    assert views.number_undecodable(420) == views.number_undecodable() == 210


def test_json_is_parsed_where_the_blocks_are_read(spark: SparkSession, written_log: Any, make_records: Records) -> None:
    views = decoded(spark, written_log, make_records(VALUES), value_decoder=FIELDS)
    rows = views.decoded.select("offset", "value.*").where("price > 1").selectExpr("to_json(struct(*))")
    plan = rows._jdf.queryExecution().executedPlan().toString()  # type: ignore[operator]
    assert (plan.count("MapInArrow"), plan.count("from_json(")) == (1, 0)


def test_a_view_with_bytes_is_counted_too(spark: SparkSession, written_log: Any, make_records: Records) -> None:
    views = decoded(spark, written_log, make_records(VALUES), value_decoder=FIELDS)
    assert len(views.original.collect()) == 10
    known = replace(views, undecodable=SimpleNamespace(count=no_query))
    assert known.number_undecodable(len(VALUES)) == 10


@pytest.mark.parametrize("zone", ["UTC", "America/New_York"])
def test_every_type_comes_to_spark(spark: SparkSession, written_log: Any, make_records: Records, zone: str) -> None:
    texts = {
        "BOOLEAN": "true",
        "TINYINT": "-7",
        "SMALLINT": "7",
        "INT": "7",
        "BIGINT": "9007199254740993",
        "FLOAT": "0.5",
        "DOUBLE": "0.1",
        "DECIMAL(20,2)": "123456789012345678.90",
        "STRING": '"x"',
        "STRING COLLATE UTF8_LCASE": '"X"',
        "BINARY": '"AQI="',
        "DATE": '"2026-01-05"',
        "TIME": '"03:04:05.123456"',
        "TIMESTAMP_NTZ": '"2026-01-02T03:04:05.123456"',
        "TIMESTAMP": '"2026-01-02T03:04:05.123456"',
        "ARRAY<STRUCT<a: INT NOT NULL, b: MAP<STRING, ARRAY<STRING>>>>": '[{"a":null,"b":{"k":["v",1.0]}},null]',
        "STRUCT<>": "{}",
    }
    fields = ", ".join(f"c{place} {kind}" for place, kind in enumerate(texts))
    value = "{" + ",".join(f'"c{place}":{text}' for place, text in enumerate(texts.values())) + "}"
    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", zone)
    try:
        batch = make_records([value.encode(), b"{}"])
        views = decoded(spark, written_log, batch, value_decoder=JsonDecoder(fields=fields))
        casts = [f"CAST(value.c{place} AS STRING) AS c{place}" for place in range(len(texts))]
        row, empty = views.decoded.selectExpr(*casts).collect()
    finally:
        spark.conf.set("spark.sql.session.timeZone", before)
    assert list(row) == [
        *("true", "-7", "7", "7", "9007199254740993", "0.5", "0.1", "123456789012345678.90", "x", "X", "\x01\x02"),
        *("2026-01-05", "03:04:05.123456", "2026-01-02 03:04:05.123456", "2026-01-02 03:04:05.123456"),
        *("[{null, {k -> [v, 1.0]}}, null]", "{}"),
    ]
    assert set(empty) == {None}
