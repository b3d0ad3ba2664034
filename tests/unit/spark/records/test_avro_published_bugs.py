"""Avro values and schemas that readers of others got wrong, by their public reports."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from tests.support.avro_examples import encoded, fixed, logical, unscaled

# It imports hypothesis, whose profile is loaded for modules that name it.
from tests.unit.spark.records.test_avro_evolution import enum, field, named, read_bytes

MILLIS, WIDE = logical("long", "timestamp-millis"), logical(fixed(16), "decimal", precision=38, scale=9)
CENTS = logical("bytes", "decimal", precision=10, scale=2)
TEXTS = {"type": "array", "items": "string"}


def order(kind: Any, **more: Any) -> Any:
    return named("shop.Order", field("v", kind, **more))


ROW = named("Row", field("n", "int"))
GENERATED = named("com.node40.generated", field("key1", "string"))
OTHERS = named("Deeper", field("y", "int"))
OTHERS = named("Inner", field("x", OTHERS), namespace="")
OTHERS = named("space.Outer", field("f", OTHERS), field("g", ["null", "Deeper"]))
SIMPLE = named("simple", field("a", "long"))
REPORTED: dict[str, tuple[Any, Any, bytes, Any]] = {
    # One nanosecond before 1970 was 998,999,999 after it.
    "apache/avro#3813": (
        *(order(logical("long", "timestamp-nanos")), None),
        *(encoded("long", -1), {"v": "1969-12-31T23:59:59.999999999Z"}),
    ),
    # A time before 1970 was an error, or null.
    "fastavro/fastavro#389": (
        *(order(MILLIS), None),
        *(encoded("long", -1), {"v": datetime(1969, 12, 31, 23, 59, 59, 999_000, UTC)}),
    ),
    "risingwavelabs/risingwave#14832": (
        *(order(["null", MILLIS]), None),
        *(b"\2" + encoded("long", -31_536_000_000), {"v": datetime(1969, 1, 1, tzinfo=UTC)}),
    ),
    # The logical type within a union was overlooked.
    "redpanda-data/connect#4399": (
        *(order(["null", MILLIS], default=None), None),
        *(b"\2" + encoded("long", 1_767_617_100_250), {"v": datetime(2026, 1, 5, 12, 45, 0, 250_000, UTC)}),
    ),
    "apache/pinot#13224": (order([CENTS]), None, b"\0\4\x04\xd2", {"v": Decimal("12.34")}),
    # Numbers below 0 were read without their sign.
    "flix-tech/avro-php#22": (order(CENTS), None, b"\2\xff", {"v": Decimal("-0.01")}),
    "confluentinc/schema-registry#4399": (order(WIDE), None, bytes(16), {"v": Decimal(0)}),
    "confluentinc/schema-registry#4404": (order(WIDE), None, unscaled(-1, 16), {"v": Decimal("-1E-9")}),
    # The default of bytes was two bytes of UTF-8; that of a decimal was 255.
    "risingwavelabs/risingwave#16414": (
        *(named("shop.Order", field("n", "int")), order("bytes", default="\u00ff")),
        *(b"\2", {"v": b"\xff"}),
    ),
    "the same of a decimal": (
        *(named("shop.Order", field("n", "int")), order(CENTS, default="\u00ff")),
        *(b"\2", {"v": Decimal("-0.01")}),
    ),
    # A block that begins with its size was an error, or no elements.
    "ClickHouse/ClickHouse#60438": (order(TEXTS), None, b"\3\x08\2a\2b\2\2c\0", {"v": ["a", "b", "c"]}),
    "haskell-works/avro#85": (
        *(order({"type": "map", "values": "int"}), None),
        *(b"\1\6\2a\2\2\2b\4\0", {"v": [("a", 1), ("b", 2)]}),
    ),
    # An unknown symbol was an error, or the symbol at its number.
    "hamba/avro#340": (order(enum("RED", "BLUE")), order(enum("RED", default="RED")), b"\2", {"v": "RED"}),
    "actgardner/gogen-avro#167": (order(enum("RED", "BLUE")), order(enum("BLUE", "RED")), b"\2", {"v": "BLUE"}),
    # An alias without its namespace was not followed.
    "fastavro/fastavro#648": (
        GENERATED,
        named("com.node40.test", field("k1", "string", aliases=["key1"]), aliases=["generated"]),
        *(b"\2a", {"k1": "a"}),
    ),
    # A type that is defined in another place was another type.
    "fastavro/fastavro#780": (
        named("P", field("foo", SIMPLE)),
        named("P", field("bar", ["null", SIMPLE], default=None), field("foo", "simple")),
        *(b"\2", {"bar": None, "foo": {"a": 1}}),
    ),
    # Names were compared with their namespaces.
    "mtth/avsc#361": (named("one.Row", field("n", "int")), named("two.Row", field("n", "int")), b"\2", {"n": 1}),
    # A namespace that is "" counted as none, or not below.
    "fastavro/fastavro#537": (
        named("my.Schema", field("a", {**ROW, "namespace": ""}), field("b", "Row")),
        *(None, b"\2\4", {"a": {"n": 1}, "b": {"n": 2}}),
    ),
    "apache/avro#724": (OTHERS, None, b"\2\2\4", {"f": {"x": {"y": 1}}, "g": {"y": 2}}),
    # Two records of one name in two namespaces were one.
    "databricks/spark-avro#54": (
        named(
            "P",
            field("a", {**ROW, "namespace": "a"}),
            field("b", {**named("Row", field("t", "string")), "namespace": "b"}),
        ),
        *(None, b"\2\2x", {"a": {"n": 1}, "b": {"t": "x"}}),
    ),
    # Names with a dollar, and of other scripts, were refused.
    "karrick/goavro#11": (
        *(named("org.apache.hdfs.inotify.Event$.Close", field("n", "int")), None),
        *(b"\2", {"n": 1}),
    ),
    "duckdb/duckdb#20800": (named("Row", field("한글컬럼", "int")), None, b"\2", {"한글컬럼": 1}),
}


@pytest.mark.parametrize("report", REPORTED)
def test_a_value_that_others_got_wrong(report: str) -> None:
    writer, reader, value, wanted = REPORTED[report]
    assert read_bytes(writer, writer if reader is None else reader, value) == ([wanted], {})


def test_a_record_without_fields_beside_others() -> None:
    """edenhill/kcat#305 and linkedin/goavro#110: the whole schema was refused."""
    writer = named("shop.Order", field("some", ["null", named("Some")]), field("n", "int"))
    reader = named("shop.Order", field("n", "int"))
    assert read_bytes(writer, reader, b"\2\4", b"\0\6") == ([{"n": 2}, {"n": 3}], {})
