"""How fast JSON records of a log become columns, beside Spark's own `from_json`.

    python -m benchmarks.json_decoding [--records 1000000] [--rounds 3] [--json]

Writes 190-byte records of eight fields into a log, and reads them in a local Spark with two tasks: decoded where the
blocks are read (as a batch does), and as bytes that `from_json` parses in the JVM, with and without the check that a
record is only one object. Every field of every record is written to Spark's "noop". The processor time is that of
all processes of this one.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
from benchmarks.measures import Measure, print_measures
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from tests.support.records import make_block

from headrace.blocks import ReceiverId
from headrace.spark.records.decoding import RecordDecoding, decode_input
from headrace.spark.records.wal_source import ListedBlock, LogBlocks
from headrace.spark.sessions import local_session
from headrace.stream import JsonDecoder, KafkaInput
from headrace.wal.storage import open_storage
from headrace.wal.writer import WriteAheadLogWriter

FIELDS = "id BIGINT, user STRING, item STRING, price DOUBLE, pieces INT, paid BOOLEAN, at TIMESTAMP, note STRING"
SOURCE = KafkaInput(bootstrap_servers="localhost:9092", topics="t", value_decoder=JsonDecoder(fields=FIELDS))
BLOCK = 20_000


def value(number: int) -> bytes:
    """A record of about 190 bytes."""
    return (
        b'{"id":%d,"user":"user-%d","item":"item-%d","price":%d.%02d,"pieces":%d,"paid":true,'
        b'"at":"2026-01-02T03:04:05.%06dZ","note":"%b"}'
        % (*(number, number % 997, number % 31, number % 89, number % 100, number % 7, number % 10**6), b"n" * 48)
    )


def write_log(folder: str, records: int) -> LogBlocks:
    log = open_storage(folder)
    writer = WriteAheadLogWriter(log, "", ReceiverId("bench", "records", 0), 1)
    blocks = []
    for first in range(0, records, BLOCK):
        count = min(BLOCK, records - first)
        batch, ranges = make_block([value(first + each) for each in range(count)], from_offset=first)
        frame = writer.write(batch, ranges, cut_time_ms=0, last_accepted_sequence=None)
        blocks.append((log.url, ListedBlock(frame.handle, count, frame.payload_bytes)))
    return LogBlocks(tuple(blocks))


def by_headrace(spark: SparkSession, blocks: LogBlocks) -> DataFrame:
    def read(*, decoding: RecordDecoding | None = None) -> DataFrame:
        return blocks.frame(spark, 2, decoding)

    return decode_input(spark, SOURCE, read, folder_url="").decoded.select("offset", "value.*")


def by_from_json(spark: SparkSession, blocks: LogBlocks, *, check: bool) -> DataFrame:
    """As decode_input did until it decoded by itself: an observation keeps Spark from parsing for each field."""
    text = F.try_validate_utf8(F.col("value").cast("string"))
    options = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": "_corrupt"}
    parsed = F.from_json(text, f"{FIELDS}, _corrupt STRING", options)
    rows = blocks.frame(spark, 2).withColumn("parsed", parsed)
    failed = F.col("parsed").isNull() | F.col("parsed._corrupt").isNotNull()
    rows = rows.withColumn("failed", failed | more_than_one(text) if check else failed)
    rows = rows.observe("counts", F.count_if("failed").alias("failed")).where("NOT failed")
    return rows.select("offset", F.col("parsed").dropFields("_corrupt").alias("value")).select("offset", "value.*")


def more_than_one(text: Column) -> Column:
    ends_at_once = F.octet_length(F.substring_index(text, "}", 1)) + 1 == F.octet_length(text)
    values = F.size(F.from_json(F.concat(F.lit("["), text, F.lit("]")), "ARRAY<STRUCT<_corrupt: STRING>>"))
    return F.when(ends_at_once, F.lit(False)).otherwise(F.coalesce(values, F.lit(0)) != 1)


def measured(make: Callable[[], DataFrame]) -> tuple[float, float]:
    """The seconds, and the seconds of processor time of all processes of this one."""
    began, before = time.monotonic(), processor_seconds()
    make().write.format("noop").mode("overwrite").save()
    return time.monotonic() - began, processor_seconds() - before


def processor_seconds() -> float:
    total = 0.0
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        times = process.cpu_times()
        total += times.user + times.system
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    figures: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder, local_session() as spark:
        blocks = write_log(f"file://{Path(folder) / 'log'}", options.records)
        ways: dict[str, Callable[[], DataFrame]] = {
            "headrace": partial(by_headrace, spark, blocks),
            "from_json": partial(by_from_json, spark, blocks, check=False),
            "from_json, checked": partial(by_from_json, spark, blocks, check=True),
        }
        for make in ways.values():
            assert make().count() == options.records
        for number in range(options.rounds):
            for name, make in ways.items():
                seconds, processor = measured(make)
                figures.setdefault(name, []).append((options.records / seconds, processor * 1e6 / options.records))
                print(f"{number}: {name} {seconds:.2f} s, processor {processor:.2f} s", file=sys.stderr)
    mine = figures.pop("headrace")
    measures = []
    for name, others in figures.items():
        rates = (tuple(each[0] for each in mine), name, tuple(each[0] for each in others))
        times = (tuple(each[1] for each in mine), name, tuple(each[1] for each in others))
        measures += [
            Measure("decode JSON records", "records/s", *rates),
            Measure("decode JSON records", "CPU s per million records", *times),
        ]
    print_measures(measures, as_json=options.json)


if __name__ == "__main__":
    main()
