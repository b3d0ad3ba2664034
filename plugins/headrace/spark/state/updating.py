"""The step "state" of a batch: calls the stream's update and writes the table's next version.

1. Read the table before the batch (`read_table`), whose columns must fit the declared ones (`check_stored`).
2. Call the user's update (`update_state`) and check the columns that it returned (`check_returned`).
3. Determine what the update did to each key, by comparing its result with the table before it (`changed_rows`).
4. Write the changed rows, and then the version that lists their files (``headrace.spark.state.version``).

`state_frames` reads a version for the outputs' transforms. `add_and_subtract` is an update for sums over a window.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import and_, or_
from typing import TYPE_CHECKING, Any

from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    ByteType,
    DataType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StructField,
    StructType,
)

from headrace.clock import time_text
from headrace.spark.records.transforms import arguments, load_function
from headrace.spark.sessions import register_source
from headrace.spark.state.source import OUTCOME
from headrace.spark.state.version import (
    CHANGED_MS,
    REMOVED,
    REPORTS,
    Outcome,
    StateDefinitionError,
    StateError,
    StateRowsError,
    StateStore,
    Version,
    WriteReport,
    cut,
    is_cut_due,
    next_version,
    stem,
)
from headrace.stream.model import milliseconds
from headrace.stream.state import REMOVED_FLAG

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import Column, DataFrame, SparkSession

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
    register_source(spark, StateTableSource)
    columns = declared_columns(spark, stream.state)
    update = _Update(spark, stream, stream.state, store, columns, batch)
    base = store.base_of(batch.batch_time_ms)
    if base is not None and store.drop_unused_initial(base):
        base = None
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
            stream_name=self.stream.name,
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


_COPIES = "_headrace_copies"
_WAS = "_headrace_was_"


def changed_rows(
    returned: DataFrame,
    before: DataFrame,
    columns: StructType,
    keys: Sequence[str],
    *,
    batch_time_ms: int,
    whole: bool,
    idle_since_ms: int | None,
) -> DataFrame:
    """The rows that this batch changes or removes, with the hidden columns and `OUTCOME`.

    Null and duplicate keys have the outcomes NULL_KEY and DOUBLE_KEY.

    Args:
        returned: what the update returned, with the columns of ``columns`` and optionally ``removed``.
        before: the table before it, with `CHANGED_MS`; only the keys are needed with ``whole=False`` and no timeout.
        whole: whether ``returned`` is the whole new table, or only its changes.
        idle_since_ms: rows that were last changed at this batch time or earlier time out, unless they are changed.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as F  # noqa: N812

    removes = F.coalesce(F.col(REMOVED_FLAG), F.lit(False)) if REMOVED_FLAG in returned.columns else F.lit(False)
    new = returned.select(
        *[F.col(quoted(field.name)).cast(field.dataType).alias(field.name) for field in columns.fields],
        removes.alias(REMOVED),
    ).withColumn(_COPIES, F.count(F.lit(1)).over(Window.partitionBy(*[quoted(key) for key in keys])))
    old = before.select(*[F.col(quoted(name)).alias(f"{_WAS}{name}") for name in before.columns])
    same_key = reduce(and_, [F.col(quoted(key)) == F.col(quoted(f"{_WAS}{key}")) for key in keys])
    # Rows that are only in the old table are needed if the whole table was returned, or if rows can time out.
    needs_old = whole or idle_since_ms is not None
    joined = new.join(old, same_key, "full_outer" if needs_old else "left_outer")
    outcome = _outcome(columns, keys, whole=whole, idle_since_ms=idle_since_ms)
    is_new = F.col(_COPIES).isNotNull()
    kept = [name for name in columns.names if f"{_WAS}{name}" in old.columns]
    return (
        joined.withColumn(OUTCOME, outcome)
        .where(F.col(OUTCOME).isNotNull())
        .select(
            *[
                F.when(is_new, F.col(quoted(name))).otherwise(F.col(quoted(f"{_WAS}{name}"))).alias(name)
                if name in kept
                else F.col(quoted(name))
                for name in columns.names
            ],
            F.lit(batch_time_ms).cast("bigint").alias(CHANGED_MS),
            F.col(OUTCOME).isin(Outcome.REMOVED.value, Outcome.TIMED_OUT.value).alias(REMOVED),
            OUTCOME,
        )
    )


