"""Writes one task's rows to a Parquet file."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq

from headrace.spark.outputs.errors import OutputFolderError
from headrace.spark.outputs.parquet.batch_folder import Claim, WrittenFile, claim_gone
from headrace.spark.outputs.parquet.columns import file_schema
from headrace.wal.file_sync import sync_file

# The size of a row group, which is held in memory: this many rows, or this many bytes in Arrow's form.
_GROUP_ROWS = 1_000_000
_GROUP_BYTES = 64 * 1024 * 1024


def write_rows(batches: Iterator[pa.RecordBatch], claim: Claim, *, task: int, compression: str) -> list[WrittenFile]:
    """Write a task's rows to a file in the claim's folder. Returns the synced file, or nothing if there are no rows.

    Raises AttemptReplacedError if the claim's folder is gone, OutputFolderError for other errors, such as a full disk.
    """
    first = next((batch for batch in batches if batch.num_rows), None)
    if first is None:
        return []
    return [write_file(_chained(first, batches), first.schema, claim, task=task, compression=compression)]


def write_file(
    batches: Iterator[pa.RecordBatch], schema: pa.Schema, claim: Claim, *, task: int, compression: str
) -> WrittenFile:
    """Like `write_rows`, but writes a file even if there are no rows."""
    name = f"part-{task:05d}-{secrets.token_hex(8)}.{compression}.parquet"
    wanted = file_schema(schema)
    rows = 0
    try:
        with claim.unpublished(name).open("xb") as file:
            with pq.ParquetWriter(file, wanted, compression=compression) as writer:
                for table in _row_groups(batches, schema):
                    writer.write_table(table.cast(wanted), row_group_size=max(1, table.num_rows))
                    rows += table.num_rows
            file.flush()
            sync_file(file.fileno())
            return WrittenFile(name, rows, file.tell())
    except FileNotFoundError as error:
        raise claim_gone(claim) from error
    except OSError as error:
        what = f"The file {claim.unpublished(name)} cannot be written: {error.strerror or error}."
        raise OutputFolderError(what) from error


def _chained(first: pa.RecordBatch, others: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield first
    yield from others


def _row_groups(batches: Iterator[pa.RecordBatch], schema: pa.Schema) -> Iterator[pa.Table]:
    held: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        held.append(batch)
        rows += batch.num_rows
        size += batch.nbytes
        if rows >= _GROUP_ROWS or size >= _GROUP_BYTES:
            yield pa.Table.from_batches(held, schema)
            held, rows, size = [], 0, 0
    if held:
        yield pa.Table.from_batches(held, schema)
