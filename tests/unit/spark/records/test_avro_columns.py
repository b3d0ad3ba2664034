"""Avro values that are decoded together are what fastavro makes of each, and what is refused has the same reasons."""

from __future__ import annotations

import io
import json
import random
import struct
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.avro_examples import ENUM, VALUES, arrow_of, encoded, fixed, logical, record

from headrace.formats.avro_schema import AvroSchemaError, read_schema
from headrace.spark.records.avro.columns import AvroColumns
from headrace.spark.records.avro.scan import NotScannedError
from headrace.spark.records.avro.values import AvroValues

MANY = 300
"""Values of a batch, which are enough to be decoded together."""
SIMPLE = ["null", "boolean", "int", "long", "float", "double", "bytes", "string"]
LOGICAL = [
    logical("int", "date"),
    logical("int", "time-millis"),
    *(
        logical("long", f"{local}timestamp-{unit}")
        for local in ("", "local-")
        for unit in ("millis", "micros", "nanos")
    ),
    logical("long", "time-micros"),
    logical("string", "uuid"),
    logical("bytes", "decimal", precision=38, scale=9),
    logical("bytes", "decimal", precision=4, scale=2),
    logical("bytes", "decimal", precision=60),
]
TEXTS = [b"", b"a", "gr\u00fcn".encode(), b"x" * 70, "\U0001f600".encode()]


class Schemas:
    """Random schemas, with values of them."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.names = 0
        self.fits = self.random.random() < 0.7
        """Whether all values fit their logical types."""

    def of(self, depth: int, *, in_union: bool = False) -> Any:
        choose = self.random.random()
        if depth == 0 or choose < 0.35:
            return self.random.choice(LOGICAL if self.random.random() < 0.3 else SIMPLE)
        if 0.55 <= choose < 0.8:
            element = self.of(depth - 1)
            return {"type": "array", "items": element} if choose < 0.7 else {"type": "map", "values": element}
        if 0.8 <= choose < 0.92 and not in_union:
            members = [self.of(depth - 1, in_union=True) for _ in range(self.random.choice([1, 1, 2, 3]))]
            # A union has one member of a kind, and names by which others are told apart.
            members = list({json.dumps(kind_of(member)): member for member in ["null", *members]}.values())
            return self.random.sample(members, len(members))
        return self.named(depth, choose)

    def named(self, depth: int, choose: float) -> Any:
        self.names += 1
        name = f"N{self.names}"
        if choose < 0.45:
            size = self.random.choice([0, 3, 12, 16])
            kinds = {12: {"logicalType": "duration"}, 16: {"logicalType": "uuid"}}
            more = kinds.get(size, {}) if self.random.random() < 0.5 else {}
            return {"type": "fixed", "name": name, "size": size, **more}
        if choose < 0.55:
            return {"type": "enum", "name": name, "symbols": [f"S{n}" for n in range(self.random.choice([1, 3, 70]))]}
        fields = [{"name": f"f{n}", "type": self.of(depth - 1)} for n in range(self.random.randrange(1, 5))]
        return {"type": "record", "name": name, "fields": fields}

    def value(self, kind: Any) -> bytes:
        """A random value's bytes."""
        if isinstance(kind, list):
            number = self.random.randrange(len(kind))
            return varint(number) + self.value(kind[number])
        name = kind if isinstance(kind, str) else kind["type"]
        if name == "record":
            return b"".join(self.value(field["type"]) for field in kind["fields"])
        if name in ("array", "map"):
            return self._blocks(kind)
        if name == "enum":
            return varint(self.random.randrange(len(kind["symbols"])))
        if name == "fixed":
            return self.random.randbytes(kind["size"])
        return self._simple(name, kind)

    def _simple(self, name: str, kind: Any) -> bytes:
        if name == "null":
            return b""
        if name == "boolean":
            return self.random.choice([b"\0", b"\1"])
        if name in ("int", "long"):
            if self.fits and isinstance(kind, dict):
                return varint(self.random.randrange(80_000))
            bits = self.random.choice([1, 6, 7, 8, 14, 20, 31] if name == "int" else [1, 7, 8, 35, 50, 55, 56, 62, 63])
            return varint(self.random.randrange(-(2**bits), 2**bits))
        if name in ("float", "double"):
            number = self.random.choice([0.0, -0.0, 1.5, float("inf"), self.random.random()])
            return struct.pack("<f" if name == "float" else "<d", number)
        is_decimal = isinstance(kind, dict) and kind.get("logicalType") == "decimal"
        sizes = [0, 1] if self.fits else [0, 1, 2, 8, 15, 17]
        text = self.random.randbytes(self.random.choice(sizes)) if is_decimal else None
        text = self.random.choice(TEXTS) if text is None else text
        return varint(len(text)) + text

    def _blocks(self, kind: Any) -> bytes:
        written = b""
        for _ in range(self.random.choice([0, 1, 1, 1, 2])):
            number = self.random.choice([1, 2, 5])
            entries = []
            for _ in range(number):
                key = f"k{self.random.randrange(10**9 if self.fits else 50)}".encode()
                entries.append((varint(len(key)) + key if kind["type"] == "map" else b"") + self.value(below(kind)))
            block = b"".join(entries)
            has_size = self.random.random() < 0.3
            written += (varint(-number) + varint(len(block)) if has_size else varint(number)) + block
        return written + b"\0"

    def damaged(self, value: bytes) -> bytes:
        choose = self.random.randrange(4)
        if choose == 0:
            return value[: self.random.randrange(len(value) + 1)]
        if choose == 1:
            return value + self.random.randbytes(self.random.randrange(1, 4))
        if choose == 2:
            return self.random.randbytes(self.random.randrange(20))
        changed = bytearray(value or b"\0")
        changed[self.random.randrange(len(changed))] = self.random.choice([0, 1, 0x7F, 0x80, 0xFF])
        return bytes(changed)


