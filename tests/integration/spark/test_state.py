"""Keyed state in real Spark; the cases of Spark's own suites carry their names."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from headrace.errors import HeadraceError
from headrace.spark.outputs.writer import WrittenBatch
from headrace.spark.state import leaving_batch_times, state_frames, update_state
from headrace.spark.state.errors import (
    StateDefinitionError,
    StateError,
    StateFencedError,
    StateMissingError,
    StateRowsError,
)
from headrace.spark.state.store import StateStore
from headrace.spark.state.windowed import add_and_subtract
from headrace.spark.transforms import BatchContext
from headrace.stream import ConsoleOutput, KafkaInput, State, Stream

INTERVAL_MS = 10_000
FIRST_MS = 1_700_000_000_000
COUNTS = "word STRING, count BIGINT"

Words = Sequence[str]


def counted(words: DataFrame) -> DataFrame:
    return words.groupBy("word").agg(F.count("*").alias("count"))


def running_count(words: DataFrame, state: DataFrame) -> DataFrame:
    return state.unionByName(counted(words)).groupBy("word").agg(F.sum("count").alias("count"))


def changed_counts(words: DataFrame, state: DataFrame) -> DataFrame:
    before = state.withColumnRenamed("count", "before")
    added = counted(words).join(before, "word", "left")
    return added.select("word", (F.col("count") + F.coalesce("before", F.lit(0))).alias("count"))


def removed_at_three(words: DataFrame, state: DataFrame) -> DataFrame:
    return changed_counts(words, state).withColumn("removed", F.col("count") >= 3)


def lifecycle(words: DataFrame, state: DataFrame) -> DataFrame:
    """Counts for how many batches a word was not seen; at three it goes."""
    seen = words.select("word").distinct().withColumn("seen", F.lit(True))
    both = state.join(seen, "word", "full_outer")
    unseen = F.when(F.col("seen"), F.lit(0)).otherwise(F.col("count") + 1)
    return both.select("word", unseen.alias("count")).where("count < 3")


def batch_times(words: DataFrame, state: DataFrame, batch: BatchContext) -> DataFrame:
    new = words.select("word", F.lit(round(batch.batch_time.timestamp())).cast("bigint").alias("count"))
    return state.unionByName(new).groupBy("word").agg(F.max("count").alias("count"))


def initial_counts(spark: SparkSession) -> DataFrame:
    return spark.createDataFrame([("a", 1), ("c", 2)], "word STRING, count INT")


def sessions(words: DataFrame, state: DataFrame, timing_out: DataFrame) -> DataFrame:
    ended = timing_out.join(words, "word", "left_anti").select("word", (-F.col("count")).alias("count"))
    live = changed_counts(words, state).withColumn("removed", F.lit(False))
    return live.unionByName(ended.withColumn("removed", F.lit(True)))


def windowed_count(words: DataFrame, leaving: DataFrame, state: DataFrame) -> DataFrame:
    return add_and_subtract(counted(words), counted(leaving), state, keys="word", values="count")


def both_inputs(clicks: DataFrame, views: DataFrame, leaving: dict[str, DataFrame], state: DataFrame) -> DataFrame:
    entering = counted(clicks.unionByName(views))
    left = counted(leaving["clicks"].unionByName(leaving["views"]))
    return add_and_subtract(entering, left, state, keys="word", values="count")


def only_state(words: DataFrame, state: DataFrame) -> DataFrame:
    return state


def null_key(words: DataFrame, state: DataFrame) -> DataFrame:
    return words.select(F.lit(None).cast("string").alias("word"), F.lit(1).alias("count"))


def double_key(words: DataFrame, state: DataFrame) -> DataFrame:
    return words.select("word", F.lit(1).alias("count"))


def wrong_type(words: DataFrame, state: DataFrame) -> DataFrame:
    return words.select("word", F.lit("many").alias("count"))


def no_frame(words: DataFrame, state: DataFrame) -> list[str]:
    return ["word"]


def fails_on_executors(words: DataFrame, state: DataFrame) -> DataFrame:
    return running_count(words, state).withColumn("count", F.expr("raise_error('unlucky')").cast("bigint"))


def widened(words: DataFrame, state: DataFrame) -> DataFrame:
    new = words.select("word", F.lit(1).cast("bigint").alias("count"), F.lit("today").alias("seen"))
    grouped = state.unionByName(new).groupBy("word")
    return grouped.agg(F.sum("count").alias("count"), F.max("seen").alias("seen"))


@dataclass
class Stateful:
    """A stream with state whose batches are numbered from 0; `run` does the step "state" of one."""

    spark: SparkSession
    stream: Stream
    told: list[str] = field(default_factory=list)

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
            undecodable={},
            out=sys.stdout,
            tell=self.told.append,
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


@pytest.fixture
def make(spark: SparkSession, tmp_path: Path) -> Make:
    """A `Stateful` with this test module's function as its update, and the fields of a State."""

    def made(update: Callable[..., Any], *, inputs: Any = None, remember: str = "1 h", **fields: Any) -> Stateful:
        state = {"update": f"{__name__}:{update.__name__}", "fields": COUNTS, "keys": "word", **fields}
        if "state_remember" in state:
            state["remember"] = state.pop("state_remember")
        stream = Stream(
            name="words",
            inputs=inputs or KafkaInput(id="words", bootstrap_servers="127.0.0.1:1", topics="words"),
            outputs=ConsoleOutput(transform=f"{__name__}:{update.__name__}"),
            batch_interval="10 s",
            remember=remember,
            storage=str(tmp_path / "storage"),
            ledger=f"sqlite:///{tmp_path}/ledger.db",
            state=State(**state),
        )
        return Stateful(spark, stream)

    return made


