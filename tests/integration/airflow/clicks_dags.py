"""The DAG file of the tests about backfills and assets: `clicks` by the clock, `orders` by what was received."""

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
from headrace.operators.batch_steps import batch_asset
from headrace.stream import ElasticsearchOutput, KafkaInput, ParquetOutput, Stream

TOYS = Path(os.environ["HEADRACE_TOYS"])
FOLDER = os.environ["HEADRACE_FOLDER"]

spark_submit.application = lambda name: str(TOYS / {"receiver.py": "toy_receiver.py"}.get(name, "toy_batch.py"))
spark_submit.StreamSparkSubmitHook._build_spark_submit_command = lambda hook, application: [
    sys.executable,
    application,
    *hook._application_args,
]

COMMON = {
    "inputs": KafkaInput(bootstrap_servers="localhost:9", topics="flights"),
    "storage": f"{FOLDER}/storage",
    "ledger": "connection:flights_ledger",
    "remember": "1 h",
    "spark": {"master": "local[2]", "run_batches": "submit"},
}

clicks = Stream(
    name="clicks",
    outputs=[
        ElasticsearchOutput(id="search", hosts="http://localhost:9", index="clicks"),
        ParquetOutput(id="lake", path=f"{FOLDER}/lake"),
    ],
    batch_interval="10 s",
    coalesce=False,
    parameters={"factor": 1},
    limits={"max_concurrent_batches": 3},
    **COMMON,
)
# A story whose later steps ask for their runs ends the schedule: each run of it takes seconds of a processor.
ends = Path(FOLDER, "schedule_ends")
end_date = datetime.fromisoformat(ends.read_text()) if ends.exists() else None

clicks_receiver = receiver_dag(clicks)
clicks_batches = batch_dag(clicks, single_task=True, end_date=end_date, default_args={"retries": 0})
clicks_replay = replay_dag(
    clicks, "v2", outputs={"search": {"index": "clicks-v2"}}, max_active_runs=2, default_args={"retries": 0}
)


class Report(BaseOperator):
    """Writes down the numbers of the batches that its run is about."""

    def execute(self, context):
        events = [event.extra for event in context["triggering_asset_events"][batch_asset("clicks")]]
        with Path(FOLDER, "reports.jsonl").open("a") as file:
            file.write(json.dumps({"run_id": context["dag_run"].run_id, "batches": events}) + "\n")


with DAG("reports", schedule=[batch_asset(clicks)], start_date=START_DATE, catchup=False) as reports:
    Report(task_id="report")

orders = Stream(
    name="orders",
    outputs=ElasticsearchOutput(id="search", hosts="http://localhost:9", index="orders"),
    batch_interval="1 s",
    trigger={"min_records": 100, "max_delay": "10 s"},
    **COMMON,
)
orders_receiver = receiver_dag(orders)
orders_batches = batch_dag(orders, single_task=True, default_args={"retries": 0})
