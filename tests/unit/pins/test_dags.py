"""The DAGs of some streams: ids, tasks and what they wait for, and the names that a run's conf may have."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk import DAG
from airflow.sdk.exceptions import AirflowFailException
from tests.unit.pins.freezing import frozen

from headrace.dags import again_dag, batch_dag, receiver_dag, repair_dag, replay_dag, stream_dags
from headrace.stream import (
    BatchTrigger,
    ConsoleOutput,
    ElasticsearchOutput,
    ForeachBatchOutput,
    KafkaInput,
    KafkaOutput,
    KeyIds,
    Limits,
    ParquetOutput,
    SparkSettings,
    State,
    Stream,
)

INDEX = ElasticsearchOutput(connection="search", index="orders", document_ids=KeyIds())


def stream(**fields: Any) -> Stream:
    given: dict[str, Any] = {
        "name": "orders",
        "inputs": KafkaInput(connection="kafka", topics="orders"),
        "outputs": ConsoleOutput(),
        "batch_interval": "10 s",
        "storage": "/data",
        "ledger": "connection:ledger",
    }
    return Stream(**{**given, **fields})


def dags() -> Iterator[tuple[str, DAG]]:
    """DAGs with what is special about each."""
    several = stream(
        outputs=(INDEX, ParquetOutput(path="/files"), KafkaOutput(connection="kafka", topic="copy"),
                 ForeachBatchOutput(id="rest", function="m:f", renamed_from="table"))
    )  # fmt: skip
    state = State(update="m:f", fields="k STRING, n BIGINT", keys="k")
    yield from (("one output", dag) for dag in stream_dags(stream()))
    yield "one task", batch_dag(stream(), single_task=True)
    yield "several outputs", batch_dag(several)
    yield "batches in parallel", batch_dag(stream(limits=Limits(max_concurrent_batches=3)))
    yield "state", batch_dag(stream(state=state))
    yield "parameters", batch_dag(stream(parameters={"limit": 5}))
    yield "triggered by records", batch_dag(stream(trigger=BatchTrigger(min_records=100, max_delay="5 s")))
    yield from (
        ("a job of several streams", dag)
        for dag in stream_dags(stream(spark=SparkSettings(job="shop", master="local[8]")))
    )
    yield "repair", repair_dag(stream())
    yield "a range again", again_dag(stream())
    yield "replay", replay_dag(several, "v2", outputs={"elasticsearch": {"index": "v2"}, "parquet": {"path": "/v2"}})
    yield "ids that are given", receiver_dag(stream(), dag_id="mine")


def described(what: str, dag: DAG) -> Iterator[str]:
    """The DAG's lines, without what Airflow sets by its own configuration."""
    yield f"{dag.dag_id}: {what}"
    facts = ("start_date", "catchup", "max_active_runs", "dagrun_timeout")
    yield f"  {type(dag.timetable).__name__} {' '.join(f'{name}={getattr(dag, name)}' for name in facts)}"
    yield f"  tags {', '.join(sorted(dag.tags))}"
    yield f"  params {' '.join(f'{name}={dag.params[name]}' for name in sorted(dag.params)) or '-'}"
    yield f"  conf {conf_names(dag)}"
    for task in sorted(dag.tasks, key=lambda task: str(task.task_id)):
        after = f" after {', '.join(sorted(task.upstream_task_ids))}" if task.upstream_task_ids else ""
        flags = [name for name in ("depends_on_past", "is_teardown", "on_failure_fail_dagrun") if getattr(task, name)]
        rules = ", ".join([task.trigger_rule.value, f"{task.retries} retries each {task.retry_delay}", *flags])
        yield f"  {task.task_id} {type(task).__name__}{after}: {rules}"


def conf_names(dag: DAG) -> str:
    """What a run's conf may have, as its first task says when it is given something else."""
    task: Any = dag.roots[0]
    context = {"dag": dag, "task": task, "dag_run": SimpleNamespace(conf={"other": 1}), "params": {}}
    with pytest.raises(AirflowFailException) as refused:
        task.execute(context)
    (names,) = re.findall(r"It may have (.*?)[.] ", str(refused.value))
    return str(names)


def test_dags() -> None:
    frozen("dags.txt", "".join(f"{line}\n" for what, dag in dags() for line in described(what, dag)))
