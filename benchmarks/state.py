"""What keyed state costs: a window kept by adding and subtracting against reading it again, and the lineage's cut.

    python -m benchmarks.state window  --window 30 --records 100000 --keys 10000 --batches 8 [--json]
    python -m benchmarks.state lineage --keys 100000 --changed 1000 --batches 60 [--snapshot-every 10] [--json]

``window`` writes a log of batches and counts the records by key over the last ``--window`` of them, both ways, at every
batch: reading all of them, and a state that adds the batch that came and subtracts the one that left. The first batches
warm Spark up and do not count. ``lineage`` updates a table again and again and tells what the first ten batches and the
last ten took: seconds, files and bytes to read. Spark runs in this process, with local[2].
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from benchmarks.measures import bench_folder
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from headrace.batch.manifest import Manifest, ManifestBlock
from headrace.blocks import OffsetRange, ReceiverId, TopicPartition
from headrace.ledger.batches.tables import BatchOrigin
from headrace.spark.outputs.writer import WrittenBatch
from headrace.spark.records.batch_frames import read_inputs
from headrace.spark.records.transforms import BatchContext
from headrace.spark.sessions import classic_session
from headrace.spark.state.updating import add_and_subtract, state_frames, update_state
from headrace.spark.state.version import StateStore
from headrace.stream import ConsoleOutput, KafkaInput, State, Stream, Utf8Decoder
from headrace.wal.frame import RECORD_SCHEMA
from headrace.wal.storage import open_storage
from headrace.wal.writer import WriteAheadLogWriter

INTERVAL_MS = 10_000
FIRST_MS = 1_700_000_000_000
BLOCKS_PER_BATCH = 5
WARM_UP = 3


def counted(words: DataFrame) -> DataFrame:
    return words.groupBy(F.split_part("value", F.lit(" "), F.lit(1)).alias("word")).agg(F.count("*").alias("count"))


def windowed(words: DataFrame, leaving: DataFrame, state: DataFrame) -> DataFrame:
    return add_and_subtract(counted(words), counted(leaving), state, keys="word", values="count")


def running(words: DataFrame, state: DataFrame) -> DataFrame:
    before = state.withColumnRenamed("count", "before")
    added = counted(words).join(before, "word", "left")
    return added.select("word", (F.col("count") + F.coalesce("before", F.lit(0))).alias("count"))


def stream_in(folder: Path, **state: Any) -> Stream:
    return Stream(
        name="bench",
        inputs=KafkaInput(id="words", bootstrap_servers="127.0.0.1:1", topics="words", value_decoder=Utf8Decoder()),
        outputs=ConsoleOutput(),
        batch_interval="10 s",
        storage=str(folder / "storage"),
        ledger=f"sqlite:///{folder}/ledger.db",
        state=State(fields="word STRING, count BIGINT", keys="word", **state),
    )


def written_batch(stream: Stream, batch: int) -> WrittenBatch:
    time_ms = FIRST_MS + batch * INTERVAL_MS
    context = BatchContext.of(stream.name, time_ms, INTERVAL_MS, 1)
    return WrittenBatch(
        stream=stream,
        context=context,
        batch_time_ms=time_ms,
        attempt=1,
        manifest_uri="",
        from_kafka=False,
        target="",
        out=sys.stdout,
        progress=lambda _: None,
    )


class Log:
    """Batches of random words in a log, with their manifests."""

    def __init__(self, stream: Stream, records: int, keys: int, record_bytes: int) -> None:
        self._stream = stream
        self._storage = open_storage(stream.folder_url)
        self._writer = WriteAheadLogWriter(self._storage, "log", ReceiverId(stream.name, "words", 0), 1)
        self._records = records
        self._random = np.random.default_rng(4)
        filling = self._random.bytes(record_bytes).hex().encode()
        self._values = pa.array([(b"word-%d " % key + filling)[:record_bytes] for key in range(keys)], pa.binary())
        self._offset = 0

    def write(self, batch: int) -> BatchOrigin:
        blocks = tuple(self._block(self._records // BLOCKS_PER_BATCH) for _ in range(BLOCKS_PER_BATCH))
        time_ms = FIRST_MS + batch * INTERVAL_MS
        manifest = Manifest(self._stream.name, time_ms, INTERVAL_MS, {"words": blocks}, self._stream.folder_url)
        manifest.write(self._storage)
        return BatchOrigin(time_ms, manifest.uri, "", "log")

    def _block(self, count: int) -> ManifestBlock:
        columns = [
            pa.nulls(count, pa.binary()),
            self._values.take(pa.array(self._random.integers(0, len(self._values), count))),
            pa.array(["words"] * count, pa.string()),
            pa.array([0] * count, pa.int32()),
            pa.array(range(self._offset, self._offset + count), pa.int64()),
            pa.array([FIRST_MS] * count, pa.int64()).cast(RECORD_SCHEMA.field("timestamp").type),
            pa.array([0] * count, pa.int8()),
            pa.nulls(count, RECORD_SCHEMA.field("headers").type),
            pa.array([1] * count, pa.int32()),
        ]
        records = pa.RecordBatch.from_arrays(columns, schema=RECORD_SCHEMA)
        ranges = (OffsetRange(TopicPartition("words", "id", 0), self._offset, self._offset + count, count),)
        accepted = self._writer.next_sequence - 1 if self._writer.next_sequence else None
        written = self._writer.write(records, ranges, cut_time_ms=0, last_accepted_sequence=accepted)
        self._offset += count
        return ManifestBlock(written.handle, count, written.payload_bytes, ranges)


def timed(work: Callable[[], Any]) -> float:
    started = time.monotonic()
    work()
    return round(time.monotonic() - started, 3)


def use(frame: DataFrame) -> None:
    frame.write.format("noop").mode("overwrite").save()


def windows(spark: SparkSession, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    stream = stream_in(folder, update="__main__:windowed", window=f"{options.window * 10} s")
    log = Log(stream, options.records, options.keys, options.record_bytes)
    origins = [log.write(batch) for batch in range(options.window)]

    def words(chosen: list[BatchOrigin]) -> DataFrame:
        return read_inputs(spark, stream, chosen)["words"].decoded

    def fill() -> None:
        # The window's first batches, as one: the state has what the window holds.
        update_state(spark, stream, {"words": words(origins)}, written_batch(stream, options.window - 1))

    def add_and_subtract_one(batch: int) -> None:
        came, left = {"words": words([origins[batch]])}, {"words": words([origins[batch - options.window]])}
        update_state(spark, stream, came, written_batch(stream, batch), leaving=left)
        use(state_frames(spark, stream, FIRST_MS + batch * INTERVAL_MS).state)

    fill()
    again, incremental = [], []
    for batch in range(options.window, options.window + options.batches + WARM_UP):
        origins.append(log.write(batch))
        window = origins[batch - options.window + 1 : batch + 1]
        again.append(timed(lambda window=window: use(counted(words(window)))))  # type: ignore[misc]
        incremental.append(timed(lambda batch=batch: add_and_subtract_one(batch)))  # type: ignore[misc]
    whole = {row["word"]: row["count"] for row in counted(words(window)).collect()}
    kept = state_frames(spark, stream, FIRST_MS + batch * INTERVAL_MS).state.collect()
    assert {row["word"]: row["count"] for row in kept} == whole, "the two ways disagree"
    return {
        "read_again_seconds": statistics.median(again[WARM_UP:]),
        "add_and_subtract_seconds": statistics.median(incremental[WARM_UP:]),
        "all_read_again": again,
        "all_add_and_subtract": incremental,
    }


def lineage(spark: SparkSession, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    stream = stream_in(folder, update="__main__:running", returns="changes", snapshot_every=options.snapshot_every)
    store = StateStore.of(stream)

    def update(batch: int, first: int, count: int) -> dict[str, Any]:
        words = spark.range(first, first + count).select(F.concat(F.lit("word-"), "id").alias("value"))
        seconds = timed(lambda: update_state(spark, stream, {"words": words}, written_batch(stream, batch)))
        version = store.version_of(FIRST_MS + batch * INTERVAL_MS)
        return {
            "seconds": seconds,
            "files": len(version.table),
            "bytes": sum(file.size for file in version.table),
            "stored_files": len(store.storage.paths()),
        }

    update(0, 0, options.keys)
    spread = options.keys - options.changed
    costs = [update(batch, batch * 7919 % spread, options.changed) for batch in range(1, options.batches + 1)]

    def of(some: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "median_seconds": statistics.median(cost["seconds"] for cost in some),
            **{f"most_{name}": max(cost[name] for cost in some) for name in ("files", "bytes", "stored_files")},
        }

    # A whole turn from one snapshot to the next; the first also warms Spark up.
    turn = options.snapshot_every + 1
    return {"second_turn": of(costs[turn : 2 * turn]), "last_turn": of(costs[-turn:])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["window", "lineage"])
    parser.add_argument("--window", type=int, default=30, help="batches in the window")
    parser.add_argument("--records", type=int, default=100_000, help="of a batch")
    parser.add_argument("--record-bytes", type=int, default=190)
    parser.add_argument("--keys", type=int, default=10_000)
    parser.add_argument("--changed", type=int, default=1_000, help="keys that a batch changes")
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--snapshot-every", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    conf = {"spark.ui.enabled": "false", "spark.log.level": "ERROR"}
    spark = classic_session("benchmark", master="local[2]", conf=conf)
    try:
        with bench_folder() as folder:
            result = (windows if options.what == "window" else lineage)(spark, folder, options)
    finally:
        spark.stop()
    if options.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name}: {value}")


if __name__ == "__main__":
    main()
