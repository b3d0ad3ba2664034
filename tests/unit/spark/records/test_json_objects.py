"""`JsonObjects` beside Python's own parser: what it takes, and what it makes of each value."""

from __future__ import annotations

import json
import math
from datetime import UTC, date, datetime, time
from decimal import Decimal
from types import SimpleNamespace
from typing import Any
from zoneinfo import ZoneInfo

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace.spark.records import json_objects
from headrace.spark.records.decoding import RecordDecoding, UnknownTimeZoneError
from headrace.spark.records.json_objects import JsonObjects, Utf8Texts
from headrace.stream import KafkaInput, Utf8Decoder

AT = datetime(2026, 1, 2, 3, 4, 5, 123456, UTC)


def decode(kind: pa.DataType, *values: bytes | None, zone: str = "UTC") -> tuple[list[Any], dict[int, str]]:
    decoded, refused = JsonObjects(pa.struct([("v", kind)]), zone, "v").decode(pa.array(values, pa.binary()))
    decoded.validate(full=True)
    return [row and row["v"] for row in decoded.to_pylist()], refused


REFUSED = "refused"
DECIMAL = pa.decimal128(10, 2)
# Python's Decimal takes all of these.
NO_JSON_NUMBERS = (
    "1_000",
    "\u0661\u0662",
    "\uff11",
    " 1",
    "1 ",
    r"1\n",
    "\u20031",
    "+1",
    "01",
    "-01",
    "1.",
    ".5",
    "1e1_0",
)
TIME = pa.timestamp("us", "UTC")
LOCAL_TIME = pa.timestamp("us")


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        (pa.bool_(), "true", True),
        (pa.bool_(), "1", REFUSED),
        (pa.bool_(), '"true"', REFUSED),
        (pa.int32(), "2147483647", 2147483647),
        (pa.int32(), "2147483648", REFUSED),
        (pa.int8(), "128", REFUSED),
        (pa.int64(), "9223372036854775808", REFUSED),
        (pa.int64(), "1.0", REFUSED),
        (pa.int64(), "1e2", REFUSED),
        (pa.int64(), '"1"', REFUSED),
        (pa.int64(), "true", REFUSED),
        (pa.float64(), "0.1", 0.1),
        (pa.float64(), "9007199254740993", 9007199254740992.0),
        (pa.float64(), "1e400", REFUSED),
        (pa.float64(), "NaN", REFUSED),
        (pa.float64(), '"NaN"', REFUSED),
        (pa.float64(), "Infinity", REFUSED),
        (pa.float32(), "1e39", REFUSED),
        (DECIMAL, "1.239", REFUSED),
        (DECIMAL, "1.230", Decimal("1.23")),
        (DECIMAL, "12345678.90", Decimal("12345678.90")),
        (DECIMAL, "123456789", REFUSED),
        (DECIMAL, "1e3", Decimal(1000)),
        (DECIMAL, '"1.5"', Decimal("1.50")),
        (DECIMAL, '"NaN"', REFUSED),
        (DECIMAL, '"sNaN"', REFUSED),
        (DECIMAL, '"-0.50e1"', Decimal("-5.00")),
        (DECIMAL, r'"\u0031"', Decimal(1)),
        *((DECIMAL, f'"{text}"', REFUSED) for text in NO_JSON_NUMBERS),
        *((pa.list_(DECIMAL), f'["{text}"]', REFUSED) for text in NO_JSON_NUMBERS),
        (DECIMAL, "true", REFUSED),
        (DECIMAL, "[1]", REFUSED),
        # Arrow crashed on this one.
        (DECIMAL, "1e-999999999", REFUSED),
        (DECIMAL, "1e999999999", REFUSED),
        (pa.string(), '"x"', "x"),
        (pa.string(), "1.10", "1.10"),
        (pa.string(), '{"a" : [1.0]}', '{"a" : [1.0]}'),
        (pa.string(), "false", "false"),
        (pa.string(), '"\\ud800"', REFUSED),
        (pa.string(), '"\\ud83d\\ude00"', "\U0001f600"),
        (pa.binary(), '"AQI="', b"\x01\x02"),
        (pa.binary(), '"AQI"', REFUSED),
        (pa.date32(), '"2026-01-05"', date(2026, 1, 5)),
        (pa.date32(), '"2026-1-5"', REFUSED),
        (pa.date32(), '"2026-01-02T03:04:05Z"', REFUSED),
        (pa.date32(), '"2026-02-30"', REFUSED),
        (pa.date32(), "20000", REFUSED),
        (pa.date32(), '"0000-12-31"', REFUSED),
        (pa.date32(), '"9999-12-31"', date(9999, 12, 31)),
        (pa.time64("ns"), '"03:04:05.5"', time(3, 4, 5, 500000)),
        (pa.time64("ns"), '"25:00:00"', REFUSED),
        (TIME, '"2026-01-02T03:04:05.123456Z"', AT),
        (TIME, '"2026-01-02T05:04:05.123456+02:00"', AT),
        (TIME, '"2026-01-02T03:04:05.123456000Z"', AT),
        (TIME, '"2026-01-02T03:04:05.1234567Z"', REFUSED),
        (TIME, '"2026-01-02 03:04:05.123456"', AT),
        (TIME, '"2026-01-02"', datetime(2026, 1, 2, tzinfo=UTC)),
        (TIME, '"2026-1-2T03:04:05Z"', REFUSED),
        (TIME, "1767323045", datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)),
        (TIME, "1767323045123", REFUSED),
        (TIME, "1767323045.5", REFUSED),
        (TIME, '"9999-12-31T23:59:59.999999Z"', datetime(9999, 12, 31, 23, 59, 59, 999999, tzinfo=UTC)),
        (TIME, '"9999-12-31T23:59:59-01:00"', REFUSED),
        (TIME, '"0001-01-01T00:00:00Z"', datetime(1, 1, 1, tzinfo=UTC)),
        (TIME, '"0001-01-01T00:30:00+01:00"', REFUSED),
        (LOCAL_TIME, '"0000-01-01T00:00:00"', REFUSED),
        (LOCAL_TIME, '"2026-01-02T03:04:05.123456"', AT.replace(tzinfo=None)),
        (LOCAL_TIME, '"2026-01-02T03:04:05.123456Z"', REFUSED),
        (pa.list_(pa.int8()), "[1,null]", [1, None]),
        (pa.list_(pa.int8()), "[1,300]", REFUSED),
        (pa.map_(pa.string(), pa.string()), '{"a":1.0,"b":null}', [("a", "1.0"), ("b", None)]),
        (pa.struct([("a b", pa.int32())]), '{"a b":7,"more":1}', {"a b": 7}),
    ],
)
def test_a_value_is_converted_exactly_or_refused(kind: pa.DataType, text: str, expected: Any) -> None:
    (value,), refused = decode(kind, b'{"v":%b}' % text.encode())
    assert (value, bool(refused)) == (None if expected == REFUSED else expected, expected == REFUSED)


