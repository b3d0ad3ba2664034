"""The events that Airflow's OpenLineage provider emits for batches, written by its file transport."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.providers.openlineage import conf
from airflow.providers.openlineage.extractors.manager import ExtractorManager
from airflow.providers.openlineage.plugins.adapter import OpenLineageAdapter
from airflow.sdk import DAG
from airflow.utils.state import TaskInstanceState

from headrace.clock import time_text
from headrace.hooks.ledger import register
from headrace.operators.wal_spark_submit import BatchTaskError, WalSparkSubmitOperator
from headrace.stream import ConsoleOutput, KafkaOutput, ParquetOutput

Emit = Callable[..., dict[str, Any]]
RUN_ID = "01941f29-7c00-7087-8906-40e512c257bd"


@pytest.fixture
def emit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Emit:
    """Emits the event of a task that has ended, as the provider's listener does, and returns it as the file has it."""
    path = tmp_path / "events.json"
    transport = {"type": "file", "log_file_path": str(path), "append": True}
    monkeypatch.setenv("AIRFLOW__OPENLINEAGE__TRANSPORT", json.dumps(transport))
    for cached in vars(conf).values():
        if hasattr(cached, "cache_clear"):
            cached.cache_clear()

    def emit(operator: Any, task: Any, state: TaskInstanceState = TaskInstanceState.SUCCESS) -> dict[str, Any]:
        metadata = ExtractorManager().extract_metadata(
            dagrun=SimpleNamespace(run_id="run"), task=operator, task_instance_state=state, task_instance=task
        )
        OpenLineageAdapter().complete_task(
            run_id=RUN_ID,
            job_name="flights_batches.generate_batch",
            end_time="2026-01-01T00:00:00Z",
            task=metadata,
            nominal_start_time=None,
            nominal_end_time=None,
            owners=None,
            tags=None,
            job_description=None,
        )
        event: dict[str, Any] = json.loads(path.read_text().splitlines()[-1])
        return event

    return emit


def make(stream: Any) -> Any:
    with DAG("flights_batches"):
        return WalSparkSubmitOperator(task_id="generate_batch", stream=stream, way="connect")


def test_a_batchs_run_has_its_offsets_as_inputs(
    stream: Any, allocated: Any, toy_batch: Any, connectable: Any, emit: Emit
) -> None:
    """Its output is the batch's index."""
    toy_batch("ok")
    at_ms, task = allocated()
    operator = make(stream)
    operator.execute(task.context)
    event = emit(operator, task)
    (source,) = event["inputs"]
    assert (source["namespace"], source["name"]) == ("kafka://localhost:9", "flights")
    (offsets,) = source["inputFacets"]["headrace_offsets"]["ranges"]
    assert offsets == {"partition": 0, "fromOffset": 0, "untilOffset": 3, "records": 3, "incarnation": 1}
    (output,) = event["outputs"]
    assert (output["namespace"], output["name"]) == ("elasticsearch://localhost:9", "flights")
    batches = event["run"]["facets"]["headrace_batches"]
    assert (batches["stream"], batches["batchTimes"]) == ("flights", [time_text(at_ms)])


def test_a_failed_task_has_inputs_and_only_written_outputs(
    stream: Any, allocated: Any, toy_batch: Any, connectable: Any, emit: Emit
) -> None:
    toy_batch("fail")
    _, task = allocated()
    operator = make(stream)
    with pytest.raises(BatchTaskError):
        operator.execute(task.context)
    event = emit(operator, task, TaskInstanceState.FAILED)
    assert len(event["inputs"]) == 1
    assert event["outputs"] == []


def test_each_kind_of_output_is_named_and_letters_are_one_too(
    stream: Any, allocated: Any, ledger: Any, emit: Emit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_SEARCH", '{"conn_type": "elasticsearch", "host": "es1,es2", "schema": "https"}')
    monkeypatch.setenv(
        "AIRFLOW_CONN_BROKERS", '{"conn_type": "kafka", "extra": {"bootstrap.servers": "k1:9092,k2:9092"}}'
    )
    (index,) = stream.outputs
    outputs = (
        index.model_copy(update={"hosts": (), "connection": "search"}),
        ParquetOutput(path="/data/flights"),
        KafkaOutput(connection="brokers", topic="clean"),
        ConsoleOutput(),
    )
    written = stream.model_copy(update={"outputs": outputs})
    at_ms, task = allocated()
    register(ledger, written)
    attempt = ledger.attempts.begin("flights", at_ms, holder="task", way="connect", lease_ms=5_000)
    counts = {
        "elasticsearch": {"created": 2, "dead_lettered": 1},
        "parquet": {"rows": 3, "files": 1},
        "kafka": {"messages": 3},
        "console": {"printed": 3},
    }
    for output_id in attempt.outputs:
        ledger.attempts.record_output(attempt, output_id, counts[output_id])
    ledger.attempts.complete(attempt)
    operator = make(written)
    operator._ran.append(attempt)
    found = {
        (output["namespace"], output["name"]): output["outputFacets"]["outputStatistics"]["rowCount"]
        for output in emit(operator, task)["outputs"]
    }
    assert found == {
        ("elasticsearch://es1:443", "flights"): 2,
        ("elasticsearch://es1:443", "flights-dead-letters"): 1,
        ("file", "/data/flights"): 3,
        ("kafka://k1:9092", "clean"): 3,
    }


def test_a_task_that_ran_no_batch_has_no_lineage(stream: Any, task: Any, emit: Emit) -> None:
    event = emit(make(stream), task)
    assert (event["inputs"], event["outputs"]) == ([], [])
