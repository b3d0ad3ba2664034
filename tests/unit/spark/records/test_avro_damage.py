"""What fastavro reads of damaged Avro values, and a walk through their bytes finds."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.avro_examples import record
from tests.unit.spark.records.test_avro_columns import Schemas

from headrace.formats.avro_schema import AvroSchemaError, read_schema
from headrace.spark.records.avro.damage import AvroDamage, DamagedError
from headrace.spark.records.avro.scan import AvroScan

MANY = 100


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([0, 0.5]))
def test_values_that_a_scan_proves_are_not_damaged(seed: int, damaged: float) -> None:
    made = Schemas(seed)
    schema = record(*[(f"x{n}", made.of(3)) for n in range(made.random.randrange(1, 4))])
    try:
        plain = read_schema(json.dumps(schema)).plain
    except AvroSchemaError:
        return
    values = [made.value(schema) for _ in range(MANY)]
    damage = AvroDamage(plain)
    for value in values:
        assert damage._walk(value, 0) == len(value)
    values = [made.damaged(value) if made.random.random() < damaged else value for value in values]
    places = np.cumsum([0, *map(len, values)])
    data = np.frombuffer(b"".join(values) + b"\0", np.uint8)
    _, proved = AvroScan(plain).scan(data, places[:-1], places[1:])
    for row in np.flatnonzero(proved):
        damage.check(values[row])


@pytest.mark.parametrize("number", [-(2**63), 2**63 - 1, -1, 0, 2**40])
def test_the_longest_numbers_are_not_damaged(number: int) -> None:
    left, value = (number << 1) ^ (number >> 63), bytearray()
    while left > 0x7F:
        value.append(left & 0x7F | 0x80)
        left >>= 7
    AvroDamage("long").check(bytes([*value, left]))


def test_a_field_that_no_column_has_is_looked_at_too() -> None:
    damage = AvroDamage(read_schema(json.dumps(record(("n", "int"), ("gone", "boolean")))).plain)
    damage.check(b"\2\1")
    with pytest.raises(DamagedError, match="a truth value is 3, and not 0 or 1"):
        damage.check(b"\2\3")