def _outcome(columns: StructType, keys: Sequence[str], *, whole: bool, idle_since_ms: int | None) -> Column:
    from pyspark.sql import functions as F  # noqa: N812

    is_new = F.col(_COPIES).isNotNull()
    was = F.col(f"{_WAS}{CHANGED_MS}")
    is_idle = F.lit(False) if idle_since_ms is None else was <= F.lit(idle_since_ms)
    null_key = reduce(or_, [F.col(quoted(key)).isNull() for key in keys])
    cases = [(is_new & null_key, Outcome.NULL_KEY), (F.col(_COPIES) > 1, Outcome.DOUBLE_KEY)]
    if whole:
        values = [field for field in columns.fields if field.name not in keys]
        differs = reduce(or_, [_differs(field.name, has_map(field.dataType)) for field in values], F.lit(False))
        cases += [
            (is_new & was.isNull(), Outcome.ADDED),
            (is_new & differs, Outcome.CHANGED),
            (is_idle, Outcome.TIMED_OUT),
            (~is_new, Outcome.REMOVED),
        ]
    else:
        goes = F.col(REMOVED)
        cases += [
            (is_new & goes & is_idle, Outcome.TIMED_OUT),
            (is_new & goes & was.isNotNull(), Outcome.REMOVED),
            (is_new & ~goes & was.isNull(), Outcome.ADDED),
            (is_new & ~goes, Outcome.CHANGED),
            (~is_new & is_idle, Outcome.TIMED_OUT),
        ]
    # The first case that applies; null for rows that do not change.
    return F.coalesce(*[F.when(holds, F.lit(outcome.value)) for holds, outcome in cases])


def _differs(name: str, incomparable: bool) -> Column:
    from pyspark.sql import functions as F  # noqa: N812

    new, old = F.col(quoted(name)), F.col(quoted(f"{_WAS}{name}"))
    if incomparable:
        # Maps with the same entries in another order count as changed. This only costs a written row.
        new, old = (F.to_json(F.struct(side.alias("it")), {"ignoreNullFields": "false"}) for side in (new, old))
    return ~new.eqNullSafe(old)


HIDDEN = (StructField(CHANGED_MS, LongType()), StructField(REMOVED, BooleanType()))

_WIDER: dict[type[DataType], tuple[type[DataType], ...]] = {
    ByteType: (ShortType, IntegerType, LongType),
    ShortType: (IntegerType, LongType),
    IntegerType: (LongType,),
    FloatType: (DoubleType,),
}


def declared_columns(spark: SparkSession, state: State) -> StructType:
    """The table's columns, all of them nullable."""
    declared = spark.createDataFrame([], state.fields).schema
    return StructType([StructField(field.name, field.dataType) for field in declared.fields])


def check_stored(version: Version, columns: StructType, keys: Sequence[str]) -> None:
    """Check that the declared columns fit the stored table; new columns and wider numbers are allowed.

    Raises:
        StateDefinitionError: they do not fit; the text names the differences.
    """
    stored = StructType.fromJson(dict(version.schema))
    problems = []
    if tuple(version.keys) != tuple(keys):
        problems.append(f"the keys were {', '.join(version.keys)} and are {', '.join(keys)}")
    for field in stored.fields:
        if field.name not in columns.names:
            problems.append(f"the column {field.name} is gone")
        elif not _fits(field.dataType, columns[field.name].dataType):
            now = columns[field.name].dataType.simpleString()
            problems.append(f"the column {field.name} was {field.dataType.simpleString()} and is {now}")
    if problems:
        raise StateDefinitionError(
            f"The state of batch {time_text(version.batch_time_ms)} does not fit the stream's definition: "
            f"{'; '.join(problems)}.",
            remedy="Only new columns and wider numbers are possible. For other changes give the stream a new name, or "
            "delete the folder state/ in its folder to begin with an empty table.",
        )


