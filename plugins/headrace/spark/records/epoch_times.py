"""Numbers of days, milliseconds and so on since 1970, or since midnight, as columns of dates and times.

Each function raises ValueError, or an error of Arrow, if a number is no such time.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from headrace.spark.records.exact_columns import YEARS_1_TO_9999

_SECONDS_A_DAY = 86_400
# Other times are no texts that a JSON document can have.
_YEARS = "the year is not 1 to 9999"


def dates(days: pa.Array, kind: pa.DataType) -> pa.Array:
    """Days since 1970."""
    first, last = YEARS_1_TO_9999
    check_between(days, first // _SECONDS_A_DAY, last // _SECONDS_A_DAY, _YEARS)
    return days.cast(pa.int32()).cast(kind)


def times(numbers: pa.Array, kind: pa.DataType, per_second: int) -> pa.Array:
    """Milliseconds or microseconds since 1970 (int64)."""
    first, last = YEARS_1_TO_9999
    check_between(numbers, first * per_second, (last + 1) * per_second - 1, _YEARS)
    return pc.multiply_checked(numbers, 1_000_000 // per_second).cast(pa.timestamp("us")).cast(kind)


def nanosecond_texts(numbers: pa.Array, kind: pa.DataType, zone: str) -> pa.Array:
    """Nanoseconds since 1970 (int64) as texts of ISO 8601 with nine digits: Spark's times have six."""
    texts = pc.strftime(numbers.cast(pa.timestamp("ns")), format="%Y-%m-%dT%H:%M:%S")
    return pc.binary_join_element_wise(texts, pa.scalar(zone), "").cast(kind)


def times_of_day(numbers: pa.Array, kind: pa.DataType, per_second: int) -> pa.Array:
    """Milliseconds, microseconds or nanoseconds since midnight as texts of ISO 8601."""
    check_between(numbers, 0, _SECONDS_A_DAY * per_second - 1, "no time of a day")
    if per_second == 1_000:
        return numbers.cast(pa.int32()).cast(pa.time32("ms")).cast(kind)
    unit = "us" if per_second == 1_000_000 else "ns"
    return numbers.cast(pa.int64()).cast(pa.time64(unit)).cast(kind)


def check_between(numbers: pa.Array, least: int, most: int, why: str) -> None:
    """Raise ValueError with ``why`` unless all numbers are from ``least`` to ``most``."""
    bounds = pc.min_max(numbers)
    if bounds["min"].is_valid and not (least <= bounds["min"].as_py() and bounds["max"].as_py() <= most):
        raise ValueError(why)
