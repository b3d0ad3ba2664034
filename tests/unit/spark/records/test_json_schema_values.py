"""Values by a JSON Schema as Arrow columns: each kind, what is refused, and what a value must not be able to do."""

from __future__ import annotations

import datetime
import json
import time
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from headrace.formats.json_schema import JsonKind, JsonSchemaError, JsonType, read_schema
from headrace.formats.schema_text import SchemaText, UnreadableSchemaError
from headrace.spark.records.json_schema_values import JsonSchemaUnusableError, JsonSchemaValues, values_of

CONNECT, DEBEZIUM = "org.apache.kafka.connect.data.", "io.debezium.time."
DECIMAL = {"title": f"{CONNECT}Decimal", "type": "number", "connect.parameters": {"scale": "2"}}
DRAFTS = [
    *(f"http://json-schema.org/draft-0{number}/schema#" for number in (4, 6, 7)),
    *(f"https://json-schema.org/draft/{name}/schema" for name in ("2019-09", "2020-12")),
]
ARROW = {
    JsonKind.BOOLEAN: pa.bool_(),
    JsonKind.TINY: pa.int8(),
    JsonKind.SMALL: pa.int16(),
    JsonKind.INT: pa.int32(),
    JsonKind.LONG: pa.int64(),
    JsonKind.BIG: pa.decimal128(38, 0),
    JsonKind.FLOAT: pa.float32(),
    JsonKind.DOUBLE: pa.float64(),
    JsonKind.BYTES: pa.binary(),
    JsonKind.DATE: pa.date32(),
    JsonKind.DAYS: pa.date32(),
    JsonKind.DATE_TIME: pa.timestamp("us", "UTC"),
    JsonKind.MILLIS: pa.timestamp("us", "UTC"),
    JsonKind.LOCAL_MILLIS: pa.timestamp("us"),
    JsonKind.LOCAL_MICROS: pa.timestamp("us"),
}


def arrow_of(made: JsonType) -> Any:
    if made.kind is JsonKind.OBJECT and made.parts:
        return pa.struct([(name, arrow_of(part)) for name, part in made.parts])
    if made.kind is JsonKind.ARRAY:
        return pa.list_(pa.field("element", arrow_of(made.parts[0][1])))
    if made.kind is JsonKind.MAP:
        return pa.map_(pa.string(), arrow_of(made.parts[0][1]))
    if made.kind is JsonKind.DECIMAL:
        return pa.decimal128(made.precision, made.scale)
    return ARROW.get(made.kind, pa.string())


def decoded(schema: Any, *values: Any, writer: Any = None, **references: Any) -> tuple[list[Any], dict[int, str]]:
    """The values as Python's, and the reasons of those that are refused. Bytes are given as they are, None is none."""
    text = json.dumps(schema)
    given = {name: json.dumps(held) for name, held in references.items()}
    kind = arrow_of(read_schema(SchemaText(text, tuple(given.items()))))
    written = None if writer is None else SchemaText(json.dumps(writer))
    made = JsonSchemaValues(kind, schema=text, references=given, writer=written)
    raw = [value if isinstance(value, bytes | None) else json.dumps(value).encode() for value in values]
    array, refused = made.decode(pa.array(raw, pa.binary()))
    array.validate(full=True)
    return array.to_pylist(), refused


def x_of(kind: Any, value: Any) -> Any:
    """A property's value, which must decode."""
    (read,), refused = decoded({"properties": {"x": kind}}, {"x": value})
    assert refused == {}
    return read["x"]


UTC = datetime.UTC