def check_returned(returned: StructType, columns: StructType, *, may_remove: bool) -> None:
    """Check that what an update returned has the state's columns, in any order.

    Raises:
        StateRowsError: a column is missing, unknown, duplicate or of another type; the text names each one.
    """
    allowed = {*columns.names, REMOVED_FLAG} if may_remove else set(columns.names)
    problems = [f"{name} is missing" for name in columns.names if name not in returned.names]
    problems += [f"{name} is not one of the fields" for name in returned.names if name not in allowed]
    problems += [f"{name} occurs twice" for name in sorted(set(returned.names)) if returned.names.count(name) > 1]
    for field in returned.fields:
        if field.name not in allowed:
            continue
        wanted = columns[field.name].dataType if field.name in columns.names else BooleanType()
        if not _fits(field.dataType, wanted):
            problems.append(f"{field.name} is {field.dataType.simpleString()} and not {wanted.simpleString()}")
    if problems:
        raise StateRowsError(
            f"The columns that the state's update returned are not those of state.fields: {'; '.join(problems)}.",
            remedy="Select and cast them in the update.",
        )


def has_map(kind: DataType) -> bool:
    """Whether values of this type contain a map or a variant, which Spark cannot compare."""
    if isinstance(kind, ArrayType):
        return has_map(kind.elementType)
    if isinstance(kind, StructType):
        return any(has_map(field.dataType) for field in kind.fields)
    return isinstance(kind, MapType) or kind.typeName() == "variant"


def quoted(name: str) -> str:
    """A column's name, quoted for Spark's expressions."""
    return "`" + name.replace("`", "``") + "`"


def _fits(given: DataType, wanted: DataType) -> bool:
    """Whether every value of type ``given`` fits type ``wanted``; nullability is ignored."""
    if type(wanted) in _WIDER.get(type(given), ()):
        return True
    return given.simpleString() == wanted.simpleString()


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
    register_source(spark, StateTableSource)
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


def add_and_subtract(
    entering: DataFrame,
    leaving: DataFrame,
    state: DataFrame,
    *,
    keys: str | Sequence[str],
    values: str | Sequence[str],
    count: str | None = None,
) -> DataFrame:
    """The whole new table of sums over a window after this batch, for an update of a state with ``window``.

    It corresponds to reduceByKeyAndWindow with an inverse function. A sum has an inverse; a minimum or a distinct count
    has none. Sums of doubles drift, because rounding differs between adding and subtracting: use decimals or whole
    numbers.

    Args:
        entering: rows of the batch with the columns ``keys`` and ``values``, aggregated or not.
        leaving: like ``entering``, of the batches that leave the window.
        state: the table before the batch, with the columns ``keys`` and ``values``.
        values: columns of numbers to sum up; a null adds nothing.
        count: the column of ``values`` that counts the rows in the window, by default the first. A key whose count is 0
            is removed from the table (reduceByKeyAndWindow's filterFunction).
    """
    from pyspark.sql import functions as F  # noqa: N812 - as everyone calls it

    by = [keys] if isinstance(keys, str) else list(keys)
    summed = [values] if isinstance(values, str) else list(values)
    counted = summed[0] if count is None else count
    # A batch is aggregated before it is combined with the table: it has many rows but few keys.
    added = entering.groupBy(*by).agg(*[F.sum(name).alias(name) for name in summed])
    taken = leaving.groupBy(*by).agg(*[(-F.sum(name)).alias(name) for name in summed])
    rows = reduce(lambda one, other: one.unionByName(other), (state.select(*by, *summed), added, taken))
    types = {field.name: field.dataType for field in state.schema.fields}
    totals = [F.coalesce(F.sum(name), F.lit(0)).cast(types[name]).alias(name) for name in summed]
    return rows.groupBy(*by).agg(*totals).where(F.col(counted) != 0)
