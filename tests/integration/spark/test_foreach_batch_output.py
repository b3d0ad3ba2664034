"""A user's function with a real batch: in a classic session, and all three outputs over Spark Connect."""

from __future__ import annotations

import io
import json
import re
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from pyspark.sql import SparkSession
from tests.integration.spark.connect_server import connect_server

from headrace.spark.outputs.functions import ForeachBatchWriter, FunctionFailedError
from headrace.spark.outputs.writer import WrittenBatch
from headrace.spark.transforms import BatchContext
from headrace.stream import ForeachBatchOutput, KafkaInput, KafkaOutput, ParquetOutput, Stream

T = 1_700_000_010_000
PASSWORD = "hunter2"

FUNCTIONS = """
from pyspark.sql.functions import udf

FACTOR = 2

def save(frame, batch, undecodable):
    doubled = udf(lambda n: n * FACTOR, "long")
    total = sum(row[0] for row in frame.select(doubled("id")).collect())
    return {"total": total, "undecodable": {name: rows.count() for name, rows in undecodable.items()}}

def fails(frame, batch):
    broken = udf(lambda n: 1 // (n - n), "long")
    frame.select(broken("id")).collect()
"""


@pytest.fixture
def make_batch(tmp_path: Path) -> Iterator[Callable[..., WrittenBatch]]:
    """A batch of a stream with these outputs; the function's module is in its py_files."""
    module = tmp_path / "functions" / f"foreach_{uuid.uuid4().hex}.py"
    module.parent.mkdir()
    module.write_text(FUNCTIONS)

    def make(*outputs: Any) -> WrittenBatch:
        if not outputs:
            outputs = tuple(ForeachBatchOutput(id=name, function=f"{module.stem}:{name}") for name in ("save", "fails"))
        stream = Stream(
            name=f"clicks-{uuid.uuid4().hex[:8]}",
            inputs=KafkaInput(bootstrap_servers="localhost:1", topics="clicks"),
            outputs=outputs,
            batch_interval="10 s",
            storage=str(tmp_path / "storage"),
            ledger=f"sqlite:///{tmp_path}/ledger.db",
            spark={
                "master": "local[2]",
                "py_files": [str(module.parent)],
                "conf": {
                    "spark.ui.enabled": "false",
                    "spark.eventLog.enabled": "true",
                    "spark.eventLog.dir": f"file://{tmp_path}",
                    "spark.eventLog.compress": "false",
                },
            },
        )
        return WrittenBatch(
            stream=stream,
            context=BatchContext.of(stream.name, T, 10_000, 1),
            batch_time_ms=T,
            attempt=1,
            manifest_uri="",
            from_kafka=False,
            target="",
            out=io.StringIO(),
            progress=lambda _: None,
        )

    yield make
    sys.modules.pop(module.stem, None)
    if str(module.parent) in sys.path:
        sys.path.remove(str(module.parent))


def test_the_functions_module_reaches_executors_and_its_counts_are_recorded(
    spark: SparkSession, make_batch: Callable[..., WrittenBatch]
) -> None:
    batch = replace(make_batch(), undecodable=lambda: {"records": spark.range(3)})
    save = ForeachBatchWriter(batch.stream.output("save"))  # type: ignore[arg-type]
    assert save.write(spark.range(5), batch) == {"total": 20, "undecodable": {"records": 3}}


def test_an_error_in_an_executor_shows_the_users_line(
    spark: SparkSession, make_batch: Callable[..., WrittenBatch]
) -> None:
    batch = make_batch()
    with pytest.raises(FunctionFailedError) as raised:
        ForeachBatchWriter(batch.stream.output("fails")).write(spark.range(5), batch)  # type: ignore[arg-type]
    first, *frames = str(raised.value).splitlines()
    reason = r"of output 'fails' failed: ZeroDivisionError: integer division or modulo by zero \(.*\.py, line \d+\)$"
    assert re.search(reason, first)
    assert 'frame.select(broken("id")).collect()' in [line.strip() for line in frames]
    assert not any("pyspark" in line for line in frames)


CLIENT = """
import io, json, sys
from headrace.spark.failures import first_cause
from headrace.spark.outputs.writer import (writer_of)
from headrace.spark.outputs.writer import (WrittenBatch)
from headrace.spark.sessions import connect_session
from headrace.spark.transforms import BatchContext
from headrace.stream import Stream

url, token, definition = sys.argv[1:]
stream = Stream.from_json(definition)
spark = connect_session(url, token)
frame = spark.range(0, 1000, 1, 3).selectExpr("id", "CAST(id AS STRING) AS value", "timestamp_millis(id) AS at")
T = 1_700_000_010_000
for output in stream.outputs:
    rows = frame.select("value") if output.kind == "kafka" else frame
    for attempt in (1, 2):
        context = BatchContext.of(stream.name, T, 10_000, attempt)
        batch = WrittenBatch(stream, context, T, attempt, "", False, "", io.StringIO(), lambda _: None)
        try:
            counts = writer_of(output).write(rows, batch)
        except Exception as error:
            counts = str(error).splitlines()[0]
        print(json.dumps(counts))
spark.stop()
"""


@pytest.mark.slow
def test_parquet_kafka_and_foreach_batch_outputs_work_over_spark_connect(
    kafka: str, kafka_admin: AdminClient, make_batch: Callable[..., WrittenBatch], tmp_path: Path
) -> None:
    """The server alone knows the connection; the caller gets the counts, and the function runs with the caller."""
    topic = f"enriched-{uuid.uuid4().hex}"
    kafka_admin.create_topics([NewTopic(topic, 1, 1)])[topic].result()
    functions = make_batch().stream.outputs
    files = ParquetOutput(path=str(tmp_path / "files"))
    stream = make_batch(files, KafkaOutput(connection="secret_kafka", topic=topic), *functions).stream
    # Without SASL the broker asks for no password, but the clients are given it.
    secret = {"conn_type": "kafka", "host": kafka, "login": "me", "password": PASSWORD}
    with connect_server(stream.to_json(), tmp_path, AIRFLOW_CONN_SECRET_KAFKA=json.dumps(secret)) as server:
        client = server.run(CLIENT, stream.to_json())
    counts = [json.loads(line) for line in client.stdout.splitlines()]
    assert [each["rows"] for each in counts[:2]] == [1000, 1000]
    assert counts[2:4] == [
        {"messages": 1000, "repeated": 0, "bytes": 2890},
        {"messages": 0, "repeated": 1000, "bytes": 0},
    ]
    assert counts[4] == counts[5] == {"total": 999_000, "undecodable": {}}
    assert "ZeroDivisionError" in counts[6]
    assert sorted(pd.read_parquet(tmp_path / "files")["id"]) == list(range(1000))
    assert first_message(kafka, topic) == b"0"
    assert not list((tmp_path / "storage" / stream.name / "reports").iterdir())
    written = client.stdout + client.stderr
    for path in tmp_path.rglob("*"):
        written += path.read_text(errors="replace") if path.is_file() else ""
    assert "SparkListener" in written
    assert PASSWORD not in written


def first_message(kafka: str, topic: str) -> bytes | None:
    consumer = Consumer({"bootstrap.servers": kafka, "group.id": "tests", "isolation.level": "read_committed"})
    consumer.assign([TopicPartition(topic, 0, 0)])
    deadline = time.monotonic() + 30
    while (message := consumer.poll(1)) is None or message.error() is not None:
        assert time.monotonic() < deadline
    consumer.close()
    return bytes(message.value())