@pytest.mark.parametrize(
    ("kind", "value", "wanted"),
    [
        ({"type": "integer"}, 2**63 - 1, 2**63 - 1),
        ({"type": "integer"}, 1.0, 1),
        ({"type": "integer", "maximum": 10**30}, 10**30, Decimal(10**30)),
        ({"type": "number"}, 5, 5.0),
        ({"type": "number", "multipleOf": 0.01}, 19.99, 19.99),
        ({"type": "string", "format": "email"}, "no email", "no email"),
        ({"type": "string", "connect.type": "bytes"}, "aGk=", b"hi"),
        (
            {"type": "array", "items": DECIMAL},
            ["MDk=", -1.5, 7],
            [Decimal("123.45"), Decimal("-1.50"), Decimal("7.00")],
        ),
        ({"title": f"{CONNECT}Date", "type": "integer"}, -1, datetime.date(1969, 12, 31)),
        ({"title": f"{CONNECT}Time", "type": "integer"}, 47_100_250, "13:05:00.250"),
        ({"title": f"{CONNECT}Timestamp", "type": "integer"}, 1, datetime.datetime(1970, 1, 1, 0, 0, 0, 1000, UTC)),
        ({"title": f"{DEBEZIUM}Date", "type": "integer"}, 20_458, datetime.date(2026, 1, 5)),
        ({"title": f"{DEBEZIUM}Time", "type": "integer"}, 47_100_250, "13:05:00.250"),
        ({"title": f"{DEBEZIUM}MicroTime", "type": "integer"}, 47_100_250_000, "13:05:00.250000"),
        ({"title": f"{DEBEZIUM}NanoTime", "type": "integer"}, 47_100_250_000_001, "13:05:00.250000001"),
        ({"title": f"{DEBEZIUM}Timestamp", "type": "integer"}, 1, datetime.datetime(1970, 1, 1, 0, 0, 0, 1000)),
        ({"title": f"{DEBEZIUM}MicroTimestamp", "type": "integer"}, 1, datetime.datetime(1970, 1, 1, 0, 0, 0, 1)),
        ({"title": f"{DEBEZIUM}NanoTimestamp", "type": "integer"}, 1, "1970-01-01T00:00:00.000000001"),
        ({"title": f"{DEBEZIUM}ZonedTimestamp", "type": "string"}, "2026-01-05T13:05:00Z", "2026-01-05T13:05:00Z"),
        (
            {"type": "string", "format": "date-time"},
            "2026-01-05T13:05:00+02:00",
            datetime.datetime(2026, 1, 5, 11, 5, tzinfo=UTC),
        ),
        ({}, {"a": [1, None]}, '{"a": [1, null]}'),
        ({}, "text", "text"),
        ({"items": {"type": ["string", "object"]}}, ["a", {}, "b"], ["a", "{}", "b"]),
        ({"additionalProperties": {"type": "object"}, "type": "object"}, {"k": {"a": 1}}, [("k", '{"a": 1}')]),
        ({"items": {"properties": {"n": {"type": "integer"}}}}, [{"n": 1, "more": 2}, {}], [{"n": 1}, {"n": None}]),
    ],
)
def test_a_value_of_each_kind_is_exact(kind: Any, value: Any, wanted: Any) -> None:
    assert x_of(kind, value) == wanted


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (b"1.0", 1),
        (b"1e3", 1_000),
        (b"12.50E1", 125),
        (b"-0.0", 0),
        (b"9007199254740993.0", 9_007_199_254_740_993),
        (b"9223372036854775807.0", 2**63 - 1),
        (b"-9223372036854775808.0", -(2**63)),
        (b"null", None),
    ],
)
def test_an_integer_with_a_point_is_exact(text: bytes, wanted: int | None) -> None:
    kind = {"type": ["integer", "null"]}
    schema = {
        "properties": {
            "x": kind,
            "a": {"items": kind, "type": "array"},
            "m": {"additionalProperties": kind, "type": "object"},
        }
    }
    values, refused = decoded(schema, b'{"x": %s, "a": [1, %s], "m": {"k": %s}}' % (text, text, text), {"x": 7})
    assert refused == {}
    assert values == [{"x": wanted, "a": [1, wanted], "m": [("k", wanted)]}, {"x": 7, "a": None, "m": None}]


def test_an_integer_of_the_columns_is_no_text() -> None:
    """Its own schema may say that it is one."""
    columns = {"properties": {"x": {"type": "integer"}}}
    values, refused = decoded(columns, {"x": "5"}, {"x": True}, {"x": 5.0}, writer={"properties": {"x": {}}})
    assert values == [None, None, {"x": 5}]
    assert refused[0].endswith('Not exactly int64: "5" - at `$.x`')
    assert refused[1].endswith("Not exactly int64: true - at `$.x`")


def alternating(depth: int, key: str) -> Any:
    """Definitions that each have the next one twice."""
    names = [{"$ref": f"#/definitions/d{number}"} for number in range(1, depth + 1)]
    made = {f"d{number}": {key: [name, name]} for number, name in enumerate(names)}
    return {**made, f"d{depth}": {"type": "string"}}