# BasicOperationsSuite


@pytest.mark.parametrize(("update", "returns"), [(running_count, "state"), (changed_counts, "changes")])
def test_update_state_by_key(make: Make, update: Any, returns: str) -> None:
    """ "updateStateByKey", and "mapWithState - basic operations with simple API"."""
    stateful = make(update, returns=returns)
    expected: Counter[str] = Counter()
    for batch, words in enumerate([["a"], ["a", "b"], ["a", "b", "c", "a"], [], ["b"]]):
        new = [word for word in set(words) if word not in expected]
        expected.update(words)
        counts = stateful.run(batch, words)
        assert (counts["rows"], counts["added"]) == (len(expected), len(new))
        assert counts["changed"] == len(set(words)) - len(new)
        assert counts["removed"] == counts["timed_out"] == counts["later_versions"] == 0
        assert stateful.state(batch) == expected
        assert stateful.changes(batch) == {word: (expected[word], False) for word in words}


@pytest.mark.parametrize(("update", "returns"), [(running_count, "state"), (changed_counts, "changes")])
def test_update_state_by_key_with_initial_values(make: Make, update: Any, returns: str) -> None:
    """ "updateStateByKey - simple with initial value RDD", "mapWithState - initial states, with nothing returned"."""
    stateful = make(update, returns=returns, initial=f"{__name__}:initial_counts")
    assert stateful.run(0, ["a", "b"])["rows"] == 3
    assert stateful.state(0) == {"a": 2, "b": 1, "c": 2}
    assert stateful.changes(0) == {"a": (2, False), "b": (1, False)}
    stateful.run(0, ["a", "b"], attempt=2)
    assert stateful.state(0) == {"a": 2, "b": 1, "c": 2}
    assert stateful.told == [f"state: begins with 2 rows of {__name__}:initial_counts"]


