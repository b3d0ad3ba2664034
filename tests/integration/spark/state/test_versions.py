"""The versions of a state: run again, fenced, remembered, refused, damaged, and of which columns."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from tests.integration.spark.state.stateful import (
    COUNTS,
    Make,
    Words,
    changed_counts,
    running_count,
)

from headrace.spark.attempts.failures import first_cause
from headrace.spark.state.updating import state_frames, update_state
from headrace.spark.state.version import (
    StateDefinitionError,
    StateError,
    StateFencedError,
    StateMissingError,
    StateRowsError,
)


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


def widened(words: DataFrame, state: DataFrame) -> DataFrame:
    new = words.select("word", F.lit(1).cast("bigint").alias("count"), F.lit("today").alias("seen"))
    grouped = state.unionByName(new).groupBy("word")
    return grouped.agg(F.sum("count").alias("count"), F.max("seen").alias("seen"))


def test_a_repeat_takes_the_state_before_it_and_keeps_later_ones(make: Make) -> None:
    stateful = make(running_count)
    for batch, words in enumerate([["a"], ["b"], ["c"]]):
        stateful.run(batch, words)
    before = stateful.state(1)
    counts = stateful.run(1, ["b"], attempt=2)
    assert stateful.state(1) == before == {"a": 1, "b": 1}
    assert (counts["based_on"], counts["later_versions"]) == (stateful.time_ms(0), 1)
    assert stateful.reported == ["state: 1 later batches already have a state, which this run does not compute again"]
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
    with pytest.raises(StateMissingError, match="has been deleted"):
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
        (null_key, ["a", "b"], r'2 rows with a null in their key, for example {"word": null}'),
        (double_key, ["a", "b", "a"], r'2 rows whose keys occur more than once, for example {"word": "a"}'),
        (wrong_type, ["a"], "count is string and not bigint"),
        (no_frame, ["a"], "no_frame returned a list, not a DataFrame"),
    ],
)
def test_an_updates_wrong_rows_are_refused_and_change_no_state(
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
    # Two stages read the file. If both fail before Spark handles the first failure, pyspark has no class of its own.
    with pytest.raises((PySparkException, Py4JJavaError)) as raised:
        stateful.run(1, ["a"])
    assert f"{file.path} cannot be read" in first_cause(raised.value)
