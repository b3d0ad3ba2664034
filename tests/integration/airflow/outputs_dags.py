"""The Airflow DAG file of the tests about outputs and order: `flights` with two outputs, `visits` with state."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from headrace.dags import batch_dag, receiver_dag
from headrace.hooks import spark_submit
from headrace.stream import ElasticsearchOutput, KafkaInput, ParquetOutput, State, Stream

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

flights = Stream(
    name="flights",
    outputs=[
        ElasticsearchOutput(id="search", hosts="http://localhost:9", index="flights"),
        ParquetOutput(id="lake", path=f"{FOLDER}/lake"),
    ],
    # Seven tasks take more of a processor than ten seconds, on a slow machine.
    batch_interval="20 s",
    **COMMON,
)
flights_receiver = receiver_dag(flights)
flights_batches = batch_dag(flights)

visits = Stream(
    name="visits",
    outputs=ElasticsearchOutput(id="search", hosts="http://localhost:9", index="visits"),
    state=State(update="visits:update", fields="who STRING", keys="who"),
    batch_interval="15 s",
    coalesce=False,
    **COMMON,
)
visits_receiver = receiver_dag(visits)
visits_batches = batch_dag(visits)