@pytest.mark.parametrize("key", ["anyOf", "oneOf"])
def test_the_reason_of_many_alternatives_is_short(key: str) -> None:
    """A schema of 2 KB took 16 s and 700 MB to say why one value is not valid."""
    schema = {"properties": {"x": {"$ref": "#/definitions/d0"}}, "definitions": alternating(14, key)}
    started = time.process_time()
    _, refused = decoded({"properties": {"x": {}}}, *[{"x": 5}] * 1_000, writer=schema)
    assert time.process_time() - started < 2
    assert len(refused) == 1_000
    assert "it does not fit its schema, which has too many alternatives to say why" in refused[0]


def test_the_reason_of_alternatives_within_themselves_is_short() -> None:
    either = [{"properties": {name: {"$ref": "#/definitions/T"}, "v": {"type": "string"}}} for name in ("a", "b")]
    schema = {"properties": {"x": {"$ref": "#/definitions/T"}}, "definitions": {"T": {"anyOf": either}}}
    _, refused = decoded({"properties": {"x": {}}}, {"x": {"v": 5}}, writer=schema)
    assert "too many alternatives" in refused[0]


def test_the_reason_of_a_list_within_itself_is_the_rule() -> None:
    link = {"properties": {"next": {"anyOf": [{"type": "null"}, {"$ref": "#/definitions/T"}]}, "v": {"type": "string"}}}
    schema = {"properties": {"x": {"$ref": "#/definitions/T"}}, "definitions": {"T": link}}
    _, refused = decoded({"properties": {"x": {}}}, {"x": {"v": 5}}, writer=schema)
    assert "it is not of type string - at `$.x.v`" in refused[0]


@pytest.mark.parametrize("key", ["anyOf", "oneOf", "allOf"])
def test_a_schema_of_too_many_alternatives_is_refused(key: str) -> None:
    """Whether a value is valid would take longer than any batch has time."""
    schema = {"properties": {"x": {"$ref": "#/definitions/d0"}}, "definitions": alternating(40, key)}
    with pytest.raises(JsonSchemaUnusableError, match=r"make 1,099,511,627,776 alternatives"):
        decoded({"properties": {"x": {}}}, {"x": 5}, writer=schema)


def test_a_schema_that_is_nested_too_deep_is_refused() -> None:
    schema: Any = {}
    for _ in range(900):
        schema = {"not": schema}
    with pytest.raises(JsonSchemaUnusableError, match="nested too deep"):
        decoded({"properties": {"x": {}}}, {"x": 5}, writer=schema)


def test_a_schema_of_a_megabyte_decodes_in_time() -> None:
    about = {"type": "string", "pattern": "^a", "description": "x" * 60}
    text = json.dumps({"properties": {f"field_number_{number}": about for number in range(9_000)}})
    assert len(text) > 1_000_000
    started = time.process_time()
    made = JsonSchemaValues(arrow_of(read_schema(SchemaText(text))), schema=text)
    array, refused = made.decode(pa.array([b'{"field_number_1": "a"}', b'{"field_number_1": "b"}'], pa.binary()))
    assert time.process_time() - started < 10
    assert array[0].as_py()["field_number_1"] == "a"
    assert "does not match the pattern ^a" in refused[1]


def test_numbers_keep_their_text_where_any_value_may_be() -> None:
    (read,), _ = decoded({"properties": {"x": {}}}, b'{"x": 1.10}')
    assert read == {"x": "1.10"}


NESTED = {"a": {"properties": {"b": {"type": "array", "items": {"type": "integer", "maximum": 5}}}, "required": ["b"]}}


