"""Documents of MongoDB, which Debezium sends as texts in extended JSON, as plain JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from headrace.spark.records.exact_columns import YEARS_1_TO_9999
from headrace.spark.records.json_objects import JSON_NUMBER, REFUSED

_SHOWN_CHARACTERS = 60


def plain_document(text: str) -> bytes:
    """A document of MongoDB's extended JSON as plain JSON. Raises ValueError."""
    try:
        return msgspec.json.encode(_plain(msgspec.json.decode(text)))
    except (ValueError, TypeError, KeyError, ArithmeticError, pa.ArrowException, *REFUSED) as error:
        raise ValueError(
            f"its row is a text that is no document of MongoDB: {str(error)[:_SHOWN_CHARACTERS]}"
        ) from None


def _plain(given: Any) -> Any:
    if isinstance(given, list):
        return [_plain(each) for each in given]
    if not isinstance(given, dict):
        return given
    if len(given) == 1 and (turn := _mongo_words().get(next(iter(given)))) is not None:
        return turn(next(iter(given.values())))
    if "$binary" in given:
        held = given["$binary"]
        return held.get("base64") if isinstance(held, dict) else held
    return {name: _plain(each) for name, each in given.items()}


@lru_cache(maxsize=1)
def _mongo_words() -> Mapping[str, Callable[[Any], Any]]:
    return {
        "$oid": str,
        "$numberLong": int,
        "$numberInt": int,
        "$numberDecimal": _mongo_decimal,
        "$numberDouble": _mongo_double,
        "$symbol": str,
        "$uuid": str,
        "$date": _mongo_date,
    }


_NO_NUMBERS = ("NaN", "Infinity", "-Infinity")


def _mongo_decimal(given: Any) -> Any:
    """The number with all its digits, which have no room in a double."""
    if given in _NO_NUMBERS:
        return given
    if not JSON_NUMBER.fullmatch(given):
        raise ValueError(f"{given[:_SHOWN_CHARACTERS]} is no decimal")
    return msgspec.Raw(given.encode())


def _mongo_double(given: Any) -> Any:
    if given in _NO_NUMBERS:
        return given
    number = float(given)
    if not math.isfinite(number):
        raise ValueError(f"{str(given)[:_SHOWN_CHARACTERS]} is beyond a double")
    return number


def _mongo_date(given: Any) -> Any:
    if isinstance(given, str):
        return given
    millis = int(given["$numberLong"]) if isinstance(given, dict) else int(given)
    first, last = YEARS_1_TO_9999
    if not first * 1_000 <= millis < (last + 1) * 1_000:
        raise ValueError("the year is not 1 to 9999")
    return pc.strftime(pa.scalar(millis, pa.timestamp("ms")), format="%Y-%m-%dT%H:%M:%SZ").as_py()
