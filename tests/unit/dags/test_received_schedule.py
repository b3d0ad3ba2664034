from __future__ import annotations

from datetime import UTC, datetime

import pytest
from airflow.models.backfill import _get_info_list
from airflow.sdk import DAG
from airflow.serialization.serialized_objects import DagSerialization
from airflow.timetables.simple import AssetTriggeredTimetable

from headrace.dags.factories import received_schedule
from headrace.stream import ConsoleOutput, KafkaInput, Stream, StreamDefinitionError

START = datetime(2026, 3, 1, tzinfo=UTC)


def stream(**fields) -> Stream:
    return Stream(
        name="flights",
        inputs=KafkaInput(bootstrap_servers="localhost:9", topics="flights"),
        outputs=ConsoleOutput(),
        batch_interval="2 s",
        storage="/somewhere",
        ledger="sqlite:////somewhere/ledger.db",
        **fields,
    )


def test_a_dag_with_it_is_started_by_the_asset_alone_and_can_be_backfilled():
    triggered = stream(trigger={"min_records": 500, "max_delay": "1 min"})
    dag = DAG("flights_batches", schedule=received_schedule(triggered), start_date=START, catchup=False)
    kept = DagSerialization.from_dict(DagSerialization.to_dict(dag))
    # What the scheduler asks of a DAG that assets start.
    assert isinstance(kept.timetable, AssetTriggeredTimetable)
    assert [asset.uri for _, asset in kept.timetable.asset_condition.iter_assets()] == ["headrace://flights/received"]
    assert kept.next_dagrun_info(last_automated_run_info=None) is None
    found = _get_info_list(from_date=START, to_date=START.replace(second=4), reverse=False, dag=kept)
    assert [run.logical_date.second for run in found] == [0, 2, 4]


def test_the_watcher_knows_the_streams_limits():
    (asset,) = (found for _, found in _assets(stream(trigger={"min_records": 500, "max_delay": "1 min"})))
    (watcher,) = asset.watchers
    assert watcher.trigger.parameters == {
        "min_records": 500, "max_delay_ms": 60_000, "interval_ms": 2000, "repeat_after_ms": 300_000,
    }  # fmt: skip


def _assets(declared: Stream):
    return [("", asset) for asset in received_schedule(declared).asset_condition.objects]


def test_a_stream_without_trigger_is_started_by_the_clock():
    with pytest.raises(StreamDefinitionError, match="min_records"):
        received_schedule(stream())
