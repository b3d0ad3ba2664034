"""State over a window, from what comes and what leaves; the cases of Spark's own suite carry their names."""

from __future__ import annotations

import pytest
from pyspark.sql import DataFrame
from tests.integration.spark.state.stateful import (
    FIRST_MS,
    INTERVAL_MS,
    Make,
    Words,
    counted,
    initial_counts,
)

from headrace.spark.attempts.batch_plan import evicted_batch_times
from headrace.spark.state.updating import add_and_subtract, update_state
from headrace.stream import KafkaInput


def windowed_count(words: DataFrame, leaving: DataFrame, state: DataFrame) -> DataFrame:
    return add_and_subtract(counted(words), counted(leaving), state, keys="word", values="count")


def both_inputs(clicks: DataFrame, views: DataFrame, leaving: dict[str, DataFrame], state: DataFrame) -> DataFrame:
    entering = counted(clicks.unionByName(views))
    left = counted(leaving["clicks"].unionByName(leaving["views"]))
    return add_and_subtract(entering, left, state, keys="word", values="count")


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
def test_reduce_by_key_and_window_with_inverse_and_filter(
    make: Make, case: str, inputs: list[Words], expected: list[dict[str, int]]
) -> None:
    """Windows of two batches; a key whose count is 0 is filtered out."""
    stateful = make(windowed_count, window="20 s")
    for batch, words in enumerate(inputs):
        left = [
            (time - FIRST_MS) // INTERVAL_MS for time in evicted_batch_times(stateful.stream, stateful.time_ms(batch))
        ]
        assert left == ([batch - 2] if batch >= 2 else [])
        stateful.run(batch, words, leaving=[word for gone in left for word in inputs[gone]] if left else None)
    assert [stateful.state(batch) for batch in range(len(inputs))] == expected, case


def test_recovery_with_invertible_reduce_by_key_and_window(make: Make) -> None:
    stateful = make(windowed_count, window="20 s")
    stateful.run(0, ["a"])
    stateful.run(1, ["a", "b"])
    stateful.run(2, ["c"], leaving=["a"])
    # Run again, the batch finds what it found; nothing leaves twice.
    assert evicted_batch_times(stateful.stream, stateful.time_ms(2)) == [stateful.time_ms(0)]
    stateful.run(2, ["c"], leaving=["a"], attempt=2)
    assert stateful.state(2) == {"a": 1, "b": 1, "c": 1}


def test_a_coalesced_batch_evicts_all_times_since_the_last_state(make: Make) -> None:
    stateful = make(windowed_count, window="20 s")
    for batch in (0, 1):
        stateful.run(batch, ["a"])
    leaving = evicted_batch_times(stateful.stream, stateful.time_ms(4))
    assert leaving == [stateful.time_ms(batch) for batch in (0, 1, 2)]
    stateful.run(4, ["b"], leaving=["a", "a"])
    assert stateful.state(4) == {"b": 1}


def test_records_from_before_the_first_state_are_not_evicted(make: Make) -> None:
    """Batches from before the stream had a state."""
    stateful = make(windowed_count, window="20 s", initial=f"{initial_counts.__module__}:initial_counts")
    stateful.run(5, ["a"])
    assert evicted_batch_times(stateful.stream, stateful.time_ms(6)) == []
    assert evicted_batch_times(stateful.stream, stateful.time_ms(7)) == [stateful.time_ms(5)]


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
