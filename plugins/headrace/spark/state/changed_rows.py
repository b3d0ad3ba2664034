"""Determines what an update did to each key, by comparing its result with the table before it."""

from __future__ import annotations

from functools import reduce
from operator import and_, or_
from typing import TYPE_CHECKING

from headrace.spark.state.columns import has_map, quoted
from headrace.spark.state.source import OUTCOME
from headrace.spark.state.version import CHANGED_MS, REMOVED, Outcome
from headrace.stream.state import REMOVED_FLAG

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import StructType

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
