"""Protobuf values as Arrow columns: each type at its edges, bytes that are no message, and both ways to read them."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.protobuf_examples import AT, META, VALUES, arrow_of, compiled, message_class, serialized

from headrace.formats.protobuf_compiler import compile_schema
from headrace.formats.protobuf_schema import read_schema
from headrace.formats.schema_text import SchemaText
from headrace.spark.records.protobuf.values import ProtobufValues

ORDER = "shop.Order"


def decoder(schema: str, *, message: str = ORDER, **keywords: Any) -> ProtobufValues:
    shown = {name: keywords[name] for name in ("enums", "nanoseconds") if name in keywords}
    kind = arrow_of(read_schema(schema, message), **shown)
    return ProtobufValues(kind, schema=schema, message=message, **keywords)


def decoded(schema: str, *values: bytes | None, **keywords: Any) -> tuple[list[Any], dict[int, str]]:
    """The values as Python's, and the reasons of those that are refused, which both ways give."""
    outcomes = []
    for quick in (True, False):
        made = decoder(schema, **keywords)
        if not quick:
            made._reader = None
        array, refused = made.decode(pa.array(values, pa.binary()))
        array.validate(full=True)
        assert array.type == made._kind
        outcomes.append((array.to_pylist(), refused))
    assert repr(outcomes[0]) == repr(outcomes[1])
    return outcomes[0]


@pytest.mark.parametrize("name", VALUES)
def test_a_value_of_each_type_is_exact(name: str) -> None:
    """Also beside a record without a value, and beside one without a field."""
    fields, text, wanted = VALUES[name]
    schema = compiled(fields)
    values, refused = decoded(schema, serialized(schema, text), None, b"")
    assert refused == {}
    assert values[0]["value"] == wanted
    assert not isinstance(wanted, float) or repr(values[0]["value"]) == repr(wanted)
    assert values[1] is None
    assert values[2] is not None


def test_a_schema_of_a_megabyte_decodes_in_time() -> None:
    """A message has some 4,000 fields at most: upb's own limit is 65,535 bytes of a message in memory."""
    fields = "".join(f"string {'x' * 330}_{number} = {number};" for number in range(1, 3_001))
    text = f'syntax = "proto3"; message Order {{ {fields} }}'
    assert len(text) > 1_000_000
    schema = compile_schema(SchemaText(text))
    started = time.process_time()
    made = decoder(schema, message="Order")
    array, refused = made.decode(pa.array([b"\x0a\x01a"] * 3, pa.binary()))
    assert time.process_time() - started < 10
    assert refused == {}
    assert array[2].as_py()[f"{'x' * 330}_1"] == "a"


def test_a_nan_stays_one() -> None:
    schema = compiled("float x = 1;")
    (value,), refused = decoded(schema, serialized(schema, "x: nan"))
    assert not refused
    assert value["x"] != value["x"]


def test_all_fields_together_and_deep_within() -> None:
    """Each type's field in a message in a list in a message, of many records."""
    kinds = [declaration for declaration, _, _ in VALUES.values() if "oneof" not in declaration]
    fields = " ".join(
        kind.replace(" value = 1", f" f{number} = {number}") for number, kind in enumerate(dict.fromkeys(kinds), 1)
    )
    schema = compiled(f"message Inner {{ {fields} }} message Middle {{ repeated Inner inner = 1; }} Middle middle = 1;")
    texts = [
        text.replace("value", f"f{1 + list(dict.fromkeys(kinds)).index(kind)}", 1)
        for kind, text, _ in VALUES.values()
        if kind in kinds and text.count("value {") < 2 and text
    ]
    values = [serialized(schema, f"middle {{ inner {{ {text} }} inner {{}} }}") for text in texts]
    decoded_values, refused = decoded(schema, *values, None, b"")
    assert refused == {}
    assert len(decoded_values) == len(texts) + 2


