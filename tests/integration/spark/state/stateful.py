"""A stream with state for tests, and updates that several of them use."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from headrace.spark.outputs.writer import WrittenBatch
from headrace.spark.records.transforms import BatchContext
from headrace.spark.state.updating import state_frames, update_state
from headrace.spark.state.version import StateStore
from headrace.stream import Stream

INTERVAL_MS = 10_000
FIRST_MS = 1_700_000_000_000
COUNTS = "word STRING, count BIGINT"

Words = Sequence[str]


@dataclass
class Stateful:
    """A stream with state whose batches are numbered from 0; `run` does the step "state" of one."""

    spark: SparkSession
    stream: Stream
    reported: list[str] = field(default_factory=list)

    def time_ms(self, batch: int) -> int:
        return FIRST_MS + batch * INTERVAL_MS

    def batch(self, batch: int, attempt: int = 1, target: str = "") -> WrittenBatch:
        return WrittenBatch(
            stream=self.stream,
            context=BatchContext.of(self.stream.name, self.time_ms(batch), INTERVAL_MS, attempt),
            batch_time_ms=self.time_ms(batch),
            attempt=attempt,
            manifest_uri="",
            from_kafka=False,
            target=target,
            out=sys.stdout,
            progress=self.reported.append,
        )

    def words(self, words: Words) -> DataFrame:
        return self.spark.createDataFrame([(word,) for word in words], "word STRING")

    def run(self, batch: int, words: Words, *, attempt: int = 1, leaving: Words | None = None) -> dict[str, Any]:
        inputs = {"words": self.words(words)}
        left = None if leaving is None else {"words": self.words(leaving)}
        return update_state(self.spark, self.stream, inputs, self.batch(batch, attempt), leaving=left)

    def state(self, batch: int) -> dict[Any, Any]:
        rows = state_frames(self.spark, self.stream, self.time_ms(batch)).state.collect()
        assert len({row["word"] for row in rows}) == len(rows)
        return {row["word"]: row["count"] for row in rows}

    def changes(self, batch: int) -> dict[str, tuple[int, bool]]:
        rows = state_frames(self.spark, self.stream, self.time_ms(batch)).changes.collect()
        return {row["word"]: (row["count"], row["removed"]) for row in rows}

    @property
    def store(self) -> StateStore:
        return StateStore.of(self.stream)


Make = Callable[..., Stateful]


def counted(words: DataFrame) -> DataFrame:
    return words.groupBy("word").agg(F.count("*").alias("count"))


def running_count(words: DataFrame, state: DataFrame) -> DataFrame:
    return state.unionByName(counted(words)).groupBy("word").agg(F.sum("count").alias("count"))


def changed_counts(words: DataFrame, state: DataFrame) -> DataFrame:
    before = state.withColumnRenamed("count", "before")
    added = counted(words).join(before, "word", "left")
    return added.select("word", (F.col("count") + F.coalesce("before", F.lit(0))).alias("count"))


def initial_counts(spark: SparkSession) -> DataFrame:
    return spark.createDataFrame([("a", 1), ("c", 2)], "word STRING, count INT")