@pytest.mark.parametrize(
    ("schema", "value", "says"),
    [
        (NESTED, {"a": {"b": [1, "x"]}}, "it is not of type integer - at `$.a.b[1]`"),
        (NESTED, {"a": {"b": [9]}}, "it is above 5 - at `$.a.b[0]`"),
        (NESTED, {"a": {}}, "it has no field `b` - at `$.a`"),
        (
            {"a": {"properties": {"y": {}}, "additionalProperties": False}},
            {"a": {"z": 1}},
            "it has the field `z`, which the schema does not allow",
        ),
        ({"a": {"enum": ["A"]}}, {"a": "B"}, "it is none of the 1 values of its enum - at `$.a`"),
        ({"a": {"const": "A"}}, {"a": "B"}, 'it is not "A"'),
        ({"a": {"pattern": "^x+$"}}, {"a": "y"}, "it does not match the pattern ^x+$"),
        ({"a": {"multipleOf": 0.01, "type": "number"}}, {"a": 0.005}, "it is no multiple of 0.01"),
        (
            {"a": {"oneOf": [{"type": "integer"}, {"minimum": 2}]}},
            {"a": 3},
            "does not fit exactly one schema of its oneOf",
        ),
        ({"a": {}, "b": False}, {"b": 1}, "it has what the schema never allows - at `$.b`"),
        ({"a": {"uniqueItems": True}}, {"a": [1, 1]}, "it has an element twice"),
        ({"a": {"contains": {"type": "string"}}}, {"a": [1]}, "does not fit the rule contains"),
        ({"a": {"type": "integer"}}, {"a": 2**63}, "Not exactly int64: 9223372036854775808 - at `$.a`"),
        ({"a": DECIMAL}, {"a": "!"}, 'Not exactly decimal128(38, 2): "!" - at `$.a`'),
        ({"a": DECIMAL}, {"a": 0.001}, "Not exactly decimal128(38, 2): 0.001 - at `$.a`"),
        (
            {"a": {"type": "string", "format": "date"}},
            {"a": "tomorrow"},
            "Not exactly date32[day]: tomorrow - at `$.a`",
        ),
        ({"a": {}}, b'{"a": NaN}', "JSON is malformed"),
        ({"a": {}}, b'{"a": 1e999}', "Number out of range"),
        ({"a": {}}, b'{"b": ' + b"1" * 5_000 + b"}", "Integer value out of range"),
        ({"a": {}}, b'{"a": "\xff"}', "utf-8"),
        ({"a": {}}, b'{"a": ' + b"[" * 100_000, "recursion"),
        ({"a": {}}, b"[]", "Expected `object`, got `array`"),
        ({"a": {}}, b"null", "Expected `object`, got `null`"),
        ({"a": {}}, b"", "Input data was truncated"),
        ({"a": {"type": "boolean"}}, b'{"a": "x", "a": true}', "got `str` - at `$.a`"),
        *(
            ({"a": {"type": "integer"}}, b'{"a": %s}' % number, f"Not exactly int64: {number.decode()} - at `$.a`")
            for number in (b"9223372036854775808.0", b"-9223372036854775809.0", b"1e19", b"1e300")
        ),
        ({"a": {"type": "integer"}}, b'{"a": 1.5}', "it is not of type integer - at `$.a`"),
        ({"a": {"type": "integer", "connect.type": "int8"}}, b'{"a": 1.28e2}', "Not exactly int8: 1.28e2 - at `$.a`"),
    ],
)
def test_a_reason_names_the_place_and_the_rule(schema: Any, value: Any, says: str) -> None:
    """And its neighbours are not refused."""
    values, refused = decoded({"title": "Order", "properties": schema}, None, {}, value, None)
    assert values[2] is None
    assert values[1] is not None
    assert list(refused) == [2]
    assert says in refused[2]
    assert refused[2].startswith("no JSON object of Order: ")


@pytest.mark.parametrize("wrap", [lambda kind: kind, lambda kind: {"type": "array", "items": kind}])
def test_a_time_of_another_unit_is_not_read(wrap: Any) -> None:
    """The number is valid by both schemas: it would be another time."""

    def at(title: str) -> Any:
        return {"properties": {"x": {"properties": {"at": wrap({"type": "integer", "title": title})}}}}

    micros = at(f"{DEBEZIUM}MicroTimestamp")
    assert decoded(at(f"{DEBEZIUM}Timestamp"), writer=at(f"{CONNECT}Timestamp"))[1] == {}
    with pytest.raises(JsonSchemaError, match="was microseconds, and is read as milliseconds"):
        decoded(at(f"{DEBEZIUM}Timestamp"), writer=micros)
    with pytest.raises(UnreadableSchemaError, match=r"^it was written by another schema: `\$.x.at"):
        values_of(
            pa.struct([]),
            writer=SchemaText(json.dumps(micros)).to_json(),
            schema=json.dumps(at(f"{CONNECT}Timestamp")),
        )


def test_of_a_name_that_is_there_twice_the_last_value_counts() -> None:
    assert decoded({"properties": {"a": {"type": "integer"}}}, b'{"a": 2, "a": 1}')[0] == [{"a": 1}]