def test_unset_fields_can_be_null() -> None:
    schema = compiled(
        "int32 n = 1; string s = 2; double d = 3; repeated int32 r = 4; map<string, int32> m = 5; "
        "bool b = 6; bytes y = 7; Colour c = 8; optional int32 o = 9; Line l = 10; float f = 11;"
    )
    values, refused = decoded(
        schema,
        b"",
        serialized(schema, "n: 1 d: -0.0 f: -0.0 r: 0 b: true o: 0 l {}"),
        unset="null",
    )
    assert refused == {}
    assert values[0] == dict.fromkeys("nsdrmbycolf")
    there = {"n": 1, "d": -0.0, "f": -0.0, "r": [0], "b": True, "o": 0, "l": dict.fromkeys(("n", "s", "many"))}
    assert repr(values[1]) == repr({**dict.fromkeys("nsdrmbycolf"), **there})


def test_enums_can_be_numbers() -> None:
    schema = compiled("Colour c = 1; repeated Colour r = 2;")
    values, _ = decoded(schema, serialized(schema, "c: BLUE r: [RED, 5]"), enums="number")
    assert values == [{"c": 7, "r": [1, 5]}]


def test_nanoseconds_are_refused_cut_or_texts() -> None:
    schema = compiled(AT)
    fine, coarse = serialized(schema, "value { seconds: 1 nanos: 1001 }"), serialized(schema, "value { nanos: 1000 }")
    values, refused = decoded(schema, fine, coarse)
    assert values[0] is None
    assert values[1]["value"].microsecond == 1
    assert "nanoseconds, which Spark's times do not have" in refused[0]
    assert "at `$.value`" in refused[0]
    values, refused = decoded(schema, fine, nanoseconds="cut")
    assert not refused
    assert values[0]["value"].microsecond == 1
    far = serialized(schema, "value { seconds: -62135596800 nanos: 7 }")
    assert decoded(schema, fine, far, nanoseconds="text")[0] == [
        {"value": "1970-01-01T00:00:01.000001001Z"},
        {"value": "0001-01-01T00:00:00.000000007Z"},
    ]


def test_a_message_may_be_one_that_becomes_a_value() -> None:
    """Kafka Connect writes a key that is a text as a StringValue."""
    schema = compiled("int32 n = 1;")
    values, refused = decoded(schema, b"\x0a\x01x", None, b"", b"\x0a\x01\xff", message="google.protobuf.StringValue")
    assert values == ["x", None, "", None]
    assert list(refused) == [3]


def test_maps_have_the_order_of_their_keys_in_each_process() -> None:
    """protobuf gives them in another order in each process, and a batch that runs again gives the same documents."""
    schema = compiled("map<string, int32> m = 1; google.protobuf.Struct s = 2;")
    entries = "".join(f'm {{ key: "k{number}" value: 1 }} ' for number in range(20))
    entries += "s {" + "".join(f'fields {{ key: "k{number}" value {{}} }} ' for number in range(20)) + "}"
    (value,), _ = decoded(schema, serialized(schema, entries))
    keys = [key for key, _ in value["m"]]
    assert keys == sorted(keys)
    assert value["s"] == "{" + ",".join(f'"{key}":null' for key in keys) + "}"


