"""The DAG file of these tests: a stream's Airflow DAGs, with toys in place of the two Spark applications."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from headrace.dags import batch_dag, receiver_dag
from headrace.hooks import spark_submit
from headrace.stream import ElasticsearchOutput, KafkaInput, Stream

TOYS = Path(os.environ["HEADRACE_TOYS"])
FOLDER = os.environ["HEADRACE_FOLDER"]

spark_submit.application = lambda name: str(TOYS / {"receiver.py": "toy_receiver.py"}.get(name, "toy_batch.py"))
spark_submit.StreamSparkSubmitHook._build_spark_submit_command = lambda hook, application: [
    sys.executable,
    application,
    *hook._application_args,
]

stream = Stream(
    name="flights",
    inputs=KafkaInput(bootstrap_servers="localhost:9", topics="flights"),
    outputs=ElasticsearchOutput(hosts="http://localhost:9", index="flights"),
    # Five tasks take more of a processor than ten seconds, on a slow machine.
    batch_interval="20 s",
    # Each batch time has its own run here; outputs_dags.py has a stream that takes late ones over.
    coalesce=False,
    storage=f"{FOLDER}/storage",
    ledger="connection:flights_ledger",
    # The tests run completed batches again, whenever a busy machine comes to it.
    remember="1 h",
    spark={"master": "local[2]", "run_batches": "submit"},
    limits={"max_concurrent_batches": 3},
)
receiver = receiver_dag(stream)
batches = batch_dag(stream, default_args={"retries": 0})
