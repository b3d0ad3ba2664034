"""Sums over a sliding window, updated by adding the rows that enter and subtracting those that leave."""

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