def test_a_text_cannot_hold_up_a_task_by_a_pattern() -> None:
    schema = {"properties": {"a": {"type": "string", "pattern": r"^((a+)\2?)+$"}}}
    started = time.process_time()
    _, refused = decoded(schema, *[{"a": "a" * 40 + "b"}] * 20)
    assert time.process_time() - started < 5
    assert {reason.partition(": ")[2] for reason in refused.values()} == {
        "it takes too long to compare with its pattern - at `$.a`"
    }


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("base", ["", "http://shop.test/schemas/order.json", "urn:example:order"])
def test_references_are_those_that_are_given(draft: str, base: str) -> None:
    root: Any = {
        "$schema": draft,
        "properties": {"a": {"$ref": "common.json#/definitions/x"}, "b": {"$ref": "#/definitions/b"}},
    }
    root["definitions"] = {"b": {"type": "boolean"}}
    root |= {"id" if "draft-04" in draft else "$id": base} if base else {}
    common = {"definitions": {"x": {"$ref": "other.json"}}}
    values, refused = decoded(
        root, {"a": 1, "b": True}, {"a": "x"}, {"b": 1}, **{"common.json": common, "other.json": {"type": "integer"}}
    )
    assert values[0] == {"a": 1, "b": True}
    assert sorted(refused) == [1, 2]


def test_what_is_valid_depends_on_the_draft() -> None:
    """1.0 is an integer since draft 6; a bound beside `exclusiveMaximum: true` is of draft 4."""
    kind = {"type": "integer", "maximum": 5, "exclusiveMaximum": True}
    schema = {"$schema": DRAFTS[0], "properties": {"x": kind}}
    assert sorted(decoded(schema, {"x": 1}, {"x": 1.0}, {"x": 5})[1]) == [1, 2]


def test_values_are_validated_by_their_writers_schema() -> None:
    reader = {"properties": {"a": {"type": "integer"}}, "required": ["a"]}
    writer = {"properties": {"a": {"type": ["integer", "string"]}}}
    values, refused = decoded(reader, {}, {"a": "x"}, {"a": 1}, writer=writer)
    assert values == [{"a": None}, None, {"a": 1}]
    assert refused[1].endswith('Not exactly int64: "x" - at `$.a`')


@pytest.mark.parametrize("kind", [{"pattern": "(["}, {"required": "a"}, {"minimum": "1"}])
def test_a_schema_that_is_not_valid_itself_is_an_error(kind: Any) -> None:
    with pytest.raises(JsonSchemaUnusableError):
        decoded({"properties": {"a": {"type": "string", **kind}}})


class TestPublishedBugs:
    """Of Confluent's JsonSchemaConverter."""

    def test_the_order_of_a_one_of_makes_no_difference(self) -> None:
        """confluentinc/schema-registry#2711: a schema with oneOf always failed."""
        for members in ([{"type": "null"}, {"type": "string"}], [{"type": "string"}, {"type": "null"}]):
            assert [x_of({"oneOf": members}, value) for value in ("a", None)] == ["a", None]

    def test_an_enum_may_have_a_null(self) -> None:
        """confluentinc/schema-registry#3054."""
        for kind in ({"enum": ["A", None]}, {"type": ["string", "null"], "enum": ["A", None]}):
            assert [x_of(kind, value) for value in ("A", None)] == ["A", None]

    def test_an_enum_need_not_be_of_texts(self) -> None:
        """confluentinc/schema-registry#1870."""
        assert x_of({"oneOf": [{"type": "integer"}, {"enum": [1, 2]}], "not": {"const": 3}, "title": "x"}, 5) == 5

    def test_a_decimal_is_base64_where_the_schema_says_number(self) -> None:
        """confluentinc/schema-registry#2442."""
        assert x_of({"oneOf": [{"type": "null"}, DECIMAL]}, "MDk=") == Decimal("123.45")

    def test_only_some_fields_may_have_an_index(self) -> None:
        """awslabs/aws-glue-schema-registry#135: a NullPointerException, and two fields with one index."""
        kinds = {name: {"type": "integer", "connect.index": number} for name, number in (("a", 7), ("b", 7), ("c", 2))}
        made = read_schema(SchemaText(json.dumps({"properties": {"z": {"type": "integer"}, **kinds}})))
        assert [name for name, _ in made.parts] == ["c", "a", "b", "z"]

    def test_a_field_that_is_missing_is_as_one_that_is_null(self) -> None:
        schema = {"properties": {"a": {"type": ["integer", "null"], "default": 5}}}
        assert decoded(schema, {}, {"a": None})[0] == [{"a": None}, {"a": None}]

    def test_an_added_field_is_refused_only_if_the_schema_says_so(self) -> None:
        kinds = {"properties": {"a": {"type": "integer"}}}
        assert decoded(kinds, {"a": 1, "new": 2})[0] == [{"a": 1}]
        assert list(decoded({**kinds, "additionalProperties": False}, {"a": 1, "new": 2})[1]) == [0]
