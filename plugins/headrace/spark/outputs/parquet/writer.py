"""The Parquet output: writes a folder for each batch, which is complete or missing."""

from __future__ import annotations

import json
import secrets
from dataclasses import asdict
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from headrace.spark.outputs.parquet.batch_folder import Claim
from headrace.spark.outputs.report_files import counted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from headrace.spark.outputs.writer import Counts, WrittenBatch
    from headrace.stream import ParquetOutput


class ParquetWriter:
    """Writes ``<path>/batch_time=<T>/part-….parquet``, one file for each Spark task with rows.

    A batch that runs again replaces its folder by one atomic rename, or by two if the file system (NFS) cannot do that.
    The new files have other names, so a reader that listed the old files finds them missing, and never reads a mixture.
    If the transform gives no rows, the batch is one file with the columns and no rows.
    """

    def __init__(self, output: ParquetOutput) -> None:
        self._output = output

    @property
    def needs_empty_batches(self) -> bool:
        """True: rows that are made without records are valid, and without rows the columns are written."""
        return True

    def write(self, frame: DataFrame | None, batch: WrittenBatch) -> Counts:
        """Publish the rows. Returns the counts ``rows``, ``files`` and ``bytes``.

        Without a frame the columns are unknown: nothing is published, and what was published before stays.
        Raises OutputRowsError; within Spark AttemptReplacedError and OutputFolderError.
        """
        if frame is None:
            return {"rows": 0, "files": 0, "bytes": 0}
        from headrace.spark.outputs.parquet.columns import check_columns
        from headrace.spark.outputs.parquet.sink import FORMAT, ParquetDataSource

        check_columns(frame.schema, self._output.id)
        frame.sparkSession.dataSource.register(ParquetDataSource)
        options = {"claim": json.dumps(asdict(self._claim(batch))), "compression": self._output.compression}

        def save(report: str) -> None:
            frame.write.format(FORMAT).options(**options, report=report).mode("append").save()

        return counted(save, batch, self._output.id)

    def _claim(self, batch: WrittenBatch) -> Claim:
        parts = urlsplit(self._output.path)
        return Claim(
            path=unquote(parts.path) if parts.scheme == "file" else self._output.path,
            stream=batch.stream.name,
            output=self._output.step,
            target=batch.target,
            batch_time_ms=batch.batch_time_ms,
            attempt=batch.attempt,
            token=secrets.token_hex(4),
        )
