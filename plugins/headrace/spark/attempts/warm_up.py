"""The first jobs of a receiver job's application, so that its batches find loaded classes and imported modules.

The functions run in Spark's Python workers, which import this module for them: it imports neither the ledger nor
Airflow. Each worker of the application would take two seconds of CPU for the ledger, and keep it in memory.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

from headrace.errors import HeadraceError
from headrace.processes import freeze_imports
from headrace.spark.connect_sessions import remote_session
from headrace.spark.sessions import is_local_master
from headrace.spark.versions import current_versions

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from headrace.stream import Stream

logger = logging.getLogger(__name__)

# As in Spark Streaming's dummy job, which ensures that executors are up before receivers are placed.
_WARM_UP_TASKS = 50


class ExecutorVersionError(HeadraceError):
    """An executor has other versions than the driver, or lacks a library that headrace needs."""


def warm_up(spark: SparkSession) -> None:
    """Run a small job on every executor and check the versions installed there; raises ExecutorVersionError."""
    spark_context = spark.sparkContext
    tasks = 2 * spark_context.defaultParallelism if is_local_master(str(spark_context.master)) else _WARM_UP_TASKS
    ours = current_versions()
    for host, theirs, problem in set(spark_context.parallelize(range(tasks), tasks).map(_executor_versions).collect()):
        if problem or dict(theirs) != ours:
            raise ExecutorVersionError(
                f"The executor on {host} does not fit the driver: {problem or dict(theirs)} there, {ours} here.",
                remedy="Install the same Python, pyspark and headrace's requirements there, and set PYSPARK_PYTHON.",
            )


def _executor_versions(_: int) -> tuple[str, tuple[tuple[str, str], ...], str]:
    host = socket.gethostname()
    try:
        import confluent_kafka  # noqa: F401 - is it there?
        import pyarrow  # noqa: F401 - is it there?
    except ImportError as error:
        return host, (), str(error)
    # A receiver alone needs it, and it takes as long to import as all else here.
    if find_spec("sqlalchemy") is None:
        return host, (), "No module named 'sqlalchemy'"
    return host, tuple(sorted(current_versions().items())), ""


def warm_up_connect(url: str, token: str, slots: int, stream: Stream) -> threading.Thread:
    """Run what a batch runs over Spark Connect, in the background: the first such query takes 7 s, later ones 0.4 s.

    Afterwards the classes are loaded, and the workers have imported what they need. A failure is only logged.
    """
    transforms = any(stream.transform_of(output) for output in stream.outputs)

    def warm_up() -> None:
        try:
            spark = remote_session(url, token)
            try:
                numbers = spark.range(0, slots, 1, slots)
                numbers.mapInArrow(_import_for_batches, "id LONG").toArrow()
                if transforms:
                    _make_documents(numbers)
            finally:
                spark.stop()
        except Exception as error:
            logger.info("the Spark Connect server was not warmed up: %s", error)

    thread = threading.Thread(target=warm_up, name="headrace-warm-up", daemon=True)
    thread.start()
    return thread


def _make_documents(numbers: DataFrame) -> None:
    """Decode JSON values, filter them and make documents of them, as a batch with a transform does."""
    decoded = numbers.mapInArrow(_decoded_values, "value STRUCT<a: STRING, b: BIGINT, c: DOUBLE>")
    documents = decoded.where("value.b > 0").selectExpr("to_json(struct(value.*)) AS document")
    documents.mapInArrow(_as_they_are, "document STRING").toArrow()


def _import_for_batches(rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    import headrace.spark.outputs.elasticsearch_sink
    import headrace.spark.records.decoding
    import headrace.spark.records.json_objects
    import headrace.spark.records.wal_source  # noqa: F401 - a worker keeps what it has imported

    freeze_imports()
    yield from rows
    # So that no worker is free to take a second task before each slot has one.
    time.sleep(0.5)


def _decoded_values(rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    from headrace.spark.records.json_objects import JsonObjects

    objects = JsonObjects(pa.struct([("a", pa.string()), ("b", pa.int64()), ("c", pa.float64())]))
    for batch in rows:
        values, _ = objects.decode(pa.array([b'{"a": "x", "b": 1, "c": 0.5}'] * batch.num_rows, pa.binary()))
        yield pa.record_batch([values], ["value"])


def _as_they_are(rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield from rows
