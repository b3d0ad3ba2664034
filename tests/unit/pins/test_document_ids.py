"""The ids and versions of documents, and the ids of their dead letters, by each kind of ids of an output."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
from tests.unit.pins.freezing import frozen

from headrace.elasticsearch.columns import VERSION, id_column
from headrace.elasticsearch.dead_letters import dead_letter
from headrace.elasticsearch.document_ids import identify
from headrace.elasticsearch.options import IndexingOptions
from headrace.elasticsearch.target import Target
from headrace.elasticsearch.verdicts import Reason
from headrace.stream import ColumnIds, ElasticsearchOutput, KeyIds, RecordIds

REASON = Reason("type", "text")
BATCH_TIME_MS = 1_700_000_010_000
AT = datetime(2026, 1, 2, 3, 4, 5, 678_901, UTC)
KINDS: dict[str, Any] = {
    "record": RecordIds(),
    "record, with a column of its rows": RecordIds(rows="a"),
    "record, with columns of its rows": RecordIds(rows=("a", "b")),
    "key": KeyIds(),
    "key, with a version of its own": KeyIds(version_from="v"),
    "a column": ColumnIds(columns=("a",)),
    "a column, without the batch time": ColumnIds(columns=("a",), with_batch_time=False),
    "columns": ColumnIds(columns=("a", "b")),
    "columns, without the batch time": ColumnIds(columns=("a", "b"), with_batch_time=False),
}
VALUES: dict[str, Any] = {
    "texts": pa.array(["x", "x+y%z~/", "", "é" * 3, None, "l" * 600]),
    "numbers": pa.array([1, -2, 3, 4, None, 1 << 62], pa.int64()),
    "decimals": pa.array([Decimal("1.50"), Decimal("-2.00"), Decimal(0), None, None, None], pa.decimal128(10, 2)),
    "booleans": pa.array([True, False, True, None, None, None]),
    "days": pa.array([date(2026, 1, 2), date(1969, 12, 31), None, None, None, None]),
    "times": pa.array([AT, None, None, None, None, None], pa.timestamp("us", "Asia/Tokyo")),
    "bytes": pa.array([b"x", "é".encode(), b"\xff", b"", None, None]),
}
"""Values of the column a, for six rows."""


def rows(values: Any, incarnations: Sequence[int] = (1,) * 6) -> pa.RecordBatch:
    return pa.record_batch(
        {
            "topic": ["flights", "flights", "flights", "a.b_c-d", "flights", "flights"],
            "partition": pa.array([0, 0, 12, 0, 0, 1], pa.int32()),
            "offset": pa.array([7, 7, 0, (1 << 62), 8, 9], pa.int64()),
            "incarnation": pa.array(incarnations, pa.int32()),
            "key": pa.array([b"k", "ü/+".encode(), b"", None, b"\xff", b"k" * 513]),
            "document": pa.array(["{}"] * 6),
            id_column(0): values,
            id_column(1): pa.array(["b", "1+2", "b", "b", "b", "b"]),
            VERSION: pa.array([5, -1, None, 6, 7, 8]),
        }
    )


def options_of(ids: Any) -> IndexingOptions:
    output = ElasticsearchOutput(hosts="http://127.0.0.1:9200", index="flights", document_ids=ids)
    return IndexingOptions.of(output, Target.of(output, "orders"), batch_time_ms=BATCH_TIME_MS)


def identified(ids: Any, batch: pa.RecordBatch) -> Iterator[str]:
    """Of each row the id with its version, or why there is none."""
    found = identify(batch, options_of(ids))
    versions = [None] * len(batch) if found.versions is None else found.versions.to_pylist()
    for row, (id_, version) in enumerate(zip(found.ids.to_pylist(), versions, strict=True)):
        suffix = "" if version is None else f" version {version}"
        yield f"  - {found.rejected[row].type}" if row in found.rejected else f"  {id_}{suffix}"


def test_document_ids() -> None:
    texts, column = rows(VALUES["texts"]), ColumnIds(columns=("a",), with_batch_time=False)
    cases = [
        *((kind, ids, texts) for kind, ids in KINDS.items()),
        *((f"a column of {what}", column, rows(values)) for what, values in VALUES.items()),
        ("record, of topics that were created again", RecordIds(), rows(VALUES["texts"], (1, 2, 3, 1, 1, 1))),
    ]
    frozen("document_ids.txt", "".join(f"{line}\n" for kind, *of in cases for line in (kind, *identified(*of))))


def test_dead_letter_ids() -> None:
    batch = rows(VALUES["texts"])
    letters = (f"{kind}: {dead_letter(batch, 1, REASON, options_of(ids)).id}\n" for kind, ids in KINDS.items())
    frozen("dead_letter_ids.txt", "".join(letters))
