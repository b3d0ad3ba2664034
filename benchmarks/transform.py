"""The transform of `warm_batch`: one column more, computed from a decoded field."""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812


def with_cents(records: DataFrame) -> DataFrame:
    cents = (F.col("value.price") * 100).cast("long")
    return records.select("topic", "partition", "offset", "value.*", cents.alias("cents"))