def kind_of(member: Any) -> Any:
    kind = member if isinstance(member, str) else member["type"]
    return member["name"] if kind in ("record", "enum", "fixed") else kind


def below(kind: Any) -> Any:
    return kind["items" if kind["type"] == "array" else "values"]


def varint(number: int) -> bytes:
    left = (number << 1) ^ (number >> 63)
    written = bytearray()
    while left >= 0x80:
        written.append(left & 0x7F | 0x80)
        left >>= 7
    return bytes([*written, left])


def assert_as_each(schema: Any, values: list[bytes | None]) -> AvroValues:
    text = json.dumps(schema)
    made = read_schema(text)
    decoder = AvroValues(arrow_of(made, "number"), schema=text)
    array = pa.array([b"before", *values, b"behind"], pa.binary()).slice(1, len(values))
    together, reasons = decoder.decode(array)
    each, wanted = decoder._decode_each(array)
    together.validate(full=True)
    assert together.type == each.type
    assert reasons == wanted
    # A NaN equals no other.
    assert together.equals(each) or repr(together.to_pylist()) == repr(each.to_pylist())
    return decoder


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([0, 0, 0.02, 0.5]))
def test_values_of_random_schemas_are_as_fastavros(seed: int, damaged: float) -> None:
    made = Schemas(seed)
    schema = record(*[(f"x{n}", made.of(3)) for n in range(made.random.randrange(1, 4))])
    try:
        read_schema(json.dumps(schema))
    except AvroSchemaError:
        return
    values: list[bytes | None] = [made.value(schema) for _ in range(MANY)]
    for row in range(MANY):
        if made.random.random() < damaged:
            values[row] = made.damaged(values[row] or b"")
        elif made.random.random() < damaged / 4:
            values[row] = None
    assert_as_each(schema, values)


@pytest.mark.parametrize("name", VALUES)
def test_a_value_of_each_type_is_decoded_with_others(name: str) -> None:
    kind, value, wanted = VALUES[name]
    schema = record(("value", kind))
    decoder = assert_as_each(schema, [encoded(schema, {"value": value})] * MANY)
    columns = decoder._columns
    if columns is None:
        # A scale of its own is rare.
        assert name in ("a decimal with a scale of its own", "one that may be null")
        return
    array, kept = columns.decode(pa.array([encoded(schema, {"value": value})] * MANY))
    assert kept.all()
    assert array.to_pylist() == [{"value": wanted}] * MANY


