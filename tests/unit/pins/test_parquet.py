"""The Parquet files of an output: their names, columns and types, and what their metadata says."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
from pyarrow import parquet
from pyspark.sql.types import StructType
from tests.unit.pins.freezing import frozen

from headrace.spark.outputs.parquet import Claim, ParquetSink

AT = datetime(2026, 1, 2, 3, 4, 5, 678_901, UTC)
ROWS = pa.record_batch(
    {
        "text": pa.array(["a", None]),
        "number": pa.array([1, 2], pa.int64()),
        "small": pa.array([1, 2], pa.int8()),
        "decimal": pa.array([Decimal("1.50"), None], pa.decimal128(10, 2)),
        "bytes": pa.array([b"x", None]),
        "time": pa.array([AT, None], pa.timestamp("us", "Asia/Tokyo")),
        "local_time": pa.array([AT.replace(tzinfo=None), None], pa.timestamp("us")),
        "list": pa.array([[1, 2], None], pa.list_(pa.field("item", pa.int32(), nullable=False))),
        "map": pa.array([{"k": 1}, None], pa.map_(pa.string(), pa.int32())),
        "struct": pa.array([{"at": AT}, None], pa.struct([pa.field("at", pa.timestamp("us", "Asia/Tokyo"))])),
    }
)


def described(file: Path) -> str:
    """A Parquet file's schema and metadata, without the version of the library that wrote it."""
    metadata = parquet.read_metadata(file)
    columns = [metadata.row_group(0).column(number) for number in range(metadata.num_columns)]
    physical = [f"{column.path_in_schema} {column.physical_type} {column.compression}" for column in columns]
    kept = sorted((metadata.metadata or {}).keys())
    schema = parquet.read_schema(file).to_string(show_field_metadata=False, show_schema_metadata=False)
    return "\n".join([f"{metadata.num_rows} rows, metadata {kept}", schema, *physical]) + "\n"


def test_parquet_output(tmp_path: Path) -> None:
    claim = Claim(str(tmp_path / "out"), "shop", "files", "", 1_700_000_010_000, 3, "token")
    claim.take()
    sink = ParquetSink(claim, "zstd", f"{tmp_path}/reports/report.json", StructType())
    sink.commit([sink.write(iter([ROWS]))])
    files = sorted(file for file in (tmp_path / "out").rglob("*") if file.is_file())
    names = [str(file.relative_to(tmp_path)) for file in files]
    record, written = sorted(files, key=lambda file: file.suffix)
    described_all = "\n".join([*names, record.read_text(), described(written)])
    # The random part of a name, and what the codec makes of the rows.
    frozen("parquet_output.txt", re.sub(r'[0-9a-f]{16}|(?<="size": )\d+', "…", described_all))
    assert parquet.read_table(written).column("time").to_pylist() == [AT, None]
