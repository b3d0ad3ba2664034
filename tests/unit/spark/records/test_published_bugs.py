"""Change events that converters and sinks of others got wrong, by their public reports."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from tests.support.change_events import UNAVAILABLE, decode, event, field, with_schema

CONNECT, DEBEZIUM = "org.apache.kafka.connect.data", "io.debezium.time"
TIME = pa.timestamp("us", "UTC")
REPORTED: dict[str, tuple[str, str, Any, pa.DataType, Any]] = {
    # Days since 1970 were taken for milliseconds.
    "confluentinc/kafka-connect-elasticsearch#842": ("int32", f"{CONNECT}.Date", 20_458, pa.date32(), date(2026, 1, 5)),
    "wepay/kafka-connect-bigquery#87": ("int32", f"{DEBEZIUM}.Date", 20_458, pa.date32(), date(2026, 1, 5)),
    # Days of the common era in place of days since 1970.
    "risingwavelabs/risingwave#13486": ("int32", f"{DEBEZIUM}.Date", 0, pa.date32(), date(1970, 1, 1)),
    # The zeros in front of the microseconds were lost.
    "confluentinc/kafka-connect-bigquery#249": (
        *("int64", f"{DEBEZIUM}.MicroTimestamp", 1_767_617_100_000_045, TIME),
        datetime(2026, 1, 5, 12, 45, 0, 45, UTC),
    ),
    "the same in a text": (
        *("int64", f"{DEBEZIUM}.MicroTimestamp", 1_767_617_100_000_045, pa.string()),
        "2026-01-05T12:45:00.000045",
    ),
    # The remainder of a time before 1970 is below 0.
    "debezium/debezium#512": (
        *("int64", f"{DEBEZIUM}.Timestamp", -1, TIME),
        datetime(1969, 12, 31, 23, 59, 59, 999_000, UTC),
    ),
    # A decimal was sent as its base64, or as a double.
    "a decimal of 38 digits": (
        *("bytes", f"{CONNECT}.Decimal", "CUmw9vACMxPESZBQ3jjzTg==", pa.decimal128(38, 10)),
        Decimal("1234567890123456789012345678.9012345678"),
    ),
}


@pytest.mark.parametrize("report", REPORTED)
def test_a_value_that_others_got_wrong(report: str) -> None:
    kind, semantic, value, into, expected = REPORTED[report]
    more = {"parameters": {"scale": "10"}} if kind == "bytes" else {}
    schema = field("v", kind, semantic, **more)
    (made,), refused = decode(with_schema(event("c", None, {"v": value}), schema), row=pa.struct([("v", into)]))
    assert not refused
    assert made["value"]["v"] == expected


def test_a_deletion_is_no_document_of_nulls() -> None:
    """confluentinc/kafka-connect-elasticsearch#230 and #273: rows that were deleted stayed as documents."""
    (deleted, tombstone), refused = decode(event("d", {"id": 1, "name": "a"}, None), None)
    assert not refused
    assert deleted["value"] is None
    # #231 and #719: a record without a value stopped the sink.
    assert tombstone is None


def test_a_large_value_that_was_not_sent_is_no_value() -> None:
    """Many sinks write the words of Debezium's placeholder into the document."""
    _, refused = decode(event("u", None, {"id": 1, "name": UNAVAILABLE}))
    assert "REPLICA IDENTITY FULL" in refused[0]
