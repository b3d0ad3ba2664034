"""The transform of the word count, in the module that Spark imports."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812 - Spark's own way to write it

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def count_words(lines: DataFrame) -> DataFrame:
    """(word, count) of the lines of one batch, the most frequent words first."""
    words = lines.select(F.explode(F.split("value", r"\s+")).alias("word")).where("word != ''")  # flatMap
    pairs = words.select("word", F.lit(1).alias("one"))  # map
    counts = pairs.groupBy("word").agg(F.sum("one").alias("count"))  # reduceByKey
    return counts.orderBy(F.desc("count"), "word")
