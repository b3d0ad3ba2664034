"""Spark Streaming's quick example: count the words in each batch of the lines that a TCP server sends.

A DAG file makes three DAGs of it, if this folder is on its path::

    # For Airflow, which reads only files with the words "airflow" and "dag" in them.
    from headrace.dags import stream_dags
    from network_word_count import stream

    receiver, batches = stream_dags(stream)

Start a server with ``nc -lk 9999`` and type lines; the counts are in the log of the task `generate_batch.console` of
the DAG `network_word_count_batches`.
"""

from __future__ import annotations

from pathlib import Path

from headrace.stream import ConsoleOutput, ReceiverInput, SparkSettings, Stream, Utf8Decoder

_HERE = Path(__file__).resolve().parent
_HOME = Path("~/headrace").expanduser().absolute()

stream = Stream(
    name="network_word_count",
    inputs=ReceiverInput(
        id="lines",
        receiver="socket_lines:SocketLines",
        arguments={"host": "localhost", "port": 9999},
        value_decoder=Utf8Decoder(),
    ),
    transform="word_count_transform:count_words",
    outputs=ConsoleOutput(rows=20),
    batch_interval="10 s",
    storage=str(_HOME / "storage"),
    ledger=f"sqlite:///{_HOME / 'ledger.db'}",
    spark=SparkSettings(
        py_files=(str(_HERE / "socket_lines.py"), str(_HERE.parents[1] / "dags" / "word_count_transform.py"))
    ),
)