PROTO2 = 'syntax = "proto2";'
SHORT = "int32 n = 1; string s = 2; Line line = 3; repeated int32 r = 4; map<string, Line> m = 5;"
UNFIT: dict[str, tuple[str, bytes, str]] = {
    "a text that ends early": (SHORT, b"\x12\x05ab", "its bytes are damaged, or end too early"),
    "a number that ends early": (SHORT, b"\x08\xff", "its bytes are damaged, or end too early"),
    "a list that ends early": (SHORT, b"\x22\x02\x01\x80", "its bytes are damaged, or end too early"),
    "JSON": (SHORT, b'{"n": 1}', "its bytes are damaged, or end too early"),
    "field 0": (SHORT, b"\x00\x05", "its bytes are damaged, or end too early"),
    "a tag of too many bytes": (SHORT, b"\x88\x80\x80\x80\x80\x00\x05", "its bytes are damaged, or end too early"),
    "a length of 64 bits": (SHORT, b"\x12" + b"\xff" * 9 + b"\x01a", "its bytes are damaged, or end too early"),
    "a text that is not UTF-8": (SHORT, b"\x12\x02\xff\xfe", "a text is not UTF-8"),
    "a text within that is not UTF-8": (SHORT, b"\x1a\x03\x12\x01\xff", "a text is not UTF-8"),
    "a text for a number": (SHORT, b"\x0a\x02ab", "it has bytes with a length at `$.n`, by another schema"),
    "a number for a text": (SHORT, b"\x10\x05", "it has a varint at `$.s`, by another schema"),
    "a number for a text within": (SHORT, b"\x1a\x02\x10\x05", "it has a varint at `$.line.s`, by another schema"),
    "a number for a text in a map": (
        SHORT, b"\x2a\x07\x0a\x01k\x12\x02\x10\x05", "it has a varint at `$.m[].s`, by another schema"
    ),
    "groups without end": (SHORT, b"\x83\x06" * 200 + b"\x84\x06" * 200, "its bytes are damaged, or end too early"),
    "nanoseconds below 0": (AT, b"\x0a\x0b\x10" + b"\xff" * 9 + b"\x01", "its nanoseconds are not 0 to 999,999,999"),
    "the year 10000": (AT, serialized(compiled(AT), "value { seconds: 253402300800 }"), "the year is not 1 to 9999"),
    "the year 0": (AT, serialized(compiled(AT), "value { seconds: -62135596801 }"), "the year is not 1 to 9999"),
    "a very far time": (AT, serialized(compiled(AT), f"value {{ seconds: {2**62} }}"), "the year is not 1 to 9999"),
    "a month": ("google.type.Date d = 1;", b"\x0a\x05\x08\xe8\x0f\x10\x01", "no day of a year"),
    "30 February": ("google.type.Date d = 1;", b"\x0a\x07\x08\xe8\x0f\x10\x02\x18\x1e", "no day of a year"),
    "24 o'clock": ("google.type.TimeOfDay t = 1;", b"\x0a\x02\x08\x18", "no time of a day"),
    "too many digits": (
        f"confluent.type.Decimal d = 1 {META};", b"\x0a\x06\x0a\x04\x7f\xff\xff\xff",
        "not exactly a decimal of 8 digits",
    ),
    "too many behind the point": (
        f"confluent.type.Decimal d = 1 {META};", b"\x0a\x05\x0a\x01\x01\x18\x04", "not exactly a decimal of 8 digits"
    ),
    "a scale of thousands": (
        "confluent.type.Decimal d = 1;", b"\x0a\x07\x0a\x01\x01\x18\xff\xff\x7f", "more digits than"
    ),
    "a NaN in JSON": (
        "google.protobuf.Value v = 1;", b"\x0a\x09\x11\x00\x00\x00\x00\x00\x00\xf8\x7f", "nan is no number of JSON"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNFIT)
def test_what_does_not_fit_is_refused_and_its_neighbours_are_not(name: str) -> None:
    fields, value, says = UNFIT[name]
    values, refused = decoded(compiled(fields), None, value, b"", None)
    assert [each is None for each in values] == [True, True, False, True]
    assert list(refused) == [1]
    assert says in refused[1]
    assert refused[1].startswith("no Protobuf message shop.Order: ")


def test_values_that_do_not_fit_are_found_among_many() -> None:
    schema = compiled("string s = 1; google.protobuf.Timestamp at = 2;")
    good, fine, cut = serialized(schema, 's: "x" at {}'), serialized(schema, "at { nanos: 1 }"), b"\x0a\x05x"
    rows = {0: fine, 700: cut, 701: fine, 999: cut}
    values, refused = decoded(schema, *[rows.get(number, good) for number in range(1_000)])
    assert sorted(refused) == sorted(rows)
    assert [number for number, value in enumerate(values) if value is None] == sorted(rows)


def test_fields_that_the_schema_does_not_have_are_left_out() -> None:
    values, refused = decoded(compiled("int32 n = 1;"), b"\x08\x05\xf8\x3f\x05")
    assert (values, refused) == ([{"n": 5}], {})


def test_of_a_oneof_the_last_member_counts() -> None:
    schema = compiled("oneof either { int32 n = 1; string s = 2; Line line = 3; }")
    parts = [serialized(schema, text) for text in ("n: 4", 's: "x"', "line { n: 5 }", 'line { s: "y" }')]
    values, _ = decoded(
        schema,
        parts[0] + parts[1],
        parts[2] + parts[0],
        parts[2] + parts[0] + parts[3],
        parts[2] + parts[3],
    )
    assert values == [
        {"n": None, "s": "x", "line": None},
        {"n": 4, "s": None, "line": None},
        {"n": None, "s": None, "line": {"n": 0, "s": "y", "many": []}},
        {"n": None, "s": None, "line": {"n": 5, "s": "y", "many": []}},
    ]


def test_of_a_map_the_last_entry_of_a_key_counts() -> None:
    schema = compiled("map<int32, Line> m = 1;")
    twice = serialized(schema, "m { key: 1 value { n: 5 } }") + serialized(schema, "m { key: 1 value { n: 6 } }")
    values, _ = decoded(schema, twice, b"\x0a\x00")
    assert values[0]["m"] == [(1, {"n": 6, "s": None, "many": []})]
    assert values[1]["m"] == [(0, {"n": 0, "s": None, "many": []})]


def test_proto2_has_groups_defaults_and_required_fields() -> None:
    types = (
        "enum Size { S = 1; L = 2; } message Other { extensions 100 to 200; } "
        "extend Other { optional int32 more = 100; }"
    )
    fields = (
        "required int32 n = 1; optional int32 d = 2 [default = 7]; optional Size size = 3; repeated Size sizes = 4; "
        "optional group Part = 5 { optional string s = 6; } optional Other other = 7; extensions 100 to 200;"
    )
    schema = compiled(fields, types, PROTO2)
    value = serialized(schema, 'n: 1 size: L Part { s: "x" } other { [shop.more]: 3 }')
    lacking, unknown = b"\x10\x05", b"\x08\x01\x18\x09\x20\x01\x20\x09"
    values, refused = decoded(schema, value, lacking, unknown, b"\x08\x01\x2b\x32\x01\xff\x2c")
    none = {"n": 1, "d": None, "size": None, "sizes": [], "part": None, "other": None}
    assert values == [
        {**none, "size": "L", "part": {"s": "x"}, "other": {}},
        None,
        # protobuf's own objects drop what a closed enum does not have.
        {**none, "size": "9", "sizes": ["S", "9"]},
        None,
    ]
    assert "it has no `n`, which is required" in refused[1]
    assert "at `$.part`" in refused[3]


def test_editions_say_which_fields_have_presence() -> None:
    fields = (
        "int32 n = 1; int32 i = 2 [features.field_presence = IMPLICIT]; "
        "Line line = 3 [features.message_encoding = DELIMITED];"
    )
    schema = compiled(fields, "message Line { int32 n = 1; }", 'edition = "2023";')
    values, _ = decoded(schema, b"", serialized(schema, "n: 0 line { n: 2 }"))
    assert values == [{"n": None, "i": 0, "line": None}, {"n": 0, "i": 0, "line": {"n": 2}}]


def test_names_that_python_has_for_itself_are_fields() -> None:
    names = ["from", "class", "HasField", "DESCRIPTOR", "ByteSize", "self", "Clear", "None", "__init__"]
    schema = compiled(" ".join(f"optional int32 {name} = {number};" for number, name in enumerate(names, 1)))
    values, refused = decoded(schema, bytes(byte for number in range(1, 10) for byte in (number << 3, number)))
    assert (values, refused) == ([{name: number for number, name in enumerate(names, 1)}], {})


WIDE = compiled(
    "int32 a = 1; optional sint64 b = 2; uint64 c = 3; string d = 4; bytes e = 5; Colour f = 6; Line g = 7; "
    "repeated Line h = 8; repeated fixed32 i = 9; google.protobuf.Timestamp j = 10; google.protobuf.Int64Value k = 11; "
    "oneof one { string l = 12; Line m = 13; google.protobuf.Duration n = 14; } map<int32, Line> o = 15; "
    "repeated Colour p = 16; google.protobuf.Value q = 17; bool r = 18; float s = 19; Nothing t = 20; "
    "google.type.Date u = 21; repeated google.protobuf.StringValue v = 22; optional bytes w = 23;"
)
FULL = serialized(
    WIDE,
    'a: 5 b: -3 c: 9 d: "abc" e: "x" f: RED g { n: 1 s: "q" many: [1, 2] } h { n: 2 } h { s: "" } i: [1, 2] '
    'j { seconds: 5 nanos: 5000 } k { value: 0 } m { n: 4 } o { key: 3 value { n: 1 } } p: [RED, 9] '
    'q { string_value: "z" } r: true s: 0.5 t {} u { year: 2024 month: 1 day: 2 } v {} v { value: "y" } w: "v"',
)  # fmt: skip
DECODERS = (decoder(WIDE, nanoseconds="cut"), decoder(WIDE, nanoseconds="cut"))
DECODERS[1]._reader = None


@settings(max_examples=120, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(FULL) - 1), st.integers(0, 255)), max_size=4), st.integers(0, len(FULL)))
def test_damaged_bytes_have_one_outcome_both_ways(changes: list[tuple[int, int]], end: int) -> None:
    value = bytearray(FULL + FULL[:end])
    for place, byte in changes:
        value[place] = byte
    both_ways_agree([bytes(value), FULL])


