"""Which settings of executor allocation a stream accepts."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from tests.unit.stream.definitions import fields

from headrace.stream import (
    DeadLetterLimit,
    ElasticsearchOutput,
    ExecutorAllocation,
    SparkSettings,
    Storage,
    Stream,
    StreamDefinitionError,
)


@pytest.mark.parametrize(
    ("limit", "letters", "rows", "passed"),
    [
        (DeadLetterLimit(), 1, 1, None),
        (DeadLetterLimit(), 100, 100, None),
        (DeadLetterLimit(), 101, 202, None),
        (DeadLetterLimit(), 101, 201, "50% of dead_letter_limit.share"),
        (DeadLetterLimit(), 337, 336_776, None),
        (DeadLetterLimit(number=10), 11, 1_000, "the 10 of dead_letter_limit.number"),
        (DeadLetterLimit(number=10), 10, 10, None),
        (DeadLetterLimit(number=0), 1, 1_000, "the 0 of"),
        (DeadLetterLimit(share=0.01, tolerated=0), 1, 100, None),
        (DeadLetterLimit(share=0.01, tolerated=0), 2, 100, "the 1% of"),
        (DeadLetterLimit(share=1), 1_000, 1_000, None),
    ],
)
def test_a_limit_is_passed_by_number_or_by_share(
    limit: DeadLetterLimit, letters: int, rows: int, passed: str | None
) -> None:
    found = limit.passed(letters, rows)
    assert (found is None) is (passed is None)
    assert passed is None or passed in str(found)


@pytest.mark.parametrize("wrong", [{"share": 1.5}, {"share": -0.1}, {"number": -1}, {"tolerated": -1}, {"most": 1}])
def test_a_limit_that_is_none_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(StreamDefinitionError):
        ElasticsearchOutput(hosts="http://h:1", index="a", dead_letter_limit=wrong)


CLUSTER = "spark://host:7077"


def test_the_defaults_are_those_of_spark() -> None:
    allocation = ExecutorAllocation()
    assert (allocation.scaling_interval, allocation.scaling_up_ratio, allocation.scaling_down_ratio) == (
        timedelta(seconds=60),
        0.9,
        0.3,
    )
    assert (allocation.minimum, allocation.maximum) == (None, None)


@pytest.mark.parametrize(
    "settings",
    [
        {"minimum": 1},
        {"minimum": 5},
        {"maximum": 1},
        {"minimum": 4, "maximum": 4},
        {"scaling_interval": "7 s"},
        {"scaling_up_ratio": 1.4},
        {"scaling_down_ratio": 0.2},
        {"scaling_up_ratio": 0.6, "scaling_down_ratio": 0.55},
    ],
)
def test_settings_that_fit_are_accepted_and_kept(settings: dict[str, Any]) -> None:
    spark = SparkSettings(master=CLUSTER, executors=ExecutorAllocation(**settings))
    stream = Stream(**fields(spark=spark, storage=Storage(url="/mnt/nfs", shared=True)))
    assert Stream.from_json(stream.to_json()) == stream


@pytest.mark.parametrize(
    ("settings", "reported"),
    [
        ({"minimum": 0}, "minimum .* greater than 0"),
        ({"minimum": -3}, "minimum .* greater than 0"),
        ({"maximum": 0}, "maximum .* greater than 0"),
        ({"maximum": -3}, "maximum .* greater than 0"),
        ({"minimum": 6, "maximum": 5}, "maximum must not be less than minimum"),
        ({"scaling_interval": 0}, "scaling_interval must be longer than zero"),
        ({"scaling_interval": -2}, "scaling_interval must be longer than zero"),
        ({"scaling_up_ratio": 0}, "scaling_up_ratio .* greater than 0"),
        ({"scaling_up_ratio": -0.4}, "scaling_up_ratio .* greater than 0"),
        ({"scaling_down_ratio": 0}, "scaling_down_ratio .* greater than 0"),
        ({"scaling_down_ratio": -0.4}, "scaling_down_ratio .* greater than 0"),
        ({"scaling_up_ratio": 0.7, "scaling_down_ratio": 0.7}, "scaling_up_ratio must be more than scaling_down_ratio"),
        ({"scaling_up_ratio": 0.2}, "scaling_up_ratio must be more than scaling_down_ratio"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], reported: str) -> None:
    with pytest.raises(StreamDefinitionError, match=reported):
        ExecutorAllocation(**settings)


@pytest.mark.parametrize(
    ("settings", "reported"),
    [
        ({}, "executors needs a cluster"),
        ({"master": "local[8]"}, "executors needs a cluster"),
        ({"master": CLUSTER, "run_batches": "submit"}, 'executors needs run_batches="connect"'),
        ({"master": CLUSTER, "job": "small"}, "executors cannot be used with job"),
        (
            {"master": CLUSTER, "conf": {"spark.dynamicAllocation.maxExecutors": "9"}},
            r"executors cannot be used with spark\.dynamicAllocation\.maxExecutors",
        ),
        (
            {"master": CLUSTER, "conf": {"spark.dynamicAllocation.enabled": "true"}},
            r"spark\.dynamicAllocation\.enabled is set by headrace",
        ),
    ],
)
def test_what_executors_cannot_be_combined_with_is_named(settings: dict[str, Any], reported: str) -> None:
    with pytest.raises(StreamDefinitionError, match=reported):
        SparkSettings(executors=ExecutorAllocation(), **settings)


def test_executors_are_only_allocated_on_request() -> None:
    assert SparkSettings(master=CLUSTER).executors is None
    assert SparkSettings(connection="cluster", executors={}).executors == ExecutorAllocation()


def test_sparks_names_lead_to_the_field() -> None:
    with pytest.raises(
        StreamDefinitionError, match=r"dynamicAllocation\.minExecutors \(set the stream's spark\.execut"
    ):
        SparkSettings(conf={"spark.streaming.dynamicAllocation.minExecutors": "2"})
