"""The peer of `warm_batch`: Spark Structured Streaming with AvailableNow, and Elasticsearch's own parallel_bulk.

A process of its own, which reads one JSON request a line, and answers with one: ``{"index": ..., "transform": ...}``
makes it index what the topic has got since the request before, and refresh the index. The answer has the seconds, and
the processor time of this process with its JVM and workers. `Peer` is its caller's side.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Self

import psutil

SCHEMA = "id LONG, t LONG, user STRING, action STRING, page STRING, price DOUBLE, agent STRING, pad STRING"


def cpu_seconds(pid: int) -> float:
    """The processor time of a process, of its children, and of those of them that have ended and were waited for."""
    process = psutil.Process(pid)
    total = 0.0
    for each in [process, *process.children(recursive=True)]:
        try:
            times = each.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


class Peer:
    """The peer's process, started with a Spark of two cores."""

    def __init__(self, bootstrap_servers: str, url: str, topic: str, folder: Path, env: dict[str, str]) -> None:
        command = [sys.executable, "-m", "benchmarks.structured_streaming", bootstrap_servers, url, topic, str(folder)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env
        )
        self._read()

    def index(self, index: str, *, transform: bool) -> dict[str, float]:
        """Index what is new in the topic: ``seconds`` and ``cpu_seconds``."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"index": index, "transform": transform}) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)  # type: ignore[no-any-return]
        raise RuntimeError("the Structured Streaming process has ended; run it by itself to see why")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def serve(bootstrap_servers: str, url: str, topic: str, folder: str) -> Iterator[dict[str, float]]:
    import pyspark
    from elasticsearch import Elasticsearch
    from elasticsearch.helpers import parallel_bulk
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql import functions as F  # noqa: N812

    spark = (
        SparkSession.builder.master("local[2]")
        .appName("structured-streaming")
        .config("spark.jars.packages", f"org.apache.spark:spark-sql-kafka-0-10_2.13:{pyspark.__version__}")
        .config("spark.sql.shuffle.partitions", "8")
        .config("spark.ui.enabled", "false")
        .getOrCreate()
    )
    records = (
        spark.readStream.format("kafka")
        .option("kafka.bootstrap.servers", bootstrap_servers)
        .option("subscribe", topic)
        .option("startingOffsets", "earliest")
        .load()
    )
    yield {}
    for line in sys.stdin:
        request = json.loads(line)
        index: str = request["index"]

        def send(rows: Iterable[Any], index: str = index, transformed: bool = request["transform"]) -> None:
            actions = (
                {
                    "_op_type": "create",
                    "_index": index,
                    "_id": f"{row.topic}+{row.partition}+{row.offset}",
                    "_source": {**row.value.asDict(), "cents": row.cents} if transformed else json.loads(row.value),
                }
                for row in rows
            )
            with Elasticsearch(url, request_timeout=120) as client:
                for succeeded, answer in parallel_bulk(client, actions, thread_count=4, chunk_size=5_000):
                    assert succeeded, answer

        def write(batch: DataFrame, _epoch: int, send: Any = send) -> None:
            batch.foreachPartition(send)

        chosen = records.select("topic", "partition", "offset", "value")
        if request["transform"]:
            chosen = chosen.withColumn("value", F.from_json(F.col("value").cast("string"), SCHEMA))
            chosen = chosen.withColumn("cents", (F.col("value.price") * 100).cast("long"))
        used, started = cpu_seconds(psutil.Process().pid), time.monotonic()
        query = chosen.writeStream.foreachBatch(write).trigger(availableNow=True)
        query.option("checkpointLocation", f"{folder}/checkpoint").start().awaitTermination()
        with Elasticsearch(url, request_timeout=120) as client:
            client.indices.refresh(index=index)
        yield {
            "seconds": time.monotonic() - started,
            "cpu_seconds": cpu_seconds(psutil.Process().pid) - used,
        }


if __name__ == "__main__":
    for answer in serve(*sys.argv[1:]):
        print(json.dumps(answer), flush=True)