@settings(max_examples=80, deadline=None)
@given(st.lists(st.binary(max_size=40), max_size=4))
def test_any_bytes_are_a_value_or_have_a_reason(values: list[bytes]) -> None:
    both_ways_agree(values)


def both_ways_agree(values: list[bytes]) -> None:
    """ptars and protobuf give the same columns and reasons."""
    given_values = pa.array(values, pa.binary())
    (quick, refused), (slow, slowly_refused) = (each.decode(given_values) for each in DECODERS)
    assert refused == slowly_refused
    assert repr(quick.to_pylist()) == repr(slow.to_pylist())
    assert {row for row, value in enumerate(quick.to_pylist()) if value is None} == set(refused)


def test_most_fields_are_read_by_ptars() -> None:
    made = decoder(WIDE)
    made.decode(pa.array([FULL], pa.binary()))
    assert made._reader is not None
    assert [field.name for field in made._reader.fields] == list("abcdefghijklmnprsuvw")


def test_a_host_without_ptars_decodes_too() -> None:
    """In a process of its own, as a module that is imported stays."""
    code = (
        "import sys; sys.modules['ptars'] = None\n"
        "from tests.unit.spark.records.test_protobuf_values import FULL, WIDE, decoder, pa\n"
        "made = decoder(WIDE); assert made._reader is None\n"
        "assert made.decode(pa.array([FULL], pa.binary()))[1] == {}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_few_bytes_do_not_become_much_memory() -> None:
    """A list that says it has a thousand million numbers, and 20,000 empty messages."""
    schema = compiled("repeated fixed64 r = 1; repeated Line lines = 2;")
    values, refused = decoded(schema, b"\x0a\x80\xa8\xd6\xb9\x07", b"\x12\x00" * 20_000)
    assert "end too early" in refused[0]
    assert len(values[1]["lines"]) == 20_000


def test_a_deep_value_is_refused() -> None:
    schema = compiled("google.protobuf.Value v = 1;")
    made = message_class(schema)()
    value = made.v
    for _ in range(40):
        value = value.list_value.values.add()
    assert decoded(schema, made.SerializeToString())[1] == {}
    raw = made.v.SerializeToString()
    for _ in range(60):
        raw = b"\x0a" + varint(len(raw)) + raw
        raw = b"\x32" + varint(len(raw)) + raw
    values, refused = decoded(schema, b"\x0a" + varint(len(raw)) + raw)
    assert values == [None]
    assert "no Protobuf message shop.Order: " in refused[0]


def varint(number: int) -> bytes:
    return bytes([number & 0x7F | 0x80, number >> 7 & 0x7F | 0x80, number >> 14])
