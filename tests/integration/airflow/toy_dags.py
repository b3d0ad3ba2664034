"""The streams of these tests, with toys in place of the two Spark applications.

Each belongs to one story: `clicks` and `orders` to that about assets, `taps` to that about backfills, `flights` and
`visits` to that about outputs and order, `landings` to that about the schedule. (Airflow reads files with the words
"airflow" and "dag".)
"""

from __future__ import annotations

import json
import os
import sys
from datetime import datetime
from pathlib import Path

from airflow.sdk import DAG, BaseOperator

from headrace.dags import batch_dag, receiver_dag, replay_dag
from headrace.dags.declaration import START_DATE
from headrace.hooks import spark_submit
from headrace.operators.batch_events import batch_asset
from headrace.stream import ElasticsearchOutput, KafkaInput, ParquetOutput, State, Stream

TOYS = Path(os.environ["HEADRACE_TOYS"])
FOLDER = os.environ["HEADRACE_FOLDER"]

spark_submit.application = lambda name: str(TOYS / {"receiver.py": "toy_receiver.py"}.get(name, "toy_batch.py"))
spark_submit.StreamSparkSubmitHook._build_spark_submit_command = lambda hook, application: [
    sys.executable,
    application,
    *hook._application_args,
]


def define(name: str, *, lake: bool = False, **fields) -> Stream:
    """A stream with an output `search`, and perhaps another one."""
    search = ElasticsearchOutput(id="search", hosts="http://localhost:9", index=name)
    return Stream(
        name=name,
        inputs=KafkaInput(bootstrap_servers="localhost:9", topics="flights"),
        outputs=[search, ParquetOutput(id="lake", path=f"{FOLDER}/lake/{name}")] if lake else search,
        storage=f"{FOLDER}/storage",
        ledger="connection:flights_ledger",
        # The tests run completed batches again, whenever a busy machine comes to it.
        remember="1 h",
        spark={"master": "local[2]", "run_batches": "submit"},
        **fields,
    )


def batches_of(stream: Stream, **options) -> DAG:
    """The batch DAG. A story whose later steps ask for their runs ends the schedule: each run takes seconds of a
    processor."""
    ends = Path(FOLDER, f"{stream.name}_schedule_ends")
    end_date = datetime.fromisoformat(ends.read_text()) if ends.exists() else None
    return batch_dag(stream, end_date=end_date, **options)


# Each batch time has its own run, where the stream does not coalesce.
each_time = {"coalesce": False, "limits": {"max_concurrent_batches": 3}, "batch_interval": "10 s"}
no_retry = {"single_task": True, "default_args": {"retries": 0}}

clicks = define("clicks", lake=True, parameters={"factor": 1}, **each_time)
clicks_receiver = receiver_dag(clicks)
clicks_batches = batches_of(clicks, **no_retry)
clicks_replay = replay_dag(clicks, "v2", outputs={"search": {"index": "clicks-v2"}}, default_args={"retries": 0})

taps = define("taps", lake=True, parameters={"factor": 1}, **each_time)
taps_receiver = receiver_dag(taps)
taps_batches = batches_of(taps, **no_retry)
taps_replay = replay_dag(taps, "v2", outputs={"search": {"index": "taps-v2"}}, default_args={"retries": 0})

landings = define("landings", **each_time)
landings_receiver = receiver_dag(landings)
landings_batches = batches_of(landings, **no_retry)

# Seven tasks take more of a processor than ten seconds, on a slow machine.
flights = define("flights", lake=True, batch_interval="20 s")
flights_receiver = receiver_dag(flights)
flights_batches = batches_of(flights)

state = State(update="visits:update", fields="who STRING", keys="who")
visits = define("visits", batch_interval="15 s", coalesce=False, state=state)
visits_receiver = receiver_dag(visits)
visits_batches = batches_of(visits)

orders = define("orders", batch_interval="1 s", trigger={"min_records": 100, "max_delay": "10 s"})
orders_receiver = receiver_dag(orders)
orders_batches = batches_of(orders, **no_retry)


class Report(BaseOperator):
    """Writes down the numbers of the batches that its run is about."""

    def execute(self, context):
        events = [event.extra for event in context["triggering_asset_events"][batch_asset("clicks")]]
        with Path(FOLDER, "reports.jsonl").open("a") as file:
            file.write(json.dumps({"run_id": context["dag_run"].run_id, "batches": events}) + "\n")


with DAG("reports", schedule=[batch_asset(clicks)], start_date=START_DATE, catchup=False) as reports:
    Report(task_id="report")