def test_update_state_by_key_testing_time_stamps_as_input(make: Make) -> None:
    stateful = make(batch_times)
    for batch, words in enumerate([["a"], ["a", "b"], ["b"]]):
        stateful.run(batch, words)
    assert stateful.state(2) == {"a": stateful.time_ms(1) // 1000, "b": stateful.time_ms(2) // 1000}


def test_update_state_by_key_object_lifecycle(make: Make) -> None:
    stateful = make(lifecycle)
    states = []
    for batch, words in enumerate([["a", "b"], ["b"], ["b"], ["b"], ["a", "b"]]):
        stateful.run(batch, words)
        states.append(stateful.state(batch))
    assert states == [{"a": 0, "b": 0}, {"a": 1, "b": 0}, {"a": 2, "b": 0}, {"b": 0}, {"a": 0, "b": 0}]
    assert stateful.changes(3) == {"a": (2, True)}


# MapWithStateSuite


def test_map_with_state_state_removing(make: Make) -> None:
    stateful = make(removed_at_three, returns="changes")
    for batch, words in enumerate([["a", "b"], ["a"], ["a", "b"]]):
        counts = stateful.run(batch, words)
    assert (counts["removed"], counts["rows"]) == (1, 1)
    assert stateful.state(2) == {"b": 2}
    assert stateful.changes(2) == {"a": (3, True), "b": (2, False)}
    # A key comes back as a new one; one that is not there is removed without a trace.
    counts = stateful.run(3, ["a", "c", "c", "c"])
    assert (counts["added"], counts["removed"]) == (1, 0)
    assert stateful.state(3) == {"a": 1, "b": 2}


def test_map_with_state_state_timing_out(make: Make) -> None:
    stateful = make(changed_counts, returns="changes", timeout="20 s")
    timed_out = []
    for batch, words in enumerate([["a", "b"], ["b"], [], ["c"], ["c"]]):
        timed_out.append(stateful.run(batch, words)["timed_out"])
    # "a" was last changed by batch 0 and goes at 2; "b" by 1, and goes at 3.
    assert timed_out == [0, 0, 1, 1, 0]
    assert [stateful.state(batch) for batch in range(5)] == [
        {"a": 1, "b": 1},
        {"a": 1, "b": 2},
        {"b": 2},
        {"c": 1},
        {"c": 2},
    ]
    assert stateful.changes(2) == {"a": (1, True)}


def test_a_row_that_times_out_can_still_be_changed_and_its_end_be_told(make: Make) -> None:
    stateful = make(sessions, returns="changes", timeout="10 s")
    stateful.run(0, ["a", "b"])
    counts = stateful.run(1, ["a"])
    assert (counts["changed"], counts["timed_out"]) == (1, 1)
    assert stateful.state(1) == {"a": 2}
    assert stateful.changes(1) == {"a": (2, False), "b": (-1, True)}


def test_rows_of_a_whole_table_that_stay_the_same_time_out(make: Make) -> None:
    stateful = make(running_count, timeout="20 s")
    for batch, words in enumerate([["a", "b"], ["a"], []]):
        counts = stateful.run(batch, words)
    assert (counts["timed_out"], counts["removed"]) == (1, 0)
    assert stateful.state(2) == {"a": 2}


def test_idleness_outlives_a_snapshot(make: Make) -> None:
    stateful = make(changed_counts, returns="changes", timeout="40 s", snapshot_every=1)
    snapshots, timed_out = [], []
    for batch, words in enumerate([["a", "b"], ["b"], ["b"], ["b"], ["b"]]):
        counts = stateful.run(batch, words)
        snapshots.append(counts["snapshot"])
        timed_out.append(counts["timed_out"])
    assert snapshots == [True, True, True, True, True]
    assert timed_out == [0, 0, 0, 0, 1]
    assert stateful.state(4) == {"b": 5}


# StateMapSuite


@pytest.mark.slow
def test_state_map_random_puts_and_removes_agree_with_a_map(make: Make) -> None:
    """ "put, get, getByTime, getAll, remove", and with compaction: every version, against a dictionary."""
    stateful = make(removed_at_three, returns="changes", timeout="40 s", snapshot_every=3)
    chance = random.Random(4)
    model: dict[str, tuple[int, int]] = {}
    expected = []
    for batch in range(14):
        words = Counter(chance.choices("abcdefgh", k=chance.randrange(5)))
        model = {word: (count, at) for word, (count, at) in model.items() if word in words or batch - at < 4}
        for word, times in words.items():
            count = model.get(word, (0, 0))[0] + times
            model[word] = (count, batch)
            if count >= 3:
                del model[word]
        expected.append({word: count for word, (count, _) in model.items()})
        assert stateful.run(batch, list(words.elements()))["rows"] == len(model)
    assert [stateful.state(batch) for batch in range(14)] == expected


# CheckpointSuite and FailureSuite


def test_recovery_with_update_state_by_key_operation(make: Make, spark: SparkSession) -> None:
    """Nothing but the storage and the definition goes from one batch to the next."""
    first = make(running_count)
    first.run(0, ["a"])
    first.run(1, ["a", "b"])
    again = Stateful(spark.newSession(), Stream.from_json(first.stream.to_json()))
    assert again.run(2, ["b"])["based_on"] == first.time_ms(1)
    assert again.state(2) == {"a": 2, "b": 2}


@pytest.mark.slow
def test_multiple_failures_with_update_state_by_key(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every batch fails at each place once, before its files, between files and version, and after the version."""
    stateful = make(running_count, snapshot_every=2)
    broken = stateful.stream.model_copy(
        update={"state": stateful.stream.state.model_copy(update={"update": f"{__name__}:fails_on_executors"})}  # type: ignore[union-attr]
    )
    expected: Counter[str] = Counter()
    for batch, words in enumerate([["a"], ["a", "b"], ["c"], ["a"], ["b"]]):
        expected.update(words)
        with pytest.raises(PySparkException, match="unlucky"):
            update_state(stateful.spark, broken, {"words": stateful.words(words)}, stateful.batch(batch, 1))
        for attempt, name in ((2, "write"), (3, "later_than")):
            with monkeypatch.context() as crashing:
                crashing.setattr(StateStore, name, _crash)
                with pytest.raises(KeyboardInterrupt):
                    stateful.run(batch, words, attempt=attempt)
        stateful.run(batch, words, attempt=4)
        assert stateful.state(batch) == expected


def _crash(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.slow
def test_spark_6847_a_thousand_batches_make_no_longer_plan(make: Make) -> None:
    """The plan, the files and the bytes that a batch reads do not grow with the batches before it."""
    stateful = make(changed_counts, returns="changes", snapshot_every=3, remember="10 s")
    stateful.run(0, [f"word-{number}" for number in range(200)])
    plans, files, sizes, stored = [], [], [], []
    for batch in range(1, 17):
        stateful.run(batch, ["word-1", "word-2"])
        version = stateful.store.version_of(stateful.time_ms(batch))
        plan = state_frames(stateful.spark, stateful.stream, stateful.time_ms(batch)).state._jdf.queryExecution()
        plans.append(len(plan.optimizedPlan().toString().splitlines()))
        files.append(len(version.table))
        sizes.append(sum(file.size for file in version.table))
        stored.append(len(stateful.store.storage.list()))
    for costs in (plans, files, stored):
        assert max(costs[8:]) <= max(costs[:8])
    assert max(sizes[8:]) <= 1.05 * max(sizes[:8])
    assert stateful.state(16) == {f"word-{number}": 17 if number in (1, 2) else 1 for number in range(200)}


# WindowOperationsSuite


@pytest.mark.parametrize(
    ("case", "inputs", "expected"),
    [
        ("basic reduction", [["a", "a"]], [{"a": 2}]),
        ("key already in window and new value added into window", [["a"], ["a"]], [{"a": 1}, {"a": 2}]),
        ("new key added into window", [["a"], ["a", "b"]], [{"a": 1}, {"a": 2, "b": 1}]),
        ("key removed from window", [["a"], ["a"], [], []], [{"a": 1}, {"a": 2}, {"a": 1}, {}]),
        (
            "big test",
            [["a"], ["a", "b"], ["a", "b", "c"], ["a", "b"], ["a"], [], ["a"], ["a", "b"]],
            [
                {"a": 1},
                {"a": 2, "b": 1},
                {"a": 2, "b": 2, "c": 1},
                {"a": 2, "b": 2, "c": 1},
                {"a": 2, "b": 1},
                {"a": 1},
                {"a": 1},
                {"a": 2, "b": 1},
            ],
        ),
    ],
)
def test_reduce_by_key_and_window_with_inverse_function_and_filter_function(
    make: Make, case: str, inputs: list[Words], expected: list[dict[str, int]]
) -> None:
    """Windows of two batches; a key whose count is 0 is filtered out."""
    stateful = make(windowed_count, window="20 s")
    for batch, words in enumerate(inputs):
        left = [
            (time - FIRST_MS) // INTERVAL_MS for time in leaving_batch_times(stateful.stream, stateful.time_ms(batch))
        ]
        assert left == ([batch - 2] if batch >= 2 else [])
        stateful.run(batch, words, leaving=[word for gone in left for word in inputs[gone]] if left else None)
    assert [stateful.state(batch) for batch in range(len(inputs))] == expected, case


def test_recovery_with_invertible_reduce_by_key_and_window_operation(make: Make) -> None:
    stateful = make(windowed_count, window="20 s")
    stateful.run(0, ["a"])
    stateful.run(1, ["a", "b"])
    stateful.run(2, ["c"], leaving=["a"])
    # Run again, the batch finds what it found; nothing leaves twice.
    assert leaving_batch_times(stateful.stream, stateful.time_ms(2)) == [stateful.time_ms(0)]
    stateful.run(2, ["c"], leaving=["a"], attempt=2)
    assert stateful.state(2) == {"a": 1, "b": 1, "c": 1}


def test_coalesced_batches_let_all_that_left_meanwhile_leave(make: Make) -> None:
    stateful = make(windowed_count, window="20 s")
    for batch in (0, 1):
        stateful.run(batch, ["a"])
    leaving = leaving_batch_times(stateful.stream, stateful.time_ms(4))
    assert leaving == [stateful.time_ms(batch) for batch in (0, 1, 2)]
    stateful.run(4, ["b"], leaving=["a", "a"])
    assert stateful.state(4) == {"b": 1}


def test_what_was_never_in_the_table_does_not_leave(make: Make) -> None:
    """Batches from before the stream had a state."""
    stateful = make(windowed_count, window="20 s", initial=f"{__name__}:initial_counts")
    stateful.run(5, ["a"])
    assert leaving_batch_times(stateful.stream, stateful.time_ms(6)) == []
    assert leaving_batch_times(stateful.stream, stateful.time_ms(7)) == [stateful.time_ms(5)]


def test_with_several_inputs_leaving_is_a_mapping(make: Make) -> None:
    inputs = [KafkaInput(id=name, bootstrap_servers="127.0.0.1:1", topics=name) for name in ("clicks", "views")]
    stateful = make(both_inputs, inputs=inputs, window="10 s")

    def run(batch: int, *, leaving: bool) -> None:
        frames = {"clicks": stateful.words(["a"]), "views": stateful.words(["a", "b"])}
        left = frames if leaving else None
        update_state(stateful.spark, stateful.stream, frames, stateful.batch(batch), leaving=left)

    run(0, leaving=False)
    run(1, leaving=True)
    assert stateful.state(1) == {"a": 2, "b": 1}


# What is headrace's own


def test_a_batch_run_again_starts_from_the_state_before_it_and_leaves_later_ones(make: Make) -> None:
    stateful = make(running_count)
    for batch, words in enumerate([["a"], ["b"], ["c"]]):
        stateful.run(batch, words)
    before = stateful.state(1)
    counts = stateful.run(1, ["b"], attempt=2)
    assert stateful.state(1) == before == {"a": 1, "b": 1}
    assert (counts["based_on"], counts["later_versions"]) == (stateful.time_ms(0), 1)
    assert stateful.told == ["state: 1 later batches have a state already, which this run does not compute again"]
    stateful.run(1, ["x"], attempt=3)
    assert stateful.state(1) == {"a": 1, "x": 1}
    assert stateful.state(2) == {"a": 1, "b": 1, "c": 1}


def test_a_fenced_attempt_is_refused_before_it_begins(make: Make) -> None:
    stateful = make(running_count)
    stateful.run(0, ["a"], attempt=2)
    with pytest.raises(StateFencedError):
        stateful.run(0, ["b"], attempt=1)
    assert stateful.state(0) == {"a": 1}


def test_states_are_kept_as_far_back_as_they_are_remembered(make: Make) -> None:
    stateful = make(changed_counts, returns="changes", snapshot_every=1, remember="10 s")
    stateful.run(0, ["a", "b"])
    for batch in range(1, 5):
        stateful.run(batch, ["a"])
    stateful.run(3, ["a"], attempt=2)
    assert stateful.state(3) == {"a": 4, "b": 1}
    with pytest.raises(StateMissingError, match="has been removed"):
        stateful.run(1, ["a"], attempt=2)


def test_a_state_may_be_remembered_for_longer_than_the_log(make: Make) -> None:
    stateful = make(changed_counts, returns="changes", snapshot_every=1, remember="10 s", state_remember="1 h")
    for batch in range(4):
        stateful.run(batch, ["a"])
    assert stateful.run(1, ["a"], attempt=2)["rows"] == 1
    assert stateful.state(1) == {"a": 2}


@pytest.mark.parametrize(
    ("update", "words", "message"),
    [
        (null_key, ["a", "b"], r'2 rows with a null in their key, such as {"word": null}'),
        (double_key, ["a", "b", "a"], r'2 rows whose key is there more than once, such as {"word": "a"}'),
        (wrong_type, ["a"], "count is string and not bigint"),
        (no_frame, ["a"], "no_frame returned a list, not a DataFrame"),
    ],
)
def test_rows_that_are_no_table_are_refused_and_change_nothing(
    make: Make, update: Any, words: Words, message: str
) -> None:
    stateful = make(running_count)
    stateful.run(0, ["a"])
    wrong = make(update)
    with pytest.raises(StateRowsError, match=message):
        wrong.run(1, words)
    assert [name.batch_time_ms for name in stateful.store.names()] == [stateful.time_ms(0)]
    stateful.run(1, ["a"], attempt=2)
    assert stateful.state(1) == {"a": 2}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"fields": "word STRING, count"}, "are no columns in Spark's DDL"),
        ({"keys": "user"}, "keys user are none of the fields word, count"),
        ({"fields": f"{COUNTS}, removed BOOLEAN"}, "cannot hold a column removed"),
        ({"fields": "word MAP<STRING, INT>, count BIGINT"}, "Spark compares no maps"),
    ],
)
def test_a_definition_that_makes_no_table_is_told(make: Make, fields: dict[str, str], message: str) -> None:
    with pytest.raises(StateDefinitionError, match=message):
        make(running_count, **fields).run(0, ["a"])


def test_a_column_may_be_added_and_the_keys_may_not_change(make: Make) -> None:
    make(running_count).run(0, ["a", "b"])
    wider = make(widened, fields=f"{COUNTS}, seen STRING")
    wider.run(1, ["b"])
    rows = state_frames(wider.spark, wider.stream, wider.time_ms(1)).state.collect()
    assert {tuple(row) for row in rows} == {("a", 1, None), ("b", 2, "today")}
    with pytest.raises(StateDefinitionError, match="keys were word and are word, count"):
        make(running_count, keys=["word", "count"]).run(2, ["a"])


def test_a_replay_does_not_touch_the_live_state(make: Make) -> None:
    stateful = make(running_count)
    with pytest.raises(StateError, match="replay fixed cannot update the state"):
        update_state(stateful.spark, stateful.stream, {}, stateful.batch(0, target="fixed"))


def test_values_of_every_type_come_back_as_they_were(make: Make) -> None:
    fields = (
        "word STRING, `a column` DECIMAL(12, 2), at TIMESTAMP, day DATE, raw BINARY, tags ARRAY<STRING>, "
        "seen MAP<STRING, BIGINT>, place STRUCT<lat: DOUBLE, name: STRING>, clock TIMESTAMP_NTZ"
    )
    stateful = make(only_state, fields=fields, snapshot_every=1, initial=f"{__name__}:{all_types.__name__}")
    first, second = stateful.run(0, []), stateful.run(1, [])
    assert (first["changed"], second["changed"], second["rows"]) == (0, 0, 2)
    assert second["snapshot"]
    rows = state_frames(stateful.spark, stateful.stream, stateful.time_ms(1)).state
    assert sorted(rows.collect()) == sorted(all_types(stateful.spark).select(*rows.columns).collect())


def all_types(spark: SparkSession) -> DataFrame:
    values = (
        "a",
        Decimal("3.14"),
        datetime(2026, 11, 21, 17, 41, 39, 123456, tzinfo=UTC),
        date(2026, 11, 21),
        b"\x00\xff",
        ["x", None],
        {"k": 1},
        (1.5, "there"),
        datetime(2026, 11, 21, 17, 41),
    )
    schema = (
        "word STRING, `a column` DECIMAL(12, 2), at TIMESTAMP, day DATE, raw BINARY, tags ARRAY<STRING>, "
        "seen MAP<STRING, BIGINT>, place STRUCT<lat: DOUBLE, name: STRING>, clock TIMESTAMP_NTZ"
    )
    return spark.createDataFrame([values, ("b", *[None] * 8)], schema)


def test_a_damaged_file_is_named(make: Make, tmp_path: Path) -> None:
    stateful = make(running_count)
    stateful.run(0, ["a"])
    (file,) = stateful.store.version_of(stateful.time_ms(0)).table
    (tmp_path / "storage" / "words" / "state" / file.path).write_bytes(b"not Parquet")
    with pytest.raises((PySparkException, HeadraceError), match=f"{file.path} cannot be read"):
        stateful.run(1, ["a"])


# The documentation's example, and Spark Connect

PAGE = Path(__file__).parents[3] / "docs" / "state.md"

SERVER = """
import sys
from headrace.spark.receiver_application import start_application
from headrace.stream import Stream

application = start_application(Stream.model_validate_json(sys.argv[1]), token="state-test")
print(application.connect_url, flush=True)
sys.stdin.read()
application.spark.stop()
"""

CLIENT = """
import json, sys
from headrace.spark.outputs.writer import WrittenBatch
from headrace.spark.sessions import connect_session
from headrace.spark.state import state_frames, update_state
from headrace.spark.transforms import BatchContext, apply_transform, load_transform
from headrace.stream import Stream

stream = Stream.model_validate_json(sys.argv[1])
spark = connect_session(sys.argv[2], "state-test")
for number, lines in enumerate((["a b", "a"], [], ["b b", "c"])):
    time_ms = 1_700_000_000_000 + number * 10_000
    context = BatchContext.of(stream.name, time_ms, 10_000, 1)
    batch = WrittenBatch(stream, context, time_ms, 1, "", False, "", {}, sys.stdout, lambda line: None)
    inputs = {"lines": spark.createDataFrame([(line,) for line in lines], "value STRING")}
    counts = update_state(spark, stream, inputs, batch)
    frames = state_frames(spark, stream, time_ms)
    more = {"state": frames.state, "changes": frames.changes}
    written = apply_transform(load_transform(stream), inputs, ["elasticsearch"], context, more=more)
    rows = {row["word"]: row["count"] for row in written["elasticsearch"].collect()}
    print(json.dumps([counts, {row["word"]: row["count"] for row in frames.state.collect()}, rows]))
spark.stop()
"""


@pytest.mark.slow
def test_the_documentations_example_runs_over_spark_connect(tmp_path: Path) -> None:
    functions, dag = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)[:2]
    (tmp_path / "running_count_functions.py").write_text(functions)
    (tmp_path / "running_count.py").write_text(dag.replace("/var/lib/headrace", str(tmp_path)))
    namespace: dict[str, Any] = {"__file__": str(tmp_path / "running_count.py"), "__name__": "running_count"}
    exec(compile((tmp_path / "running_count.py").read_text(), "running_count.py", "exec"), namespace)  # noqa: S102
    definition = namespace["stream"].to_json()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SPARK_CONNECT")}
    with (
        (tmp_path / "server.log").open("w") as log,
        subprocess.Popen(
            [sys.executable, "-c", SERVER, definition],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment,
        ) as server,
    ):
        assert server.stdout is not None
        try:
            url = server.stdout.readline().strip()
            assert url, (tmp_path / "server.log").read_text()[-3000:]
            client = subprocess.run(
                [sys.executable, "-c", CLIENT, definition, url],
                capture_output=True,
                text=True,
                timeout=240,
                check=False,
                env=environment,
            )
        finally:
            assert server.stdin is not None
            server.stdin.close()
            try:
                server.wait(60)
            except subprocess.TimeoutExpired:
                server.kill()
    assert client.returncode == 0, client.stderr[-3000:]
    batches = [json.loads(line) for line in client.stdout.splitlines()]
    assert [counts["rows"] for counts, _, _ in batches] == [2, 2, 3]
    assert [state for _, state, _ in batches] == [{"a": 2, "b": 1}, {"a": 2, "b": 1}, {"a": 2, "b": 3, "c": 1}]
    assert [written for _, _, written in batches] == [{"a": 2, "b": 1}, {}, {"b": 3, "c": 1}]