WRONG: dict[str, tuple[Any, bytes]] = {
    "an int of 33 bits": ("int", varint(2**31)),
    "a number of eleven bytes": ("long", b"\x80" * 10 + b"\0"),
    "a number of 65 bits": ("long", b"\xff" * 9 + b"\x02"),
    "a truth of two": ("boolean", b"\2"),
    "a negative length": ("string", b"\1"),
    "a length beyond the end": ("string", b"\4a"),
    "a length of 2^62": ("string", varint(2**62)),
    "a text that is not UTF-8": ("string", b"\2\xff"),
    "a negative member": (["null", "int"], b"\1"),
    "a symbol that is not there": ({"type": "enum", "name": "E", "symbols": ["A"]}, b"\2"),
    "a list of 2^62": ({"type": "array", "items": "int"}, varint(2**62)),
    "the least number of elements": ({"type": "array", "items": "int"}, varint(-(2**63)) + b"\0"),
    "a key twice": ({"type": "map", "values": "int"}, b"\4\2a\2\2a\4\0"),
    "a list that few others have": ({"type": "array", "items": "int"}, varint(50) + b"\2" * 50 + b"\0"),
    "too many digits": (logical("bytes", "decimal", precision=2), b"\2\x64"),
    "the year 10000": (logical("int", "date"), varint(2_932_897)),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_left_out_is_read_by_fastavro(name: str) -> None:
    kind, value = WRONG[name]
    schema = record(("x", kind), ("y", "int"))
    good = next(
        made + b"\2"
        for made in (b"\0", b"\0\0\0\0")
        if AvroValues(arrow_of(read_schema(json.dumps(schema)), "number"), schema=json.dumps(schema)).decode(
            pa.array([made + b"\2"])
        )[1]
        == {}
    )
    assert_as_each(schema, [*[good] * MANY, value + b"\2", None, *[good] * 5])


def test_few_long_lists_are_read_by_fastavro() -> None:
    """Megabytes of numbers in a few values would be a million steps, each for a few of them."""
    schema = record(("x", {"type": "array", "items": "int"}))
    long, short = (varint(number) + b"\2" * number + b"\0" for number in (100, 64))
    decoder = assert_as_each(schema, [long, short] * MANY)
    assert decoder._columns is not None
    for number, kept in ((300, 300), (200, 0)):
        assert decoder._columns.decode(pa.array([long] * number))[1].sum() == kept
    assert decoder._columns.decode(pa.array([short] * 200))[1].all()


def test_a_wrong_value_does_not_slow_down_the_others() -> None:
    schema = record(("x", "int"))
    text = json.dumps(schema)
    columns = AvroColumns(read_schema(text), arrow_of(read_schema(text), "number"), text=False)
    array, kept = columns.decode(pa.array([b"\2", b"\2\2", b"", b"\4"]))
    assert (array.to_pylist(), kept.tolist()) == ([{"x": 1}, {"x": 2}], [True, False, False, True])


def test_lists_are_found_beside_a_wrong_value() -> None:
    schema = record(("x", {"type": "array", "items": ["null", "string", "int"]}))
    text = json.dumps(schema)
    columns = AvroColumns(read_schema(text), arrow_of(read_schema(text), "number"), text=False)
    lists = [[str(number), number, None][: number % 4] for number in range(MANY)]
    values = [encoded(schema, {"x": found}) for found in lists]
    values[7] = values[7][:-2]
    array, kept = columns.decode(pa.array(values))
    assert kept.tolist() == [number != 7 for number in range(MANY)]
    wanted = [each for number, found in enumerate(lists) if number != 7 for each in found]
    read = [each for value in array.to_pylist() for each in value["x"]]
    assert read == [
        None
        if each is None
        else {"string": each if isinstance(each, str) else None, "int": each if isinstance(each, int) else None}
        for each in wanted
    ]


LINE = {"type": "record", "name": "shop.Line", "fields": [{"name": "n", "type": "int"}]}
WIDER_LINE = {"type": "record", "name": "shop.Line", "fields": [{"name": "n", "type": "long"}]}
NARROW = {"type": "record", "name": "shop.Line", "fields": [{"name": "m", "type": "int"}]}
NEW = {
    "null": (["null", "string"], None),
    "text": ("string", "gr\u00fcn"),
    "number": ("long", 2**40),
    "double": ("double", 1),
    "truth": ("boolean", True),
    "symbol": ({"type": "enum", "name": "E", "symbols": ["A", "B"]}, "B"),
}


def with_new(name: str) -> Any:
    kind, default = NEW[name]
    schema = record(("a", "int"))
    schema["fields"].append({"name": "new", "type": kind, "default": default})
    return schema


EVOLVED: dict[str, tuple[Any, Any, Any]] = {
    **{f"a new {name}": (record(("a", "int")), with_new(name), {"a": 7}) for name in NEW},
    "a field less": (record(("a", "int"), ("b", "string")), record(("a", "int")), {"a": 7, "b": "x"}),
    "another order": (record(("a", "int"), ("b", "string")), record(("b", "string"), ("a", "int")), {"a": 7, "b": "x"}),
    "null since": (record(("a", "int")), record(("a", ["null", "int"])), {"a": 7}),
    "a wider number": (
        record(("a", "int"), ("b", "float")),
        record(("a", "long"), ("b", "double")),
        {"a": 7, "b": 0.1},
    ),
    "a number as double": (record(("a", "int")), record(("a", ["double", "null"])), {"a": 2**31 - 1}),
    "wider elements": (
        record(("a", {"type": "array", "items": LINE})),
        record(("a", {"type": "array", "items": WIDER_LINE})),
        {"a": [{"n": 1}, {"n": 2}]},
    ),
    "a null less of a map": (
        record(("a", {"type": "map", "values": ["null", "int"]})),
        record(("a", {"type": "map", "values": ["int", "null"]})),
        {"a": {"x": 1, "y": None}},
    ),
}


@pytest.mark.parametrize("name", EVOLVED)
def test_columns_of_another_schema_are_as_fastavros(name: str) -> None:
    written, wanted, value = EVOLVED[name]
    writer, reader = (read_schema(json.dumps(schema)) for schema in (written, wanted))
    raw = encoded(written, value)
    (array, kept) = AvroColumns(reader, arrow_of(reader, "number"), text=False, writer=writer).decode(
        pa.array([raw] * 30)
    )
    judged = fastavro.schemaless_reader(
        io.BytesIO(raw), fastavro.parse_schema(writer.plain), fastavro.parse_schema(reader.plain)
    )
    assert kept.all()
    array.validate(full=True)
    assert array.to_pylist() == pa.array([judged] * 30, array.type).to_pylist()


@pytest.mark.parametrize(
    ("written", "wanted"),
    [
        (record(("a", "int")), record(("a", "int"), ("b", "int"))),
        (record(("a", "long")), record(("a", "int"))),
        (record(("a", "long")), record(("a", "double"))),
        (record(("a", "string")), record(("a", "bytes"))),
        (record(("a", ["null", "int"])), record(("a", "int"))),
        (record(("a", ["int", "string"])), record(("a", ["string", "int"]))),
        (record(("a", ["int", "string"])), record(("a", "string"))),
        (record(("a", ["int", "long"])), record(("a", "long"))),
        (record(("a", ENUM)), record(("a", {**ENUM, "symbols": ["BLUE", "RED"]}))),
        (record(("a", fixed(2))), record(("a", fixed(3)))),
        (record(("a", "null"), ("b", "int")), with_new("text")),
        (record(("a", LINE), ("b", ["int", "shop.Line"])), record(("a", NARROW), ("b", ["int", "shop.Line"]))),
        (
            record(("a", logical("bytes", "decimal", precision=9, scale=2))),
            record(("a", logical("bytes", "decimal", precision=9, scale=4))),
        ),
        (record(("a", "int")), {**record(("b", "int")), "fields": [{"name": "b", "type": "int", "aliases": ["a"]}]}),
        (record(("a", "int")), {**record(("a", "int")), "name": "shop.Other"}),
        (record(("a", LINE)), record(("a", {"type": "array", "items": LINE}))),
        (record(("a", {"type": "map", "values": "int"})), record(("a", {"type": "array", "items": "int"}))),
    ],
)
def test_other_pairs_of_schemas_are_fastavros(written: Any, wanted: Any) -> None:
    writer, reader = (read_schema(json.dumps(schema)) for schema in (written, wanted))
    with pytest.raises(NotScannedError):
        AvroColumns(reader, arrow_of(reader, "number"), text=False, writer=writer)
