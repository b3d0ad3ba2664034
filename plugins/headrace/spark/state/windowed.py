"""Aggregates over a window, kept by adding what enters and subtracting what leaves."""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import DataFrame


def add_and_subtract(
    entering: DataFrame,
    leaving: DataFrame,
    state: DataFrame,
    *,
    keys: str | Sequence[str],
    values: str | Sequence[str],
    count: str | None = None,
) -> DataFrame:
    """The sums over a window after this batch, for an update of a state with ``window``; the whole new table.

    What reduceByKeyAndWindow with an inverse function was. Any sum has an inverse; a minimum or a distinct count has
    none. Sums of doubles drift by rounding, since what is added is not what is subtracted later: keep decimals or
    whole numbers.

    Args:
        entering: rows of the batch with the columns ``keys`` and ``values``, aggregated or not.
        leaving: as ``entering``, of the batch that leaves the window.
        state: the table before, whose columns are ``keys`` and ``values``.
        values: columns of numbers to sum up; a null adds nothing.
        count: the one of ``values`` that counts the rows in the window, by default the first: a key at 0 leaves the
            table (reduceByKeyAndWindow's filterFunction).
    """
    from pyspark.sql import functions as F  # noqa: N812 - as everyone calls it

    by = [keys] if isinstance(keys, str) else list(keys)
    summed = [values] if isinstance(values, str) else list(values)
    counted = summed[0] if count is None else count
    # A batch is summed up before it meets the table: its rows are many, its keys few.
    added = entering.groupBy(*by).agg(*[F.sum(name).alias(name) for name in summed])
    taken = leaving.groupBy(*by).agg(*[(-F.sum(name)).alias(name) for name in summed])
    rows = reduce(lambda one, other: one.unionByName(other), (state.select(*by, *summed), added, taken))
    types = {field.name: field.dataType for field in state.schema.fields}
    totals = [F.coalesce(F.sum(name), F.lit(0)).cast(types[name]).alias(name) for name in summed]
    return rows.groupBy(*by).agg(*totals).where(F.col(counted) != 0)
