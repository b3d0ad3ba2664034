"""State by key from batch to batch, in real Spark; the cases of Spark's own suites carry their names."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from tests.integration.spark.state.stateful import (
    Make,
    Stateful,
    changed_counts,
    initial_counts,
    running_count,
)

from headrace.spark.records.transforms import BatchContext
from headrace.spark.state.updating import state_frames, update_state
from headrace.spark.state.version import StateStore
from headrace.stream import Stream


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


def sessions(words: DataFrame, state: DataFrame, timing_out: DataFrame) -> DataFrame:
    ended = timing_out.join(words, "word", "left_anti").select("word", (-F.col("count")).alias("count"))
    live = changed_counts(words, state).withColumn("removed", F.lit(False))
    return live.unionByName(ended.withColumn("removed", F.lit(True)))


def fails_on_executors(words: DataFrame, state: DataFrame) -> DataFrame:
    return running_count(words, state).withColumn("count", F.expr("raise_error('unlucky')").cast("bigint"))


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
    stateful = make(update, returns=returns, initial=f"{initial_counts.__module__}:initial_counts")
    assert stateful.run(0, ["a", "b"])["rows"] == 3
    assert stateful.state(0) == {"a": 2, "b": 1, "c": 2}
    assert stateful.changes(0) == {"a": (2, False), "b": (1, False)}
    stateful.run(0, ["a", "b"], attempt=2)
    assert stateful.state(0) == {"a": 2, "b": 1, "c": 2}
    assert stateful.reported == [f"state: begins with 2 rows of {initial_counts.__module__}:initial_counts"]


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


def test_a_timed_out_row_can_be_changed_or_is_reported_removed(make: Make) -> None:
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


def test_a_snapshot_keeps_the_time_since_a_rows_last_change(make: Make) -> None:
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
    batches = range(10)
    for batch in batches:
        words = Counter(chance.choices("abcdefgh", k=chance.randrange(5)))
        model = {word: (count, at) for word, (count, at) in model.items() if word in words or batch - at < 4}
        for word, times in words.items():
            count = model.get(word, (0, 0))[0] + times
            model[word] = (count, batch)
            if count >= 3:
                del model[word]
        expected.append({word: count for word, (count, _) in model.items()})
        assert stateful.run(batch, list(words.elements()))["rows"] == len(model)
    assert [stateful.state(batch) for batch in batches] == expected


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
    for batch, words in enumerate([["a"], ["a", "b"], ["c"]]):
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
def test_spark_6847_a_later_batch_has_no_longer_plan(make: Make) -> None:
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
        stored.append(len(stateful.store.storage.paths()))
    for costs in (plans, files, stored):
        assert max(costs[8:]) <= max(costs[:8])
    assert max(sizes[8:]) <= 1.05 * max(sizes[:8])
    assert stateful.state(16) == {f"word-{number}": 17 if number in (1, 2) else 1 for number in range(200)}
