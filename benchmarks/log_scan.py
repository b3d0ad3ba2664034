"""How fast Spark reads the records of a batch from the log, beside Spark's own Kafka source reading them from Kafka.

    python -m benchmarks.log_scan --records 1000000 --rounds 4 [--json]

Both read every column of the same JSON records of 190 bytes, in one session of two cores, and write them nowhere
(``noop``). The first round warms the session up and does not count. The numbers of records are checked.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable

import pyspark
from benchmarks.measures import Measure, bench_folder, print_measures
from benchmarks.receiver_throughput import define, fill, measure
from pyspark.sql import DataFrame, SparkSession

from headrace.batch.allocation import allocate
from headrace.batch.manifest import Manifest
from headrace.devstack.kafka import KafkaServer
from headrace.ledger import Ledger
from headrace.spark.records.wal_source import LogBlocks
from headrace.stream_context import StreamContext

TOPIC = "bench"
CORES = 2


def seconds(frame: Callable[[], DataFrame], records: int) -> float:
    """How long Spark takes for all records, with the planning. The count is a read of its own, after it."""
    started = time.monotonic()
    frame().write.format("noop").mode("overwrite").save()
    took = time.monotonic() - started
    assert frame().count() == records
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=4, help="with the first, which does not count")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    os.environ["PYSPARK_PYTHON"] = sys.executable
    rounds = []
    with bench_folder() as folder, KafkaServer(folder / "kafka") as kafka:
        fill(kafka.bootstrap_servers, TOPIC, options.records, spread_seconds=0)
        stream = define(kafka.bootstrap_servers, TOPIC, folder, 128, "arrival")
        measure(kafka.bootstrap_servers, TOPIC, options.records, folder, stream)
        manifests = []
        with Ledger.open(stream.ledger) as ledger:
            context = StreamContext(stream, ledger)
            for waiting in ledger.blocks.unclaimed(stream.name):
                while ledger.now_ms() < waiting.batch_time_ms:
                    time.sleep(0.1)
                manifests.append(Manifest.load(allocate(context, waiting.batch_time_ms).batch.manifest_uri))
        spark = (
            SparkSession.builder.master(f"local[{CORES}]")
            .config("spark.jars.packages", f"org.apache.spark:spark-sql-kafka-0-10_2.13:{pyspark.__version__}")
            .config("spark.ui.enabled", "false")
            .getOrCreate()
        )
        kafka_source = (
            spark.read.format("kafka")
            .option("kafka.bootstrap.servers", kafka.bootstrap_servers)
            .option("subscribe", TOPIC)
            .option("includeHeaders", "true")
        )
        for _ in range(options.rounds):
            blocks = LogBlocks.of(manifests, "records")
            rounds.append(
                (
                    seconds(lambda blocks=blocks: blocks.frame(spark, tasks=CORES), options.records),  # type: ignore[misc]
                    seconds(kafka_source.load, options.records),
                )
            )
        spark.stop()
    mine, other = (tuple(options.records / each[side] for each in rounds[1:]) for side in (0, 1))
    name = "scan of the log into Spark"
    print_measures([Measure(name, "records/s", mine, "Spark's Kafka source", other)], as_json=options.json)


if __name__ == "__main__":
    main()
