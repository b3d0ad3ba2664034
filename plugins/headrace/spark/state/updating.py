"""The step "state" of a batch: calls the stream's update and writes the table's next version."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.spark.state.changed_rows import changed_rows
from headrace.spark.state.columns import check_returned, check_stored, declared_columns
from headrace.spark.state.errors import StateDefinitionError, StateError, StateRowsError
from headrace.spark.state.frames import read_table, write_rows
from headrace.spark.state.store import StateStore
from headrace.spark.state.version import (
    CHANGED_MS,
    REMOVED,
    REPORTS,
    Outcome,
    Version,
    WriteReport,
    cut,
    is_cut_due,
    next_version,
    stem,
)
from headrace.spark.transforms import arguments, load_function
from headrace.stream.model import milliseconds

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

    from headrace.spark.outputs.writer import Counts, WrittenBatch
    from headrace.stream import Stream
    from headrace.stream.state import State


_COUNTED = (Outcome.ADDED, Outcome.CHANGED, Outcome.REMOVED, Outcome.TIMED_OUT)


def update_state(
    spark: SparkSession,
    stream: Stream,
    inputs: Mapping[str, DataFrame],
    batch: WrittenBatch,
    *,
    leaving: Mapping[str, DataFrame] | None = None,
) -> Counts:
    """Run the stream's update for a batch, with or without records, and write the batch's version of the state.

    Versions from before ``state.remember`` (by default the stream's remember) are deleted: no batch needs them again.

    Args:
        inputs: the batch's decoded records by input id; for an empty batch DataFrames without rows.
        batch: the batch's time, attempt and context.
        leaving: with ``state.window``, the decoded records of the batches of `evicted_batches`, by input id; None
            when there are none.

    Returns:
        ``rows`` of the table, keys ``added``, ``changed``, ``removed`` and ``timed_out``, ``bytes`` and ``files``
        written, whether it is a ``snapshot``, the batch time ``based_on``, and the number of ``later_versions``: those
        of later batches, which ran before and are not computed again.

    Raises:
        StateRowsError: the update returned other columns, a null in a key, or a key twice; the state is unchanged.
        StateDefinitionError: the stream's fields and keys do not fit the stored table.
        StateMissingError: the state before this batch has been pruned.
        StateFencedError: a later attempt has written its version.
    """
    from headrace.spark.state.source import StateTableSource

    if stream.state is None:
        raise StateDefinitionError(f"The stream {stream.name} has no state.", remedy="Declare one: Stream(state=…).")
    if batch.target:
        raise StateError(
            f"The replay {batch.target} cannot update the state of {stream.name}: only the stream's own batches can.",
            remedy="Replay only the outputs; they read the state that the stream's batch wrote.",
        )
    store = StateStore.of(stream)
    store.check_not_fenced(batch.batch_time_ms, batch.attempt)
    spark.dataSource.register(StateTableSource)
    columns = declared_columns(spark, stream.state)
    update = _Update(spark, stream, stream.state, store, columns, batch)
    base = store.base_of(batch.batch_time_ms)
    if base is None and stream.state.initial is not None:
        base = update.begin_with_initial(stream.state.initial)
    if base is not None:
        check_stored(base, columns, stream.state.keys)
    version, counts = update.run(base, inputs, leaving)
    later = store.later_than(version.batch_time_ms)
    if later:
        batch.progress(f"state: {later:,} later batches already have a state, which this run does not compute again")
    reach = stream.remember_ms if stream.state.remember is None else milliseconds(stream.state.remember)
    store.prune(version.batch_time_ms - reach)
    return {**counts, "later_versions": later}


@dataclass
class _Update:
    spark: SparkSession
    stream: Stream
    state: State
    store: StateStore
    columns: StructType
    batch: WrittenBatch

    def run(
        self, base: Version | None, inputs: Mapping[str, DataFrame], leaving: Mapping[str, DataFrame] | None
    ) -> tuple[Version, Counts]:
        """Call the update and write what it returns as this attempt's version."""
        from pyspark.sql import functions as F  # noqa: N812

        update = load_function(self.stream, self.state.update, "state's update")
        before = self._table(base)
        idle_since_ms = None
        more: dict[str, Any] = {"state": before.select(*self.columns.names)}
        if self.state.timeout is not None:
            idle_since_ms = self.batch.batch_time_ms - milliseconds(self.state.timeout)
            more["timing_out"] = before.where(F.col(CHANGED_MS) <= idle_since_ms).select(*self.columns.names)
        if self.state.window is not None:
            more["leaving"] = _as_given(inputs, leaving)
        returned = self._call(update, inputs, more)
        whole = self.state.returns == "state"
        check_returned(returned.schema, self.columns, may_remove=not whole)
        if not whole and idle_since_ms is None:
            before = self._table(base, keys_only=True)
        rows = changed_rows(
            returned,
            before,
            self.columns,
            self.state.keys,
            batch_time_ms=self.batch.batch_time_ms,
            whole=whole,
            idle_since_ms=idle_since_ms,
        )
        return self._write(base, rows, self.batch.batch_time_ms, self.batch.attempt)

    def begin_with_initial(self, reference: str) -> Version:
        """Write the rows of ``state.initial`` as the version before the first batch, with attempt 0."""
        initial = load_function(self.stream, reference, "state's initial table")(self.spark)
        _check_frame(initial, reference)
        check_returned(initial.schema, self.columns, may_remove=False)
        time_ms = self.batch.batch_time_ms - self.stream.batch_interval_ms
        rows = changed_rows(
            initial,
            self._table(None),
            self.columns,
            self.state.keys,
            batch_time_ms=time_ms,
            whole=True,
            idle_since_ms=None,
        )
        version, _ = self._write(None, rows, time_ms, 0, first_ms=self.batch.batch_time_ms)
        self.batch.progress(f"state: begins with {version.rows:,} rows of {reference}")
        return version

    def _table(self, version: Version | None, *, keys_only: bool = False) -> DataFrame:
        from pyspark.sql.types import LongType, StructField, StructType

        columns = self.columns
        if keys_only:
            columns = StructType([field for field in columns.fields if field.name in self.state.keys])
        if version is None:
            return self.spark.createDataFrame([], StructType([*columns.fields, StructField(CHANGED_MS, LongType())]))
        return read_table(self.spark, self.store, version, columns)

    def _call(self, update: Callable[..., Any], inputs: Mapping[str, DataFrame], more: Mapping[str, Any]) -> DataFrame:
        positional, keywords = arguments(update, inputs, self.batch.context, more)
        returned = update(*positional, **keywords)
        _check_frame(returned, self.state.update)
        return returned  # type: ignore[no-any-return]

    def _write(
        self,
        base: Version | None,
        rows: DataFrame,
        batch_time_ms: int,
        attempt: int,
        *,
        first_ms: int | None = None,
    ) -> tuple[Version, Counts]:
        report = self._save(rows, batch_time_ms, attempt)
        _check_keys(report)
        version = next_version(
            base,
            report,
            stream=self.stream.name,
            batch_time_ms=batch_time_ms,
            attempt=attempt,
            keys=self.state.keys,
            schema=self.columns.jsonValue(),
            first_ms=first_ms,
        )
        files = list(report.files)
        if is_cut_due(version, self.state.snapshot_every):
            version = self._cut(version)
            files += version.table
        self.store.write(version)
        return version, {
            "rows": version.rows,
            **{outcome.value: report.outcomes[outcome] for outcome in _COUNTED},
            "bytes": sum(file.size for file in files),
            "files": len(files),
            "snapshot": version.is_snapshot,
            "based_on": None if base is None else base.batch_time_ms,
        }

    def _cut(self, version: Version) -> Version:
        """Write the version's whole table to new files, so that no older files are needed."""
        from pyspark.sql import functions as F  # noqa: N812

        draft = self.store.write_draft(version)
        try:
            table = read_table(self.spark, self.store, version, self.columns, document=draft)
            report = self._save(table.withColumn(REMOVED, F.lit(False)), version.batch_time_ms, version.attempt)
        finally:
            self.store.storage.delete(draft)
        return cut(version, report.files)

    def _save(self, rows: DataFrame, batch_time_ms: int, attempt: int) -> WriteReport:
        files = stem(batch_time_ms, attempt)
        path = f"{REPORTS}/{files}-{secrets.token_hex(8)}.json"
        try:
            write_rows(rows, self.store, files=files, report=path, keys=self.state.keys)
            return WriteReport.read(self.store.storage, path)
        finally:
            self.store.storage.delete(path)


def _as_given(
    inputs: Mapping[str, DataFrame], leaving: Mapping[str, DataFrame] | None
) -> DataFrame | Mapping[str, DataFrame]:
    """The rows that leave the window: a DataFrame for a single input, otherwise a mapping by input id.

    An input from which nothing leaves has a DataFrame without rows.
    """
    given = leaving or {}
    frames = {name: given[name] if name in given else frame.where("false") for name, frame in inputs.items()}
    return next(iter(frames.values())) if len(frames) == 1 else frames


def _check_frame(returned: object, reference: str) -> None:
    from pyspark.sql import DataFrame

    if not isinstance(returned, DataFrame):
        raise StateRowsError(
            f"{reference} returned a {type(returned).__name__}, not a DataFrame.",
            remedy="Return a DataFrame.",
        )


def _check_keys(report: WriteReport) -> None:
    nulls, double = report.outcomes[Outcome.NULL_KEY], report.outcomes[Outcome.DOUBLE_KEY]
    if nulls:
        raise StateRowsError(
            f"The state's update returned {nulls:,} rows with a null in their key, for example "
            f"{report.examples[Outcome.NULL_KEY]}.",
            remedy="Drop such rows in the update, or give them a key. The state is unchanged.",
        )
    if double:
        raise StateRowsError(
            f"The state's update returned {double:,} rows whose keys occur more than once, for example "
            f"{report.examples[Outcome.DOUBLE_KEY]}.",
            remedy="Return one row for each key, for example by an aggregate. The state is unchanged.",
        )
