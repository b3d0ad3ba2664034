"""Spark Streaming's quick example: count the words in each batch of the lines that a TCP server sends.

Start a server with ``nc -lk 9999``, switch on the three DAGs that this file gives Airflow (`word_count_receiver`,
`word_count_batches`, `word_count_repair`), and type lines. The counts are in the log of the second one's task
`generate_batch.console`. The transform is a separate module beside this one: the DAG file names it and gives its path
to Spark. Spark imports it; Airflow does not.
"""

from __future__ import annotations

from pathlib import Path

from deployment import LEDGER, LINES_HOST, LINES_PORT, SPARK_CONF, SPARK_MASTER, STORAGE

from headrace.dags import stream_dags
from headrace.stream import ConsoleOutput, ReceiverInput, SparkSettings, Stream, Utf8Decoder

stream = Stream(
    name="word_count",
    inputs=ReceiverInput(
        id="lines",
        receiver="headrace.receiver:SocketText",
        arguments={"host": LINES_HOST, "port": LINES_PORT},
        value_decoder=Utf8Decoder(),
    ),
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
