"""Spark Streaming's quick example: count the words in each batch of lines, and print the counts.

This file gives Airflow three DAGs: `word_count_receiver`, `word_count_batches`, `word_count_repair`. The counts are in
the log of the second one's task `generate_batch.console`. The transform is a separate module beside this one: the DAG
file names it and gives its path to Spark. Spark imports it; Airflow does not.
"""

from __future__ import annotations

from pathlib import Path

from deployment import LEDGER, SPARK_CONF, SPARK_MASTER, STORAGE

from headrace.dags import stream_dags
from headrace.stream import ConsoleOutput, KafkaInput, SparkSettings, Stream, Utf8Decoder

stream = Stream(
    name="word_count",
    inputs=KafkaInput(id="lines", connection="kafka_default", topics="lines", value_decoder=Utf8Decoder()),
    transform="word_count_transform:count_words",
    outputs=ConsoleOutput(rows=20),
    batch_interval="10 s",
    storage=STORAGE,
    ledger=LEDGER,
    spark=SparkSettings(
        master=SPARK_MASTER, conf=SPARK_CONF, py_files=(str(Path(__file__).with_name("word_count_transform.py")),)
    ),
)

receiver, batches = stream_dags(stream)