@pytest.mark.parametrize(
    "text",
    [
        b'{"v":2}] {"v":3}',
        b'{"v":4}],{"v":5}]',
        b'{"v":1} more',
        b"{'v':1}",
        b'{"v":1,}',
        b'{"v":01}',
        b'{"other":"\xff"}',
        b'{"other":"\\ud800"}',
        b'\xef\xbb\xbf{"v":1}',
        b"[1]",
        b"null",
        b"",
        b'{"other":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
)
def test_what_is_not_one_json_object_is_refused(text: bytes) -> None:
    values, refused = decode(pa.int32(), b'{"v":1}', text, None, b' {"v":3}\r\n')
    assert (values, list(refused)) == ([1, None, None, 3], [1])


def test_the_reason_names_the_fields_the_value_and_the_place() -> None:
    kind = pa.list_(pa.struct([("d", DECIMAL)]))
    _, refused = decode(kind, b'{"v":[{"d":1.239}]}', b'{"v":1}')
    assert refused == {
        0: "no JSON object of v: Not exactly decimal128(10, 2): 1.239 - at `$.v[].d`",
        1: "no JSON object of v: Expected `array | null`, got `int` - at `$.v`",
    }


def test_only_the_column_that_does_not_fit_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a producer changes one of 200 fields, no record fits, and each of them would be converted alone."""
    converted = []

    def whole_numbers(values: Any, kind: pa.DataType) -> pa.Array:
        converted.append(len(values))
        return pa.array(values, kind)

    conversions = ((pa.types.is_integer, int, whole_numbers), *json_objects._CONVERSIONS)
    monkeypatch.setattr(json_objects, "_CONVERSIONS", conversions)
    kind = pa.struct([("p", pa.struct([("n", pa.int64()), ("d", DECIMAL)])), ("t", TIME)])
    texts = [b'{"p":{"n":1,"d":1.239},"t":1}'] * 64
    texts[3] = b'{"p":{"n":3,"d":1.23},"t":1700000000000}'
    texts[5:9] = [b'{"p":null}', b'{"p":{"n":9223372036854775808,"d":1.239}}', b'{"p":{"n":7}}', b"{}"]
    decoded, refused = JsonObjects(kind).decode(pa.array(texts, pa.binary()))
    assert [row for row in range(64) if row not in refused] == [5, 7, 8]
    assert decoded.take(pa.array([3, 5, 6, 7, 8])).to_pylist() == [
        None,
        {"p": None, "t": None},
        None,
        {"p": {"n": 7, "d": None}, "t": None},
        {"p": None, "t": None},
    ]
    assert [refused[row][-8:] for row in (0, 3, 6)] == [" `$.p.d`", "at `$.t`", " `$.p.n`"]
    assert sum(converted) < 64 * 5


def test_of_a_name_given_twice_the_last_counts_and_each_must_fit() -> None:
    values, refused = decode(pa.int32(), b'{"v":1,"v":2}', b'{"v":"x","v":2}')
    assert (values, list(refused)) == ([2, None], [1])


def test_times_without_an_offset_are_in_the_given_zone() -> None:
    (summer, night), refused = decode(
        TIME, b'{"v":"2026-07-01T12:00:00"}', b'{"v":"2026-03-29T02:30:00"}', zone="Europe/Berlin"
    )
    assert summer == datetime(2026, 7, 1, 12, tzinfo=ZoneInfo("Europe/Berlin"))
    assert (night, list(refused)) == (None, [1]), "in the night of the change this time does not exist"


def test_a_session_whose_time_zone_is_not_known_is_refused() -> None:
    source = KafkaInput(bootstrap_servers="x:1", topics="t", value_decoder=Utf8Decoder())
    spark: Any = SimpleNamespace(conf={"spark.sql.session.timeZone": "GMT+2"})
    with pytest.raises(UnknownTimeZoneError, match="'GMT\\+2', which is no name"):
        RecordDecoding.of(source, spark, "")
    with pytest.raises(UnknownTimeZoneError, match="Nowhere"):
        next(RecordDecoding({}, "Nowhere").run(iter([pa.record_batch({"value": [b"{}"]})])))


def test_bytes_that_are_not_utf8_are_refused_as_text() -> None:
    values, refused = Utf8Texts.decode(pa.array([b"a", b"\xc0\x80", None], pa.binary()))
    assert values.to_pylist() == ["a", None, None]
    assert refused == {1: "not UTF-8: invalid start byte at byte 0"}


def strict(text: bytes) -> Any:
    """The document by Python's parser, without what it takes beyond RFC 8259; raises ValueError."""

    def no_constant(name: str) -> Any:
        raise ValueError(name)

    parsed = json.loads(text.decode(), parse_constant=no_constant, parse_float=Decimal)
    # A lone surrogate is no Unicode text.
    json.dumps(parsed, ensure_ascii=False, default=str).encode()
    return parsed


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
OBJECTS = st.dictionaries(st.sampled_from(["i", "x", "s", "d", "z"]), JSON).map(
    lambda value: json.dumps(value).encode()
)
KIND = pa.struct([("i", pa.int64()), ("x", pa.float64()), ("s", pa.string()), ("d", pa.decimal128(38, 6))])


def exact(name: str, value: Any, decoded: Any) -> bool:
    """Whether ``found`` is what the table of conversions says for ``value``; None: refused."""
    if value is None:
        return decoded is None
    is_number = isinstance(value, int | Decimal) and not isinstance(value, bool)
    if name == "i":
        return isinstance(value, int) and not isinstance(value, bool) and decoded == value
    if name == "x":
        return is_number and decoded == float(value)
    if name == "d":
        return is_number and decoded == Decimal(value)
    if isinstance(value, str):
        return bool(decoded == value)
    return isinstance(decoded, str) and json.loads(decoded, parse_float=Decimal) == value


@settings(max_examples=150, deadline=None)
@given(
    OBJECTS
    | st.binary(max_size=20)
    | st.tuples(OBJECTS, st.integers(0, 40), st.binary(max_size=3)).map(lambda t: t[0][: t[1]] + t[2] + t[0][t[1] :])
    | st.text("{}[]\":,.0123456789eE+-nulltrueIfsd\\ '", max_size=12).map(lambda text: b'{"z":' + text.encode() + b"}")
)
@example(b'{"i":1}]')
@example(b'{"x":1e400}')
def test_a_record_is_taken_if_it_is_one_object_of_exact_values(text: bytes) -> None:
    array, refused = JsonObjects(KIND).decode(pa.array([text], pa.binary()))
    (decoded,) = array.to_pylist()
    try:
        value = strict(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        assert refused
        return
    if decoded is not None:
        assert not refused
        assert all(exact(name, value.get(name), decoded[name]) for name in decoded)
        return
    assert any(not fits(name, value[name]) for name in value) or len(set(_names(text))) < len(_names(text))


def fits(name: str, value: Any) -> bool:
    """Whether the type of the column takes the value exactly."""
    if value is None or name in ("s", "z"):
        return True
    if isinstance(value, bool) or not isinstance(value, int | Decimal):
        return False
    if name == "i":
        return isinstance(value, int) and -(2**63) <= value < 2**63
    if name == "x":
        return math.isfinite(_float(value))
    return abs(value) < 10**32 and Decimal(value) == round(Decimal(value), 6)


def _float(value: int | Decimal) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _names(text: bytes) -> list[str]:
    names: list[str] = []
    json.loads(text.decode(), object_pairs_hook=lambda pairs: names.extend(name for name, _ in pairs))
    return names
