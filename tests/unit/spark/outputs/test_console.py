from __future__ import annotations

import io
from typing import Any

from headrace.spark.outputs.functions import print_batch


class Session:
    __module__ = "pyspark.sql.connect.session"


class Rows:
    """As much of a Connect DataFrame as the console takes."""

    sparkSession = Session()  # noqa: N815 - Spark's name

    def __init__(self, *rows: tuple[Any, ...]) -> None:
        self._rows = rows

    def limit(self, count: int) -> Rows:
        return Rows(*self._rows[:count])

    def collect(self) -> list[tuple[Any, ...]]:
        return list(self._rows)


def printed(frame: Any, rows: int = 2) -> str:
    out = io.StringIO()
    print_batch(frame, batch_time_ms=1_700_000_010_000, rows=rows, out=out)
    return out.getvalue()


def test_a_batch_is_printed_as_spark_streaming_did() -> None:
    assert printed(Rows(("a", 1), ("b", 2))) == (
        "-------------------------------------------\n"
        "Time: 1700000010000 ms (2023-11-14T22:13:30Z)\n"
        "-------------------------------------------\n"
        "('a', 1)\n"
        "('b', 2)\n"
        "\n"
    )


def test_more_rows_than_asked_for_are_dots() -> None:
    assert printed(Rows((1,), (2,), (3,))).splitlines()[3:] == ["1", "2", "...", ""]


def test_an_empty_batch_has_its_header() -> None:
    assert printed(None).splitlines()[1] == "Time: 1700000010000 ms (2023-11-14T22:13:30Z)"
    assert printed(None) == printed(Rows())


def test_bytes_are_text_where_they_are_utf8() -> None:
    assert printed(Rows((b"gr\xc3\xbcn", b"\xff"))).splitlines()[3] == "('grün', b'\\xff')"


def test_zero_rows_is_the_header_and_whether_there_are_any() -> None:
    assert printed(Rows((1,)), rows=0).splitlines()[3:] == ["...", ""]
