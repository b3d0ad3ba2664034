"""Writes a batch's records to one Parquet file, so that a transform can be debugged with them in a test.

The file has a row for each record, in the order of topic, incarnation, partition and offset: the columns that a
transform gets, with decoded ``key`` and ``value``; then ``raw_key`` and ``raw_value``, the bytes from Kafka; then
``undecodable_reason``, null if the record decodes. Records that do not decode have null as key and value.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pyarrow import parquet

from headrace.errors import HeadraceError
from headrace.spark.batch_frames import read_records
from headrace.spark.batch_plan import load_manifests, origins_of
from headrace.spark.batch_preview import PreviewError, readable_batch
from headrace.spark.decoding import RAW_KEY, RAW_VALUE, REASON, Reader, RecordDecoding
from headrace.stream import Input, Stream
from headrace.stream_context import StreamContext

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import DataFrame, SparkSession

_ORDER = ("topic", "incarnation", "partition", "offset")
# Spark's default, INT96, is deprecated and not read by all libraries.
_TIMESTAMP_TYPE = "spark.sql.parquet.outputTimestampType"
_SPARKS_DEFAULT = "INT96"


class ExportError(HeadraceError):
    """The file cannot be written."""


@dataclass(frozen=True, slots=True)
class ExportedBatch:
    """The file that was written, and its number of records."""

    stream: str
    batch_time_ms: int
    input_id: str
    path: str
    records: int
    undecodable: int
    bytes: int


def export_batch(
    context: StreamContext,
    batch_time_ms: int,
    path: Path,
    open_session: Callable[[], SparkSession],
    *,
    input_id: str | None = None,
    overwrite: bool = False,
) -> ExportedBatch:
    """Write the records of one input of a batch to ``path``. The file appears complete or not at all.

    Args:
        input_id: the input; needed if the stream has several.
        open_session: opens a classic Spark session on this machine; it is called once.

    Raises:
        PreviewError: the batch cannot be read, or the input is not given.
        ExportError: the file exists, and ``overwrite`` is false; it is a folder; its folder does not exist; or Spark
            did not write one file.
        ManifestError: the batch's manifest is missing or damaged.
    """
    path = path.absolute()
    readable_batch(context, batch_time_ms)
    source = _input(context.stream, input_id)
    if path.is_dir():
        raise ExportError(f"{path} is a folder.", remedy="Name a file in it.")
    if path.exists() and not overwrite:
        raise ExportError(f"The file {path} exists.", remedy="Give another name, or --overwrite.")
    if not path.parent.is_dir():
        raise ExportError(f"The folder {path.parent} does not exist.", remedy="Create it.")
    origin = origins_of(context, [batch_time_ms])[batch_time_ms]
    for _ in load_manifests([origin]):
        pass
    spark = open_session()
    rows = exported(spark, source, partial(read_records, spark, source, [origin]))
    folder = Path(tempfile.mkdtemp(prefix=".headrace-export-", dir=path.parent))
    try:
        _write(rows, folder / "rows", spark)
        written = only_file(folder / "rows")
        reasons = parquet.read_table(written, columns=[REASON]).column(REASON)
        records, undecodable = len(reasons), len(reasons) - reasons.null_count
        written.replace(path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return ExportedBatch(context.name, batch_time_ms, source.id, str(path), records, undecodable, path.stat().st_size)


def exported(spark: SparkSession, source: Input, read: Reader) -> DataFrame:
    """An input's records as the file has them: decoded, with their bytes and the reason why they do not decode."""
    from pyspark.sql import functions as F  # noqa: N812

    decoding = RecordDecoding.of(source, spark)
    if decoding is None:
        raw = read().withColumn(RAW_KEY, F.col("key")).withColumn(RAW_VALUE, F.col("value"))
        return raw.withColumn(REASON, F.lit(None).cast("string"))
    rows = read(decoding=replace(decoding, keep_bytes="all"))
    for name in ("key", "value"):
        rows = rows.withColumn(name, F.when(F.col(REASON).isNull(), F.col(name)))
    return rows


def only_file(folder: Path) -> Path:
    """The one Parquet file that Spark wrote into the folder. Raises ExportError if there is none, or several."""
    written = sorted(folder.glob("part-*.parquet"))
    if len(written) != 1:
        raise ExportError(f"Spark wrote {len(written)} Parquet files into {folder}, not one.")
    return written[0]


def _write(rows: DataFrame, folder: Path, spark: SparkSession) -> None:
    before = spark.conf.get(_TIMESTAMP_TYPE, _SPARKS_DEFAULT)
    spark.conf.set(_TIMESTAMP_TYPE, "TIMESTAMP_MICROS")
    try:
        # Not as_uri(): it percent-encodes, and Hadoop's Path does not decode.
        rows.coalesce(1).sortWithinPartitions(*_ORDER).write.parquet(f"file://{folder}", compression="zstd")
    finally:
        spark.conf.set(_TIMESTAMP_TYPE, before or _SPARKS_DEFAULT)


def _input(stream: Stream, input_id: str | None) -> Input:
    known = ", ".join(source.id for source in stream.inputs)
    if input_id is None:
        if len(stream.inputs) > 1:
            raise PreviewError(f"Stream {stream.name!r} has several inputs: {known}.", remedy="Name one with --input.")
        return stream.inputs[0]
    for source in stream.inputs:
        if source.id == input_id:
            return source
    raise PreviewError(f"Stream {stream.name!r} has no input {input_id!r}, but {known}.")
