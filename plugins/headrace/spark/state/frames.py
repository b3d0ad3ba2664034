"""Reads a version of the state as DataFrames, and writes DataFrames into the state's files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.spark.state.columns import HIDDEN, check_stored, declared_columns, quoted
from headrace.spark.state.errors import StateDefinitionError
from headrace.spark.state.store import StateStore
from headrace.spark.state.version import CHANGED_MS, REMOVED
from headrace.stream.state import REMOVED_FLAG

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

    from headrace.spark.state.version import Version
    from headrace.stream import Stream


@dataclass(frozen=True)
class StateFrames:
    """The frames of a batch's state for outputs' transforms.

    ``state`` is the table after the batch. ``changes`` are the rows that the batch changed, with a boolean column
    ``removed``: a removed key's row has its last values.
    """

    state: DataFrame
    changes: DataFrame


def state_frames(spark: SparkSession, stream: Stream, batch_time_ms: int) -> StateFrames:
    """The state after a batch. No rows are read before the frames are used.

    Raises:
        StateMissingError: the batch's update has not run, or its version has been pruned.
        StateDefinitionError: the stream has no state, or the stored table does not fit the stream's definition.
    """
    from pyspark.sql import functions as F  # noqa: N812 - as everyone calls it

    from headrace.spark.state.source import StateTableSource

    if stream.state is None:
        raise StateDefinitionError(f"The stream {stream.name} has no state.", remedy="Declare one: Stream(state=…).")
    store = StateStore.of(stream)
    spark.dataSource.register(StateTableSource)
    columns = declared_columns(spark, stream.state)
    version = store.version_of(batch_time_ms)
    check_stored(version, columns, stream.state.keys)
    changes = read_rows(spark, store, version.name.path, "changes", columns)
    return StateFrames(
        state=read_table(spark, store, version, columns).select(*columns.names),
        changes=changes.select(*columns.names, F.col(REMOVED).alias(REMOVED_FLAG)),
    )


def read_table(
    spark: SparkSession, store: StateStore, version: Version, columns: StructType, *, document: str | None = None
) -> DataFrame:
    """The table's rows with `CHANGED_MS` and ``columns``, which must include the keys.

    ``document`` is the path of a draft, for a version that is not written yet.
    """
    from pyspark.sql import functions as F  # noqa: N812

    rows = read_rows(spark, store, document or version.name.path, "table", columns)
    if not version.is_snapshot:
        rows = newest_of_each_key(rows, version.keys)
    return rows.where(~F.col(REMOVED)).select(*columns.names, CHANGED_MS)


def read_rows(spark: SparkSession, store: StateStore, document: str, files: str, columns: StructType) -> DataFrame:
    """The rows as stored in the files: ``columns`` and the hidden ones. The data source must be registered."""
    from pyspark.sql.types import StructType

    from headrace.spark.state.source import FORMAT

    reader = spark.read.format(FORMAT).schema(StructType([*columns.fields, *HIDDEN]))
    return reader.options(folder=store.url, document=document, files=files).load()


def write_rows(rows: DataFrame, store: StateStore, *, files: str, report: str, keys: Sequence[str]) -> None:
    """Write rows to new files whose names begin with ``files``, and list them in the file ``report``."""
    from headrace.spark.state.source import FORMAT

    options = {"folder": store.url, "files": files, "report": report, "keys": json.dumps(list(keys))}
    rows.write.format(FORMAT).options(**options).mode("append").save()


def newest_of_each_key(rows: DataFrame, keys: Sequence[str]) -> DataFrame:
    """The most recently changed row of each key. A version's changes contain a key only once."""
    from pyspark.sql import functions as F  # noqa: N812

    others = [name for name in rows.columns if name not in keys]
    newest = F.max_by(F.struct(*others), F.col(CHANGED_MS)).alias("_headrace_newest")
    merged = rows.groupBy(*keys).agg(newest)
    return merged.select(*keys, *[F.col(f"_headrace_newest.{quoted(name)}").alias(name) for name in others])
